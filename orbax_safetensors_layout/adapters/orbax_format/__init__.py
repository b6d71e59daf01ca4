"""Reads and writes checkpoints in Orbax's own format."""
