"""Symbols of JAX that are not public, and when it is safe to use them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import jax

from orbax_safetensors_layout.runtime import Register

_CHECKED = ((0, 7, 1), (0, 13))  # `batched_device_put` was the same in 0.7.1, 0.10.2 and 0.12.0.1
_REGISTERS = ((0, 11), (0, 12))  # a client's `dma_map` was tried on a GPU with 0.11.2
_PARAMETERS = ["aval", "sharding", "xs", "devices"]
_ERRORS = {"DEADLINE_EXCEEDED": TimeoutError, "NOT_FOUND": KeyError, "UNAVAILABLE": ConnectionError}


def batched_device_put() -> Callable[..., jax.Array] | None:
    """Return the last step of `jax.make_array_from_callback`; None for unchecked versions of JAX.

    It takes one numpy array a device: 28 us in place of 46 for a small array on eight CPU devices.
    """
    if not _CHECKED[0] <= jax.__version_info__ < _CHECKED[1]:
        return None
    try:
        from jax._src.interpreters import pxla

        put: Any = pxla.batched_device_put
        if list(inspect.signature(put).parameters)[:4] == _PARAMETERS:
            return put  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        pass
    return None


def host_registration(client: Any) -> Register | None:
    """Return what registers host memory with the client of GPUs; None for unchecked versions.

    XLA copies other memory into memory of its own, in part to be locked first: 2.3 GB took 0.60 s
    to load in place of 0.21, and 0.8 GB of the host in place of 0.5 (H200, jax 0.11.2). A transfer
    holds the array until it has ended, so registered memory may be freed when nothing views it.
    The end of a registration waits for what is queued on the device, and keeps the interpreter's
    lock meanwhile (0.19 s for 20 steps of 10 ms). A program that calls back does not need the lock
    while it is on the device: 200 such ends beside three kinds of them took 4 ms at most.
    """
    if not _REGISTERS[0] <= jax.__version_info__ < _REGISTERS[1]:
        return None

    def register(address: int, nbytes: int) -> Callable[[], None] | None:
        try:
            client.dma_map(address, nbytes)
        except (AttributeError, RuntimeError, TypeError):  # nothing left to lock, another XLA
            return None
        return functools.partial(_end_registration, client, address, os.getpid())

    return register


def _end_registration(client: Any, address: int, process_id: int) -> None:
    if os.getpid() == process_id:  # in a forked child nothing is registered
        client.dma_unmap(address)


@dataclasses.dataclass(frozen=True, slots=True)
class DistributedStore:
    """The key-value store of `jax.distributed`, which JAX has no public name for.

    Orbax uses the same one. Checked with jax 0.7.1, 0.10.2 and 0.12.0.1.
    """

    _client: Any

    @classmethod
    def is_reachable(cls) -> bool:
        """Whether `jax.distributed` is initialised."""
        from jax._src import distributed

        return distributed.global_state.client is not None

    @classmethod
    def connect(cls) -> DistributedStore:
        """The store of this program; a `RuntimeError` if `jax.distributed` is not initialised."""
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "Processes that save together, or that read replicas once, need"
                " `jax.distributed.initialize()`, at the start of the program."
            )
        return cls(client)

    def set(self, key: str, value: str) -> None:
        _typed_errors(self._client.key_value_set, key, value)

    def renew(self, key: str, value: str) -> None:
        _typed_errors(self._client.key_value_set, key, value, allow_overwrite=True)

    def list(self, prefix: str) -> dict[str, str]:
        return dict(_typed_errors(self._client.key_value_dir_get, prefix))

    def get(self, key: str, timeout_seconds: float) -> str:
        milliseconds = int(timeout_seconds * 1000)
        return str(_typed_errors(self._client.blocking_key_value_get, key, milliseconds))

    def peek(self, key: str) -> str | None:
        try:
            return str(_typed_errors(self._client.key_value_try_get, key))
        except KeyError:
            return None

    def delete(self, prefix: str) -> None:
        _typed_errors(self._client.key_value_delete, prefix)


def _typed_errors(call: Callable[..., Any], key: str, *args: Any, **options: Any) -> Any:
    """Calls the store; JAX tells its errors apart by their text alone."""
    try:
        return call(key, *args, **options)
    except Exception as error:
        kind = _ERRORS.get(str(error).partition(":")[0])
        if kind is None:
            raise
        raise kind(key) from error
