"""Builds leaves of finished boxes: arrays on devices, numpy arrays, scalars.

Host buffers become arrays without a collective, an XLA compilation, or a copy on the CPU backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import python_scalar
from orbax_safetensors_layout.sharding import Placement, box_of, sharding_of

from ._jax import batched_device_put
from .plan_reader import Wait
from .resolve import ResolvedLeaf


class _Recipe(NamedTuple):
    """The construction of arrays of one shape, dtype and sharding."""

    aval: Any  # JAX's abstract value
    devices: list[Any]  # the devices of this process, in JAX's order
    order: list[int]  # for each the number of its box


class LeafBuilder:
    """Builds leaves whose boxes come in any order.

    Boxes of arrays that adopt them wait for the others of the array, and become one at once.
    """

    def __init__(self, leaves: Sequence[ResolvedLeaf], *, adopt: bool) -> None:
        self._leaves = leaves
        self._adopt = adopt
        self._values: list[Any] = [None] * len(leaves)
        self._parts: dict[int, dict[int, np.ndarray]] = {}  # boxes that wait, of each leaf
        self._shards: dict[int, dict[Any, jax.Array]] = {}  # of arrays that are not complete
        self._put = batched_device_put()
        self._numbers: dict[tuple[Sharding, tuple[int, ...]], dict[Any, int]] = {}
        self._recipes: dict[tuple[Placement, tuple[int, ...], np.dtype], _Recipe] = {}

    def take(
        self, leaves: Sequence[ResolvedLeaf], boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes the values of some boxes of a leaf, or of several that are tied.

        Each numpy array among tied leaves is a copy, which may be written to. On the CPU backend
        arrays adopt aligned values, so they must never be written again. The function returned
        waits until the values are on their devices.
        """
        if len(leaves) == 1:
            return self._take(leaves[0], boxes, parts)
        waits: list[Wait] = []
        on_devices_first = sorted(leaves, key=lambda leaf: leaf.abstract.placement is None)
        for number, leaf in enumerate(on_devices_first):
            if number and leaf.abstract.placement is None:
                parts = [part.copy() for part in parts]
            wait = self._take(leaf, boxes, parts)
            if wait is not None:
                waits.append(wait)
        return (lambda: [wait() for wait in waits]) if waits else None

    def _take(
        self, leaf: ResolvedLeaf, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        region, placement = leaf.region, leaf.abstract.placement
        if placement is None:
            self._values[leaf.number] = _host_value(leaf, parts[0])
            return None
        by_box = self._parts.pop(leaf.number, {})
        by_box.update(zip(boxes, parts, strict=True))
        if len(by_box) == len(region.local.boxes):
            array = self._values[leaf.number] = self._array(leaf, placement, by_box)
            wait: Wait = array.block_until_ready
            return wait
        if self._adopt:
            self._parts[leaf.number] = by_box
            return None
        shards = self._on_devices(leaf, placement, by_box)
        self.put(leaf, shards)
        return lambda: [shard.block_until_ready() for shard in shards.values()]

    def put(self, leaf: ResolvedLeaf, shards: Mapping[Any, jax.Array]) -> None:
        """Takes some of a leaf's shards, single-device arrays by device."""
        placement = leaf.abstract.placement
        assert placement is not None
        here = self._shards.setdefault(leaf.number, {})
        here.update(shards)
        if len(here) == len(sharding_of(placement).addressable_devices):
            del self._shards[leaf.number]
            self._values[leaf.number] = _joined(leaf, placement, here)

    def values(self) -> Iterator[Any]:
        """The values of the leaves, once all are complete."""
        for leaf, value in zip(self._leaves, self._values, strict=True):
            key_impl = leaf.abstract.key_impl
            yield value if key_impl is None else jax.random.wrap_key_data(value, impl=key_impl)

    def _array(
        self, leaf: ResolvedLeaf, placement: Placement, values: Mapping[int, np.ndarray]
    ) -> jax.Array:
        key = (placement, leaf.region.source.shape, leaf.region.dtype)
        recipe = self._recipes.get(key)
        if recipe is not None and self._put is not None:
            in_order = [values[number] for number in recipe.order]
            return self._put(recipe.aval, placement, in_order, recipe.devices)
        if not values or not isinstance(placement, Sharding):
            return _joined(leaf, placement, self._on_devices(leaf, placement, values))
        # The first array of a kind is made the public way; it shows how the others are made.
        shape, by_box = leaf.region.source.shape, _numbers_of(leaf)
        array = jax.make_array_from_callback(
            shape,
            placement,
            lambda index: values[by_box[box_of(index or (), shape)]],
            dtype=leaf.region.dtype,
        )
        numbers = self._box_numbers(leaf, placement)
        self._recipes[key] = _Recipe(array.aval, [*numbers], [*numbers.values()])
        return array

    def _on_devices(
        self, leaf: ResolvedLeaf, placement: Placement, values: Mapping[int, np.ndarray]
    ) -> dict[Any, jax.Array]:
        """The shards of some boxes, by device."""
        sharding = sharding_of(placement)
        layout = placement.layout if isinstance(placement, Format) else None
        shards = {}
        for device, number in self._box_numbers(leaf, sharding).items():
            if number in values:
                alone = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                target = alone if layout is None else Format(layout, alone)
                shards[device] = jax.device_put(values[number], target)
        return shards

    def _box_numbers(self, leaf: ResolvedLeaf, sharding: Sharding) -> dict[Any, int]:
        """For each device of this process, in JAX's order, the number of its box."""
        shape = leaf.region.source.shape
        if (sharding, shape) not in self._numbers:
            by_box = _numbers_of(leaf)
            indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
            numbers = {device: by_box[box_of(i, shape)] for device, i in indices.items()}
            self._numbers[sharding, shape] = numbers
        return self._numbers[sharding, shape]


def _numbers_of(leaf: ResolvedLeaf) -> dict[Box, int]:
    return {box: number for number, box in enumerate(leaf.region.local.boxes)}


def _joined(leaf: ResolvedLeaf, placement: Placement, shards: Mapping[Any, jax.Array]) -> jax.Array:
    shape, sharding = leaf.region.source.shape, sharding_of(placement)
    in_order = [shards[device] for device in sharding.addressable_devices_indices_map(shape)]
    dtype = leaf.region.dtype
    return jax.make_array_from_single_device_arrays(shape, sharding, in_order, dtype=dtype)


def _host_value(leaf: ResolvedLeaf, value: np.ndarray) -> Any:
    if leaf.abstract.scalar is None:
        return value
    if leaf.abstract.scalar is np.generic:
        return value[()]
    return python_scalar(value, leaf.abstract.scalar, leaf.region.subject)
