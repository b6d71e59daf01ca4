"""Orbax v0: `Checkpointer` and `AsyncCheckpointer` that save with our handler."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_versions import enable_x64
from limits import full_disk
from meshes import mesh_of, place
from orbax_calls import save_standard
from saving import Gate, opened, tensor_files
from states import everything, same, train_state

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.writing import host

SAVES = [osl.SafetensorsSave, ocp.args.StandardSave, ocp.args.PyTreeSave]
VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(
    params=[
        (ocp.Checkpointer, osl.SafetensorsCheckpointHandler),
        (ocp.AsyncCheckpointer, osl.SafetensorsCheckpointHandler),
        (ocp.Checkpointer, osl.SafetensorsLayout),
        (ocp.AsyncCheckpointer, osl.SafetensorsLayout),
    ]
)
def checkpointer(request):
    kind, handler = request.param
    with kind(handler()) as checkpointer:
        yield checkpointer


@pytest.fixture
def asynchronous():
    with ocp.AsyncCheckpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        yield checkpointer


def finish(checkpointer):
    if isinstance(checkpointer, ocp.AsyncCheckpointer):
        checkpointer.wait_until_finished()


def test_a_save_that_is_cancelled_is_not_committed(tmp_path):
    gate = Gate()
    handler = osl.SafetensorsCheckpointHandler(write=gate.options)
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "step", args=osl.SafetensorsSave({"a": VALUES, "b": VALUES}))
        assert gate.reached.wait(30)
        checkpointer.cancel()
        gate.open()
        checkpointer.wait_until_finished()
        assert not (tmp_path / "step").exists()
        checkpointer.save(tmp_path / "next", args=osl.SafetensorsSave({"a": VALUES}))
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "next"), {"a": VALUES})


def test_a_save_within_a_mesh(tmp_path, asynchronous):
    """Elements of less than a byte are cut on the devices that hold them, one by one."""
    mesh = mesh_of(x=8)
    values = (np.arange(1 << 19) % 16 - 8).reshape(512, 1024).astype(ml_dtypes.int4)
    tree = {"w": place(values, P("x"), mesh)}
    with osl.using(write=osl.WriteOptions(memory_budget_bytes=64 << 10)), jax.set_mesh(mesh):
        asynchronous.save(tmp_path / "step", args=osl.SafetensorsSave(tree))
        asynchronous.wait_until_finished()
    same(asynchronous.restore(tmp_path / "step"), tree)


def test_a_save_that_failed_holds_no_copies(tmp_path, monkeypatch):
    """The program may keep its error, whose traceback leads to all that was prepared."""
    monkeypatch.setattr(host, "_on_host", lambda array: False)
    capture, copies = host.HostValues.capture, []

    def captured(values, *arguments):
        capture(values, *arguments)
        members = (copy for held in values._captured.values() for copy in held.members)
        copies.extend(map(weakref.ref, members))

    monkeypatch.setattr(host.HostValues, "capture", captured)
    tree = {name: place(VALUES, P("x"), mesh_of(x=8)) for name in "ab"}
    with ocp.AsyncCheckpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        with full_disk():
            checkpointer.save(tmp_path / "step", args=osl.SafetensorsSave(tree))
            with pytest.raises(osl.StorageError) as caught:
                checkpointer.wait_until_finished()
        assert copies
        gc.collect()
        assert not any(copy() is not None for copy in copies)
        assert caught.value is not None


@pytest.mark.parametrize("save", SAVES)
def test_everything_comes_back(tmp_path, checkpointer, save):
    tree = everything()
    checkpointer.save(tmp_path / "step", args=save(tree))
    finish(checkpointer)
    same(checkpointer.restore(tmp_path / "step"), tree)
    same(checkpointer.restore(tmp_path / "step", args=osl.SafetensorsRestore(tree)), tree)
    same(checkpointer.restore(tmp_path / "step", args=ocp.args.PyTreeRestore(tree)), tree)


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_in_the_place_of_orbaxs_checkpointers(tmp_path, kind):
    """Calls of `StandardCheckpointer` and `PyTreeCheckpointer` stay."""
    tree = {"w": place(np.arange(64.0, dtype=np.float32).reshape(8, 8), P("x")), "step": 3}
    with kind(osl.SafetensorsLayout()) as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
        getattr(checkpointer, "wait_until_finished", lambda: None)()
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        for loaded in (
            checkpointer.restore(tmp_path / "a"),
            checkpointer.restore(tmp_path / "a", tree),
            checkpointer.restore(tmp_path / "a", item=tree, restore_args=restore_args),
        ):
            same(loaded, tree)
        checkpointer.save(tmp_path / "a", {"w": tree["w"]}, force=True)
        getattr(checkpointer, "wait_until_finished", lambda: None)()
        same(checkpointer.restore(tmp_path / "a"), {"w": tree["w"]})


def keywords_of(*kinds):
    """The names of what Orbax's own methods and arguments take, but for the path."""
    return {name for kind in kinds for name in inspect.signature(kind).parameters} - {
        *("self", "directory")
    }


def test_keywords_of_orbaxs_checkpointers(tmp_path, checkpointer):
    """Of `StandardCheckpointer` and `PyTreeCheckpointer`: all that this release has."""
    sharding = NamedSharding(mesh_of(x=4, y=2), P("x"))
    tree = {"w": place(VALUES, P("x")), "step": 3}
    args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=jnp.bfloat16), tree)
    saves = {
        "state": tree,
        "item": tree,
        "save_args": args,
        "force": True,
        "custom_metadata": {"a": 1},
        "ocdbt_target_data_file_size": 1 << 20,
    }
    assert saves.keys() == keywords_of(ocp.StandardCheckpointer.save, ocp.args.PyTreeSave)
    for name, value in saves.items():
        item = {} if name in ("state", "item") else {"state": tree}
        checkpointer.save(tmp_path / name, **item, **{name: value})
        finish(checkpointer)
    assert checkpointer.metadata(tmp_path / "custom_metadata").custom_metadata == {"a": 1}
    assert checkpointer.restore(tmp_path / "save_args")["w"].dtype == jnp.bfloat16
    wide = {"w": jax.ShapeDtypeStruct((8, 16), np.float32, sharding=sharding), "step": 0}
    padded = place(np.pad(VALUES, ((0, 0), (0, 8))), P("x"))
    restores = {
        "target": (tree, tree),
        "item": (tree, tree),
        "restore_args": (ocp.checkpoint_utils.construct_restore_args(tree), tree),
        "strict": (False, tree | {"w": padded}),
        "support_layout": (True, tree),
        "fallback_sharding": (sharding, tree),
        "transforms": ({}, {"w": tree["w"]}),
        "transforms_default_to_original": (True, tree),
        "legacy_transform_fn": (None, tree),
        "partial_restore": (True, {"w": tree["w"]}),
    }
    assert restores.keys() == keywords_of(
        ocp.StandardCheckpointer.restore, ocp.args.StandardRestore, ocp.args.PyTreeRestore
    )
    for name, (value, expected) in restores.items():
        asked = {"strict": wide, "transforms": expected, "partial_restore": expected}
        item = {} if name in ("target", "item") else {"target": asked.get(name, tree)}
        loaded = checkpointer.restore(tmp_path / "state", **item, **{name: value})
        same(loaded, expected)
    same(checkpointer.restore(tmp_path / "state", wide, strict=False), tree | {"w": padded})
    unplaced = {"w": jax.ShapeDtypeStruct((8, 8), np.float32), "step": 0}
    save_standard(tmp_path / "orbaxs", tree)
    for folder in ("state", "orbaxs"):
        for item in ({}, {"target": unplaced}):
            loaded = checkpointer.restore(tmp_path / folder, fallback_sharding=sharding, **item)
            same(loaded, tree)
    same(checkpointer.restore(tmp_path / "orbaxs", wide, strict=False), tree | {"w": padded})


@pytest.mark.filterwarnings("ignore")  # of flax
def test_flax_training_checkpoints(tmp_path):
    checkpoints = pytest.importorskip("flax.training.checkpoints")
    state = train_state()
    for step in (1, 2, 3):
        ours = ocp.Checkpointer(osl.SafetensorsLayout())
        checkpoints.save_checkpoint(tmp_path, state, step, keep=2, orbax_checkpointer=ours)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_2", "checkpoint_3"}
    assert (tmp_path / "checkpoint_3" / "model.safetensors").exists()
    ours = ocp.Checkpointer(osl.SafetensorsLayout())
    restored = checkpoints.restore_checkpoint(tmp_path, state, orbax_checkpointer=ours)
    same(restored, state)


@pytest.mark.parametrize("restore", [ocp.args.StandardRestore, ocp.args.PyTreeRestore])
def test_a_train_state(tmp_path, checkpointer, restore):
    state = train_state()
    checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave(state))
    finish(checkpointer)
    same(checkpointer.restore(tmp_path / "step", args=restore(state)), state)
    restore_args = ocp.checkpoint_utils.construct_restore_args(state)
    args = ocp.args.PyTreeRestore(state, restore_args=restore_args)
    same(checkpointer.restore(tmp_path / "step", args=args), state)


@pytest.mark.parametrize("described", ["concrete", "abstract"])
def test_restore_args_of_a_tree_with_typed_keys(tmp_path, checkpointer, described):
    """Orbax describes concrete keys by their data, abstract ones by their own dtype."""
    tree = {
        "step": place(np.float32(1), P()),
        "key": jax.random.key(3, impl="rbg"),
        "keys": place(jax.random.split(jax.random.key(1), 8), P("x")),
    }
    checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave(tree))
    finish(checkpointer)
    item = tree
    if described == "abstract":
        item = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
        )
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    for args in (
        ocp.args.PyTreeRestore(item, restore_args=restore_args),
        ocp.args.PyTreeRestore(restore_args=restore_args),
        ocp.args.PyTreeRestore(restore_args=jax.tree.map(lambda _: ocp.ArrayRestoreArgs(), item)),
        ocp.args.StandardRestore(item, support_layout=True),
    ):
        same(checkpointer.restore(tmp_path / "step", args=args), tree)


def test_safetensors_reads_what_was_saved(tmp_path, checkpointer):
    tree = {"a": {"b": place(VALUES, P("x", "y"))}, "c": np.arange(3)}
    checkpointer.save(tmp_path / "step", tree)  # positional, as before there were args
    finish(checkpointer)
    stored = opened(tmp_path / "step")
    assert stored.keys() == {"a.b", "c"}
    assert_same_bits(stored["a.b"], VALUES)
    assert_same_bits(stored["c"], np.arange(3))


def test_an_empty_tree_is_an_error(tmp_path, checkpointer):
    for tree in ({}, [], None):
        with pytest.raises(ValueError, match="empty tree"):
            checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave(tree))
    checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave({"a": 1}))


def test_leaves_that_cannot_be_saved_are_named(tmp_path, checkpointer):
    with pytest.raises(osl.UnsupportedDtypeError, match=r"'a\.b'"):
        checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave({"a": {"b": object()}}))


def test_dtypes_of_save_args(tmp_path, checkpointer):
    half = ocp.SaveArgs(dtype=ml_dtypes.bfloat16)
    tree = {
        "half": place(VALUES, P("x", "y")),
        "same": place(VALUES, P("x", "y")),
        "count": jnp.arange(4),
        "value": 0.1,
        "key": jax.random.key(0),
    }
    save_args = {"half": half, "same": None, "count": half, "value": half, "key": half}
    checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave(tree, save_args=save_args))
    finish(checkpointer)
    stored = opened(tmp_path / "step")
    assert_same_bits(stored["half"], VALUES.astype(ml_dtypes.bfloat16))
    assert_same_bits(stored["same"], VALUES)
    assert_same_bits(stored["count"], np.arange(4).astype(ml_dtypes.bfloat16))
    restored = checkpointer.restore(tmp_path / "step")
    assert restored["half"].dtype == ml_dtypes.bfloat16
    assert restored["value"] == 0.1
    same(restored["key"], tree["key"])
    restored = checkpointer.restore(tmp_path / "step", args=ocp.args.StandardRestore(tree))
    assert restored["half"].dtype == np.float32


def test_dtype_of_a_leaf_goes_before_that_of_the_options(tmp_path):
    handler = osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(dtype=ml_dtypes.bfloat16))
    tree = {"a": VALUES, "b": VALUES}
    save_args = {"a": ocp.SaveArgs(dtype=np.float32), "b": ocp.SaveArgs()}
    ocp.Checkpointer(handler).save(tmp_path / "step", args=osl.SafetensorsSave(tree, save_args))
    stored = opened(tmp_path / "step")
    assert (stored["a"].dtype, stored["b"].dtype) == (np.float32, ml_dtypes.bfloat16)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float6_e3m2fn", "int4"])
def test_save_args_ask_for_dtypes_of_whole_bytes(tmp_path, dtype, layout):
    handler = osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(layout=layout))
    args = ocp.SaveArgs(dtype=np.dtype(dtype))
    own = np.ones((8, 8), dtype)
    ocp.Checkpointer(handler).save(
        tmp_path / "own", args=osl.SafetensorsSave({"a": own}, {"a": args})
    )
    same(osl.load(tmp_path / "own"), {"a": own})
    tree = {"a": own, "b": {"w": place(VALUES, P("x"))}}
    with pytest.raises(osl.UnsupportedDtypeError, match=r"'b\.w'") as caught:
        ocp.Checkpointer(handler).save(
            tmp_path / "a", args=osl.SafetensorsSave(tree, jax.tree.map(lambda _: args, tree))
        )
    assert f"expected: float32, or a dtype of whole bytes, found: {dtype}" in str(caught.value)


def test_save_args_of_another_structure(tmp_path, checkpointer):
    args = osl.SafetensorsSave({"a": 1, "b": 2}, {"a": ocp.SaveArgs()})
    with pytest.raises(osl.MismatchError, match="save_args does not fit the item"):
        checkpointer.save(tmp_path / "step", args=args)


def test_metadata_has_the_saved_structure(tmp_path, checkpointer):
    tree = everything()
    custom = {"run": [1, "a", None]}
    checkpointer.save(tmp_path / "step", args=osl.SafetensorsSave(tree, custom_metadata=custom))
    finish(checkpointer)
    metadata = checkpointer.metadata(tmp_path / "step").item_metadata
    assert metadata.custom_metadata == custom
    assert jax.tree.structure(metadata.tree) == jax.tree.structure(tree)
    array = metadata.tree["int4"]
    assert isinstance(array, ocp.metadata.ArrayMetadata)
    assert (array.name, array.shape, array.dtype) == ("int4", (8, 2), ml_dtypes.int4)
    assert array.sharding.to_jax_sharding() == NamedSharding(mesh_of(x=4, y=2), P("x"))
    assert array.storage.chunk_shape == (8, 2)
    assert isinstance(metadata.tree["scalars"]["int"], ocp.metadata.ScalarMetadata)
    assert isinstance(metadata.tree["scalars"]["text"], ocp.metadata.StringMetadata)
    keys = metadata.tree["keys"]
    assert (keys.shape, keys.dtype) == ((8,), tree["keys"].dtype)


def test_metadata_is_a_tree_to_restore(tmp_path, checkpointer):
    tree = everything()
    tree["host"][1:] = []  # numpy scalars come back as arrays of no dimension
    checkpointer.save(tmp_path / "step", args=osl.SafetensorsSave(tree))
    finish(checkpointer)
    metadata = checkpointer.metadata(tmp_path / "step").item_metadata
    for restore in (osl.SafetensorsRestore, ocp.args.StandardRestore):
        same(checkpointer.restore(tmp_path / "step", args=restore(metadata.tree)), tree)
    restored = checkpointer.restore(tmp_path / "step", args=osl.SafetensorsRestore(metadata))
    same(restored, tree)


def test_metadata_of_the_sharded_layout_has_the_pieces(tmp_path):
    handler = osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(layout="sharded"))
    checkpointer = ocp.Checkpointer(handler)
    checkpointer.save(tmp_path / "step", {"a": place(VALUES, P("x", "y")), "b": np.arange(3)})
    metadata = checkpointer.metadata(tmp_path / "step").item_metadata
    assert metadata["a"].storage.chunk_shape == (8, 8)  # one process writes merged boxes
    assert metadata["a"].shape == (8, 8)
    assert_same_bits(checkpointer.restore(tmp_path / "step")["a"], VALUES)


def test_custom_metadata_without_a_value(tmp_path, checkpointer):
    checkpointer.save(tmp_path / "step", {"a": VALUES})
    finish(checkpointer)
    assert checkpointer.metadata(tmp_path / "step").item_metadata.custom_metadata is None


def test_options_of_the_handler_and_of_using(tmp_path):
    handler = osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(max_file_bytes=300))
    checkpointer = ocp.Checkpointer(handler)
    tree = {"a": VALUES, "b": VALUES, "c": VALUES}

    def files(name):
        checkpointer.save(tmp_path / name, tree)
        return len(list((tmp_path / name).glob("*.safetensors")))

    assert files("handler") == 3
    with osl.using(write=osl.WriteOptions()):
        assert files("using") == 1
        with osl.using(read=osl.ReadOptions()):
            assert files("nested") == 1


def overwrite(arrays, how):
    if how == "donated":
        double = jax.jit(lambda x: jax.tree.map(lambda a: 2 * a, x), donate_argnums=0)
        return jax.block_until_ready(double(arrays))
    if how == "deleted":
        for array in jax.tree.leaves(arrays):
            array.delete()
    else:
        for array in jax.tree.leaves(arrays):
            array[...] = -1
    return None


@pytest.mark.parametrize("how", ["donated", "deleted", "overwritten"])
def test_what_was_saved_is_what_was_there_when_save_returned(tmp_path, how):
    gate = Gate()
    handler = osl.SafetensorsCheckpointHandler(write=gate.options)
    if how == "overwritten":
        tree = {name: VALUES + number for number, name in enumerate("abcd")}
    else:
        tree = {name: place(VALUES + number, P("x", "y")) for number, name in enumerate("abcd")}
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave(tree))
        assert gate.reached.wait(30)
        kept = overwrite(tree, how)
        assert not (tmp_path / "step").exists()
        gate.open()
        checkpointer.wait_until_finished()
    del kept
    stored = opened(tmp_path / "step")
    for number, name in enumerate("abcd"):
        assert_same_bits(stored[name], VALUES + number)


def test_saving_and_restoring_inside_a_running_event_loop(tmp_path, checkpointer):
    tree = {"a": place(VALUES, P("x", "y")), "step": 3}

    async def run():
        checkpointer.save(tmp_path / "step", args=ocp.args.StandardSave(tree))
        finish(checkpointer)
        return checkpointer.restore(tmp_path / "step")

    same(asyncio.run(run()), tree)


def test_the_handler_alone_inside_a_running_event_loop(tmp_path):
    handler = osl.SafetensorsCheckpointHandler()

    async def run():
        handler.save(tmp_path, args=osl.SafetensorsSave({"a": VALUES}))

    asyncio.run(run())
    assert_same_bits(opened(tmp_path)["a"], VALUES)


def test_x64_of_the_caller_reaches_the_writing_thread(tmp_path, asynchronous):
    with enable_x64(True):
        wide = jnp.array([2**40, 1], jnp.int64)
        asynchronous.save(tmp_path / "step", args=ocp.args.StandardSave({"a": wide}))
    asynchronous.wait_until_finished()
    assert_same_bits(opened(tmp_path / "step")["a"], np.array([2**40, 1]))


def test_an_error_in_the_background_comes_out_where_orbax_raises(tmp_path, asynchronous):
    big = np.zeros(100_000, np.float32)
    with full_disk():
        asynchronous.save(tmp_path / "bad", args=ocp.args.StandardSave({"a": big}))
        with pytest.raises(osl.StorageError, match=r"model\.safetensors"):
            asynchronous.wait_until_finished()
        asynchronous.save(tmp_path / "worse", args=ocp.args.StandardSave({"a": big}))
        with pytest.raises(osl.StorageError, match=r"model\.safetensors"):
            asynchronous.save(tmp_path / "again", args=ocp.args.StandardSave({"a": big}))
    assert not (tmp_path / "bad").exists()
    asynchronous.save(tmp_path / "bad", args=ocp.args.StandardSave({"a": big}))
    asynchronous.wait_until_finished()
    assert_same_bits(opened(tmp_path / "bad")["a"], big)


def test_an_error_of_a_blocking_save(tmp_path):
    checkpointer = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    big = np.zeros(100_000, np.float32)
    with full_disk(), pytest.raises(osl.StorageError, match=r"model\.safetensors"):
        checkpointer.save(tmp_path / "step", {"a": big})
    assert not (tmp_path / "step").exists()
    checkpointer.save(tmp_path / "step", {"a": big})


def test_orbaxs_own_handler_says_what_the_folder_holds(tmp_path, checkpointer):
    checkpointer.save(tmp_path / "step", {"a": VALUES})
    finish(checkpointer)
    with pytest.raises(ValueError, match=r"holds safetensors files.*handler_registry"):
        ocp.StandardCheckpointer().restore(tmp_path / "step")


def test_names_and_bytes_are_those_of_a_direct_save(tmp_path, checkpointer):
    tree = everything()
    checkpointer.save(tmp_path / "orbax", args=ocp.args.StandardSave(tree))
    finish(checkpointer)
    osl.save(tmp_path / "direct", tree)
    files = tensor_files(tmp_path / "orbax")
    for orbaxs in ("_METADATA", "_CHECKPOINT_METADATA"):
        del files[orbaxs]
    assert files == tensor_files(tmp_path / "direct")
