"""Reads of leaves: the boxes that a process needs of one, and the tensors that fill them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError, MismatchError, UnsupportedDtypeError
from orbax_safetensors_layout.format import DType, TensorEntry, short_repr
from orbax_safetensors_layout.geometry import (
    AffineView,
    Box,
    Gather,
    StridedRuns,
    cover,
    filled_boxes,
)
from orbax_safetensors_layout.mapping import FillPiece
from orbax_safetensors_layout.sharding import AddressableShards


class TensorPiece(NamedTuple):
    """One piece of a leaf."""

    entry: TensorEntry  # the tensor that it comes from
    box: Box  # the region of the leaf that it fills
    view: AffineView  # of the box's shape: from an index within the box to an element of the tensor
    # Where the slabs of one axis are, in no regular order; `view` is one, of offset 0 among them.
    gather: Gather | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PiecePattern:
    """The pieces of leaves, the same object for leaves that differ only in where tensors are."""

    parts: tuple[tuple[Box, AffineView], ...]  # box and view of each


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ComposedArray:
    """The boxes of an array that is composed of several reads, held until all are complete."""

    nbytes: int


class LeafRead(NamedTuple):
    """One leaf and the tensors it is read from."""

    name: str  # the leaf's name: the tensor's, where it is one
    shape: tuple[int, ...]
    stored: DType  # the dtype of all its tensors
    sources: tuple[TensorPiece, ...]  # their boxes cover each of `local`, each index once
    local: AddressableShards  # the boxes this process needs of it
    dtype: np.dtype  # the dtype that the leaf will have
    is_computed: bool = False  # whether its values are computed from the stored ones, beyond a cast
    fills: tuple[FillPiece, ...] = ()  # not read; with `sources` they cover each of `local`
    # Equal for the inputs of one composed block: their memory is held until all are complete.
    block: int | None = None
    into: ComposedArray | None = None  # the array that the block is a part of
    pattern: PiecePattern | None = None  # of `sources`, whose dtypes are then known to be `stored`

    @classmethod
    def plain(
        cls, name: str, entry: TensorEntry, local: AddressableShards, dtype: np.dtype
    ) -> LeafRead:
        """Return the read of a leaf that is one tensor as it is stored."""
        source = TensorPiece(entry, *_whole(entry.shape))
        return cls(name, entry.shape, entry.dtype, (source,), local, dtype)

    @property
    def uses_scratch(self) -> bool:
        """Whether it is read into other memory than that of the arrays."""
        return self.is_converted or self.block is not None

    @property
    def is_converted(self) -> bool:
        """Whether its values are other bytes than the stored ones."""
        return (
            self.is_computed
            or self.stored.packed
            or self.stored.one_a_byte
            or self.dtype != self.stored.numpy
            or bool(self.fills)
        )

    @property
    def needed_bytes(self) -> int:
        """Stored bytes of all its boxes."""
        return self.local.elements * self.stored.bits // 8

    @property
    def file(self) -> str | None:
        """The file that the leaf is in, the first of several: for errors."""
        return self.sources[0].entry.file if self.sources else None

    def check(self) -> None:
        """Checks that pieces of one dtype, of whole bytes, make the leaf, each index once."""
        if len(self.sources) == 1:
            entry, *part = self.sources[0]
            if entry.shape == self.shape and part == [*_whole(self.shape), None]:
                return
        self._check_dtypes()
        distinct = {(s.entry.shape, s.box.shape, s.view, id(s.gather)): s for s in self.sources}
        for source in distinct.values():
            if flaw := _flaw(source):
                file = source.entry.file
                message = f"a piece of the leaf is wrong: {flaw}"
                raise MismatchError(message, file=file, tensor=self.name)
        parts = [part.box for part in self.sources if part.gather is None]
        parts += [part.box for part in self.fills]
        parts += filled_boxes([(s.box, s.gather) for s in self.sources if s.gather is not None])
        for box in self.local.boxes:
            common = [box.intersect(part) for part in parts]
            if box.size and not cover([part for part in common if part is not None], box):
                raise MismatchError(
                    f"the {len(self.sources)} pieces of the leaf do not cover it, each index once",
                    tensor=self.name,
                    expected=f"boxes that tile {list(box.start)} to {list(box.stop)}",
                    found=short_repr([source.box for source in self.sources], 300),
                )

    def _check_dtypes(self) -> None:
        for entry in (source.entry for source in self.sources):
            if entry.dtype != self.stored:
                raise DtypeMismatchError(
                    f"tensors of several dtypes make one leaf: '{entry.name}' is not"
                    f" {self.stored.code} as the others",
                    file=entry.file,
                    tensor=self.name,
                    expected=self.stored.code,
                    found=entry.dtype.code,
                )
        if self.stored.packed:
            raise UnsupportedDtypeError(
                "the elements of the tensor share bytes, so it cannot be rearranged or be part"
                " of a larger leaf",
                file=self.file,
                tensor=self.name,
                expected="a dtype of whole bytes",
                found=self.stored.code,
                hint="Load the tensor by itself and rearrange the array.",
            )


def _flaw(source: TensorPiece) -> str | None:
    """Return why a piece cannot be read, if it cannot."""
    entry, box, view, gather = source
    furthest = 0
    if gather is not None:
        box, furthest = box.along(gather.axis, 0, 1), int(gather.offsets.max())
    if view.shape != box.shape or len(view.strides) != len(view.shape):
        return f"a view of shape {view.shape} cannot fill {box}"
    if 0 in view.shape:
        return None
    low, high = view.bounds
    if low < 0 or high + furthest > math.prod(entry.shape):
        return f"{view} leaves the tensor '{entry.name}' of shape {entry.shape}"
    try:
        StridedRuns.of(view, 1)
    except ValueError as error:
        return str(error)
    return None


@functools.lru_cache(1024)
def _whole(shape: tuple[int, ...]) -> tuple[Box, AffineView]:
    return Box.whole(shape), AffineView.row_major(shape)
