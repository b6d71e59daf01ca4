"""Items that Orbax saved in its own format, which Orbax itself restores and describes.

A run that changes its handler holds such steps beside those of this package.
"""

from __future__ import annotations

import os
from typing import Any

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1

from orbax_safetensors_layout.adapters._orbax import ITEM_METADATA
from orbax_safetensors_layout.format.survey import is_safetensors_checkpoint

# The last two are all that releases before the metadata file left in the folder.
_FILES = (ITEM_METADATA, "checkpoint", "manifest.ocdbt")


def is_orbax_item(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a tree in Orbax's own format, and no safetensors files."""
    if is_safetensors_checkpoint(directory):
        return False
    folder = ocp_v1.path.Path(directory)
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
    if not isinstance(args, ocp.args.PyTreeRestore):
        args = _as_orbaxs(args)
        if isinstance(args, ocp.args.StandardRestore):
            return restore(folder, args)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _as_orbaxs(args: Any) -> Any:
    item = getattr(args, "item", None)
    restore_args = getattr(args, "restore_args", None)
    partial = getattr(args, "partial_restore", False)
    if restore_args is None and not partial:
        return ocp.args.StandardRestore(item)
    if restore_args is None and item is not None:
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    return ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=partial)


def metadata(directory: str | os.PathLike[str]) -> Any:
    """The `TreeMetadata` of the item."""
    return ocp.StandardCheckpointHandler().metadata(ocp_v1.path.Path(directory))
