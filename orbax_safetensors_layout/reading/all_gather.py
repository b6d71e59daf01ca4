"""Gathers values that one process read to all that hold them: a round is one program of devices.

A program moves bits, as unsigned integers; XLA sees no float that it might canonicalise. There are
at most two programs for the large leaves of one box shape, dtype and grid of devices, and one for
all the small leaves of a grid. A call of a program may return at once, or when all processes have
made theirs; a thread makes it, which nobody need wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_safetensors_layout.errors import PeerError
from orbax_safetensors_layout.plan import RoundForm
from orbax_safetensors_layout.runtime import DaemonThread, ProcessGroup, allocate
from orbax_safetensors_layout.sharding import ReplicaGrid

_BOX, _LANE, _PART, _CUT = "box", "lane", "part", "cut"
_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
_EXIT_SECONDS = 5.0

Gather: TypeAlias = Future[tuple[Any, ...]]
"""What the call of a gather returns: arrays whose values may still be on their way."""

# Of gathers that this process began before it failed. Others may not have begun them, and one would
# then answer with the next gather of something else.
_unfinished: list[Gather] = []
_turn = threading.Lock()
_threads: weakref.WeakSet[DaemonThread] = weakref.WeakSet()


class SendBuffer:
    """The values that the devices of this process contribute to a round."""

    def __init__(self, form: RoundForm) -> None:
        self._form = form
        self._bits, self._trailing = _bits_of(form)
        self._values: dict[tuple[int, int], np.ndarray] = {}

    def put(self, row: int, column: int, offset: int, values: np.ndarray) -> None:
        """Takes values of the device at a place of the grid; in a packed lane for byte `offset`."""
        contiguous = np.ascontiguousarray(values)
        if self._form.is_packed:
            flat = contiguous.reshape(-1).view(np.uint8)
            self._slot(row, column)[0, offset : offset + flat.size] = flat
            return
        bits = (contiguous[..., None] if self._trailing else contiguous).view(self._bits)[None]
        if values.shape == self._form.part_shape:
            self._values[row, column] = bits
        else:
            place: tuple[slice, ...] = (slice(0, 1), *map(slice, values.shape))
            self._slot(row, column)[place] = bits

    def _slot(self, row: int, column: int) -> np.ndarray:
        slot = self._values.get((row, column))
        if slot is None:
            memory = allocate(self._form.slot_bytes)
            memory[:] = 0  # what pads it goes to other processes
            shape = (1, *self._form.part_shape, *self._trailing)
            slot = self._values[row, column] = memory.view(self._bits).reshape(shape)
        return slot

    def gather(self, process: int) -> Callable[[], tuple[jax.Array, ...]]:
        """Puts the values on the devices; returns the call that gathers an array for each lane.

        Or one of the bytes of all lanes if they go to the host.
        """
        form = self._form
        shards = [
            jax.device_put(self._slot(row, column), form.grid.devices[row][column])
            for row, column in form.grid.slots(process)
        ]
        self._values.clear()
        pieces = _pieces_of(form)
        given = jax.make_array_from_single_device_arrays(pieces.shape, pieces.sharding, shards)
        return functools.partial(_gathered, form, given)


def _gathered(form: RoundForm, given: jax.Array) -> tuple[jax.Array, ...]:
    with _program_of(form) as program:
        gathered: tuple[jax.Array, ...] = program(given)
    return gathered


def compile_gather(form: RoundForm) -> None:
    """Compiles the program of rounds of a form, which then finds it in JAX's own cache."""
    with _program_of(form) as program:
        program.lower(_pieces_of(form)).compile()


def _bits_of(form: RoundForm) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype that values move as, and the dimensions that this adds to them."""
    itemsize = form.dtype.itemsize
    bits: np.dtype = np.dtype(f"u{itemsize}" if form.is_direct else "u1")
    return bits, () if form.is_direct or form.is_packed else (itemsize,)


def _pieces_of(form: RoundForm) -> Any:
    """Return what the devices of a round contribute together."""
    bits, trailing = _bits_of(form)
    extents = [*form.part_shape, *trailing]
    extents[form.axis] *= form.parts
    shape = (len(form.grid.devices) * form.lanes, *extents)
    mesh = _mesh(form.grid, form.lanes)
    sharding = NamedSharding(mesh, _spec(mesh, form.axis))
    pieces: Any = jax.ShapeDtypeStruct
    return pieces(shape, bits, sharding=sharding)


@contextlib.contextmanager
def _program_of(form: RoundForm) -> Iterator[Any]:
    """The program of a round, in a block where it is as in any other thread or program."""
    mesh = _mesh(form.grid, form.lanes)
    target = form.dtype if form.is_direct else None
    # The caller's mesh is not meant, nor is a weight that is NaN an accident.
    with jax.set_mesh(mesh), jax.debug_nans(False), jax.debug_infs(False):
        yield _program(mesh, form.axis, form.cut_axes, form.shape[form.axis], target)


def on_host(
    form: RoundForm, gathered: tuple[jax.Array, ...], process: int
) -> dict[int, np.ndarray]:
    """The bytes of all lanes that this process has gathered, by row: `[lanes, ...]`."""
    by_device = {shard.device: shard.data for shard in gathered[0].addressable_shards}
    devices = {row: form.grid.devices[row][column] for row, column in form.grid.slots(process)}
    return {row: jax.device_get(by_device[device]) for row, device in devices.items()}


@functools.lru_cache(256)
def _mesh(grid: ReplicaGrid, lanes: int) -> Mesh:
    devices = np.empty((len(grid.devices), grid.columns), object)
    for row, of_row in enumerate(grid.devices):
        devices[row] = of_row
    cuts = [f"{_CUT}{number}" for number in range(len(grid.cuts))]
    shaped = devices.reshape(len(grid.devices), lanes, -1, *grid.cuts)
    return Mesh(shaped, (_BOX, _LANE, _PART, *cuts))


def _spec(mesh: Mesh, axis: int) -> PartitionSpec:
    spec: PartitionSpec = PartitionSpec(  # type: ignore[no-untyped-call]
        (_BOX, _LANE), *[None] * axis, mesh.axis_names[2:]
    )
    return spec


@functools.lru_cache(256)
def _program(
    mesh: Mesh, axis: int, cut_axes: tuple[int, ...], length: int, target: np.dtype | None
) -> Any:
    """The identity from pieces to whole boxes; compiled once for each shape.

    Dimension `axis` of a box, of `length` without what pads it, is split among the parts of the
    `[boxes, lanes, parts, *cuts]` mesh. Along `cut_axes` devices keep parts of boxes. The results
    are an array for each lane, of dtype `target`, or without one the bits of all lanes.
    """
    lanes = mesh.shape[_LANE]

    def gather(piece: jax.Array) -> tuple[jax.Array, ...]:
        # Parts are numbered by the cuts last, so those that are exchanged are neighbours.
        for name, cut in reversed([*zip(mesh.axis_names[3:], cut_axes, strict=True)]):
            exchange: Any = jax.lax.all_to_all
            piece = exchange(piece, name, cut + 1, axis + 1, tiled=True)
        boxes = jax.lax.all_gather(piece, _PART, axis=axis + 1, tiled=True)
        boxes = jax.lax.slice_in_dim(boxes, 0, length, axis=axis + 1)
        boxes = jax.lax.all_gather(boxes, _LANE, axis=0, tiled=True)
        if target is None:
            return (boxes,)
        return tuple(jax.lax.bitcast_convert_type(boxes[lane], target) for lane in range(lanes))

    spec: PartitionSpec = PartitionSpec(_BOX)  # type: ignore[no-untyped-call]
    mapped = jax.shard_map(
        gather,
        mesh=mesh,
        in_specs=(_spec(mesh, axis),),
        out_specs=(spec,) * (1 if target is None else lanes),
        check_vma=False,
    )
    return jax.jit(mapped)


def _whole(value: jax.Array) -> tuple[jax.Array, ...]:
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding):  # JAX alone knows the order of its devices
        return (multihost_utils.process_allgather(value, tiled=True),)
    nowhere_split: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]
    kind = sharding.memory_kind
    replicated = NamedSharding(sharding.mesh, nowhere_split, memory_kind=kind)
    whole: jax.Array = jax.jit(_same, out_shardings=replicated)(value)
    return (whole.addressable_data(0),)


def _same(value: jax.Array) -> jax.Array:
    return value


@contextlib.contextmanager
def exchange_turn() -> Iterator[bool]:
    """Yields whether no other load of this process exchanges in the block.

    The gathers of two have no order that is the same on all processes: they would be mixed.
    """
    has_turn = _turn.acquire(blocking=False)
    try:
        yield has_turn
    finally:
        if has_turn:
            _turn.release()


def gather_thread() -> DaemonThread:
    """Return a thread that begins gathers in turn."""
    thread = DaemonThread("safetensors_gather")
    _threads.add(thread)
    return thread


@atexit.register
def _stop_threads() -> None:
    """Has calls that were given up return: one that did so after Python has ended would abort.

    Some wait for other processes in the store of `jax.distributed`, until that is shut down.
    """
    threads = [*_threads]
    if not all(thread.stop(_GRACE_SECONDS) for thread in threads):
        with contextlib.suppress(Exception):  # JAX tries again
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]
        for thread in threads:
            thread.stop(_EXIT_SECONDS)


def await_gathered(gather: Gather, group: ProcessGroup, doing: str) -> tuple[jax.Array, ...]:
    """Waits for what is gathered, while no other process fails, and no longer than a group does."""
    deadline = time.monotonic() + group.timeout_seconds
    with gathering():
        while not _has_ended(gather):
            group.check(doing)
            if time.monotonic() > deadline:
                raise group.overdue("what other processes have did not come")
            if gather.done():
                time.sleep(_PAUSE_SECONDS)
            else:
                wait([gather], _PAUSE_SECONDS)
        arrays: tuple[jax.Array, ...] = jax.block_until_ready(  # type: ignore[no-untyped-call]
            gather.result()
        )
        return arrays


def leave_unfinished(gathers: Iterable[Gather]) -> None:
    """Notes gathers that a failure ends the wait for; holds one array of each."""
    for gather in gathers:
        first: Gather = Future()
        _unfinished.append(first)
        gather.add_done_callback(functools.partial(_keep_first, first))


def _keep_first(first: Gather, gather: Gather) -> None:
    if gather.exception() is None:  # nothing tells whether one that fails began
        first.set_result(gather.result()[:1])


def await_unfinished() -> bool:
    """Gives gathers that failed some time to end; returns whether they have."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while _unfinished and time.monotonic() < deadline:
        _unfinished[:] = [gather for gather in _unfinished if not _has_ended(gather)]
        time.sleep(_PAUSE_SECONDS)
    return not _unfinished


def _has_ended(gather: Gather) -> bool:
    """Whether all values are there; raises what the call of a gather did."""
    return gather.done() and all(isinstance(a, np.ndarray) or a.is_ready() for a in gather.result())


@contextlib.contextmanager
def gathering() -> Iterator[None]:
    """Raises what JAX says of a gather as a `PeerError`, but where memory ran out."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise PeerError(
            f"replicas did not come from the processes that read them: {error}",
            hint="Another process of the program has probably ended; see its log.",
        ) from error
