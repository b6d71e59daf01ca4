"""Runs blocking work off the event loop, with the caller's context."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import jax
import jax.experimental

from orbax_safetensors_layout.pytree import current_mesh
from orbax_safetensors_layout.runtime import Cancellation

_jax: Any = jax  # its configuration is untyped, differently so from release to release
_enable_x64 = _jax.enable_x64 if hasattr(_jax, "enable_x64") else _jax.experimental.enable_x64
_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_callers_context(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` for another thread, with the context variables that the caller of this sees now.

    So with `jax.enable_x64` and `jax.set_mesh`, which are local to a thread: a worker would refuse
    64-bit values, and shardings over the abstract mesh.
    """
    context = contextvars.copy_context()
    x64 = bool(_jax.config.jax_enable_x64)
    mesh = current_mesh()

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _enable_x64(x64), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return context.run(function, *args, **kwargs)

    return run


def in_background(
    function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> Coroutine[Any, Any, _R]:
    """A coroutine that runs `function` in a thread, in the context of this call.

    When the coroutine is cancelled, reads that the function has begun are broken off; it ends when
    the function has ended.
    """
    with Cancellation() as cancellation:
        captured = functools.partial(in_callers_context(function), *args, **kwargs)

    async def run() -> _R:
        loop = asyncio.get_running_loop()
        cancellation.is_given_up = loop.is_closed  # as after Ctrl-C in Orbax's own
        running = loop.run_in_executor(None, captured)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancellation.cancel()
            running.add_done_callback(lambda end: end.cancelled() or end.exception())  # has no user
            await asyncio.wait([running])
            raise

    return run()
