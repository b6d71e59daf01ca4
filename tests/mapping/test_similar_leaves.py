"""Leaves of one rule whose tensors differ in names alone: planned once, read each for itself."""

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping import BoundExpr

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


@pytest.mark.parametrize("kind", RULES)
def test_many_are_no_more_work_than_a_few(tmp_path, kind, monkeypatch):
    calls = []
    pull_back = BoundExpr.pull_back
    monkeypatch.setattr(
        BoundExpr,
        "pull_back",
        lambda self, box, **how: (calls.append(box), pull_back(self, box, **how))[1],
    )
    mapping, counts = osl.Mapping(RULES[kind][0], strict=False), []
    for layers in (3, 40):
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
    assert not made
    bound = mapping.bind(tmp_path / "m").expressions
    assert bound["7.k"].sources() == ("7.w",)
    assert made
