"""Executes read plans: byte ranges into host memory, host memory into `jax.Array`s."""
