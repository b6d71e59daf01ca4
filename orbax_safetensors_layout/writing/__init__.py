"""Executes write plans: host copies of shards into the parts of files, and their commit."""
