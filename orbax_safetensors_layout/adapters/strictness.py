"""Loading where Orbax itself insists that the tree names the whole checkpoint."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from orbax_safetensors_layout.errors import UnexpectedTensorError
from orbax_safetensors_layout.load import load
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions

from .remains import check_remains


def load_item(
    path: str | os.PathLike[str],
    abstract: Any,
    *,
    mapping: LeafMapping | None,
    options: ReadOptions,
    partial: bool,
    switch: str,
) -> Any:
    """Loads as `osl.load` does, with Orbax's rule about tensors that the tree does not name.

    Args:
        path: The checkpoint.
        abstract: The wanted tree; None loads everything as a flat dict of numpy arrays.
        mapping: What leaves are made of; it is strict by itself.
        options: How to read; `partial` takes the place of `strict`.
        partial: Whether the checkpoint may hold more than the tree names.
        switch: How a user of the calling API asks for that, for the error's text.

    Raises:
        InvalidManifestError: A part of the item is gone.
        UnexpectedTensorError: The checkpoint holds more, and `partial` is False.
    """
    check_remains(path)
    try:
        options = dataclasses.replace(options, strict=not partial)
        return load(path, abstract, mapping=mapping, options=options)
    except UnexpectedTensorError as error:
        error.hint = f"Pass {switch} to leave them out, or put `...` where a tensor is not wanted."
        raise
