"""Which handler saves and loads what, where the layout is safetensors."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.adapters import _orbax
from orbax_safetensors_layout.adapters.v1 import SafetensorsHandler
from orbax_safetensors_layout.errors import SafetensorsLayoutError


def handler_for_save(resolve: Any, registry: Any, checkpointable: Any, name: str) -> Any:
    """Ours in the place of Orbax's pytree handler, and for what no handler takes.

    What a user registered handlers for, or what brings its own way to be saved, keeps that.

    Args:
        resolve: Orbax's own resolution.
        registry: The handlers that the caller has registered.
        checkpointable: What is saved.
        name: Its name.

    Raises:
        SafetensorsLayoutError: It is a part for `ocp.partial`, which knows Orbax's format only.
    """
    if isinstance(checkpointable, _orbax.PartialSave):
        raise SafetensorsLayoutError(
            "a checkpoint in safetensors can not be saved part by part",
            hint="Use `ocp.save`, or `ocp.partial.save` in a context of another layout.",
        )
    try:
        found = resolve(registry, checkpointable, name=name)
    except _orbax.NoEntryError:
        if not SafetensorsHandler().is_handleable(checkpointable):
            raise
        return SafetensorsHandler()
    return SafetensorsHandler() if isinstance(found, ocp.handlers.PyTreeHandler) else found


def is_safetensors_context() -> bool:
    """Whether the layout of Orbax's context is safetensors."""
    wanted = ocp.options.CheckpointLayout.SAFETENSORS
    return bool(_orbax.get_context().checkpoint_layout == wanted)
