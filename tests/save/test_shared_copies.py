"""Saves at the same time copy an array that both have from its devices once."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mapped_llama import path, plain_mapping, tensors  # noqa: F401
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.save import PreparedSave
from orbax_safetensors_layout.writing import host


@pytest.fixture
def copied(monkeypatch):
    """Let CPU devices stand for devices with memory of their own; gives the sizes of copies."""
    to_host, sizes = host._to_host, []

    def counted(shards):
        sizes.extend(shard.nbytes for shard in shards)
        return to_host(shards)

    monkeypatch.setattr(host, "_on_host", lambda array: False)
    monkeypatch.setattr(host, "_to_host", counted)
    return sizes


@pytest.fixture
def overlap(monkeypatch):
    """Let the first of two small saves hold its copies until the second has looked for them."""
    add, held = host.HostCopies.add, []

    def added(copies, array, number, copy):
        held.append(copy)
        add(copies, array, number, copy)

    monkeypatch.setattr(host.HostCopies, "add", added)


def tree_of(seed=0):
    rng = np.random.default_rng(seed)
    mesh = mesh_of(x=4, y=2)
    specs = {"a": P("x", "y"), "b": P(), "c": P("y"), "d": P(None, "x")}
    return {
        name: jax.device_put(rng.normal(size=(16, 8)).astype(np.float32), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }


def manager(folder, **items):
    return ocp.CheckpointManager(
        folder,
        item_handlers={
            name: osl.SafetensorsCheckpointHandler(write=options) for name, options in items.items()
        },
    )


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_a_state_and_its_export_are_copied_once(tmp_path, copied, layout):
    params = tree_of()
    state = {"params": params, "moments": tree_of(1)}
    options = {"state": osl.WriteOptions(layout=layout), "export": osl.WriteOptions()}
    with manager(tmp_path / "run", **options) as run:
        items = {"state": osl.SafetensorsSave(state), "export": osl.SafetensorsSave(params)}
        run.save(0, args=ocp.args.Composite(**items))
        run.wait_until_finished()
    assert sum(copied) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for item, expected in (("state", state), ("export", params)):
        loaded = osl.load(tmp_path / "run" / "0" / item, jax.eval_shape(lambda tree=expected: tree))
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.usefixtures("overlap")
def test_a_mapped_export_takes_the_copies_of_the_state(tmp_path, path, tensors, copied):  # noqa: F811
    mapping = plain_mapping()
    params = jax.tree.map(jnp.asarray, osl.load(path, mapping=mapping))
    with manager(tmp_path / "run", state=osl.WriteOptions(), export=osl.WriteOptions()) as run:
        items = {
            "state": osl.SafetensorsSave(params),
            "export": osl.SafetensorsSave(params, mapping=mapping),
        }
        run.save(0, args=ocp.args.Composite(**items))
        run.wait_until_finished()
    assert sum(copied) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    exported = osl.load(tmp_path / "run" / "0" / "export")
    assert {n: v.tobytes() for n, v in exported.items()} == {
        name: value.tobytes() for name, value in tensors.items()
    }


def test_a_copy_lives_no_longer_than_its_saves(tmp_path, copied):
    for step in range(3):
        tree = tree_of(step)
        with manager(tmp_path / "run", state=osl.WriteOptions()) as run:
            run.save(step, args=ocp.args.Composite(state=osl.SafetensorsSave(tree)))
        loaded = osl.load(tmp_path / "run" / str(step) / "state")
        assert {n: v.tobytes() for n, v in loaded.items()} == {
            name: np.asarray(value).tobytes() for name, value in tree.items()
        }
    gc.collect()
    assert host._host_copies._copies == {}


def test_a_budget_counts_a_copy_once(tmp_path, copied):
    """What another save holds needs no room; else half of the export would wait."""
    params = tree_of()
    nbytes = sum(leaf.nbytes for leaf in params.values())
    prepared = []
    for _ in range(2):
        options = osl.WriteOptions(memory_budget_bytes=nbytes)
        save = PreparedSave.of(params, options)
        save.capture()
        prepared.append(save)
    assert sum(copied) == nbytes
    assert all(save.values.wait_captured(0) for save in prepared)
