"""Names and shapes, file side and model side, as data."""
