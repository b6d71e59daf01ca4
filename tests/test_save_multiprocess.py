"""Saves by several real processes: the bytes of one process's save, each process its share."""

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, llama_like, random_tensor
from multiprocess import run_processes

SOURCE = """
import resource
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import safetensors.numpy
import orbax_safetensors_layout as osl

def main(path, target, split, layout, max_file_bytes):
    tensors = safetensors.numpy.load_file(path + "/model.safetensors")
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2) if split == "2d" else devices, ("x", "y")[: 2 if split == "2d" else 1])
    spec = {
        "replicated": lambda s: P(),
        "dim0": lambda s: P("x"),
        "dim1": lambda s: P(None, "x") if len(s) > 1 else P(),
        "2d": lambda s: P("x", "y") if len(s) > 1 else P("y"),
        "partial": lambda s: P("y"),
    }[split]
    if split == "partial":
        mesh = Mesh(devices.reshape(2, -1), ("x", "y"))
    tree = {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, spec(value.shape)), lambda index, value=value: value[index]
        )
        for name, value in tensors.items()
    }
    tree["step"] = 7
    tree["host"] = np.arange(5.0)
    written = []
    def listen(name, value, **_):
        if name.endswith("bytes_written"):
            written.append(value)
    jax.monitoring.register_scalar_listener(listen)
    osl.save(target, tree, options=osl.WriteOptions(layout=layout, max_file_bytes=max_file_bytes))
    plan = osl.plan_save(tree, options=osl.WriteOptions(layout=layout, max_file_bytes=max_file_bytes))
    loaded = osl.load(target, {name: value for name, value in tree.items()})
    same = all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for name in tensors
        for a, b in zip(tree[name].addressable_shards, loaded[name].addressable_shards, strict=True)
    )
    return {"written": written, "planned": plan.cost().written_bytes, "same": same, "step": loaded["step"]}
"""


@pytest.fixture(scope="module")
def tensors():
    found = {name: np.asarray(value) for name, value in llama_like(layers=6, hidden=128).items()}
    found["odd"] = random_tensor((8, 12), np.dtype(np.int8), 5)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("source")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def digests(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name.endswith((".safetensors", ".index.json"))
    }


def check(folder, tensors):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, value in tensors.items():
        file = safetensors.numpy.load_file(folder / index["weight_map"][name])
        assert_same_bits(file[name], value)


LIMIT = 200_000


@pytest.mark.parametrize("split", ["replicated", "dim0", "dim1", "2d", "partial"])
def test_every_number_of_processes_writes_the_same_bytes(tmp_path, source, tensors, split):
    seen = {}
    for processes, devices in [(1, 4), (2, 2), (4, 1)]:
        target = tmp_path / f"{processes}"
        results = run_processes(
            SOURCE,
            processes=processes,
            devices=devices,
            path=str(source),
            target=str(target),
            split=split,
            layout="hf",
            max_file_bytes=LIMIT,
        )
        assert all(result["same"] and result["step"] == 7 for result in results)
        assert not (target / "pieces").exists()
        written = [sum(result["written"]) for result in results]
        assert written == [result["planned"] for result in results]
        assert max(written) / (sum(written) / processes) <= 1.3
        seen[processes] = digests(target)
        check(target, tensors)
    assert seen[1] == seen[2] == seen[4]


@pytest.mark.parametrize("split", ["replicated", "dim0", "dim1", "2d", "partial"])
def test_every_process_writes_its_own_file_of_pieces(tmp_path, source, tensors, split):
    results = run_processes(
        SOURCE,
        processes=2,
        devices=2,
        path=str(source),
        target=str(tmp_path / "sharded"),
        split=split,
        layout="sharded",
        max_file_bytes=LIMIT,
    )
    assert all(result["same"] and result["step"] == 7 for result in results)
    written = [sum(result["written"]) for result in results]
    assert max(written) / (sum(written) / 2) <= 1.3
    names = {path.name for path in (tmp_path / "sharded").iterdir()}
    assert names == {
        "shard-00001-of-00002.safetensors",
        "shard-00002-of-00002.safetensors",
        "orbax_safetensors_layout.json",
    }
