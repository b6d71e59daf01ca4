"""Parses the tree that is saved, once, into tensors, values and structure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from orbax_safetensors_layout.errors import (
    InvalidArgumentError,
    MismatchError,
    SafetensorsLayoutError,
    UnsupportedDtypeError,
    listed,
)
from orbax_safetensors_layout.format import (
    SUB_BYTE,
    Container,
    DType,
    Leaf,
    Manifest,
    NewTensor,
    Node,
    ShardingRecord,
    TensorKind,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    storage_dtype,
)
from orbax_safetensors_layout.mapping import (
    AskedCast,
    Mapping as LeafMapping,
    check_mapping,
    hint_to_cast_before,
    refuse_casts_of_codes,
)
from orbax_safetensors_layout.options import WriteOptions, is_floating
from orbax_safetensors_layout.plan import (
    LeafWrite,
    MappedTensors,
    WritePlan,
    plan_mapped_writes,
    plan_writes,
)
from orbax_safetensors_layout.pytree import dotted_name, encode_treedef, prng
from orbax_safetensors_layout.sharding import ProcessShards, ShardingTable

_RESERVED = "__metadata__"


class PreparedTree(NamedTuple):
    """A tree that is to be saved."""

    leaves: list[LeafWrite]
    values: list[Any]  # of each leaf: a `jax.Array`, a numpy array, or an abstract array
    node: Node  # its structure, with what is not a tensor
    shardings: tuple[ShardingRecord, ...]  # which `node` names by number

    @classmethod
    def parse(
        cls,
        tree: Any,
        *,
        options: WriteOptions,
        shards: ProcessShards,
        dtypes: Sequence[Any] | None = None,
        mapping: LeafMapping | None = None,
        is_recorded: bool = True,
    ) -> PreparedTree:
        """Reads a tree, as `save` and `plan_save` take it; all leaves that cannot be saved raise.

        `dtypes` has for each of `jax.tree.leaves(tree)` the dtype to write an array in, whatever
        the options say; None for the usual. With a mapping there are none, and the tensors that it
        takes get the dtype of the options, not the leaves. `is_recorded`: a manifest is written.
        """
        if mapping is not None:
            check_mapping(mapping)
            if any(dtype is not None for dtype in dtypes or ()):
                raise InvalidArgumentError(
                    "A save through a mapping has no dtypes of single leaves: leave out save_args"
                    " (in v1 the dtype of `context.array.saving`), and give WriteOptions.dtype, or"
                    " a mapping that casts."
                )
        if mapping is not None or options.quantize is not None:
            options = dataclasses.replace(options, dtype=None)
        drops = None if mapping is None else mapping.drops
        parser = _Parser(options, shards, dtypes, drops, is_recorded=is_recorded)
        node = encode_treedef(tree, parser.leaf)
        if parser.problems:
            raise SafetensorsLayoutError.collect(parser.problems, "leaves cannot be saved")
        stored = {leaf.tensor.name: leaf.values for leaf in parser.leaves}
        refuse_casts_of_codes(
            (
                AskedCast(leaf.tensor.name, leaf.tensor.shape, leaf.values, leaf.tensor.dtype.numpy)
                for leaf in parser.leaves
                if leaf.values != leaf.tensor.dtype.numpy
            ),
            stored,
            stored.__getitem__,
            hint_to_cast_before,
        )
        if isinstance(node, Container) and not node.children:
            raise InvalidArgumentError("Found an empty tree; there is nothing to save.")
        leaves = parser.leaves
        if mapping is not None:
            names = mapping.names_of(written.tensor.name for written in leaves)
            leaves = [
                written._replace(tensor=written.tensor._replace(name=name))
                for name, written in zip(names, leaves, strict=True)
            ]
        return cls(leaves, parser.values, node, tuple(parser.table.records))

    def plan(
        self, mapping: LeafMapping | None, options: WriteOptions, shards: ProcessShards
    ) -> tuple[WritePlan, MappedTensors | None]:
        """Plans what a process writes, and with a mapping what the files' tensors are made of."""
        processes = {"process_index": shards.process_index, "process_count": shards.process_count}
        if mapping is None and options.quantize is None:
            return plan_writes(self.leaves, options=options, **processes), None
        how = "through a mapping" if mapping is not None else "of quantised weights"
        if options.layout != "hf":
            raise InvalidArgumentError(
                f"A save {how} has layout 'hf': leave out WriteOptions.layout."
            )
        values = [name for name, leaf in leaf_names(self.node) if isinstance(leaf, ValueLeaf)]
        return plan_mapped_writes(self.leaves, values, mapping, options=options, **processes)

    def manifest(self, plan: WritePlan, options: WriteOptions, custom: object = None) -> Manifest:
        """Return the manifest of a save without a mapping, with a JSON value `custom`."""
        return Manifest(
            layout=options.layout,
            tree=self.node,
            shardings=self.shardings,
            metadata=dict(options.metadata),
            custom=custom,
            pieces=plan.stored if options.layout == "sharded" else None,
        )

    def check_concrete(self) -> None:
        """Raises for abstract and deleted arrays, which can be planned but not written."""
        named = [(leaf.tensor.name, v) for leaf, v in zip(self.leaves, self.values, strict=True)]
        deleted = [name for name, v in named if isinstance(v, jax.Array) and v.is_deleted()]
        abstract = [(name, v) for name, v in named if not isinstance(v, jax.Array | np.ndarray)]
        if deleted:
            raise SafetensorsLayoutError(
                f"{len(deleted)} arrays were deleted or donated: {listed(map(repr, deleted))}",
                tensor=deleted[0],
                hint="Save what the function returned, or save before it is called.",
            )
        if abstract:
            names = [name for name, _ in abstract]
            raise UnsupportedDtypeError(
                f"{len(names)} leaves are abstract and have no values: {listed(map(repr, names))}",
                tensor=names[0],
                expected="arrays",
                found=type(abstract[0][1]),
            )


class _Parser:
    def __init__(
        self,
        options: WriteOptions,
        shards: ProcessShards,
        dtypes: Sequence[Any] | None,
        drops: Callable[[str], bool] | None,
        *,
        is_recorded: bool,
    ) -> None:
        self.leaves: list[LeafWrite] = []
        self.values: list[Any] = []
        self.table = ShardingTable()
        self._dtype: np.dtype | None = options.dtype
        self._dtypes: Iterator[Any] = itertools.repeat(None) if dtypes is None else iter(dtypes)
        self._may_pack = options.layout == "hf"  # pieces do not end on whole bytes
        self._is_recorded = is_recorded
        self._shards = shards
        self._drops = drops
        self._names: set[str] = set()
        self.problems: list[SafetensorsLayoutError] = []
        self._stored: dict[tuple[np.dtype, int], tuple[DType, str | None]] = {}

    def leaf(self, path: Sequence[object], value: Any) -> Leaf:
        dtype = next(self._dtypes)
        name = dotted_name(path)  # without flax boxes, which `encode_treedef` leaves out
        if self._drops is not None and self._drops(name):
            return TensorLeaf(name)
        value = str(value) if isinstance(value, np.str_) else value
        is_value = isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)
        flaw = self._flaw(name, is_value)
        self._names.add(name)
        if flaw is not None:
            self.problems.append(MismatchError(flaw, tensor=name))
            return TensorLeaf(name)
        if is_value:
            return ValueLeaf(value)
        try:
            return self._tensor(name, value, dtype)
        except SafetensorsLayoutError as problem:
            problem.tensor = name
            self.problems.append(problem)
            return TensorLeaf(name)

    def _flaw(self, name: str, is_value: bool) -> str | None:
        """Return why a leaf cannot have a name; the name of a value is in the manifest alone."""
        if name in self._names:
            return "two leaves have one name"
        if is_value:
            return None
        if name == _RESERVED:
            return "the name is reserved"
        try:
            name.encode()
        except UnicodeEncodeError:
            return "the name is not Unicode text"
        return None

    def _tensor(self, name: str, value: Any, dtype: Any) -> TensorLeaf:
        kind: TensorKind = "jax"
        impl: str | None = None
        _check_kind(value)
        if isinstance(value, np.ndarray | np.generic):
            kind = "numpy" if isinstance(value, np.ndarray) else "numpy_scalar"
            value = np.asarray(value)
        sharding: Sharding | None = getattr(value, "sharding", None)
        number = None if sharding is None else self.table.number(sharding)
        if kind == "jax" and prng.is_key(value):
            kind, impl, value = "key", prng.implementation(value), prng.data(value)
            sharding, dtype = getattr(value, "sharding", None), None
        stored, logical = self._stored_as(value, dtype)
        held = self._shards.held(sharding, tuple(value.shape))
        tensor = NewTensor(name, stored, tuple(value.shape))
        self.leaves.append(LeafWrite(tensor, np.dtype(value.dtype), held))
        self.values.append(value)
        return TensorLeaf(name, kind, logical, number, impl)

    def _stored_as(self, value: Any, asked: Any) -> tuple[DType, str | None]:
        """Return the dtype in the file, and the value's own if the file does not record it."""
        dtype = np.dtype(value.dtype if asked is None else asked)
        if asked is None and self._dtype is not None and is_floating(dtype):
            dtype = self._dtype
        if dtype in SUB_BYTE and dtype != value.dtype:
            raise UnsupportedDtypeError(
                "a save casts to dtypes of whole bytes alone",
                expected=f"{value.dtype}, or a dtype of whole bytes",
                found=dtype,
                hint="Cast the array itself, or ask for another dtype.",
            )
        key = dtype, value.size % 8
        if key not in self._stored:
            stored = storage_dtype(
                dtype, value.size, pack=self._may_pack, is_recorded=self._is_recorded
            )
            logical = dtype.name if dtype in SUB_BYTE and not stored.packed else None
            self._stored[key] = stored, logical
        return self._stored[key]


def _check_kind(value: Any) -> None:
    """Raises for a value that is not an array, or is more than an array."""
    if isinstance(value, jax.core.Tracer):
        hint = "Save outside of functions that JAX transforms: jit, grad, vmap."
    elif isinstance(value, np.ma.MaskedArray):
        hint = "Save `array.filled(...)`, and the mask as an array of its own."
    elif isinstance(value, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return
    else:
        hint = "Take the leaf out of the tree, or save it under an item of its own."
        # Abstract arrays of others, but no arrays of other frameworks.
        if hasattr(value, "shape") and isinstance(getattr(value, "dtype", None), np.dtype):
            return
    raise UnsupportedDtypeError(
        f"a {type(value).__name__} cannot be saved",
        expected="an array of JAX or numpy, a number, a boolean or a string",
        found=type(value),
        hint=hint,
    )
