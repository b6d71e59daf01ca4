"""Copies shards from device memory to numpy arrays on the host."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from orbax_safetensors_layout.format import SUB_BYTE
from orbax_safetensors_layout.geometry import AffineView, Box, Tile
from orbax_safetensors_layout.options import KIB
from orbax_safetensors_layout.plan import FilePart, LeafWrite
from orbax_safetensors_layout.sharding import box_of

Place = tuple[int, int]  # the number of a leaf, and that of one of its boxes

_SLABS = 4  # that fit the budget together: some are written while the next come
_SCATTERED = 2  # times as many elements as are needed lie between them: all are copied, once
_LEAST_SLAB_BYTES = 64 * KIB  # a small budget does not make ever smaller ones

_NO_MESH = Mesh(np.empty((), object), ())


class HostCopies:
    """Copies of shards in host memory, for as long as somebody holds them.

    Two saves at a time, such as a training step and its export, copy an array that both have once.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def find(self, array: jax.Array, number: int) -> jax.Array | None:
        """Return the copy of an addressable shard, by its number; it may be on its way."""
        of, copy = self._copies.get((id(array), number), (None, None))
        return copy() if of is not None and copy is not None and of() is array else None

    def add(self, array: jax.Array, number: int, copy: jax.Array) -> None:
        key = id(array), number
        self._copies[key] = weakref.ref(array), weakref.ref(copy, self._forget(key))

    def _forget(self, key: tuple[int, int]) -> Callable[[weakref.ref[Any]], None]:
        def forget(copy: weakref.ref[Any]) -> None:
            if self._copies.get(key, (None, None))[1] is copy:  # not a later one's
                del self._copies[key]

        return forget


_host_copies = HostCopies()


class PendingShards(NamedTuple):
    """Shards on their way to the host."""

    arrays: Sequence[Any]  # numpy's, and JAX's, which numpy waits for
    is_captured: bool


class _Captured(NamedTuple):
    """Members on the host; their memory lives on when an array is deleted."""

    members: Sequence[np.ndarray]
    pinned: Sequence[jax.Array] = ()  # that they are views of, for other saves to find


class HostValues:
    """The values of leaves that this process holds, one numpy array a shard.

    On the CPU backend they are views of the shards' own memory: JAX does not reuse it while they
    live, also not for a donated array (seen with jax 0.7 to 0.12; `test_save_v0.py` checks it).
    They are views of numpy arrays, too, until `capture`; then the caller may overwrite these.

    Attributes:
        local_names: The names of arrays that are on devices of this process alone.
    """

    def __init__(self, values: Sequence[Any], leaves: Sequence[LeafWrite]) -> None:
        self._values = list(values)
        self._leaves = leaves
        self.local_names = [
            name
            for name, value in self.named()
            if isinstance(value, jax.Array) and value.is_fully_addressable
        ]
        self._numbers: dict[tuple[Sharding, tuple[int, ...]], dict[Box, int]] = {}
        self._captured: dict[tuple[int, tuple[int, ...]], _Captured] = {}
        self._lock = threading.Lock()
        self._whole: dict[tuple[int, tuple[int, ...]], _Captured] = {}  # contiguous boxes
        self._left = 0  # uses to come of what was not captured, and its copies on their way
        self._uses: Counter[tuple[int, tuple[int, ...]]] = Counter()  # to come, of leaf and members
        self._all_captured = threading.Event()
        self._copies = False  # of numpy arrays, which the caller may overwrite

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of leaves, as they were given."""
        # Behind them are the tensors that a mapped save makes.
        for leaf, value in zip(self._leaves, self._values, strict=False):
            yield leaf.tensor.name, value

    def name(self, leaf: int) -> str:
        return self._leaves[leaf].tensor.name

    def cut(self, part: FilePart, budget_bytes: int) -> Iterator[FilePart]:
        """Yields a part, or slabs of one beside which no other of its size would fit a budget."""
        nbytes = self.held_bytes(part)
        captured = (part.leaf, part.tile.members) in self._captured
        if nbytes <= max(budget_bytes // 2, _LEAST_SLAB_BYTES) or captured:
            yield part
            return
        most = part.tile.box.size * max(budget_bytes // _SLABS, _LEAST_SLAB_BYTES) // nbytes
        start = part.start
        for slab in part.tile.slabs(most, part.dtype.group):
            stop = start + slab.box.size * part.dtype.bits // 8
            yield part._replace(tile=slab, start=start, stop=stop)
            start = stop

    def held_bytes(self, part: FilePart) -> int:
        """Return the host memory of a part's members, beyond what arrays have on the host."""
        value = self._values[part.leaf]
        if isinstance(value, np.ndarray) and self._copies:
            return part.tile.box.size * int(value.dtype.itemsize)
        if not isinstance(value, jax.Array) or _on_host(value):
            return 0
        # numpy makes a byte of each sub-byte element, beside the copy of the packed ones.
        return part.tile.box.size * (2 if value.dtype in SUB_BYTE else value.dtype.itemsize)

    def in_order(self, part: FilePart) -> bool:
        """Whether each of a part's members is contiguous, as far as known beforehand."""
        value = self._values[part.leaf]
        if not isinstance(value, np.ndarray) or self._copies:
            return True
        boxes = self._leaves[part.leaf].held.boxes
        return all(value[boxes[n].slices].flags.c_contiguous for n in part.tile.members)

    def begin(self, part: FilePart) -> PendingShards:
        """Begins to copy a part's members to the host; `wait` waits for them."""
        pending = self.begin_region(part)
        self._end_use((part.leaf, part.tile.members))
        return pending

    def begin_region(self, part: FilePart) -> PendingShards:
        """The same of a `region`, of which others may follow until `end_use`."""
        key = part.leaf, part.tile.members
        captured = self._whole.get(key) or self._captured.get(key)
        if captured is None:
            self._count(1)
            return PendingShards(self._begin(part), is_captured=False)
        boxes = [self._leaves[part.leaf].held.boxes[number] for number in part.tile.members]
        parts = [*map(_common, captured.members, boxes, itertools.repeat(part.tile.box))]
        return PendingShards(parts, is_captured=True)

    def wait(self, pending: PendingShards) -> list[np.ndarray]:
        members = [np.asarray(array) for array in pending.arrays]
        if not pending.is_captured:
            self._count(-1)
        return members

    def hold(self, uses: Mapping[Place, int]) -> None:
        """Has boxes stay on the host, if they are there, until `end_use` for each of their uses."""
        self._uses.update({(leaf, (held,)): count for (leaf, held), count in uses.items()})
        with self._lock:
            self._left = sum(n for key, n in self._uses.items() if key not in self._captured)
        self._count(0)

    def end_use(self, place: Place) -> None:
        leaf, held = place
        self._end_use((leaf, (held,)))

    def _end_use(self, key: tuple[int, tuple[int, ...]]) -> None:
        self._uses[key] -= 1
        if key not in self._captured:
            self._count(-1)
        if self._uses[key] <= 0:
            self._captured.pop(key, None)
            self._whole.pop(key, None)

    def _count(self, change: int) -> None:
        with self._lock:
            self._left += change
            if not self._left:
                self._all_captured.set()

    def _begin(self, part: FilePart) -> Sequence[Any]:
        value, held = self._values[part.leaf], self._leaves[part.leaf].held
        region = part.tile.box
        if not isinstance(value, jax.Array):  # of which each process has the whole
            values = value[region.slices]
            return [values.copy() if self._copies else values]
        boxes = [held.boxes[number] for number in part.tile.members]
        numbers = self._shard_numbers(value)
        shards = [value.addressable_data(numbers[box]) for box in boxes]
        if _on_host(value):
            return [*map(_common, map(np.asarray, shards), boxes, itertools.repeat(region))]
        if part.tile.member_shape != shards[0].shape:
            if _is_pinned(value):  # which numpy cuts faster than XLA; the caller may delete it
                return [
                    _common(np.asarray(s), b, region).copy()
                    for s, b in zip(shards, boxes, strict=True)
                ]
            with _on_single_devices():
                return _to_host([_region(s, b, region) for s, b in zip(shards, boxes, strict=True)])
        copies = [_host_copies.find(value, numbers[box]) for box in boxes]
        missing = [n for n, copy in enumerate(copies) if copy is None]
        with _on_single_devices():
            copied = _to_host([shards[n] for n in missing])
        for n, copy in zip(missing, copied, strict=True):
            copies[n] = copy
            _host_copies.add(value, numbers[boxes[n]], copy)
        return copies

    def _shard_numbers(self, array: jax.Array) -> dict[Box, int]:
        """Return which addressable shard holds each box, equal shardings and shapes once."""
        key = (array.sharding, array.shape)
        if key not in self._numbers:
            numbers: dict[Box, int] = {}
            for number, shard in enumerate(array.addressable_shards):
                # Any number gives the one shard of a fully replicated array.
                devices = array.addressable_data(number).sharding.device_set
                assert array.is_fully_replicated or devices == {shard.device}
                numbers.setdefault(box_of(shard.index, array.shape), number)
            if not array.size:  # equal to what `ProcessShards.held` says of empty arrays
                numbers.setdefault(Box.whole(array.shape), 0)
            self._numbers[key] = numbers  # complete: other threads ask, too
        return self._numbers[key]

    def box(self, place: Place) -> FilePart:
        """Return a box as a part of no file."""
        leaf, held = place
        box = self._leaves[leaf].held.boxes[held]
        return FilePart(leaf, Tile.alone(box, held), self._leaves[leaf].tensor.dtype, 0, 0)

    def region(self, place: Place, views: Sequence[AffineView]) -> tuple[FilePart, int]:
        """Return the region of a box that views have elements of, as a part of no file.

        Of what need not be copied it is all. If their elements are scattered, all is copied now.
        Beside it are the bytes that contiguous values of it take on the host, beyond what is there.
        """
        part = self.box(place)
        box = part.tile.box
        if self._is_there(part):
            return part, 0
        regions = [view.region_in(box.shape) for view in views]
        region = functools.reduce(Box.joined, regions).shifted(box.start)
        if region.size > _SCATTERED * sum(math.prod(view.shape) for view in views):
            members = [*map(np.ascontiguousarray, self.wait(self.begin_region(part)))]
            self._whole[part.leaf, part.tile.members] = _Captured(members)
            return part, 0
        part = part._replace(tile=Tile.alone(region, part.tile.members[0]))
        nbytes = region.size * self._leaves[part.leaf].values.itemsize
        return part, max(self.held_bytes(part), nbytes)

    def view_in(self, part: FilePart, view: AffineView) -> AffineView:
        """Return a view of a box as one of such a part of it."""
        box = self._leaves[part.leaf].held.boxes[part.tile.members[0]]
        region = part.tile.box
        return view if region == box else view.within(box.shape, region.within(box))

    def _is_there(self, part: FilePart) -> bool:
        """Whether contiguous values of a box are on the host; for all of its uses, if so."""
        key = part.leaf, part.tile.members
        there = self._whole.get(key) or self._captured.get(key)
        if there is None and not self.held_bytes(part):
            there = _Captured([*map(np.asarray, self._begin(part))])
        if there is None or not all(values.flags.c_contiguous for values in there.members):
            return False
        self._whole[key] = there
        return True

    def capture(self, parts: Sequence[FilePart], budget_bytes: int | None) -> None:
        """Brings members of all `parts` to the host now, in order, as far as a budget allows."""
        self._copies = True
        held, begun, left = 0, [], 0
        for part in parts:
            nbytes = 0 if self._is_copied(part) else self.held_bytes(part)
            if budget_bytes is not None and nbytes and held + nbytes > budget_bytes:
                left += sum(1 for _ in self.cut(part, budget_bytes))
                continue
            held += nbytes
            begun.append((part, self._begin(part)))
        for part, arrays in begun:
            members = [*map(np.asarray, arrays)]
            pinned = tuple(array for array in arrays if _is_pinned(array))
            self._captured[part.leaf, part.tile.members] = _Captured(members, pinned)
        self._left = left
        if not left:
            self.release()

    def _is_copied(self, part: FilePart) -> bool:
        """Whether another save holds host copies of the shards that a part has whole."""
        value, held = self._values[part.leaf], self._leaves[part.leaf].held
        if not isinstance(value, jax.Array) or _on_host(value):
            return False
        numbers, boxes = self._shard_numbers(value), [held.boxes[n] for n in part.tile.members]
        if any(part.tile.member_shape != box.shape for box in boxes):
            return False
        return all(_host_copies.find(value, numbers[box]) is not None for box in boxes)

    def wait_captured(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all that `capture` left out is on the host; returns whether it is."""
        return self._all_captured.wait(timeout_seconds)

    def release(self) -> None:
        """Gives up what was not captured: the caller may change it."""
        self._values = [None] * len(self._values)
        self._all_captured.set()

    def close(self) -> None:
        """Gives up all: an error of the save, which the program may keep, refers to this object."""
        self.release()
        self._captured, self._whole = {}, {}


def _common(values: np.ndarray, box: Box, region: Box) -> np.ndarray:
    """Return what a box and a region have in common, of the values of the box."""
    common = box.intersect(region)
    return values if common is None or common == box else common.view_of(values, box)


def _on_host(array: jax.Array) -> bool:
    """Whether numpy sees the memory of the array itself; sub-byte elements it does not."""
    devices: Iterable[Any] = array.sharding.addressable_devices
    return all(device.platform == "cpu" for device in devices) and array.dtype not in SUB_BYTE


def _is_pinned(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.sharding.memory_kind == "pinned_host"


@contextlib.contextmanager
def _on_single_devices() -> Iterator[None]:
    """Here JAX computes with a shard on the device that holds it, whatever the values."""
    # The caller's mesh has other devices, too, and weights may be NaN.
    with jax.set_mesh(_NO_MESH), jax.debug_nans(False), jax.debug_infs(False):
        yield


def _region(shard: jax.Array, box: Box, region: Box) -> jax.Array:
    """Return a region of a shard, copied on its device."""
    common = box.intersect(region)
    assert common is not None
    start = tuple(np.subtract(common.start, box.start).tolist())
    copied: jax.Array
    if max(start, default=0) > np.iinfo(np.uint32).max:
        copied = _slice_at(shard, start, common.shape)
        return copied
    # Put there explicitly, which a transfer guard allows; one compilation for all equal regions.
    on_device = jax.device_put(np.array(start, np.uint32), shard.sharding)
    copied = _slice(shard, on_device, common.shape)
    return copied


@functools.partial(jax.jit, static_argnums=2)
def _slice(array: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, [*start], shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _slice_at(array: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """Return a slice from where no index of 32 bits leads; compiled for each."""
    return jax.lax.slice(array, start, [*map(operator.add, start, shape)])


def _to_host(shards: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies to pinned host memory, without waiting; numpy sees those without another copy.

    `np.asarray` of a device array would keep its copy for as long as the array lives.
    """
    targets = []
    for shard in shards:
        device: Any = next(iter(shard.sharding.addressable_devices))
        if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            copies = [shard.copy() for shard in shards]
            for copied in copies:
                copied.copy_to_host_async()
            return copies
        targets.append(SingleDeviceSharding(device, memory_kind="pinned_host"))
    return list(jax.device_put(list(shards), targets))
