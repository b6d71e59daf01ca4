"""Builds leaves of finished boxes: arrays on devices, numpy arrays, scalars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_safetensors_layout.mapping import python_scalar
from orbax_safetensors_layout.pytree import prng
from orbax_safetensors_layout.sharding import sharding_of

from .assemble import Assembler
from .decoding import check_booleans
from .materialize import Wait
from .resolve import ResolvedLeaf


class LeafBuilder:
    """Builds leaves whose boxes come in any order.

    Args:
        leaves: The leaves.
    """

    def __init__(self, leaves: Sequence[ResolvedLeaf]) -> None:
        self._leaves = leaves
        self._values: list[Any] = [None] * len(leaves)
        self._assembler = Assembler()
        self._shards: dict[int, dict[Any, jax.Array]] = {}

    def take(
        self, leaves: Sequence[ResolvedLeaf], boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes the values of some boxes.

        Args:
            leaves: The leaves that have these values: one, or several that are tied.
            boxes: Numbers of boxes among the leaves' own.
            parts: Their values. Of tied leaves each numpy array is a copy, which may be written to.

        Returns:
            What waits until the values are on their devices.
        """
        waits: list[Wait] = []
        on_devices_first = sorted(leaves, key=lambda leaf: leaf.want.placement is None)
        for number, leaf in enumerate(on_devices_first):
            if number and leaf.want.placement is None:
                parts = [part.copy() for part in parts]
            wait = self._take(leaf, boxes, parts)
            waits += [] if wait is None else [wait]
        return (lambda: [wait() for wait in waits]) if waits else None

    def _take(
        self, leaf: ResolvedLeaf, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        name, source, local, dtype, _ = leaf.region
        shape, placement = source.shape, leaf.want.placement
        check_booleans(parts, file=source.file, name=name)
        if placement is None:
            self._values[leaf.number] = _host_value(leaf, parts[0])
            return None
        by_box = dict(zip(boxes, parts, strict=True))
        if len(by_box) == len(local.boxes):
            in_order = [by_box[box] for box in range(len(by_box))]
            array = self._assembler.array(shape, dtype, placement, local, in_order)
            self._values[leaf.number] = array
            wait: Wait = array.block_until_ready
            return wait
        some = self._assembler.shards(shape, placement, local, by_box)
        self.put(leaf, some)
        return lambda: [shard.block_until_ready() for shard in some.values()]

    def put(self, leaf: ResolvedLeaf, shards: Mapping[Any, jax.Array]) -> None:
        """Takes some of a leaf's shards that are on their devices.

        Args:
            leaf: The leaf.
            shards: Single-device arrays by device.
        """
        placement = leaf.want.placement
        assert placement is not None
        mine = self._shards.setdefault(leaf.number, {})
        mine.update(shards)
        if len(mine) == len(sharding_of(placement).addressable_devices):
            del self._shards[leaf.number]
            self._values[leaf.number] = self._assembler.join(
                leaf.region.source.shape, leaf.region.dtype, placement, mine
            )

    def values(self) -> Iterator[Any]:
        """The values of the leaves, once all are complete."""
        for leaf, value in zip(self._leaves, self._values, strict=True):
            key_impl = leaf.want.key_impl
            yield value if key_impl is None else prng.wrap(value, key_impl)


def _host_value(leaf: ResolvedLeaf, value: np.ndarray) -> Any:
    if leaf.want.scalar is None:
        return value
    if leaf.want.scalar is np.generic:
        return value[()]
    return python_scalar(value, leaf.want.scalar, leaf.region.subject)
