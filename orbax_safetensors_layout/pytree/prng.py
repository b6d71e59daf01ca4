"""Arrays of typed PRNG keys: files hold their data, the manifest the implementation's name."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from orbax_safetensors_layout.errors import InvalidManifestError, UnsupportedDtypeError

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_DATA_HINT = (
    "Give a tree with their data in the place of the keys, uint32: jax.random.wrap_key_data(data,"
    " impl=...) makes keys of it."
)


def is_key(value: Any) -> bool:
    """Whether a value, or its abstract form, is an array of typed keys."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return False
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def implementation(keys: Any) -> str:
    """Return the name of the implementation of keys, which may be abstract if it is JAX's own."""
    if isinstance(keys, jax.Array):
        return str(jax.random.key_impl(keys))
    for name in _IMPLEMENTATIONS:
        if _dtype_of(name) == keys.dtype:
            return name
    raise UnsupportedDtypeError(
        "keys of an implementation that JAX does not name",
        expected=f"one of {', '.join(_IMPLEMENTATIONS)}",
        found=keys.dtype,
        hint=_DATA_HINT,
    )


def data(keys: Any) -> Any:
    """Return the keys' uint32 data, which has more dimensions; abstract for abstract keys."""
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    return jax.eval_shape(jax.random.key_data, keys)


def keys_of(shape: tuple[int, ...], dtype: Any, name: str, *, file: str | None, tensor: str) -> Any:
    """Return the abstract keys of an implementation whose data has a shape and a dtype."""
    struct: Any = jax.ShapeDtypeStruct
    try:
        wrap = functools.partial(jax.random.wrap_key_data, impl=name)
        return jax.eval_shape(wrap, struct(shape, dtype))
    except (TypeError, ValueError) as error:
        raise InvalidManifestError(
            "the checkpoint records the tensor as PRNG key data, which it cannot be",
            file=file,
            tensor=tensor,
            expected=f"data of keys of an implementation {name!r} that JAX has",
            found=f"{np.dtype(dtype)} {list(shape)}: {error}",
            hint=_DATA_HINT,
        ) from error


@functools.cache
def _dtype_of(name: str) -> Any:
    return jax.eval_shape(functools.partial(jax.random.key, 0, impl=name)).dtype
