"""Waits for the folders that Orbax makes for a save, and reports those that it cannot make.

Orbax makes the folders of a save on its first process; the others wait for it, up to five minutes.
Where it makes them in the background (v0's default), handlers wait by `folders_being_made`. Else
its functions are watched: the first process puts an error into the key-value store, and raises it
only after all have met; each of the others then asks the store, and raises a `PeerError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax

from orbax_safetensors_layout.errors import PeerError
from orbax_safetensors_layout.reading import DistributedStore

from . import _orbax

_PREFIX = "orbax_safetensors_layout/folders"
_create_all = _orbax.folder_creation_v0.create_all
_create_all_async = _orbax.folder_creation_v0.create_all_async
_create_paths = _orbax.folder_creation_v1._create_paths

_making: dict[str, list[Any]] = {}  # by the operation, of which the last counts


@contextlib.asynccontextmanager
async def folders_being_made(directory: Any) -> AsyncIterator[Callable[[], None] | None]:
    """Yields a function that waits for the folders; on all processes None where none need wait.

    If one cannot be made, it raises, where Orbax v0 waits for `coordination_timeout`, five minutes.
    Ends the making of folders if the block raises: else a thread of Orbax waits five minutes for
    those of `training.Checkpointer`. `directory` is in Orbax v1 a `PathAwaitingCreation`.
    """
    operation = _orbax.current_operation()
    futures = tuple(_making.get(operation, ()))
    wait = partial(_wait_for, operation, futures) if futures else None
    try:
        yield wait
    except BaseException:
        if wait is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(wait)
        creation = getattr(getattr(directory, "_base_path", directory), "_awaitable", None)
        if (
            inspect.iscoroutine(creation)
            and inspect.getcoroutinestate(creation) == inspect.CORO_CREATED
        ):
            creation.close()
        raise


def _wait_for(operation: str, futures: Sequence[Any]) -> None:
    """Waits for folders; on processes that make none, the futures are done."""
    for number, future in enumerate(futures, 1):
        try:
            future.result()
        except BaseException:
            for waiting in futures[number:]:
                waiting.cancel()
            _orbax.end_waits(operation)  # of Orbax's threads
            raise


async def _make_watched(
    operation: str,
    paths: Sequence[Any],
    subdirectories: Sequence[str],
    make: Callable[[Sequence[Any]], Awaitable[None]],
) -> None:
    """Makes `TemporaryPath`s and folders in each of them with `make`, which ends with a barrier."""
    first = os.fspath(paths[0].get())
    key = f"{_PREFIX}/{operation}/{urllib.parse.quote(first, safe='')}"
    errors: list[Exception] = []

    async def create(path: Any) -> Any:
        try:
            folder = await path.create()
            await asyncio.gather(*(_orbax.make_folder(folder / n) for n in subdirectories))
        except Exception as error:
            errors.append(error)
            text = f"process {jax.process_index()} failed while making the folder: {error}"
            DistributedStore.connect().renew(key, text)
        return path.get()

    await make([SimpleNamespace(create=partial(create, path)) for path in paths])
    if errors:
        raise errors[-1]
    text = DistributedStore.connect().peek(key)
    if text is not None:
        raise PeerError(text, file=first)


def _create_all_watched(paths: Sequence[Any], **options: Any) -> Any:
    if jax.process_count() == 1:
        return _create_all(paths, **options)
    operation = _orbax.current_operation()
    return _make_watched(operation, paths, (), lambda watched: _create_all(watched, **options))


def _create_paths_watched(
    path: Any, *, subdirectories: Any, operation_id: str, **options: Any
) -> Any:
    create = partial(_create_paths, operation_id=operation_id, **options)
    if jax.process_count() == 1:
        return create(path, subdirectories=subdirectories)
    names = tuple(subdirectories)
    return _make_watched(
        operation_id, [path], names, lambda watched: create(watched[0], subdirectories=())
    )


def _create_all_remembered(*args: Any, **kwargs: Any) -> Any:
    future = _create_all_async(*args, **kwargs)
    operation = _orbax.current_operation()
    if operation not in _making:
        _making.clear()
    _making.setdefault(operation, []).append(future)
    return future


_orbax.folder_creation_v0.create_all = _create_all_watched
_orbax.folder_creation_v0.create_all_async = _create_all_remembered
_orbax.folder_creation_v1._create_paths = _create_paths_watched
