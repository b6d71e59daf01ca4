"""Blocking work off the event loop, with the caller's context."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import jax
import jax.experimental

_jax: Any = jax  # its configuration is untyped, differently so from release to release
_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_background(
    function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> Coroutine[Any, Any, _R]:
    """A coroutine that runs `function` in a thread; what it sees is captured at this call.

    Context variables are captured, and whether x64 is on: `jax.enable_x64` is local to a thread
    and no context variable, so inside such a block a worker would otherwise refuse, or narrow,
    64-bit values.
    """
    context = contextvars.copy_context()
    x64 = bool(_jax.config.jax_enable_x64)

    def call() -> _R:
        with _x64(x64):
            return function(*args, **kwargs)

    async def run() -> _R:
        return await asyncio.get_running_loop().run_in_executor(None, context.run, call)

    return run()


def _x64(enabled: bool) -> Any:
    if hasattr(_jax, "enable_x64"):  # since jax 0.8
        return _jax.enable_x64(enabled)
    return _jax.experimental.enable_x64(enabled)
