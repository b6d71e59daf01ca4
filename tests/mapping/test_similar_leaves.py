"""Leaves whose tensors differ in names alone: planned once, read each for itself."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, ONE_A_BYTE, TensorEntry
from orbax_safetensors_layout.mapping import BoundExpr
from orbax_safetensors_layout.mapping.expr.values import Add, Scale

RNG = np.random.default_rng(5)
RULES = {
    "transposed": (
        [osl.rule("{i}.k", osl.tensor("{i}.w").transpose())],
        lambda t, i: t[f"{i}.w"].T,
    ),
    "joined with one of all": (
        [osl.rule("{i}.k", osl.concat([osl.tensor("{i}.w"), osl.tensor("0.w")], axis=0))],
        lambda t, i: np.concatenate([t[f"{i}.w"], t["0.w"]]),
    ),
    "computed": (
        [
            osl.rule(
                "{i}.k",
                osl.opaque(
                    np.add, *map(osl.tensor, ("{i}.w", "{i}.v")), shape=(8, 4), dtype="float32"
                ),
            )
        ],
        lambda t, i: t[f"{i}.w"] + t[f"{i}.v"],
    ),
}


def rule_of_each(layer):
    return osl.rule(f"{layer}.k", osl.tensor(f"{layer}.w").transpose())


def folder_of(path, layers, shapes=((8, 4),)):
    tensors = {
        f"{i}.{name}": RNG.normal(size=shapes[i % len(shapes)]).astype(np.float32)
        for i in range(layers)
        for name in "wv"
    }
    path.mkdir()
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return tensors


def wanted(mapping, path):
    sharding = NamedSharding(mesh_of(x=2), P(None, "x"))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        mapping.abstract(path),
    )


@pytest.mark.parametrize("kind", RULES)
def test_each_has_the_values_of_its_own_tensors(tmp_path, kind):
    rules, oracle = RULES[kind]
    tensors = folder_of(tmp_path / "m", 5)
    mapping = osl.Mapping(rules, strict=False)
    loaded = osl.load(tmp_path / "m", wanted(mapping, tmp_path / "m"), mapping=mapping)
    for i in range(5):
        np.testing.assert_array_equal(loaded[str(i)]["k"], oracle(tensors, i))


def test_those_of_other_shapes_are_planned_by_themselves(tmp_path):
    tensors = folder_of(tmp_path / "m", 6, shapes=[(8, 4), (2, 6), (8, 4)])
    mapping = osl.Mapping(RULES["transposed"][0], strict=False)
    loaded = osl.load(tmp_path / "m", wanted(mapping, tmp_path / "m"), mapping=mapping)
    for i in range(6):
        np.testing.assert_array_equal(loaded[str(i)]["k"], tensors[f"{i}.w"].T)


def test_they_may_be_of_a_rule_each(tmp_path):
    tensors = folder_of(tmp_path / "m", 6, shapes=[(8, 4), (2, 6), (8, 4)])
    mapping = osl.Mapping([rule_of_each(i) for i in range(6)], strict=False)
    loaded = osl.load(tmp_path / "m", wanted(mapping, tmp_path / "m"), mapping=mapping)
    for i in range(6):
        np.testing.assert_array_equal(loaded[str(i)]["k"], tensors[f"{i}.w"].T)


@dataclasses.dataclass
class Times:
    """A function that has no hash, and equals another one until it is changed."""

    factors: list

    def __call__(self, values):
        return values * self.factors[0]


def test_functions_count_as_themselves(tmp_path):
    tensors = folder_of(tmp_path / "m", 2)
    functions = [Times([2]), Times([2])]
    rules = [
        osl.rule(str(n), osl.opaque(f, osl.tensor(f"{n}.w"), shape=(8, 4), dtype="float32"))
        for n, f in enumerate(functions)
    ]
    functions[1].factors[0] = 3
    loaded = osl.load(tmp_path / "m", mapping=osl.Mapping(rules, strict=False))
    for n, factor in enumerate((2, 3)):
        np.testing.assert_array_equal(loaded[str(n)], tensors[f"{n}.w"] * factor)


def test_tensors_of_other_dtypes_in_the_file_are_not_alike():
    """Four bits of two in a byte, and one in a byte: the same dtype in memory."""
    entries = {
        "a": TensorEntry("a", ONE_A_BYTE["float4_e2m1fn"], (4,), "file", 100, 104),
        "b": TensorEntry("b", DTYPES["F4"], (4,), "file", 104, 106),
    }
    mapping = osl.Mapping([osl.rule("p", osl.tensor("b")), osl.rule("q", osl.tensor("a"))])
    leaves = mapping.match(entries).bind(entries, None).leaves
    assert leaves["p"].dtype == leaves["q"].dtype
    assert leaves["p"].model is not leaves["q"].model


def test_constants_are_told_apart_by_their_bits():
    for one, other in ((0.0, -0.0), (math.nan, -math.nan), (1, 1.0), (True, 1)):
        assert Add(one) == Add(one)
        assert Add(one) != Add(other)
        assert len({Add(one), Add(other), Scale(one), Scale(other)}) == 4


@pytest.mark.parametrize(
    "operation",
    [
        lambda name, zero: osl.tensor(name).pad(1, 1, 2, zero),
        lambda name, zero: osl.tensor(name).add(zero),
        lambda name, zero: osl.concat([osl.tensor(name), osl.fill((1, 4), zero, "float32")], 0),
    ],
)
def test_zeros_of_either_sign_are_not_alike(tmp_path, operation):
    """0 and -0 are equal numbers, of other bits."""
    negative = np.full((2, 4), -0.0, np.float32)
    safetensors.numpy.save_file({"a": negative, "b": negative}, tmp_path / "model.safetensors")
    zeros = {"p": ("a", 0.0), "q": ("b", -0.0), "r": ("a", -0.0), "s": ("b", 0.0)}
    values = {name: jnp.asarray(negative) for name in "ab"}
    mapping = osl.Mapping([osl.rule(leaf, operation(*of)) for leaf, of in zeros.items()])
    loaded = osl.load(tmp_path, mapping=mapping)
    live = mapping.apply(values)
    for leaf, (name, zero) in zeros.items():
        single = osl.Mapping([osl.rule(leaf, operation(name, zero))], strict=False)
        alone = np.signbit(osl.load(tmp_path, mapping=single)[leaf])
        assert alone.all() == np.signbit(zero)
        np.testing.assert_array_equal(np.signbit(loaded[leaf]), alone)
        np.testing.assert_array_equal(live[leaf], loaded[leaf])  # XLA leaves out the sum with 0


@pytest.mark.parametrize("kind", [*RULES, "a rule each"])
def test_many_are_no_more_work_than_a_few(tmp_path, kind, monkeypatch):
    calls = []
    pull_back = BoundExpr.pull_back
    monkeypatch.setattr(
        BoundExpr,
        "pull_back",
        lambda self, box, **how: (calls.append(box), pull_back(self, box, **how))[1],
    )
    counts = []
    for layers in (3, 40):
        rules = RULES[kind][0] if kind in RULES else [rule_of_each(i) for i in range(layers)]
        mapping = osl.Mapping(rules, strict=False)
        path = tmp_path / str(layers)
        folder_of(path, layers)
        tree = wanted(mapping, path)
        calls.clear()
        plan = osl.plan_load(path, tree, mapping=mapping)
        counts.append(len(calls))
        assert plan.cost().tensors >= layers
    assert 0 < counts[0] == counts[1]


def test_their_expressions_are_made_when_they_are_asked_for(tmp_path, monkeypatch):
    made = []
    renamed = BoundExpr.renamed
    monkeypatch.setattr(
        BoundExpr, "renamed", lambda self, names: (made.append(names), renamed(self, names))[1]
    )
    folder_of(tmp_path / "m", 40)
    mapping = osl.Mapping(RULES["transposed"][0], strict=False)
    tree = wanted(mapping, tmp_path / "m")
    for how in ("each", "auto", "read_once"):
        options = osl.ReadOptions(replicated=how)
        osl.plan_load(tmp_path / "m", tree, mapping=mapping, options=options)
    bound = mapping.bind(tmp_path / "m")
    assert len(made) < 10  # one of all layers, each time
    assert bound.expressions["7.k"].sources() == ("7.w",)
    assert len(made) > 40
