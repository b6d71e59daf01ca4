"""Mappings through Orbax: its arguments, its handlers, and `using`."""

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, save
from orbax_calls import installed_context

import orbax_safetensors_layout as osl


@pytest.fixture
def tensors():
    return {f"layers.{i}.weight": np.arange(12.0).reshape(3, 4) + 100 * i for i in range(2)}


@pytest.fixture
def path(tmp_path, tensors):
    return save(tmp_path / "hf", tensors)


@pytest.fixture
def mapping():
    kernels = osl.stack(osl.tensor("layers.{i}.weight").transpose(), over="i")
    return osl.Mapping([osl.rule("kernels", kernels)])


def expected(tensors):
    return np.stack([tensor.T for tensor in tensors.values()])


TREE = {"kernels": np.zeros((2, 4, 3))}


def check(tree, tensors):
    assert set(tree) == {"kernels"}
    assert_same_bits(np.asarray(tree["kernels"]), expected(tensors))


def test_v0(tmp_path, path, tensors, mapping):
    plain = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    restored = plain.restore(path, args=osl.SafetensorsRestore(TREE, mapping=mapping))
    check(restored, tensors)
    check(plain.restore(path, args=osl.SafetensorsRestore(mapping=mapping)), tensors)
    with osl.using(mapping=mapping):
        check(plain.restore(path, args=ocp.args.StandardRestore(TREE)), tensors)
    plain.save(tmp_path / "out", args=osl.SafetensorsSave(restored, mapping=mapping))
    saved = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == set(tensors)
    for name, value in tensors.items():
        assert_same_bits(saved[name], value)


def test_custom_metadata_stays(tmp_path, tensors, mapping):
    custom = {"tokens": [1, 2]}
    with ocp.Checkpointer(osl.SafetensorsCheckpointHandler(mapping=mapping)) as plain:
        args = ocp.args.StandardSave({"kernels": expected(tensors)}, custom_metadata=custom)
        plain.save(tmp_path / "out", args=args)
        assert plain.metadata(tmp_path / "out").item_metadata.custom_metadata == custom
        check(plain.restore(tmp_path / "out", args=ocp.args.StandardRestore(TREE)), tensors)
    assert set(osl.load(tmp_path / "out")) == set(tensors)
    assert osl.verify(tmp_path / "out").ok


def test_dtypes_of_single_leaves_are_refused(tmp_path, tensors, mapping):
    plain = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    args = osl.SafetensorsSave(
        {"kernels": expected(tensors)},
        {"kernels": ocp.SaveArgs(dtype=np.float16)},
        mapping=mapping,
    )
    with pytest.raises(ValueError, match="no dtypes of single leaves"):
        plain.save(tmp_path / "out", args=args)


def test_a_manager(tmp_path, tensors, mapping):
    registry = osl.handler_registry("default", mapping=mapping)
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        manager.save(1, args=ocp.args.StandardSave({"kernels": expected(tensors)}))
        manager.wait_until_finished()
        check(manager.restore(1, args=ocp.args.StandardRestore(TREE)), tensors)
        check(manager.restore(1), tensors)
        assert manager.item_metadata(1).tree["kernels"].shape == (2, 4, 3)
    saved = safetensors.numpy.load_file(tmp_path / "run" / "1" / "default" / "model.safetensors")
    assert set(saved) == set(tensors)


def test_v1(tmp_path, path, tensors, mapping):
    with installed_context(), osl.using(mapping=mapping):
        loaded = ocp_v1.load(path, TREE)
        check(loaded, tensors)
        assert ocp_v1.metadata(path).metadata["kernels"].shape == (2, 4, 3)
        ocp_v1.save(tmp_path / "layout", loaded)
    with osl.context("state"), osl.using(mapping=mapping):
        ocp_v1.save(tmp_path / "handler", loaded)
        check(ocp_v1.load(tmp_path / "handler", TREE), tensors)
    for name in ("layout", "handler"):
        folder = next((tmp_path / name).rglob("model.safetensors"))
        assert set(safetensors.numpy.load_file(folder)) == set(tensors)
