"""Reads once what several processes hold: the steps of a load, and the exchange after each."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import socket
from collections.abc import Iterable, Mapping as Dict, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Sharding

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import PeerError, redact_urls
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import Mapping, described_rule
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.plan import (
    ArraySource,
    ExchangePolicy,
    Fragment,
    Item,
    LeafKind,
    MappedSource,
    RegionReads,
    Round,
    SharedLeaves,
    Stage,
)
from orbax_safetensors_layout.runtime import Fingerprint, ProcessGroup
from orbax_safetensors_layout.sharding import (
    AddressableShards,
    Placement,
    ProcessShards,
    Replicas,
    is_abstract,
    sharding_of,
)
from orbax_safetensors_layout.storage import LocalStorage

from ._jax import DistributedStore
from .all_gather import (
    Gather,
    SendBuffer,
    await_gathered,
    await_unfinished,
    compile_gather,
    gather_thread,
    gathering,
    leave_unfinished,
    on_host,
)
from .array_reader import Wait
from .leaf_builder import LeafBuilder
from .resolve import ResolvedLeaf

PLANNING, LOADING = "planning the load", "loading tensors"
_MOST_IN_FLIGHT = 2  # rounds: one is gathered while the next is put on the devices
_SAMPLES = 16  # of local files, by which hosts tell whether theirs are equal


def exchanging(
    placements: Iterable[Placement | None], options: ReadOptions, process_count: int
) -> tuple[int, ...]:
    """Return the processes that load leaves together; none where each reads by itself.

    With `"auto"` those that have devices of the leaves' shardings, if they are several, and can
    reach each other.
    """
    everyone = tuple(range(process_count))
    if options.replicated == "read_once":
        return everyone
    if options.replicated == "each" or process_count == 1:
        return ()
    if process_count == jax.process_count() and not DistributedStore.is_reachable():
        return ()
    shardings = _of_each_mesh(placements)
    if any(map(is_abstract, shardings)):  # as in a plan
        return everyone
    devices = set().union(*(sharding.device_set for sharding in shardings))
    processes = sorted({device.process_index for device in devices})
    return tuple(processes) if len(processes) > 1 else ()


def load_group(
    path: str | os.PathLike[str], processes: tuple[int, ...], options: ReadOptions
) -> ProcessGroup:
    """The processes that load together, those of `exchanging`; this one alone if it is not in."""
    if jax.process_index() not in processes or len(processes) == 1:
        return ProcessGroup.alone()
    name = redact_urls(os.fsdecode(path))
    return ProcessGroup(
        name.rstrip("/").rpartition("/")[2],  # where the paths differ, they refuse or go apart
        jax.process_index(),
        processes,
        DistributedStore.connect(),
        options.timeout_seconds,
        purpose="load",
        path=name,
    )


def processes_per_host(group: ProcessGroup, options: ReadOptions) -> int:
    """Return the most processes of a group that share a host, where a choice depends on it."""
    host = socket.gethostname()
    if options.replicated != "auto":
        group.publish(PLANNING, "host", host)  # for one that chooses otherwise, to learn of it
        return 1
    hosts = group.constants(PLANNING, "host", host)
    return max(collections.Counter(hosts).values())


class ExchangeStep(NamedTuple):
    """The reads of a process before an exchange."""

    leaves: list[ResolvedLeaf]  # the leaves of which it reads some boxes
    reads: RegionReads  # the reads of these boxes
    stage: Stage  # the rounds that exchange them, but for the first leaves
    own: int = 0  # number of these

    def joined(self, step: ExchangeStep, budget: int) -> tuple[ExchangeStep, ExchangeStep]:
        """Return an empty step, and one that reads what this and the next one do.

        Other processes may not join theirs, and all must have as many steps.
        """
        reads = RegionReads([*self.reads.regions, *step.reads.regions], budget)
        nothing = ExchangeStep([], RegionReads([], budget), self.stage)
        leaves = [*self.leaves, *step.leaves]
        return nothing, ExchangeStep(leaves, reads, step.stage, len(self.leaves))


def steps_of(
    catalog: Catalog,
    leaves: Sequence[ResolvedLeaf],
    shards: ProcessShards,
    options: ReadOptions,
    *,
    exchange: bool,
) -> list[ExchangeStep]:
    """Divides the reads of a process into steps; those that are not exchanged come first.

    The longer is read before the first exchange, the more of its programs are compiled by then.
    """
    stages = _stages(catalog, leaves, shards, options) if exchange else []
    budget = options.memory_budget_bytes
    steps = []
    exchanged: set[int] = set()
    for stage in stages:
        exchanged.update(item.leaf for step in stage for lane in step.lanes for item in lane)
        boxes: dict[int, tuple[Box, ...]] = {}
        for step in stage:
            for number, of_leaf in step.reads(shards.process_index):
                boxes[number] = boxes.get(number, ()) + of_leaf
        regions = [
            leaves[n].region._replace(local=AddressableShards.private(of_leaf))
            for n, of_leaf in boxes.items()
        ]
        steps.append(ExchangeStep([leaves[n] for n in boxes], RegionReads(regions, budget), stage))
    private = [
        leaf for leaf in leaves if leaf.number not in exchanged or not leaf.region.local.boxes
    ]
    reads = RegionReads([leaf.region for leaf in private], budget)
    return [ExchangeStep(private, reads, (), len(private)), *steps]


def _stages(
    catalog: Catalog, leaves: Sequence[ResolvedLeaf], shards: ProcessShards, options: ReadOptions
) -> list[Stage]:
    shardings = _of_each_mesh(leaf.abstract.placement for leaf in leaves)
    platform = min(map(_platform, shardings), default="")
    exchange = ExchangePolicy.of(options, catalog.storage.kind, platform, shards.processes_per_host)
    sizes = [leaf.region.source.stored_bytes for leaf in leaves]
    total = sum(sizes)
    if not exchange.load_may_gain(total, shards.process_count):
        return []
    # Of leaves that many have the shards of; to hash a sharding, or replicas, takes long.
    known: dict[tuple[int, bool, int, int], tuple[Replicas, LeafKind] | None] = {}
    tied: dict[object, list[tuple[ResolvedLeaf, Replicas]]] = {}  # the same values and places
    kinds: collections.Counter[int] = collections.Counter()  # by id
    for leaf, stored_bytes in zip(leaves, sizes, strict=True):
        region, placement = leaf.region, leaf.abstract.placement
        key = id(region.local), placement is None, stored_bytes, region.dtype.itemsize
        if key not in known:
            known[key] = _gainful(exchange, leaf, stored_bytes, shards)
        gainful = known[key]
        if gainful is not None:
            replicas, kind = gainful
            values = region.values_key
            same = tied.setdefault(leaf.number if values is None else (values, placement), [])
            kinds[id(kind)] += not same
            same.append((leaf, replicas))
    counted = [(kind, kinds[id(kind)]) for _, kind in filter(None, known.values())]
    if not exchange.load_may_gain(total, shards.process_count, counted):
        return []
    # Pieces are read by those that hold them, each from files of its own.
    shared = SharedLeaves(exchange, merges=catalog.layout == "hf")
    for (leaf, replicas), *others in tied.values():
        placement, source, dtype = leaf.abstract.placement, leaf.region.source, leaf.region.dtype
        order = source.file_order(replicas.boxes[0])
        if order is None:
            continue
        shared.add(
            leaf.number,
            replicas,
            source.shape,
            order.strides,
            dtype,
            source.place,
            stored_bytes=sizes[leaf.number],
            in_device_memory=isinstance(placement, Sharding) and _is_default_memory(placement),
            tied=tuple(other.number for other, _ in others),
            joint_axes=order.joint_axes,
            is_decoded=order.is_decoded,
        )
    return exchange.plan(shared, total, shards.process_count)


def _gainful(
    exchange: ExchangePolicy, leaf: ResolvedLeaf, stored_bytes: int, shards: ProcessShards
) -> tuple[Replicas, LeafKind] | None:
    """Return the replicas of a leaf, if they may be had faster from other processes."""
    placement, shape = leaf.abstract.placement, leaf.region.source.shape
    if placement is None or 0 in shape:
        return None
    replicas = shards.replicas(sharding_of(placement), shape)
    if replicas is None:
        return None
    kind = LeafKind.of(replicas, stored_bytes, leaf.region.dtype.itemsize)
    return (replicas, kind) if exchange.may_gain(kind, shards.process_count) else None


def _of_each_mesh(placements: Iterable[Any]) -> list[Any]:
    """Return a sharding of each set of devices: to hash all, or to ask each, takes long."""
    of_each = {id(getattr(p, "mesh", p)): p for p in placements if p is not None}
    return [*map(sharding_of, of_each.values())]


def _platform(sharding: Sharding) -> str:
    """The platform of the devices, as JAX names it; of an abstract mesh none."""
    if is_abstract(sharding):
        return ""
    device: Any = next(iter(sharding.device_set))
    return str(device.platform)


def _is_default_memory(sharding: Sharding) -> bool:
    if sharding.memory_kind is None or is_abstract(sharding):
        return sharding.memory_kind in (None, "device")
    device: Any = next(iter(sharding.device_set))
    return bool(sharding.memory_kind == device.default_memory().kind)


def fingerprint_of(
    steps: Sequence[ExchangeStep],
    leaves: Sequence[ResolvedLeaf],
    options: ReadOptions,
    catalog: Catalog,
    mapping: Mapping | None,
) -> Fingerprint:
    """Return a digest of the plan, equal on all processes before anything is exchanged.

    Of what is exchanged it has all that the values follow from; of the files' bytes what `_content`
    tells.
    """
    merged = () if mapping is None else mapping.merged
    digest = hashlib.sha256(repr([*merged]).encode())
    numbers: dict[int, int] = {}
    files = {f: f.removeprefix(catalog.path).lstrip("/") for f in (*catalog.files, "")}

    def add(value: object) -> None:
        digest.update(repr(value).encode())

    def number(shared: object) -> int:  # of what many leaves have in common, added once
        if id(shared) not in numbers:
            add(shared)
        return numbers.setdefault(id(shared), len(numbers))

    nbytes = 0
    entries: list[TensorEntry] = []  # of what is exchanged
    for step in steps:
        add(len(step.stage))  # after each all processes wait for each other
        for form, lanes in step.stage:
            add(number(form))
            for lane in lanes:
                texts = []
                for leaf, boxes, offset in lane:
                    region = leaves[leaf].region
                    what = str(region.dtype), number(boxes), offset
                    stored = _entries(region.source)
                    texts.append(f"{what}{region.name}\n{_stored_places(stored, files)}")
                    entries += stored
                digest.update("\n".join(texts).encode())
        nbytes += sum(round_.form.gathered_bytes for round_ in step.stage)
    if nbytes and mapping is not None:
        for part in mapping.chain():
            digest.update("\n".join(map(described_rule, part.rules)).encode())
    profile = options.modelled_profile(catalog.storage.kind)
    path = redact_urls(catalog.path)
    if isinstance(catalog.storage, LocalStorage):  # a link may lead elsewhere on each host
        path = os.path.realpath(path)
    assumptions = {
        "replicated": repr(options.replicated),
        "memory_budget_bytes": f"{options.memory_budget_bytes:,}",
        "storage": catalog.storage.kind,
        "latency_seconds": f"{profile.latency_seconds:g}",
        "bandwidth_bytes_per_second": f"{profile.bandwidth_bytes_per_second:g}",
        "host_bandwidth_bytes_per_second": str(profile.host_bytes_per_second),
        "shared_bandwidth_bytes_per_second": f"{profile.shared_bytes_per_second:g}",
        "concurrency": str(profile.concurrency),
        "request_bytes": f"{profile.request_bytes:,}",
        "merged adapters": " ".join(name[:16] for name in merged),
        "verify": repr(options.verify),
    }
    if nbytes and not await_unfinished():
        path += f", and began gathers that did not end (process {jax.process_index()}: restart it)"
    add((options.replicated, options.verify))  # to verify is a step of all
    return Fingerprint(
        digest.hexdigest(),
        f"{len(leaves)} leaves of which {nbytes:,} bytes are replicas, in {len(steps)} steps",
        "All processes must load the same tree from the same checkpoint, with the same options and"
        " the same adapters merged.",
        [f"{name}={value}" for name, value in assumptions.items()],
        parts=functools.partial(_described, leaves, files),
        content=_content(catalog, leaves, entries, files),
        place=path,
    )


class ReplicaExchange:
    """Values of replicas on their way from the process that read them to all that need them.

    A step takes what this process reads; the next gathers it, as planned, in turn on a thread. The
    programs for that are compiled from the start, on another.
    """

    def __init__(
        self,
        leaves: Sequence[ResolvedLeaf],
        values: LeafBuilder,
        group: ProcessGroup,
        steps: Iterable[ExchangeStep] = (),
    ) -> None:
        self._leaves = leaves
        self._values = values
        self._group = group
        self._process = group.process_index
        rounds = (round_ for step in steps for round_ in step.stage)
        self._forms = {id(r.form): r.form for r in rounds if r.form.grid.slots(self._process)}
        self._compiler = ThreadPoolExecutor(1, "safetensors_compile")
        self._compiled: dict[int, Future[None]] = {}
        # The step that has begun: its leaves, rounds, and by leaf what is sent to others.
        self._step_leaves: Sequence[ResolvedLeaf] = ()
        self._own = 0  # number of the first of them, which are not sent
        self._rounds: list[tuple[Round, SendBuffer]] = []
        self._fragments: dict[int, tuple[SendBuffer, list[Fragment]]] = {}
        self._in_flight: collections.deque[tuple[Round, Gather]] = collections.deque()
        self._thread = gather_thread()

    def __enter__(self) -> Self:
        for number, form in self._forms.items():
            self._compiled[number] = self._compiler.submit(compile_gather, form)
        return self

    def __exit__(self, *_: object) -> None:
        leave_unfinished(gather for _, gather in self._in_flight)
        self._thread.end()
        self._compiler.shutdown(cancel_futures=True)

    def begin(self, step: ExchangeStep) -> None:
        """Begins a step, with the gathers of the one before, which all processes have read."""
        self.gather()
        self._step_leaves, self._own = step.leaves, step.own
        self._rounds = [
            (r, SendBuffer(r.form)) for r in step.stage if r.form.grid.slots(self._process)
        ]
        self._fragments = {}
        for round_, buffer in self._rounds:
            for fragment in round_.fragments(self._process):
                self._fragments.setdefault(fragment.leaf, (buffer, []))[1].append(fragment)

    def gather(self) -> None:
        """Begins the gathers of the step that all processes have read."""
        failure: PeerError | None = None
        for round_, buffer in self._rounds:
            try:
                while failure is None and len(self._in_flight) >= _MOST_IN_FLIGHT:
                    self._land()
            except PeerError as error:  # others may wait in gathers that they have begun
                failure = error
            with gathering():
                self._in_flight.append((round_, Future()))  # one that fails here never ends
                self._compiled[id(round_.form)].result()
                gather = self._thread.submit(buffer.gather(self._process))
                self._in_flight[-1] = round_, gather
        if failure is not None:
            raise failure
        self._rounds = []

    def take(
        self, numbers: Sequence[int], boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes values that this process reads in the step: to keep, or to send to others."""
        for number in numbers:
            if number >= self._own:
                buffer, fragments = self._fragments[self._step_leaves[number].number]
                for box, values in zip(boxes, parts, strict=True):
                    _, _, row, column, offset = fragments[box]
                    buffer.put(row, column, offset, values)
        own = [self._step_leaves[number] for number in numbers if number < self._own]
        return self._values.take(own, boxes, parts) if own else None

    def finish(self) -> None:
        """Waits for the gathers that have begun."""
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        round_, gather = self._in_flight[0]
        gathered = await_gathered(gather, self._group, LOADING)
        self._in_flight.popleft()
        is_direct = round_.form.is_direct
        rows = {} if is_direct else on_host(round_.form, gathered, self._process)
        for lane, item in ((n, item) for n, items in enumerate(round_.lanes) for item in items):
            if is_direct:
                shards = {s.device: s.data for s in gathered[lane].addressable_shards}
                self._values.put(self._leaves[item.leaf], shards)
            else:
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
                    parts.append(box.view_of(values, whole))
        self._values.take([leaf], numbers, parts)


def _entries(source: ArraySource) -> list[TensorEntry]:
    """Return the tensors that values are made of."""
    if isinstance(source, MappedSource):
        return [source.tensors[name] for name in source.leaf.sources()]
    return [source.entry]


def _stored_places(entries: Iterable[TensorEntry], files: Dict[str, str]) -> str:
    """Return where tensors are stored, and as what, with the names that files are shown by."""
    return "\n".join(
        f"{name} {dtype.code} {shape} at {start} {files[file]}"
        for name, dtype, shape, file, start, _ in entries
    )


def _content(
    catalog: Catalog,
    leaves: Sequence[ResolvedLeaf],
    exchanged: Sequence[TensorEntry],
    files: Dict[str, str],
) -> str:
    """Return a digest that tells apart the bytes of a load's tensors.

    It has the versions of files, as far as their storage knows them; of local files, since each
    host may have its own, a sample of the bytes that are exchanged; of pieces the save that made
    them.
    """
    storage, is_in_pieces = catalog.storage, catalog.layout == "sharded"
    if is_in_pieces and (manifest := catalog.manifest()) and manifest.pieces is not None:
        return _short_digest((manifest.pieces.save_id, manifest.pieces.files))
    if not isinstance(storage, LocalStorage):
        used = {entry.file for leaf in leaves for entry in _entries(leaf.region.source)}
        versions = {files[file]: storage.version(file) for file in used}
        known = sorted((file, version) for file, version in versions.items() if version)
        return _short_digest(known) if known else ""
    if is_in_pieces:  # of no save of this package: the middle of each file
        return _short_digest([storage.sample(f, 0, storage.size(f)) for f in catalog.files])
    by_place = [*{(entry.file, entry.start): entry for entry in exchanged}.values()]
    sample = [
        storage.sample(entry.file, entry.start, entry.stop)
        for entry in by_place[:: -(-len(by_place) // _SAMPLES) or 1]
    ]
    return _short_digest(sample) if sample else ""


def _short_digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _described(leaves: Sequence[ResolvedLeaf], files: Dict[str, str]) -> list[str]:
    """Return a line for each leaf, by name."""
    return [
        f"leaf {region.name!r} {region.dtype} {region.source.shape} on {abstract.placement}, of"
        f" {_stored_places(_entries(region.source), files)}".replace("\n", ", ")
        for _, abstract, region in sorted(leaves, key=lambda leaf: leaf.region.name)
    ]
