"""What is in the files: headers, indices and catalogs, parsed once into types."""
