"""Mapped leaves as affine views of tensors: which elements a box of a leaf is made of."""
