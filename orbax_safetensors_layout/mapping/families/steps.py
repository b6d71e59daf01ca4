"""Tables of leaves: the name of each leaf, the tensor that it is made of, and how.

`plain`, `maxtext` and `tunix` make these tables of a model's dimensions; `build` makes rules of
them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from ..expr.expression import Expr


@dataclasses.dataclass(frozen=True, slots=True)
class TensorStep:
    """How one tensor becomes a leaf, or one layer's and expert's part of a leaf.

    Attributes:
        pattern: Axes before and after, in the notation of einops.
        sizes: Extents of the factors that the pattern names.
        projection: Whether FP8 checkpoints store the tensor quantised.
        packed: Whether MXFP4 checkpoints store the tensor as blocks and scales.
        every: First index and step along the last axis of the tensor; None takes all.
        factor: Values are multiplied with it, in float32.
        term: It is added to values, in float32.
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
        """Number of axes of the result."""
        return len(re.findall(r"\(.*?\)|\S+", self.pattern.partition("->")[2]))

    def apply(self, source: Expr, dtype: str | None) -> Expr:
        """Return the expression of the part.

        Args:
            source: The whole tensor.
            dtype: Computed values are rounded to it; None leaves them in float32.
        """
        if self.every is not None:
            start, step = self.every
            source = source.slice(-1, start, None, step)
        left, _, right = self.pattern.partition("->")
        if self.sizes or left.split() != right.split():
            source = source.rearrange(self.pattern, **dict(self.sizes))
        if self.factor is None and self.term is None:
            return source
        source = source.cast("float32")
        if self.factor is not None:
            source = source.scale(self.factor, lossy_inverse=True)
        if self.term is not None:
            source = source.add(self.term, lossy_inverse=True)
        return source if dtype in (None, "float32") else source.cast(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyLeaf:
    """A leaf, or in a group of layers the leaf of each.

    Attributes:
        target: The leaf's name; in a group, after the layer's.
        source: The tensor's name; in a group, after the layer's. `{e}` stands for an expert.
            Several are concatenated along the first axis.
        step: How it is made.
        variable: The Flax collection that holds a leaf which is not a parameter. Such leaves are
            stacked along axis 0, whatever the scan axis is.
    """

    target: str
    source: str | tuple[str, ...]
    step: TensorStep
    variable: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of the same leaves.

    Attributes:
        scanned: Prefix of the names of their leaves where layers are stacked.
        unscanned: The same where they are not; `{n}` is the layer's number.
        indices: The layers, as the checkpoint counts them.
        leaves: The leaves of a layer.
        first: Number of the first layer where they are not stacked; None takes the indices.
        scans: False for layers that are not stacked where others are; `{n}` of `scanned` is
            their number then, from 0.
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
VECTOR = TensorStep("e -> e")
EMBEDDING = TensorStep("v e -> v e")  # rows of tokens
LINEAR = TensorStep("o i -> i o", projection=True)  # PyTorch's `[out, in]` as `[in, out]`
ROUTER = TensorStep("o i -> i o")  # a kernel that no checkpoint quantises


def head_norm(d: int, term: float | None = None) -> TensorStep:
    """A norm that all heads share; one over all heads at once, as in OLMoE, has another size."""
    return TensorStep("d -> d", (("d", d),), term=term)


def heads(h: int, d: int, factor: float | None = None, pattern: str = "e h d") -> TensorStep:
    """A projection to heads: `[heads * d, hidden]` as `pattern`, `[hidden, heads, d]`."""
    sizes = (("h", h), ("d", d))
    return TensorStep(f"(h d) e -> {pattern}", sizes, projection=True, factor=factor)


def interleaved_heads(h: int, d: int, factor: float | None = None) -> TensorStep:
    """A projection to heads, whose rotated pairs are side by side.

    Hugging Face keeps the first elements of all pairs in the first half of a head, and the second
    ones in the second (`rotate_half` of transformers 5.23.0, `modeling_llama.py`).
    """
    pattern = "(h t f) e -> e h (f t)"
    return TensorStep(pattern, (("h", h), ("t", 2), ("f", d // 2)), projection=True, factor=factor)


def heads_bias(h: int, d: int) -> TensorStep:
    """The bias of a projection to heads: `[heads * d]` as `[heads, d]`."""
    return TensorStep("(h d) -> h d", (("h", h), ("d", d)))


def out_of_heads(h: int, d: int) -> TensorStep:
    """A projection from heads: `[hidden, heads * d]` as `[heads, d, hidden]`."""
    return TensorStep("e (h d) -> h d e", (("h", h), ("d", d)), projection=True)


def leaves_of(target: str, source: str, steps: Mapping[str, TensorStep]) -> list[FamilyLeaf]:
    """Return the leaves of a table of names.

    Args:
        target: Names of leaves; `{}` is the name in the table.
        source: Names of tensors; `{}` is the same, or what follows `=` in the table.
        steps: How each is made: `{"q_proj": ...}`, or `{"query=q_proj": ...}`.
    """
    leaves = []
    for names, step in steps.items():
        name, _, stored = names.partition("=")
        tensor = source.replace("{}", stored or name)
        leaves.append(FamilyLeaf(target.replace("{}", name), tensor, step))
    return leaves


def fused_experts(
    parts: Iterable[tuple[str, str, tuple[int, int] | None]], kernel: str, bias: str
) -> list[FamilyLeaf]:
    """Return the leaves of GPT-OSS's experts.

    Their kernels are `[in, out]` already, and gate and up take turns along the last axis
    (`GptOssExperts` of transformers 5.23.0, `modeling_gpt_oss.py`; MaxText's `interleave`).

    Args:
        parts: Name of each leaf, name of its tensor, and `TensorStep.every`.
        kernel: Names of kernels; `{}` is the name of the leaf.
        bias: The same of biases.
    """
    leaves = []
    for name, tensor, every in parts:
        step = TensorStep("x i o -> x i o", packed=True, every=every)
        leaves.append(FamilyLeaf(kernel.format(name), f"mlp.experts.{tensor}", step))
        step = TensorStep("x o -> x o", every=every)
        leaves.append(FamilyLeaf(bias.format(name), f"mlp.experts.{tensor}_bias", step))
    return leaves
