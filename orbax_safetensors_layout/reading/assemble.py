"""Host buffers to `jax.Array`s: no collective, no XLA compilation, no copy on the CPU backend."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding

from orbax_safetensors_layout.sharding import (
    AddressableShards,
    Index,
    Placement,
    box_of,
    sharding_of,
)

from ._jax import batched_device_put


@functools.cache
def jax_holds(dtype: np.dtype, device: Any) -> bool:
    """Whether this version of JAX has arrays of a dtype (`float6_*`: since 0.12)."""
    if not dtype.name.startswith("float6"):
        return True
    try:
        jax.device_put(np.zeros(1, dtype), device)
    except (TypeError, RuntimeError):
        return False
    return True


class Assembler:
    """Builds arrays from the boxes that this process read.

    Index maps are computed once for each distinct (sharding, shape).
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Sharding, tuple[int, ...]], _IndexNumbers] = {}
        self._put = batched_device_put()
        self._recipes: dict[tuple[Sharding, tuple[int, ...], np.dtype], _Recipe] = {}

    def array(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        placement: Placement,
        local: AddressableShards,
        values: Sequence[np.ndarray],
    ) -> jax.Array:
        """A global array of which this process holds `values`.

        Args:
            shape: Global shape.
            dtype: The values' dtype.
            placement: The sharding, or a format (sharding and device layout).
            local: The boxes that the values are.
            values: One value a box. On the CPU backend the array adopts aligned ones without a
                copy, so they must never be written again.
        """
        sharding = sharding_of(placement)
        if not values:
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
        if self._put is None or placement is not sharding:
            return self._from_callback(shape, dtype, placement, local, values)
        key = (sharding, shape, dtype)
        recipe = self._recipes.get(key)
        if recipe is None:
            # The first array of a kind is made the public way; it shows how the others are made.
            array = self._from_callback(shape, dtype, placement, local, values)
            numbers = self._index_numbers(sharding, shape, local)
            indices = sharding.addressable_devices_indices_map(shape)
            order = [numbers[index] for index in indices.values()]
            self._recipes[key] = _Recipe(array.aval, [*indices], order)
            return array
        in_order = [values[number] for number in recipe.order]
        return self._put(recipe.aval, sharding, in_order, recipe.devices)

    def _from_callback(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        placement: Placement,
        local: AddressableShards,
        values: Sequence[np.ndarray],
    ) -> jax.Array:
        numbers = self._index_numbers(sharding_of(placement), shape, local)
        return jax.make_array_from_callback(
            shape, placement, lambda index: values[numbers[index]], dtype=dtype
        )

    def shards(
        self,
        shape: tuple[int, ...],
        placement: Placement,
        local: AddressableShards,
        values: Mapping[int, np.ndarray],
    ) -> dict[Any, jax.Array]:
        """Some of an array's shards, by device: for `join`, once all are there.

        Args:
            shape: Global shape.
            placement: As for `array`.
            local: The boxes of this process.
            values: Values by the number of their box.
        """
        sharding = sharding_of(placement)
        numbers = self._index_numbers(sharding, shape, local)
        made = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            number = numbers[index]
            if number in values:
                alone = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                layout = placement.layout if isinstance(placement, Format) else None
                target = alone if layout is None else Format(layout, alone)
                made[device] = jax.device_put(values[number], target)
        return made

    def join(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        placement: Placement,
        shards: Mapping[Any, jax.Array],
    ) -> jax.Array:
        """The array of all shards of this process."""
        sharding = sharding_of(placement)
        devices = sharding.addressable_devices_indices_map(shape)
        in_order = [shards[device] for device in devices]
        return jax.make_array_from_single_device_arrays(shape, sharding, in_order, dtype=dtype)

    def _index_numbers(
        self, sharding: Sharding, shape: tuple[int, ...], local: AddressableShards
    ) -> _IndexNumbers:
        numbers = self._numbers.get((sharding, shape))
        if numbers is None:
            numbers = self._numbers[sharding, shape] = _IndexNumbers(sharding, shape, local)
        return numbers


class _Recipe(NamedTuple):
    """What arrays of one shape, dtype and sharding have in common.

    Attributes:
        aval: JAX's abstract value.
        devices: The devices of this process, in JAX's order.
        order: For each the number of its box.
    """

    aval: Any
    devices: list[Any]
    order: list[int]


class _IndexNumbers:
    """From the index that JAX gives a device to the number of its box.

    JAX hands out the same tuple objects each time (its index maps are cached), so identity finds
    them at once; an index that is equal but not identical is found by its value.
    """

    def __init__(
        self, sharding: Sharding, shape: tuple[int, ...], local: AddressableShards
    ) -> None:
        self._shape = shape
        self._by_box = {box: number for number, box in enumerate(local.boxes)}
        indices = sharding.addressable_devices_indices_map(shape).values()
        self._alive = [index for index in indices if index is not None]
        self._by_identity = {id(i): self._by_box[box_of(i, shape)] for i in self._alive}

    def __getitem__(self, index: Index | None) -> int:
        number = self._by_identity.get(id(index))
        if number is None:
            assert index is not None
            number = self._by_box[box_of(index, self._shape)]
        return number
