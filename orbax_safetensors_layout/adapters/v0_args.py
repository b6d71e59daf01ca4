"""Reads the arguments of Orbax v0's saves and restores, by attribute: every class works."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from jax.sharding import Sharding
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from orbax_safetensors_layout.errors import MismatchError, SafetensorsLayoutError, listed
from orbax_safetensors_layout.pytree import (
    HostLeaf,
    SavedLeaf,
    abstract_array,
    dotted_name,
    prng,
)

from .metadata import HostArrayMetadata
from .orbaxs_boxes import BoxFitting, unfitted


def leaf_dtypes(args: Any) -> Sequence[Any] | None:
    """The dtype that `save_args` ask for, for each leaf of `item`; None where they say nothing."""
    save_args = getattr(args, "save_args", None)
    if save_args is None:
        return None
    treedef: Any = jax.tree.structure(args.item)
    try:
        leaves = treedef.flatten_up_to(save_args)
    except (ValueError, TypeError, KeyError) as error:
        raise MismatchError(
            f"save_args does not fit the item: {error}",
            expected="a tree of the item's structure, of `ocp.SaveArgs` or None",
        ) from error
    return [getattr(leaf, "dtype", None) for leaf in leaves]


def is_partial(args: Any) -> bool:
    """Whether the checkpoint may hold what the item does not name: in Orbax `transforms={}`."""
    return getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {}


def abstract_tree_of(args: Any, *, is_recorded: bool = False) -> Any:
    """The tree to load, `restore_args` over `item`; None asks for everything.

    As with Orbax's handlers, arrays without a sharding, and leaves with `ocp.RestoreArgs()` alone,
    come back as they were saved, with `fallback_sharding` for a sharding that is not to be had;
    and so do typed PRNG keys where the item has their data. `is_recorded` says whether the
    checkpoint tells how its leaves were saved; of others the item says more.
    """
    transforms = getattr(args, "transforms", None)
    given = {
        "transforms": bool(transforms),
        "legacy_transform_fn": getattr(args, "legacy_transform_fn", None) is not None,
        "transforms_default_to_original": transforms is not None
        and not getattr(args, "transforms_default_to_original", True),
    }
    for name, is_given in given.items():
        if is_given:
            raise SafetensorsLayoutError(
                f"{type(args).__name__}.{name} is not supported for safetensors checkpoints",
                hint="A mapping says what leaves are made of, in `SafetensorsRestore(item,"
                ' mapping=...)` or `osl.using(mapping=...)`: a new name is osl.rule("new",'
                ' osl.tensor("old")). A part of a checkpoint needs transforms={} alone.',
            )
    item = jax.tree.map(_described, _plain(getattr(args, "item", None)))
    overrides = _plain(getattr(args, "restore_args", None))
    if overrides is None and isinstance(args, ocp.args.PyTreeRestore):
        overrides = jax.tree.map(lambda _: ocp.RestoreArgs(), item)
    if overrides is not None:
        item = _override(item, overrides, partial=is_partial(args), is_recorded=is_recorded)
    fallback = getattr(args, "fallback_sharding", None)
    layouts = getattr(args, "support_layout", False)
    return jax.tree.map(lambda leaf: _place(leaf, fallback, layouts), item)


def given_leaves(restored: Any, tree: Any, args: Any) -> Any:
    """The item's own leaves where the `tree` to load, made of it, came back for want of others."""
    item = _plain(getattr(args, "item", None))
    if item is None:
        return restored
    return jax.tree.map(
        lambda value, asked, given: given if value is asked else value, restored, tree, item
    )


def restore_orbax_item(directory: str | os.PathLike[str], args: Any) -> Any:
    """Restores an item in Orbax's own format, with Orbax's handler.

    A mapping in the arguments is refused; one of the handler is not for such items.
    """
    if getattr(args, "mapping", None) is not None:
        raise SafetensorsLayoutError(
            "the item is in Orbax's own format, which is not restored through a mapping",
            file=os.fspath(directory),
            hint="Leave it out where the item has the leaves that the mapping makes. Where it has"
            " those that the mapping takes, restore without one what"
            " osl.convert(path, target, mapping=..., inverse=False) makes.",
        )
    item = _plain(getattr(args, "item", None))
    if item is None:
        return _restore_orbax_item(directory, args)
    boxes = BoxFitting(directory)
    fitted = boxes.fitted(item)
    fields = {"item": fitted}
    if getattr(args, "restore_args", None) is not None:
        fields["restore_args"] = boxes.fitted(args.restore_args)
    restored = _restore_orbax_item(directory, dataclasses.replace(args, **fields))
    return unfitted(item, fitted, restored)


def _restore_orbax_item(directory: str | os.PathLike[str], args: Any) -> Any:
    folder = ocp_v1.path.Path(directory)
    if args is None or isinstance(args, ocp.args.StandardRestore):
        return ocp.StandardCheckpointHandler().restore(folder, args=args)
    if not isinstance(args, ocp.args.PyTreeRestore):
        item = _plain(getattr(args, "item", None))
        restore_args = getattr(args, "restore_args", None)
        if item is None and restore_args is None:
            fallback = getattr(args, "fallback_sharding", None)
            args = ocp.args.StandardRestore(fallback_sharding=fallback)
            return _restore_orbax_item(folder, args)
        if restore_args is None:
            saved = ocp.StandardCheckpointHandler().metadata(folder).tree
            restore_args = _restore_args(item, saved, args)
        names = [field.name for field in dataclasses.fields(ocp.args.PyTreeRestore)]
        given = {name: getattr(args, name) for name in names if hasattr(args, name)}
        given |= {"item": item, "restore_args": restore_args}
        args = ocp.args.PyTreeRestore(**given)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _restore_args(item: Any, saved: Any, args: Any) -> Any:
    """Arguments that restore the leaves of an item as `abstract_tree_of` understands them."""
    saved_leaves = {dotted_name(path): leaf for path, leaf in tree_flatten_with_path(saved)[0]}

    def leaf_args(path: Any, leaf: Any) -> Any:
        leaf = _described(leaf)
        if isinstance(leaf, type):
            return ocp.RestoreArgs(restore_type=leaf)
        if isinstance(leaf, HostLeaf):
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        if getattr(leaf, "sharding", ...) is None:
            sharding = getattr(_described(saved_leaves.get(dotted_name(path))), "sharding", None)
            sharding = sharding or getattr(args, "fallback_sharding", None)
            leaf = abstract_array(leaf.shape, leaf.dtype, sharding=sharding)
        return ocp.checkpoint_utils.construct_restore_args(
            leaf,
            support_layout=getattr(args, "support_layout", False),
            strict=getattr(args, "strict", True),
        )

    return tree_map_with_path(leaf_args, item)


def _plain(tree: Any) -> Any:
    """Orbax's `TreeMetadata` is a pytree of its own; its `tree` has the checkpoint's structure."""
    return tree.tree if hasattr(tree, "custom_metadata") and hasattr(tree, "tree") else tree


def _described(leaf: Any) -> Any:
    """A leaf of `metadata` as one that `osl.load` takes; other leaves as they are."""
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return str
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        return type(np.zeros((), leaf.dtype).item())
    if not isinstance(leaf, ocp.metadata.ArrayMetadata):
        return leaf
    if isinstance(leaf, HostArrayMetadata):
        return HostLeaf(leaf.shape, leaf.dtype)
    sharding = leaf.sharding
    if sharding is not None and not isinstance(sharding, Sharding):
        try:
            sharding = sharding.to_jax_sharding()
        except ValueError:  # over devices that this program does not have
            sharding = None
    return abstract_array(leaf.shape, leaf.dtype, sharding=sharding)


def _override(item: Any, overrides: Any, *, partial: bool, is_recorded: bool) -> Any:
    by_name = {dotted_name(path): args for path, args in tree_flatten_with_path(overrides)[0]}
    merged = tree_map_with_path(
        lambda path, leaf: _merge(leaf, by_name.pop(dotted_name(path), None), is_recorded),
        overrides if item is None else item,
    )
    if by_name and not partial:
        raise MismatchError(
            "restore_args has leaves that the item does not have",
            expected="a tree of the item's structure",
            found=listed(sorted(by_name)),
        )
    return merged


def _merge(leaf: Any, args: Any, is_recorded: bool) -> Any:
    """One leaf with its `RestoreArgs`; what they leave open is the leaf's.

    Or, as with Orbax, what was saved: where they are for arrays and not strict; where they are for
    no kind of leaf, or for numpy arrays, if that `is_recorded`. Of a leaf its sharding counts then.
    """
    if leaf is ... or args is None:
        return leaf
    if not hasattr(args, "restore_type"):
        return args
    kind = args.restore_type
    if kind is type(...):
        return ...
    is_array, is_key = _is_array_like(leaf), prng.is_key(leaf)
    is_open = not args.strict if hasattr(args, "strict") else is_recorded and not is_key
    if kind is None:
        if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
            return args  # Orbax's users put a number where only the structure matters
        if not is_array or (args.dtype is None and not is_open):
            return leaf
        if is_open and not hasattr(leaf, "sharding"):
            return args
        if is_open and leaf.sharding is None:
            return SavedLeaf(None, args.dtype)
        kind = jax.Array if hasattr(leaf, "sharding") else np.ndarray
    shape = getattr(args, "global_shape", None)
    dtype = args.dtype
    sharding = getattr(args, "sharding", None)
    if sharding is None and getattr(args, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    if is_array:
        if is_key:  # Orbax's arguments describe their data, and ask for no other dtype
            shape, dtype = None, leaf.dtype
        elif not is_open and (leaf.shape or not is_recorded):  # Orbax takes none of scalars
            shape = leaf.shape if shape is None else shape
            dtype = leaf.dtype if dtype is None else dtype
        sharding = _placement(leaf) if sharding is None else sharding
    if not isinstance(kind, type):
        return args
    if issubclass(kind, jax.Array):
        strict = getattr(args, "strict", True)
        return ocp.ArrayRestoreArgs(
            dtype=dtype, sharding=sharding, global_shape=shape, strict=strict
        )
    if issubclass(kind, np.ndarray) and shape is not None:
        return HostLeaf(tuple(shape), dtype)
    return args


def _is_array_like(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not hasattr(leaf, "restore_type")


def _place(leaf: Any, fallback: Sharding | None, layouts: bool) -> Any:
    if not _is_array_like(leaf) or not hasattr(leaf, "sharding"):
        return leaf
    if isinstance(leaf, SavedLeaf):
        return dataclasses.replace(leaf, sharding=fallback)
    if leaf.sharding is None:
        return SavedLeaf(tuple(leaf.shape), leaf.dtype, fallback)
    if layouts and isinstance(leaf, jax.Array):
        array: Any = leaf
        placement = array.sharding if prng.is_key(array) else array.format
        leaf = abstract_array(array.shape, array.dtype, sharding=placement)
    if leaf.dtype != np.uint32:
        return leaf
    # Restore arguments take keys for their data.
    return ocp.ArrayRestoreArgs(
        dtype=leaf.dtype, sharding=_placement(leaf), global_shape=leaf.shape
    )


def _placement(leaf: Any) -> Any:
    """The sharding of a leaf, if it has one; of an abstract one with its device layout."""
    has_layout = getattr(getattr(leaf, "format", None), "layout", None) is not None
    if has_layout and not isinstance(leaf, jax.Array):
        return leaf.format
    return getattr(leaf, "sharding", None)
