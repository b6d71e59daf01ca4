"""Mappings: rules that make a model's leaves of a checkpoint's tensors, and their inverse.

Loading binds rules to the tensors' shapes: each leaf is an expression over tensors. Saving takes
these shapes from a checkpoint, or infers them from the leaves' (`Expr.infer`), binds the rules to
them, and inverts the bound expressions (`invert`): each tensor is an expression over leaves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping as Dict, Sequence
from typing import Any, TypeVar

import numpy as np

from orbax_safetensors_layout.catalog import (
    Catalog,
    added_prefixes,
    compile_pattern,
    patterns_of,
)
from orbax_safetensors_layout.errors import MappingError, listed, pattern_of
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.runtime import frozen_heap

from .affine.binding import Binder, BoundMapping, LeafExpr, MatchedNames, Tie
from .affine.bound import BoundExpr
from .argument_checks import several
from .expr.expression import Apply, Expr
from .expr.opaque_ops import Compute
from .expr.overlaid import Overlaid
from .expr.values import Scale
from .inverse.inference import LIKE, Extent, InferredTensor
from .inverse.inverse_patches import whole_tensor
from .inverse.invert import invert, saved_leaf
from .matching import LeafShapes, Rule, RuleTarget, match_rules, names_by_rules, no_rule
from .names import WILDCARD, NameTree, Shapes, TensorSpec, TensorSpecs, substitute
from .problems import Problem, mapping_error, problems_of, within

VALUE = np.dtype(object)
"""The dtype of leaves that are numbers or strings, of which tensors cannot be made."""

T = TypeVar("T")
_PLAIN = (type(None), type(...), bool, int, float, complex, str)

Checkpoint = Shapes | str | os.PathLike[str]
"""A checkpoint's path, or the names, shapes and dtypes of its tensors."""


class Mapping:
    """Rules that make a model's leaves of a checkpoint's tensors.

    Every leaf must be made by one rule, every rule must make a leaf unless it is optional, every
    tensor must be used or ignored, and every shape must fit: else a `MappingError` lists all
    problems. Where methods take a checkpoint, it is its path, or name to shape and dtype of its
    tensors.

    Args:
        rules: The rules, as `osl.rule` makes them. Their order does not matter.
        ignore: Patterns of tensors that no leaf needs: `*` (dots included), `?`, `[...]`, `{a,b}`
            and `{0..15}`.
        strict: Refuse tensors that are neither used nor ignored.
        unsaved: Patterns of tensors that checkpoints of the model have, and no leaf holds.
            Saving is then refused, unless `like` leaves them out.
        buffers: Patterns of tensors that programs compute by themselves. They are ignored too, and
            what is saved may lack them.

    Raises:
        MappingError: A pattern is malformed, or an item is not a rule.

    Attributes:
        files: The names, shapes and dtypes of the tensors that are saved, if known; see `like`.
        merged: Digests of the adapters that are merged into it.
        dropped: Patterns of leaves that saves drop; see `drop`.

    Examples:
        >>> from orbax_safetensors_layout.mapping import rule, stack, tensor
        >>> up = stack(tensor("model.layers.{i}.up.weight").transpose(), over="i")
        >>> mapping = Mapping([rule("layers.up.kernel", up)], ignore="*.rotary.inv_freq")
        >>> files = {f"model.layers.{i}.up.weight": ((16, 8), np.float32) for i in range(3)}
        >>> mapping.leaf_facts(files)
        {'layers.up.kernel': TensorSpec(shape=(3, 8, 16), dtype=dtype('float32'))}
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        ignore: str | Iterable[str] = (),
        strict: bool = True,
        unsaved: str | Iterable[str] = (),
        buffers: str | Iterable[str] = (),
    ) -> None:
        self.rules = several(rules, "Mapping")
        for item in self.rules:
            if not isinstance(item, Rule):
                raise MappingError(
                    "Mapping takes a list of rules", expected="osl.rule(...)", found=repr(item)
                )
        self.files: TensorSpecs | None = None
        self.merged: tuple[str, ...] = ()
        self.dropped: tuple[str, ...] = ()
        self._source: Mapping | None = None
        self.ignore, ignored = _compiled("Mapping(ignore=...)", ignore)
        self.strict = strict
        self._unsaved, absent = _compiled("Mapping(unsaved=...)", unsaved)
        self.buffers, self._spare = _compiled("Mapping(buffers=...)", buffers)
        self._drops: list[re.Pattern[str]] = []
        self._ignored = [*ignored, *absent, *self._spare]

    def __repr__(self) -> str:
        rules = "".join(f"    {rule!r},\n" for rule in self.rules)
        ignore = f", ignore={list(self.ignore)}" if self.ignore else ""
        strict = "" if self.strict else ", strict=False"
        unsaved = f", unsaved={list(self._unsaved)}" if self._unsaved else ""
        buffers = f", buffers={list(self.buffers)}" if self.buffers else ""
        source = "" if self._source is None else f".over({self._source!r})"
        drops = f".drop({', '.join(map(repr, self.dropped))})" if self.dropped else ""
        return f"Mapping([\n{rules}]{ignore}{strict}{unsaved}{buffers}){source}{drops}"

    def over(self, source: Mapping) -> Mapping:
        """Return the mapping of a checkpoint whose tensors are what another mapping makes.

        The rules take the leaves of `source` for tensors, as those of `osl.dequantized(path)`.
        Such a mapping does not save.

        Examples:
            >>> from orbax_safetensors_layout.mapping import rule, tensor
            >>> plain = Mapping([rule("up", tensor("up.int8").cast("float32").scale(0.5))])
            >>> mapping = Mapping([rule("up.kernel", tensor("up").transpose())]).over(plain)
            >>> mapping.leaf_facts({"up.int8": ((4, 2), np.int8)})
            {'up.kernel': TensorSpec(shape=(2, 4), dtype=dtype('float32'))}
        """
        check_mapping(source)
        mapping = copy.copy(self)
        mapping._source = source if self._source is None else self._source.over(source)
        mapping.merged = (*self.merged, *source.merged)
        return mapping

    def drop(self, *patterns: str) -> Mapping:
        """Return the mapping that saves a tree without its leaves of some names.

        Args:
            *patterns: Of the names, as for `ignore`: `"*rngs.*"`, `"opt_state.*"`, `"step"`.

        Examples:
            >>> from orbax_safetensors_layout.mapping import rule, tensor
            >>> mapping = Mapping([rule("w", tensor("weight"))]).drop("rngs.*")
            >>> leaves = {"w": ((2,), np.float32), "rngs.count": ((), np.uint32)}
            >>> [*mapping.inverse().bind(leaves).expressions]
            ['weight']
        """
        mapping = copy.copy(self)
        mapping.dropped = (*self.dropped, *patterns)
        mapping._drops = _compiled("Mapping.drop(...)", mapping.dropped)[1]
        return mapping

    def drops(self, name: str) -> bool:
        """Whether saves drop a leaf."""
        return any(pattern.fullmatch(name) for pattern in self._drops)

    def makes(self, name: str) -> bool:
        """Whether a rule makes leaves of a name."""
        alone = NameTree(self.names_of([name]))
        return any(next(alone.match(rule.target), None) for rule in self.rules)

    def passed(self, values: Dict[str, T]) -> dict[str, T]:
        """Return the numbers and strings of a checkpoint that are leaves by themselves."""
        ignored = [pattern for mapping in self.chain() for pattern in mapping._ignored]
        return {
            name: value
            for name, value in values.items()
            if not self.makes(name) and not any(p.fullmatch(name) for p in ignored)
        }

    def leaves_out(self, name: str) -> bool:
        """Whether it may be that no rule takes a tensor."""
        return any(
            not mapping.strict or any(pattern.fullmatch(name) for pattern in mapping._ignored)
            for mapping in self.chain()
        )

    def chain(self) -> Iterator[Mapping]:
        """Yields the mapping, and those that it is over in turn."""
        yield self
        if self._source is not None:
            yield from self._source.chain()

    def bind(self, checkpoint: Checkpoint, leaves: LeafShapes | None = None) -> BoundMapping:
        """Return each leaf as an expression over a checkpoint's tensors: the loading direction.

        With a path, only the headers of files that hold a tensor of the mapping are read. `leaves`
        are those to load; None takes all that the checkpoint gives.
        """
        with frozen_heap():
            return self._binder(checkpoint, leaves).bind(self._ignored if self.strict else None)

    def _binder(self, checkpoint: Checkpoint, leaves: LeafShapes | None = None) -> Binder:
        if not isinstance(checkpoint, str | os.PathLike):
            specs = TensorSpecs.of(checkpoint)
            if self._source is None:
                return Binder(self.rules, specs, leaves)
            return self.match(specs.names, leaves).binder(specs)
        with Catalog.open(checkpoint) as catalog:
            matched, entries = self.matched_entries(catalog, leaves)
            return matched.binder(matched.described(entries))

    def names_leaves(self, names: Collection[str]) -> bool:
        """Whether names are those of the leaves that rules make, not of the tensors they take."""
        taken = len(self.match(names).taken())
        return taken == 0 or sum(map(self.makes, names)) > taken

    def match(self, names: Iterable[str], leaves: LeafShapes | None = None) -> MatchedNames:
        """Find the rule of each leaf of a checkpoint with tensors of these names; see `bind`."""
        ignored = self._ignored if self.strict else None
        if self._source is None:
            return MatchedNames.of(self.rules, TensorSpecs({}, names), leaves, ignored)
        every = self._source.match(names)
        given = TensorSpecs({}, every.given())
        matched = MatchedNames.of(self.rules, given, leaves, ignored)
        source = self._source.match(names, dict.fromkeys(matched.taken()))
        return matched._replace(source=source, unmade=[*every.unmade, *every.untaken()])

    def matched_entries(
        self, catalog: Catalog, leaves: LeafShapes | None, *, compares_shapes: bool = False
    ) -> tuple[MatchedNames, dict[str, TensorEntry]]:
        """Find the rule of each leaf, and the entries of the tensors that these rules take.

        Only headers of files that hold one of them are read, unless one shows that an index does
        not say what its files hold.
        """
        names = self.names_in(catalog)
        matched = self.match(names, leaves)
        entries = catalog.entries(matched.needs(), compares_shapes=compares_shapes)
        catalog.check_index()
        if (held := self.names_in(catalog)) != names:
            matched = self.match(held, leaves)
            entries = catalog.entries(matched.needs(), compares_shapes=compares_shapes)
        return matched, entries

    def names_in(self, catalog: Catalog) -> Sequence[str]:
        """Return the names of a checkpoint's tensors, of several of one those that rules take.

        They are those that are known without further headers.
        """
        listed, others = catalog.listed(), catalog.other_names
        if not others:
            return listed
        tree = NameTree(listed)
        (*_, first) = self.chain()
        patterns = {pattern for rule in first.rules for pattern in rule.patterns()}
        taken = {name for pattern in patterns for name, _ in tree.match(pattern)}
        asked = [name for name in others if name in taken]
        doubled = {others[name] for name in asked} - taken
        left_out = others.keys() | doubled
        return [*(name for name in listed if name not in left_out), *asked]

    def leaf_names(self, names: Iterable[str]) -> list[str]:
        """Return the leaves that a checkpoint of tensors `names` gives, or that take no tensor."""
        return self.match(names).given()

    def names_of(self, names: Iterable[str]) -> list[str]:
        """Return the names that the rules have for leaves: with or without the level of a box."""
        return names_by_rules(self.rules, names)

    def leaf_facts(self, checkpoint: Checkpoint) -> dict[str, TensorSpec]:
        """Return shape and dtype of the leaves that a checkpoint gives, by dotted name."""
        return self.bind(checkpoint).specs()

    def abstract(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return a checkpoint's abstract tree to add shardings to: `jax.ShapeDtypeStruct`s."""
        from orbax_safetensors_layout.pytree import abstract_dicts

        return abstract_dicts(self.leaf_facts(checkpoint))

    def explain(self, checkpoint: Checkpoint, abstract: Any = None) -> str:
        """Return a table: each leaf, its shape, its expression, and the tensors that it takes.

        Below it stands why the mapping does not save such leaves, if it does not.

        `abstract` is the abstract tree, or the shapes of its leaves by name; None takes all leaves
        that the checkpoint gives.
        """
        if abstract is not None and not _are_shapes(abstract):
            from orbax_safetensors_layout.pytree import leaf_shapes

            shapes = leaf_shapes(abstract)
            abstract = dict(zip(self.names_of(shapes), shapes.values(), strict=True))
        bound = self.bind(checkpoint, abstract)
        try:
            self.inverse().bind(bound.specs(), is_part=True)
        except MappingError as error:
            return f"{bound.explain()}\nFor loading only. {error}"
        return bound.explain()

    def like(self, checkpoint: Checkpoint, *, leave_out: str | Iterable[str] = ()) -> Mapping:
        """Return the mapping that saves a checkpoint's names and shapes, and its dtypes at casts.

        Otherwise these follow from the leaves. They do not for `reshape`, nor for `concat` without
        sizes, and a `cast` is not undone, since its operand's dtype is unknown.

        The saved checkpoint will lack tensors that no rule takes; all of them have to match the
        patterns of `leave_out`, written as for `ignore`, or be buffers.
        """
        binder = self._binder(checkpoint)
        files = binder.specs
        texts, patterns = _compiled("Mapping.like(leave_out=...)", leave_out)
        with contextlib.suppress(MappingError):  # saving binds leaves of its own
            binder.bind(None)
        lost = [
            name
            for name in files.names
            if name not in binder.used
            and not any(pattern.fullmatch(name) for pattern in (*patterns, *self._spare))
        ]
        if lost:
            kinds = list(dict.fromkeys(pattern_of(name) for name in lost))
            raise MappingError(
                f"what is saved would lack {len(lost)} of the checkpoint's {len(files.names)}"
                " tensors, which no rule takes",
                found=listed(map(repr, kinds), 5),
                hint="If it may, say so: mapping.like(path, leave_out=['vision_tower.*', ...]);"
                " other programs then find these weights missing. Else add rules for them.",
            )
        mapping = copy.copy(self)
        mapping.files, mapping.ignore = files, (*self.ignore, *texts)
        mapping._ignored = [*self._ignored, *patterns]
        return mapping

    def apply(self, tensors: Any, shardings: Any = None, *, donate: bool = False) -> Any:
        """Return the tree that a load of these tensors gives, computed on their devices.

        No value comes to the host; values are those of a load. What is compiled is kept: a second
        call for the same shapes and shardings runs at once.

        Args:
            tensors: `jax.Array`s by the names of a checkpoint's tensors; within `jax.jit` traced
                ones. Of `jax.ShapeDtypeStruct`s the result has such, too.
            shardings: Of the leaves, also over other devices: one for all, or a tree of shardings
                or of abstract leaves. The result then has its structure, and the dtypes of
                abstract leaves. None takes what JAX chooses, in nested dicts.
            donate: Give up the memory of the arrays, which cannot be used afterwards, as soon as
                their leaves are computed; none where values are refused, which are therefore looked
                at first. Otherwise leaves may share it.

        Raises:
            MappingError: The mapping does not fit, or has a rule that works on files alone; the
                error names it.
            DtypeMismatchError: An integer dtype does not hold every value.
        """
        from .live.live_arrays import apply

        return apply(self, tensors, shardings, donate=donate)

    def unapply(self, tree: Any, shardings: Any = None, *, donate: bool = False) -> dict[str, Any]:
        """Return by name the tensors that a save of a tree writes: the inverse of `apply`.

        Args:
            tree: `jax.Array`s; any pytree whose dotted key paths are the names of leaves.
            shardings: Of the tensors: one for all, or by name.
            donate: As for `apply`.

        Raises:
            MappingError: As for `apply`, or the mapping does not save.
            DtypeMismatchError: An integer dtype does not hold every value.
        """
        from .live.live_arrays import unapply

        return unapply(self, tree, shardings, donate=donate)

    def inverse(self) -> InverseMapping:
        """Return the saving direction; refuses rules that do not invert, for any shapes."""
        if self._source is not None:
            raise MappingError(
                "The mapping cannot save: its tensors are what another mapping makes of a"
                " checkpoint's",
                hint="Save through the mapping of the plain model, whose configuration has no"
                " quantization_config.",
            )
        problems = [
            Problem(f"{rule!r}: {problem.text}", hint=problem.hint)
            for rule in self.rules
            if rule.expr is not None and rule.tied_to is None
            for problem in _irreversible(rule.expr)
        ]
        if problems:
            raise mapping_error("The mapping cannot save", problems, {})
        if self._unsaved and self.files is None:
            raise MappingError(
                "what is saved would lack tensors that checkpoints of this model have",
                found=", ".join(self._unsaved),
                hint="If it may, say so: save through mapping.like(path, leave_out="
                f"{list(self._unsaved)}), with such a checkpoint (--config and --leave-out of"
                " `convert`).",
            )
        return InverseMapping(self)


class InverseMapping:
    """The saving direction of a mapping: a checkpoint's tensors made of a model's leaves."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping

    def __repr__(self) -> str:
        return f"{self.mapping!r}.inverse()"

    def bind(
        self, leaves: Shapes, checkpoint: Checkpoint | None = None, *, is_part: bool = False
    ) -> BoundMapping:
        """Return each tensor as an expression over leaves; tied leaves are compared with others.

        A tensor's dtype is the result of the inverse operations on its leaves: that of the leaf
        where the mapping has no cast. `checkpoint` gives the tensors' names and shapes; None takes
        those of `Mapping.like`, or infers them from the leaves: of all rules that are not optional,
        unless the leaves are a part of the model's.
        """
        own = TensorSpecs.of(leaves)
        shapes = {n: spec.shape for n, spec in own.items() if not self.mapping.drops(n)}
        values = [name for name in shapes if own[name].dtype == VALUE and self.mapping.makes(name)]
        if values:
            raise MappingError(
                f"these leaves are numbers or strings: {listed(map(repr, values))}",
                expected="arrays, where a rule makes leaves of these names",
                hint="Make arrays of the numbers: numpy.asarray(...).",
            )
        if checkpoint is None:
            checkpoint = self._inferred(own, shapes, is_part=is_part)
        forward = self.mapping.bind(checkpoint, shapes)
        try:
            inverted = invert(forward.expressions, own, forward.ties)
        except MappingError as error:
            raise mapping_error("The mapping cannot save", problems_of(error), {}) from error
        notes: dict[str, object] = {
            name: " and ".join(f"inverse of {forward.notes[leaf]}" for leaf in expr.sources()[:2])
            for name, expr in inverted.items()
        }
        tensors = {name: LeafExpr.alone(expr) for name, expr in inverted.items()}
        return BoundMapping(tensors, {}, notes)

    def explain(self, leaves: Shapes, checkpoint: Checkpoint | None = None) -> str:
        """Return a table: each tensor, its shape, the leaves that it takes; see `bind`."""
        return self.bind(leaves, checkpoint).explain()

    def _inferred(self, leaves: TensorSpecs, shapes: LeafShapes, *, is_part: bool) -> TensorSpecs:
        """Return the tensors to save: those of `like`, and others of inferred shapes."""
        inferred: dict[str, InferredTensor] = {}
        files = self.mapping.files
        own = TensorSpecs({}) if files is None else files
        targets, ambiguous, unmade, problems = match_rules(self.mapping.rules, own, shapes)
        hint = "Add rules for such."
        known = {WILDCARD.sub("#", rule.target) for rule in self.mapping.rules}
        if targets:
            drops = ", ".join(map(repr, patterns_of(unmade, [*shapes.keys() - unmade])))
            hint = (
                "Add rules for such. What is not a weight can be dropped: mapping.drop("
                f"{drops}), or --drop of `convert`."
            )
        elif prefixes := added_prefixes([*map(pattern_of, unmade)], known):
            parts = listed((repr(prefix[:-1]) for prefix in prefixes), 5, " or ")
            hint = (
                f"The rules have the names of the part {parts} of the tree: give that, by subtree="
                " (--subtree) in `convert`."
            )
        problems += no_rule(unmade, hint)
        taken = {target.leaf: set(target.patterns) for target in targets}
        tied = [(t.leaf, substitute(t.rule.tied_to, t.captures)) for t in targets if t.rule.tied_to]
        ties = {
            leaf: Tie(other, is_compared=True)
            for leaf, other in tied
            if other in leaves and taken[leaf] <= taken.get(other, set())
        }
        for leaf, rule, captures, _ in targets:
            if rule.expr is None or (files is not None and rule.tied_to is None):
                continue
            extents = tuple(map(Extent, leaves[leaf].shape))
            try:
                if saved_leaf(leaf, ties) != leaf:
                    continue
                for name, shape in rule.expr.infer(captures, extents):
                    first = inferred.get(name, InferredTensor(shape, leaves[leaf].dtype, leaf))
                    inferred[name] = first.join(name, shape)
            except MappingError as error:
                problems += within(error, f"leaf {leaf!r}", f"rule {rule.target!r}").problems
        # As small as they can be.
        specs = {name: (tuple(n for n, _ in t.shape), t.dtype) for name, t in inferred.items()}
        if not problems and files is None:
            in_part = NameTree(
                name for name, t in inferred.items() if not all(extent.exact for extent in t.shape)
            )
            saved = TensorSpecs(specs)
            problems += self._absent(targets, saved, in_part, shapes, is_part=is_part)
        if problems:
            names = {"rule": [rule.target for rule in self.mapping.rules]}
            refusal = mapping_error("The mapping cannot save", problems, names)
            if ambiguous and files is None:
                refusal.hint = (
                    "Where several rules fit a leaf, a load takes that whose tensors the checkpoint"
                    " has: save through mapping.like(path) of such a checkpoint."
                )
            raise refusal
        return TensorSpecs({**specs, **own}, [*own.names, *specs], own.pieces)

    def _absent(
        self,
        targets: Sequence[RuleTarget],
        saved: TensorSpecs,
        in_part: NameTree,
        leaves: LeafShapes,
        *,
        is_part: bool,
    ) -> Iterator[Problem]:
        """Yields problems of rules without a leaf, whose tensors no other leaf gives whole.

        In a part of a model, and in one that need not be whole, tensors may be absent, but not
        parts of them: nor those of optional rules.
        """
        used = {id(target.rule) for target in targets}
        may_lack = is_part or not self.mapping.strict
        for rule in self.mapping.rules:
            if rule.expr is None or rule.tied_to is not None:
                continue
            for name in rule.patterns():
                targets_in_part = (substitute(rule.target, c) for _, c in in_part.match(name))
                target = next((leaf for leaf in targets_in_part if leaf not in leaves), None)
                if id(rule) in used and (target is None or "{" in target):
                    continue
                if target is None and (rule.optional or may_lack or _is_given(rule, name, saved)):
                    continue
                lack = "" if target is None else "a part of "
                absent = target or rule.target
                text = f"there is no leaf {absent!r}, so what is saved would lack {lack}{name!r}"
                hint = "Give the leaf, or say rule(..., optional=True)."
                if target is not None:
                    hint = f"Give the leaf, or {LIKE}."
                yield Problem(text, f"rule {rule.target!r}", hint=hint)
                break


def _is_given(rule: Rule, pattern: str, saved: TensorSpecs) -> bool:
    """Whether what is saved has all that a rule without a leaf takes of a pattern's tensors."""
    assert rule.expr is not None
    over = rule.expr.stacked_over()
    own = {
        tuple((key, value) for key, value in captures.items() if key not in over)
        for _, captures in saved.tree.match(pattern)
    }
    # Of a pattern with fewer wildcards than others of the rule, the others say what is taken.
    if len(WILDCARD.findall(pattern)) < max(len(WILDCARD.findall(p)) for p in rule.patterns()):
        return bool(own)
    try:
        return bool(own) and all(
            0 not in rule.expr.bind_to(dict(captures), saved).shape for captures in own
        )
    except MappingError:
        return False


def saved_tensors(
    mapping: Mapping | None, leaves: TensorSpecs, values: Iterable[str]
) -> dict[str, BoundExpr]:
    """Return what is saved of a tree, over its leaves, of which `values` are not arrays."""
    names = [*values]
    if mapping is not None:
        leaves.update(dict.fromkeys(names, TensorSpec((), VALUE)))
        return mapping.inverse().bind(leaves).expressions
    if names:
        raise MappingError(
            "a save of quantised weights takes arrays alone, unlike these leaves:"
            f" {listed(map(repr, names))}",
            hint="Save the parameters alone (subtree= of `convert`).",
        )
    return {name: whole_tensor(name, leaves) for name in leaves}


def check_mapping(mapping: object) -> None:
    """Refuses an argument that is not a mapping."""
    if not isinstance(mapping, Mapping):
        raise TypeError(
            f"mapping={mapping!r} is not an osl.Mapping; a ready one is"
            " osl.families.mapping(path, target=...)"
        )


def fingerprint(mapping: Mapping) -> str:
    """Return a digest that is equal for equal mappings, in every process.

    Unlike the `repr` of an expression it covers all indices. Functions count by their qualified
    names, `functools.partial` by its arguments, too.
    """
    files = None if mapping.files is None else [*mapping.files.items()]
    source = None if mapping._source is None else fingerprint(mapping._source)
    left = (*mapping.buffers, *mapping.ignore), mapping.dropped
    parts = [mapping.rules, left, mapping.strict, files, source]
    return hashlib.sha256(repr(_encoded(parts)).encode()).hexdigest()


def _encoded(value: Any) -> object:
    """Return a value as numbers and texts that are the same in every process."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.dtype):
        return value
    if kind in (set, frozenset):
        return sorted(repr(_encoded(part)) for part in value)
    parts: Iterable[Any] = ()
    if kind in (list, tuple):
        parts = value
    elif isinstance(value, Dict):
        parts = value.items()
    elif isinstance(value, bytes | np.ndarray | np.generic):
        array = np.asarray(value)
        parts = (array.dtype, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
    elif isinstance(value, re.Pattern):
        parts = (value.pattern, value.flags)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value))
    elif "__reduce__" in vars(kind):  # as of a partial function, or an adapter's folder
        reduced = value.__reduce__()
        parts = reduced[1:] if isinstance(reduced, tuple) else (reduced,)
    named = value if hasattr(value, "__qualname__") else kind
    module = getattr(named, "__module__", None)
    return module, named.__qualname__, [_encoded(part) for part in parts]


def _irreversible(expr: Expr) -> Iterator[Problem]:
    try:
        if isinstance(expr, Compute | Overlaid):
            expr.infer({}, ())
        elif isinstance(expr, Apply) and isinstance(expr.op, Scale):
            expr.op.inverse(np.dtype(np.float32))
    except MappingError as error:
        yield from problems_of(error)
        if not isinstance(expr, Apply):
            return
    for operand in expr.children():
        yield from _irreversible(operand)


def _compiled(where: str, given: Any) -> tuple[tuple[str, ...], list[re.Pattern[str]]]:
    texts = (given,) if isinstance(given, str) else several(given, where)
    try:
        return texts, [compile_pattern(pattern) for pattern in texts]
    except (ValueError, re.error) as error:
        raise MappingError(f"{where}: {error}") from error


def _are_shapes(leaves: Any) -> bool:
    return isinstance(leaves, dict) and all(
        shape is None or (isinstance(shape, tuple) and all(isinstance(n, int) for n in shape))
        for shape in leaves.values()
    )
