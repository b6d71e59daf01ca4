"""Two checkpoints, bit by bit, in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.conversion import batches
from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import TensorSpec
from orbax_safetensors_layout.options import MIB, Progress, ReadOptions

from .checkpoint_arrays import BLOCKS_IN_BUDGET, ArrayBox, CheckpointArrays
from .report import Finding

_BLOCK_BYTES = 32 * MIB
_MOST_PLACES = 3


class Comparison(NamedTuple):
    """What a comparison has found.

    Attributes:
        differences: What differs, a line a tensor.
        tensors: How many were compared.
        nbytes: Their bytes.
    """

    differences: tuple[str, ...]
    tensors: int
    nbytes: int


def compare(
    here: CheckpointArrays,
    there: CheckpointArrays,
    *,
    options: ReadOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Compares two checkpoints bit by bit; their files may be cut in any way.

    Args:
        here: A checkpoint.
        there: Another.
        options: How much memory to take.
        progress: Told after each batch of blocks.

    Raises:
        FormatError: A file is malformed.
        StorageError: A read failed.
        SafetensorsLayoutError: A chunk is too large for the memory budget.
    """
    differences = [*_names(here, there), *_values(_texts(here, there), _texts(there, here))]
    alike = []
    for name, mine in here.arrays.items():
        theirs = there.arrays.get(name)
        if mine == theirs:
            alike.append(name)
        elif theirs is not None:
            differences.append(f"'{name}' is {_kind(mine)}, in the other {_kind(theirs)}")
    total = sum(_nbytes(here.arrays[name]) for name in alike)
    done = 0
    places: dict[str, list[str]] = {}
    for blocks in _batches(alike, [here, there], options):
        for name, place in _differing(blocks, here, there):
            places.setdefault(name, []).append(place)
        done += _held_bytes(blocks, here)
        if progress is not None:
            progress(Progress(done, total, blocks[-1].name))
    for name, found in places.items():
        more = f" and {len(found) - _MOST_PLACES} more blocks" if len(found) > _MOST_PLACES else ""
        differences.append(f"'{name}' differs: {'; '.join(found[:_MOST_PLACES])}{more}")
    return Comparison(tuple(differences), len(alike), total)


def check_readable(
    side: CheckpointArrays,
    *,
    options: ReadOptions,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Finding, ...]:
    """Reads every array of a checkpoint; returns what cannot be read.

    Args:
        side: The checkpoint.
        options: How much memory to take.
        progress: Told after each batch of blocks.

    Raises:
        SafetensorsLayoutError: A chunk is too large for the memory budget.
    """
    findings: list[Finding] = []
    total = sum(map(_nbytes, side.arrays.values()))
    done = 0
    for blocks in _batches([*side.arrays], [side], options):
        findings += _unreadable(blocks, side)
        done += _held_bytes(blocks, side)
        if progress is not None:
            progress(Progress(done, total, blocks[-1].name))
    return tuple(findings)


def _unreadable(blocks: Sequence[ArrayBox], side: CheckpointArrays) -> list[Finding]:
    """What cannot be read of some blocks: together, and one by one where that fails."""
    try:
        side.read(blocks)
    except StorageError as error:
        if len(blocks) == 1:
            return [Finding("chunk", str(error))]
        return [finding for block in blocks for finding in _unreadable([block], side)]
    return []


def _batches(
    names: Sequence[str], sides: Sequence[CheckpointArrays], options: ReadOptions
) -> Iterator[list[ArrayBox]]:
    """Blocks of some arrays, as many at once as the memory budget allows.

    Args:
        names: The arrays.
        sides: Who has them, all alike; the one with the larger chunks says how they are cut.
        options: The memory budget.

    Raises:
        SafetensorsLayoutError: A chunk is too large for it.
    """
    most = max(1, options.memory_budget_bytes // BLOCKS_IN_BUDGET)
    blocks = _blocks(names, sides, most)
    return batches(
        blocks, lambda block: _held_bytes([block], sides[0]), min(most, 8 * _BLOCK_BYTES)
    )


def _blocks(
    names: Sequence[str], sides: Sequence[CheckpointArrays], most: int
) -> Iterator[ArrayBox]:
    for name in names:
        side = max(sides, key=lambda side: side.chunk_bytes(name))
        if side.chunk_bytes(name) > most:
            raise SafetensorsLayoutError(
                "a chunk is more than a quarter of the memory budget",
                file=side.path,
                tensor=name,
                expected=f"at most {most:,} bytes",
                found=f"{side.chunk_bytes(name):,} bytes",
                hint="Set memory_budget_bytes (--memory-budget-bytes) to "
                f"{side.chunk_bytes(name) * BLOCKS_IN_BUDGET:,} or more.",
            )
        for box in side.blocks(name, min(most, _BLOCK_BYTES)):
            yield ArrayBox(name, box)


def _differing(
    blocks: Sequence[ArrayBox], here: CheckpointArrays, there: CheckpointArrays
) -> Iterator[tuple[str, str]]:
    """Names of arrays of which blocks differ, and where; nothing stays in memory."""
    for block, ours, others in zip(blocks, here.read(blocks), there.read(blocks), strict=True):
        if not _same(ours, others):
            yield block.name, _place(block.box, ours, others)


def _held_bytes(blocks: Sequence[ArrayBox], side: CheckpointArrays) -> int:
    return sum(block.box.size * side.arrays[block.name].dtype.itemsize for block in blocks)


def _nbytes(array: TensorSpec) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _kind(array: TensorSpec) -> str:
    return f"{array.dtype.name} {list(array.shape)}"


def _names(here: CheckpointArrays, there: CheckpointArrays) -> Iterator[str]:
    for name in sorted(set(there.arrays) - set(here.arrays) - _scalars(there, here)):
        yield f"'{name}' is in the other checkpoint alone"
    for name in sorted(set(here.arrays) - set(there.arrays) - _scalars(here, there)):
        yield f"'{name}' is not in the other checkpoint"


def _scalars(one: CheckpointArrays, other: CheckpointArrays) -> set[str]:
    """Names of arrays without dimensions that are in the other checkpoint as numbers."""
    numbers = other.values or {}
    return {name for name, array in one.arrays.items() if not array.shape and name in numbers}


def _texts(one: CheckpointArrays, other: CheckpointArrays) -> Mapping[str, str] | None:
    """What is beside the arrays, and arrays that do so in the other checkpoint."""
    if one.values is None:
        return None
    scalars = [ArrayBox(name, Box((), ())) for name in sorted(_scalars(one, other))]
    read = zip(scalars, one.read(scalars) if scalars else (), strict=True)
    return {**one.values, **{block.name: repr(value.item()) for block, value in read}}


def _values(mine: Mapping[str, str] | None, theirs: Mapping[str, str] | None) -> Iterator[str]:
    """Differences of what was saved beside the arrays, where both say that."""
    if mine is None or theirs is None:
        return
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine:
            yield f"the value '{name}' is in the other checkpoint alone: {theirs[name]}"
        elif name not in theirs:
            yield f"the value '{name}' is {mine[name]}, and not in the other checkpoint"
        elif mine[name] != theirs[name]:
            yield f"the value '{name}' is {mine[name]}, in the other {theirs[name]}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _same(mine: np.ndarray, theirs: np.ndarray) -> bool:
    one, other = _bytes(mine), _bytes(theirs)
    steps = range(0, one.size, MIB)  # numpy makes a mask as large as what is compared
    return all(np.array_equal(one[at : at + MIB], other[at : at + MIB]) for at in steps)


def _place(box: Box, mine: np.ndarray, theirs: np.ndarray) -> str:
    """How many elements of a block differ, and the first."""
    shape = (mine.size, mine.dtype.itemsize)
    differs = (_bytes(mine).reshape(shape) != _bytes(theirs).reshape(shape)).any(1)
    first = np.unravel_index(int(differs.argmax()), mine.shape)
    index = [int(place) + start for place, start in zip(first, box.start, strict=True)]
    values = mine.reshape(-1)[differs.argmax()], theirs.reshape(-1)[differs.argmax()]
    return f"{int(differs.sum()):,} elements, the first at {index}: {values[0]} and {values[1]}"
