"""Expressions over tensors that users write: selections, joins, index moves, value operations."""
