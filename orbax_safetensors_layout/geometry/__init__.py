"""Index arithmetic: boxes of an array and the byte runs they make in a file. No I/O, no JAX."""
