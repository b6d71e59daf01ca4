"""The shapes of a checkpoint's tensors, inferred from the leaves that are to be saved."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError

from ..shapes import TensorSpec
from .extents import Extent

LIKE = "save through mapping.like(path), with a checkpoint that has the names and shapes"
"""What can be done where leaves do not tell enough; for hints."""


@dataclasses.dataclass(slots=True)
class Inference:
    """What leaves have told so far.

    Attributes:
        leaf: The leaf that tells.
        dtype: Its dtype. A tensor takes that of the first leaf that tells of it.
    """

    leaf: str = ""
    dtype: np.dtype[Any] = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    _found: dict[str, tuple[tuple[Extent, ...], np.dtype[Any], str]] = dataclasses.field(
        default_factory=dict
    )

    def record(self, name: str, shape: tuple[Extent, ...]) -> None:
        """Adds what the leaf tells of one tensor.

        Raises:
            MappingError: Another leaf told something else.
        """
        before = self._found.get(name)
        if before is None:
            self._found[name] = (shape, self.dtype, self.leaf)
            return
        known, dtype, leaf = before
        joined = [a.join(b) for a, b in zip(known, shape, strict=False)]
        if len(known) != len(shape) or None in joined:
            raise MappingError(
                f"it makes {name!r} of shape {_text(shape)}, but leaf {leaf!r} makes it"
                f" {_text(known)}"
            )
        self._found[name] = (tuple(e for e in joined if e is not None), dtype, leaf)

    def facts(self) -> dict[str, TensorSpec]:
        """The tensors, as large as they have to be."""
        return {
            name: TensorSpec(tuple(extent.n for extent in shape), dtype)
            for name, (shape, dtype, _) in self._found.items()
        }


def _text(shape: tuple[Extent, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
