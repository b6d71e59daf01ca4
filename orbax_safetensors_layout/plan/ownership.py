"""Assigns files to processes, and shards to one of their holders; equal on every process.

All is decided from names, shapes and shardings, which all processes know, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import Tile, tile
from orbax_safetensors_layout.sharding import GlobalShards

_SLACK = 1.1  # a process may own this much more than its even share to own files that it holds


class StoredTile(NamedTuple):
    """Boxes, by number in `GlobalShards.boxes`, that one process writes as one piece."""

    process: int
    tile: Tile


class PieceWriters:
    """Chooses the writer of each box of arrays in pieces, so that all processes write as much.

    Arrays up to `replicate_below_bytes` are written by each of their holders.
    """

    def __init__(self, processes: int, *, replicate_below_bytes: int = 0) -> None:
        self.load: npt.NDArray[np.int64] = np.zeros(processes, np.int64)
        self._replicate_below_bytes = replicate_below_bytes
        # The values keep `held` alive, so that its id is not reused.
        self._choices: dict[int, tuple[GlobalShards, _Choices]] = {}
        self._tiles: dict[tuple[int, int], tuple[StoredTile, ...]] = {}

    def choose(self, held: GlobalShards, itemsize: int) -> tuple[StoredTile, ...]:
        """Return the pieces of the next array; the same object for the same boxes and writers."""
        if id(held) not in self._choices:
            self._choices[id(held)] = held, _Choices.of(held, self.load.size)
        _, choices = self._choices[id(held)]
        number = _EVERYONE
        if choices.size * itemsize > self._replicate_below_bytes:
            number = choices.best(self.load, itemsize)
            self.load += choices.elements[number] * itemsize
        key = (id(held), number)
        if key not in self._tiles:
            self._tiles[key] = _stored_tiles(held, choices, number)
        return self._tiles[key]


_EVERYONE = -1


class _Choices(NamedTuple):
    """Ways to choose one holder of each box: way `i` takes holder `i + box`."""

    writers: npt.NDArray[np.int64]  # [ways, boxes] the process
    # [ways, processes] the number of elements that each process would write.
    elements: npt.NDArray[np.int64]
    size: int  # elements of the array

    def best(self, load: npt.NDArray[np.int64], itemsize: int) -> int:
        """Return the way that minimises the bytes of the process that writes most."""
        if self.writers.shape[1] == 1:  # one box: the holder that writes least so far
            return int(load[self.writers[:, 0]].argmin())
        return int((load + self.elements * itemsize).max(1).argmin())

    @classmethod
    def of(cls, held: GlobalShards, processes: int) -> _Choices:
        ways = max(map(len, held.holders), default=1)
        sizes = np.array([box.size for box in held.boxes], np.int64)
        writers = np.array(
            [
                [holders[(way + box) % len(holders)] for box, holders in enumerate(held.holders)]
                for way in range(ways)
            ],
            np.int64,
        ).reshape(ways, len(held.boxes))
        elements = np.zeros((ways, processes), np.int64)
        for way in range(ways):
            np.add.at(elements[way], writers[way], sizes)
        return cls(writers, elements, int(sizes.sum()))


def _stored_tiles(held: GlobalShards, choices: _Choices, number: int) -> tuple[StoredTile, ...]:
    of_process: dict[int, list[int]] = {}
    for box, holders in enumerate(held.holders):
        writers = holders if number == _EVERYONE else (int(choices.writers[number, box]),)
        for process in writers:
            of_process.setdefault(process, []).append(box)
    joined = tuple(
        StoredTile(process, part._replace(members=tuple(boxes[i] for i in part.members)))
        for process, boxes in sorted(of_process.items())
        for part in tile([held.boxes[box] for box in boxes])
    )
    if sum(box.size for box in {stored.tile.box for stored in joined}) == choices.size:
        return joined
    # Holders of different boxes join them differently, and the pieces would overlap.
    return tuple(
        StoredTile(process, tile([held.boxes[box]])[0]._replace(members=(box,)))
        for process, boxes in sorted(of_process.items())
        for box in boxes
    )


def file_owners(
    sizes: Sequence[int], held: npt.NDArray[np.int64], processes: int
) -> tuple[int, ...]:
    """Choose the process that writes each file: one that holds much of it, with even shares.

    `sizes` are the bytes of the files, `held` [files, processes] those that each process holds.
    """
    share = sum(sizes) / processes * _SLACK
    load: npt.NDArray[np.int64] = np.zeros(processes, np.int64)
    owners = [0] * len(sizes)
    for file in sorted(range(len(sizes)), key=lambda file: -sizes[file]):
        after = load + sizes[file]
        allowed = after <= max(share, int(after.min()))
        order = np.lexsort((np.arange(processes), load, -held[file], ~allowed))
        owners[file] = int(order[0])
        load[owners[file]] = after[owners[file]]
    return tuple(owners)
