"""Plans reads of replicas that read each byte once, and the rounds of their exchange.

1. Leaves are grouped: small ones by grid, others by grid, shape and dtype.
2. Each group becomes rounds of bounded size. Lanes take leaves in the order of the files, so that
   each process reads from few.
3. Groups whose exchange would make the load take longer are left out.
4. Rounds are joined to stages of bounded host memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    gap_request_bytes: int = sys.maxsize  # the longest request that reads through gaps
    # Host bytes of boxes of a process that share rows, and are read together; of more again.
    together_bytes: int = sys.maxsize

    @classmethod
    def of(cls, profile: StorageProfile, memory_budget_bytes: int) -> Self:
        round_bytes = -(-memory_budget_bytes // _ROUNDS_IN_BUDGET)
        stage_bytes = memory_budget_bytes // _STAGES_IN_BUDGET
        return cls(round_bytes, stage_bytes, profile.max_gap_bytes, profile.staging_bytes)


_Group = tuple[Sequence[SharedLeaf], Callable[[], Iterator[Round]]]
"""Leaves on one grid, and what plans the rounds of their exchange."""


class _Work(NamedTuple):
    """The work that leaves add to a load; that of several is the sum."""

    host_bytes: float  # that the process with most of them reads
    all_bytes: float  # that all processes read
    requests: float = 0.0  # of that process, more than so many bytes take
    program_seconds: float = 0.0
    gather_seconds: float = 0.0


class ExchangeRates(NamedTuple):
    """The rates by which reading alone is compared with an exchange; the same on all processes."""

    storage: HostRate
    request_bytes: int
    platform: str

    def exchange(self, grid: ReplicaGrid | None = None) -> ExchangeProfile:
        """Return the rates of an exchange among the devices of a grid, or of the fewest."""
        devices, parts, of_host = 2, 1, self.storage.processes_per_host
        if grid is not None:
            devices = min(grid.columns, grid.most_slots * of_host)
            parts = math.prod(grid.cuts)
        return exchange_profile(self.platform, devices, of_host, parts)

    def seconds(
        self,
        host_bytes: float,
        all_bytes: float,
        requests: float = 0.0,
        program_seconds: float = 0.0,
        gather_seconds: float = 0.0,
    ) -> float:
        """Return the time of a load, in which programs are compiled while it reads."""
        requests += host_bytes / self.request_bytes
        reading = self.storage.read_seconds(host_bytes, all_bytes, requests)
        return max(reading, program_seconds) + gather_seconds

    def rounds(self, groups: Sequence[_Group], others: tuple[float, float]) -> list[Round]:
        """Plan the groups whose exchange makes the load take less time, or hardly more.

        Of other leaves a process reads so many bytes, and all processes.
        """
        alone = [self._alone(leaves) for leaves, _ in groups]
        once = [self._once(leaves) for leaves, _ in groups]  # at least, until they are planned
        planned: dict[int, list[Round]] = {}
        while new := (chosen := self._chosen(alone, once, others)) - planned.keys():
            for number in new:
                leaves, plan = groups[number]
                planned[number] = [*plan()]
                once[number] = self._once(leaves, [step.form for step in planned[number]])
        return [step for number in sorted(chosen) for step in planned[number]]

    def _chosen(
        self, alone: Sequence[_Work], once: Sequence[_Work], others: tuple[float, float]
    ) -> set[int]:
        """Choose the groups to exchange.

        They are ranked by what they save for what they add, and the load is timed with none of
        them, the first, the first two, and so on.
        """

        def worth(number: int) -> float:
            work = once[number]
            saved = self.seconds(*alone[number]) - self.seconds(*work[:3])
            return (saved + work.program_seconds) / (work.program_seconds + work.gather_seconds)

        rank = sorted(range(len(alone)), key=worth, reverse=True)
        changes = (np.subtract(once[number], alone[number]) for number in rank)
        loads = np.cumsum([_Work(*others), *alone, *changes], axis=0)[len(alone) :]
        seconds = np.array([self.seconds(*load) for load in loads.tolist()])
        # What is read through gaps ends before what is exchanged begins, with idle streams.
        seconds[1:-1] += self.storage.shortest_seconds
        least, read_bytes = seconds.min(), loads[:, 1] - others[1]
        slack = _MOST_SLOWER * max(0.0, least - self.seconds(*others))
        near = seconds <= least + slack
        near &= read_bytes <= read_bytes[near].min() + _LEAST_SAVED * read_bytes.min()
        return {*rank[: int(np.where(near, seconds, math.inf).argmin())]}

    def _alone(self, leaves: Sequence[SharedLeaf]) -> _Work:
        """Return what leaves on one grid add where each process reads them."""
        holders = [set(row) for row in leaves[0].replicas.grid.processes]  # of each box
        boxes = leaves[0].replicas.grid.most_boxes
        each = sum(leaf.stored_bytes * leaf.share for leaf in leaves)
        requests = boxes * sum(leaf.requests for leaf in leaves)
        return _Work(each * boxes, each * sum(map(len, holders)), requests)

    def _once(self, leaves: Sequence[SharedLeaf], forms: Sequence[RoundForm] = ()) -> _Work:
        """Return the same of their exchange in rounds of such forms, or in one without waste."""
        grid = leaves[0].replicas.grid
        nbytes = sum(leaf.stored_bytes for leaf in leaves)
        box_bytes = sum(leaf.box_bytes for leaf in leaves)
        slot_bytes = box_bytes * grid.most_slots / grid.columns
        gathered_bytes = sum(leaf.gathered_bytes for leaf in leaves)
        if forms:
            if not forms[0].is_packed:  # whose slots hold different amounts
                slot_bytes = sum(form.most_slot_bytes for form in forms)
            gathered_bytes = sum(form.gathered_bytes for form in forms)
        rates = self.exchange(grid)
        gathering = rates.seconds(gathered_bytes * grid.most_slots, len(forms) or 1)
        compiling = rates.program_seconds * (len({*map(id, forms)}) or 1)
        host_bytes = slot_bytes * nbytes / box_bytes
        requests = sum(leaf.shared_requests for leaf in leaves) * grid.most_slots / grid.columns
        return _Work(host_bytes, nbytes * len(grid.processes), requests, compiling, gathering)


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
        profile = options.modelled_profile(kind)
        limits = ExchangeLimits.of(profile, options.memory_budget_bytes)
        if platform != "cpu":  # whose arrays keep what they are read into
            limits = limits._replace(together_bytes=options.memory_budget_bytes)
        if options.replicated == "read_once":
            return cls(limits, None)
        storage = HostRate.of(profile, processes_per_host=processes_per_host)
        return cls(limits, ExchangeRates(storage, profile.request_bytes, platform))

    def load_may_gain(
        self,
        stored_bytes: int,
        processes: int,
        kinds: Collection[tuple[LeafKind, int]] | None = None,
    ) -> bool:
        """Whether the least that an exchange takes is less than reading a load everywhere.

        Of its leaves that may be exchanged, by default all, `kinds` says how many there are of
        each; the others are read meanwhile.
        """
        if self.rates is None or stored_bytes > self.limits.together_bytes:
            return True  # one that reads alone may read rows several times, without a bound
        shared_bytes, gathering = stored_bytes, 0.0
        if kinds is not None:
            shared_bytes = sum(count * kind.stored_bytes for kind, count in kinds)
            gathering = sum(
                self.rates.exchange(kind.grid).seconds(count * kind.gathered_bytes)
                for kind, count in kinds
            )
        others = stored_bytes - shared_bytes  # of each process at most
        through_gaps = stored_bytes // self.limits.gap_request_bytes  # requests, at most
        alone = self.rates.seconds(stored_bytes, stored_bytes * processes, through_gaps)
        reading = self.rates.seconds(
            others + shared_bytes / processes, others * processes + shared_bytes
        )
        return alone > self.rates.exchange().seconds(0, 1, 1, reading=reading + gathering)

    def may_gain(self, kind: LeafKind, processes: int) -> bool:
        """Whether the exchange of one leaf of many saves time."""
        if self.rates is None or self.limits.together_bytes < sys.maxsize:
            return True
        saved_bytes = kind.stored_bytes * (processes - 1)  # of all processes
        each = saved_bytes / processes
        saved = self.rates.seconds(each, saved_bytes, each // self.limits.gap_request_bytes)
        return saved > self.rates.exchange(kind.grid).seconds(kind.gathered_bytes)

    def plan(self, leaves: Iterable[SharedLeaf], stored_bytes: int, processes: int) -> list[Stage]:
        """Plan the exchange of leaves of a load of so many bytes."""
        leaves = [*leaves]
        shared = sum(leaf.stored_bytes * len(leaf.replicas.boxes) for leaf in leaves)
        others = max(0.0, stored_bytes - shared)  # each byte is read by one process at least
        return plan_exchange(leaves, *self, (others / processes, others))


def plan_exchange(
    leaves: Iterable[SharedLeaf],
    limits: ExchangeLimits,
    rates: ExchangeRates | None = None,
    others: tuple[float, float] = (0.0, 0.0),
) -> list[Stage]:
    """Plan the reads and exchanges of leaves (of tied ones the first); equal on all processes.

    With `rates` of those alone whose exchange makes the load take less time, or little more;
    `others` are the bytes that a process reads besides, and all processes.
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
        rounds = rates.rounds(groups, others)
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
