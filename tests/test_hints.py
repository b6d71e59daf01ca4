"""What an error says to do works: each case makes the error, then does it."""

from __future__ import annotations

import json

import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same_bits, save
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping import concat, fill, opaque, rule, stack, tensor

F32 = np.dtype(np.float32)
W = np.arange(24, dtype=F32).reshape(4, 6)
CASES = {}


def follows(case):
    """Registers a generator of calls that fail, and words of what they say is to be done.

    What stands after a `yield` does that.
    """
    CASES[case.__name__] = case
    return case


@pytest.mark.parametrize("name", CASES)
def test_doing_what_an_error_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call, words in CASES[name](tmp_path):
        with pytest.raises((osl.SafetensorsLayoutError, ValueError, TypeError)) as caught:
            call()
        assert words in str(caught.value)


def loads(path, *rules, tree=None, **options):
    return lambda: osl.load(path, tree, mapping=osl.Mapping(rules, **options))


def saves(path, tree, *rules, **options):
    return lambda: osl.save(path, tree, mapping=osl.Mapping(rules, **options), overwrite=True)


def there_and_back(path, tree, *rules):
    """Saves a tree through rules, and loads it as it was."""
    saves(path, tree, *rules)()
    loaded = loads(path, *rules)()
    assert loaded.keys() == tree.keys()
    for name, value in tree.items():
        assert_same_bits(loaded[name], np.asarray(value))


# Mappings


@follows
def parts_whose_length_nothing_says(tmp):
    parts = [tensor("a"), tensor("b")]
    tree = {"leaf": W}
    yield (
        saves("to", tree, rule("leaf", concat(parts, 0))),
        "Give concat(..., sizes=[...]), or save",
    )
    there_and_back("to", tree, rule("leaf", concat(parts, 0, sizes=[1, None])))
    mapping = osl.Mapping([rule("leaf", concat(parts, 0))])
    osl.save("like", tree, mapping=mapping.like("to"))
    assert osl.load("like")["a"].shape == (1, 6)


@follows
def a_reshape_that_is_saved(tmp):
    yield (
        saves("to", {"leaf": W}, rule("leaf", tensor("a").reshape(4, 6))),
        "Write it with rearrange",
    )
    there_and_back("to", {"leaf": W}, rule("leaf", tensor("a").rearrange("(h d) -> h d", d=6)))
    osl.save(
        "to",
        {"leaf": W},
        mapping=osl.Mapping([rule("leaf", tensor("a").reshape(4, 6))]).like("to"),
        overwrite=True,
    )


@follows
def sizes_of_factors(tmp):
    path = save(tmp / "hf", {"a": W})
    yield (
        loads(path, rule("leaf", tensor("a").rearrange("(h d) e -> h d e"))),
        "rearrange(..., d=...)",
    )
    assert loads(path, rule("leaf", tensor("a").rearrange("(h d) e -> h d e", d=2)))()[
        "leaf"
    ].shape == (2, 2, 6)
    yield lambda: tensor("a").rearrange("h d"), "'a (b c) ... -> b a c ...'"
    assert loads(path, rule("leaf", tensor("a").rearrange("a (b c) -> b a c", c=2)))()[
        "leaf"
    ].shape == (3, 4, 2)


@follows
def a_gap_in_a_stack(tmp):
    path = save(tmp / "hf", {"l.0": W, "l.2": W})
    yield loads(path, rule("leaf", stack(tensor("l.{i}"), over="i"))), "indices=[...])"
    assert loads(path, rule("leaf", stack(tensor("l.{i}"), over="i", indices=[0, 2])))()[
        "leaf"
    ].shape == (2, 4, 6)


@follows
def a_stack_of_several_dtypes(tmp):
    path = save(tmp / "hf", {"l.0": W, "l.1": W.astype(ml_dtypes.bfloat16)})
    yield (
        loads(path, rule("leaf", stack(tensor("l.{i}"), over="i"))),
        "osl.tensor(...).cast('float32')",
    )
    assert (
        loads(path, rule("leaf", stack(tensor("l.{i}").cast("float32"), over="i")))()["leaf"].dtype
        == F32
    )


@follows
def a_name_in_place_of_an_expression(tmp):
    yield lambda: rule("leaf", "a"), "Did you mean osl.tensor('a')?"
    rule("leaf", osl.tensor("a"))


@follows
def arithmetic_that_does_not_invert(tmp):
    half = W.astype(ml_dtypes.bfloat16)
    yield (
        saves("to", {"leaf": W}, rule("leaf", tensor("a").scale(3))),
        "or accept the rounding with lossy_inverse",
    )
    saves("to", {"leaf": W}, rule("leaf", tensor("a").scale(3, lossy_inverse=True)))()
    halves = save(tmp / "half", {"a": half})
    doubled = osl.Mapping([rule("leaf", tensor("a").cast("float32").scale(0.5))])
    osl.save("to", {"leaf": W}, mapping=doubled.like(halves), overwrite=True)
    eighth = osl.Mapping([rule("leaf", tensor("a").scale(2**-8))])
    yield lambda: osl.save("to", {"leaf": half}, mapping=eighth), "as .cast('float32') before"
    wide = osl.Mapping([rule("leaf", tensor("a").cast("float32").scale(2**-8))])
    osl.save("to", {"leaf": W}, mapping=wide.like(halves), overwrite=True)
    yield (
        saves("to", {"leaf": W}, rule("leaf", tensor("a").add(1))),
        "Accept the rounding with lossy_inverse",
    )
    there_and_back("to", {"leaf": W}, rule("leaf", tensor("a").add(1, lossy_inverse=True)))
    path = save(tmp / "hf", {"a": W})
    narrow = rule("leaf", tensor("a").cast("float16"))
    yield (
        lambda: osl.save(
            "to", {"leaf": W}, mapping=osl.Mapping([narrow]).like(path), overwrite=True
        ),
        "or accept the rounding",
    )
    lossy = rule("leaf", tensor("a").cast("float16", lossy_inverse=True))
    osl.save("to", {"leaf": W}, mapping=osl.Mapping([lossy]).like(path), overwrite=True)
    integers = save(tmp / "int", {"a": W.astype(np.int8)})
    yield (
        loads(integers, rule("leaf", tensor("a").scale(0.5))),
        "Cast to a floating-point dtype first.",
    )
    assert (
        loads(integers, rule("leaf", tensor("a").cast("float32").scale(0.5)))()["leaf"][0, 1] == 0.5
    )
    yield loads(integers, rule("leaf", tensor("a").scale(100))), "Cast to a wider dtype"
    assert (
        loads(integers, rule("leaf", tensor("a").cast("int32").scale(100)))()["leaf"].max() == 2300
    )


@follows
def copies_that_differ(tmp):
    pair = {"leaf": np.stack([W, W + 1])}
    repeated = tensor("a").rearrange("h d -> 1 h d")
    yield saves("to", pair, rule("leaf", repeated.repeat(0, 2))), "repeat(..., lossy_inverse=True)"
    saves("to", pair, rule("leaf", repeated.repeat(0, 2, lossy_inverse=True)))()
    there_and_back("to", {"leaf": np.stack([W, W])}, rule("leaf", repeated.repeat(0, 2)))
    tied = {"a": W, "b": W + 1}
    rules = rule("a", tensor("x")), rule("b", tensor("x"), tied_to="a")
    yield saves("to", tied, *rules), "rule('b', ..., tied_to='a', lossy_inverse=True)"
    saves("to", tied, rules[0], rule("b", tensor("x"), tied_to="a", lossy_inverse=True))()
    there_and_back("to", {"a": W, "b": W}, *rules)
    yield saves("to", {"a": W, "b": W}, rules[0], rule("b", tensor("x"))), "rule(..., tied_to=...)"
    yield (
        saves("to", {"a": W, "b": W.astype(np.float16)}, *rules),
        "rule('b', ..., tied_to='a', lossy_inverse=True)",
    )
    saves(
        "to",
        {"a": W, "b": W.astype(np.float16)},
        rules[0],
        rule("b", tensor("x"), tied_to="a", lossy_inverse=True),
    )()
    yield saves("to", {"a": W}, rule("a", tensor("x"), tied_to="a")), "saved a rule without tied_to"
    there_and_back("to", {"a": W}, rule("a", tensor("x")))
    yield lambda: rule("a", tensor("x"), lossy_inverse=True), "Only a tied leaf has lossy_inverse"
    part = tensor("x").slice(0, 1, 3)
    tree = {"a": W, "b": W[1:3]}
    yield saves("to", tree, rules[0], rule("b", part, tied_to="a")), "Accept that: lossy_inverse="
    saves("to", tree, rules[0], rule("b", part, tied_to="a", lossy_inverse=True))()


@follows
def leaves_and_tensors_without_a_rule(tmp):
    path = save(tmp / "hf", {"a": W, "b": W})
    a, b = rule("a", tensor("a")), rule("b", tensor("b"))
    yield loads(path, a), "or name them in Mapping(..., ignore=[...])"
    assert loads(path, a, ignore=["b"])().keys() == {"a"}
    assert loads(path, a, b)().keys() == {"a", "b"}
    yield loads(path, a, b, tree={"a": W}), "Give the tree that leaf."
    loads(path, a, b, tree={"a": W, "b": W})()
    yield loads(path, a, tree={"a": W, "c": W}, ignore="b"), "or leave them out of the tree"
    loads(path, a, tree={"a": W}, ignore="b")()
    yield loads(path, a, b, rule("c.{i}", tensor("c.{i}"))), "rule(..., optional=True)"
    loads(path, a, b, rule("c.{i}", tensor("c.{i}"), optional=True))()
    yield loads(path, a, b, rule("f.{i}", fill((2,), 0, F32))), "Give the model's leaves."
    loads(
        path,
        a,
        b,
        rule("f.{i}", fill((2,), 0, F32)),
        tree={"a": W, "b": W, "f": [np.zeros(2, F32)]},
    )()
    yield saves("to", {"a": W}, a, b), "Give the leaf, or say rule(..., optional=True)."
    saves("to", {"a": W}, a, rule("b", tensor("b"), optional=True))()
    saves("to", {"a": W, "b": W}, a, b)()
    yield lambda: osl.Mapping([a]).like(path), "leave_out=['vision_tower.*', ...])"
    osl.save("to", {"a": W}, mapping=osl.Mapping([a]).like(path, leave_out=["b"]), overwrite=True)
    yield saves("to", {"a": W}, a, unsaved="b"), "leave_out=['b'])"
    mapping = osl.Mapping([a], unsaved="b").like(path, leave_out=["b"])
    osl.save("to", {"a": W}, mapping=mapping, overwrite=True)


@follows
def a_part_of_an_optional_tensor(tmp):
    rules = [
        rule(name, tensor("x").slice(0, n, n + 2), optional=True)
        for n, name in ((0, "a"), (2, "b"))
    ]
    needed = [rule(name, tensor("x").slice(0, n, n + 2)) for n, name in ((0, "a"), (2, "b"))]
    short = save(tmp / "short", {"x": W[:2]})
    for each in (rules, needed):
        yield saves("to", {"a": W[:2]}, *each), "Give the leaf, or save through mapping.like(path)"
        there_and_back("to", {"a": W[:2], "b": W[2:]}, *each)
        osl.save("like", {"a": W[:2]}, mapping=osl.Mapping(each).like(short), overwrite=True)


@follows
def several_rules_for_a_leaf(tmp):
    path = save(tmp / "hf", {"a": W})
    rules = rule("w", tensor("a"), optional=True), rule("w", tensor("b").transpose(), optional=True)
    yield saves("to", {"w": W}, *rules), "save through mapping.like(path) of such a checkpoint"
    osl.save("to", {"w": W}, mapping=osl.Mapping(rules).like(path))


@follows
def shapes_that_do_not_fit(tmp):
    path = save(tmp / "hf", {"a": W})
    tree = {"w": jax.ShapeDtypeStruct((6, 4), F32)}
    yield loads(path, rule("w", tensor("a")), tree=tree), "transpose, rearrange, or stack along"
    loads(path, rule("w", tensor("a").transpose()), tree=tree)()
    tree = {"w": jax.ShapeDtypeStruct((2, 2, 6), F32)}
    heads = "(h d) e -> h d e"
    yield (
        loads(path, rule("w", tensor("a").rearrange(heads, d=4)), tree=tree),
        "mend the sizes (such as d=",
    )
    loads(path, rule("w", tensor("a").rearrange(heads, d=2)), tree=tree)()
    yield (
        lambda: osl.load(path, {"a": jax.ShapeDtypeStruct((6, 4), F32)}),
        "which osl.metadata(path) has",
    )
    osl.load(path, {"a": jax.ShapeDtypeStruct(osl.metadata(path)["a"].shape, F32)})
    osl.load(path, {"w": tree["w"]}, mapping=osl.Mapping([rule("w", tensor("a").reshape(2, 2, 6))]))


# Mappings on live arrays


@follows
def live_arrays(tmp):
    whole = osl.Mapping([rule("a", tensor("a")), rule("b", tensor("a"), tied_to="a")])
    a, b = jnp.arange(4.0), jnp.arange(4.0)
    yield lambda: whole.unapply({"a.b": a, "a": {"b": b}}), "rename one of the two"
    whole.unapply({"a": a, "b": b})
    yield lambda: whole.unapply({"a": a, "b": np.arange(4.0, dtype=F32)}), "with jax.device_put"
    whole.unapply({"a": a, "b": jax.device_put(np.arange(4.0, dtype=F32))})
    more = {"a": a, "b": b, "step": 2, "rng": jax.random.key(0)}
    yield lambda: whole.unapply(more), "Drop other leaves, with mapping.drop(...)"
    whole.drop("step", "rng").unapply(more)
    yield lambda: whole.unapply({"a": a, "b": jax.random.key(0)}), "jax.random.key_data"
    osl.Mapping([rule("a", tensor("a"))]).unapply({"a": jax.random.key_data(jax.random.key(0))})
    yield (
        lambda: jax.jit(whole.unapply)({"a": a, "b": b}),
        "Call apply and unapply outside of jax.jit",
    )
    lossy = rule("b", tensor("a"), tied_to="a", lossy_inverse=True)
    jax.jit(osl.Mapping([rule("a", tensor("a")), lossy]).unapply)({"a": a, "b": b})
    path = save(tmp / "hf", {"a": np.ones(3, F32), "b": np.full(3, 100, np.int8)})
    tensors = jax.tree.map(jnp.asarray, osl.load(path))
    tripled = osl.Mapping([rule("b", tensor("b").scale(3))], ignore="a")
    yield lambda: tripled.apply(tensors), "Cast to a wider dtype"
    wide = osl.Mapping([rule("b", tensor("b").cast("int32").scale(3))], ignore="a")
    assert wide.apply(tensors)["b"][0] == 300
    doubled = osl.Mapping(
        [rule("a", opaque(lambda x: 2 * x, tensor("a"), shape=(3,), dtype=F32))], ignore="b"
    )
    yield lambda: doubled.apply(tensors), "Save these weights and load them"
    osl.load(path, mapping=doubled)


# Trees that are loaded


@follows
def trees_that_are_loaded(tmp):
    path = save(tmp / "hf", {"a": W, "b": W, "n": np.array([300, 2], np.int64)})
    strict = osl.ReadOptions(strict=True)
    yield (
        lambda: osl.load(path, {"a": W}, options=strict),
        "Put `...` for what to leave out, or load",
    )
    osl.load(path, {"a": W, "b": ..., "n": ...}, options=strict)
    osl.load(path, {"a": W}, options=osl.ReadOptions(strict=False))
    yield lambda: osl.load(path, W), "give {'name': leaf}, or patterns by `only=`"
    osl.load(path, {"a": W})
    assert [*osl.load(path, only="a")] == ["a"]
    yield lambda: osl.load(path, {"a": W}, only="a"), "or put `...` in their place"
    osl.load(path, {"a": W, "b": ...})
    yield (
        lambda: osl.load(path, {"n": np.empty(2, np.int8)}),
        "Ask for a dtype that holds the values.",
    )
    osl.load(path, {"n": np.empty(2, np.int16)})
    big = save(tmp / "big", {"n": np.array([1 << 40, 2], np.int64)})
    yield lambda: osl.load(big, {"n": jax.ShapeDtypeStruct((2,), np.int64)}), "jax_enable_x64"
    with jax.enable_x64(True):
        assert osl.load(big, {"n": jax.ShapeDtypeStruct((2,), np.int64)})["n"][0] == 1 << 40
    mesh = mesh_of(x=8)
    spec = jax.sharding.PartitionSpec
    uneven = jax.sharding.NamedSharding(mesh, spec("x"))
    yield (
        lambda: osl.load(path, {"a": jax.ShapeDtypeStruct((4, 6), F32, sharding=uneven)}),
        "Shard another dimension, or fewer ways.",
    )
    fewer = jax.sharding.NamedSharding(mesh_of(x=4), spec("x"))
    osl.load(path, {"a": jax.ShapeDtypeStruct((4, 6), F32, sharding=fewer)})
    abstract = jax.sharding.NamedSharding(mesh_of(x=4).abstract_mesh, spec("x"))
    tree = {"a": jax.ShapeDtypeStruct((4, 6), F32, sharding=abstract)}
    yield lambda: osl.load(path, tree), "load inside `with jax.set_mesh(mesh)`"
    with jax.set_mesh(mesh_of(x=4)):
        osl.load(path, tree)
    osl.plan_load(path, tree, process_index=0, process_count=1)
    keys = jax.eval_shape(jax.random.key, 0)
    data = save(tmp / "keys", {"k": np.zeros(2, np.uint32)})
    osl.load(data, {"k": keys})
    yield (
        lambda: osl.load(data, {"k": type("Leaf", (), {"shape": (), "dtype": keys.dtype})()}),
        "jax.random.wrap_key_data",
    )
    jax.random.wrap_key_data(osl.load(data)["k"])
    osl.save("step", {"step": 7, "lr": 0.5})
    yield (
        lambda: osl.load("step", {"step": np.zeros((1,), np.int32)}),
        "Ask for shape (), or for a Python number.",
    )
    osl.load("step", {"step": np.zeros((), np.int32), "lr": float})
    yield (
        lambda: osl.load(path, {"a": W, "b": W}, options=osl.ReadOptions(verify=True)),
        "WriteOptions(digests=True), or load",
    )
    osl.save("sums", {"a": W}, options=osl.WriteOptions(digests=True))
    osl.load("sums", options=osl.ReadOptions(verify=True))
    osl.load(path)


@follows
def names_of_other_levels(tmp):
    path = save(tmp / "hf", {"params.a": W, "params.b": W})
    yield lambda: osl.load(path, {"a": W, "b": W}), "give {'params': tree}"
    osl.load(path, {"params": {"a": W, "b": W}})
    yield lambda: osl.load(path, {"x": {"params": {"a": W, "b": W}}}), "as tree['x'] does"
    osl.load(path, {"params": {"a": W, "b": W}})
    osl.save("run", {"params": {"w": W}, "step": 7})
    mapping = osl.Mapping([rule("w", tensor("x"))])
    yield (
        lambda: osl.convert("run", "to", mapping=mapping, inverse=True),
        "the part 'params' of the tree",
    )
    osl.convert("run", "to", mapping=mapping, inverse=True, subtree="params")
    moments = {"mu": {"w": 2 * W}, "nu": {"w": 3 * W}}
    osl.save("adam", {"opt": moments, "params": {"w": W}})
    yield (
        lambda: osl.convert("adam", "weights", mapping=mapping, inverse=True),
        "the part 'opt.mu' or 'opt.nu' or 'params' of the tree",
    )
    osl.convert("adam", "weights", mapping=mapping, inverse=True, subtree="params")
    assert_same_bits(osl.load("weights")["x"], W)
    yield (
        lambda: osl.load("adam", {"w": W}),
        "give {'opt': {'mu': tree}} or {'opt': {'nu': tree}} or {'params': tree}.",
    )
    assert_same_bits(osl.load("adam", {"params": {"w": W}})["params"]["w"], W)


# Saves


@follows
def a_place_that_is_taken(tmp):
    tree = {"a": W}
    osl.save("to", tree)
    yield lambda: osl.save("to", {"b": W}), "Pass overwrite=True (--overwrite) to replace it."
    osl.save("to", {"b": W}, overwrite=True)
    assert osl.load("to").keys() == {"b"}
    yield lambda: osl.save("to.safetensors", tree), "the file in it is called 'model.safetensors'"
    osl.save("folder", tree)
    assert (tmp / "folder" / "model.safetensors").is_file()
    model, card = tmp / "model", tmp / "card"
    save(model, {"a": W})
    for folder in (model, card):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": folder.name}))
    options = osl.WriteOptions(model=model)
    yield (
        lambda: osl.save(card, tree, options=options),
        "Pass overwrite=True (--overwrite) to replace them.",
    )
    osl.save(card, tree, options=options, overwrite=True)
    assert "model" in (card / "config.json").read_text()
    (tmp / "other" / "config.json").mkdir(parents=True)
    yield (
        lambda: osl.save("other", tree, options=options, overwrite=True),
        "Move them away, or give another folder.",
    )
    (tmp / "other" / "config.json").rename(tmp / "moved")
    osl.save("other", tree, options=options)
    (tmp / "folder_there" / "model.safetensors").mkdir(parents=True)
    yield lambda: osl.save("folder_there", tree, overwrite=True), "Move it away, or give another"
    (tmp / "folder_there" / "model.safetensors").rename(tmp / "away")
    osl.save("folder_there", tree)
    osl.peft.save("adapter", {"q.lora_A.weight": W}, config={"r": 4})
    osl.save("adapter", tree)
    replace = {"format": "orbax", "overwrite": True}
    yield lambda: osl.convert("to", "adapter", **replace), "Move them away, or give another folder."
    (tmp / "adapter" / "adapter_model.safetensors").rename(tmp / "adapter.safetensors")
    osl.convert("to", "adapter", **replace)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp / "orbax", tree)
    yield lambda: osl.save("orbax", tree), "Save to another folder, or remove it first."
    osl.save("another", tree)


@follows
def leaves_that_cannot_be_saved(tmp):
    yield (
        lambda: jax.jit(lambda x: osl.save("to", {"a": x}))(W),
        "Save outside of functions that JAX transforms",
    )
    osl.save("to", {"a": jax.jit(lambda x: x)(W)})
    masked = np.ma.masked_array(W, mask=W > 3)
    yield (
        lambda: osl.save("to", {"a": masked}, overwrite=True),
        "Save `array.filled(...)`, and the mask",
    )
    osl.save("to", {"a": masked.filled(0), "mask": masked.mask}, overwrite=True)
    yield (
        lambda: osl.save("to", {"a": W, "f": print}, overwrite=True),
        "Take the leaf out of the tree",
    )
    osl.save("to", {"a": W}, overwrite=True)
    donated = jnp.arange(4.0)
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    yield lambda: osl.save("to", {"a": donated}, overwrite=True), "Save what the function returned"
    osl.save("to", {"a": result}, overwrite=True)
    narrow = {"a": ocp.SaveArgs(dtype=np.dtype(ml_dtypes.int4))}
    handler = osl.SafetensorsCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        args = osl.SafetensorsSave({"a": W}, narrow)
        yield lambda: checkpointer.save(tmp / "narrow", args), "Cast the array itself, or ask for"
        args = osl.SafetensorsSave({"a": W.astype(ml_dtypes.int4)})
        checkpointer.save(tmp / "narrow", args, force=True)
    yield saves("to", {"a": W}, rule("a", tensor("__metadata__"))), "Rename the tensor, or the rule"
    saves("to", {"a": W}, rule("a", tensor("metadata")))()
    yield (
        lambda: osl.save(
            "to",
            {"a": W, "n": 1},
            options=osl.WriteOptions(quantize=osl.Quantization("int4", modules=["a"])),
            overwrite=True,
        ),
        "Save the parameters alone",
    )


# Conversions


@follows
def conversions(tmp):
    path = save(tmp / "hf", {"a": W, "b": W[0]})
    packed = "packed"
    osl.save(packed, {"a": W.astype(ml_dtypes.float6_e2m3fn), "b": W})
    yield (
        lambda: osl.convert(packed, "dtypes"),
        "Decode them with a mapping, or leave them out by its ignore",
    )
    wide, plain = rule("a", tensor("a").cast("float32")), rule("b", tensor("b"))
    osl.convert(packed, "dtypes", mapping=osl.Mapping([wide, plain]))
    osl.convert(packed, "dtypes", mapping=osl.Mapping([plain], ignore="a"), overwrite=True)
    odd = save(tmp / "odd", {"a/../b": W})
    folders = osl.ConvertOptions(use_ocdbt=False)
    yield lambda: osl.convert(odd, "names", options=folders), "without use_ocdbt=False (--no-ocdbt)"
    osl.convert(odd, "names")
    inside = path / "to"
    yield lambda: osl.convert(path, inside), "Convert to a folder of its own."
    osl.convert(path, "to")
    yield lambda: osl.convert(path, "to"), "Pass overwrite=True (--overwrite)"
    osl.convert(path, "to", overwrite=True)
    yield (
        lambda: osl.convert("to", "plain", dequantize="bfloat16"),
        "dequantize takes safetensors of Hugging Face",
    )
    mapping = osl.Mapping([rule("w", tensor("a"))], ignore="b")
    yield (
        lambda: osl.convert(path, "plain", mapping=mapping, dequantize="bfloat16"),
        "mapping.over(osl.dequantized(path))",
    )
    uneven = {"mesh": {"x": 4}, "spec": ["'.*' = x"]}
    yield (
        lambda: osl.convert(path, "cut", **uneven),
        "Give these a rule of their own, before the others.",
    )
    osl.convert(path, "cut", mesh={"x": 4}, spec=["'b' = -", "'.*' = x"])
    small = osl.ConvertOptions(memory_budget_bytes=64 << 10)
    large = save(tmp / "large", {"a": np.zeros((1 << 18,), F32)})
    osl.convert(large, "chunk")
    yield (
        lambda: osl.convert("chunk", "back", options=small),
        "Set memory_budget_bytes (--memory-budget-bytes) to",
    )
    osl.convert("chunk", "back", options=osl.ConvertOptions(memory_budget_bytes=4 << 20))


@follows
def a_conversion_that_was_interrupted(tmp):
    path = save(tmp / "hf", {f"w{n}": np.full((64, 64), n, F32) for n in range(16)})

    def interrupt(progress):
        if progress.done_bytes > progress.total_bytes // 2:
            raise RuntimeError("interrupted")

    def begin(target, budget):
        options = osl.ConvertOptions(memory_budget_bytes=budget, progress=interrupt)
        with pytest.raises(RuntimeError):
            osl.convert(path, target, options=options)

    small = osl.ConvertOptions(memory_budget_bytes=256 << 10)
    begin("to", 256 << 10)
    other = osl.ConvertOptions(memory_budget_bytes=256 << 10, dtype="bfloat16")
    yield (
        lambda: osl.convert(path, "to", options=other),
        "Repeat the call that was interrupted to continue",
    )
    osl.convert(path, "to", options=other, restart=True)
    begin("again", 256 << 10)
    assert osl.convert(path, "again", options=small).resumed_bytes > 0
    begin("larger", 1 << 20)
    yield (
        lambda: osl.convert(path, "larger", options=small),
        "Continue it with that much, or pass restart=True",
    )
    osl.convert(path, "larger", options=small, restart=True)
    begin("damaged", 256 << 10)
    (journal,) = tmp.glob(".*/*.jsonl")
    journal.write_text(journal.read_text() + "{\n")
    yield (
        lambda: osl.convert(path, "damaged", options=small),
        "Pass restart=True (--restart) to begin",
    )
    osl.convert(path, "damaged", options=small, restart=True)


# Ready mappings

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}


def llama(folder, layers=2, head=True, **config):
    shapes = {"model.embed_tokens": (10, 8), "model.norm": (8,)}
    for before in (f"model.layers.{i}." for i in range(layers)):
        shapes |= {f"{before}self_attn.{x}_proj": (8, 8) for x in "qkvo"}
        shapes |= {f"{before}mlp.{x}_proj": (12, 8) for x in ("gate", "up")}
        shapes |= {f"{before}mlp.down_proj": (8, 12)}
        shapes |= {f"{before}{x}_layernorm": (8,) for x in ("input", "post_attention")}
    shapes |= {"lm_head": (10, 8)} if head else {}
    rng = np.random.default_rng(0)
    weights = {f"{n}.weight": rng.standard_normal(s).astype(F32) for n, s in shapes.items()}
    save(folder, weights)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return folder


@follows
def ready_mappings(tmp):
    mapping, families = osl.families.mapping, osl.families
    folder = llama(tmp / "llama")
    partial = {name: value for name, value in LLAMA.items() if name != "hidden_size"}
    yield lambda: mapping(partial), "Give the whole config.json, or the folder that it is in."
    for config in (LLAMA, folder, folder / "config.json"):
        osl.load(folder, mapping=mapping(config))
    yield (
        lambda: mapping("lama"),
        "Give a model's folder, its config.json, or what that holds as a dict",
    )
    yield (
        lambda: mapping({**LLAMA, "model_type": "llamma"}),
        "osl.families.llama(config, model_type='llamma')",
    )
    osl.load(folder, mapping=families.llama({**LLAMA, "model_type": "llamma"}, model_type="llamma"))
    whole = {"model_type": "own_vl", "text_config": LLAMA}
    yield lambda: mapping(whole), "osl.families.llama(config) takes that part of it"
    within = llama(tmp / "within", model_type="own_vl", text_config=LLAMA)
    osl.load(within, mapping=families.llama(within))
    yield lambda: families.qwen3(folder), "osl.families.qwen3(config, model_type='llama')"
    families.qwen3(folder, model_type="llama")
    families.llama(folder)
    yield (
        lambda: mapping(llama(tmp / "short", layers=1)),
        "Take the config.json that belongs to these files",
    )
    (tmp / "short" / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    osl.load("short", mapping=mapping("short"))
    yield lambda: mapping(llama(tmp / "headless", head=False)), '"architectures": ["LlamaModel"]'
    for change in ({"architectures": ["LlamaModel"]}, {"tie_word_embeddings": True}):
        (tmp / "headless" / "config.json").write_text(json.dumps({**LLAMA, **change}))
        osl.load("headless", mapping=mapping("headless"))
    tied = llama(tmp / "tied", tie_word_embeddings=True)
    yield lambda: osl.load(tied, mapping=mapping(tied)), "load it with untie=True"
    osl.load(tied, mapping=mapping(tied, untie=True))
    yield (
        lambda: families.gemma3({**LLAMA, "model_type": "gemma3"}, target="maxtext", vision=True),
        "or leave the option out if there is none",
    )
    model = osl.load(folder, mapping=mapping(folder))
    model["extra"] = W
    yield lambda: osl.save("to", model, mapping=mapping(folder)), "mapping.drop('extra')"
    osl.save("to", model, mapping=mapping(folder).drop("extra"))
    assert_same_bits(osl.load("to")["lm_head.weight"], osl.load(folder)["lm_head.weight"])


@follows
def names_of_mappings_on_a_command_line(tmp):
    from orbax_safetensors_layout.mapping import find_mapping

    folder = llama(tmp / "llama")
    (tmp / "maps.py").write_text(
        "import orbax_safetensors_layout as osl\n"
        "mine = osl.Mapping([osl.rule('w', osl.tensor('a'))])\n"
    )
    yield lambda: find_mapping("lama"), "The nearest names are 'llama'"
    yield lambda: find_mapping("llama"), "Give the Hugging Face checkpoint, or its config.json."
    find_mapping("llama", folder), find_mapping("llama:maxtext", folder / "config.json")
    yield lambda: find_mapping("maps.py:mien"), "The nearest names are 'mine'"
    find_mapping("maps.py:mine")


# Adapters


@follows
def adapters(tmp):
    folder = llama(tmp / "llama")
    q = "model.layers.0.self_attn.q_proj"
    lora = {f"{q}.lora_A.weight": np.ones((2, 8), F32), f"{q}.lora_B.weight": np.ones((8, 2), F32)}
    config = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    osl.peft.save("adapters/one", lora, config=config)
    yield lambda: osl.peft.load("adapters"), "Give the path of one, such as adapters/one"
    osl.peft.load("adapters/one")
    yield lambda: osl.peft.merge(None, "adapters", base=folder), "Give the path of one, such as"
    other = save(
        tmp / "other", {name.replace("model.", "net."): w for name, w in osl.load(folder).items()}
    )
    yield (
        lambda: osl.peft.merge(None, "adapters/one", base=other),
        "Give rename=, if the base's names differ",
    )
    merged = osl.peft.merge(
        None, "adapters/one", base=other, rename=lambda name: name.replace("model.", "net.")
    )
    assert (
        osl.load(other, mapping=merged)["net.layers.0.self_attn.q_proj.weight"]
        != osl.load(folder)[f"{q}.weight"]
    ).all()
    mapping = osl.families.mapping(folder)
    merged = osl.peft.merge(mapping, "adapters/one")
    model = osl.load(folder, mapping=merged)
    yield lambda: osl.save("to", model, mapping=merged), "Save through the mapping of the base."
    osl.save("to", model, mapping=mapping)
    yield (
        lambda: osl.peft.merge(mapping, "adapters/one", transposed=["*.c_proj"]),
        "or transposed=() if none are [in, out]",
    )
    osl.peft.merge(mapping, "adapters/one", transposed=())
    osl.peft.merge(mapping, "adapters/one", transposed=["*.q_proj"])
    again = {name: 2 * value for name, value in lora.items()}
    merged = osl.peft.merge(mapping, "adapters/one")
    osl.peft.save("adapters/one", again, config=config, overwrite=True)
    yield (
        lambda: osl.load(folder, mapping=merged),
        "Merge it again, and load when nothing writes to it.",
    )
    osl.load(folder, mapping=osl.peft.merge(mapping, "adapters/one"))
    small = save(tmp / "small", {f"{q}.weight": np.ones((8, 4), F32)})
    merged = osl.peft.merge(None, "adapters/one", base=small)
    yield lambda: osl.load(small, mapping=merged), "Take the base that"
    beside = osl.WriteOptions(digests=True)
    yield (
        lambda: osl.peft.save(folder, lora, config=config, options=beside),
        "with osl.peft.save and without digests=True",
    )
    osl.peft.save(folder, lora, config=config)
    osl.peft.save("own", lora, config=config, options=beside)


# Checksums and typed keys


@follows
def checksums(tmp):
    osl.save("to", {"a": W}, options=osl.WriteOptions(digests=True))
    verify = osl.ReadOptions(verify=True)
    data = (tmp / "to" / "model.safetensors").read_bytes()
    (tmp / "to" / "model.safetensors").write_bytes(data[:-1] + b"\x7f")
    yield lambda: osl.load("to", options=verify), "`osl.verify` lists all that is wrong"
    assert not osl.verify("to").ok
    osl.save("to", {"a": W}, options=osl.WriteOptions(digests=True), overwrite=True)
    osl.load("to", options=verify)


@follows
def keys_of_an_implementation_of_ones_own(tmp):
    def zeros(*_):
        return jnp.zeros((2,), jnp.uint32)

    own = jax.extend.random.define_prng_impl(
        key_shape=(2,), seed=zeros, split=zeros, random_bits=zeros, fold_in=zeros, name="own"
    )
    keys = {"k": jax.random.key(0, impl=own)}
    osl.save("to", keys)
    data = jax.tree.map(jax.random.key_data, keys)
    for tree in (None, keys, jax.eval_shape(lambda: keys)):
        yield lambda tree=tree: osl.load("to", tree), "Give a tree with their data"
    loaded = osl.load("to", jax.eval_shape(lambda: data))["k"]
    assert jax.random.wrap_key_data(loaded, impl=own).dtype == keys["k"].dtype
    yield lambda: osl.plan_save(jax.eval_shape(lambda: keys)), "Give a tree with their data"
    osl.plan_save(jax.eval_shape(lambda: data))


@follows
def an_opaque_function_in_an_export(tmp):
    path = save(tmp / "hf", {"a": W})
    plain = osl.Mapping([rule("a", tensor("a"))])
    over = osl.Mapping([rule("w", tensor("a"))]).over(plain)
    model = osl.load(path, mapping=over)
    yield lambda: osl.save("to", model, mapping=over), "Save through the mapping of the plain model"
    osl.save("to", model, mapping=osl.Mapping([rule("w", tensor("a"))]))


@follows
def a_leaf_whose_load_compares(tmp):
    tied = llama(tmp / "tied", tie_word_embeddings=True)
    mapping = osl.families.mapping(tied)
    tree = {**mapping.abstract(tied), "embed_tokens": ...}
    yield lambda: osl.load(tied, tree, mapping=mapping), "Ask for the leaf. The configuration ties"
    yield lambda: osl.load(tied, mapping.abstract(tied), mapping=mapping), "load it with untie=True"
    untied = osl.families.mapping(tied, untie=True)
    osl.load(tied, untied.abstract(tied), mapping=untied)


# Quantised exports


@follows
def quantised_exports(tmp):
    def weights(**more):
        return {f"{name}.weight": value.astype(F32) for name, value in more.items()}

    def quantized(tree, form, **how):
        options = osl.WriteOptions(quantize=osl.Quantization(form, **how))
        return lambda: osl.save("to", tree, options=options, overwrite=True)

    square = np.ones((128, 128))
    own = weights(own=square)
    yield quantized(own, "int4"), "Say which: Quantization(..., modules=['*.attention.*'])"
    quantized(own, "int4", modules=["own"])()
    uneven = weights(up_proj=square, odd_proj=np.ones((4, 100)))
    yield quantized(uneven, "int4"), "Leave it out: Quantization(..., ignore=['odd_proj'])."
    quantized(uneven, "int4", ignore=["odd_proj"])()
    broken = weights(up_proj=square, bad_proj=np.full((128, 128), np.nan))
    yield (
        quantized(broken, "int4"),
        "Leave it out: Quantization(..., ignore=[...]); or mend the weight.",
    )
    quantized(broken, "int4", ignore=["bad_proj"])()
    blocks = weights(up_proj=np.ones((192, 128)), down_proj=square)
    yield (
        quantized(blocks, "deepseek_fp8"),
        "Choose another: Quantization('fp8_block'); or leave it",
    )
    quantized(blocks, "fp8_block")()
    quantized(blocks, "deepseek_fp8", ignore=["up_proj"])()
    quantized(weights(up_proj=square), "fp8_block")()
    again = quantized(osl.load("to"), "int4")
    yield again, "through osl.dequantized, or convert(..., dequantize=) (--dequantize)"
    osl.convert("to", "plain", format="hf", dequantize="bfloat16")
    quantized(osl.load("plain"), "int4")()
    quantized(osl.load("plain"), "fp8_block")()
    quantized(osl.load("to", mapping=osl.dequantized("to")), "int4")()
