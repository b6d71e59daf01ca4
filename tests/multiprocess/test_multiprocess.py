"""Several real processes: each reads its own shards' bytes and nothing else."""

from __future__ import annotations

import pytest
from checkpoints import llama_like, save
from programs import run_processes

LOAD = """
def main(path, api, options):
    import numpy as np
    import orbax.checkpoint as v0
    import orbax.checkpoint.experimental.v1 as v1
    import safetensors
    from pathlib import Path
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import orbax_safetensors_layout as osl

    expected = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as opened:
            expected |= {name: opened.get_tensor(name) for name in opened.keys()}
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("fsdp", "tensor"))
    reader = osl.ReadOptions(**options)

    def load(tree):
        if api == "osl":
            return osl.load(path, tree, options=reader)
        if api == "v0":
            handler = osl.SafetensorsCheckpointHandler(read=reader)
            with v0.Checkpointer(handler) as checkpointer:
                restore = osl.SafetensorsRestore(tree, partial_restore=True)
                return checkpointer.restore(path, args=restore)
        osl.install()
        with osl.using(read=reader), v1.Context(checkpoint_layout="safetensors"):
            return v1.load(path, tree)

    read = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: event.endswith("safetensors/bytes_read") and read.append(value)
    )
    results = {}
    for label, spec in {
        "dim0": P(("fsdp", "tensor")),
        "dim1": P(None, ("fsdp", "tensor")),
        "2d": P("fsdp", "tensor"),
        "replicated": P(),
        "partly": P("fsdp"),
    }.items():
        tree = {
            name: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=NamedSharding(mesh, P(*spec[: value.ndim]))
            )
            for name, value in expected.items()
            if value.ndim == 2 or label == "dim0"
        }
        read.clear()
        loaded = load(tree)
        own = 0
        for name, array in loaded.items():
            seen = set()
            for shard in array.addressable_shards:
                part = expected[name][shard.index]
                assert np.asarray(shard.data).tobytes() == part.tobytes(), (label, name)
                if str(shard.index) not in seen:
                    seen.add(str(shard.index))
                    own += part.nbytes
        total = sum(expected[name].nbytes for name in tree)
        results[label] = {"read": list(read), "own": own, "total": total}

    # Boxes of one process that are no neighbours: the devices of a mesh in another order.
    shuffled = np.array(jax.devices())
    shuffled = np.concatenate([shuffled[::2], shuffled[1::2]])
    for spec in (P("x"), P(None, "x")):
        name = "model.layers.0.mlp.up_proj.weight"
        sharding = NamedSharding(Mesh(shuffled, ("x",)), spec)
        leaf = jax.ShapeDtypeStruct(expected[name].shape, expected[name].dtype, sharding=sharding)
        for shard in load({name: leaf})[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[name][shard.index].tobytes()

    # One process holds nothing of a leaf that lives on the other's devices.
    mine = [d for d in jax.devices() if d.process_index == 0]
    few = NamedSharding(Mesh(np.array(mine), ("x",)), P("x"))
    name = "model.embed_tokens.weight"
    leaf = jax.ShapeDtypeStruct(expected[name].shape, expected[name].dtype, sharding=few)
    read.clear()
    array = load({name: leaf})[name]
    results["stage"] = {
        "read": read,
        "own": sum(shard.data.nbytes for shard in array.addressable_shards),
        "total": expected[name].nbytes,
    }
    return results
"""

EXACT = {"latency_seconds": {"local": 0.0}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("multi") / "ckpt", llama_like(), files=2)


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (2, 4), (4, 1), (4, 2)])
def test_each_process_reads_its_own_bytes(path, processes, devices):
    results = run_processes(
        LOAD, processes=processes, devices=devices, path=str(path), api="osl", options=EXACT
    )
    check(results)


@pytest.mark.parametrize("api", ["v0", "v1"])
def test_the_same_through_orbax(path, api):
    check(run_processes(LOAD, processes=2, devices=2, path=str(path), api=api, options=EXACT))


def check(results):
    for label in results[0]:
        for process in results:
            (read,) = process[label]["read"]
            assert read == process[label]["own"], label
        total = results[0][label]["total"]
        read = sum(process[label]["read"][0] for process in results)
        if label in ("dim0", "dim1", "2d", "stage"):
            assert read == total, label
    assert [process["stage"]["read"][0] > 0 for process in results] == [
        index == 0 for index in range(len(results))
    ]
    for process in results:
        assert process["replicated"]["read"] == [results[0]["replicated"]["total"]]
