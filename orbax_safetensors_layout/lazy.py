"""Lazy exports: names of a package that are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_exports(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's `__getattr__` that imports submodules on first use of their names.

    `names` has for each submodule, as a relative name, those that the package takes from it,
    separated by spaces; none for the submodule itself.
    """
    module_of = {name: module for module, given in names.items() for name in given.split()}
    modules = {module.lstrip("."): module for module, given in names.items() if not given}

    def __getattr__(name: str) -> object:
        if name in modules:
            return importlib.import_module(modules[name], package)
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return __getattr__
