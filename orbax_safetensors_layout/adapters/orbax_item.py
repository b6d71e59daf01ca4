"""Items that Orbax saved in its own format, which Orbax itself restores and describes.

A run that changes its handler holds such steps beside those of this package.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from jax.tree_util import tree_flatten_with_path

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.pytree import dotted_name

from ._orbax import ITEM_METADATA
from .item_save import HINT
from .restore_args import HostArray, described, plain_abstract_tree

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax

# The last two are all that releases before the metadata file left in the folder.
_FILES = ("checkpoint", "manifest.ocdbt")


def is_orbax_item(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a tree in Orbax's own format, and no safetensors files."""
    if is_safetensors_checkpoint(directory):
        return False
    folder = ocp_v1.path.Path(directory)
    metadata = folder / ITEM_METADATA
    if metadata.exists():  # ours is left where the files of an item of ours are gone
        return HINT not in metadata.read_text()
    return any((folder / name).exists() for name in _FILES)


def restore(directory: str | os.PathLike[str], args: Any) -> Any:
    """Restores what `args` ask for, as the handler of Orbax that these arguments belong to.

    Args:
        directory: The item's folder.
        args: `StandardRestore`, `PyTreeRestore`, None for everything, or others with their
            attributes, as `SafetensorsRestore`. A mapping does not count: it tells how leaves
            are kept in safetensors files.
    """
    folder = ocp_v1.path.Path(directory)
    if args is None or isinstance(args, ocp.args.StandardRestore):
        return ocp.StandardCheckpointHandler().restore(folder, args=args)
    item = plain_abstract_tree(getattr(args, "item", None))
    restore_args = getattr(args, "restore_args", None)
    if not isinstance(args, ocp.args.PyTreeRestore):
        if item is None and restore_args is None:
            return restore(folder, None)
        if restore_args is None:
            restore_args = _restore_args(item, metadata(folder).tree)
        partial = getattr(args, "partial_restore", False)
        args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=partial)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _restore_args(item: Any, saved: Any) -> Any:
    """What restores the leaves of an item as `abstract_tree` understands them."""
    by_name = {dotted_name(path): leaf for path, leaf in tree_flatten_with_path(saved)[0]}

    def leaf_args(path: Any, leaf: Any) -> Any:
        leaf = described(leaf)
        if isinstance(leaf, type):
            return ocp.RestoreArgs(restore_type=leaf)
        if isinstance(leaf, HostArray):
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        if getattr(leaf, "sharding", ...) is None:
            sharding = getattr(described(by_name.get(dotted_name(path))), "sharding", None)
            leaf = _struct(leaf.shape, leaf.dtype, sharding=sharding)
        return ocp.checkpoint_utils.construct_restore_args(leaf)

    return jax.tree_util.tree_map_with_path(leaf_args, item)


def metadata(directory: str | os.PathLike[str]) -> Any:
    """The `TreeMetadata` of the item."""
    return ocp.StandardCheckpointHandler().metadata(ocp_v1.path.Path(directory))
