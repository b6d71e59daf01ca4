"""Libraries that only some test environments have."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def need(module: str) -> Any:
    """The module; where it is missing the test is skipped, or fails if it was asked for."""
    if os.environ.get("OSL_TRANSFORMERS") == "1":
        return importlib.import_module(module)
    return pytest.importorskip(
        module, reason=f"{module} is not installed: OSL_TRANSFORMERS=1 python3 .ci/do.py test"
    )
