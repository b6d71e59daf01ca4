"""Makes the rules of a mapping from a table of leaves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set

from orbax_safetensors_layout.catalog import ROTARY_BUFFER

from ..expr.choices import Either, Same
from ..expr.concat_stack import concat, stack
from ..expr.expression import Expr, fill, tensor
from ..matching import Rule, rule
from ..rules import Mapping
from .dims import Dims
from .steps import AS_IT_IS, ROUTER, FamilyLeaf, LayerGroup, TensorStep, Tree
from .tensors import head_name
from .weight_format import OtherFormatError

_BUFFERS = (f"*.{ROTARY_BUFFER}",)
_UNTIE = (
    "The configuration ties the output kernel to the embedding; where the checkpoint has another"
    " one, that is what transformers uses: load it with untie=True."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MappingBuilder:
    """Makes the mapping of a model as `ready.Options` say, with defaults applied."""

    dims: Dims
    scan: bool
    scan_axis: int
    dtype: str | None
    vocab_size: int
    untie: bool
    prefix: str
    root: str  # with its dot
    keep: bool  # whether quantised tensors stay as they are
    head: bool  # whether an untied model has an output kernel
    extra: bool  # whether there may be tensors for multi-token prediction
    spare: tuple[str, ...] = ()  # patterns of tensors beside quantised weights that are left out

    def build(self, tree: Tree) -> Mapping:
        dims = self.dims
        beside = dims.architecture.beside if dims.multimodal else ()
        if dims.multimodal and not tree.vision:
            beside = (*dims.architecture.vision, *beside)
        extra = ["mtp.*"] if dims.architecture.prediction == "mtp" else []
        if dims.extra:
            last = dims.layers + dims.extra - 1
            extra = [f"{self.prefix}layers.{{{dims.layers}..{last}}}.*"]
        # Transformers before version 5 saved them, and no program uses them.
        reused = [
            f"{self.prefix}layers.{i}.self_attn.{{k,v}}_*"
            for i, kind in enumerate(dims.kinds)
            if kind.reuses and not tree.takes_reused
        ]
        int4 = dims.quantized is not None and dims.quantized.method == "int4"
        unread = ["*.weight_shape"] if int4 and not self.keep else []
        return Mapping(
            self._rules(tree),
            ignore=[*extra, *unread, *self.spare, *beside],
            unsaved=[*(extra if self.extra else ()), *beside],
            buffers=[*_BUFFERS, *reused],
        )

    def check_peers(self, tree: Tree) -> None:
        """Refuses a configuration by which a tensor is quantised in some layers alone."""
        quantized = self.dims.quantized
        for source, step, names in self._stored(tree):
            if quantized is not None and quantized.plain:
                plain = [name for name in names if not quantized.covers(name, step)]
                if plain and (quantized.covers(source, step) or len(plain) < len(names)):
                    raise OtherFormatError(
                        f"the configuration leaves {plain[0].removesuffix('.weight')!r}"
                        " unquantised, unlike its peers",
                        hint="Give the folder with the files, or write rules for them.",
                    )

    def has_own_format(self, tree: Tree, files: Set[str]) -> bool:
        """Whether the files have the parts that the family's own rules take, and no others."""
        quantized = self.dims.quantized
        return quantized is None or all(
            quantized.has_own_parts(name, files)
            if quantized.covers(source, step)
            else quantized.has_no_parts(name, files)
            for source, step, names in self._stored(tree)
            for name in names
        )

    def _stored(self, tree: Tree) -> Iterator[tuple[str, TensorStep, list[str]]]:
        """Yields tensors of layers by a name with wildcards, with those of all layers."""
        for group in tree.groups:
            for leaf in group.leaves:
                sources = (leaf.source,) if isinstance(leaf.source, str) else leaf.source
                steps = [(source, leaf.step) for source in sources if not leaf.ones]
                for source, step in steps if leaf.joined is None else leaf.joined.parts:
                    experts = range(self.dims.experts if "{e}" in source else 1)
                    names = [
                        f"{self.prefix}layers.{i}.{source}".replace("{e}", str(e))
                        for i in group.indices
                        for e in experts
                    ]
                    yield f"{self.prefix}layers.{{i}}.{source}", step, names

    @property
    def _embedding(self) -> str:
        return self.prefix + self.dims.architecture.embedding

    @property
    def _head(self) -> str:
        return head_name(self.prefix, self.dims.architecture.head)

    def _rules(self, tree: Tree) -> Iterator[Rule]:
        table, head = self._embedding, self._head
        norm = self.prefix + self.dims.architecture.norm
        embedding = self.root + tree.embedding
        yield rule(embedding, self._fitted(self._part(table, tree.embedding_step), 0))
        yield rule(self.root + tree.norm, self._part(norm, tree.norm_step))
        for leaf in tree.others:
            yield rule(self.root + leaf.target, self._leaf(leaf, self.prefix))
        own = self._fitted(self._part(head, ROUTER), 1)
        if not self.dims.tied:
            if self.head:
                yield rule(self.root + tree.head, own)
        elif self.untie:
            either = Either(own, self._fitted(self._part(table, ROUTER), 1))
            yield rule(self.root + tree.head, either, tied_to=embedding)
        for leaf in tree.vision:
            yield rule(self.root + leaf.target, self._leaf(leaf, ""))
        for group in tree.groups:
            if group.indices:
                yield from self._group(group)

    def _group(self, group: LayerGroup) -> Iterator[Rule]:
        # Two leaves of one quantised tensor, as gate and up of GPT-OSS, are one where it is kept.
        for leaf in dict.fromkeys(itertools.chain(*map(self._kept, group.leaves))):
            if self.scan and group.scans:
                yield self._stacked(group, leaf)
                continue
            for position, index in enumerate(group.indices):
                # Layers that remain beside stacked ones are counted by themselves.
                name, first = (group.scanned, 0) if self.scan else (group.unscanned, group.first)
                number = index if first is None else first + position
                target = self._root(leaf) + name.replace("{n}", str(number)) + leaf.target
                yield rule(target, self._leaf(leaf, f"{self.prefix}layers.{index}."))

    def _stacked(self, group: LayerGroup, leaf: FamilyLeaf) -> Rule:
        axis = self.scan_axis
        rank = leaf.step.rank + ("{e}" in leaf.source)
        if leaf.variable or leaf.step == AS_IT_IS or rank < axis:
            axis = 0
        expr = self._leaf(leaf, f"{self.prefix}layers.{{i}}.")
        expr = stack(expr, over="i", axis=axis, indices=group.indices)
        if group.inner:
            names = [f"a{n}" for n in range(rank)]
            split = " ".join([*names[:axis], "(b n)", *names[axis:]])
            expr = expr.rearrange(f"{split} -> {split.replace('(b n)', 'b n')}", n=group.inner)
        return rule(self._root(leaf) + group.scanned + leaf.target, expr)

    def _root(self, leaf: FamilyLeaf) -> str:
        """The prefix of a leaf's name: variables are beside parameters, not among them."""
        parameters = "params."
        if leaf.variable and self.root.endswith(parameters):
            return f"{self.root.removesuffix(parameters)}{leaf.variable}."
        return self.root

    def _leaf(self, leaf: FamilyLeaf, before: str) -> Expr:
        if leaf.ones:
            return fill((leaf.ones,), 1, self.dtype or "float32")
        if (joined := leaf.joined) is not None:
            parts = [self._part(before + name, step) for name, step in joined.parts]
            return concat(parts, 2, joined.widths).rearrange("e n w -> e (n w)", n=joined.n)
        names = (leaf.source,) if isinstance(leaf.source, str) else leaf.source
        parts = [self._part(before + name, leaf.step) for name in names]
        expr = concat(parts, 0, sizes=[1] * len(parts)) if len(parts) > 1 else parts[0]
        if "{e}" in leaf.source:
            expr = stack(expr, over="e", indices=range(self.dims.experts))
        return expr

    def _part(self, name: str, step: TensorStep) -> Expr:
        """A leaf of one tensor, decoded; a tied embedding must be equal to a stored head."""
        source, quantized = tensor(name), self.dims.quantized
        if self.dims.tied and not self.untie and name == self._embedding:
            source = Same(source, tensor(self._head), hint=_UNTIE)
        elif quantized is not None and quantized.covers(name, step):
            source = quantized.decoded(name, self.dtype or "bfloat16")
        return step.apply(source, self.dtype)

    def _kept(self, leaf: FamilyLeaf) -> tuple[FamilyLeaf, ...]:
        """A leaf as the tensors that it is stored as, where these are kept quantised."""
        quantized = self.dims.quantized
        if not self.keep or quantized is None or not isinstance(leaf.source, str):
            return (leaf,)
        if not quantized.covers(f"{self.prefix}layers.{{i}}.{leaf.source}", leaf.step):
            return (leaf,)
        parts = quantized.parts(leaf.source)
        return tuple(FamilyLeaf(part.replace("{e}.", ""), part, AS_IT_IS) for part in parts)

    def _fitted(self, expr: Expr, axis: int) -> Expr:
        """Pad or cut the axis of tokens to the model's number of them."""
        more, hidden = self.vocab_size - self.dims.vocab, self.dims.hidden
        axes = "v e -> v e" if axis == 0 else "e v -> e v"
        if more < 0:  # a checkpoint that was saved so has no more
            return expr.rearrange(axes, e=hidden).slice(axis, 0, self.vocab_size)
        expr = expr.rearrange(axes, v=self.dims.vocab, e=hidden)
        return expr.pad(axis, 0, more) if more else expr
