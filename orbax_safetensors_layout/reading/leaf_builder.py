"""The values of wanted leaves, as they become known: arrays on devices, numpy arrays, scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_safetensors_layout.mapping import python_scalar
from orbax_safetensors_layout.pytree import prng
from orbax_safetensors_layout.sharding import sharding_of

from .assemble import Assembler
from .decoding import check_booleans
from .resolve import ResolvedLeaf, subject_of

Wait = Callable[[], object]


class LeafBuilder:
    """What becomes of leaves whose boxes come in any order.

    Args:
        leaves: The leaves.
    """

    def __init__(self, leaves: Sequence[ResolvedLeaf]) -> None:
        self._leaves = leaves
        self._values: list[Any] = [None] * len(leaves)
        self._assembler = Assembler()
        self._shards: dict[int, dict[Any, jax.Array]] = {}

    def take(
        self, leaf: ResolvedLeaf, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes the values of some of a leaf's boxes.

        Args:
            leaf: The leaf.
            boxes: Numbers of boxes among the leaf's local ones.
            parts: Their values.

        Returns:
            What waits until the values are on their devices.
        """
        shape, placement = leaf.origin.shape, leaf.want.placement
        check_booleans(parts, file=leaf.origin.file, name=leaf.name)
        if placement is None:
            self._values[leaf.number] = _host_value(leaf, parts[0])
            return None
        by_box = dict(zip(boxes, parts, strict=True))
        if len(by_box) == len(leaf.local.boxes):
            in_order = [by_box[box] for box in range(len(by_box))]
            array = self._assembler.array(shape, leaf.dtype, placement, leaf.local, in_order)
            self._values[leaf.number] = array
            wait: Wait = array.block_until_ready
            return wait
        some = self._assembler.shards(shape, placement, leaf.local, by_box)
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
                leaf.origin.shape, leaf.dtype, placement, mine
            )

    def values(self) -> Iterator[Any]:
        """The leaves' values, when all are there."""
        for leaf, value in zip(self._leaves, self._values, strict=True):
            key_impl = leaf.want.key_impl
            yield value if key_impl is None else prng.wrap(value, key_impl)


def _host_value(leaf: ResolvedLeaf, value: np.ndarray) -> Any:
    if leaf.want.scalar is None:
        return value
    if leaf.want.scalar is np.generic:
        return value[()]
    return python_scalar(value, leaf.want.scalar, subject_of(leaf))
