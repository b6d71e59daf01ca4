"""Groups of leaves, each converted, recorded and, after an interruption, skipped as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.runtime import batches

from .checkpoint_reader import CheckpointReader, ReadableArrays, SourceArray
from .target import LeafRegion, TargetArray

_MOST_OVER_READ = 1.05  # bytes read for a byte needed, before arrays are rather read as a whole


class LeafGroup(NamedTuple):
    """Regions of leaves, in the order in which they are written."""

    regions: tuple[LeafRegion, ...]
    spooled: tuple[SourceArray, ...] = ()  # read whole first; none: regions are read directly
    is_assembled: bool = False  # whether regions are taken out of leaves when these are whole
    number: int = 0

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory at once, unless they are more than fit."""
        return max(self.nbytes, sum(array.nbytes for array in self.spooled))


def make_groups(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    leaves: Sequence[TargetArray],
    regions: Sequence[Sequence[LeafRegion]],
    most_bytes: int,
) -> list[LeafGroup]:
    """Groups regions of leaves, up to `most_bytes`, to read every byte of the source once."""
    groups: list[LeafGroup] = []
    parts = _parts(source, arrays, leaves, regions)
    for _, run in itertools.groupby(parts, lambda part: (bool(part.spooled), part.is_assembled)):
        for batch in batches(run, lambda part: part.held_bytes, most_bytes):
            together = tuple(region for part in batch for region in part.regions)
            spooled = tuple(array for part in batch for array in part.spooled)
            groups.append(LeafGroup(together, spooled, batch[0].is_assembled, len(groups)))
    return groups


def _parts(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    leaves: Sequence[TargetArray],
    regions: Sequence[Sequence[LeafRegion]],
) -> Iterator[LeafGroup]:
    """Yields the smallest groups: regions that have to be read together."""
    over_read: dict[object, bool] = {}  # leaves of equal shape and dtype are read in the same way
    for members in _components(leaves):
        together = tuple(region for n in members for region in regions[n])
        if not together:
            continue  # arrays without elements
        names = dict.fromkeys(name for n in members for name in leaves[n].sources)
        needed = tuple(arrays[name] for name in names)
        readable = source.readable(needed)
        if needed and (readable is None or len(members) > 1 or _is_of_pieces(readable, together)):
            yield LeafGroup(together, needed)
        elif readable is not None and _is_over_read(readable, together, over_read):
            yield LeafGroup(together, is_assembled=True)
        else:
            yield from (LeafGroup((region,)) for region in together)


def _is_of_pieces(arrays: ReadableArrays, regions: Sequence[LeafRegion]) -> bool:
    """Whether an expression takes arrays in pieces, whose regions it cannot find."""
    is_mapped = not isinstance(regions[0].leaf.made_of, str)
    return is_mapped and any(source.catalog is not None for source in arrays.sources.values())


def _is_over_read(
    arrays: ReadableArrays, regions: Sequence[LeafRegion], known: dict[object, bool]
) -> bool:
    if len(regions) == 1:
        return False
    leaf = regions[0].leaf
    key: object = leaf.name
    if isinstance(leaf.made_of, str):
        entry, catalog = arrays.sources[leaf.made_of]
        pieces = {} if catalog is None else catalog.pieces([entry.name])
        boxes = tuple(region.box for region in regions)
        key = entry.shape, entry.dtype.code, boxes, *pieces.values()
    if key not in known:
        stored = sum(source.nbytes for source in arrays.sources.values())
        known[key] = arrays.bytes_to_read(regions) > _MOST_OVER_READ * stored
    return known[key]


def _components(leaves: Sequence[TargetArray]) -> list[list[int]]:
    """Leaves that share arrays, together, in the order of the first of each."""
    parent = list(range(len(leaves)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    first: dict[str, int] = {}
    for number, leaf in enumerate(leaves):
        for name in leaf.sources:
            roots = root(first.setdefault(name, number)), root(number)
            parent[max(roots)] = min(roots)
    members: dict[int, list[int]] = {}
    for number in range(len(leaves)):
        members.setdefault(root(number), []).append(number)
    return list(members.values())


def shares(groups: Sequence[LeafGroup], processes: int) -> list[list[LeafGroup]]:
    """Deals groups out to processes, each to the one that has least, the same on all of them."""
    load = [0] * processes
    dealt: list[list[LeafGroup]] = [[] for _ in range(processes)]
    for group in groups:
        process = load.index(min(load))
        load[process] += group.nbytes
        dealt[process].append(group)
    return dealt
