"""The same restore by Orbax v0's handlers and by ours: the same types, shardings and keys."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from meshes import mesh_of, place
from sampling import every
from states import same

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.reading import saved_metadata

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

Standard, PyTree = ocp.args.StandardRestore, ocp.args.PyTreeRestore
SPECS = (P(), P("x"), P("y"), P("x", "y"), P("y", "x"), P(None, "x"), P(("x", "y")))
EVERYWHERE = NamedSharding(mesh_of(x=4, y=2), P())
WANTED = jax.ShapeDtypeStruct((4,), np.float32, sharding=EVERYWHERE)
WANTED_VALUE = np.arange(4.0, dtype=np.float32)


def random_state(random: np.random.Generator) -> dict:
    leaves = {f"leaf{number}": random_leaf(random) for number in range(8)}
    return {"nested": {"list": [leaves.pop("leaf0"), leaves.pop("leaf1")]}, **leaves}


def random_leaf(random):
    dtype = random.choice([np.float32, ml_dtypes.bfloat16, np.int8, np.uint32, np.bool_])
    values = random.integers(0, 2, (8, 8)).astype(dtype)
    match random.integers(7):
        case 0 | 1:
            return place(values, SPECS[random.integers(len(SPECS))])
        case 2:
            return jax.device_put(values, jax.devices()[random.integers(8)])
        case 3:
            return values
        case 4:
            impl = ["threefry2x32", "rbg"][random.integers(2)]
            keys = jax.random.split(jax.random.key(int(random.integers(99)), impl=impl), 8)
            return place(keys, SPECS[random.integers(3)]) if random.integers(2) else keys[0]
        case 5:
            return int(random.integers(9))
        case _:
            return float(random.random())


def random_item(state, random):
    """Templates of a state's leaves, some of another sharding or without one."""

    def template(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            targets = [leaf, ocp.utils.to_shape_dtype_struct(leaf)]
            return targets[random.integers(len(targets))]
        moved = NamedSharding(mesh_of(x=4, y=2), SPECS[random.integers(len(SPECS))])
        targets = [
            leaf,
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=moved),
            jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=moved),
        ]
        return targets[random.integers(len(targets))]

    def host(leaf):
        if not isinstance(leaf, np.ndarray):
            return leaf
        targets = [
            leaf,
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=EVERYWHERE),
            np.zeros(leaf.shape, np.float32),
        ]
        return targets[random.integers(len(targets))]

    return jax.tree.map(lambda leaf: host(template(leaf)), state)


def plain(tree):
    return jax.tree.map(lambda _: ocp.RestoreArgs(), tree)


def zeros(state):
    """Templates that tell structure and shapes alone."""

    def of_leaf(leaf):
        is_array = hasattr(leaf, "shape") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.zeros(leaf.shape, np.float16) if is_array else leaf

    return jax.tree.map(of_leaf, state)


def loose(restore_args):
    """Arguments that leave shape and dtype open."""

    def of_leaf(args):
        if not isinstance(args, ocp.ArrayRestoreArgs):
            return args
        return ocp.ArrayRestoreArgs(sharding=args.sharding, strict=False)

    return jax.tree.map(of_leaf, restore_args)


def requests(state, item):
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state)
    return {
        "standard": Standard(),
        "standard, a fallback": Standard(fallback_sharding=EVERYWHERE),
        "standard, the state": Standard(state),
        "standard, an item": Standard(item),
        "standard, an item and a fallback": Standard(item, fallback_sharding=EVERYWHERE),
        "pytree": PyTree(),
        "pytree, the state": PyTree(state),
        "pytree, numbers": PyTree(jax.tree.map(lambda _: 0, state)),
        "pytree, plain arguments": PyTree(restore_args=plain(state)),
        "pytree, the state and plain arguments": PyTree(state, restore_args=plain(state)),
        "pytree, numbers and plain arguments": PyTree(
            jax.tree.map(lambda _: 0, state), restore_args=plain(state)
        ),
        "pytree, zeros": PyTree(zeros(state)),
        "pytree, zeros and plain arguments": PyTree(zeros(state), restore_args=plain(state)),
        "pytree, zeros and arguments for numpy": PyTree(zeros(state), restore_args=host),
        "pytree, zeros and loose arguments": PyTree(zeros(state), restore_args=loose(restore_args)),
        "pytree, arguments": PyTree(restore_args=restore_args),
        "pytree, an item and arguments": PyTree(item, restore_args=restore_args),
        "pytree, numbers and arguments": PyTree(
            jax.tree.map(lambda _: 0, state), restore_args=restore_args
        ),
    }


def compare(folder, seed: int) -> int:
    """Compares all requests for a random state; how many Orbax could fulfil."""
    random = np.random.default_rng(seed)
    state = random_state(random)
    item = random_item(state, random)
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    orbaxs = {
        Standard: ocp.Checkpointer(ocp.StandardCheckpointHandler()),
        PyTree: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
    }
    ours.save(folder / "ours", args=ocp.args.StandardSave(state))
    orbaxs[Standard].save(folder / "orbaxs", args=ocp.args.StandardSave(state))
    compared = 0
    for name, args in requests(state, item).items():
        try:
            expected = orbaxs[type(args)].restore(folder / "orbaxs", args=args)
        except (ValueError, TypeError):
            continue
        restored = ours.restore(folder / "ours", args=args)
        try:
            same(restored, expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {name}: {state}, {item}") from error
        compared += 1
    return compared


@pytest.mark.parametrize("seed", every(2, range(6)))
def test_random_states_and_requests(tmp_path, seed):
    assert compare(tmp_path, seed) > 8


@pytest.mark.soak
def test_many_random_states_and_requests(tmp_path):
    assert sum(compare(tmp_path / str(seed), seed) for seed in range(6, 300)) > 2500


def restored(tmp_path, state, args):
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    ours.save(tmp_path / "ours", args=ocp.args.PyTreeSave(state))
    return ours.restore(tmp_path / "ours", args=args)


def test_plain_restore_args_bring_back_what_was_saved(tmp_path):
    state = {
        "w": place(np.ones((8, 8), np.float32), P("x", "y")),
        "one": jax.device_put(np.ones(3, ml_dtypes.bfloat16), jax.devices()[1]),
        "host": np.arange(3),
        "key": jax.random.key(3),
        "keys": place(jax.random.split(jax.random.key(1), 8), P("x")),
        "step": 3,
        "rate": 0.5,
    }
    same(restored(tmp_path, state, PyTree(restore_args=plain(state))), state)
    same(osl.load(tmp_path / "ours", plain(state)), state)


def test_plain_restore_args_with_a_dtype(tmp_path):
    state = {"w": place(np.ones((8, 8), np.float32), P("x")), "host": np.arange(3.0)}
    args = jax.tree.map(lambda _: ocp.RestoreArgs(dtype=ml_dtypes.bfloat16), state)
    expected = {
        "w": state["w"].astype(ml_dtypes.bfloat16),
        "host": state["host"].astype(ml_dtypes.bfloat16),
    }
    same(restored(tmp_path, state, PyTree(restore_args=args)), expected)


def test_an_array_that_names_no_sharding_comes_back_as_saved(tmp_path):
    """The fallback is for what cannot be where it was, here: in no checkpoint of ours."""
    sharding = SingleDeviceSharding(jax.devices()[3])
    state = {"w": place(np.ones((8, 8), np.float32), P("x", "y")), "host": np.arange(3.0)}
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    same(restored(tmp_path, state, Standard(item, fallback_sharding=sharding)), state)


def test_an_array_instead_of_a_number(tmp_path):
    args = Standard({"step": jax.ShapeDtypeStruct((), np.float32)})
    same(restored(tmp_path, {"step": 3}, args), {"step": np.asarray(np.float32(3))})
    args = PyTree(restore_args={"step": ocp.RestoreArgs(restore_type=np.ndarray)})
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    same(ours.restore(tmp_path / "ours", args=args), {"step": np.asarray(3)})


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_arrays_of_another_shape_are_cut_and_padded(tmp_path, layout):
    values = np.arange(1, 65, dtype=np.float32).reshape(8, 8)
    state = {"w": place(values, P("x", "y")), "b": {"c": place(values, P("y"))}, "step": 3}
    write = osl.WriteOptions(layout=layout)
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler(write=write))
    ours.save(tmp_path / "ours", args=ocp.args.StandardSave(state))
    orbaxs = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    orbaxs.save(tmp_path / "orbaxs", args=ocp.args.StandardSave(state))
    pytree = ocp.PyTreeCheckpointer()
    random = np.random.default_rng(0)
    for _ in range(10):
        shape = tuple(int(n) for n in 4 * random.integers(1, 6, 2))
        dtype = [np.float32, ml_dtypes.bfloat16][random.integers(2)]
        moved = NamedSharding(mesh_of(x=4, y=2), SPECS[random.integers(5)])
        for leaf in (
            jax.ShapeDtypeStruct(shape, dtype, sharding=moved),
            jax.ShapeDtypeStruct(shape, dtype),
        ):
            for fallback in (None, EVERYWHERE):
                item = state | {"w": leaf}
                args = Standard(item, strict=False, fallback_sharding=fallback)
                expected = orbaxs.restore(tmp_path / "orbaxs", args=args)
                same(ours.restore(tmp_path / "ours", args=args), expected)
        loose = ocp.ArrayRestoreArgs(global_shape=shape, sharding=moved, strict=False)
        restore_args = plain(state) | {"b": {"c": loose}}
        for args in (PyTree(restore_args=restore_args), PyTree(state, restore_args=restore_args)):
            expected = pytree.restore(tmp_path / "orbaxs", args=args)
            same(ours.restore(tmp_path / "ours", args=args), expected)


def test_a_fallback_takes_the_place_of_shardings_that_are_not_to_be_had(tmp_path):
    state = {
        "w": place(np.arange(64.0).reshape(8, 8), P("x")),
        "host": np.arange(3),
        "step": 3,
        "name": "run",
    }
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    ours.save(tmp_path / "step", args=ocp.args.StandardSave(state))
    manifest = tmp_path / "step" / "orbax_safetensors_layout.json"
    records = json.loads(manifest.read_text())
    (record,) = records["shardings"]
    record["mesh"], record["devices"] = {"x": 8, "y": 2}, [*range(16)]
    manifest.write_text(json.dumps(records))
    restored = ours.restore(tmp_path / "step", args=Standard(fallback_sharding=EVERYWHERE))
    assert restored["w"].sharding == EVERYWHERE
    assert type(restored["host"]) is np.ndarray
    same(restored, state | {"w": jax.device_put(state["w"], EVERYWHERE)})


@pytest.mark.parametrize("left_out", ["w", "step", "name"])
def test_what_the_item_does_not_name_is_refused_whatever_it_is(tmp_path, left_out):
    state = {"w": place(np.arange(8.0), P("x")), "v": np.ones(2), "step": 3, "name": "run"}
    item = {name: value for name, value in state.items() if name != left_out}
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    ours.save(tmp_path / "ours", args=ocp.args.StandardSave(state))
    if left_out != "name":  # Orbax's handler saves no strings
        orbaxs = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        of_both = {name: value for name, value in state.items() if name != "name"}
        orbaxs.save(tmp_path / "orbaxs", args=ocp.args.StandardSave(of_both))
        asked = {name: value for name, value in item.items() if name != "name"}
        with pytest.raises(ValueError, match=left_out):
            orbaxs.restore(tmp_path / "orbaxs", args=Standard(asked))
    with pytest.raises(osl.UnexpectedTensorError, match=f"'{left_out}'"):
        ours.restore(tmp_path / "ours", args=Standard(item))
    same(
        ours.restore(tmp_path / "ours", args=osl.SafetensorsRestore(item, partial_restore=True)),
        item,
    )
    restored = ours.restore(tmp_path / "ours", args=osl.SafetensorsRestore(item | {left_out: ...}))
    same(restored, item | {left_out: ...})


ABSENT = {
    "leaf": {"a": WANTED, "c": WANTED},
    "all": {"c": WANTED},
    "below": {"b": {"w": WANTED, "lora": {"x": WANTED, "y": np.ones(2, np.float32)}}},
    "values": {"a": WANTED, "c": 5, "s": "text", "t": int, "e": ..., "n": None, "d": {}},
    "array": {"a": WANTED, "c": jnp.ones(3)},
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_the_checkpoint_lacks_comes_back_as_given_from_a_partial_restore(tmp_path, name):
    state = {"a": place(WANTED_VALUE, P()), "b": {"w": place(WANTED_VALUE, P()), "n": 3}}
    item = ABSENT[name]
    args = jax.tree.map(lambda leaf: ocp.RestoreArgs(), item)
    asked = [PyTree(item, args, **kind) for kind in ({"partial_restore": True}, {"transforms": {}})]
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    orbaxs = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    for number, checkpointer in enumerate((orbaxs, ours)):
        checkpointer.save(tmp_path / str(number), args=ocp.args.PyTreeSave(state))
    for request in asked:
        pairs = [c.restore(tmp_path / str(n), args=request) for n, c in enumerate((orbaxs, ours))]
        check_absent(*pairs, item)
    contexts = [ocp_v1.Context(), osl.context("state"), ocp_v1.Context()]
    contexts[2].checkpoint_layout = osl.SafetensorsLayout
    results = []
    for number, context in enumerate(contexts):
        context.pytree.loading.partial_load = True
        with context:
            ocp_v1.save(tmp_path / f"v1-{number}", state)
            results.append(ocp_v1.load(tmp_path / f"v1-{number}", item))
    check_absent(*results[:2], item)
    check_absent(results[0], results[2], item)


@pytest.mark.parametrize("saved", [ocp_v1.Context, lambda: osl.context("items")])
def test_adapters_on_a_step_of_the_base_model(tmp_path, saved):
    """As MaxText does with `nnx.State`s: the adapter comes back as it was asked for."""
    asked = {"base": nnx.Param(WANTED), "lora": {"a": nnx.LoRAParam(WANTED)}}
    with saved():
        base = {"base": nnx.Param(place(WANTED_VALUE, P()))}
        ocp_v1.save_checkpointables(tmp_path / "a", {"items": base})
    context = osl.context("items")
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp_v1.load_checkpointables(tmp_path / "a", {"items": asked})["items"]
    kept = [leaf for leaf in jax.tree.leaves(loaded) if leaf is WANTED]
    assert len(kept) == 1
    np.testing.assert_array_equal(jax.tree.leaves(loaded["base"])[0], WANTED_VALUE)


def check_absent(orbaxs, ours, item):
    leaves = [jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in (orbaxs, ours)]
    given = jax.tree.leaves(item, is_leaf=lambda leaf: leaf is None)
    for of_orbax, of_ours, leaf in zip(*leaves, given, strict=True):
        assert (of_ours is leaf) == (of_orbax is leaf)
        if of_ours is not leaf:
            same(of_ours, of_orbax)


@pytest.mark.parametrize("item", [{"b": WANTED}, {"a": {"x": WANTED}}], ids=["above", "below"])
def test_a_leaf_where_the_checkpoint_has_a_tree_is_not_absent(tmp_path, item):
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    ours.save(tmp_path / "a", args=ocp.args.PyTreeSave({"a": WANTED_VALUE, "b": {"w": 1}}))
    with pytest.raises(osl.MissingTensorError, match="not found"):
        ours.restore(tmp_path / "a", args=PyTree(item, transforms={}))


@pytest.mark.parametrize("spec", [P("x", "y"), P(), None])
def test_fewer_devices_than_were_saved_from_need_a_tree(tmp_path, monkeypatch, spec):
    state = {"w": place(np.ones((8, 4), np.float32), spec or P()), "n": 3}
    if spec is None:
        state["w"] = jax.device_put(state["w"], jax.devices()[5])
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    ours.save(tmp_path / "v0", args=ocp.args.StandardSave(state))
    with osl.context("state"):
        ocp_v1.save(tmp_path / "v1", state)
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    refused = r"expected: [68] devices or more, found: 4 devices.*Give a tree.*fallback_sharding"
    for args in (Standard(), PyTree(), osl.SafetensorsRestore()):
        with pytest.raises(ValueError, match=refused):
            ours.restore(tmp_path / "v0", args=args)
    with osl.context("state"), pytest.raises(ValueError, match=refused):
        ocp_v1.load(tmp_path / "v1")
    here = NamedSharding(mesh_of(x=4), P())
    described = ours.metadata(tmp_path / "v0").item_metadata
    for args in (Standard(fallback_sharding=here), Standard(described)):
        loaded = ours.restore(tmp_path / "v0", args=args)
        same(loaded, state | {"w": jax.device_put(state["w"], here)})
    with osl.context("state"):
        loaded = ocp_v1.load(tmp_path / "v1", ocp_v1.metadata(tmp_path / "v1").metadata)
    same(loaded, state | {"w": jax.device_put(state["w"], here)})
    same(osl.load(tmp_path / "v0"), state | {"w": np.asarray(state["w"])})


def test_what_is_not_cut_or_padded(tmp_path):
    state = {
        "host": np.ones((2, 3)),
        "key": jax.random.split(jax.random.key(0), 4),
        "w": np.ones(4),
    }
    state["w"] = place(state["w"], P())
    for name, leaf in {
        "host": np.zeros((4, 2)),
        "key": jax.random.split(jax.random.key(0), 6),
        "w": jax.ShapeDtypeStruct((2, 2), np.float32, sharding=EVERYWHERE),
    }.items():
        with pytest.raises(osl.ShapeMismatchError, match=name):
            restored(tmp_path / name, state, Standard(state | {name: leaf}, strict=False))
    wide = jax.ShapeDtypeStruct((8,), np.float32, sharding=EVERYWHERE)
    with pytest.raises(osl.ShapeMismatchError, match="'w'"):
        restored(tmp_path / "strict", state, Standard(state | {"w": wide}))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.float32])
def test_the_dtype_of_an_item_of_no_dimensions_does_not_count(tmp_path, dtype):
    """Where restore arguments name none; as of Orbax, for which such a shape is none."""
    value = place(np.float32(1 / 3), P())
    item = {"s": jax.ShapeDtypeStruct((), dtype, sharding=value.sharding)}
    restored = []
    for number, handler in enumerate(
        (ocp.PyTreeCheckpointHandler(), osl.SafetensorsCheckpointHandler())
    ):
        with ocp.Checkpointer(handler) as checkpointer:
            folder = tmp_path / f"{number}"
            checkpointer.save(folder, args=ocp.args.PyTreeSave({"s": value}))
            for named in (None, dtype):
                args = {"s": ocp.ArrayRestoreArgs(sharding=value.sharding, dtype=named)}
                if named == jnp.int32:
                    continue
                request = PyTree(item, restore_args=args)
                restored.append(checkpointer.restore(folder, args=request))
    half = len(restored) // 2
    same(restored[:half], restored[half:])


@pytest.mark.parametrize("rows", [2, 6])
def test_an_item_s_shape_cuts_and_fills_nothing(tmp_path, rows):
    value = place(np.arange(1, 5, dtype=np.float32), P())
    item = {"w": jax.ShapeDtypeStruct((rows,), jnp.bfloat16)}
    args = {"w": ocp.ArrayRestoreArgs(sharding=value.sharding, strict=False)}
    cut = {"w": ocp.ArrayRestoreArgs(sharding=value.sharding, strict=False, global_shape=(rows,))}
    restored = []
    for number, handler in enumerate(
        (ocp.PyTreeCheckpointHandler(), osl.SafetensorsCheckpointHandler())
    ):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / f"{number}", args=ocp.args.PyTreeSave({"w": value}))
            restored.append(
                [
                    checkpointer.restore(
                        tmp_path / f"{number}", args=PyTree(item, restore_args=restore_args)
                    )
                    for restore_args in (args, cut)
                ]
            )
    same(*restored)
    assert restored[1][0]["w"].shape == (4,)


def test_arrays_of_devices_that_are_not_here_are_replicated(tmp_path, monkeypatch):
    value = np.arange(16, dtype=ml_dtypes.bfloat16).reshape(8, 2)
    state = {"w": place(value, P("x")), "host": np.arange(3)}
    monkeypatch.setattr(saved_metadata, "decode_sharding", lambda record: None)
    with ocp.Checkpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave(state))
        item = {"w": jax.ShapeDtypeStruct((8, 2), np.float32), "host": np.zeros(3)}
        for args in (PyTree(item), PyTree(item, restore_args=plain(item))):
            restored = checkpointer.restore(tmp_path / "step", args=args)
            assert isinstance(restored["w"], jax.Array)
            assert restored["w"].is_fully_replicated
            assert isinstance(restored["host"], np.ndarray)
            np.testing.assert_array_equal(np.asarray(restored["w"]), value)


def test_the_device_layout_of_an_item_counts(tmp_path):
    value = place(np.arange(32, dtype=np.float32).reshape(8, 4), P("x"))
    asked = Format(Layout(major_to_minor=(1, 0)), value.sharding)
    item = {"w": jax.ShapeDtypeStruct(value.shape, np.float16, sharding=asked)}
    with ocp.Checkpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave({"w": value}))
        restored = checkpointer.restore(tmp_path / "step", args=PyTree(item))["w"]
    assert restored.format.layout.major_to_minor == (1, 0)
    assert restored.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(restored), np.asarray(value))


def test_what_differs_without_an_item_and_with_none_in_one(tmp_path):
    """What docs/trees.md lists, beside what Orbax does."""
    state = {"opt": (np.ones(2, np.float32), {3: np.zeros(2, np.float32)}), "ema": None}
    saved = state | {"ema": np.ones(2, np.float32)}
    own, theirs = ocp.Checkpointer(osl.SafetensorsLayout()), ocp.PyTreeCheckpointer()
    for checkpointer, name in ((own, "own"), (theirs, "theirs")):
        checkpointer.save(tmp_path / name, saved)
        checkpointer.save(tmp_path / f"{name} none", state)
    assert jax.tree.structure(own.restore(tmp_path / "own")) == jax.tree.structure(saved)
    raw = theirs.restore(tmp_path / "theirs")
    assert isinstance(raw["opt"], list)
    assert raw["opt"][1].keys() == {"3"}
    with pytest.raises(osl.UnexpectedTensorError, match="ema"):
        own.restore(tmp_path / "own", item=state)
    with pytest.raises(osl.MissingTensorError, match="ema"):
        own.restore(tmp_path / "own none", item=saved)
    assert theirs.restore(tmp_path / "theirs", item=state)["ema"] is None
    assert theirs.restore(tmp_path / "theirs none", item=saved)["ema"] is None
