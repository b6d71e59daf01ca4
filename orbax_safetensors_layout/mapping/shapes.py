"""The shape and dtype of every tensor on one side of a mapping, by name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from orbax_safetensors_layout.geometry import Box

from .names import NameTree


class TensorSpec(NamedTuple):
    """Shape, and numpy or ml_dtypes dtype, of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Name to shape and dtype."""


class TensorSpecs(Mapping[str, TensorSpec]):
    """Shapes and dtypes by name, and a tree of the names for patterns.

    `names` are all, also of tensors without shape and dtype. `pieces` has for tensors that are
    stored in pieces their boxes, each with a name for it.
    """

    def __init__(
        self,
        shapes: Shapes,
        names: Iterable[str] | None = None,
        pieces: Mapping[str, Sequence[tuple[Box, str]]] | None = None,
    ) -> None:
        self.pieces = pieces or {}
        self._specs = {
            name: TensorSpec(tuple(shape), np.dtype(dtype))
            for name, (shape, dtype) in shapes.items()
        }
        self._names = self._specs.keys() if names is None else dict.fromkeys(names).keys()

    @classmethod
    def of(cls, shapes: Shapes) -> TensorSpecs:
        return shapes if isinstance(shapes, TensorSpecs) else cls(shapes)

    def known(self) -> Iterable[tuple[str, TensorSpec]]:
        return self._specs.items()

    @functools.cached_property
    def tree(self) -> NameTree:
        return NameTree(self._names)

    def __getitem__(self, name: str) -> TensorSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names
