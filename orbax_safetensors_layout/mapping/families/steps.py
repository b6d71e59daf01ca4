"""Tables of leaves, with their tensors: from `plain`, `maxtext` and `tunix` to `build`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from ..expr.expression import Expr


@dataclasses.dataclass(frozen=True, slots=True)
class TensorStep:
    """Steps from one tensor to a leaf, or to one layer's and expert's part of a leaf."""

    pattern: str  # axes before and after, in the notation of einops
    sizes: tuple[tuple[str, int], ...] = ()  # extents of the factors that the pattern names
    projection: bool = False  # whether FP8 checkpoints store the tensor quantised
    packed: bool = False  # whether MXFP4 checkpoints store the tensor as blocks and scales
    every: tuple[int, int] | None = None  # first index and step along the tensor's last axis
    rows: tuple[int, int] | None = None  # start and stop along its first
    part: tuple[int, int, int] | None = None  # start and stop of n equal parts of an axis,
    split: str = "(n r) c -> n r c"  # that is split so
    factor: float | None = None  # values are multiplied by it, in float32,
    term: float | None = None  # and it is added
    as_float: bool = False  # whether values are integers below 2^24 that become float32

    @property
    def rank(self) -> int:
        return len(re.findall(r"\(.*?\)|\S+", self.pattern.partition("->")[2]))

    def apply(self, source: Expr, dtype: str | None) -> Expr:
        """Return the leaf; computed values are rounded to `dtype`, by default float32."""
        if self.every is not None:
            start, step = self.every
            source = source.slice(-1, start, None, step)
        if self.rows is not None:
            source = source.slice(0, *self.rows)
        if self.part is not None:
            start, stop, count = self.part
            source = source.rearrange(self.split, n=count).slice(0, start, stop)
        left, _, right = self.pattern.partition("->")
        if self.sizes or left.split() != right.split():
            source = source.rearrange(self.pattern, **dict(self.sizes))
        if self.as_float:
            return source.cast("float32", lossy_inverse=True)
        if self.factor is None and self.term is None:
            return source
        source = source.cast("float32", lossy_inverse=True)
        if self.factor is not None:
            source = source.scale(self.factor, lossy_inverse=True)
        if self.term is not None:
            source = source.add(self.term, lossy_inverse=True)
        return source if dtype in (None, "float32") else source.cast(dtype, lossy_inverse=True)


AS_IT_IS = TensorStep("... -> ...")
VECTOR = TensorStep("e -> e")
EMBEDDING = TensorStep("v e -> v e")  # rows of tokens
LINEAR = TensorStep("o i -> i o", projection=True)  # PyTorch's `[out, in]` as `[in, out]`
ROUTER = TensorStep("o i -> i o")  # a kernel that no checkpoint quantises


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedKernel:
    """Parts of tensors, `[hidden, n, width]` each, as one kernel `[hidden, n * width]`."""

    parts: tuple[tuple[str, TensorStep], ...]  # names after the layer's
    n: int
    widths: tuple[int, ...]  # of each part


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyLeaf:
    """A leaf, or in a group of layers the leaf of each: names are then those after the layer's."""

    target: str
    source: str | tuple[str, ...]  # `{e}` is an expert; several are concatenated along axis 0
    step: TensorStep
    variable: str = ""  # a Flax collection: the leaf is not a parameter; stacked along axis 0
    joined: JoinedKernel | None = None  # what it is made of, in place of the source
    ones: int = 0  # length of a vector of ones, which no tensor holds, in place of the source


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of the same leaves."""

    scanned: str  # prefix of the names of their leaves where layers are stacked
    unscanned: str  # the same where they are not; `{n}` is the layer's number
    indices: tuple[int, ...]  # the layers, as the checkpoint counts them
    leaves: tuple[FamilyLeaf, ...]
    first: int | None = None  # number of the first layer if not stacked; None takes the indices
    scans: bool = True  # False if never stacked: `{n}` of `scanned` is the number then, from 0
    inner: int = 0  # so many in succession are stacked along an axis of their own, if any


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """The names of the leaves of a model that belong to no layer, and its layers."""

    embedding: str  # [vocab, hidden]
    head: str  # the output kernel, [hidden, vocab]
    norm: str  # the one before the output kernel
    groups: tuple[LayerGroup, ...]
    embedding_step: TensorStep = EMBEDDING
    norm_step: TensorStep = VECTOR
    others: tuple[FamilyLeaf, ...] = ()  # that belong to no layer either
    scans: bool = True  # whether there is such a model with stacked layers
    vision: tuple[FamilyLeaf, ...] = ()  # with whole names of tensors, which are then not ignored
    takes_reused: bool = False  # whether keys and values that no layer uses are leaves


def renamed(
    steps: Mapping[str, TensorStep], names: Sequence[tuple[str, str]]
) -> tuple[FamilyLeaf, ...]:
    """Return leaves named after tensors, with regular expressions replaced one after the other."""
    leaves = []
    for tensor, step in steps.items():
        name = tensor
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        leaves.append(FamilyLeaf(name, tensor, step))
    return tuple(leaves)
