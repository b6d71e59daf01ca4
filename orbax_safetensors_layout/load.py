"""The load pipeline, top to bottom: catalog, abstract tree, plan, read, build. Start here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import logging as standard_logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import PeerError, SafetensorsLayoutError
from orbax_safetensors_layout.format import DIGESTS
from orbax_safetensors_layout.mapping import Mapping
from orbax_safetensors_layout.options import GIB, PathLike, ReadOptions, given_or_default
from orbax_safetensors_layout.plan import ReadPlan, array_sources, exchange_cost
from orbax_safetensors_layout.pytree import AbstractTree, HostLeaf
from orbax_safetensors_layout.reading import (
    LOADING,
    PLANNING,
    ArrayReader,
    ExchangeStep,
    LeafBuilder,
    ReadStats,
    ReplicaExchange,
    ResolvedLeaf,
    SavedMetadata,
    SourcedLeaf,
    VerifyingReader,
    adopts,
    exchange_turn,
    exchanging,
    fingerprint_of,
    load_group,
    processes_per_host,
    registration,
    resolve_leaves,
    source_leaves,
    steps_of,
)
from orbax_safetensors_layout.runtime import (
    ProcessGroup,
    ProgressReport,
    frozen_heap,
    paused_collector,
    progress_callback,
)
from orbax_safetensors_layout.sharding import ProcessShards
from orbax_safetensors_layout.storage import LocalStorage, RangeReader

_VERIFYING = "verifying what was read"
_MUCH, _MUCH_BYTES = 2.0, GIB  # over-read that is warned of
_UNLIMITED_BYTES = 1 << 60
_CONVERTED = (
    "a checkpoint converted to what is loaded, with its mapping and mesh (format 'sharded')"
)
_MOST_ADVISED = 2048  # leaves that are planned again for it


@dataclasses.dataclass(slots=True, unsafe_hash=True)  # frozen ones take twice as long to make
class TensorMetadata:
    """One tensor of a checkpoint; where it comes from several files, `file` is the first."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str
    nbytes: int


def load(
    path: PathLike,
    abstract: Any = None,
    *,
    mapping: Mapping | None = None,
    only: str | Sequence[str] | None = None,
    options: ReadOptions | None = None,
) -> Any:
    """Loads a safetensors checkpoint; each process reads the bytes of its own shards.

    Processes exchange what several of them need where that takes less time than reading it again,
    see `ReadOptions.replicated`; else there is no collective and no XLA compilation. Leaves are
    matched to tensors by their dotted key paths, so a nested tree and the flat dict of its dotted
    names load the same tensors.

    Args:
        path: A `.safetensors` file, or a folder of them with or without an index file; also as a
            `gs://`, `s3://`, `az://`, `hf://` or `https://` URL.
        abstract: The tree to load; see docs/trees.md. Where a leaf's dtype is not
            the file's, values are cast; a cast to integers that do not hold the values, or of a
            64-bit value that JAX cannot hold because x64 is off, is an error. Leaves that are jax
            arrays and name no sharding are replicated on all devices. Without a tree, what was
            saved comes back; of a checkpoint of others a flat dict of numpy arrays.
        mapping: What the leaves are made of; without one each leaf is the tensor of its name. A
            shard of a mapped leaf reads only its own bytes.
        only: Without an abstract tree or a mapping: glob patterns of the tensors to load
            (`"model.layers.{0..15}.*"`).
        options: How to read.

    Returns:
        The tree, with arrays in place of its leaves.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        FormatError: A file is malformed, or with `ReadOptions(verify=True)` not what was saved.
        MappingError: The mapping does not fit the checkpoint and the tree; lists all problems.
        MismatchError: Tensors are missing, unexpected (with `ReadOptions.strict`), or of another
            shape or dtype; all problems of one kind are reported together.
        StorageError: A read failed.
        PeerError: Another process did not come, loads something else, or failed while they exchange
            what several need; not with `"each"`.

    Examples:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> folder = tempfile.mkdtemp()
        >>> tensors = {"layer.weight": np.arange(4.0, dtype=np.float32)}
        >>> safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
        >>> load(folder)
        {'layer.weight': array([0., 1., 2., 3.], dtype=float32)}
        >>> load(folder, {"layer": {"weight": jax.ShapeDtypeStruct((4,), np.float32)}})
        {'layer': {'weight': Array([0., 1., 2., 3.], dtype=float32)}}
    """
    options = given_or_default(options, ReadOptions)
    return load_requested(path, LoadRequest(abstract, mapping, only, options))


class LoadRequest(NamedTuple):
    """The arguments of a load, but for its path; the abstract tree may be parsed already."""

    abstract: Any
    mapping: Mapping | None
    only: str | Sequence[str] | None
    options: ReadOptions
    partial: bool = False  # whether leaves that the checkpoint lacks come back as given

    def open(self, path: PathLike) -> Catalog:
        """Opens a checkpoint as the options say."""
        return Catalog.open(path, retries=self.options.retries, cache=self.options.cache_folder)

    def processes(self, tree: AbstractTree, count: int) -> tuple[int, ...]:
        """Return the processes, of `count`, that exchange the tensors that several of them hold."""
        leaves = () if self.abstract is None else tree.parsed
        placements = (leaf.placement for leaf in leaves if leaf is not None)
        return exchanging(placements, self.options, count)


def load_requested(
    path: PathLike, request: LoadRequest, open_catalog: Callable[[], Catalog] | None = None
) -> Any:
    """Loads from a path, or what `open_catalog` opens for it; closes it in the end."""
    return begin_requested(path, request, open_catalog)()


def begin_requested(
    path: PathLike, request: LoadRequest, open_catalog: Callable[[], Catalog] | None = None
) -> Callable[[], Any]:
    """Plans as `load_requested` does, from the headers; returns a function that reads, once.

    Processes find each other by `path`; where one fails in `open_catalog`, all do.
    """
    options = request.options
    with contextlib.ExitStack() as on_error, frozen_heap():
        with telling_others(path, request):
            opened = request.open(path) if open_catalog is None else open_catalog()
            catalog = on_error.enter_context(opened)
            tree = _abstract_tree(catalog, request, devices=True)
            processes = request.processes(tree, jax.process_count())
        group = on_error.enter_context(load_group(path, processes, options))
        storage: RangeReader = catalog.storage
        if options.verify:
            storage = _verifying(catalog)
        shards = ProcessShards(processes_per_host=processes_per_host(group, options))
        exchange = jax.process_index() in processes
        sourced = _SourcedLoad.of(catalog, request, tree, devices=True)
        plan = functools.partial(_plan, storage=storage, shards=shards)
        planned = plan(sourced, exchange=exchange)
        resources = on_error.pop_all()

    def read() -> Any:
        turn = exchange_turn() if planned.exchanges else contextlib.nullcontext(True)
        with resources, frozen_heap(), _explicit_transfer(), turn as has_turn:
            is_agreed = _agree(sourced, planned, group, has_turn=has_turn)
            agreed = planned if is_agreed else plan(sourced, exchange=False)
            _log_cost(sourced, agreed, plan, may_exchange=is_agreed)
            values, stats = _read(agreed, catalog, options, group)
            if isinstance(storage, VerifyingReader):
                with group.together(_VERIFYING):
                    storage.check(strict=True)
        _record(stats)
        return values

    weakref.finalize(read, catalog.close).atexit = False  # of a load that is never awaited
    return read


@contextlib.contextmanager
def telling_others(path: PathLike, request: LoadRequest) -> Iterator[None]:
    """Tells the processes of the tree as it is given of an error; the manifest may name others."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error is raised
            tree = AbstractTree.parse(request.abstract)
            processes = request.processes(tree, jax.process_count())
            with load_group(path, processes, request.options) as group:
                group.fail(error)
        raise


def _verifying(catalog: Catalog) -> VerifyingReader:
    reader = VerifyingReader.open(catalog.storage, catalog.path)
    if reader is None:
        raise SafetensorsLayoutError(
            "the checkpoint has no checksums to verify the data with",
            file=catalog.path,
            expected=DIGESTS,
            hint="Save with WriteOptions(digests=True), or load without verify=True.",
        )
    return reader


class _PlannedLoad(NamedTuple):
    """The steps of a load, of which each has a plan, and the reader that runs them in turn."""

    tree: AbstractTree
    leaves: list[ResolvedLeaf]
    steps: list[ExchangeStep]
    plans: list[ReadPlan]
    reader: ArrayReader

    @property
    def exchanges(self) -> bool:
        return any(step.stage for step in self.steps)


class _SourcedLoad(NamedTuple):
    """The part of a load that is the same for all processes."""

    catalog: Catalog
    request: LoadRequest
    tree: AbstractTree
    leaves: list[SourcedLeaf]
    devices: bool  # whether shardings must have some

    @classmethod
    def of(
        cls, catalog: Catalog, request: LoadRequest, tree: AbstractTree, *, devices: bool
    ) -> _SourcedLoad:
        """Return the leaves of a load, and the arrays of the checkpoint that they are."""
        abstract, mapping, only, options, _ = request
        # What `only` leaves out is not unexpected; without a tree nothing is left out.
        strict = only is None and (options.strict or abstract is None)
        leaves = source_leaves(catalog, tree, mapping, strict=strict)
        return cls(catalog, request, tree, leaves, devices)


def _plan(
    sourced: _SourcedLoad, storage: RangeReader, shards: ProcessShards, *, exchange: bool
) -> _PlannedLoad:
    """Plans what a process reads from `storage`.

    With `exchange` it may get from others what they hold, too.
    """
    catalog, (*_, options, _), tree, _, devices = sourced
    catalog.prefer(shards.process_index)
    leaves = resolve_leaves(sourced.leaves, shards, devices=devices)
    with frozen_heap():  # of what has come since the load began
        steps = steps_of(catalog, leaves, shards, options, exchange=exchange)
    # Its end waits for what the devices have to do: here for gathers that others may never begin.
    registers = options.register_memory and not any(step.stage for step in steps)
    reader = ArrayReader(
        storage=storage,
        profile=options.profile(storage.kind, sum(step.reads.needed_bytes for step in steps)),
        memory_budget_bytes=options.memory_budget_bytes,
        adopt=adopts(tree.parsed),
        mmap=options.mmap,
        register=registration(tree.parsed) if registers else None,
    )

    def planned(step: ExchangeStep) -> ReadPlan:
        # The gaps between exchanged regions are read by other processes.
        joins_gaps = not step.stage and options.replicated != "read_once"
        return reader.plan(step.reads, joins_gaps=joins_gaps)

    plans = [planned(step) for step in steps]
    if len(steps) > 1 and steps[0].leaves and plans[0].cost().over_read == 1:
        # A step ends when its last read does; what needs no gaps is read with the next one.
        steps[:2] = steps[0].joined(steps[1], options.memory_budget_bytes)
        plans[:2] = map(planned, steps[:2])
    exchanged = exchange_cost([step.stage for step in steps], shards.process_index)
    of_host = shards.processes_per_host
    plans[0] = dataclasses.replace(plans[0], exchange=exchanged, processes_per_host=of_host)
    return _PlannedLoad(tree, leaves, steps, plans, reader)


def _log_cost(
    sourced: _SourcedLoad,
    planned: _PlannedLoad,
    plan: Callable[..., _PlannedLoad],
    *,
    may_exchange: bool,
) -> None:
    """Logs what a load is about to read, and how to read less where that is much."""
    path, whole = sourced.catalog.path, ReadPlan.joined(planned.plans)
    if logging.get_absl_logger().isEnabledFor(standard_logging.INFO):
        logging.info("Loading %s: %s", path, "; ".join(whole.figures(whole.cost())))
    much = max(_MUCH_BYTES, _MUCH * whole.needed_bytes)
    if whole.most_read_bytes > much and whole.read_bytes > much:
        remedies = []
        try:
            for remedy in _remedies(sourced, whole, plan, may_exchange=may_exchange):
                remedies.append(remedy)
        except Exception as error:  # a load does not fail for want of advice
            logging.vlog(1, "No more advice on %s: %r", path, error)
        logging.warning(
            "Loading %s reads %.1f bytes for each that is needed. Fewer are read with: %s.",
            path,
            whole.read_bytes / whole.needed_bytes,
            "; or ".join([*remedies, _CONVERTED]),
        )


def _remedies(
    sourced: _SourcedLoad,
    whole: ReadPlan,
    plan: Callable[..., _PlannedLoad],
    *,
    may_exchange: bool,
) -> Iterator[str]:
    """Yields what halves the bytes beyond those needed, by a plan with it.

    Of many leaves those are planned that read most beyond what they need.
    """

    def with_options(**changes: Any) -> ReadPlan:
        changed = request._replace(options=dataclasses.replace(request.options, **changes))
        processes = changed.processes(sourced.tree, jax.process_count())
        exchange = may_exchange and jax.process_index() in processes
        planned = plan(sourced._replace(request=changed), exchange=exchange)
        return ReadPlan.joined(planned.plans)

    def helps(**changes: Any) -> bool:
        return with_options(**changes).read_bytes <= most_bytes

    request = sourced.request
    if len(sourced.leaves) > _MOST_ADVISED:
        worst = heapq.nlargest(_MOST_ADVISED, whole.by_tensor(), lambda row: row[2] - row[1])
        names = {name for name, *_ in worst}
        sourced = sourced._replace(leaves=[leaf for leaf in sourced.leaves if leaf.name in names])
        whole = with_options()
    most_bytes = (whole.read_bytes + whole.needed_bytes) / 2
    if not whole.adopt:
        held = with_options(memory_budget_bytes=_UNLIMITED_BYTES)
        if held.read_bytes <= most_bytes:
            least = 1 << (held.most_held_bytes - 1).bit_length()
            yield f"ReadOptions(memory_budget_bytes={least}), where rows are read again and again"
    replicated = request.options.replicated if may_exchange else None
    if replicated == "each" and helps(replicated="auto"):
        yield "ReadOptions(replicated='auto'), by which processes exchange rows"
    elif replicated in ("each", "auto") and helps(replicated="read_once"):
        yield "ReadOptions(replicated='read_once'), by which they exchange rows, in more time"
    split = [any(box.shape != leaf.shape for box in leaf.local.boxes) for leaf in whole.leaves]
    by_tensor = zip(split, whole.by_tensor(), strict=True)
    if sum(read for is_split, (*_, read) in by_tensor if is_split) > most_bytes:
        yield "shardings that split outer dimensions of the tensors in the files"


def _abstract_tree(catalog: Catalog, request: LoadRequest, *, devices: bool) -> AbstractTree:
    """Return the abstract tree, with defaults from the checkpoint's manifest."""
    abstract, mapping, only, _, partial = request
    if only is not None:
        if abstract is None and mapping is None:
            return AbstractTree.of_tensors(catalog.select(only))
        raise ValueError(
            "`only` names tensors where there is neither an abstract tree nor a mapping; with one,"
            " leave out of the tree the leaves that you do not need, or put `...` in their place."
        )
    saved = SavedMetadata(catalog, is_mapped=mapping is not None)
    if abstract is None and mapping is not None:
        arrays = array_sources(catalog, mapping).items()
        abstract = {name: HostLeaf(array.shape, array.dtype) for name, array in arrays}
        abstract |= mapping.passed(saved.values())
    elif abstract is None:
        return saved.tree() or AbstractTree.of_tensors(catalog.names)
    with _explicit_transfer():  # of recorded numbers
        tree = AbstractTree.parse(abstract)
        return saved.apply_defaults(tree, devices=devices, partial=partial, mapping=mapping)


def _agree(
    sourced: _SourcedLoad, planned: _PlannedLoad, group: ProcessGroup, *, has_turn: bool
) -> bool:
    """Holds a plan against the other processes'; returns False where each must read by itself."""
    catalog, (_, mapping, _, options, _), *_ = sourced
    fingerprint = fingerprint_of(planned.steps, planned.leaves, options, catalog, mapping)
    if not has_turn:
        place = f"{fingerprint.place}, beside another load that process {jax.process_index()} runs"
        fingerprint = fingerprint._replace(place=place)
    if not planned.exchanges:
        group.arrive(PLANNING, fingerprint)  # each reads by itself, and nobody waits for another
        return True
    group.barrier(PLANNING, agree=fingerprint)
    if group.apart and options.replicated == "read_once":
        raise PeerError(
            f"processes cannot exchange what they read: {group.apart}",
            file=catalog.path,
            hint="Load with replicated='auto' or 'each', or give all processes one path, and let"
            " one load end before the next begins.",
        )
    if group.apart:
        logging.warning(
            "Loading %s: each process reads all that it needs, since what they exchange might be"
            " of different checkpoints, or loads: %s",
            catalog.path,
            group.apart,
        )
    return not group.apart


def _read(
    planned: _PlannedLoad, catalog: Catalog, options: ReadOptions, group: ProcessGroup
) -> tuple[Any, ReadStats]:
    tree, leaves, steps, plans, reader = planned
    values = LeafBuilder(leaves, adopt=reader.adopt)
    check = functools.partial(group.check, LOADING)
    done = []
    with (
        progress_callback(options.progress) as progress,
        ReplicaExchange(leaves, values, group, steps) as exchange,
    ):
        report = ProgressReport(progress, sum(plan.needed_bytes for plan in plans))
        for step, plan in zip(steps, plans, strict=True):
            with group.together(LOADING):
                exchange.begin(step)
                done.append(reader.run(step.reads, plan, exchange.take, report=report, check=check))
        together = group.together if planned.exchanges else contextlib.nullcontext
        with together(LOADING):
            exchange.gather()
        with together(LOADING):  # all have begun all gathers
            exchange.finish()
            if isinstance(catalog.storage, LocalStorage):
                catalog.storage.check_current()
    built = values.values()
    given = zip(tree.leaves, tree.parsed, strict=True)
    built_leaves = [leaf if abstract is None else next(built) for leaf, abstract in given]
    return tree.build(built_leaves), ReadStats(*map(sum, zip(*done, strict=True)))


def metadata(path: PathLike, *, mapping: Mapping | None = None) -> dict[str, TensorMetadata]:
    """Name, shape, dtype, file and size of every tensor of a checkpoint, from the headers alone.

    With a mapping, of the leaves that it makes.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        FormatError: A header or the index is malformed.
        MappingError: The mapping does not fit the checkpoint.
    """
    with Catalog.open(path) as catalog, paused_collector():
        if mapping is None:
            return {
                name: TensorMetadata(entry.shape, entry.dtype.numpy, entry.file, entry.nbytes)
                for name, entry in catalog.all_entries().items()
            }
        return {
            name: TensorMetadata(source.shape, source.dtype, source.file or "", source.nbytes)
            for name, source in array_sources(catalog, mapping).items()
        }


def plan_load(
    path: PathLike,
    abstract: Any = None,
    *,
    mapping: Mapping | None = None,
    only: str | Sequence[str] | None = None,
    options: ReadOptions | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    processes_per_host: int = 1,
) -> ReadPlan:
    """Plans what `load` would read with these arguments, from the headers alone.

    The plan is that of process `process_index`, by default this one. Shardings may be
    `NamedSharding`s over an `AbstractMesh`, for a cluster that one does not have: its devices are
    numbered in row-major order of the mesh and divided in equal blocks among `process_count`
    processes, by default `jax.process_count()`. Of them `processes_per_host` share the rates of a
    host, as where each GPU has a process; a load with `"auto"` counts them itself.

    Raises:
        ValueError: There is no process of that index, or fewer than `processes_per_host`.
        SafetensorsLayoutError: As from `load`.
    """
    options = given_or_default(options, ReadOptions)
    with (
        Catalog.open(path, retries=options.retries, cache=options.cache_folder) as catalog,
        frozen_heap(),
    ):
        shards = ProcessShards(process_index, process_count, processes_per_host=processes_per_host)
        return next(plan_each(catalog, LoadRequest(abstract, mapping, only, options), [shards]))


def plan_each(
    catalog: Catalog, request: LoadRequest, each: Iterable[ProcessShards]
) -> Iterator[ReadPlan]:
    """Yields what `plan_load` returns for each process, from an open catalog."""
    tree = _abstract_tree(catalog, request, devices=False)
    sourced = _SourcedLoad.of(catalog, request, tree, devices=False)
    for shards in each:
        exchange = shards.process_index in request.processes(tree, shards.process_count)
        planned = _plan(sourced, catalog.storage, shards, exchange=exchange)
        yield ReadPlan.joined(planned.plans)


def _explicit_transfer() -> contextlib.AbstractContextManager[None]:
    """Loading is an explicit transfer: a guard against implicit ones is not meant for it."""
    config: Any = jax.config
    modes = (config.jax_transfer_guard_host_to_device, config.jax_transfer_guard)
    if any(mode in ("disallow_explicit", "log_explicit") for mode in modes):
        return contextlib.nullcontext()
    allowed: contextlib.AbstractContextManager[None] = jax.transfer_guard_host_to_device("allow")
    return allowed


def _record(stats: ReadStats) -> None:
    """Reports the load as Orbax's own reader does, so that existing dashboards see it."""
    for name, value in stats._asdict().items():
        jax.monitoring.record_scalar(f"/jax/orbax/read/safetensors/{name}", float(value))
    logging.vlog(1, "Loaded safetensors: %s", stats)
