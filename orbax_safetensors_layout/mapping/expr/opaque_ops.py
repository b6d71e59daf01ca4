"""Computed expressions: the escape hatch `opaque`, and the base of decoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Decoded
from ..names import Captures, TensorSpecs
from ..problems import gather, within
from . import ops
from .expression import Expr, as_expr, as_shape, given
from .values import as_dtype


class Kernel(Protocol):
    """A function of several expressions; `describe` formats the user's call."""

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr: ...

    def describe(self, operands: Sequence[str]) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Compute(Expr):
    """A function of expressions; see `opaque` and `dequantize_block`."""

    operands: tuple[Expr, ...]
    kernel: Kernel

    def __repr__(self) -> str:
        return self.kernel.describe([repr(operand) for operand in self.operands])

    def children(self) -> Sequence[Expr]:
        return self.operands

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        operands = tuple(gather(lambda expr: expr.bind_to(captures, specs), self.operands))
        try:
            return self.kernel.bind(operands)
        except MappingError as error:
            listed = " and ".join(map(given, operands))
            raise within(error, f"{self!r}, given {listed}") from error

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        raise MappingError(f"{self!r} does not invert")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpaqueFunction:
    """Any function of whole arrays, of shapes `inputs` when bound; equal to those of the same."""

    function: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    inputs: tuple[tuple[int, ...], ...] = ()
    free: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueFunction) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        """The function counts as itself: one that is not hashable may do."""
        return id(self.function), self.shape, self.dtype, self.inputs, self.free

    def describe(self, operands: Sequence[str]) -> str:
        listed = ", ".join([_name(self.function), *operands])
        return f"opaque({listed}, shape={self.shape}, dtype={self.dtype.name!r})"

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        decoder = dataclasses.replace(self, inputs=tuple(o.shape for o in operands))
        return Decoded(self.shape, self.dtype, operands, decoder)

    def widen(self, box: Box) -> Box:
        return Box.whole(self.shape)

    def needs(self, box: Box) -> tuple[Box, ...]:
        return tuple(map(Box.whole, self.inputs))

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        result = np.asarray(self.function(*inputs))
        if result.shape != self.shape or result.dtype != self.dtype:
            raise MappingError(
                f"the function {_name(self.function)} of an opaque expression gave another array"
                " than was declared",
                expected=f"{list(self.shape)} {self.dtype.name}",
                found=f"{list(result.shape)} {result.dtype.name}",
            )
        return result


def opaque(fn: Callable[..., Any], *exprs: Expr, shape: Sequence[int], dtype: Any) -> Expr:
    """Any function of whole arrays: the escape hatch.

    Each process reads ALL of each expression for any shard of the leaf, holds it together with the
    whole result, and computes the whole result for each piece of its shards: costs that other
    operations avoid. It does not invert, so such a leaf cannot be saved through the mapping.

    Args:
        fn: Takes a numpy array for each expression, and returns one.
        *exprs: The expressions.
        shape: The result's shape.
        dtype: The result's dtype.

    Examples:
        >>> from orbax_safetensors_layout.mapping import tensor
        >>> opaque(np.linalg.inv, tensor("rotation"), shape=(4, 4), dtype="float32")
        opaque(inv, tensor('rotation'), shape=(4, 4), dtype='float32')
    """
    if not callable(fn):
        raise MappingError("opaque takes a function, then expressions", found=repr(fn))
    operands = tuple(as_expr(expr, "opaque") for expr in exprs)
    return Compute(operands, OpaqueFunction(fn, as_shape(shape), as_dtype(dtype)))


def is_opaque(parts: Iterable[object]) -> bool:
    """Whether some of these nodes or pieces are computed by functions of whole arrays."""
    return any(isinstance(getattr(part, "decoder", None), OpaqueFunction) for part in parts)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)
