"""Saves through Orbax by two real processes: everything comes back, and both fail together."""

import pytest
from checkpoints import assert_same_bits, llama_like
from programs import run_processes
from saving import opened, tensor_files

import orbax_safetensors_layout as osl

TENSORS = llama_like()

PRELUDE = """
import contextlib, os, resource, time
import numpy as np
import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp
import orbax_safetensors_layout as osl
from checkpoints import llama_like
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

MESH = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))

def tree_of(number):
    tree = {}
    for name, value in llama_like().items():
        spec = [P("x"), P(None, "x"), P("y"), P("y", "x"), P()][(len(tree) + number) % 5]
        sharding = NamedSharding(MESH, spec if value.ndim >= len(spec) else P())
        tree[name] = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    return {"params": tree, "step": number}

def is_same(found, expected):
    def one(a, b):
        if not isinstance(b, jax.Array):
            return a == b
        pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
        return a.sharding == b.sharding and all(
            np.asarray(p.data).tobytes() == np.asarray(q.data).tobytes() for p, q in pairs
        )
    return all(jax.tree.leaves(jax.tree.map(one, found, expected)))

def v0(root, write=None):
    registry = osl.handler_registry("state", write=write)
    return ocp0.CheckpointManager(root, handler_registry=registry)

def args_of(tree):
    return ocp0.args.Composite(state=ocp0.args.StandardSave(tree))
"""

V0 = (
    PRELUDE
    + """
def main(root, layout):
    with v0(root, osl.WriteOptions(layout=layout, max_file_bytes=100_000)) as manager:
        for step in range(2):
            manager.save(step, args=args_of(tree_of(step)))
        manager.wait_until_finished()
        restore = ocp0.args.Composite(state=ocp0.args.StandardRestore(tree_of(1)))
        return [
            manager.all_steps(),
            is_same(manager.restore(1, args=restore)["state"], tree_of(1)),
            is_same(manager.restore(0)["state"], tree_of(0)),
        ]
"""
)

V1 = (
    PRELUDE
    + """
def main(root, route):
    if route == "layout":
        osl.install()
        context = ocp.Context()
        context.checkpoint_layout = "safetensors"
    else:
        context = osl.context("state")
    with context, osl.using(write=osl.WriteOptions(max_file_bytes=100_000)):
        ocp.save(root + "/one", tree_of(1))
        ocp.save_async(root + "/two", tree_of(2)).result()
        found = [is_same(ocp.load(root + "/one"), tree_of(1))]
        found.append(is_same(ocp.load(root + "/two", tree_of(2)), tree_of(2)))
        with ocp.training.Checkpointer(root + "/training", context=context) as training:
            training.save(0, tree_of(0), metrics={"loss": 1.0})
            training.save(1, tree_of(1), metrics={"loss": 0.5})
            found.append(is_same(training.load(), tree_of(1)))
    return found
"""
)

FAIL = (
    PRELUDE
    + """
def main(root, api, guilty):
    def save(number):
        if api == "v0":
            manager.save(number, args=args_of(tree_of(number)))
            manager.wait_until_finished()
        else:
            with osl.context("state"):
                ocp.save_async(f"{root}/{number}", tree_of(number)).result()

    manager = v0(root) if api == "v0" else None
    save(0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == guilty:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    begin = time.monotonic()
    try:
        save(1)
        error = None
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if manager is not None:
        manager.reload()
    steps = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    save(2)
    return {"error": error, "seconds": seconds, "steps": steps}
"""
)


REFUSE = (
    PRELUDE
    + """
def main(root, api, guilty):
    manager = v0(root) if api == "v0" else None

    def save(number, tree):
        if api == "v0":
            manager.save(number, args=args_of(tree))
            manager.wait_until_finished()
        else:
            with osl.context("state"):
                ocp.save_async(f"{root}/{number}", tree).result()

    save(0, tree_of(0))
    tree = tree_of(1)
    if jax.process_index() == guilty:
        tree["bad"] = np.array(["text"])
    begin = time.monotonic()
    try:
        save(1, tree)
        error = None
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin
    save(2, tree_of(2))
    steps = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    return {"error": error, "seconds": seconds, "steps": steps}
"""
)

BUDGET = (
    PRELUDE
    + """
from orbax_safetensors_layout.writing import host
host._on_host = lambda array: False  # stands for devices with memory of their own

def main(root, api):
    write = osl.WriteOptions(memory_budget_bytes=20_000, max_file_bytes=100_000, concurrency=1)
    manager = v0(root, write) if api == "v0" else None
    training = ocp.training.Checkpointer(root, context=osl.context("state"))
    for step in range(3):
        tree = tree_of(step)
        if api == "v0":
            manager.save(step, args=args_of(tree))
            finish = manager.wait_until_finished
        elif api == "v1":
            with osl.context("state"), osl.using(write=write):
                finish = ocp.save_async(f"{root}/{step}", tree).result
        else:
            with osl.using(write=write):
                finish = training.save_async(step, tree).result
        for array in jax.tree.leaves(tree["params"]):
            array.delete()
        finish()
"""
)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_a_manager_of_v0(tmp_path, layout):
    found = run_processes(V0, processes=2, devices=2, root=str(tmp_path), layout=layout)
    assert found == [[[0, 1], True, True]] * 2
    if layout == "hf":
        tensors = opened(tmp_path / "1" / "state")
        for name, value in TENSORS.items():
            assert_same_bits(tensors[f"params.{name}"], value)
    else:
        assert len(list((tmp_path / "1" / "state").glob("*.safetensors"))) == 2
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]


@pytest.mark.parametrize("route", ["handler", "layout"])
def test_v1(tmp_path, route):
    found = run_processes(V1, processes=2, devices=2, root=str(tmp_path), route=route)
    assert found == [[True, True, True]] * 2
    tensors = opened(tmp_path / "training" / "1" / "state")
    for name, value in TENSORS.items():
        assert_same_bits(tensors[f"params.{name}"], value)


def test_the_files_are_those_of_one_process(tmp_path):
    run_processes(V1, processes=2, devices=2, root=str(tmp_path), route="handler")
    tree = {"params": TENSORS, "step": 1}
    osl.save(tmp_path / "direct", tree, options=osl.WriteOptions(max_file_bytes=100_000))
    for name, data in tensor_files(tmp_path / "direct").items():
        if name != "orbax_safetensors_layout.json":  # names shardings, or numpy arrays
            assert (tmp_path / "one" / "state" / name).read_bytes() == data


@pytest.mark.parametrize("api", ["v0", "v1"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_all_processes_fail_at_once_and_with_the_first_cause(tmp_path, api, guilty):
    found = run_processes(FAIL, processes=2, devices=2, root=str(tmp_path), api=api, guilty=guilty)
    assert "StorageError" in found[guilty]["error"]
    assert found[1 - guilty]["error"].startswith("PeerError")
    for one in found:
        assert "File too large" in one["error"]
        assert one["seconds"] < 60
        assert one["steps"] == [0]
    assert opened(tmp_path / "2" / "state").keys() == {f"params.{name}" for name in TENSORS}


@pytest.mark.parametrize("api", ["v0", "v1"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_what_one_process_can_not_save_is_an_error_of_all(tmp_path, api, guilty):
    """Before Orbax lets them wait for each other, some in another place than others."""
    found = run_processes(
        REFUSE, processes=2, devices=2, root=str(tmp_path), api=api, guilty=guilty
    )
    assert found[guilty]["error"].startswith("UnsupportedDtypeError")
    assert found[1 - guilty]["error"].startswith("PeerError")
    for one in found:
        assert "'bad'" in one["error"]
        assert one["seconds"] < 60
        assert one["steps"] == [0, 2]


@pytest.mark.parametrize("api", ["v0", "v1", "training"])
def test_the_arrays_may_go_under_a_memory_budget(tmp_path, api):
    run_processes(BUDGET, processes=2, devices=2, root=str(tmp_path), api=api)
    for step in range(3):
        tensors = opened(tmp_path / str(step) / "state")
        for name, value in TENSORS.items():
            assert_same_bits(tensors[f"params.{name}"], value)
