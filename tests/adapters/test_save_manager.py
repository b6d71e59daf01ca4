"""Orbax v0: a `CheckpointManager` whose items are saved by our handler."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same_bits
from jax.sharding import PartitionSpec as P
from limits import full_disk
from meshes import place
from programs import run_alone
from saving import Gate, opened
from states import everything, same, train_state

import orbax_safetensors_layout as osl

VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)
COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


@pytest.fixture(params=["async", "sync"])
def is_async(request):
    return request.param == "async"


def manager_of(root, *names, write=None, **options):
    registry = osl.handler_registry(*(names or ("default",)), write=write)
    options = ocp.CheckpointManagerOptions(**options)
    return ocp.CheckpointManager(root, options=options, handler_registry=registry)


def state(step=0):
    return {"w": place(VALUES + step, P("x", "y")), "step": step}


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ocp.args.PyTreeSave])
@pytest.mark.parametrize("restore", [ocp.args.StandardRestore, ocp.args.PyTreeRestore])
def test_an_unchanged_pipeline(tmp_path, is_async, save, restore):
    trained = train_state()
    with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
        assert manager.save(0, args=save(trained))
        assert manager.save(1, args=save(everything()))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        same(manager.restore(0, args=restore(trained)), trained)
        same(manager.restore(1), everything())
        same(manager.restore(None), everything())


def test_metrics_and_what_is_kept(tmp_path, is_async):
    kept = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 2}
    with manager_of(tmp_path, enable_async_checkpointing=is_async, **kept) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            args = ocp.args.StandardSave(state(step))
            manager.save(step, args=args, metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step() == 1
        assert manager.all_steps() == [1, 2]
        assert manager.metrics(1) == {"loss": 1.0}
        same(manager.restore(manager.best_step()), state(1))
    with manager_of(tmp_path, **kept) as manager:
        assert manager.best_step() == 1


def test_composite_with_a_json_item(tmp_path, is_async):
    config = {"lr": 0.1, "name": "run"}
    names = ("params", "opt")
    with manager_of(tmp_path, *names, enable_async_checkpointing=is_async) as manager:
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state(1)),
            opt=osl.SafetensorsSave({"count": 2}),
            config=ocp.args.JsonSave(config),
        )
        manager.save(5, args=args)
        manager.wait_until_finished()
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(state()), opt=None, config=ocp.args.JsonRestore()
        )
        restored = manager.restore(5, args=args)
        same(restored.params, state(1))
        assert restored.opt == {"count": 2}
        assert restored.config == config
    assert json.loads((tmp_path / "5" / "config" / "metadata").read_text()) == config
    assert_same_bits(opened(tmp_path / "5" / "params")["w"], VALUES + 1)


def test_custom_metadata_of_item_step_and_manager(tmp_path, is_async):
    registry = osl.handler_registry("default")
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async)
    root = {"experiment": "a"}
    with ocp.CheckpointManager(
        tmp_path, options=options, handler_registry=registry, metadata=root
    ) as manager:
        args = ocp.args.StandardSave(state(), custom_metadata={"item": [1]})
        manager.save(0, args=args, custom_metadata={"step": [2]})
        manager.wait_until_finished()
        assert manager.item_metadata(0).custom_metadata == {"item": [1]}
        assert manager.metadata(0).custom_metadata == {"step": [2]}
        assert manager.metadata().custom_metadata == root


def test_item_metadata_is_a_tree_to_restore(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()
        metadata = manager.item_metadata(0)
        assert isinstance(metadata["w"], ocp.metadata.ArrayMetadata)
        same(manager.restore(0, args=ocp.args.StandardRestore(metadata)), state())


def test_commit_file(tmp_path, is_async):
    registry = osl.handler_registry("default")
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=is_async, atomicity_options=COMMIT_FILE
    )
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.StandardSave(everything()))
        manager.wait_until_finished()
        same(manager.restore(0), everything())
    assert (tmp_path / "0" / "commit_success.txt").exists()


def test_the_sharded_layout(tmp_path, is_async):
    write = osl.WriteOptions(layout="sharded")
    with manager_of(tmp_path, write=write, enable_async_checkpointing=is_async) as manager:
        manager.save(0, args=ocp.args.StandardSave(everything()))
        manager.wait_until_finished()
        same(manager.restore(0), everything())
        same(manager.restore(0, args=ocp.args.StandardRestore(everything())), everything())


def test_empty_trees_are_an_error_and_the_next_save_works(tmp_path, is_async):
    with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
        with pytest.raises(osl.InvalidArgumentError, match="empty tree"):
            manager.save(0, args=ocp.args.StandardSave({}))
        manager.save(1, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_a_save_is_in_the_background(tmp_path):
    gate = Gate()
    with manager_of(tmp_path, write=gate.options) as manager:
        manager.save(0, args=ocp.args.StandardSave(state()))
        assert gate.reached.wait(30)
        assert manager.is_saving_in_progress()
        assert not (tmp_path / "0").exists()
        gate.open()
        manager.wait_until_finished()
        assert (tmp_path / "0").exists()


def test_a_full_disk_leaves_the_last_step_and_the_next_save_works(tmp_path, is_async):
    with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
        manager.save(0, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()

        def fail():
            manager.save(1, args=ocp.args.StandardSave({"big": np.zeros(100_000)}))
            manager.wait_until_finished()

        with full_disk(8192), pytest.raises(osl.StorageError, match=r"model\.safetensors"):
            fail()
        assert ocp.utils.checkpoint_steps(tmp_path) == [0]
        manager.reload()
        assert manager.latest_step() == 0
        same(manager.restore(0), state())
        manager.save(2, args=ocp.args.StandardSave(state(2)))
        manager.wait_until_finished()
        assert manager.latest_step() == 2
        same(manager.restore(2), state(2))
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [0, 2]


def test_the_next_save_raises_what_the_last_one_met(tmp_path):
    with manager_of(tmp_path) as manager:
        with full_disk(8192):
            manager.save(0, args=ocp.args.StandardSave({"big": np.zeros(100_000)}))
            with pytest.raises(osl.StorageError, match=r"model\.safetensors"):
                manager.save(1, args=ocp.args.StandardSave(state()))
        manager.reload()
        manager.save(1, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_inside_a_running_event_loop(tmp_path, is_async):
    async def work():
        with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
            manager.save(0, args=ocp.args.StandardSave(state()))
            manager.wait_until_finished()
            return manager.restore(0)

    same(asyncio.run(work()), state())


def test_a_handler_given_as_such(tmp_path, is_async):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async)
    handler = osl.SafetensorsCheckpointHandler()
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handler) as manager:
        manager.save(0, args=osl.SafetensorsSave(state()))
        manager.wait_until_finished()
        same(manager.restore(0, args=osl.SafetensorsRestore(state())), state())
        same(manager.restore(0), state())
        assert manager.item_metadata(0)["w"].shape == (8, 8)


def test_args_of_ours_need_no_registry(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.Composite(params=osl.SafetensorsSave(state()))
        manager.save(0, args=args)
        manager.wait_until_finished()
        args = ocp.args.Composite(params=osl.SafetensorsRestore(state()))
        same(manager.restore(0, args=args).params, state())


@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_save_that_fails_at_once_lets_the_program_end(tmp_path, how):
    assert run_alone("save_manager_refused.py", tmp_path, how) == "refused\n"


@pytest.mark.parametrize("how", ["registry", "import"])
def test_a_fresh_process_restores_without_arguments(tmp_path, how):
    with manager_of(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave(state(3)))
    assert run_alone("save_manager_resumes.py", tmp_path, how).endswith("7 3 (8, 8)\n")


def test_a_step_that_was_deleted_is_saved_again(tmp_path, is_async):
    with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
        manager.save(0, args=ocp.args.StandardSave(state(0)))
        manager.wait_until_finished()
        assert not manager.save(0, args=ocp.args.StandardSave(state(1)))
        manager.delete(0)
        manager.save(0, args=ocp.args.StandardSave(state(1)))
        manager.wait_until_finished()
        same(manager.restore(0), state(1))


def test_a_direct_load_of_a_step(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state(1)))
    same(osl.load(tmp_path / "1"), state(1))
    same(osl.load(tmp_path / "1" / "default"), state(1))


def test_a_save_that_was_given_up_does_not_mix_with_the_next(tmp_path, is_async):
    """One item of a step cannot be saved; the thread of the other goes on for a while."""
    gate = Gate()
    threading.Timer(0.5, gate.open).start()
    first = osl.WriteOptions(max_file_bytes=1, concurrency=1, progress=gate.options.progress)

    def let_the_first_go_on(_):
        gate.open()
        for thread in threading.enumerate():
            if thread in at_work:
                thread.join(30)

    with manager_of(tmp_path, "a", "b", enable_async_checkpointing=is_async) as manager:

        def save(value, other, write):
            args = {"a": {name: np.full(1000, value) for name in "xyz"[: 4 - value]}, "b": other}
            with osl.using(write=write):
                items = {name: ocp.args.StandardSave(item) for name, item in args.items()}
                manager.save(5, args=ocp.args.Composite(**items))

        before = {*threading.enumerate()}
        with pytest.raises(osl.UnsupportedDtypeError):
            save(1, {"bad": object()}, first)
        assert gate.reached.wait(30)
        at_work = {t for t in threading.enumerate() if t.name == "safetensors_save"} - before
        save(2, {"good": 1}, dataclasses.replace(first, progress=let_the_first_go_on))
        manager.wait_until_finished()
        restored = manager.restore(5)
    assert restored["b"] == {"good": 1}
    assert [*restored["a"]] == ["x", "y"]
    assert all((value == 2).all() for value in restored["a"].values())
    files = {path.name for path in (tmp_path / "5" / "a").glob("*.safetensors")}
    assert files == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


def test_the_last_reference_to_what_is_saved_may_go(tmp_path):
    gate = Gate()
    with manager_of(tmp_path, write=gate.options) as manager:
        tree = {name: place(VALUES + number, P("x")) for number, name in enumerate("abc")}
        manager.save(0, args=ocp.args.StandardSave(tree))
        assert gate.reached.wait(30)
        for array in jax.tree.leaves(tree):
            array.delete()
        del tree
        gate.open()
        manager.wait_until_finished()
    assert_same_bits(opened(tmp_path / "0" / "default")["c"], VALUES + 2)
