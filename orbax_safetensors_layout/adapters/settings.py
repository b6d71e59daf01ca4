"""Settings of operations started through Orbax: `using`, and options of Orbax's own context."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions, WriteOptions, require
from orbax_safetensors_layout.writing import with_model_files

from . import _orbax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a `using` block, or of a handler or layout; None leaves one open.

    The files of `WriteOptions.model` are read at once, so that no later save can fail to.
    """

    read: ReadOptions | None = None
    write: WriteOptions | None = None
    mapping: LeafMapping | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "write", with_model_files(self.write))

    def over(self, other: Self) -> Self:
        """Return these settings, with the other's where these are None."""
        return type(self)(
            read=self.read or other.read,
            write=self.write or other.write,
            mapping=self.mapping or other.mapping,
        )


NOTHING = Settings()
_SETTINGS: ContextVar[Settings] = ContextVar("orbax_safetensors_layout", default=NOTHING)
_StorageOptions = ocp.options.ArrayOptions.Saving.StorageOptions


@contextlib.contextmanager
def using(
    *,
    mapping: LeafMapping | None = None,
    read: ReadOptions | None = None,
    write: WriteOptions | None = None,
) -> Iterator[None]:
    """Settings for the Orbax operations that start inside the block.

    Orbax makes layouts and v1 handlers itself, without arguments; this is how options reach them.
    An asynchronous operation keeps the settings that it started with, also after the block ends.
    Blocks nest: an inner one takes over what it does not set.

    Args:
        mapping: What leaves are made of, in loads and saves.
        read: How checkpoints are read, instead of the defaults, of Orbax's own options and of
            those that a `SafetensorsCheckpointHandler` or `SafetensorsLayout` was made with.
        write: How checkpoints are written, in the same way.

    Examples:
        >>> import tempfile, numpy as np, safetensors.numpy, orbax.checkpoint as ocp
        >>> import orbax_safetensors_layout as osl
        >>> folder = tempfile.mkdtemp()
        >>> tensors = {"weight": np.arange(4.0, dtype=np.float32)}
        >>> safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
        >>> checkpointer = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
        >>> with osl.using(read=osl.ReadOptions(mmap=True)):
        ...     checkpointer.restore(folder)
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    token = _SETTINGS.set(Settings(read=read, write=write, mapping=mapping).over(_SETTINGS.get()))
    try:
        yield
    finally:
        _SETTINGS.reset(token)


def current(own: Settings) -> Settings:
    """A `using` block's settings, over a handler's own; for the blocking phase of an operation."""
    return _SETTINGS.get().over(own)


def read_options_v1(own: Settings) -> ReadOptions:
    """The options for reading with Orbax v1, by default those of Orbax's context."""
    # `safetensors.max_over_read_ratio` does not count: `StorageProfile` decides over-reads.
    if (read := current(own).read) is not None:
        return read
    read = ReadOptions(request_bytes=_byte_count("safetensors", "read_chunk_bytes"))
    budget = _byte_count("memory", "read_concurrent_bytes")
    return read if budget is None else dataclasses.replace(read, memory_budget_bytes=budget)


def write_options_v1(own: Settings) -> WriteOptions:
    """The options for writing with Orbax v1, likewise; the smaller byte count is the budget."""
    if (write := current(own).write) is not None:
        return write
    names = ("write_concurrent_bytes", "transfer_concurrent_bytes")
    limits = [_byte_count("memory", name) for name in names]
    budget = min((limit for limit in limits if limit is not None), default=None)
    return WriteOptions(memory_budget_bytes=budget)


def _byte_count(group: str, name: str) -> int | None:
    """An option of Orbax's context, refused under its own name."""
    value = getattr(getattr(_orbax.get_context(), group), name)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"context.{group}.{name} must be None or at least 1, not {value!r}.")
    return value


def storage_dtypes_v1(tree: Any) -> Sequence[Any] | None:
    """The dtype that Orbax's context asks for, for each leaf; None where it says nothing."""
    saving = _orbax.get_context().array.saving
    create = saving.scoped_storage_options_creator
    usual = _dtype(saving.storage_options, "storage_options")
    if create is None and usual is None:
        return None

    def dtype_of(path: Any, leaf: Any) -> Any:
        scoped = create and _dtype(create(path, leaf), "scoped_storage_options_creator")
        return usual if scoped is None else scoped

    return [dtype_of(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _dtype(options: Any, name: str) -> Any:
    if options is None:
        return None
    place = f"context.array.saving.{name}"
    require(isinstance(options, _StorageOptions), place, "`StorageOptions` or None", options)
    try:
        return None if options.dtype is None else np.dtype(options.dtype)
    except TypeError as error:
        problem = f"{place} gives the dtype {options.dtype!r}, which is not a dtype of numpy."
        raise ValueError(problem) from error
