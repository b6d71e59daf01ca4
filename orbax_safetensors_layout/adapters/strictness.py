"""Loading where Orbax itself insists that the tree names the whole checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import UnexpectedTensorError
from orbax_safetensors_layout.load import load_catalog
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.pytree import dotted_name

from .remains import check_remains


def open_item(
    path: str | os.PathLike[str], abstract: Any, mapping: LeafMapping | None, options: ReadOptions
) -> Callable[[], Catalog]:
    """Checks the headers of what is wanted.

    Returns:
        What gives the checkpoint's catalog.

    Raises:
        FormatError: A header, the index or the manifest is malformed, or a file is truncated.
        InvalidManifestError: A part of the item is gone.
    """
    check_remains(path)
    opening = functools.partial(Catalog.open, path, retries=options.retries)
    if options.replicated == "read_once" and jax.process_count() > 1:
        return opening  # all processes have to learn together that one has failed
    catalog = opening()
    try:
        names: Iterable[str] = catalog.names
        if abstract is not None and mapping is None:
            paths = jax.tree_util.tree_flatten_with_path(abstract)[0]
            names = {dotted_name(path) for path, _ in paths}.intersection(names)
        catalog.entries(names)
    except BaseException:
        catalog.close()
        raise
    return lambda: catalog


def load_item(
    path: str | os.PathLike[str],
    abstract: Any,
    *,
    mapping: LeafMapping | None,
    options: ReadOptions,
    partial: bool,
    switch: str,
    opening: Callable[[], Catalog] | None = None,
) -> Any:
    """Loads as `osl.load` does, with Orbax's rule about tensors that the tree does not name.

    Args:
        path: The checkpoint.
        abstract: The wanted tree; None loads everything as a flat dict of numpy arrays.
        mapping: What leaves are made of; it is strict by itself.
        options: How to read; `partial` takes the place of `strict`.
        partial: Whether the checkpoint may hold more than the tree names.
        switch: How a user of the calling API asks for that, for the error's text.
        opening: What `open_item` returned, if it was called.

    Raises:
        InvalidManifestError: A part of the item is gone.
        UnexpectedTensorError: The checkpoint holds more, and `partial` is False.
    """
    if opening is None:
        check_remains(path)
        opening = functools.partial(Catalog.open, path, retries=options.retries)
    try:
        options = dataclasses.replace(options, strict=not partial)
        return load_catalog(opening, path, abstract, mapping=mapping, options=options)
    except UnexpectedTensorError as error:
        error.hint = f"Pass {switch} to leave them out, or put `...` where a tensor is not wanted."
        raise
