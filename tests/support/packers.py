"""Modules of libraries that quantise, without the packages around them and what these import."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Mapping

import pytest


@contextlib.contextmanager
def bare_packages(name: str, packages: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
    """Packages below `name` whose own code is not run; instead they have the given names.

    Skips the test where the library is not installed. All its modules are forgotten at the end.
    """
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    for package, names in {"": {}, **packages}.items():
        parts = package.split(".") if package else []
        module = types.ModuleType(".".join([name, *parts]))
        module.__path__ = ["/".join([*found.submodule_search_locations, *parts])]
        module.__dict__.update(names)
        sys.modules[module.__name__] = module
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module_name in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[module_name]
