"""Makes the rules of a mapping from a table of leaves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ..expr.choices import Either, Same
from ..expr.concat_stack import concat, stack
from ..expr.expression import Expr, tensor
from ..matching import Rule, rule
from ..rules import Mapping
from .dims import Dims
from .steps import FamilyLeaf, LayerGroup, TensorStep, Tree
from .tensors import AS_IT_IS, EMBEDDING_TENSOR, HEAD, head_name


@dataclasses.dataclass(frozen=True, slots=True)
class FamilySettings:
    """The user's choices, with defaults applied; see `ready.Options`."""

    scan: bool
    scan_axis: int
    dtype: str | None
    vocab_size: int
    untie: bool
    prefix: str
    root: str  # with its dot
    keep: bool  # whether quantised tensors stay as they are
    head: bool  # whether an untied model has an output kernel
    extra: bool  # whether there may be layers for multi-token prediction


def build(dims: Dims, settings: FamilySettings, tree: Tree) -> Mapping:
    """Return the mapping of a model."""
    vision = _VISION if dims.multimodal else ()
    extra = []  # layers for multi-token prediction
    if dims.extra:
        last = dims.layers + dims.extra - 1
        extra = [f"{settings.prefix}layers.{{{dims.layers}..{last}}}.*"]
    int4 = dims.quantized is not None and dims.quantized.method == "int4"
    unread = ["*.weight_shape"] if int4 and not settings.keep else []
    return Mapping(
        _Builder(dims, settings).rules(tree),
        ignore=[*extra, *unread, *vision],
        unsaved=[*(extra if settings.extra else ()), *vision],
        buffers=_BUFFERS,
    )


_BUFFERS = ("*.rotary_emb.inv_freq",)  # that transformers saved until 4.31
_VISION = ("*vision_tower.*", "*multi_modal_projector.*")
_UNTIE = (
    "The configuration ties the output kernel to the embedding; where the checkpoint has another"
    " one, that is what transformers uses: load it with untie=True."
)


class _Builder:
    def __init__(self, dims: Dims, settings: FamilySettings) -> None:
        self._dims = dims
        self._settings = settings

    def rules(self, tree: Tree) -> Iterator[Rule]:
        root = self._settings.root
        embedding = root + tree.embedding.target
        yield rule(embedding, self._fitted(self._whole(tree.embedding), 0))
        yield rule(root + tree.norm.target, self._whole(tree.norm))
        own = self._fitted(self._whole(tree.head), 1)
        if not self._dims.tied:
            if self._settings.head:
                yield rule(root + tree.head.target, own)
        elif self._settings.untie:
            shared = dataclasses.replace(tree.head, source=tree.embedding.source)
            either = Either(own, self._fitted(self._whole(shared), 1))
            yield rule(root + tree.head.target, either, tied_to=embedding)
        for group in tree.groups:
            if group.indices:
                yield from self._group(group)

    def _group(self, group: LayerGroup) -> Iterator[Rule]:
        scan = self._settings.scan
        # Two leaves of one quantised tensor, as gate and up of GPT-OSS, are one where it is kept.
        for leaf in dict.fromkeys(itertools.chain(*map(self._kept, group.leaves))):
            if scan and group.scans:
                yield self._stacked(group, leaf)
            else:
                for position, index in enumerate(group.indices):
                    # Layers that remain beside stacked ones are counted by themselves.
                    name, first = (group.scanned, 0) if scan else (group.unscanned, group.first)
                    number = index if first is None else first + position
                    target = self._root(leaf) + name.replace("{n}", str(number)) + leaf.target
                    yield rule(target, self._leaf(leaf, str(index)))

    def _stacked(self, group: LayerGroup, leaf: FamilyLeaf) -> Rule:
        axis = self._settings.scan_axis
        rank = leaf.step.rank + ("{e}" in leaf.source)
        if leaf.variable or leaf.step == AS_IT_IS or rank < axis:
            axis = 0
        expr = stack(self._leaf(leaf, "{i}"), over="i", axis=axis, indices=group.indices)
        return rule(self._root(leaf) + group.scanned + leaf.target, expr)

    def _root(self, leaf: FamilyLeaf) -> str:
        """The prefix of a leaf's name: variables are beside parameters, not among them."""
        root, parameters = self._settings.root, "params."
        if leaf.variable and root.endswith(parameters):
            return f"{root.removesuffix(parameters)}{leaf.variable}."
        return root

    def _leaf(self, leaf: FamilyLeaf, layer: str) -> Expr:
        before = f"{self._settings.prefix}layers.{layer}."
        names = (leaf.source,) if isinstance(leaf.source, str) else leaf.source
        parts = [self._part(before + name, leaf.step) for name in names]
        expr = concat(parts, 0, sizes=[1] * len(parts)) if len(parts) > 1 else parts[0]
        if "{e}" in leaf.source:
            expr = stack(expr, over="e", indices=range(self._dims.experts))
        return expr

    def _whole(self, leaf: FamilyLeaf) -> Expr:
        """A leaf that belongs to no layer."""
        assert isinstance(leaf.source, str)
        prefix = self._settings.prefix
        name = head_name(prefix) if leaf.source == HEAD else prefix + leaf.source
        return self._part(name, leaf.step)

    def _part(self, name: str, step: TensorStep) -> Expr:
        """A leaf of one tensor, decoded; a tied embedding must be equal to a stored head."""
        source, quantized = tensor(name), self._dims.quantized
        is_tied = self._dims.tied and not self._settings.untie
        if is_tied and name == self._settings.prefix + EMBEDDING_TENSOR:
            source = Same(source, tensor(head_name(self._settings.prefix)), hint=_UNTIE)
        elif quantized is not None and quantized.covers(name, step):
            source = quantized.decoded(name, self._settings.dtype or "bfloat16")
        return step.apply(source, self._settings.dtype)

    def _kept(self, leaf: FamilyLeaf) -> tuple[FamilyLeaf, ...]:
        """A leaf as the tensors that it is stored as, where these are kept quantised."""
        quantized = self._dims.quantized
        if not self._settings.keep or quantized is None or not isinstance(leaf.source, str):
            return (leaf,)
        if not quantized.covers(f"{self._settings.prefix}layers.{{i}}.{leaf.source}", leaf.step):
            return (leaf,)
        return tuple(
            FamilyLeaf(part.replace("{e}.", ""), part, AS_IT_IS)
            for part in quantized.parts(leaf.source)
        )

    def _fitted(self, expr: Expr, axis: int) -> Expr:
        """Pad or cut the axis of tokens to the model's number of them.

        The files' extents have to be those of the configuration; only where tokens are left out may
        there be fewer, as in a checkpoint that was saved so.
        """
        tokens, hidden = self._settings.vocab_size, self._dims.hidden
        more = tokens - self._dims.vocab
        axes = "v e -> v e" if axis == 0 else "e v -> e v"
        if more < 0:
            return expr.rearrange(axes, e=hidden).slice(axis, 0, tokens)
        expr = expr.rearrange(axes, v=self._dims.vocab, e=hidden)
        return expr.pad(axis, 0, more) if more else expr
