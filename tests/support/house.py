"""The floors of the package: which room may import which."""

# From the ground up: rooms (folders), and the modules at the top of the package. Those of one line
# may import each other, if without a circle.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(line.split())
    for line in (
        "lazy errors options geometry",
        "format runtime",
        "storage sharding",
        "catalog pytree",
        "mapping",
        "plan",
        "reading",
        "load writing",
        "save",
        "conversion lora",
        "adapters",
        "analysis convert",
        "cli",
        "__main__",
    )
)
