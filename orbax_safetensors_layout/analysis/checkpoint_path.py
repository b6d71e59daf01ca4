"""What is at a path that a user names, without importing Orbax where it is not needed."""

from __future__ import annotations

import os

from orbax_safetensors_layout.catalog import CheckpointRef, is_safetensors_checkpoint


def resolve_checkpoint(path: str | os.PathLike[str]) -> CheckpointRef:
    """A safetensors checkpoint as it is named, or what Orbax saved there, or in a step there.

    Args:
        path: What a user names; where there is nothing, it is for the reader to say so.

    Raises:
        CheckpointNotFoundError: It is not clear which item of a step is meant.
        StorageError: The storage cannot be asked.
    """
    text = os.path.expanduser(os.fsdecode(path))
    if "://" in text or is_safetensors_checkpoint(text):
        return CheckpointRef(text, is_orbax=False, item=None)
    from orbax_safetensors_layout.adapters import holds_checkpoint, locate

    if not holds_checkpoint(text):
        return CheckpointRef(text, is_orbax=False, item=None)
    return locate(os.path.abspath(text))  # Orbax takes no other
