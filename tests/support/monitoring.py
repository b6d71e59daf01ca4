"""Reports of the package to `jax.monitoring`."""

from __future__ import annotations

import jax


def reported(event: str) -> list[float]:
    """Return a list that gets each value from now on of an event whose name ends so."""
    values: list[float] = []
    jax.monitoring.register_scalar_listener(
        lambda name, value, **_: values.append(value) if name.endswith(event) else None
    )
    return values
