"""Calls of Orbax v0 and v1 that reach the package, and those that save in Orbax's own format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp

import orbax_safetensors_layout as osl


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Installs the layout for all contexts that name `safetensors`, and in the end removes it."""
    osl.install()
    try:
        yield
    finally:
        osl.uninstall()


def layout_context(layout: Any = "safetensors") -> ocp.Context:
    """Return a context of v1 with this layout."""
    context = ocp.Context()
    context.checkpoint_layout = layout
    return context


@contextlib.contextmanager
def installed_context() -> Iterator[None]:
    """Enters a context whose layout is installed."""
    with installed(), layout_context():
        yield


def load_v1(path: Path, tree: Any) -> Any:
    """Load with v1, through the installed layout."""
    with installed_context():
        return ocp.load(path, tree)


def restore_v0(folder: Path, args: ocp0.args.CheckpointArgs) -> Any:
    """Restore with v0, through the package's handler."""
    with ocp0.Checkpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder, args=args)


def save_standard(folder: Path, tree: Any) -> None:
    """Save in Orbax's own format."""
    with ocp0.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def restore_standard(folder: Path, target: Any = None) -> Any:
    """Restore what is in Orbax's own format."""
    with ocp0.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, target)


def save_pytree(folder: Path, tree: Any, **options: Any) -> Path:
    """Save in Orbax's own format, by its handler of PyTrees with these options."""
    with ocp0.Checkpointer(ocp0.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp0.args.PyTreeSave(tree))
    return folder
