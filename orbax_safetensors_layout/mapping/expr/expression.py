"""Expressions: how a leaf of a model is made of the tensors of a checkpoint, as immutable trees.

Names may have wildcards; `bind` gives them values and shapes, and returns a `BoundExpr`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError, listed

from ..affine.bound import BoundExpr, Constant, Valued
from ..argument_checks import integer, integers, number
from ..inverse.inverse_patches import whole_tensor
from ..names import Captures, Shapes, TensorSpecs, parse_pattern, substitute
from ..problems import Problem, Problems, within
from . import ops
from .values import Add, Cast, Scale, ValueOp, as_dtype


class Expr(abc.ABC):
    """An array made of tensors of a checkpoint.

    Examples:
        >>> tensor("model.layers.{i}.q_proj.weight").rearrange("(h d) e -> e h d", d=128)
        tensor('model.layers.{i}.q_proj.weight').rearrange('(h d) e -> e h d', d=128)
    """

    __slots__ = ()

    def transpose(self, *axes: int) -> Expr:
        """The axes in another order, as `numpy.transpose`; without `axes`, in reverse."""
        return Apply(self, ops.Transpose(_listed(axes, "transpose")))

    def rearrange(self, pattern: str, **sizes: int) -> Expr:
        """Split, move and merge axes in the notation of einops: `"(h d) e -> e h d"`.

        Args:
            pattern: The axes before and after; `(h d)` is one axis of two factors, `1` an axis of
                extent 1, `...` any number of axes.
            **sizes: Extents of factors; of each merged axis all but one.

        Raises:
            MappingError: The pattern is malformed, or a size is negative.
        """
        return Apply(self, ops.Rearrange.of(pattern, sizes))

    def reshape(self, *shape: int) -> Expr:
        """Another shape of the same row-major elements; one extent may be -1."""
        return Apply(self, ops.Reshape(_listed(shape, "reshape")))

    def slice(
        self, axis: int, start: int | None = None, stop: int | None = None, step: int = 1
    ) -> Expr:
        """Indices `start:stop:step` of an axis, as Python counts them.

        Unlike in Python no index may be beyond the axis.
        """
        if step == 0:
            raise MappingError("slice: the step cannot be 0")
        axis, step = integers((axis, step), "slice")
        start, stop = (None if at is None else integer(at, "slice") for at in (start, stop))
        return Apply(self, ops.Slice(axis, start, stop, step))

    def take(self, axis: int, indices: Iterable[int]) -> Expr:
        """Any indices of an axis, as `numpy.take`."""
        return Apply(self, ops.Take(integer(axis, "take"), integers(indices, "take")))

    def pad(self, axis: int, before: int, after: int, value: Any = 0) -> Expr:
        """Add `before` and `after` indices along an axis, that hold `value`; saving drops them."""
        axis, before, after = integers((axis, before, after), "pad")
        if before < 0 or after < 0:
            raise MappingError(f"pad: {before} and {after} must not be negative")
        return Apply(self, ops.Pad(axis, before, after, value))

    def repeat(self, axis: int, n: int, *, lossy_inverse: bool = False) -> Expr:
        """Each index of an axis `n` times, as `numpy.repeat`.

        Saving refuses a leaf in which the `n` differ, as training makes them; `lossy_inverse`
        accepts that the first of each is saved.
        """
        axis, n = integers((axis, n), "repeat")
        if n < 1:
            raise MappingError(f"repeat: the count must be at least 1, not {n}")
        return Apply(self, ops.Repeat(axis, n, lossy_inverse))

    def cast(self, dtype: Any, *, lossy_inverse: bool = False) -> Expr:
        """Another dtype, by numpy's rounding; an integer dtype must hold every value.

        Saving casts back. Where the dtype does not hold every value of the file's, saving is
        refused unless `lossy_inverse` accepts that loading has rounded.
        """
        return Apply(self, Cast(as_dtype(dtype), lossy_inverse))

    def scale(self, c: float, *, lossy_inverse: bool = False) -> Expr:
        """Each element times `c`, in the tensor's own dtype, to which `c` is rounded first.

        Saving divides. Where that does not restore every value, saving is refused unless
        `lossy_inverse` accepts it. Powers of two are exact in a dtype that holds every product:
        after a cast to a wider one.
        """
        return Apply(self, Scale(number(c, "scale"), lossy_inverse))

    def add(self, c: float, *, lossy_inverse: bool = False) -> Expr:
        """Each element plus `c`, in the tensor's own dtype, to which `c` is rounded first.

        Saving subtracts, which is exact for integers; for other values it is refused unless
        `lossy_inverse` accepts the rounding.
        """
        return Apply(self, Add(number(c, "add"), lossy_inverse))

    def bind(self, captures: Captures, specs: Shapes) -> BoundExpr:
        """Return the expression over tensors of known shape and dtype.

        `captures` are the values of the wildcards in its names, but for those of `stack`.
        """
        return self.bind_to(captures, TensorSpecs.of(specs))

    @abc.abstractmethod
    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        """See `bind`."""

    @abc.abstractmethod
    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        """Yields tensors with their shapes that follow from a leaf's, which must determine them."""

    def extent(self, axis: int, rank: int) -> int | None:
        """Return the extent of an axis, of `rank` ones, if the expression itself says it."""
        return None

    def children(self) -> Sequence[Expr]:
        return ()

    @property
    def is_generic(self) -> bool:
        """Whether names of tensors do not count, where their shapes and dtypes are the same."""
        return all(operand.is_generic for operand in self.children())

    def patterns(self) -> Iterator[str]:
        """Yields the name patterns of all its tensors."""
        for operand in self.children():
            yield from operand.patterns()

    def stacked_over(self) -> frozenset[str]:
        """The wildcards of all stacks within it."""
        return frozenset[str]().union(*(operand.stacked_over() for operand in self.children()))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Tensor(Expr):
    """All of one tensor; see `tensor`."""

    name: str

    def __repr__(self) -> str:
        return f"tensor({self.name!r})"

    def patterns(self) -> Iterator[str]:
        yield self.name

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        name = self._concrete(captures)
        if name not in specs:
            raise Problems([Problem(f"there is no tensor {name!r}", seek=name)])
        return whole_tensor(name, specs)

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        yield self._concrete(captures), shape

    def _concrete(self, captures: Captures) -> str:
        name = substitute(self.name, captures)
        if "{" in name:
            raise MappingError(
                f"nothing gives the wildcards of {name!r} a value: they must be in the rule's"
                " target, or in a stack(..., over=...)"
            )
        return name


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class FillExpr(Expr):
    """One value everywhere; see `fill`."""

    shape: tuple[int, ...]
    value: Any
    dtype: np.dtype[Any]

    def __repr__(self) -> str:
        return f"fill({self.shape}, {self.value!r}, {self.dtype.name!r})"

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        return Constant(self.shape, self.dtype, ops.scalar(self.value, self.dtype))

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        return iter(())

    def extent(self, axis: int, rank: int) -> int | None:
        return self.shape[axis] if len(self.shape) == rank else None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Apply(Expr):
    """An operation on an expression; see the methods of `Expr`."""

    operand: Expr
    op: ops.Op | ValueOp

    def __repr__(self) -> str:
        return f"{self.operand!r}.{self.op}"

    def children(self) -> Sequence[Expr]:
        return (self.operand,)

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        operand = self.operand.bind_to(captures, specs)
        try:
            if isinstance(self.op, ValueOp):
                return Valued.of(operand, self.op)
            return self.op.bind(operand)
        except MappingError as error:
            raise within(error, f"{self!r}, given {given(operand)}") from error

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        try:
            operand = shape if isinstance(self.op, ValueOp) else self.op.operand_extents(shape)
        except MappingError as error:
            raise within(error, repr(self)) from error
        return self.operand.infer(captures, operand)

    def extent(self, axis: int, rank: int) -> int | None:
        if isinstance(self.op, ValueOp):
            return self.operand.extent(axis, rank)
        return ops.extent(self.op, axis, rank, self.operand.extent)


def tensor(name_pattern: str) -> Expr:
    """One tensor of the checkpoint, by its name.

    Wildcards such as `{i}` have the values that they have in the target of the rule, or are the
    indices of a `stack`.
    """
    parse_pattern(name_pattern)
    return Tensor(name_pattern)


def fill(shape: Sequence[int], value: Any, dtype: Any) -> Expr:
    """One value everywhere; it reads nothing, and saving leaves it out."""
    return FillExpr(as_shape(shape), value, as_dtype(dtype))


def as_expr(value: Any, where: str) -> Expr:
    """Return an argument of the function `where`, which must be an expression."""
    if isinstance(value, Expr):
        return value
    hint = f"Did you mean osl.tensor({value!r})?" if isinstance(value, str) else None
    raise MappingError(
        f"{where} takes expressions, such as osl.tensor('name')", found=repr(value), hint=hint
    )


def as_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """Check a shape that a user gives."""
    extents = integers(shape, "a shape", most=64)  # axes of numpy's arrays
    if min(extents, default=0) < 0:
        raise MappingError(f"{extents} is not a shape")
    return extents


def given(operand: BoundExpr) -> str:
    """Describe a bound expression, for messages."""
    names = operand.sources()
    of = f" of {listed(map(repr, names), 1)}" if names else ""
    return f"shape {list(operand.shape)} {operand.dtype.name}{of}"


def _listed(items: tuple[Any, ...], what: str) -> tuple[int, ...]:
    """Return integers that are given one by one, or as one list or array."""
    is_sequence = len(items) == 1 and (not hasattr(items[0], "__index__") or np.ndim(items[0]))
    return integers(items[0] if is_sequence else items, what, most=64)  # axes of numpy's arrays
