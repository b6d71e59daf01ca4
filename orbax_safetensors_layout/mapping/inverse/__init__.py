"""Inverse expressions: the tensors of files computed back from leaves."""
