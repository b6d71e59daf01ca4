"""Computes bound expressions of arrays that `jax.jit` traces: one evaluator of all their nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orbax_safetensors_layout.errors import (
    DtypeMismatchError,
    SafetensorsLayoutError,
)

from ..affine.bound import BoundExpr, Constant, Unary, Valued, WholeTensor
from ..affine.index_nodes import (
    Broadcast,
    Concatenated,
    Decoded,
    Permuted,
    Reshaped,
    Sliced,
    Stacked,
    Taken,
)
from ..casting import is_whole
from ..expr.choices import Compared
from ..expr.opaque_ops import OpaqueFunction
from ..expr.quantized import E8M0, BlockScale, Int4, Mxfp4
from ..expr.values import Cast, ValueOp
from .exact_values import (
    arithmetic,
    arithmetic_refusal,
    cast,
    cast_refusal,
    compared_bits,
    of_bits,
    to_bits,
)

_FEW_RUNS = 16  # are joined; more indices are gathered

Raised = Callable[[str], SafetensorsLayoutError]
"""Makes the error of a leaf."""


class ValueCheck(NamedTuple):
    """A property that values must have, and that only they show."""

    holds: jax.Array  # for all
    result: int  # the number of the expression that needs it
    error: Raised


def refusal(node: BoundExpr) -> str | None:
    """Return why a node is not computed of live arrays; None if it is."""
    if jax.dtypes.canonicalize_dtype(node.dtype) != node.dtype:
        return f"takes {node.dtype.name}; set jax.config.update('jax_enable_x64', True)"
    if isinstance(node, Valued):
        if isinstance(node.op, Cast):
            return cast_refusal(node.operand.dtype, node.dtype)
        return arithmetic_refusal(node.dtype)
    if isinstance(node, Decoded):
        decoder = node.decoder
        if isinstance(decoder, OpaqueFunction):
            return "calls a function of numpy arrays"
        if isinstance(decoder, BlockScale | Mxfp4 | Int4):
            stored, scale = node.operands
            is_known = scale.dtype == np.uint8 or cast_refusal(scale.dtype, node.dtype) is None
            if decoder.pairs is None:
                is_known &= cast_refusal(stored.dtype, node.dtype) is None
            return None if is_known else f"decodes {stored.dtype.name} to {node.dtype.name}"
        if not isinstance(decoder, Compared):
            return f"decodes values as they are stored ({type(decoder).__name__})"
    return None


def may_refuse(expressions: Sequence[BoundExpr]) -> bool:
    """Whether values may be refused that expressions are computed of."""
    for node in (node for expr in expressions for node in expr.nodes()):
        if isinstance(node, Valued):
            if is_whole(node.dtype):
                return True
        elif isinstance(node, Decoded) and isinstance(node.decoder, Compared):
            return True
    return False


class TracedValues:
    """The values of expressions over arrays, each computed once, and what they have to be."""

    def __init__(self, arrays: Mapping[str, jax.Array]) -> None:
        self._arrays = arrays
        self._moved: dict[int, jax.Array] = {}  # by the node's id
        self._result = 0
        self.value_checks: list[ValueCheck] = []

    def result(self, number: int, node: BoundExpr) -> jax.Array:
        """Return the values of an expression; its `number` is that of its checks."""
        self._result = number
        if isinstance(node, WholeTensor) and self._arrays[node.name].dtype == node.dtype:
            return self._arrays[node.name]
        return self._values_of(node)

    def _values_of(self, node: BoundExpr) -> jax.Array:
        return of_bits(self.moved(node), node.dtype)

    def moved(self, node: BoundExpr) -> jax.Array:
        """Return what is moved of a node: its values, or their bits, which may be given as such."""
        if id(node) not in self._moved:
            self._moved[id(node)] = self._value_of(node)
        return self._moved[id(node)]

    def _value_of(self, node: BoundExpr) -> jax.Array:
        match node:
            case WholeTensor():
                return to_bits(self._arrays[node.name])
            case Constant():
                value = jnp.asarray(np.asarray(node.value, node.dtype))
                return jnp.broadcast_to(to_bits(value), node.shape)
            case Valued():
                return to_bits(self._valued(node.op, self._values_of(node.operand)))
            case Decoded():
                return self._decoded(node)
            case Stacked():
                return jnp.stack([self.moved(operand) for operand in node.operands], node.axis)
            case Concatenated():
                return jnp.concatenate([self.moved(part) for part in node.operands], node.axis)
            case Unary():
                return _moved(self.moved(node.operand), node)
        raise AssertionError(node)

    def _valued(self, op: ValueOp, values: jax.Array) -> jax.Array:
        if isinstance(op, Cast):
            result, kept = cast(values, op.dtype)
        else:
            result, kept = arithmetic(op, values)
        if kept is not None:
            self._check(kept.all(), functools.partial(_lost, str(op), str(result.dtype)))
        return result

    def _decoded(self, node: Decoded) -> jax.Array:
        decoder = node.decoder
        if isinstance(decoder, Compared):
            first, *others = (self.moved(operand) for operand in node.operands)
            for other, problem in zip(others, decoder.problems, strict=True):
                error = functools.partial(problem.error, "the same bits", "others")
                same = compared_bits(first[..., None]) == compared_bits(other)
                self._check(same.all(), error)
            return first
        assert isinstance(decoder, BlockScale | Mxfp4 | Int4)
        stored, scale = map(self._values_of, node.operands)
        if scale.dtype == np.uint8:
            scale = lax.bitcast_convert_type(scale, E8M0)
        scales = scale.astype(jnp.float32)
        for axis, block in enumerate(decoder.block, decoder.free):
            scales = jnp.repeat(scales, block, axis)
            scales = lax.slice_in_dim(scales, 0, node.shape[axis], axis=axis)
        if decoder.pairs is not None:
            data = (
                stored if stored.dtype == np.uint8 else lax.bitcast_convert_type(stored, jnp.uint8)
            )
            pairs = jnp.asarray(decoder.pairs.view(np.float32).reshape(256, 2))
            values = pairs.at[data].get(mode="promise_in_bounds")
            values = values.reshape(*stored.shape[:-1], -1)[..., : node.shape[-1]]
        else:
            values = stored.astype(jnp.float32)
        return to_bits((values * scales).astype(node.dtype))

    def _check(self, holds: jax.Array, error: Raised) -> None:
        self.value_checks.append(ValueCheck(holds, self._result, error))


def _moved(values: jax.Array, node: Unary) -> jax.Array:
    """Return the values of a node, from those of its operand."""
    match node:
        case Permuted():
            return jnp.transpose(values, node.axes)
        case Reshaped():
            return jnp.reshape(values, node.shape)
        case Sliced():
            return _strided(values, node.axis, node.start, node.shape[node.axis], node.step)
        case Taken():
            return _taken(values, node)
        case Broadcast():
            return jnp.broadcast_to(jnp.expand_dims(values, node.axis), node.shape)
    raise AssertionError(node)


def _strided(values: jax.Array, axis: int, start: int, count: int, step: int) -> jax.Array:
    """Return `count` indices of an axis from `start` on."""
    last = start + step * (count - 1)
    if step > 0 or count < 2:
        stop = last + 1 if count else start
        return lax.slice_in_dim(values, start, stop, max(1, step), axis)
    return lax.rev(lax.slice_in_dim(values, last, start + 1, -step, axis), (axis,))


def _taken(values: jax.Array, node: Taken) -> jax.Array:
    counts = np.diff(node.starts)
    runs = [(run, int(count)) for run, count in zip(node.runs, counts, strict=True)]
    if len(runs) <= _FEW_RUNS and all(run.step or count == 1 for run, count in runs):
        parts = [_strided(values, node.axis, run.first, count, run.step) for run, count in runs]
        return jnp.concatenate(parts, node.axis)
    indices = np.concatenate([run.first + run.step * np.arange(count) for run, count in runs])
    return jnp.take(values, indices.astype(np.int32), node.axis, mode="clip")


def _lost(op: str, dtype: str, leaf: str) -> SafetensorsLayoutError:
    return DtypeMismatchError(
        f"values do not fit the {op} of a mapping",
        tensor=leaf,
        expected=dtype,
        hint="Cast to a wider dtype; arithmetic is in the dtype of its operand.",
    )
