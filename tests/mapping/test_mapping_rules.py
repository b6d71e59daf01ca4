"""Rules against names and shapes of both sides: what they give, and the one error they give."""

from __future__ import annotations

import functools
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same_bits, save
from mapping_expressions import evaluate, specs_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import CheckpointNotFoundError, MappingError
from orbax_safetensors_layout.mapping import (
    Mapping,
    concat,
    described_rule,
    fill,
    fingerprint,
    opaque,
    rule,
    stack,
    tensor,
)
from orbax_safetensors_layout.mapping.names import wildcards

F32 = np.dtype(np.float32)
LAYERS = 6


def llama(layers=LAYERS):
    rng = np.random.default_rng(0)
    shapes = {"model.embed.weight": (100, 16), "model.norm.weight": (16,)}
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.q.weight": (32, 16),
            f"model.layers.{i}.up.weight": (64, 16),
            f"model.layers.{i}.down.weight": (16, 64),
        }
    return {name: rng.standard_normal(shape).astype(F32) for name, shape in shapes.items()}


def scanned(name, **options):
    return stack(tensor(f"model.layers.{{i}}.{name}.weight").transpose(), over="i", **options)


Q = tensor("model.layers.{i}.q.weight").rearrange("(h d) e -> e h d", d=8)
EMBED = rule("embed", tensor("model.embed.weight"))
NORM = rule("final.norm", tensor("model.norm.weight"))
RULES = [
    EMBED,
    rule("head", tensor("model.embed.weight").transpose(), tied_to="embed"),
    rule("layers.q", stack(Q, over="i")),
    rule("blocks.{i}.up", tensor("model.layers.{i}.up.weight")),
    rule("layers.down", scanned("down", axis=1)),
    NORM,
]
SHAPES = {
    "embed": (100, 16),
    "head": (16, 100),
    "layers.q": (LAYERS, 16, 4, 8),
    **{f"blocks.{i}.up": (64, 16) for i in range(LAYERS)},
    "layers.down": (64, LAYERS, 16),
    "final.norm": (16,),
}


def test_leaves_that_a_checkpoint_gives():
    mapping = Mapping(RULES)
    given = mapping.leaf_facts(specs_of(llama()))
    assert {name: leaf_spec.shape for name, leaf_spec in given.items()} == SHAPES
    assert {leaf_spec.dtype for leaf_spec in given.values()} == {F32}


@pytest.mark.parametrize("leaves", [None, SHAPES, dict.fromkeys(SHAPES)])
def test_bound_leaves(leaves):
    tensors = llama()
    bound = Mapping(RULES).bind(specs_of(tensors), leaves)
    assert set(bound.expressions) == set(SHAPES)
    assert_same_bits(
        evaluate(bound.expressions["layers.down"], tensors),
        np.stack([tensors[f"model.layers.{i}.down.weight"].T for i in range(LAYERS)], 1),
    )
    assert_same_bits(
        evaluate(bound.expressions["blocks.3.up"], tensors),
        tensors["model.layers.3.up.weight"],
    )
    assert bound.ties == {"head": ("embed", True)}
    assert bound.expressions["head"] is not bound.expressions["embed"]


def test_leaves_come_in_the_order_of_numbers():
    specs = specs_of(llama(12))
    blocks = [name for name in Mapping(RULES).leaf_facts(specs) if name.startswith("blocks")]
    assert blocks == [f"blocks.{i}.up" for i in range(12)]


def test_a_tie_without_an_expression_is_the_other_leaf():
    rules = [rule("head.{x}", None, tied_to="embed.{x}"), rule("embed.{x}", tensor("e.{x}"))]
    bound = Mapping(rules).bind({"e.a": ((2, 3), F32), "e.b": ((4,), F32)})
    assert bound.ties == {"head.a": ("embed.a", True), "head.b": ("embed.b", True)}
    assert bound.expressions["head.a"] is bound.expressions["embed.a"]
    assert bound.specs()["head.b"].shape == (4,)
    alone = Mapping(rules).bind({"e.a": ((2, 3), F32)}, {"head.a": None})
    assert (alone.specs()["head.a"].shape, alone.ties) == ((2, 3), {})
    back = Mapping(rules).inverse().bind({"head.a": ((2, 3), F32)})
    assert back.expressions["e.a"].sources() == ("head.a",)
    with pytest.raises(MappingError, match=r"leaf 'head.c': there is no tensor 'e.c'"):
        Mapping(rules).bind({"e.a": ((2, 3), F32)}, {"head.c": None, "embed.a": None})
    with pytest.raises(MappingError, match=r"'head.c' is tied to 'embed.c', which no rule makes"):
        Mapping(rules[:1]).bind({}, {"head.c": None})
    with pytest.raises(
        MappingError, match=r"leaf 'head.a' has shape \[9\], but as 'embed.a' gives"
    ):
        Mapping(rules).bind({"e.a": ((2, 3), F32)}, {"head.a": (9,), "embed.a": None})


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_tie_to_a_leaf_that_is_tied(tmp_path, order):
    rules = [rule("a", None, tied_to="b"), rule("b", None, tied_to="c"), rule("c", tensor("e"))]
    mapping = Mapping([rules[number] for number in order])
    files = {"e": ((2,), F32)}
    for leaves in (None, dict.fromkeys("abc"), dict.fromkeys("cba")):
        bound = mapping.bind(files, leaves)
        assert bound.leaves.keys() == {"a", "b", "c"}
        assert {leaf: tie.other for leaf, tie in bound.ties.items()} == {"a": "b", "b": "c"}
        assert len({id(expr) for expr in bound.expressions.values()}) == 1
    for changed in "abc":
        tree = {name: np.full(2, name == changed, F32) for name in "abc"}
        with pytest.raises(MappingError, match="to which it is tied"):
            osl.save(tmp_path / "out", tree, mapping=mapping)
    osl.save(tmp_path / "out", {name: np.ones(2, F32) for name in "abc"}, mapping=mapping)
    loaded = osl.load(tmp_path / "out", mapping=mapping)
    assert loaded.keys() == {"a", "b", "c"}


def test_leaves_that_are_tied_in_a_circle_are_refused():
    rules = [rule("a", None, tied_to="b"), rule("b", None, tied_to="a"), rule("c", tensor("e"))]
    with pytest.raises(MappingError, match="which no rule makes"):
        Mapping(rules).bind({"e": ((2,), F32)}, dict.fromkeys("abc"))


def test_a_save_without_a_leaf_lacks_no_part_of_a_tensor(tmp_path):
    """How long the tensor is would be known from the other leaf alone."""
    gate, up = rule("g", tensor("gu").slice(0, 0, 2)), rule("u", tensor("gu").slice(0, 2, 4))
    mapping = Mapping([gate, up])
    match = r"there is no leaf 'u', .* would lack a part of 'gu'"
    with pytest.raises(MappingError, match=match):
        osl.save(tmp_path / "out", {"g": np.ones(2, F32)}, mapping=mapping)
    with pytest.raises(MappingError, match=match):
        mapping.unapply({"g": jnp.ones(2)})
    assert not (tmp_path / "out").exists()
    whole = {"g": np.ones(2, F32), "u": np.zeros(2, F32)}
    osl.save(tmp_path / "out", whole, mapping=mapping)
    assert osl.metadata(tmp_path / "out")["gu"].shape == (4,)


def test_a_save_without_a_leaf_of_a_layer_lacks_no_part_of_a_tensor(tmp_path):
    gate = rule("l.{i}.g", tensor("l.{i}.gu").slice(0, 0, 2))
    up = rule("l.{i}.u", tensor("l.{i}.gu").slice(0, 2, 4))
    value = np.ones(2, F32)
    whole = {"l": {"0": {"g": value, "u": value}, "1": {"g": value, "u": value}}}
    lacking = {"l": {"0": whole["l"]["0"], "1": {"g": value}}}
    for strict in (True, False):
        mapping = Mapping([gate, up], strict=strict)
        match = r"there is no leaf 'l.1.u', .* would lack a part of 'l.\{i\}.gu'"
        with pytest.raises(MappingError, match=match):
            osl.save(tmp_path / "out", lacking, mapping=mapping)
        with pytest.raises(MappingError, match=match):
            mapping.unapply(jax.tree.map(jnp.asarray, lacking))
        assert not (tmp_path / "out").exists()
        osl.save(tmp_path / f"{strict}", whole, mapping=mapping)
    rules = [rule("a", tensor("x")), rule("b", tensor("y"))]
    osl.save(tmp_path / "part", {"a": value}, mapping=Mapping(rules, strict=False))
    assert osl.metadata(tmp_path / "part").keys() == {"x"}


def test_a_save_without_a_leaf_lacks_no_tensor_unasked(tmp_path):
    tree = {"a": np.ones(2, F32)}
    first, second = rule("a", tensor("x")), rule("b", tensor("y"))
    with pytest.raises(MappingError, match=r"there is no leaf 'b', .* would lack 'y'"):
        osl.save(tmp_path / "out", tree, mapping=Mapping([first, second]))
    assert Mapping([first, second]).unapply({"a": jnp.ones(2)}).keys() == {"x"}  # a part, in memory
    osl.save(tmp_path / "like", {"x": tree["a"], "y": tree["a"]})
    mapping = Mapping([first, second]).like(tmp_path / "like")
    with pytest.raises(MappingError, match=r"no leaf takes tensor 'y', as rule 'b' would\. Give"):
        osl.save(tmp_path / "out", tree, mapping=mapping)
    optional = rule("b", tensor("y"), optional=True)
    osl.save(tmp_path / "out", tree, mapping=Mapping([first, optional]))
    for others in (
        [rule("b", tensor("x").transpose())],  # the other leaf gives its tensor
        [rule("b", None, tied_to="a")],
        [rule("b", fill((2,), 0, "float32"))],
    ):
        osl.save(tmp_path / "out", tree, mapping=Mapping([first, *others]), overwrite=True)
    layers = rule("layers.{i}", tensor("layers.{i}.w"))
    with pytest.raises(MappingError, match=r"no leaf 'layers.\{i\}'"):
        osl.save(tmp_path / "none", tree, mapping=Mapping([first, layers]))


def interleaved(step, index):
    layers = slice(index, None, step)
    return rule(f"part_{index}", stack(tensor("l.{i}.w"), over="i", indices=layers))


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_save_without_a_leaf_lacks_no_layers(tmp_path, absent):
    """Leaves that share a pattern of names hold layers of their own."""
    mapping = Mapping([interleaved(3, index) for index in range(3)])
    values = np.arange(24, dtype=F32).reshape(12, 2)
    tree = {f"part_{index}": values[index::3] for index in range(3)}
    osl.save(tmp_path / "whole", tree, mapping=mapping)
    stored = osl.load(tmp_path / "whole")
    assert stored.keys() == {f"l.{i}.w" for i in range(12)}
    for i in range(12):
        np.testing.assert_array_equal(stored[f"l.{i}.w"], values[i])
    lacking = {name: value for name, value in tree.items() if name != f"part_{absent}"}
    with pytest.raises(MappingError, match=rf"no leaf 'part_{absent}', .* would lack 'l.\{{i\}}"):
        osl.save(tmp_path / "out", lacking, mapping=mapping)
    assert not (tmp_path / "out").exists()


def test_a_save_without_the_last_layers_of_a_stack_is_refused(tmp_path):
    layers = stack(tensor("l.{i}.w"), over="i")
    mapping = Mapping([rule("a", layers.slice(0, 0, 4)), rule("b", layers.slice(0, 4))])
    values = np.arange(14, dtype=F32).reshape(7, 2)
    with pytest.raises(MappingError, match="there is no leaf 'b'"):
        osl.save(tmp_path / "out", {"a": values[:4]}, mapping=mapping)
    osl.save(tmp_path / "out", {"a": values[:4], "b": values[4:]}, mapping=mapping)
    assert len(osl.metadata(tmp_path / "out")) == 7


def test_a_leaf_that_other_leaves_give_may_be_absent(tmp_path):
    """All tensors that it takes are there, of every layer that is saved."""
    whole, up = tensor("l.{i}.w"), tensor("l.{i}.w").transpose()
    stacked = rule("c", stack(whole, over="i"))
    mapping = Mapping([rule("a.{i}", whole), rule("b.{i}", up), stacked])
    osl.save(tmp_path / "out", {"a": {"0": np.ones(2), "1": np.ones(2)}}, mapping=mapping)
    concatenated = concat([tensor("l.{i}.w"), tensor("x")], 0)
    mapping = Mapping([rule("a.{i}", whole), rule("x", tensor("x")), rule("b.{i}", concatenated)])
    osl.save(tmp_path / "more", {"a": {"0": np.ones(2)}, "x": np.ones(2)}, mapping=mapping)
    with pytest.raises(MappingError, match=r"there is no leaf 'b.\{i\}'"):
        osl.save(tmp_path / "less", {"x": np.ones(2)}, mapping=Mapping([*mapping.rules[1:]]))


def test_an_optional_leaf_lacks_no_part_of_a_tensor_either(tmp_path):
    gate = rule("g", tensor("gu").slice(0, 0, 2))
    up = rule("u", tensor("gu").slice(0, 2, 4), optional=True)
    with pytest.raises(MappingError, match=r"no leaf 'u', .* a part of 'gu'.*mapping.like"):
        osl.save(tmp_path / "out", {"g": np.ones(2, F32)}, mapping=Mapping([gate, up]))
    osl.save(tmp_path / "like", {"gu": np.zeros(2, F32)})
    mapping = Mapping([gate, up]).like(tmp_path / "like")
    osl.save(tmp_path / "out", {"g": np.ones(2, F32)}, mapping=mapping)


def test_a_part_of_a_part_says_no_more_than_its_own_length(tmp_path):
    qkv = tensor("qkv")
    rest = qkv.slice(0, 4)
    rules = [rule("q", qkv.slice(0, 0, 4)), rule("k", rest.slice(0, 0, 2))]
    values = np.arange(16, dtype=F32).reshape(8, 2)
    mapping = Mapping([*rules, rule("v", rest.slice(0, 2))])
    with pytest.raises(MappingError, match=r"there is no leaf 'v', .* a part of 'qkv'"):
        osl.save(tmp_path / "out", {"q": values[:4], "k": values[4:6]}, mapping=mapping)
    tree = {"q": values[:4], "k": values[4:6], "v": values[6:]}
    osl.save(tmp_path / "out", tree, mapping=mapping)
    np.testing.assert_array_equal(osl.load(tmp_path / "out")["qkv"], values)


PERMUTATION = (3, 0, 2, 1, 7, 5, 6, 4)


@pytest.mark.parametrize(
    ("expr", "tensors"),
    [
        (tensor("x").take(0, PERMUTATION).take(0, PERMUTATION[::-1]), {"x": 8}),
        (tensor("x").take(0, PERMUTATION), {"x": 8}),
        (tensor("x").pad(0, 0, 6), {"x": 2}),
        (tensor("x").pad(0, 3, 0), {"x": 5}),
        (concat([tensor("x"), tensor("y")], 0, sizes=[3, 5]), {"x": 3, "y": 5}),
        (stack(tensor("x.{i}"), over="i", indices=range(8)), {f"x.{i}": None for i in range(8)}),
        (stack(tensor("x.{i}"), over="i"), {f"x.{i}": None for i in range(8)}),
    ],
)
def test_lower_bounds_of_parts_determine_the_whole(tmp_path, expr, tensors):
    """Of what an expression makes leaves hold parts; their saves need no `like`."""
    rng = np.random.default_rng(0)
    shapes = {name: (2,) if n is None else (n, 2) for name, n in tensors.items()}
    stored = {name: rng.integers(1, 99, shape).astype(F32) for name, shape in shapes.items()}
    mapping = Mapping([rule("a", expr.slice(0, 0, 4)), rule("b", expr.slice(0, 4))])
    osl.save(tmp_path / "in", stored)
    tree = osl.load(tmp_path / "in", mapping=mapping)
    assert [leaf.shape[0] for leaf in tree.values()] == [4, 4]
    osl.save(tmp_path / "out", tree, mapping=mapping)
    saved = osl.load(tmp_path / "out")
    assert saved.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(saved[name], value)


def test_a_leaf_of_every_second_element_of_odd_rows(tmp_path):
    """Its elements are in every row, at other columns."""
    rows = 3000
    flat = tensor("x").rearrange("r c -> (r c)", c=3)
    mapping = Mapping([rule("a", flat.slice(0, 0, None, 2)), rule("b", flat.slice(0, 1, None, 2))])
    stored = {"x": np.arange(3 * rows, dtype=F32).reshape(rows, 3)}
    osl.save(tmp_path / "in", stored)
    mapping = mapping.like(tmp_path / "in")
    assert "loading only" not in mapping.explain(tmp_path / "in")
    tree = osl.load(tmp_path / "in", mapping=mapping)
    np.testing.assert_array_equal(tree["a"], stored["x"].reshape(-1)[::2])
    osl.save(tmp_path / "out", tree, mapping=mapping)
    np.testing.assert_array_equal(osl.load(tmp_path / "out")["x"], stored["x"])


def test_what_is_not_saved_is_ignored_in_loads(tmp_path):
    osl.save(tmp_path / "in", {"w": np.ones(2, F32), "vision_tower": {"a": np.ones(2, F32)}})
    rules = [rule("w", tensor("w"))]
    mapping = Mapping(rules, unsaved=["vision_tower.*"])
    assert osl.load(tmp_path / "in", mapping=mapping).keys() == {"w"}
    with pytest.raises(MappingError, match="would lack tensors that checkpoints of this model"):
        osl.save(tmp_path / "out", {"w": np.ones(2, F32)}, mapping=mapping)
    with pytest.raises(MappingError, match=r"no rule uses tensor 'vision_tower\.a'"):
        osl.load(tmp_path / "in", mapping=Mapping(rules, unsaved=["vision.*"]))


KERNELS = [rule("{m}.kernel", tensor("model.{m}.weight")), rule("head.kernel", tensor("lm_head"))]


def test_the_checkpoint_says_which_of_several_rules_makes_a_leaf():
    files = {"model.up.weight": ((2, 3), F32), "lm_head": ((4,), F32)}
    shapes = {"up.kernel": (2, 3), "head.kernel": (4,)}
    for leaves in (None, shapes, dict.fromkeys(shapes)):
        bound = Mapping(KERNELS).bind(files, leaves)
        assert {name: leaf_spec.shape for name, leaf_spec in bound.specs().items()} == shapes
    other = {"model.up.weight": ((2, 3), F32), "model.head.weight": ((4,), F32)}
    for leaves in (None, shapes):
        assert Mapping(KERNELS).bind(other, leaves).specs()["head.kernel"].shape == (4,)
    for leaves in (None, shapes):
        with pytest.raises(MappingError, match=r"2 rules make leaf 'head.kernel'"):
            Mapping(KERNELS).bind(files | other, leaves)
    with pytest.raises(MappingError, match=r"2 rules make leaf 'head.kernel'"):
        Mapping(KERNELS).bind({"model.up.weight": ((2, 3), F32)}, shapes)


def test_what_abstract_and_metadata_accept_loads_and_saves(tmp_path):
    tensors = {"model.up.weight": np.ones((2, 3), F32), "lm_head": np.zeros(4, F32)}
    path, mapping = save(tmp_path / "hf", tensors), Mapping(KERNELS)
    assert "head.kernel" in mapping.explain(path)
    assert osl.metadata(path, mapping=mapping).keys() == {"up.kernel", "head.kernel"}
    loaded = osl.load(path, mapping.abstract(path), mapping=mapping)
    np.testing.assert_array_equal(loaded["head"]["kernel"], tensors["lm_head"])
    osl.save(tmp_path / "back", loaded, mapping=mapping.like(path))
    assert osl.load(tmp_path / "back").keys() == tensors.keys()


@pytest.mark.parametrize("seed", range(4))
def test_leaves_are_made_of_the_same_whether_they_are_given_or_not(seed):
    rng = np.random.default_rng(seed)
    targets = ["{a}.k", "head.k", "x_{a}.k", "{a}.{b}", "{b}.{a}", "head.{a}", "{a}", "x.{a}.k"]
    sources = ["m.{a}", "m.{a}.w", "n.{b}", "{a}", "m.{b}.{a}", "w", "m.x_{a}"]
    names = ["m", "n", "w", "m.head", "m.x", "m.x.w", "m.head.w", "n.head", "n.k", "m.k", "m.x.y"]
    accepted = 0
    for _ in range(500):
        rules = []
        for target in rng.choice(targets, rng.integers(1, 4), replace=False):
            fit = [s for s in sources if set(wildcards(s)) <= set(wildcards(target))]
            parts = [tensor(s) for s in rng.choice(fit, rng.integers(1, 3))]
            expr = parts[0] if len(parts) == 1 else concat(parts, 0)
            rules.append(rule(str(target), expr, optional=True))
        files = {str(n): ((2,), F32) for n in rng.choice(names, rng.integers(1, 7), replace=False)}
        mapping = Mapping(rules, strict=False)
        try:
            free = mapping.bind(files)
        except MappingError:
            continue
        accepted += len(free.expressions)
        given = mapping.bind(
            files, {n: expression.shape for n, expression in free.expressions.items()}
        )
        assert given.expressions == free.expressions
        for leaf, expression in free.expressions.items():
            assert mapping.bind(files, {leaf: None}).expressions == {leaf: expression}
    assert accepted > 200


ABSENT = {
    "blocks.{i}.bias": tensor("model.layers.{i}.bias"),
    "bias": tensor("model.bias"),
    "biases": stack(tensor("model.layers.{i}.bias"), over="i"),
    "some": stack(tensor("model.layers.{i}.bias"), over="i", indices=[0, 1]),
}


@pytest.mark.parametrize("target", ABSENT)
def test_a_rule_whose_tensors_are_not_there(target):
    """Without a word from the user that is an error; a model that does not want it has none."""
    name = next(ABSENT[target].patterns())
    required = Mapping([*RULES, rule(target, ABSENT[target])])
    with pytest.raises(MappingError, match="there is no tensor") as caught:
        required.leaf_facts(specs_of(llama()))
    assert name in str(caught.value) or name.replace("{i}", "0") in str(caught.value)
    assert set(required.leaf_names(llama())) == set(SHAPES)
    required.bind(specs_of(llama()), SHAPES)
    optional = Mapping([*RULES, rule(target, ABSENT[target], optional=True)])
    assert set(optional.leaf_facts(specs_of(llama()))) == set(SHAPES)
    assert repr(optional.rules[-1]).endswith(", optional=True)")


def test_a_leaf_with_a_tensor_of_its_own_is_tied_to_none():
    """Both are saved: what is tied in name alone would be lost."""
    rules = [rule("embed", tensor("e")), rule("head", tensor("h").transpose(), tied_to="embed")]
    specs = {"e": ((6, 4), F32), "h": ((6, 4), F32)}
    leaves = {"embed": ((6, 4), F32), "head": ((4, 6), F32)}
    assert not Mapping(rules).bind(specs).ties
    for mapping in (
        Mapping(rules),
        Mapping(rules).like(specs),
        Mapping(rules).like({"e": specs["e"]}),
    ):
        assert set(mapping.inverse().bind(leaves).expressions) == {"e", "h"}


def test_a_save_that_needs_the_names_of_files_says_so():
    rules = [osl.rule("{i}.q", osl.tensor("m.{i}.q.w").transpose())]
    mapping = osl.Mapping([*rules, osl.rule("{i}.{x}", osl.tensor("m.{i}.{x}"))])
    files = {"m.0.q.w": ((2, 3), np.float32), "m.0.norm": ((2,), np.float32)}
    leaves = mapping.leaf_facts(files)
    with pytest.raises(MappingError, match=r"2 rules make leaf '0\.q'.*mapping\.like\(path\)"):
        mapping.inverse().bind(leaves)
    assert {*mapping.like(files).inverse().bind(leaves).expressions} == {*files}


def test_like_refuses_what_would_be_lost():
    specs = specs_of(llama()) | {f"vision.{i}.w": ((2,), np.dtype(F32)) for i in range(3)}
    for mapping in (Mapping(RULES, ignore="vision.*"), Mapping(RULES, strict=False)):
        with pytest.raises(MappingError, match=r"lack 3 of the .* tensors.*'vision.#.w'"):
            mapping.like(specs)
        with pytest.raises(MappingError, match=r"lack 1 of the"):
            mapping.like(specs, leave_out="vision.{0..1}.*")
        assert set(mapping.like(specs, leave_out=["vision.*"]).files) == set(specs)
    mapping = Mapping(RULES, buffers="vision.*")
    assert set(mapping.like(specs).files) == set(specs)
    assert set(mapping.leaf_facts(specs)) == set(Mapping(RULES).leaf_facts(specs_of(llama())))
    with pytest.raises(MappingError, match=r"Mapping.like\(leave_out=...\)"):
        Mapping(RULES).like(specs, leave_out="[")


@pytest.mark.parametrize("indices", [[0, 1], slice(2)])
def test_like_counts_tensors_that_are_bound(tmp_path, indices):
    """Names that fit a pattern are lost, too, where no index of the stack has them."""
    files = save(tmp_path, {f"l.{i}.w": np.ones(2, F32) for i in range(4)})
    expr = stack(tensor("l.{i}.w"), over="i", indices=indices)
    mapping = Mapping([rule("w", expr)], ignore=["l.{2,3}.w"])
    with pytest.raises(MappingError, match=r"lack 2 of the checkpoint's 4 tensors.*'l.#.w'"):
        mapping.like(files)
    saving = mapping.like(files, leave_out=["l.{2,3}.w"])
    osl.save(tmp_path / "out", osl.load(files, mapping=mapping), mapping=saving)
    assert set(osl.metadata(tmp_path / "out")) == {"l.0.w", "l.1.w"}


def test_targets_found_from_several_tensors():
    qkv = rule("a.{i}.qkv", concat([tensor("l.{i}.q"), tensor("l.{i}.k"), tensor("all")], 0))
    specs = {"l.0.q": ((2,), F32), "l.0.k": ((2,), F32), "all": ((1,), F32), "l.1.q": ((2,), F32)}
    with pytest.raises(MappingError, match=r"leaf 'a.1.qkv': there is no tensor 'l.1.k'"):
        Mapping([qkv]).leaf_facts(specs)
    specs["l.1.k"] = ((3,), F32)
    given = Mapping([qkv]).leaf_facts(specs)
    assert {name: leaf_spec.shape for name, leaf_spec in given.items()} == {
        "a.0.qkv": (5,),
        "a.1.qkv": (6,),
    }
    both = rule("{i}.{j}", concat([tensor("a.{i}"), tensor("b.{j}")], 0))
    specs = {f"{n}.{i}": ((1,), F32) for n in "ab" for i in range(2)}
    assert list(Mapping([both]).leaf_facts(specs)) == ["0.0", "0.1", "1.0", "1.1"]


def test_fills_alone():
    rules = [rule("scale", fill((2,), 1, "float32"))]
    assert list(Mapping(rules).leaf_facts({})) == ["scale"]
    rules = [rule("{i}.scale", fill((2,), 1, "float32"))]
    with pytest.raises(MappingError, match=r"does not name the leaves of '{i}.scale'"):
        Mapping(rules).leaf_facts({})
    assert list(Mapping(rules).bind({}, {"7.scale": (2,)}).expressions) == ["7.scale"]


def test_everything_wrong_in_one_error():
    tensors = llama()
    del tensors["model.layers.4.q.weight"]
    tensors |= {f"model.layers.{i}.bias": np.zeros(16, np.float32) for i in range(LAYERS)}
    tensors["final.alpha"] = np.zeros(16, np.float32)
    rules = [
        rule("embed", tensor("model.embde.weight")),
        rule("layers.q", stack(Q, over="i")),
        rule(
            "blocks.{i}.up",
            tensor("model.layers.{i}.up.weight").rearrange("(h d) e -> e h d", d=48),
        ),
        rule("{x}.norm", tensor("{x}.alpha")),
        NORM,
        rule("layers.down", scanned("down", axis=1)),
    ]
    leaves = {
        "embed": (100, 16),
        "layers.q": (LAYERS, 16, 4, 8),
        "final.norm": (16,),
        "final.nrm": (16,),
        "layers.down": (LAYERS, 64, 16),
        **{f"blocks.{i}.up": (16, 2, 32) for i in range(LAYERS)},
    }
    with pytest.raises(MappingError) as caught:
        Mapping(rules).bind(specs_of(tensors), leaves)
    up = "tensor('model.layers.{i}.up.weight').rearrange('(h d) e -> e h d', d=48)"
    assert str(caught.value).splitlines() == [
        "The mapping does not fit the checkpoint and the model: 13 problems.",
        "  - 2 rules make leaf 'final.norm': those for '{x}.norm' and 'final.norm'.",
        "  - no rule makes leaf 'final.nrm'. The nearest targets of rules are 'final.norm'. Add"
        " rules for such, or leave them out of the tree.",
        "  - leaf 'embed': there is no tensor 'model.embde.weight'. The nearest tensors are"
        " 'model.embed.weight', 'model.norm.weight', 'model.layers.5.q.weight'.",
        "  - leaf 'layers.q': stack(tensor('model.layers.{i}.q.weight')"
        ".rearrange('(h d) e -> e h d', d=8), over='i'): there are tensors"
        " 'model.layers.{i}.q.weight' for i = 0..3, 5, but none for 4. Complete the checkpoint, or"
        " say which to stack: stack(..., over='i', indices=[...]).",
        "  - leaf 'layers.down' has shape [6, 64, 16], but"
        " stack(tensor('model.layers.{i}.down.weight').transpose(), over='i', axis=1) gives shape"
        " [64, 6, 16] float32 of 'model.layers.0.down.weight' and 5 more. The axes are in another"
        " order: transpose, rearrange, or stack along another one.",
        f"  - leaf 'blocks.0.up': {up}, given shape [64, 16] float32 of"
        " 'model.layers.0.up.weight': axis 0 has extent 64, which is not a multiple of d=48."
        " (5 more like it)",
        "  - no rule uses tensor 'model.embed.weight'. The nearest names that rules take and"
        " the checkpoint lacks are 'model.embde.weight'. Add rules for such, or name"
        " them in Mapping(..., ignore=[...]).",
        "  - no rule uses tensor 'model.layers.0.bias', nor 5 more that differ in numbers only.",
    ]


def test_a_wrong_head_count_and_two_rules_of_one_name():
    rules = [EMBED, rule("layers.q", stack(Q, over="i")), NORM]
    rules += [rule("layers.mlp", scanned("up")), rule("layers.mlp", scanned("down"))]
    leaves = {"embed": (100, 16), "final.norm": (16,), "layers.mlp": None}
    leaves["layers.q"] = (LAYERS, 16, 2, 16)
    with pytest.raises(MappingError) as caught:
        Mapping(rules).bind(specs_of(llama()), leaves)
    assert str(caught.value).splitlines() == [
        "The mapping does not fit the checkpoint and the model: 2 problems.",
        "  - 2 rules make leaf 'layers.mlp': those for"
        " stack(tensor('model.layers.{i}.up.weight').transpose(), over='i') and"
        " stack(tensor('model.layers.{i}.down.weight').transpose(), over='i').",
        "  - leaf 'layers.q' has shape [6, 16, 2, 16], but"
        " stack(tensor('model.layers.{i}.q.weight').rearrange('(h d) e -> e h d', d=8), over='i')"
        " gives shape [6, 16, 4, 8] float32 of"
        " 'model.layers.0.q.weight' and 5 more. There are as many elements: mend the sizes (such as"
        " d= of heads), or reshape.",
    ]


def test_a_typo_is_told_without_a_model_too():
    rules = [*RULES[1:], rule("embed", tensor("model.embde.weight"))]
    with pytest.raises(MappingError) as caught:
        Mapping([r for r in rules if r.tied_to is None]).leaf_facts(specs_of(llama()))
    assert str(caught.value) == (
        "The mapping does not fit the checkpoint and the model: 2 problems.\n"
        "  - leaf 'embed': there is no tensor 'model.embde.weight'. The nearest tensors are"
        " 'model.embed.weight', 'model.norm.weight', 'model.layers.5.q.weight'.\n"
        "  - no rule uses tensor 'model.embed.weight'. The nearest names that rules take and"
        " the checkpoint lacks are 'model.embde.weight'. Add rules for such, or name"
        " them in Mapping(..., ignore=[...])."
    )


def test_missing_tensors_of_one_layer_are_all_told():
    specs = specs_of(llama())
    del specs["model.layers.2.q.weight"], specs["model.layers.2.up.weight"]
    both = [tensor(f"model.layers.{{i}}.{name}.weight") for name in ("q", "up", "down")]
    both[2] = both[2].slice(1, 0, 16)
    rules = [rule("fused", stack(concat(both, 0), over="i"))]
    with pytest.raises(MappingError) as caught:
        Mapping(rules, strict=False).bind(specs)
    assert str(caught.value) == (
        "The mapping does not fit the checkpoint and the model: 2 problems.\n"
        "  - leaf 'fused': there is no tensor 'model.layers.2.q.weight'. The nearest tensors are"
        " 'model.layers.5.q.weight', 'model.layers.4.q.weight', 'model.layers.3.q.weight'.\n"
        "  - leaf 'fused': there is no tensor 'model.layers.2.up.weight'. The nearest tensors are"
        " 'model.layers.5.up.weight', 'model.layers.4.up.weight', 'model.layers.3.up.weight'."
    )


def test_layers_of_unlike_shapes_do_not_stack():
    specs = {"l.0.w": ((2, 3), F32), "l.1.w": ((2, 4), F32)}
    with pytest.raises(MappingError) as caught:
        Mapping([rule("w", stack(tensor("l.{i}.w"), over="i"))]).bind(specs)
    assert (
        "index 0 gives shape [2, 3] float32 of 'l.0.w', but index 1 gives shape [2, 4] float32 of"
        " 'l.1.w'" in str(caught.value)
    )


def test_ignored_and_unused_tensors():
    tensors = llama() | {f"model.layers.{i}.rotary.inv_freq": np.zeros(4) for i in range(3)}
    with pytest.raises(MappingError, match=r"'model.layers.0.rotary.inv_freq', nor 2 more"):
        Mapping(RULES).bind(specs_of(tensors))
    for options in ({"ignore": "*.inv_freq"}, {"ignore": ["x", "*.rotary.*"]}, {"strict": False}):
        assert set(Mapping(RULES, **options).bind(specs_of(tensors)).expressions) == set(SHAPES)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: rule("a", tensor("x.{i}")), r"nothing gives {i} of 'x.{i}' a value"),
        (lambda: rule("a", stack(tensor("x.{i}.{j}"), "i")), r"nothing gives {j}"),
        (lambda: rule("a.{i}", stack(tensor("x.{i}"), "i")), "'i' is stacked over, and in the tar"),
        (lambda: rule("a.{i", tensor("x")), "a wildcard is written as"),
        (lambda: rule("a", None), "neither an expression nor a leaf to be tied to"),
        (lambda: rule("a", None, tied_to="b.{i}"), r"nothing gives {i} of 'b.{i}' a value"),
        (lambda: Mapping({"a": tensor("b")}), r"takes a list of rules.*found: 'a'"),
        (lambda: Mapping([], ignore="a["), r"Mapping\(ignore=...\): Pattern 'a\['"),
    ],
)
def test_malformed_rules(make, problem):
    with pytest.raises(MappingError, match=problem):
        make()


def test_explain():
    lines = Mapping(RULES).explain(specs_of(llama(1))).splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["name", "shape", "dtype", "made of", "takes"],
        ["embed", "[100, 16]", "float32", "tensor('model.embed.weight')", "model.embed.weight"],
        [
            "head",
            "[16, 100]",
            "float32",
            "tensor('model.embed.weight').transpose() (tied to 'embed')",
            "model.embed.weight",
        ],
        [
            "layers.q",
            "[1, 16, 4, 8]",
            "float32",
            "stack(tensor('model.layers.{i}.q.weight').rearrange('(h d) e -> e h d', d=8),"
            " over='i')",
            "model.layers.0.q.weight",
        ],
        [
            "blocks.0.up",
            "[64, 16]",
            "float32",
            "tensor('model.layers.{i}.up.weight')",
            "model.layers.0.up.weight",
        ],
        [
            "layers.down",
            "[64, 1, 16]",
            "float32",
            "stack(tensor('model.layers.{i}.down.weight').transpose(), over='i', axis=1)",
            "model.layers.0.down.weight",
        ],
        ["final.norm", "[16]", "float32", "tensor('model.norm.weight')", "model.norm.weight"],
    ]
    assert "model.layers.0.q.weight … model.layers.5.q.weight (6 tensors)" in Mapping(
        RULES
    ).explain(specs_of(llama()))
    costly = Mapping([rule("inverse", opaque(np.linalg.inv, tensor("x"), shape=(2, 2), dtype=F32))])
    lines = costly.explain({"x": ((2, 2), F32)}).splitlines()
    assert lines[2:4] == [
        "inverse: every shard reads all that its opaque function takes.",
        "For loading only. The mapping cannot save: 1 problem.",
    ]
    parts = Mapping([rule("xy", concat([tensor("x"), tensor("y")], 0))])
    text = parts.explain({"x": ((2, 2), F32), "y": ((3, 2), F32)})
    assert "For loading only." in text
    assert "Give concat(..., sizes=[...]), or save through mapping.like(path)" in text


def test_fingerprints_cover_all_indices():
    """The `repr` of an expression shows only some."""
    ways = [[*range(20)], [*range(18), 19, 18]]
    a, b = (Mapping([rule("a", tensor("b").take(0, way))]) for way in ways)
    assert repr(a) == repr(b)
    c = Mapping([rule("a", tensor("b").take(0, ways[0]))])
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(a) == fingerprint(c)
    assert described_rule(a.rules[0]) != described_rule(b.rules[0])
    assert described_rule(a.rules[0]) == described_rule(c.rules[0])


def test_fingerprints_have_functions_by_their_names():
    def digest(function):
        expr = opaque(function, tensor("b"), shape=(2,), dtype=F32)
        return fingerprint(Mapping([rule("a", expr)]))

    functions = [np.add, np.multiply, len, digest, functools.partial(digest, 1), threading.Lock]
    functions += [functools.partial(digest, 2), jax.jit(digest)]
    assert len({*map(digest, functions)}) == len(functions) - 1  # jitted or not
    assert [*map(digest, functions)] == [*map(digest, functions)]


def test_repr_of_a_mapping():
    text = repr(Mapping([EMBED, RULES[1]], ignore="*.inv_freq", strict=False))
    assert text == (
        "Mapping([\n"
        "    rule('embed', tensor('model.embed.weight')),\n"
        "    rule('head', tensor('model.embed.weight').transpose(), tied_to='embed'),\n"
        "], ignore=['*.inv_freq'], strict=False)"
    )


def test_paths(tmp_path):
    tensors = llama()
    save(tmp_path, tensors, files=3)
    mapping = Mapping(RULES)
    assert mapping.leaf_facts(tmp_path) == mapping.leaf_facts(specs_of(tensors))
    assert mapping.explain(str(tmp_path)) == mapping.explain(specs_of(tensors))
    with pytest.raises(CheckpointNotFoundError):
        mapping.explain(tmp_path / "nothing")


def test_only_headers_of_needed_files_are_read(tmp_path):
    """A broken file is not noticed by a mapping that needs nothing of it."""
    tensors = llama()
    assert next(iter(tensors)) == "model.embed.weight"
    save(tmp_path, tensors, files=len(tensors))
    for broken in sorted(tmp_path.glob("*.safetensors"))[1:]:
        broken.write_bytes(b"x")
    mapping = Mapping([EMBED], strict=False)
    assert mapping.leaf_facts(tmp_path)["embed"].shape == (100, 16)
    assert mapping.match(tensors).needs() == ["model.embed.weight"]
    matched = Mapping(RULES).match(tensors, {"layers.q": None, "blocks.3.up": None})
    assert len(matched.needs()) == LAYERS + 1


def test_tensors_of_several_dtypes_are_stacked_when_they_are_cast():
    """The error says how, where they differ in nothing else."""
    specs = {"l.0.w": ((2, 3), np.float32), "l.1.w": ((2, 3), np.float16)}
    layers = osl.tensor("l.{i}.w")
    with pytest.raises(osl.MappingError, match=r"cast them: osl\.tensor.*dtype='float32'"):
        osl.Mapping([osl.rule("w", osl.stack(layers, over="i"))]).leaf_facts(specs)
    cast = osl.Mapping([osl.rule("w", osl.stack(layers.cast("float32"), over="i"))])
    assert cast.leaf_facts(specs)["w"] == ((2, 2, 3), np.float32)
