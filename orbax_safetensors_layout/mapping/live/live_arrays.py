"""Runs a mapping on arrays in memory, in either direction.

Results that take the same arrays are computed by one program; those that differ in names alone
share it, and so what is compiled. Nothing comes to the host but whether values fit, where a rule
asks that of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping as Dict, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from orbax_safetensors_layout.errors import (
    MappingError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.pytree import abstract_array, named_leaves, nested_dicts
from orbax_safetensors_layout.sharding import Placement, sharding_of

from ..affine.bound import BoundExpr, Valued
from ..expr.values import Cast
from ..names import TensorSpec, TensorSpecs
from ..problems import Problem, mapping_error
from .exact_values import COMPILER_OPTIONS
from .traced import Raised, TracedValues, may_refuse, refusal

_MAPPINGS, _PROGRAMS = 32, 1024  # whose plans, and which, are kept


class _AskedLeaf(NamedTuple):
    """A leaf as it is asked for; None takes what comes."""

    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    placement: Placement | None = None


class _PlacedResult(NamedTuple):
    """A result of a program: the number of its expression, and where it goes."""

    number: int
    placement: Placement | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _ArrayGroup:
    """Results that take the same arrays."""

    sources: tuple[str, ...]
    results: dict[str, int]  # numbers of their expressions
    expressions: tuple[BoundExpr, ...]  # over arrays that are named by their numbers
    programs: dict[Hashable, _Program] = dataclasses.field(default_factory=dict)

    def program(
        self,
        outputs: tuple[_PlacedResult, ...],
        moves: bool,
        donated: tuple[int, ...],
        traced: bool,
    ) -> _Program:
        key = _is_x64(), outputs, moves, donated, traced
        if key not in self.programs:
            self.programs[key] = _program(self.expressions, *key)
        return self.programs[key]


class _Program:
    """The compiled computation of some expressions; its checks are those of the last trace."""

    def __init__(
        self,
        expressions: tuple[BoundExpr, ...],
        outputs: tuple[_PlacedResult, ...],
        moves: bool,
        donated: tuple[int, ...],
        traced: bool,
    ) -> None:
        self._outputs = outputs
        self._moves = moves
        self.errors: list[tuple[int, Raised]] = []
        self._expressions = expressions
        placements = [None if moves else _without_types(placement) for _, placement in outputs]
        self._compute = jax.jit(
            self._values,
            out_shardings=(placements, None),
            donate_argnums=0,
            # JAX takes options for outermost programs alone.
            compiler_options=None if traced else COMPILER_OPTIONS,
        )
        self._donated = donated

    def _values(
        self, donated: Dict[str, jax.Array], kept: Dict[str, jax.Array]
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Return the results, and for each check of values whether it holds."""
        traced = TracedValues({**donated, **kept})
        results = [traced.result(n, self._expressions[n]) for n, _ in self._outputs]
        self.errors = [(check.result, check.error) for check in traced.value_checks]
        holds = [check.holds for check in traced.value_checks]
        return results, jnp.stack(holds) if holds else None

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            given = {str(number): _automatic(array) for number, array in enumerate(arrays)}
            donated = {str(number): given.pop(str(number)) for number in self._donated}
            results, holds = self._compute(donated, given)
        shardings: Any = [array.sharding for array in arrays if _automatic(array) is not array]
        meshes = {_without_types(sharding).mesh: sharding.mesh for sharding in shardings}
        return [
            self._placed(value, placement, meshes)
            for value, (_, placement) in zip(results, self._outputs, strict=True)
        ], holds

    def _placed(self, value: jax.Array, placement: Placement | None, meshes: Any) -> jax.Array:
        """Return a result where it goes, on the mesh that was given, with its types of axes.

        `meshes` are those with types, by the same without.
        """
        if self._moves and placement is not None:
            moved: jax.Array = jax.device_put(value, placement)
            return moved
        if placement is None and meshes and isinstance(value.sharding, NamedSharding):
            mesh = meshes.get(value.sharding.mesh, value.sharding.mesh)
            placement = NamedSharding(mesh, value.sharding.spec)
        if isinstance(placement, NamedSharding) and _without_types(placement) is not placement:
            return _rewrapped(value, placement)
        return value


def _automatic(array: jax.Array) -> jax.Array:
    """Return an array on a mesh whose axes are not explicit, for which any operation has a type."""
    if isinstance(array, jax.core.Tracer):
        return array
    sharding = _without_types(array.sharding)
    return array if sharding is array.sharding else _rewrapped(array, sharding)


def _without_types(placement: Any) -> Any:
    if (
        not isinstance(placement, NamedSharding)
        or AxisType.Explicit not in placement.mesh.axis_types
    ):
        return placement
    mesh = Mesh(placement.mesh.devices, placement.mesh.axis_names)
    return NamedSharding(mesh, placement.spec, memory_kind=placement.memory_kind)


def _rewrapped(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return the same memory under another name of its sharding."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


@functools.lru_cache(_PROGRAMS)
def _program(expressions: tuple[BoundExpr, ...], x64: bool, *how: Any) -> _Program:
    """Return the program of expressions; what is traced, and refused, depends on `x64`."""
    return _Program(expressions, *how)


def _is_x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def apply(mapping: Any, tensors: Any, shardings: Any, *, donate: bool) -> Any:
    """See `Mapping.apply`."""
    if not isinstance(tensors, Dict):
        raise MappingError(
            "apply takes tensors by name", expected="{'name': array}", found=type(tensors).__name__
        )
    arrays = dict(tensors)
    specs = _specs(arrays)
    if shardings is None or _is_placement(shardings):
        groups = _planned(mapping, specs, None, _is_x64())
        names = [name for group in groups for name in group.results]
        placements: dict[str, Placement | None] = dict.fromkeys(names, shardings)
        return nested_dicts(_all_values(groups, arrays, placements, donate))
    asked, build = _asked_leaves(mapping, shardings)
    requests = tuple((name, leaf.shape, leaf.dtype) for name, leaf in asked.items())
    groups = _planned(mapping, specs, requests, _is_x64())
    placements = {name: leaf.placement for name, leaf in asked.items()}
    values = _all_values(groups, arrays, placements, donate)
    return build([values[name] for name in asked])


def unapply(mapping: Any, tree: Any, shardings: Any, *, donate: bool) -> dict[str, Any]:
    """See `Mapping.unapply`."""
    arrays = _leaves_by_name(mapping, tree)
    groups = _inverse_planned(mapping, _specs(arrays), _is_x64())
    names = [name for group in groups for name in group.results]
    if shardings is None or _is_placement(shardings):
        return _all_values(groups, arrays, dict.fromkeys(names, shardings), donate)
    unknown = sorted({*shardings} - {*names})
    if unknown:
        raise MappingError(
            "there are shardings of tensors that the mapping does not save",
            tensor=unknown[0],
            expected=f"names of the {len(names)} tensors, such as {names[0]!r}",
            found=f"{len(unknown)} others",
        )
    placements = {name: getattr(s, "sharding", s) for name, s in shardings.items()}
    return _all_values(groups, arrays, {name: placements.get(name) for name in names}, donate)


def _leaves_of(mapping: Any, tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a tree by the names that a mapping has for them, and its treedef."""
    leaves, treedef = named_leaves(tree)
    names = mapping.names_of(name for name, _ in leaves)
    return [(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)], treedef


def _leaves_by_name(mapping: Any, tree: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, leaf in _leaves_of(mapping, tree)[0]:
        if mapping.drops(name):
            continue
        if name in named:
            raise MappingError(
                "two leaves have one name",
                tensor=name,
                hint="Keys with dots in them name what nested dicts do; rename one of the two.",
            )
        named[name] = leaf
    return named


def _is_placement(value: Any) -> bool:
    return isinstance(value, Sharding | Format)


def _asked_leaves(
    mapping: Any, tree: Any
) -> tuple[dict[str, _AskedLeaf], Callable[[Iterable[Any]], Any]]:
    leaves, treedef = _leaves_of(mapping, tree)
    asked: dict[str, _AskedLeaf] = {}
    for name, leaf in leaves:
        if _is_placement(leaf):
            asked[name] = _AskedLeaf(placement=leaf)
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            dtype = np.dtype(leaf.dtype)
            asked[name] = _AskedLeaf(tuple(leaf.shape), dtype, getattr(leaf, "sharding", None))
        else:
            raise MappingError(
                "apply takes a tree of shardings or of abstract leaves",
                tensor=name,
                expected="a jax.sharding.Sharding, or a jax.ShapeDtypeStruct",
                found=type(leaf).__name__,
            )
    return asked, functools.partial(jax.tree_util.tree_unflatten, treedef)


def _specs(arrays: Dict[str, Any]) -> tuple[tuple[str, TensorSpec], ...]:
    specs = []
    for name, array in arrays.items():
        is_array = isinstance(array, jax.Array | abstract_array)
        if not is_array or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise MappingError(
                "a mapping on live arrays takes arrays of numbers",
                tensor=name,
                expected="a jax.Array",
                found=str(array.dtype) if is_array else type(array).__name__,
                hint="Drop other leaves, with mapping.drop(...); put host arrays on devices with"
                " jax.device_put; of PRNG keys take jax.random.key_data.",
            )
        specs.append((name, TensorSpec(tuple(array.shape), np.dtype(array.dtype))))
    return tuple(specs)


@functools.lru_cache(_MAPPINGS)
def _planned(
    mapping: Any,
    specs: tuple[tuple[str, TensorSpec], ...],
    asked: tuple[tuple[str, tuple[int, ...] | None, np.dtype[Any] | None], ...] | None,
    x64: bool,
) -> tuple[_ArrayGroup, ...]:
    """Return the groups of leaves; `x64` is whether it is set, on which refusals depend."""
    shapes = None if asked is None else {name: shape for name, shape, _ in asked}
    bound = mapping.bind(TensorSpecs(dict(specs)), shapes)
    dtypes = {name: dtype for name, _, dtype in asked or ()}
    expressions = {
        name: expr if (dtype := dtypes.get(name)) is None else Valued.of(expr, Cast(dtype))
        for name, expr in bound.expressions.items()
    }
    return _grouped(expressions, bound.notes, "leaf")


@functools.lru_cache(_MAPPINGS)
def _inverse_planned(
    mapping: Any, specs: tuple[tuple[str, TensorSpec], ...], x64: bool
) -> tuple[_ArrayGroup, ...]:
    bound = mapping.inverse().bind(TensorSpecs(dict(specs)), is_part=True)
    return _grouped(bound.expressions, bound.notes, "tensor")


def _grouped(
    expressions: Dict[str, BoundExpr], notes: Dict[str, object], what: str
) -> tuple[_ArrayGroup, ...]:
    """Return the groups of results; all that cannot be computed of live arrays raise."""
    problems: list[Problem] = []
    for name, expr in expressions.items():
        reasons = dict.fromkeys(reason for node in expr.nodes() if (reason := refusal(node)))
        problems += [
            Problem(f"{what} {name!r}, {notes[name]}, {reason}", f"{notes[name]}: {reason}")
            for reason in reasons
        ]
    if problems:
        hint = " Save these weights and load them, or write the rule in other operations."
        error = mapping_error("The mapping cannot be computed on live arrays", problems, {})
        raise MappingError(error.message + hint)
    named = [*expressions.items()]
    sources = [expr.sources() for expr in expressions.values()]
    return tuple(_group(dict(named[n] for n in numbers)) for numbers in _connected(sources))


def _connected(sets: Sequence[Iterable[Hashable]]) -> list[list[int]]:
    """Return the numbers of the sets, those together that have an element in common."""
    holder: dict[Hashable, int] = {}  # a set that has an element
    joined: dict[int, int] = {}  # another set of the same group

    def first(number: int) -> int:
        while number in joined:
            number = joined[number]
        return number

    for number, elements in enumerate(sets):
        for element in elements:
            other = first(holder.setdefault(element, number))
            if other != first(number):
                joined[first(number)] = other
    groups: dict[int, list[int]] = {}
    for number in range(len(sets)):
        groups.setdefault(first(number), []).append(number)
    return [*groups.values()]


def _group(expressions: Dict[str, BoundExpr]) -> _ArrayGroup:
    sources = tuple(dict.fromkeys(s for expr in expressions.values() for s in expr.sources()))
    numbers = {source: str(number) for number, source in enumerate(sources)}
    distinct: dict[BoundExpr, int] = {}
    results = {name: distinct.setdefault(e, len(distinct)) for name, e in expressions.items()}
    return _ArrayGroup(sources, results, tuple(expr.renamed(numbers) for expr in distinct))


def _all_values(
    groups: Sequence[_ArrayGroup],
    arrays: Dict[str, Any],
    placements: Dict[str, Placement | None],
    donate: bool,
) -> dict[str, Any]:
    """Return the values of all groups; arrays are given up when none can be refused any more."""
    values: dict[str, Any] = {}
    value_checks: list[tuple[_ArrayGroup, _Program, jax.Array]] = []
    shared = shared_buffers(arrays.values()) if donate else frozenset()
    given_up: list[jax.Array] = []
    checked = {id(group) for group in groups if may_refuse(group.expressions)}
    for group in sorted(groups, key=lambda group: id(group) not in checked):
        may_fail = id(group) in checked
        if not may_fail and value_checks:
            _raise_failed(value_checks)
            value_checks = []
        given = [arrays[name] for name in group.sources]
        places = {name: _PlacedResult(n, placements[name]) for name, n in group.results.items()}
        outputs = tuple(dict.fromkeys(places.values()))
        if any(isinstance(array, abstract_array) for array in given):
            results: list[Any] = [_abstract(group.expressions[n], place) for n, place in outputs]
        else:
            once = tuple(
                n for n, a in enumerate(given) if donate and shared.isdisjoint(buffers_of(a))
            )
            donated = () if may_fail else once
            program = group.program(outputs, _moves(given, outputs), donated, _traced(given))
            results, holds = program.run(given)
            if holds is not None:
                value_checks.append((group, program, holds))
            given_up += (given[n] for n in once)
            if not may_fail:
                _give_up(given_up)
        of_output = dict(zip(outputs, results, strict=True))
        values.update((name, of_output[place]) for name, place in places.items())
    _raise_failed(value_checks)
    _give_up(given_up)
    return values


def buffers_of(array: Any) -> set[int]:
    """Return the addresses of an array's shards on devices; of what is traced its identity."""
    if isinstance(array, jax.core.Tracer) or array.is_deleted():
        return {id(array)}
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def shared_buffers(arrays: Iterable[Any]) -> Set[int]:
    """Return the buffers that several `jax.Array`s have, or that one has under several names."""
    real = (array for array in arrays if isinstance(array, jax.Array))
    uses = collections.Counter(itertools.chain.from_iterable(map(buffers_of, real)))
    return {buffer for buffer, count in uses.items() if count > 1}


def _give_up(arrays: list[jax.Array]) -> None:
    while arrays:
        array = arrays.pop()
        if not isinstance(array, jax.core.Tracer) and not array.is_deleted():
            array.delete()


def _abstract(expr: BoundExpr, placement: Placement | None) -> Any:
    return abstract_array(expr.shape, expr.dtype, sharding=placement)


def _traced(given: Sequence[jax.Array]) -> bool:
    return bool(given) and isinstance(given[0], jax.core.Tracer)


def _moves(given: Sequence[jax.Array], outputs: Iterable[_PlacedResult]) -> bool:
    """Whether results go to other devices than those that compute them."""
    if not given or _traced(given):
        return False
    devices = given[0].sharding.device_set
    placements = (output.placement for output in outputs)
    return any(p is not None and sharding_of(p).device_set != devices for p in placements)


def _raise_failed(value_checks: Iterable[tuple[_ArrayGroup, _Program, jax.Array]]) -> None:
    problems: list[SafetensorsLayoutError] = []
    for group, program, holds in value_checks:
        if isinstance(holds, jax.core.Tracer):
            number, error = program.errors[0]
            raise MappingError(
                "a rule that depends on values cannot be computed within a function that JAX"
                f" traces: whether {error(_leaf(group, number)).message}",
                tensor=_leaf(group, number),
                hint="Call apply and unapply outside of jax.jit, or use a rule without it: copies"
                " are not compared with lossy_inverse=True.",
            )
        failed = itertools.compress(program.errors, ~np.asarray(holds))
        problems += [error(_leaf(group, number)) for number, error in failed]
    if problems:
        raise SafetensorsLayoutError.collect(problems, "leaves cannot be computed")


def _leaf(group: _ArrayGroup, number: int) -> str:
    return next(name for name, n in group.results.items() if n == number)
