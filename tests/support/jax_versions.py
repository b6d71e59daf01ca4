"""Names that versions of JAX keep in different places."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

import jax


def enable_x64(on: bool) -> AbstractContextManager[None]:
    """Return a context in which this thread has 64-bit types, or has none."""
    home = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return home.enable_x64(on)
