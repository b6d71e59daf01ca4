"""Values that one process read, spread to all that hold them: one program among devices a round.

A program moves bits, as unsigned integers; XLA sees no float that it might canonicalise. There are
at most two programs for the large leaves of one box shape, dtype and grid of devices, and one for
all the small leaves of a grid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_safetensors_layout.plan import Round
from orbax_safetensors_layout.runtime import allocate
from orbax_safetensors_layout.sharding import ReplicaGrid

_BOX, _LANE, _PART, _CUT = "box", "lane", "part", "cut"


def stays_on_devices(dtype: np.dtype) -> bool:
    """Whether values of a dtype become it on the device: it has its bits in whole bytes there.

    Others (complex numbers, booleans, elements of less than a byte, and of eight, which not all
    backends take apart) pass through the host.
    """
    name = dtype.name
    is_plain = dtype.type.__module__ == "numpy" and dtype.kind in "iuf" and dtype.itemsize <= 4
    return is_plain or name == "bfloat16" or name.startswith("float8")


class SendBuffer:
    """What the devices of this process contribute to a round.

    Args:
        one: The round.
    """

    def __init__(self, one: Round) -> None:
        self._round = one
        itemsize = one.dtype.itemsize
        self._bits: np.dtype = np.dtype(f"u{itemsize}" if one.is_direct else "u1")
        self._trailing = () if one.is_direct or one.is_packed else (itemsize,)
        self._values: dict[tuple[int, int], np.ndarray] = {}

    def put(self, row: int, column: int, offset: int, values: np.ndarray) -> None:
        """Takes what one device contributes of one leaf.

        Args:
            row: The device's row in the grid.
            column: Its column.
            offset: Where it goes in a packed lane.
            values: The values, in the leaf's dtype.
        """
        one = self._round
        if one.is_packed:
            flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            self._slot(row, column)[0, offset : offset + flat.size] = flat
            return
        contiguous = np.ascontiguousarray(values)
        bits = contiguous[..., None].view(self._bits) if self._trailing else contiguous
        bits = bits.view(self._bits)
        if values.shape == one.part_shape:
            self._values[row, column] = bits[None]
            return
        slot = self._slot(row, column)
        place: tuple[slice, ...] = (slice(0, 1), *map(slice, values.shape))
        slot[place] = bits[None]

    def _slot(self, row: int, column: int) -> np.ndarray:
        found = self._values.get((row, column))
        if found is None:
            one = self._round
            memory = allocate(one.slot_bytes)
            memory[:] = 0  # what pads it goes to other processes
            shape = (1, *one.part_shape, *self._trailing)
            found = self._values[row, column] = memory.view(self._bits).reshape(shape)
        return found

    def gather(self, process: int) -> Gathered:
        """Runs the round; all processes with devices in its grid do, in the same order.

        Args:
            process: This process.
        """
        one = self._round
        lanes = len(one.lanes)
        shards = [
            jax.device_put(self._slot(row, column), one.grid.devices[row][column])
            for row, column in one.grid.slots(process)
        ]
        self._values.clear()
        mesh = _mesh(one.grid, lanes)
        extents = [*one.part_shape, *self._trailing]
        extents[one.axis] *= one.parts
        shape = (len(one.grid.devices) * lanes, *extents)
        sharding = NamedSharding(mesh, _spec(mesh, one.axis))
        given = jax.make_array_from_single_device_arrays(shape, sharding, shards)
        length = one.shape[one.axis]
        target = one.dtype if one.is_direct else None
        # The caller's mesh is not meant, nor is a weight that is NaN an accident.
        with jax.set_mesh(mesh), jax.debug_nans(False), jax.debug_infs(False):
            program = _program(mesh, one.axis, one.cut_axes, length, target)
            return Gathered(one, program(given))


class Gathered:
    """What a round gives each device.

    Args:
        one: The round.
        arrays: An array a lane, or one of all lanes where they go to the host.
    """

    def __init__(self, one: Round, arrays: tuple[jax.Array, ...]) -> None:
        self._round = one
        self.arrays = arrays

    def is_ready(self) -> bool:
        """Whether waiting for them would not block."""
        arrays: tuple[Any, ...] = self.arrays
        return all(array.is_ready() for array in arrays)

    def wait(self) -> None:
        """Waits for them; raises what went wrong."""
        for array in self.arrays:
            array.block_until_ready()

    def on_devices(self, lane: int) -> dict[Any, jax.Array]:
        """The boxes of a lane's leaf, by device."""
        shards = self.arrays[lane].addressable_shards
        return {shard.device: shard.data for shard in shards}

    def on_host(self, process: int) -> dict[int, np.ndarray]:
        """What the devices of a process (this one) have, by row: `[lanes, ...]` bytes."""
        (array,) = self.arrays
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        devices = self._round.grid.devices
        one_a_row = {row: devices[row][column] for row, column in self._round.grid.slots(process)}
        return {row: jax.device_get(by_device[device]) for row, device in one_a_row.items()}


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
) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """The identity from pieces to whole boxes; compiled once for each shape.

    Args:
        mesh: [boxes, lanes, parts, *cuts] the devices.
        axis: The dimension of a box that the parts split.
        cut_axes: The dimensions along which devices keep parts of a band.
        length: Its extent, without what pads it.
        target: The dtype of the lanes' arrays; None: one array of the bits of all lanes.
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
    program: Callable[[jax.Array], tuple[jax.Array, ...]] = jax.jit(mapped)
    return program
