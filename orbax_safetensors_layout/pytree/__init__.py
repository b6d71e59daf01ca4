"""Trees as data: abstract trees, saved trees, key paths and PRNG keys."""
