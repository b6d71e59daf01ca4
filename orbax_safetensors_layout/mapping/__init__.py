"""Names and shapes, file side and model side, as data."""

from __future__ import annotations

import importlib


def __getattr__(name: str) -> object:
    if name == "families":  # imported when it is asked for
        return importlib.import_module(f"{__name__}.families")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
