"""Every private orbax symbol that the package needs.

Checked against orbax-checkpoint 0.12.6 and 0.12.8. Nothing else in the package imports a module of
orbax whose name begins with an underscore.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.layout import registry, safetensors_layout
from orbax.checkpoint.experimental.v1._src.layout.checkpoint_layout import (
    STATE_CHECKPOINTABLE_KEY as STATE,
)

__all__ = ["STATE", "get_context", "layout_class", "set_layout_class", "tree_metadata", "version"]


def version() -> str:
    """The installed version of orbax-checkpoint."""
    return importlib.metadata.version("orbax-checkpoint")


def tree_metadata(tree: Any, custom_metadata: Mapping[str, str]) -> Any:
    """A `TreeMetadata`, which v0 has no public way to make."""
    return build_default_tree_metadata(tree, custom_metadata=dict(custom_metadata) or None)


def layout_class() -> Any:
    """The class that Orbax's own resolution takes for `checkpoint_layout = "safetensors"`."""
    # Without a path it awaits nothing, so it is driven by hand: no event loop is needed, and one
    # that runs already (a notebook) is not in the way.
    resolution = registry.get_layout_class(ocp.options.CheckpointLayout.SAFETENSORS)
    try:
        resolution.send(None)
    except StopIteration as finished:
        return finished.value
    finally:
        resolution.close()
    raise RuntimeError("Orbax's layout resolution waits for something")


def set_layout_class(layout: Any) -> Any:
    """Puts a class where that resolution looks, and returns the one that was there."""
    previous = safetensors_layout.SafetensorsLayout
    safetensors_layout.SafetensorsLayout = layout
    return previous
