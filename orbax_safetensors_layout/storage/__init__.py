"""Where bytes live: one small protocol, one module per kind of place."""
