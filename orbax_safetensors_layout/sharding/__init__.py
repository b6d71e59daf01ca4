"""Who holds what: shardings, device grids and sharding rules as boxes of arrays."""
