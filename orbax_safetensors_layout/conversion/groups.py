"""Groups: what is converted, recorded and, after an interruption, skipped as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .checkpoint_reader import CheckpointReader, SourceArray
from .target import LeafRegion, TargetLeaf

_MOST_OVER_READ = 1.05  # bytes read for a byte needed, before arrays are rather read as a whole


class LeafGroup(NamedTuple):
    """Regions of leaves, together all or some of what is made of some arrays.

    Attributes:
        number: Its number.
        regions: The regions, in the order in which they are written.
        staged: The arrays that are read as a whole first; none where regions are read directly.
        is_assembled: Whether the regions are taken out of their leaves when these are whole.
    """

    number: int
    regions: tuple[LeafRegion, ...]
    staged: tuple[SourceArray, ...]
    is_assembled: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self.regions)


class _Part(NamedTuple):
    """Regions that belong together, and what is staged for them."""

    regions: list[LeafRegion]
    staged: list[SourceArray]
    is_assembled: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """What parts of one group have alike."""
        return bool(self.staged), self.is_assembled

    @property
    def nbytes(self) -> int:
        """What is in memory at once, unless it is more than that has room for."""
        staged = sum(array.nbytes for array in self.staged)
        return max(staged, sum(region.nbytes for region in self.regions))


def make_groups(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    leaves: Sequence[TargetLeaf],
    regions: Sequence[Sequence[LeafRegion]],
    most_bytes: int,
) -> list[LeafGroup]:
    """Groups such that every byte of the source is read once.

    Args:
        source: The source.
        arrays: Its arrays by name.
        leaves: The leaves.
        regions: Of each leaf its regions; no larger than `most_bytes` where that is possible.
        most_bytes: Bytes up to which small ones are grouped.
    """
    groups: list[LeafGroup] = []
    parts: list[_Part] = []
    held = 0

    def close() -> None:
        if parts:
            found = tuple(region for part in parts for region in part.regions)
            staged = tuple(array for part in parts for array in part.staged)
            groups.append(LeafGroup(len(groups), found, staged, parts[0].is_assembled))
            parts.clear()

    for part in _parts(source, arrays, leaves, regions):
        nbytes = part.nbytes
        if parts and (held + nbytes > most_bytes or parts[0].kind != part.kind):
            close()
            held = 0
        parts.append(part)
        held += nbytes
    close()
    return groups


def _parts(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    leaves: Sequence[TargetLeaf],
    regions: Sequence[Sequence[LeafRegion]],
) -> Iterator[_Part]:
    over_read: dict[object, bool] = {}  # leaves that are alike are read alike
    for members in _components(leaves):
        names = list(dict.fromkeys(name for n in members for name in leaves[n].sources))
        together = [region for n in members for region in regions[n]]
        if not together:
            continue  # arrays without elements
        needed = [arrays[name] for name in names]
        if needed and _is_staged(source, needed, together, len(members)):
            yield _Part(together, needed)
        elif needed and len(together) > 1 and _is_over_read(source, needed, together, over_read):
            yield _Part(together, [], is_assembled=True)
        else:
            for region in together:
                yield _Part([region], [])


def _is_staged(
    source: CheckpointReader,
    arrays: Sequence[SourceArray],
    regions: Sequence[LeafRegion],
    leaves: int,
) -> bool:
    """Whether arrays have to be read as a whole: in chunks, for several leaves, or from pieces."""
    lease = source.lease(arrays)
    if lease is None or leaves > 1:
        return True
    is_mapped = not isinstance(regions[0].leaf.made_of, str)
    return is_mapped and any(source.catalog is not None for source in lease.sources.values())


def _is_over_read(
    source: CheckpointReader,
    arrays: Sequence[SourceArray],
    regions: Sequence[LeafRegion],
    known: dict[object, bool],
) -> bool:
    lease = source.lease(arrays)
    assert lease is not None
    leaf = regions[0].leaf
    key: object = leaf.name
    if isinstance(leaf.made_of, str) and lease.sources[leaf.made_of].catalog is None:
        entry = lease.sources[leaf.made_of].entry
        key = entry.shape, entry.dtype.code, tuple(region.box for region in regions)
    if key not in known:
        stored = sum(source.nbytes for source in lease.sources.values())
        known[key] = lease.bytes_to_read(regions) > _MOST_OVER_READ * stored
    return known[key]


def _components(leaves: Sequence[TargetLeaf]) -> list[list[int]]:
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
            one, other = root(first.setdefault(name, number)), root(number)
            parent[max(one, other)] = min(one, other)
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
