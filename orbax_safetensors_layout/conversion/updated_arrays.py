"""Brings arrays in memory from one published version to a later one, by the differences alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping as Dict, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors_layout.errors import MappingError, MismatchError
from orbax_safetensors_layout.format import PACKED, storage_dtype
from orbax_safetensors_layout.mapping import (
    LiveTensors,
    Mapping,
    TensorSpec,
    TensorSpecs,
    buffers_of,
    reapplied,
    shared_buffers,
    unapplied,
)
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.pytree import named_leaves
from orbax_safetensors_layout.reading import values_on_all
from orbax_safetensors_layout.runtime import ProcessGroup, Workers, allocate
from orbax_safetensors_layout.sharding import box_of
from orbax_safetensors_layout.writing import values_on_host

from .difference import Difference
from .versioned_storage import put_together

_BATCH_BYTES = 256 * MIB  # of tensors that are on the host at once, or one tensor
_THREADS = 4


def updated(
    tree: Any,
    mapping: Mapping | None,
    differences: Sequence[Difference],
    *,
    group: ProcessGroup,
    donate: bool,
) -> Any:
    """Return a tree with differences applied to the tensors that its leaves are made of.

    Leaves of which no tensor changed stay as they are. With `donate` the others are given up, each
    as soon as what takes its place is there.

    Raises:
        FormatError: The leaves are not of the version that the differences are to.
        MappingError: The mapping does not save, or not these leaves.
        MismatchError: A leaf is not an array.
    """
    pairs, treedef = named_leaves(tree)
    leaves = dict(pairs)
    shared = shared_buffers(filter(_is_numbers, leaves.values())) if donate else frozenset()
    changed = {name for difference in differences for name in difference.entries}
    parts: list[LiveTensors] | list[_LeafAsTensor]
    if mapping is None:
        parts = [_LeafAsTensor(*leaf) for leaf in leaves.items() if leaf[1] is not ...]
    else:
        parts = reapplied(mapping, tree)
    affected = [part for part in parts if not changed.isdisjoint(part.names())]
    error: Exception | None = None

    @contextlib.contextmanager
    def kept_error() -> Iterator[None]:
        """Keeps an error to the end: the others wait for this process in the next collectives."""
        nonlocal error
        try:
            yield
        except Exception as problem:
            if group.process_count == 1:
                raise
            error = error or problem

    with (
        group.together("applying differences"),
        Workers(_THREADS, "safetensors-pull") as workers,
    ):
        check_shared(leaf for part in affected for leaf in part.leaves().items())
        for batch in _batches(affected):
            tensors = {name: value for part in batch for name, value in part.values().items()}
            for part in batch:
                _check_unchanged(part, tensors)
            new: dict[str, np.ndarray] = {}
            for name in [name for name in tensors if name in changed]:  # in the same order on all
                values = gathered(tensors[name], group)
                with kept_error():
                    new[name] = _copied(as_stored(values))
            if error is None:
                with kept_error():
                    for name, value in new.items():
                        workers.submit(put_together, name, bytes_of(value), differences)
                    workers.join()
            with kept_error():
                tensors |= {name: _placed(value, tensors[name]) for name, value in new.items()}
            for part in batch:
                for name, leaf in part.loaded(tensors).items():
                    if donate:
                        _give_up(leaves[name], leaf, shared)
                    leaves[name] = leaf
        if error is not None:
            raise error
    return jax.tree_util.tree_unflatten(treedef, leaves.values())


class _LeafAsTensor(NamedTuple):
    """A leaf without a mapping: the tensor of its name."""

    name: str
    value: Any

    def names(self) -> list[str]:
        return [self.name]

    def leaves(self) -> dict[str, Any]:
        return {self.name: self.value}

    def values(self) -> dict[str, Any]:
        if not _is_numbers(self.value):
            raise MismatchError(
                "a leaf is not an array of numbers",
                tensor=self.name,
                expected="a jax.Array or a numpy array",
                found=type(self.value).__name__,
            )
        return self.leaves()

    def loaded(self, tensors: Dict[str, Any]) -> dict[str, Any]:
        return {self.name: tensors[self.name]}

    def changed(self, tensors: Dict[str, Any]) -> list[str]:
        return []


def are_published(tree: Any, mapping: Mapping | None, published: TensorSpecs) -> bool:
    """Whether `updated` makes of a tree the very tensors that a load makes its leaves of.

    They are those that were published, with their shapes and dtypes. Of what no tensors can be made
    of, `updated` says so.
    """
    leaves = {name: leaf for name, leaf in named_leaves(tree)[0] if leaf is not ...}
    if mapping is None:
        return all(
            name in published and (not _is_numbers(leaf) or _spec_of(leaf) == published[name])
            for name, leaf in leaves.items()
        )
    try:
        saved = {n: spec for part in unapplied(mapping, tree) for n, spec in part.specs().items()}
    except MappingError:
        return True
    if any(published.get(name) != spec for name, spec in saved.items()):
        return False
    with contextlib.suppress(MappingError):
        bound = mapping.bind(published, {name: leaf.shape for name, leaf in leaves.items()})
        return saved.keys() == {s for expr in bound.expressions.values() for s in expr.sources()}
    return False


def _spec_of(array: Any) -> TensorSpec:
    return TensorSpec(tuple(array.shape), np.dtype(array.dtype).newbyteorder("="))


def _is_numbers(leaf: Any) -> bool:
    """Whether a leaf is an array, not of PRNG keys."""
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)


def _check_unchanged(part: LiveTensors | _LeafAsTensor, tensors: Dict[str, Any]) -> None:
    """Raises where leaves that take a tensor which changes would change elsewhere, too."""
    if names := part.changed(tensors):
        raise MismatchError(
            "leaves are not what the tensors make that a save would write of them",
            tensor=names[0],
            expected="the same bits, since tensors of theirs do not change",
            found=f"others in {len(names)} leaves: the mapping rounds (lossy_inverse=True)",
        )


def _batches(parts: Sequence[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    nbytes = 0
    for part in parts:
        size = sum(getattr(leaf, "nbytes", 0) for leaf in part.leaves().values())
        if batch and nbytes + size > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(part)
        nbytes += size
    if batch:
        yield batch


def check_shared(arrays: Iterable[tuple[str, Any]]) -> None:
    """Raises for arrays of which this process has no shard: it could not take part in a gather."""
    for name, value in arrays:
        if isinstance(value, jax.Array) and not value.addressable_shards:
            raise MismatchError(
                f"process {jax.process_index()} has no part of an array",
                tensor=name,
                expected="shards on all processes",
                found=value.sharding,
                hint="Give it a sharding over all processes, or publish whole versions alone, with"
                " whole_every=1.",
            )


def gathered(value: Any, group: ProcessGroup) -> np.ndarray:
    """Return an array's values; all processes gather those that several hold.

    Raises:
        PeerError: Another process failed, or did not come.
    """
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    if value.is_fully_addressable or value.is_fully_replicated:
        return values_on_host(value)
    return values_on_all(value, group, "gathering tensors")


def as_stored(values: np.ndarray) -> np.ndarray:
    """Return values as files have them: elements narrower than a byte one a byte."""
    if values.dtype in PACKED:
        return values.view(np.uint8)
    return values.astype(storage_dtype(values.dtype, values.size).numpy, copy=False)


def bytes_of(value: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, which share its memory."""
    return value.reshape(-1).view(np.uint8)


def _copied(values: np.ndarray) -> np.ndarray:
    """Return a copy in memory that CPU devices take as their own."""
    copy = allocate(values.nbytes).view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _placed(stored: np.ndarray, like: Any) -> Any:
    value = (
        stored.view(like.dtype) if like.dtype in PACKED else stored.astype(like.dtype, copy=False)
    )
    if isinstance(like, np.ndarray):
        return value
    boxes: dict[Any, np.ndarray] = {}  # replicas share memory

    def part(index: Any) -> np.ndarray:
        box = box_of(index, value.shape)
        if box not in boxes:
            view = value[index]
            boxes[box] = view if view.flags.c_contiguous else _copied(view)
        return boxes[box]

    return jax.make_array_from_callback(value.shape, like.sharding, part, dtype=value.dtype)


def _give_up(old: Any, new: Any, shared: Set[int]) -> None:
    """Frees an array's memory, unless the new one or another leaf has it."""
    if isinstance(old, jax.Array):
        buffers = buffers_of(old)
        if buffers.isdisjoint(shared) and buffers.isdisjoint(buffers_of(new)):
            old.delete()
