"""Two versions of a small checkpoint, and whether a tree is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

OLD = {"a": np.arange(10.0), "b": np.ones(7), "c": np.zeros(3), "step": 1}
NEW = {"a": np.arange(10.0) + 1, "b": np.ones(7) + 1, "c": np.zeros(3) + 1, "step": 2}


def trees_equal(tree: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return set(tree) == set(other) and all(np.array_equal(tree[key], other[key]) for key in tree)
