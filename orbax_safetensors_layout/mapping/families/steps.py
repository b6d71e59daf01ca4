"""Tables of leaves: what a leaf is called, which tensor it is made of, and how."""

from __future__ import annotations

import dataclasses

from ..expr.expression import Expr


@dataclasses.dataclass(frozen=True, slots=True)
class TensorStep:
    """How one tensor becomes a leaf, or the part of a leaf that one layer and expert holds.

    Attributes:
        pattern: Axes before and after, in the notation of einops.
        sizes: Extents of the factors that the pattern names.
        projection: Whether FP8 checkpoints store the tensor quantised.
        packed: Whether MXFP4 checkpoints store the tensor as blocks and scales.
        every: First index and step along the last axis of the tensor; None takes all.
        factor: What values are multiplied with, in float32.
        term: What is added to values, in float32.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()
    projection: bool = False
    packed: bool = False
    every: tuple[int, int] | None = None
    factor: float | None = None
    term: float | None = None

    @property
    def rank(self) -> int:
        """The axes of what it makes."""
        right = self.pattern.partition("->")[2]
        depth, count = 0, 0
        for word in right.replace("(", " ( ").replace(")", " ) ").split():
            count += depth == 0 and word != ")"
            depth += (word == "(") - (word == ")")
        return count

    def apply(self, source: Expr, dtype: str | None) -> Expr:
        """The expression.

        Args:
            source: All of the tensor.
            dtype: What values that are computed are rounded to; None leaves them in float32.
        """
        made = source
        if self.every is not None:
            start, step = self.every
            made = made.slice(-1, start, None, step)
        left, _, right = self.pattern.partition("->")
        if self.sizes or left.split() != right.split():
            made = made.rearrange(self.pattern, **dict(self.sizes))
        if self.factor is None and self.term is None:
            return made
        made = made.cast("float32")
        if self.factor is not None:
            made = made.scale(self.factor, lossy_inverse=True)
        if self.term is not None:
            made = made.add(self.term, lossy_inverse=True)
        return made if dtype in (None, "float32") else made.cast(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyLeaf:
    """A leaf, or in a group of layers the leaf of each.

    Attributes:
        target: The leaf's name; in a group, after the layer's.
        source: The tensor's name; in a group, after the layer's. `{e}` stands for an expert.
            Several are put one after the other along the first axis.
        step: How it is made.
        variable: The collection of variables that holds it where it is no parameter. Those are
            stacked along axis 0, whatever the scan axis is.
    """

    target: str
    source: str | tuple[str, ...]
    step: TensorStep
    variable: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike.

    Attributes:
        scanned: What stands before the names of their leaves where layers are stacked.
        unscanned: The same where they are not; `{n}` stands for the layer's number.
        indices: The layers, as the checkpoint counts them.
        leaves: The leaves of a layer.
        first: The number of the first layer where they are not stacked; None takes the indices.
        scans: False for layers that are not stacked where others are; `{n}` of `scanned` stands
            for their number then, from 0.
    """

    scanned: str
    unscanned: str
    indices: tuple[int, ...]
    leaves: tuple[FamilyLeaf, ...]
    first: int | None = None
    scans: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """All leaves of a model.

    Attributes:
        embedding: The embedding, `[vocab, hidden]`.
        head: The output kernel, `[hidden, vocab]`.
        norm: The norm before it.
        groups: The layers.
    """

    embedding: FamilyLeaf
    head: FamilyLeaf
    norm: FamilyLeaf
    groups: tuple[LayerGroup, ...]


AS_IT_IS = TensorStep("... -> ...")
"""A tensor of any shape."""

SAME = TensorStep("e -> e")
"""A vector."""

ROUTER = TensorStep("o i -> i o")
"""A kernel that no checkpoint quantises."""

LINEAR = TensorStep("o i -> i o", projection=True)
"""PyTorch's `[out, in]` as `[in, out]`."""

EMBEDDING = TensorStep("v e -> v e")
"""Rows of tokens."""


def head_norm(d: int, term: float | None = None) -> TensorStep:
    """A norm that all heads share; one over all heads at once, as in OLMoE, has another size."""
    return TensorStep("d -> d", (("d", d),), term=term)


def heads(h: int, d: int, factor: float | None = None) -> TensorStep:
    """A projection to heads: `[heads * d, hidden]` as `[hidden, heads, d]`."""
    return TensorStep("(h d) e -> e h d", (("h", h), ("d", d)), projection=True, factor=factor)


def interleaved_heads(h: int, d: int, factor: float | None = None) -> TensorStep:
    """A projection to heads, whose rotated pairs stand side by side.

    Hugging Face keeps the first elements of all pairs in the first half of a head, and the second
    ones in the second (`rotate_half` of transformers 5.23.0, `modeling_llama.py`).
    """
    pattern = "(h t f) e -> e h (f t)"
    return TensorStep(pattern, (("h", h), ("t", 2), ("f", d // 2)), projection=True, factor=factor)


def heads_first(h: int, d: int) -> TensorStep:
    """A projection to heads: `[heads * d, hidden]` as `[heads, hidden, d]`."""
    return TensorStep("(h d) e -> h e d", (("h", h), ("d", d)), projection=True)


def heads_part(h: int, d: int) -> TensorStep:
    """The same as one of several: `[1, heads, hidden, d]`."""
    return TensorStep("(h d) e -> 1 h e d", (("h", h), ("d", d)), projection=True)


def heads_bias(h: int, d: int) -> TensorStep:
    """The bias of a projection to heads: `[heads * d]` as `[heads, d]`."""
    return TensorStep("(h d) -> h d", (("h", h), ("d", d)))


def out_of_heads(h: int, d: int) -> TensorStep:
    """A projection from heads: `[hidden, heads * d]` as `[heads, d, hidden]`."""
    return TensorStep("e (h d) -> h d e", (("h", h), ("d", d)), projection=True)
