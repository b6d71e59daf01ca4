"""Plans reads of replicas that read each byte once, and the rounds of their exchange.

1. Leaves are grouped: small ones by grid, others by grid, shape and dtype.
2. Each group becomes rounds of bounded size. Lanes take leaves in the order of the files, so that
   each process reads from few.
3. Groups whose exchange would take longer than reading them are left out.
4. Rounds are joined to stages of bounded host memory.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from orbax_safetensors_layout.options import (
    MIB,
    ExchangeProfile,
    ReadOptions,
    StorageProfile,
    exchange_profile,
)
from orbax_safetensors_layout.runtime import SLOT_ALIGNMENT, batches
from orbax_safetensors_layout.sharding import ReplicaGrid, Replicas

from .cost import HostRate
from .exchange_rounds import Item, Round, RoundForm, SharedLeaf, Stage

_BYTE = np.dtype(np.uint8)
_SMALL_BYTES = MIB  # smaller boxes are packed together: one round takes many of them
_MOST_LANES = 64  # arrays that one program makes
_MANY_ROUNDS = 8  # of which one may leave most processes without work
_MOST_IDLE = 1.1  # columns that a split may need for the work of one
_MOST_PADDED = 4  # times the bytes of a large leaf that devices may gather
_MOST_SLOWER = 0.02  # of the time, for bytes that storage need not send again
_LEAST_SAVED = 0.002  # of the bytes, for which a load may be slower
_ROUNDS_IN_BUDGET = 8
_STAGES_IN_BUDGET = 4


class ExchangeLimits(NamedTuple):
    """The bounds of a plan; the same on all processes."""

    round_bytes: int  # bytes that a device may gather at once; a larger box is a round of its own
    stage_bytes: int  # host bytes that a process may read before they are exchanged
    gap_bytes: int  # the longest gap that is read through
    # Host bytes of boxes of a process that share rows, and are read together; of more again.
    together_bytes: int = sys.maxsize

    @classmethod
    def of(cls, profile: StorageProfile, memory_budget_bytes: int) -> Self:
        round_bytes = -(-memory_budget_bytes // _ROUNDS_IN_BUDGET)
        stage_bytes = memory_budget_bytes // _STAGES_IN_BUDGET
        return cls(round_bytes, stage_bytes, profile.max_gap_bytes)


_Group = tuple[Sequence[SharedLeaf], Callable[[], Iterator[Round]]]
"""Leaves on one grid, and what plans the rounds of their exchange."""


class _Comparison(NamedTuple):
    """The costs of leaves on one grid, to all processes, read by each alone or once."""

    alone_seconds: float
    once_seconds: float
    alone_bytes: float
    once_bytes: float

    @property
    def loss_seconds(self) -> float:
        """Time that an exchange takes more."""
        return self.once_seconds - self.alone_seconds

    @property
    def saved_bytes(self) -> float:
        return self.alone_bytes - self.once_bytes


class ExchangeRates(NamedTuple):
    """The rates by which reading alone is compared with an exchange; the same on all processes."""

    storage: HostRate
    profile: StorageProfile  # of which they are
    platform: str
    processes_per_host: int

    def exchange(self, grid: ReplicaGrid | None = None) -> ExchangeProfile:
        """Return the rates of an exchange among the devices of a grid, or of the fewest."""
        devices, parts = 2, 1
        if grid is not None:
            devices = min(grid.columns, grid.most_slots * self.processes_per_host)
            parts = math.prod(grid.cuts)
        return exchange_profile(self.platform, devices, self.processes_per_host, parts)

    def load_seconds(self, nbytes: float, all_bytes: float) -> float:
        """Return the time of all reads of a process: as for a part, but one request at least."""
        profile = self.profile
        least = min(nbytes, profile.least_request_bytes, profile.request_bytes)
        one_request = least / profile.bandwidth_bytes_per_second
        return max(one_request, self.storage.read_seconds(nbytes, all_bytes))

    def rounds(self, groups: Sequence[_Group]) -> list[Round]:
        """Plan the groups whose exchange takes less time than reading, or hardly more."""
        costs = [
            self._compare(leaves, sum(leaf.gathered_bytes for leaf in leaves), 1, 1)
            for leaves, _ in groups
        ]
        most_slack = _MOST_SLOWER * sum(cost.alone_seconds for cost in costs)
        planned: dict[int, list[Round]] = {}  # of those that may be chosen
        for number, (leaves, plan) in enumerate(groups):
            if costs[number].loss_seconds <= most_slack:
                rounds = planned[number] = [*plan()]
                gathered_bytes = sum(step.form.gathered_bytes for step in rounds)
                programs = len({id(step.form) for step in rounds})
                costs[number] = self._compare(leaves, gathered_bytes, len(rounds), programs)
        slack = _MOST_SLOWER * sum(min(cost.alone_seconds, cost.once_seconds) for cost in costs)
        least = _LEAST_SAVED * sum(cost.once_bytes for cost in costs)
        kept = []
        for number in sorted(planned, key=lambda number: costs[number].loss_seconds):
            cost = costs[number]
            if cost.loss_seconds < 0 or (cost.loss_seconds <= slack and cost.saved_bytes > least):
                kept.append(number)
                slack -= max(0.0, cost.loss_seconds)
        return [step for number in sorted(kept) for step in planned[number]]

    def _compare(
        self, leaves: Sequence[SharedLeaf], gathered_bytes: float, rounds: int, programs: int
    ) -> _Comparison:
        """Return the costs of leaves of which a device gathers so much, in so many rounds."""
        grid = leaves[0].replicas.grid
        holders = [set(row) for row in grid.processes]  # of each box
        boxes = max(collections.Counter(itertools.chain.from_iterable(holders)).values())
        nbytes = sum(leaf.stored_bytes for leaf in leaves)
        share = grid.most_slots / grid.columns
        once_bytes = nbytes * len(holders)
        reading = self.storage.read_seconds(nbytes * share, once_bytes)
        each = sum(leaf.stored_bytes * leaf.share for leaf in leaves)
        alone_bytes = each * sum(map(len, holders))
        alone = self.storage.read_seconds(each * boxes, alone_bytes)
        alone += self.storage.request_seconds * boxes * sum(leaf.requests for leaf in leaves)
        gathered = gathered_bytes * grid.most_slots, rounds, programs
        once = self.exchange(grid).seconds(*gathered, reading=reading)
        return _Comparison(alone, once, alone_bytes, once_bytes)


class LeafKind(NamedTuple):
    """Leaves whose exchange costs the same, as far as that is known before columns are merged."""

    grid: ReplicaGrid
    stored_bytes: int  # of one in the files
    gathered_bytes: int  # that the devices of some process gather at least

    @classmethod
    def of(cls, replicas: Replicas, stored_bytes: int, itemsize: int) -> Self:
        grid = replicas.grid
        return cls(grid, stored_bytes, grid.most_slots * replicas.boxes[0].size * itemsize)


class ExchangePolicy(NamedTuple):
    """The limits and rates by which tensors that several processes need are exchanged."""

    limits: ExchangeLimits
    rates: ExchangeRates | None  # without them all that can be is exchanged

    @classmethod
    def of(
        cls, options: ReadOptions, kind: str, platform: str, processes_per_host: int = 1
    ) -> Self:
        """Return the policy of a load from a storage class to devices of a platform."""
        profile = options.profile(kind)
        limits = ExchangeLimits.of(profile, options.memory_budget_bytes)
        if platform != "cpu":  # whose arrays keep what they are read into
            limits = limits._replace(together_bytes=options.memory_budget_bytes)
        if options.replicated == "read_once":
            return cls(limits, None)
        storage = HostRate.of(profile, processes_per_host=processes_per_host)
        return cls(limits, ExchangeRates(storage, profile, platform, processes_per_host))

    def load_may_gain(
        self, stored_bytes: int, processes: int, kinds: Iterable[tuple[LeafKind, int]] = ()
    ) -> bool:
        """Whether the least that an exchange takes is less than reading a load everywhere.

        Of its leaves that may be exchanged `kinds` says how many there are of each.
        """
        if self.rates is None:
            return True
        alone = self.rates.load_seconds(stored_bytes, stored_bytes * processes)
        reading = self.rates.load_seconds(stored_bytes / processes, stored_bytes)
        gathering = sum(
            self.rates.exchange(kind.grid).seconds(count * kind.gathered_bytes)
            for kind, count in kinds
        )
        if self._reads_again:
            reading = gathering = 0.0
        return alone > self.rates.exchange().seconds(0, 1, 1, reading=reading) + gathering

    def may_gain(self, kind: LeafKind, processes: int) -> bool:
        """Whether the same holds of one leaf of many."""
        if self.rates is None:
            return True
        gathered_bytes = 0 if self._reads_again else kind.gathered_bytes
        alone = self.rates.storage.read_seconds(kind.stored_bytes, kind.stored_bytes * processes)
        return alone > self.rates.exchange(kind.grid).seconds(gathered_bytes)

    @property
    def _reads_again(self) -> bool:
        """Whether one that reads alone may read rows several times; there is no bound for that."""
        return self.limits.together_bytes < sys.maxsize


def plan_exchange(
    leaves: Iterable[SharedLeaf], limits: ExchangeLimits, rates: ExchangeRates | None = None
) -> list[Stage]:
    """Plan the reads and exchanges of leaves (of tied ones the first); equal on all processes.

    With `rates` of those alone whose exchange takes less time than reading them where they go, or
    with all of these little more.
    """
    leaves = [*leaves]
    tied = {leaf.number: leaf.tied for leaf in leaves if leaf.tied}
    small: dict[int, list[SharedLeaf]] = {}
    large: dict[tuple[object, ...], list[SharedLeaf]] = {}
    numbers: dict[int, int] = {}  # a grid of many devices is hashed once
    grids: dict[ReplicaGrid, int] = {}
    for leaf in leaves:
        grid = leaf.replicas.grid
        if id(grid) not in numbers:
            numbers[id(grid)] = grids.setdefault(grid, len(grids))
        number = numbers[id(grid)]
        fits = leaf.box_bytes * grid.columns <= limits.round_bytes // 2
        if not leaf.shape or (leaf.box_bytes < _SMALL_BYTES and fits):
            small.setdefault(number, []).append(leaf)
        else:
            rank = rank_of(leaf.strides)
            axes = rank, leaf.cut_axes, leaf.joint_axes
            key = (number, leaf.shape, leaf.dtype.name, leaf.is_direct, axes)
            large.setdefault(key, []).append(leaf)
    groups: list[_Group] = [
        (group, functools.partial(_whole, group, limits)) for group in large.values()
    ]
    groups += [(group, functools.partial(_packed, group, limits)) for group in small.values()]
    if rates is None:
        rounds = [step for _, plan in groups for step in plan()]
    else:
        rounds = rates.rounds(groups)
    # Rounds that share their reads are in one stage.
    repeated = (_repeated(step, tied) for step in rounds)
    stages = batches(repeated, _stage_bytes, limits.stage_bytes)
    return [tuple(itertools.chain.from_iterable(stage)) for stage in stages]


def _stage_bytes(stage: Stage) -> int:
    return sum(step.form.most_slot_bytes for step in stage)


def _repeated(step: Round, tied: Mapping[int, tuple[int, ...]]) -> Stage:
    """Return a round, and those that exchange the same again for tied leaves."""
    times = max((len(tied.get(i.leaf, ())) for lane in step.lanes for i in lane), default=0)
    rounds = [step]
    for time in range(times):
        lanes = [
            tuple(
                item._replace(leaf=others[time])
                for item in lane
                if time < len(others := tied.get(item.leaf, ()))
            )
            for lane in step.lanes
        ]
        rounds.append(step._replace(lanes=tuple(lanes)))
    return tuple(rounds)


def _whole(leaves: Sequence[SharedLeaf], limits: ExchangeLimits) -> Iterator[Round]:
    """Yields rounds of leaves of one shape; those of a lane are neighbours in the files."""
    leaves = sorted(leaves, key=lambda leaf: leaf.place)
    first = leaves[0]
    grid = first.replicas.grid
    most = min(len(leaves), _MOST_LANES, max(1, limits.round_bytes // first.gathered_bytes))
    lanes = max(n for n in range(1, most + 1) if grid.replicas % n == 0)
    rounds = len(leaves) // lanes
    if rounds >= _MANY_ROUNDS:  # the rest is one more round, in which some lanes are idle
        rounds += len(leaves) % lanes > 0
    forms: dict[object, RoundForm] = {}
    in_lanes = [range(i, lanes * rounds, rounds) for i in range(rounds)]
    for numbers in (*in_lanes, *([n] for n in range(lanes * rounds, len(leaves)))):
        step = [leaves[n : n + 1] for n in numbers]
        items = [tuple(Item(leaf.number, leaf.replicas.boxes) for leaf in lane) for lane in step]
        first = step[0][0]
        key = len(step), first.strides
        if key not in forms:
            axis = _split_axis(first, grid.columns // len(step), limits)
            how = axis, False, first.is_direct, first.cut_axes
            forms[key] = RoundForm(grid, len(step), first.shape, first.dtype, *how)
        yield Round(forms[key], tuple(items))


def _split_axis(leaf: SharedLeaf, parts: int, limits: ExchangeLimits) -> int:
    """Choose the dimension that is split: evenly, and without gaps that would be read through."""

    def extent(axis: int) -> int:
        return -(-leaf.shape[axis] // parts)

    def idle(axis: int) -> float:
        return extent(axis) * parts / leaf.shape[axis]

    def gap_bytes(axis: int) -> int:
        return leaf.strides[axis] * (leaf.shape[axis] - extent(axis))

    whole = [axis for axis in rank_of(leaf.strides) if axis not in leaf.cut_axes]
    axes = [axis for axis in whole if leaf.shape[axis] > 1] or whole
    axes = [axis for axis in axes if axis not in leaf.joint_axes] or axes
    outermost = axes[0]
    for axis in axes:
        if idle(axis) <= _MOST_IDLE and (axis == outermost or gap_bytes(axis) > limits.gap_bytes):
            return axis
    most = max(limits.round_bytes / leaf.gathered_bytes, _MOST_PADDED)

    def waste(axis: int) -> tuple[bool, float]:
        is_near = axis != outermost and gap_bytes(axis) <= limits.gap_bytes
        return idle(axis) > most, idle(axis) * (parts if is_near else 1)  # each would read it all

    return min(axes, key=waste)


def rank_of(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions in the order of their strides, the largest first."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def _packed(leaves: Sequence[SharedLeaf], limits: ExchangeLimits) -> Iterator[Round]:
    """Yields rounds of small leaves; each column has the leaves of a range of the files."""
    leaves = sorted(leaves, key=lambda leaf: leaf.place)
    grid = leaves[0].replicas.grid._replace(cuts=())
    sizes = [-(-leaf.box_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for leaf in leaves]
    total = sum(sizes)
    # The middle of a leaf decides its column, so one may have half of round_bytes too much.
    rounds = -(-2 * total // limits.round_bytes)
    bins: list[list[Item]] = [[] for _ in range(rounds * grid.columns)]
    filled = [0] * len(bins)
    before = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        number = (2 * before + size) * len(bins) // (2 * total)
        bins[number].append(Item(leaf.number, leaf.replicas.boxes, filled[number]))
        filled[number] += size
        before += size
    form = RoundForm(grid, grid.columns, (max(filled),), _BYTE, 0, True, False)
    for i in range(rounds):
        yield Round(form, tuple(map(tuple, bins[i::rounds])))
