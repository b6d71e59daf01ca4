"""Which tensors a checkpoint holds, and where: files, headers, index and pieces as one catalog."""
