"""Mappings on `jax.Array`s in memory. Its modules import JAX, and are imported on first use."""
