"""Plans made to happen: bytes into host buffers, host buffers onto devices."""
