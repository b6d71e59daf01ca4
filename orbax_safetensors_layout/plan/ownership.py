"""Assigns files to processes, and shards to one of their holders, from what all processes know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.geometry import Ints, Tile, tile
from orbax_safetensors_layout.sharding import GlobalShards

_SLACK = 1.1  # a process may own this much more than its even share to own files that it holds


class StoredTile(NamedTuple):
    """Boxes, by number in `GlobalShards.boxes`, that one process writes as one piece."""

    process: int
    tile: Tile


class PieceWriters:
    """Chooses the writer of each box of arrays in pieces, so that all processes write as much."""

    def __init__(self, processes: int, *, replicate_below_bytes: int = 0) -> None:
        self.load: Ints = np.zeros(processes, np.int64)
        self._replicate_below_bytes = replicate_below_bytes  # arrays that all holders write
        self._choices: dict[int, _Choices] = {}
        self._tiles: dict[tuple[int, int | None], tuple[StoredTile, ...]] = {}

    def choose(self, held: GlobalShards, itemsize: int) -> tuple[StoredTile, ...]:
        """Return the pieces of the next array; the same object for the same boxes and writers."""
        if id(held) not in self._choices:
            self._choices[id(held)] = _Choices.of(held, self.load.size)
        choices, number = self._choices[id(held)], None
        if choices.size * itemsize > self._replicate_below_bytes:
            number = choices.best(self.load, itemsize)
            self.load += choices.elements[number] * itemsize
        key = (id(held), number)
        if key not in self._tiles:
            self._tiles[key] = choices.tiles(number)
        return self._tiles[key]


class _Choices(NamedTuple):
    """Ways to choose one holder of each box: way `i` takes holder `i + box`."""

    held: GlobalShards  # kept alive, so that its id is not reused
    writers: Ints  # [ways, boxes] the process
    elements: Ints  # [ways, processes] the number of elements that each process would write
    size: int  # elements of the array

    @classmethod
    def of(cls, held: GlobalShards, processes: int) -> _Choices:
        ways = np.arange(max(map(len, held.holders), default=1))
        sizes = np.array([box.size for box in held.boxes], np.int64)
        writers = np.zeros((len(ways), len(held.boxes)), np.int64)
        for box, holders in enumerate(held.holders):
            writers[:, box] = np.array(holders)[(ways + box) % len(holders)]
        elements = np.zeros((len(ways), processes), np.int64)
        np.add.at(elements, (ways[:, None], writers), sizes)
        return cls(held, writers, elements, int(sizes.sum()))

    def best(self, load: Ints, itemsize: int) -> int:
        """Return the way that minimises the bytes of the process that writes most."""
        if self.writers.shape[1] == 1:  # one box: the holder that writes least so far
            return int(load[self.writers[:, 0]].argmin())
        return int((load + self.elements * itemsize).max(1).argmin())

    def tiles(self, number: int | None) -> tuple[StoredTile, ...]:
        """Return the pieces that a way makes, or, for None, all holders of each box."""
        boxes = self.held.boxes
        of_process: dict[int, list[int]] = {}
        for box, holders in enumerate(self.held.holders):
            for process in holders if number is None else [int(self.writers[number, box])]:
                of_process.setdefault(process, []).append(box)
        in_order = sorted(of_process.items())
        joined = [StoredTile(p, part) for p, numbers in in_order for part in tile(boxes, numbers)]
        if sum(box.size for box in {stored.tile.box for stored in joined}) == self.size:
            return tuple(joined)
        # Holders of different boxes join them differently, and the pieces would overlap.
        return tuple(StoredTile(p, Tile.alone(boxes[n], n)) for p, of in in_order for n in of)


def file_owners(sizes: Sequence[int], held: Ints, processes: int) -> tuple[int, ...]:
    """Choose writers of files, evenly, among large holders (`held` [files, processes], bytes)."""
    share = sum(sizes) / processes * _SLACK
    load: Ints = np.zeros(processes, np.int64)
    owners = [0] * len(sizes)
    for file in sorted(range(len(sizes)), key=lambda file: -sizes[file]):
        after = load + sizes[file]
        allowed = after <= max(share, int(after.min()))
        owners[file] = int(np.lexsort((np.arange(processes), load, -held[file], ~allowed))[0])
        load[owners[file]] = after[owners[file]]
    return tuple(owners)
