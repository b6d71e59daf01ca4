"""Runs of Orbax v0 that hold steps in Orbax's own format, and go on with our handler."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from checkpoints import assert_same_bits
from jax.sharding import PartitionSpec as P
from meshes import abstract_of, place
from orbax_calls import installed, layout_context, save_standard
from programs import run_processes
from saving import opened
from states import same

import orbax_safetensors_layout as osl

# Orbax's, of `PyTreeRestore` without shardings, with any handler.
SHARDINGS_ARE_READ = pytest.mark.filterwarnings("ignore:Sharding info not provided")
VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)
PAIRS = {
    "standard": (ocp.StandardCheckpointHandler, ocp.args.StandardSave, ocp.args.StandardRestore),
    "pytree": (ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
}
CHANGES = {
    "registry": lambda: {"handler_registry": osl.handler_registry("default")},
    "handler": lambda: {"item_handlers": osl.SafetensorsCheckpointHandler()},
    "layout": lambda: {"item_handlers": osl.SafetensorsLayout()},
}
HOST = np.zeros((8, 8), np.float32)
NAMED = {
    "registry": lambda: {"handler_registry": osl.handler_registry("state")},
    "handlers": lambda: {
        "item_handlers": {
            "state": osl.SafetensorsLayout(),
            "config": ocp.JsonCheckpointHandler(),
        }
    },
    "names": lambda: {
        "item_names": ("state", "config"),
        "item_handlers": {"state": osl.SafetensorsCheckpointHandler()},
    },
}


def state(step=0):
    return {
        "w": place(VALUES + step, P("x", "y")),
        "host": np.arange(3, dtype=np.int16) + step,
        "key": jax.random.key(step),
        "layers": [{"b": place(VALUES[0] - step, P("x"))}],
        "step": step,
        "rate": 0.5,
    }


def holds_safetensors(root, step, item="default"):
    return osl.is_safetensors_checkpoint(root / str(step) / item)


@pytest.mark.parametrize(
    ("pair", "use_ocdbt", "change"),
    [
        ("standard", True, "registry"),
        ("standard", False, "handler"),
        ("standard", True, "layout"),
        ("pytree", True, "handler"),
        ("pytree", False, "registry"),
    ],
)
@SHARDINGS_ARE_READ
def test_one_line_is_changed(tmp_path, pair, use_ocdbt, change):
    handler, save, restore = PAIRS[pair]
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    orbaxs = handler(use_ocdbt=use_ocdbt)
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=orbaxs) as manager:
        for step in range(3):
            manager.save(step, args=save(state(step)))
        manager.wait_until_finished()
        orbaxs_metadata = manager.item_metadata(2)

    changed = CHANGES[change]()
    with ocp.CheckpointManager(tmp_path, options=options, **changed) as manager:
        assert manager.latest_step() == 2
        assert jax.tree.structure(manager.item_metadata(2).tree) == jax.tree.structure(
            orbaxs_metadata.tree
        )
        same(manager.restore(2), state(2))
        same(manager.restore(2, args=restore()), state(2))
        same(manager.restore(None, args=restore(state())), state(2))
        same(manager.restore(2, args=restore(abstract_of(state()))), state(2))
        same(manager.restore(2, args=osl.SafetensorsRestore(abstract_of(state()))), state(2))

        manager.save(3, args=save(state(3)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
        assert [holds_safetensors(tmp_path, step) for step in (1, 2, 3)] == [False, False, True]
        for step in (1, 2, 3):
            same(manager.restore(step, args=restore(abstract_of(state()))), state(step))
            same(manager.restore(step), state(step))
        manager.save(4, args=save(state(4)))
        manager.save(5, args=save(state(5)))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5]
    assert_same_bits(opened(tmp_path / "5" / "default")["w"], VALUES + 5)
    with ocp.CheckpointManager(tmp_path, options=options, **CHANGES[change]()) as manager:
        same(manager.restore(manager.latest_step()), state(5))


def test_restore_args_on_a_step_of_orbax(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state(1)))
    everywhere = place(VALUES, P()).sharding
    moved = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=everywhere)}
    with ocp.CheckpointManager(tmp_path, **CHANGES["registry"]()) as manager:
        restore_args = ocp.checkpoint_utils.construct_restore_args(moved)
        for args in (
            osl.SafetensorsRestore(moved, partial_restore=True),
            osl.SafetensorsRestore(moved, restore_args, partial_restore=True),
            ocp.args.PyTreeRestore(moved, restore_args=restore_args, partial_restore=True),
        ):
            same(manager.restore(0, args=args), {"w": place(VALUES + 1, P())})


def items_of(state, metadata):
    """Return what `SafetensorsRestore` takes for the leaves of a state."""
    unplaced = jax.ShapeDtypeStruct((8, 8), np.float32)
    return {
        "concrete": state,
        "abstract": abstract_of(state),
        "without a sharding": state | {"w": unplaced},
        "types": state | {"step": int, "rate": float, "name": str},
        "a placeholder": state | {"w": ..., "layers": [{"b": ...}]},
        "metadata": metadata,
        "the metadata's tree": metadata.tree,
    }


def test_both_formats_are_restored_alike(tmp_path):
    tree = state(3) | {"name": "run"}
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    ours.save(tmp_path / "ours", args=ocp.args.PyTreeSave(tree))
    orbaxs = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    orbaxs.save(tmp_path / "orbaxs", args=ocp.args.PyTreeSave(tree))

    def restored(name, args):
        return ours.restore(tmp_path / name, args=args)

    metadata = ours.metadata(tmp_path / "orbaxs").item_metadata
    for item in items_of(tree, metadata).values():
        args = osl.SafetensorsRestore(item)
        same(restored("orbaxs", args), restored("ours", args))
    part = {"w": jax.ShapeDtypeStruct((8, 8), np.float32), "step": 0}
    args = osl.SafetensorsRestore(part, partial_restore=True)
    same(restored("orbaxs", args), restored("ours", args))


def test_a_mapping_is_for_safetensors_files_alone(tmp_path):
    def tree(step):
        return {"kernel": place(VALUES + step, P("x", "y"))}

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree(0)))
    mapping = osl.Mapping([osl.rule("kernel", osl.tensor("weight").transpose())])
    registry = osl.handler_registry("default", mapping=mapping)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        for step in (0, 1):
            restored = manager.restore(step, args=ocp.args.StandardRestore(abstract_of(tree(0))))
            same(restored, tree(step))
    assert_same_bits(opened(tmp_path / "1" / "default")["weight"], (VALUES + 1).T)


@pytest.mark.parametrize(
    "given",
    [
        {"transforms": {"b": ocp.Transform(original_key="a")}},
        {
            "transforms": {"b": ocp.Transform(original_key="a")},
            "transforms_default_to_original": False,
        },
        {"transforms": {}, "transforms_default_to_original": False},
        {"transforms": {}},
        {"partial_restore": True},
    ],
)
def test_transformations_of_orbaxs_own_format_are_orbaxs(tmp_path, given):
    save_standard(tmp_path / "a", {"a": VALUES, "x": VALUES})
    item = {"a": HOST, "b": HOST}
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    expected = ocp.PyTreeCheckpointer().restore(
        tmp_path / "a", item=item, restore_args=restore_args, **given
    )
    ours = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    for kind in (ocp.args.PyTreeRestore, osl.SafetensorsRestore):
        restored = ours.restore(tmp_path / "a", args=kind(item, restore_args=restore_args, **given))
        for name in item:
            assert (restored[name] is HOST) == (expected[name] is HOST)
            np.testing.assert_array_equal(restored[name], expected[name])


def test_a_mapping_in_the_arguments_is_refused_for_orbaxs_own_format(tmp_path):
    save_standard(tmp_path / "a", {"weight": place(VALUES, P("x"))})
    mapping = osl.Mapping([osl.rule("kernel", osl.tensor("weight").transpose())])
    checkpointer = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    item = {"kernel": jax.ShapeDtypeStruct((8, 8), np.float32)}
    with pytest.raises(osl.SafetensorsLayoutError, match=r"through a mapping.*inverse=False"):
        checkpointer.restore(tmp_path / "a", args=osl.SafetensorsRestore(item, mapping=mapping))
    osl.convert(tmp_path / "a", tmp_path / "b", mapping=mapping, inverse=False)
    loaded = checkpointer.restore(tmp_path / "b", args=osl.SafetensorsRestore(item))
    assert_same_bits(loaded["kernel"], VALUES.T)


@pytest.mark.parametrize("change", NAMED)
def test_named_items_beside_a_json_item(tmp_path, change):
    def items(step):
        return ocp.args.Composite(
            state=ocp.args.StandardSave(state(step)), config=ocp.args.JsonSave({"lr": step})
        )

    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_of(state())), config=ocp.args.JsonRestore()
    )
    with ocp.CheckpointManager(tmp_path, item_names=("state", "config")) as manager:
        manager.save(0, args=items(0))
    with ocp.CheckpointManager(tmp_path, **NAMED[change]()) as manager:
        assert manager.latest_step() == 0
        assert set(manager.item_metadata(0).state.tree) == {*state()}
        same(manager.restore(0, args=args).state, state(0))
        manager.save(1, args=items(1))
        manager.wait_until_finished()
        for step in (0, 1):
            restored = manager.restore(step, args=args)
            same(restored.state, state(step))
            assert restored.config == {"lr": step}
            same(manager.restore(step, args=ocp.args.Composite(state=None)).state, state(step))
    assert not holds_safetensors(tmp_path, 0, "state")
    assert holds_safetensors(tmp_path, 1, "state")


def test_args_of_ours_under_item_names(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        manager.save(0, args=ocp.args.Composite(state=osl.SafetensorsSave(state(0))))
        manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(state(1))))
        manager.wait_until_finished()
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_of(state())))
        for step in (0, 1):
            assert holds_safetensors(tmp_path, step, "state")
            same(manager.restore(step, args=args).state, state(step))


def test_a_checkpointer_reads_both(tmp_path):
    save_standard(tmp_path / "a", state(1))
    with ocp.Checkpointer(osl.SafetensorsLayout()) as checkpointer:
        same(checkpointer.restore(tmp_path / "a"), state(1))
        assert set(checkpointer.metadata(tmp_path / "a").item_metadata.tree) == {*state()}
        checkpointer.save(tmp_path / "a", state(2), force=True)
        same(checkpointer.restore(tmp_path / "a"), state(2))


def test_without_the_registry_orbax_says_what_the_steps_need(tmp_path):
    with ocp.CheckpointManager(tmp_path, **CHANGES["registry"]()) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": VALUES}))
    told = r"safetensors files.*handler_registry=osl\.handler_registry.*osl\.convert"
    target = {"w": VALUES}
    for args in (
        ocp.args.StandardRestore(target),
        ocp.args.StandardRestore(),
        ocp.args.PyTreeRestore(target),
        ocp.args.PyTreeRestore(
            target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
        ),
        ocp.args.PyTreeRestore({"w": VALUES}, partial_restore=True),
    ):
        with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=told):
            manager.restore(0, args=args)
    for handler in (ocp.StandardCheckpointHandler(), ocp.PyTreeCheckpointHandler()):
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            with pytest.raises(ValueError, match=told):
                manager.restore(0)
            with pytest.raises(ValueError, match=told):
                manager.item_metadata(0)


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ocp.args.PyTreeSave])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_registered_item_that_cannot_be_used_is_an_error(tmp_path, save, asynchronous):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)

    def manager_of(name, *more):
        registry = osl.handler_registry(name, *more)
        root = tmp_path / name
        return ocp.CheckpointManager(root, options=options, handler_registry=registry)

    told = r'item "default" is not registered.*"state".*handler_registry\("default"\)'
    with manager_of("state", "more") as manager:
        with pytest.raises(osl.SafetensorsLayoutError, match=told):
            manager.save(0, args=save({"w": VALUES}))
        assert manager.all_steps() == []
    told = r'item "state" is not registered.*"default".*handler_registry\("state"\)'
    with manager_of("default") as manager:
        args = ocp.args.Composite(state=save({"w": VALUES}), config=ocp.args.JsonSave({}))
        with pytest.raises(osl.SafetensorsLayoutError, match=told):
            manager.save(0, args=args)
        assert manager.all_steps() == []


def test_an_item_beside_one_that_is_not_used_yet_is_a_warning(tmp_path):
    def items(**trees):
        return ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in trees.items()})

    def manager_of():
        return ocp.CheckpointManager(tmp_path, handler_registry=osl.handler_registry("state"))

    tree = {"w": VALUES}
    with manager_of() as manager:
        with pytest.warns(UserWarning, match=r'item "a" is not registered.*Orbax\'s own format'):
            manager.save(0, args=items(a=tree))
        manager.save(1, args=items(a=tree, state=tree, z=tree))
        manager.save(2, args=items(a=tree))
        manager.wait_until_finished()
        for step in (0, 1, 2):
            args = ocp.args.Composite(a=ocp.args.StandardRestore(tree))
            assert_same_bits(manager.restore(step, args=args).a["w"], VALUES)
        assert_same_bits(manager.restore(1).z["w"], VALUES)
    assert holds_safetensors(tmp_path, 1, "state")
    assert not holds_safetensors(tmp_path, 1, "a")
    with manager_of() as manager:  # what was restored is used
        manager.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore(tree)))
        manager.save(3, args=items(a=tree))
    with ocp.CheckpointManager(tmp_path) as manager:  # what Orbax saved needs nothing of ours
        args = ocp.args.Composite(a=ocp.args.StandardRestore(tree))
        assert_same_bits(manager.restore(3, args=args).a["w"], VALUES)


def test_each_registered_item_of_each_manager_counts(tmp_path):
    def items(**trees):
        return ocp.args.Composite(**{k: ocp.args.StandardSave({"w": VALUES}) for k in trees})

    registry = osl.handler_registry("params", "opt_state")

    def manager_of(name):
        return ocp.CheckpointManager(tmp_path / name, handler_registry=registry)

    told = r'item "opt" is not registered.*\("opt_state"\)'
    with manager_of("a") as manager:
        with pytest.warns(UserWarning, match=told):
            manager.save(0, args=items(params=1, opt=1))
        manager.save(1, args=items(params=1, opt=1, opt_state=1))
        manager.save(2, args=items(params=1, opt=1))
    with manager_of("b") as manager, pytest.warns(UserWarning, match=told):
        manager.save(0, args=items(params=1, opt=1))
    assert not holds_safetensors(tmp_path / "a", 0, "opt")


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    "change", [lambda: osl.context("state"), lambda: layout_context(osl.SafetensorsLayout)]
)
@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "files"])
def test_a_run_of_v1_goes_on(tmp_path, change, use_ocdbt):
    w = place(VALUES, P("y", "x"))
    placed = w.sharding
    tree = {"w": w, "step": 3}
    abstract = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=placed), "step": 0}
    orbaxs = ocp_v1.Context()
    orbaxs.array.saving.use_ocdbt = use_ocdbt
    with ocp_v1.training.Checkpointer(tmp_path, context=orbaxs) as training:
        training.save(0, tree)
    for context in (change(), ocp_v1.Context(change())):
        with ocp_v1.training.Checkpointer(tmp_path, context=context) as training:
            assert training.latest.step == 0
            for loaded in (training.load(0), training.load(), training.load(0, abstract)):
                assert_same_bits(loaded["w"], VALUES)
                assert loaded["w"].sharding == placed
                assert loaded["step"] == 3
            assert training.metadata(0).metadata["w"].shape == (8, 8)
        with context:
            assert_same_bits(ocp_v1.load_checkpointables(tmp_path / "0")["state"]["w"], VALUES)
    with ocp_v1.training.Checkpointer(tmp_path, context=context) as training:
        training.save(1, {"w": VALUES + 1, "step": 4})
        assert_same_bits(training.load(1)["w"], VALUES + 1)
        assert_same_bits(training.load(0)["w"], VALUES)
    assert holds_safetensors(tmp_path, 1, "state")


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_run_of_v1_goes_on_in_the_installed_layout(tmp_path):
    with ocp_v1.training.Checkpointer(tmp_path) as training:
        training.save(0, {"w": VALUES})
    with (
        installed(),
        ocp_v1.training.Checkpointer(tmp_path, context=layout_context()) as training,
    ):
        assert_same_bits(training.load(0)["w"], VALUES)
        assert training.metadata(0).metadata["w"].shape == (8, 8)
        training.save(1, {"w": VALUES + 1})
        assert_same_bits(training.load(1)["w"], VALUES + 1)
        assert_same_bits(training.load(0)["w"], VALUES)
    assert holds_safetensors(tmp_path, 1, "state")


@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "files"])
def test_two_processes(tmp_path, use_ocdbt):
    results = run_processes(
        "existing_run_two_processes.py",
        processes=2,
        devices=2,
        root=str(tmp_path),
        use_ocdbt=use_ocdbt,
    )
    assert results == [[True] * 4] * 2
    assert_same_bits(opened(tmp_path / "3" / "default")["w"], VALUES + 3)


def test_what_this_package_saved_is_restored_under_a_slip_in_the_registered_name(tmp_path):
    saved = {"w": VALUES}
    with ocp.CheckpointManager(
        tmp_path / "v0", handler_registry=osl.handler_registry("params", "params")
    ) as manager:
        manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(saved)))
    with ocp.CheckpointManager(
        tmp_path / "v0", handler_registry=osl.handler_registry("parms")
    ) as manager:
        args = ocp.args.Composite(params=ocp.args.StandardRestore({"w": VALUES}))
        same(manager.restore(0, args=args).params, saved)
    with osl.context("state"):
        ocp_v1.save(tmp_path / "v1", saved)
    with osl.context("stat") as slip, osl.context("other", base=slip):
        same(ocp_v1.load(tmp_path / "v1"), saved)
        same(ocp_v1.load_checkpointables(tmp_path / "v1", {"state": saved})["state"], saved)
        assert ocp_v1.metadata(tmp_path / "v1").metadata["w"].shape == VALUES.shape


@pytest.mark.parametrize(
    ("save", "restore"),
    [
        (ocp.args.JsonSave({"position": 1}), ocp.args.JsonRestore()),
        (ocp.args.ArraySave(VALUES), ocp.args.ArrayRestore()),
    ],
)
def test_an_item_that_is_registered_and_is_no_tree_is_one_sentence(tmp_path, save, restore):
    told = (
        rf'^item "data" is registered as a tree, and {type(save).__name__} is not for trees\. Name'
        r" only the items that are trees in `osl\.handler_registry`\.$"
    )
    params = ocp.args.StandardSave({"w": VALUES})
    registry = osl.handler_registry("params", "data")
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        with pytest.raises(osl.SafetensorsLayoutError, match=told):
            manager.save(0, args=ocp.args.Composite(params=params, data=save))
        assert manager.all_steps() == []
    registry = osl.handler_registry("params")  # as the hint says
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.Composite(params=params, data=save))
        restored = manager.restore(0, args=ocp.args.Composite(data=restore)).data
    registry = osl.handler_registry("params", "data")
    with (
        ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager,
        pytest.raises(osl.SafetensorsLayoutError, match=r"Restore.* is not for trees"),
    ):
        manager.restore(0, args=ocp.args.Composite(data=restore))
    same({"data": restored}, {"data": save.item})


@pytest.mark.parametrize("make", [osl.context, osl.handler_registry])
@pytest.mark.parametrize("names", [(), ("",), ("a/b",), (["a"],), (None,)])
def test_names_of_items_are_checked(make, names):
    with pytest.raises(ValueError, match=r"item_names must be names of items \("):
        make(*names)
