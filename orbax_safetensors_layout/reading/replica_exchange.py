"""Reads once what several processes hold: who reads what, and how the others get it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import PeerError, redact_urls
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.plan import (
    Bands,
    ExchangeLimits,
    Fragment,
    Item,
    RegionReads,
    Round,
    SharedLeaf,
    Stage,
    bands_of,
    plan_exchange,
)
from orbax_safetensors_layout.runtime import Fingerprint, ProcessGroup
from orbax_safetensors_layout.sharding import (
    AddressableShards,
    ProcessShards,
    Replicas,
    is_abstract,
    sharding_of,
)

from ._jax import DistributedStore
from .all_gather import Gathered, SendBuffer, stays_on_devices
from .leaf_builder import LeafBuilder
from .materialize import TakeBoxes, Wait
from .resolve import ResolvedLeaf

PLANNING, LOADING = "planning the load", "loading tensors"
_ROUNDS_IN_BUDGET = 8
_STAGES_IN_BUDGET = 4
_MOST_IN_FLIGHT = 2  # rounds: one is gathered while the next is put on the devices
_PAUSE_SECONDS = 0.001


def load_group(path: str | os.PathLike[str], options: ReadOptions) -> ProcessGroup:
    """The processes that load together; this one alone, where each reads what it needs."""
    if options.replicated == "each" or jax.process_count() == 1:
        return ProcessGroup.alone()
    return ProcessGroup(
        redact_urls(os.fsdecode(path)),
        jax.process_index(),
        jax.process_count(),
        DistributedStore.connect(),
        options.timeout_seconds,
        purpose="load",
    )


class ExchangeStep(NamedTuple):
    """What a process reads before something is exchanged.

    Attributes:
        leaves: The leaves of which it reads some boxes.
        reads: The reads of these boxes.
        stage: The rounds that exchange them; none for what no other process needs.
    """

    leaves: list[ResolvedLeaf]
    reads: RegionReads
    stage: Stage


def steps_of(
    catalog: Catalog, leaves: Sequence[ResolvedLeaf], shards: ProcessShards, options: ReadOptions
) -> list[ExchangeStep]:
    """Divides what a process reads into steps; what no other process needs comes last.

    Args:
        catalog: The checkpoint.
        leaves: The wanted leaves.
        shards: Whose shards.
        options: Whether replicas are read once.
    """
    stages: list[Stage] = []
    if options.replicated == "read_once":
        limits = ExchangeLimits(
            round_bytes=-(-options.memory_budget_bytes // _ROUNDS_IN_BUDGET),
            stage_bytes=options.memory_budget_bytes // _STAGES_IN_BUDGET,
            gap_bytes=options.profile(catalog.storage.kind).max_gap_bytes,
        )
        # Pieces are read by those that hold them, each from files of its own.
        sharing = _Sharing(shards, limits, has_bands=catalog.layout == "hf")
        stages = plan_exchange(filter(None, map(sharing.leaf, _tied(leaves))), limits)
    index, budget = shards.process_index, options.memory_budget_bytes
    shared_boxes = functools.lru_cache(None)(_shared_boxes)
    steps = []
    for stage in stages:
        boxes: dict[int, list[Box]] = {}
        for one in stage:
            for fragment in one.fragments(index):
                boxes.setdefault(fragment.leaf, []).append(fragment.box)
        regions = [
            leaves[n].region._replace(local=shared_boxes(tuple(some))) for n, some in boxes.items()
        ]
        reads = RegionReads(regions, budget)
        steps.append(ExchangeStep([leaves[n] for n in boxes], reads, stage))
    exchanged = {item.leaf for stage in stages for item in _items(stage)}
    private = [
        leaf for leaf in leaves if leaf.number not in exchanged or not leaf.region.local.boxes
    ]
    reads = RegionReads([leaf.region for leaf in private], budget)
    return [*steps, ExchangeStep(private, reads, ())]


def _shared_boxes(boxes: tuple[Box, ...]) -> AddressableShards:
    return AddressableShards(boxes, (False,) * len(boxes))


def _items(stage: Stage) -> Iterator[Item]:
    return (item for one in stage for lane in one.lanes for item in lane)


def _tied(leaves: Iterable[ResolvedLeaf]) -> list[list[ResolvedLeaf]]:
    """Leaves with those that have the same values in the same places."""
    found: dict[object, list[ResolvedLeaf]] = {}
    for leaf in leaves:
        values = leaf.region.values_key or leaf.number
        found.setdefault((values, leaf.want.placement), []).append(leaf)
    return [*found.values()]


class _Sharing:
    """Leaves as the planner takes them.

    Args:
        shards: Who holds what.
        limits: What bounds the plan.
        has_bands: Whether boxes that lie side by side in a file are read together.
    """

    def __init__(self, shards: ProcessShards, limits: ExchangeLimits, *, has_bands: bool) -> None:
        self._shards = shards
        self._limits = limits
        self._has_bands = has_bands
        # By what arrays have in common; `shards` keeps the replicas, so an id stays its own.
        self._bands: dict[tuple[object, ...], Bands | None] = {}

    def leaf(self, tied: Sequence[ResolvedLeaf]) -> SharedLeaf | None:
        """The first of some tied leaves; None where each process reads what it needs."""
        leaf, *others = tied
        placement, source, dtype = leaf.want.placement, leaf.region.source, leaf.region.dtype
        if placement is None or 0 in source.shape:
            return None
        replicas = self._shards.replicas(sharding_of(placement), source.shape)
        if replicas is None:
            return None
        strides = source.strides(replicas.boxes[0])
        if strides is None:
            return None
        is_plain = isinstance(placement, Sharding) and _is_default_memory(placement)
        is_direct = is_plain and stays_on_devices(dtype)
        axes: tuple[int, ...] = ()
        bands = self._bands_of(replicas, source.shape, strides, dtype.itemsize, is_direct)
        if bands is not None:
            replicas, axes = bands
        elif not replicas.grid.is_shared:
            return None
        again = tuple(other.number for other in others)
        return SharedLeaf(
            leaf.number, replicas, dtype, is_direct, source.place, strides, axes, again
        )

    def _bands_of(
        self,
        replicas: Replicas,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        is_direct: bool,
    ) -> Bands | None:
        key = (id(replicas), shape, strides, itemsize, is_direct)
        if key not in self._bands:
            found = None
            if self._has_bands:
                found = bands_of(replicas, shape, strides, self._limits.gap_bytes)
            if found is not None and not is_direct:
                fits = found.replicas.boxes[0].size * itemsize <= self._limits.round_bytes
                found = found.uncut() if fits else None
            self._bands[key] = found
        return self._bands[key]


def _is_default_memory(sharding: Sharding) -> bool:
    if sharding.memory_kind is None or is_abstract(sharding):
        return sharding.memory_kind in (None, "device")
    device: Any = next(iter(sharding.device_set))
    return bool(sharding.memory_kind == device.default_memory().kind)


def fingerprint_of(steps: Sequence[ExchangeStep], leaves: Sequence[ResolvedLeaf]) -> Fingerprint:
    """What all processes must have alike before anything is spread."""
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}

    def tell(fact: object) -> None:
        digest.update(repr(fact).encode())

    def number(shared: object) -> int:  # of what many leaves have in common, told once
        if id(shared) not in numbers:
            tell(shared)
        return numbers.setdefault(id(shared), len(numbers))

    nbytes = 0
    for step in steps:
        tell(len(step.stage))  # after each all meet
        for one in step.stage:
            nbytes += one.gathered_bytes
            kind = one.shape, one.dtype.name, one.axis, one.is_packed, one.is_direct, one.cut_axes
            tell((number(one.grid), kind))
            for lane in one.lanes:
                tell([(leaves[n].region.name, number(boxes), offset) for n, boxes, offset in lane])
    return Fingerprint(
        digest.hexdigest(),
        f"{len(leaves)} leaves of which {nbytes:,} bytes are replicas, in {len(steps)} steps",
        "All processes must load the same tree from the same checkpoint, with the same options.",
    )


class ReplicaExchange:
    """Values of replicas on their way from the process that read them to all that need them.

    Gathers run on the calling thread, in the order of the plan.

    Args:
        leaves: All wanted leaves.
        values: Takes what was gathered.
        group: The processes.
    """

    def __init__(
        self, leaves: Sequence[ResolvedLeaf], values: LeafBuilder, group: ProcessGroup
    ) -> None:
        self._leaves = leaves
        self._values = values
        self._group = group
        self._process = group.process_index
        # Of each step; there is none before the first.
        self._stages: deque[list[tuple[Round, SendBuffer]]] = deque([[]])
        self._in_flight: deque[tuple[Round, Gathered]] = deque()

    def taker(self, step: ExchangeStep) -> TakeBoxes:
        """What takes the values that this process reads in a step; asked for in their order."""
        mine = [one for one in step.stage if one.grid.slots(self._process)]
        rounds = [(one, SendBuffer(one)) for one in mine]
        self._stages.append(rounds)
        fragments: dict[int, tuple[SendBuffer, list[Fragment]]] = {}
        for one, slots in rounds:
            for fragment in one.fragments(self._process):
                fragments.setdefault(fragment.leaf, (slots, []))[1].append(fragment)

        def keep(
            numbers: Sequence[int], boxes: Sequence[int], parts: Sequence[np.ndarray]
        ) -> Wait | None:
            return self._values.take([step.leaves[n] for n in numbers], boxes, parts)

        def give(numbers: Sequence[int], boxes: Sequence[int], parts: Sequence[np.ndarray]) -> None:
            for number in numbers:
                slots, of_leaf = fragments[step.leaves[number].number]
                for box, values in zip(boxes, parts, strict=True):
                    _, _, row, column, offset = of_leaf[box]
                    slots.put(row, column, offset, values)

        return give if step.stage else keep

    def launch(self) -> None:
        """Spreads what was taken in the step before, once all processes have read theirs.

        Raises:
            PeerError: A gather failed.
        """
        for one, slots in self._stages.popleft():
            while len(self._in_flight) >= _MOST_IN_FLIGHT:
                self._land()
            with _gathering():
                self._in_flight.append((one, slots.gather(self._process)))

    def finish(self) -> None:
        """Waits for all that is on its way.

        Raises:
            PeerError: A gather failed.
        """
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        one, gathered = self._in_flight.popleft()
        with _gathering():
            while not gathered.is_ready():
                self._group.check(LOADING)
                time.sleep(_PAUSE_SECONDS)
            gathered.wait()
        if one.is_direct:
            for lane, items in enumerate(one.lanes):
                for item in items:
                    self._values.put(self._leaves[item.leaf], gathered.on_devices(lane))
            return
        rows = gathered.on_host(self._process)
        for lane, items in enumerate(one.lanes):
            for item in items:
                self._take(item, {row: lanes[lane] for row, lanes in rows.items()})

    def _take(self, item: Item, lanes: dict[int, np.ndarray]) -> None:
        leaf = self._leaves[item.leaf]
        dtype = leaf.region.dtype
        numbers, parts = [], []
        for row, data in lanes.items():
            whole = item.boxes[row]
            nbytes = whole.size * dtype.itemsize
            flat = data.reshape(-1)[item.offset : item.offset + nbytes]
            values = flat.view(dtype).reshape(whole.shape)
            for number, box in enumerate(leaf.region.local.boxes):
                if whole.contains(box):
                    numbers.append(number)
                    at: tuple[Any, ...] = (*box.within(whole).slices, ...)
                    parts.append(values[at])
        self._values.take([leaf], numbers, parts)


@contextlib.contextmanager
def _gathering() -> Iterator[None]:
    """Tells what an error of a collective means."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise PeerError(
            f"replicas did not come from the processes that read them: {error}",
            hint="Another process of the program has probably ended; see its log.",
        ) from error
