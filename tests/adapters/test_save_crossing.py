"""Each API of Orbax restores what the other saved; and both leave the same files."""

from __future__ import annotations

import numpy as np
import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import safetensors
from checkpoints import assert_same_bits
from orbax_calls import installed, installed_context, layout_context
from saving import tensor_files
from states import everything, same, train_state

import orbax_safetensors_layout as osl


def context(*names):
    return lambda: osl.context(*names)


def save_v0(root, tree, name="default"):
    with ocp0.CheckpointManager(root, handler_registry=osl.handler_registry(name)) as manager:
        save = ocp0.args.StandardSave(tree)
        manager.save(0, args=save if name == "default" else ocp0.args.Composite(**{name: save}))
    return root / "0"


def restore_v0(root, name, item=None):
    with ocp0.CheckpointManager(root, handler_registry=osl.handler_registry(name)) as manager:
        args = ocp0.args.Composite(**{name: item and ocp0.args.StandardRestore(item)})
        return manager.restore(0, args=args)[name]


@pytest.mark.parametrize("name", ["default", "state", "params"])
@pytest.mark.parametrize("route", ["context", "layout", "auto"])
def test_v1_loads_what_v0_saved(tmp_path, name, route):
    step = save_v0(tmp_path, everything(), name)
    ways = {"context": context(name), "layout": installed_context, "auto": installed}
    with ways[route]():
        same(ocp.load(step), everything())
        same(ocp.load(step, everything()), everything())
        same(ocp.load_checkpointables(step), {name: everything()})
        assert ocp.metadata(step).metadata["scalars"]["int"] is int


@pytest.mark.parametrize("route", [context("state"), installed_context, installed])
def test_v1_loads_what_a_checkpointer_of_v0_saved(tmp_path, route):
    with ocp0.Checkpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", everything())
    with route():
        same(ocp.load(tmp_path / "a", checkpointable_name=None), everything())
        same(ocp.load(tmp_path / "a"), everything())


@pytest.mark.parametrize("route", [context("state"), installed_context])
def test_v0_restores_what_v1_saved(tmp_path, route):
    tree = train_state()
    with route():
        ocp.save(tmp_path / "0", tree)
    same(restore_v0(tmp_path, "state", tree), tree)
    with ocp0.CheckpointManager(
        tmp_path, handler_registry=osl.handler_registry("state")
    ) as manager:
        metadata = manager.item_metadata(0)["state"]
        assert metadata["params"]["params"]["kernel"].shape == (8, 4)
    item = ocp0.Checkpointer(osl.SafetensorsCheckpointHandler()).restore(tmp_path / "0" / "state")
    same(item["params"], tree.params)


def test_v0_restores_steps_of_a_v1_training_checkpointer(tmp_path):
    with ocp.training.Checkpointer(tmp_path, context=osl.context("state")) as training:
        training.save(0, everything(), metrics={"loss": 1.0})
    same(restore_v0(tmp_path, "state"), everything())
    with ocp0.CheckpointManager(tmp_path) as manager:  # by the recorded name of the handler
        same(manager.restore(0)["state"], everything())


def test_a_v1_training_checkpointer_goes_on_with_steps_of_v0(tmp_path):
    save_v0(tmp_path, everything(), "state")
    with ocp.training.Checkpointer(tmp_path, context=osl.context("state")) as training:
        assert training.latest.step == 0
        same(training.load(), everything())
        training.save(1, {"a": np.arange(3)})
        same(training.load(), {"a": np.arange(3)})
    with ocp0.CheckpointManager(
        tmp_path, handler_registry=osl.handler_registry("state")
    ) as manager:
        assert manager.all_steps() == [0, 1]


def test_both_leave_the_same_item(tmp_path):
    tree = everything()
    v0 = save_v0(tmp_path / "v0", tree, "state")
    with osl.context("state"):
        ocp.save(tmp_path / "v1", tree)
    assert tensor_files(v0 / "state") == tensor_files(tmp_path / "v1" / "state")


def test_a_saved_item_is_a_checkpoint_by_itself(tmp_path):
    step = save_v0(tmp_path, everything())
    same(osl.load(step / "default"), everything())
    with safetensors.safe_open(step / "default" / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(osl.metadata(step / "default"))


def test_the_builtin_layout_loads_plain_tensors(tmp_path):
    tree = {"a.b": np.arange(12.0, dtype=np.float32).reshape(3, 4), "c": np.arange(3)}
    step = save_v0(tmp_path, tree)
    with layout_context():
        loaded = ocp.load(step / "default", checkpointable_name=None)
    for name, value in tree.items():
        assert_same_bits(loaded[name], value)
