"""Weights plus a product of two small matrices, computed on the shard that a process holds.

The product is summed in float64 and rounded to float32, so that it does not depend on how the
weight is divided; the sum with the weight is in float32, and rounded once to the weight's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from orbax_safetensors_layout.geometry import Box

_CHUNK_ELEMENTS = 1 << 17  # bounds the values in float64 and float32 besides the result


class Factors(Protocol):
    """Small tensors of another checkpoint, by name. Called from many threads."""

    def read(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, slots=True)
class LowRank:
    """A `Decoder`: `W + scale * B A`, for W [out, in, ...], A [rank, in, ...] and B [out, rank].

    Without an A, B [out] is added to a bias.
    """

    factors: Factors
    a: str | None
    b: str
    scale: float
    dtype: np.dtype[Any]  # the weight's
    shape: tuple[int, ...]  # of the weight
    transposed: bool = False  # W is [in, out]
    magnitude: str | None = None  # DoRA: the norms of the result's rows, [out]
    experts: int = 0  # if any: W [expert, ...], A [(expert rank), in], B [out, (rank expert)]
    expert: int | None = None  # W is that of this one alone,
    first: int = 0  # and its first output is this one
    free = 0

    def widen(self, box: Box) -> Box:
        """Return all of the inputs of the outputs of a box, of which DoRA takes the norm."""
        if self.magnitude is None:
            return box
        for axis in [0] if self.transposed else range(1, len(self.shape)):
            box = box.along(axis, 0, self.shape[axis])
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        return (box,)

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):  # values may be infinite, or none
            return self._decoded(box, *inputs)

    def _decoded(self, box: Box, base: np.ndarray) -> np.ndarray:
        left, right = self._matrices()
        out = np.empty(box.shape, np.float32 if self.magnitude else self.dtype)
        if left.ndim == 3:
            inner = Box(box.start[1:], box.stop[1:])
            for place, expert in enumerate(range(box.start[0], box.stop[0])):
                self._add(base[place], left[expert], right[expert], inner, out[place])
        else:
            self._add(base, left, right, box, out)
        return self._with_norms(box, out) if self.magnitude else out

    def _matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors of the change, [rows, rank] and [rank, ...], or of each expert."""
        b = self.factors.read(self.b)
        a = np.ones(1, np.float32) if self.a is None else self.factors.read(self.a)
        if not self.experts:
            b = b.reshape(len(b), -1)
            return (a.T, b.T) if self.transposed else (b, a)
        a = a.reshape(self.experts, -1, a.shape[-1])
        b = b.reshape(len(b), -1, self.experts).transpose(2, 0, 1)
        if self.expert is not None:
            a, b = a[self.expert], b[self.expert, self.first :]
        return (a.swapaxes(-1, -2), b.swapaxes(-1, -2)) if self.transposed else (b, a)

    def _add(
        self, base: np.ndarray, left: np.ndarray, right: np.ndarray, box: Box, out: np.ndarray
    ) -> None:
        columns = right[(slice(None), *box.slices[1:])[: right.ndim]].astype(np.float64)
        count, first = len(out), box.start[0]
        rows = max(1, _CHUNK_ELEMENTS * count // max(1, out.size))
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            change = np.tensordot(left[first + start : first + stop].astype(np.float64), columns, 1)
            values = base[start:stop].astype(np.float32)
            values += (change * self.scale).astype(np.float32)
            out[start:stop] = values.astype(self.dtype) if out.dtype == self.dtype else values

    def _with_norms(self, box: Box, values: np.ndarray) -> np.ndarray:
        axis = 1 if self.transposed else 0
        others = tuple(n for n in range(values.ndim) if n != axis)
        squares = np.square(values, dtype=np.float64).sum(others)
        lengths = self.factors.read(self.magnitude or "").reshape(-1).astype(np.float32)
        factor = lengths[box.slices[axis]] / np.sqrt(squares).astype(np.float32)
        values *= np.expand_dims(factor, others)
        return values.astype(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacement:
    """A `Decoder` of a tensor of the other checkpoint, in place of those of the first."""

    factors: Factors
    name: str
    dtype: np.dtype[Any]
    ranks: tuple[int, ...] = ()  # of what it replaces, which is not read
    free = 0

    def widen(self, box: Box) -> Box:
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        return tuple(Box((0,) * rank, (0,) * rank) for rank in self.ranks)

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        return self.factors.read(self.name)[box.slices].astype(self.dtype)
