"""Reads the arrays of checkpoints in blocks: of one, whether it can be read; of two, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.adapters import open_reader
from orbax_safetensors_layout.catalog import CheckpointRef, added_prefixes
from orbax_safetensors_layout.conversion import (
    CHUNKS_IN_BUDGET,
    CheckpointReader,
    SafetensorsReader,
    SourceArray,
    arrays_of,
    check_chunks,
    chunk_bytes,
    rerooted,
    values_of,
)
from orbax_safetensors_layout.errors import MappingError, StorageError, listed
from orbax_safetensors_layout.format import unboxed_aliases
from orbax_safetensors_layout.geometry import Box, chunk_parts
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import MIB, OnProgress, Progress, ReadOptions
from orbax_safetensors_layout.runtime import batches

from .report import Finding, Report

_BLOCK_BYTES = 32 * MIB
_MOST_PREFIXES = 5  # that are noted


class _ArrayBox(NamedTuple):
    name: str  # the array's
    box: Box


class _Source:
    """A checkpoint that is compared, or the part of it at `subtree`."""

    def __init__(
        self, reader: CheckpointReader, options: ReadOptions, subtree: str | None = None
    ) -> None:
        tree = rerooted(reader.tree, subtree)
        self.reader = reader
        arrays, values = arrays_of(tree), values_of(tree)
        # The other checkpoint may have boxes where this one has none.
        unboxed = {name: alias for alias, name in unboxed_aliases([*arrays, *values]).items()}
        self.arrays = {unboxed.get(name, name): array for name, array in arrays.items()}
        self.values: Mapping[str, str] | None = None  # texts beside the arrays, if they are known
        if reader.is_recorded:
            self.values = {unboxed.get(name, name): repr(value) for name, value in values.items()}
        # The largest block, chunks included.
        self.most_bytes = max(1, options.memory_budget_bytes // CHUNKS_IN_BUDGET)

    def forget_keys(self) -> None:
        """Compares typed PRNG keys as the arrays that they are in files without a tree."""
        self.arrays = {
            name: dataclasses.replace(array, key_impl=None) for name, array in self.arrays.items()
        }

    def block_bytes(self, block: _ArrayBox) -> int:
        return block.box.size * self.arrays[block.name].dtype.itemsize

    def read(self, blocks: Sequence[_ArrayBox]) -> list[np.ndarray]:
        """Reads some boxes; decodes no more chunks at once than fit."""
        boxes = [(self.arrays[name], box) for name, box in blocks]
        decoded = sum(
            len(self._chunk_parts(array, box)) * chunk_bytes(self.reader, array)
            for array, box in boxes
        )
        if decoded <= self.most_bytes:
            return self.reader.read(boxes)
        return [self._read_in_parts(array, box) for array, box in boxes]

    def _chunk_parts(self, array: SourceArray, box: Box) -> list[Box]:
        chunk = self.reader.chunk(array)
        return [] if chunk is None else [*chunk_parts(box, chunk)]

    def _read_in_parts(self, array: SourceArray, box: Box) -> np.ndarray:
        values = np.empty(box.shape, array.dtype)
        size = chunk_bytes(self.reader, array)
        for parts in batches(self._chunk_parts(array, box), lambda _: size, self.most_bytes):
            pieces = self.reader.read([(array, part) for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                values[part.within(box).slices] = piece
        return values


def compare(
    report: Report,
    first: CheckpointRef,
    other: CheckpointRef,
    *,
    mapping: LeafMapping | None,
    subtree: str | None,
    options: ReadOptions,
    progress: OnProgress,
) -> Report:
    """Adds the differences of two checkpoints, as files or as trees, to the report of the first."""
    if mapping is not None and other.is_orbax:
        raise MappingError(
            "a mapping takes the tensors of a safetensors checkpoint",
            file=other.path,
            found="a checkpoint of Orbax",
            hint="Exchange the two: PATH is the model, and --against what it is made of.",
        )
    are_trees = first.is_orbax or other.is_orbax or subtree is not None

    def opened(ref: CheckpointRef, mapping: LeafMapping | None) -> CheckpointReader:
        if are_trees and mapping is None:
            return open_reader(ref, options)
        return SafetensorsReader(ref.path, options, mapping=mapping, is_flat=True)

    with (
        contextlib.closing(opened(first, None)) as ours,
        contextlib.closing(opened(other, mapping)) as theirs,
    ):
        here, there = _Source(ours, options, subtree), _Source(theirs, options)
        if mapping is not None:
            here.arrays = {n: array for n, array in here.arrays.items() if not mapping.drops(n)}
        if not are_trees and not (here.reader.is_recorded and there.reader.is_recorded):
            here.forget_keys()
            there.forget_keys()
        names = [
            name
            for name, array in here.arrays.items()
            if name in there.arrays and _kind(array) == _kind(there.arrays[name])
        ]
        total = sum(here.arrays[name].nbytes for name in names)
        differences = [
            *_compare_trees(here, there),
            *_values(here, there),
            *_compare_values(names, here, there, total, progress),
        ]
        notes = [*_prefix_notes(here.arrays.keys(), there.arrays.keys(), subtree)]
    return dataclasses.replace(
        report,
        findings=(*report.findings, *(Finding("value", text) for text in differences), *notes),
        compared_tensors=len(names),
        compared_bytes=total,
    )


def check_readable(ref: CheckpointRef, options: ReadOptions, progress: OnProgress) -> Report:
    """Reads every array of a checkpoint that Orbax saved; reports what cannot be read."""
    broken: list[StorageError] = []
    with contextlib.closing(open_reader(ref, options, broken.append)) as reader:
        source = _Source(reader, options)
        findings = [Finding("array", str(error)) for error in broken]
        total = sum(array.nbytes for array in source.arrays.values())
        for blocks in _batches([*source.arrays], [source], total, progress):
            findings += _unreadable(blocks, source)
        return Report(ref.path, tuple(findings), tensors=len(source.arrays))


def _unreadable(blocks: Sequence[_ArrayBox], source: _Source) -> list[Finding]:
    """Reads blocks together, and one by one where that fails; returns what cannot be read."""
    try:
        source.read(blocks)
    except StorageError as error:
        if len(blocks) == 1:
            return [Finding("chunk", str(error))]
        return [finding for block in blocks for finding in _unreadable([block], source)]
    return []


def _compare_values(
    names: Sequence[str], here: _Source, there: _Source, total: int, progress: OnProgress
) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for blocks in _batches(names, [here, there], total, progress):
        for name, place in _differing(blocks, here, there):
            places.setdefault(name, []).append(place)
    for name, all_places in places.items():
        yield f"'{name}' differs: {listed(all_places, 3, '; ')}"


def _batches(
    names: Sequence[str], sources: Sequence[_Source], total: int, progress: OnProgress
) -> Iterator[list[_ArrayBox]]:
    """Yields blocks of arrays that all have, as many at once as the memory budget allows."""
    for source in sources:
        arrays = [source.arrays[name] for name in names]
        check_chunks(source.reader, arrays, CHUNKS_IN_BUDGET * source.most_bytes)
    most = min(sources[0].most_bytes, 8 * _BLOCK_BYTES)
    done = 0
    for blocks in batches(_blocks(names, sources), sources[0].block_bytes, most):
        yield blocks
        done += sum(map(sources[0].block_bytes, blocks))
        if progress is not None:
            progress(Progress(done, total, blocks[-1].name))


def _blocks(names: Sequence[str], sources: Sequence[_Source]) -> Iterator[_ArrayBox]:
    """Yields the blocks of arrays, cut by the chunks of the source with the larger ones."""
    most = min(sources[0].most_bytes, _BLOCK_BYTES)
    for name in names:
        source = max(sources, key=lambda source: chunk_bytes(source.reader, source.arrays[name]))
        for box in source.reader.blocks(source.arrays[name], most):
            yield _ArrayBox(name, box)


def _differing(
    blocks: Sequence[_ArrayBox], here: _Source, there: _Source
) -> Iterator[tuple[str, str]]:
    """Yields the arrays whose blocks differ, and where; keeps nothing in memory."""
    for block, ours, theirs in zip(blocks, here.read(blocks), there.read(blocks), strict=True):
        if not _same(ours, theirs):
            yield block.name, _place(block.box, ours, theirs)


def _kind(array: SourceArray) -> str:
    keys = "" if array.key_impl is None else f", data of PRNG keys ({array.key_impl})"
    return f"{array.dtype.name} {list(array.shape)}{keys}"


def _prefix_notes(ours: Set[str], theirs: Set[str], subtree: str | None) -> Iterator[Finding]:
    """Yields how to compare names that differ by a prefix of one checkpoint."""
    here, there = ours - theirs, theirs - ours
    for longer, shorter, first in ((here, there, ""), (there, here, "exchange the two, and ")):
        for prefix in added_prefixes(longer, shorter)[:_MOST_PREFIXES]:
            part = ".".join(filter(None, ("" if first else subtree, prefix[:-1])))
            text = f"names are the same but for {prefix!r}: {first}compare with subtree={part!r}"
            yield Finding("value", f"{text} (--subtree {part})", is_error=False)


def _compare_trees(here: _Source, there: _Source) -> Iterator[str]:
    for name in sorted(there.arrays.keys() - here.arrays.keys() - _scalars(there, here)):
        yield f"'{name}' is in the other checkpoint alone"
    for name in sorted(here.arrays.keys() - there.arrays.keys() - _scalars(here, there)):
        yield f"'{name}' is not in the other checkpoint"
    for name in (name for name in here.arrays if name in there.arrays):
        ours, theirs = _kind(here.arrays[name]), _kind(there.arrays[name])
        if ours != theirs:
            yield f"'{name}' is {ours}, in the other {theirs}"


def _scalars(source: _Source, other: _Source) -> set[str]:
    """Return the arrays without dimensions that are numbers in the other checkpoint."""
    numbers = other.values or {}
    return {name for name, array in source.arrays.items() if not array.shape and name in numbers}


def _texts(source: _Source, other: _Source) -> dict[str, str]:
    """Return values beside the arrays, and arrays that are such values in the other one."""
    scalars = [_ArrayBox(name, Box((), ())) for name in sorted(_scalars(source, other))]
    read = zip(scalars, source.read(scalars) if scalars else (), strict=True)
    return {**(source.values or {}), **{block.name: repr(value.item()) for block, value in read}}


def _values(here: _Source, there: _Source) -> Iterator[str]:
    """Yields the differences of values beside the arrays.

    Where one checkpoint records none, of those alone that are arrays in it.
    """
    ours, theirs = _texts(here, there), _texts(there, here)
    names = ours.keys() | theirs.keys()
    if here.values is None or there.values is None:
        names = _scalars(here, there) | _scalars(there, here)
    for name in sorted(names):
        if name not in ours:
            yield f"the value '{name}' is in the other checkpoint alone: {theirs[name]}"
        elif name not in theirs:
            yield f"the value '{name}' is {ours[name]}, and not in the other checkpoint"
        elif ours[name] != theirs[name]:
            yield f"the value '{name}' is {ours[name]}, in the other {theirs[name]}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    first, second = _bytes(ours), _bytes(theirs)
    steps = range(0, first.size, MIB)  # numpy makes a mask as large as what is compared
    return all(np.array_equal(first[at : at + MIB], second[at : at + MIB]) for at in steps)


def _place(box: Box, ours: np.ndarray, theirs: np.ndarray) -> str:
    """Return how many elements of a block differ, and the first."""
    shape = (ours.size, ours.dtype.itemsize)
    differs = (_bytes(ours).reshape(shape) != _bytes(theirs).reshape(shape)).any(1)
    first = int(differs.argmax())
    index = (np.array(np.unravel_index(first, ours.shape), int) + box.start).tolist()
    values = ours.reshape(-1)[first], theirs.reshape(-1)[first]
    return f"{int(differs.sum()):,} elements, the first at {index}: {values[0]} and {values[1]}"
