"""Random expressions and what numpy makes of them: the oracle of the mapping's tests."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    BoundExpr,
    Expr,
    apply_view,
    assemble_box,
    concat,
    fill,
    stack,
    tensor,
)


class Case(NamedTuple):
    """An expression, the array that numpy makes of it, and the tensors it takes."""

    expr: Expr
    array: np.ndarray
    tensors: dict[str, np.ndarray]


def specs_of(tensors):
    return {name: (array.shape, array.dtype) for name, array in tensors.items()}


def reader(tensors):
    """Reads affine pieces from arrays, element by element as the view says."""

    def read(piece: AffinePiece) -> np.ndarray:
        return apply_view(np.ascontiguousarray(tensors[piece.source]).reshape(-1), piece.view)

    return read


def evaluate(bound: BoundExpr, tensors, box: Box | None = None, *, factored: bool = False):
    box = Box.whole(bound.shape) if box is None else box
    pieces = bound.pull_back(box, factored=factored)
    return assemble_box(pieces, box, bound.dtype, reader(tensors))


def index_only(pieces) -> bool:
    """Whether the values of all pieces are those of tensors as they are."""
    return all(isinstance(piece, AffinePiece) and not piece.ops for piece in pieces)


def _fresh(draw, name, shape=None):
    """A tensor whose elements are all different, from one test case to the next as well."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    base = draw(st.integers(0, 3)) * 1000
    return Case(
        tensor(name), base + np.arange(math.prod(shape), dtype=np.float32).reshape(shape), {}
    )


def _leaf(draw, names, shape=None):
    name = f"t{len(names)}"
    names.append(name)
    case = _fresh(draw, name, shape)
    return case._replace(tensors={name: case.array})


def _axis(draw, case):
    return draw(st.integers(-case.array.ndim, case.array.ndim - 1))


def transpose(draw, case, names):
    order = draw(st.permutations(range(case.array.ndim)))
    if draw(st.booleans()):
        return case._replace(expr=case.expr.transpose(), array=case.array.transpose())
    return case._replace(expr=case.expr.transpose(*order), array=case.array.transpose(order))


def reshape(draw, case, names):
    n, shape = case.array.size, []
    while n > 1:
        factor = draw(st.sampled_from([d for d in range(2, n + 1) if n % d == 0]))
        shape.append(factor)
        n //= factor
    if draw(st.booleans()):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return case._replace(expr=case.expr.reshape(*shape), array=case.array.reshape(shape))


def slice_(draw, case, names):
    if not case.array.ndim:
        return case
    axis = _axis(draw, case)
    n = case.array.shape[axis]
    ends = st.none() | st.integers(-n, n)
    start, stop = draw(ends), draw(ends)
    step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
    index = [slice(None)] * case.array.ndim
    index[axis] = slice(start, stop, step)
    array = case.array[tuple(index)]
    if not array.size:
        return case
    return case._replace(expr=case.expr.slice(axis, start, stop, step), array=array)


def take(draw, case, names):
    if not case.array.ndim:
        return case
    axis = _axis(draw, case)
    n = case.array.shape[axis]
    indices = draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=6))
    return case._replace(
        expr=case.expr.take(axis, indices), array=np.take(case.array, indices, axis)
    )


def repeat(draw, case, names):
    if not case.array.ndim or case.array.size > 2000:
        return case
    axis, n = _axis(draw, case), draw(st.integers(1, 3))
    return case._replace(expr=case.expr.repeat(axis, n), array=np.repeat(case.array, n, axis))


def pad(draw, case, names):
    if not case.array.ndim:
        return case
    axis = _axis(draw, case)
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    widths = [(0, 0)] * case.array.ndim
    widths[axis] = (before, after)
    array = np.pad(case.array, widths, constant_values=-1)
    return case._replace(expr=case.expr.pad(axis, before, after, -1), array=array)


def rearrange(draw, case, names):
    """Splits one axis, permutes, and merges two neighbours."""
    axes = [f"a{i}" for i in range(case.array.ndim)]
    left, sizes, factors, shape = list(axes), {}, list(axes), list(case.array.shape)
    splittable = [i for i, n in enumerate(shape) if n > 1]
    if splittable:
        i = draw(st.sampled_from(splittable))
        inner = draw(st.sampled_from([d for d in range(1, shape[i] + 1) if shape[i] % d == 0]))
        left[i], sizes["y"] = "(x y)", inner
        factors[i : i + 1] = ["x", "y"]
        shape[i : i + 1] = [shape[i] // inner, inner]
    order = draw(st.permutations(range(len(factors))))
    right = [factors[k] for k in order]
    array = case.array.reshape(shape).transpose(order)
    if len(right) > 1:
        k = draw(st.integers(0, len(right) - 2))
        merged = (*array.shape[:k], array.shape[k] * array.shape[k + 1], *array.shape[k + 2 :])
        right[k : k + 2] = [f"({right[k]} {right[k + 1]})"]
        array = array.reshape(merged)
    pattern = f"{' '.join(left)} -> {' '.join(right)}"
    return case._replace(expr=case.expr.rearrange(pattern, **sizes), array=array)


def stack_(draw, case, names):
    parts = [case] + [_like(draw, case, names) for _ in range(draw(st.integers(0, 2)))]
    axis = draw(st.integers(-case.array.ndim - 1, case.array.ndim))
    if case.array.ndim > 4:
        return case
    # A stack over unlike expressions is a concatenation of new axes.
    shape = list(case.array.shape)
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    exprs = [part.expr.reshape(*shape) for part in parts]
    return Case(concat(exprs, axis), np.stack([part.array for part in parts], axis), _all(parts))


def concat_(draw, case, names):
    if not case.array.ndim:
        return case
    axis = _axis(draw, case)
    parts = [case] + [_like(draw, case, names, axis) for _ in range(draw(st.integers(0, 2)))]
    draw(st.randoms(use_true_random=False)).shuffle(parts)
    return Case(
        concat([part.expr for part in parts], axis),
        np.concatenate([part.array for part in parts], axis),
        _all(parts),
    )


def wildcard_stack(draw, case, names):
    """Puts a stack of tensors of one pattern beside the case; the case must have a like shape."""
    name, count = f"s{len(names)}", draw(st.integers(1, 3))
    names.append(name)
    inner = _fresh(draw, name, tuple(reversed(case.array.shape))).array
    arrays = {f"{name}.{i}.w": inner + 100 * i for i in range(count)}
    expr = stack(tensor(name + ".{i}.w").transpose(), over="i", axis=case.array.ndim)
    array = np.stack([array.T for array in arrays.values()], -1)
    if not case.array.ndim:
        return Case(expr, array, arrays)
    both = concat([case.expr.reshape(*case.array.shape, 1), expr], -1)
    array = np.concatenate([case.array[..., None], array], -1)
    return Case(both, array, case.tensors | arrays)


def _like(draw, case, names, axis=None):
    shape = list(case.array.shape)
    if axis is not None:
        shape[axis] = draw(st.integers(1, 3))
    if draw(st.integers(0, 4)) == 0:
        array = np.full(shape, 7, np.float32)
        return Case(fill(tuple(shape), 7, "float32"), array, {})
    return _leaf(draw, names, tuple(shape))


def _all(parts):
    return {name: array for part in parts for name, array in part.tensors.items()}


INDEX_OPS = (transpose, reshape, slice_, take, rearrange, stack_, concat_, wildcard_stack)
ALL_OPS = (*INDEX_OPS, repeat, pad)


@st.composite
def cases(draw, operations=ALL_OPS, depth=5):
    """A random expression of up to `depth` operations, with its oracle."""
    names: list[str] = []
    case = _leaf(draw, names)
    for _ in range(draw(st.integers(0, depth))):
        if case.array.size > 3000:
            break
        case = draw(st.sampled_from(operations))(draw, case, names)
    return case
