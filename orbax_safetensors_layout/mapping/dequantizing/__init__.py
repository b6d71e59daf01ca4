"""Published formats of quantised weights: what each one's tensors are called, and its decoder."""
