import json
from pathlib import Path

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from monitoring import reported
from recording import recording

import orbax_safetensors_layout as osl


def main(path, shape, budgets, out):
    expected = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as opened:
            expected |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(shape), ("data", "fsdp"))
    read = reported("safetensors/bytes_read")
    results = {}

    def load(label, tree, options):
        plan = osl.plan_load(path, tree, options=options)
        read.clear()
        with recording() as storage:
            loaded = osl.load(path, tree, options=options)
        ranges = sorted({tuple(r) for r in storage.tensor_ranges()})
        assert sum(stop - start for _, start, stop in ranges) == sum(
            stop - start for _, start, stop in storage.tensor_ranges()
        )
        cost = plan.cost()
        assert [cost.read_bytes] == read, (label, cost, read)
        for name, array in loaded.items():
            assert array.sharding == tree[name].sharding, (label, name)
            for shard in array.addressable_shards:
                part = expected[name][shard.index].astype(array.dtype)
                assert np.asarray(shard.data).tobytes() == part.tobytes(), (label, name)
        results[label] = {
            "ranges": ranges,
            "read": read[0],
            "needed": sum(part.nbytes for array in loaded.values() for part in distinct(array)),
            "total": sum(expected[name].nbytes for name in tree),
            "files": len({file for file, _, _ in ranges}),
        }

    def distinct(array):
        return {str(s.index): s.data for s in array.addressable_shards}.values()

    def tree_of(spec):
        return {
            name: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=NamedSharding(mesh, P(*spec[: value.ndim]))
            )
            for name, value in expected.items()
        }

    exact = {"latency_seconds": {"local": 0.0}}
    for budget in budgets:
        for label, spec in {
            "replicated": P(),
            "dim0": P(("data", "fsdp")),
            "dim1": P(None, ("data", "fsdp")),
            "partly0": P("fsdp"),
            "partly1": P(None, "fsdp"),
            "2d": P("data", "fsdp"),
        }.items():
            for how, gaps in (("each", exact), ("read_once", exact), ("read_once", {})):
                options = osl.ReadOptions(replicated=how, memory_budget_bytes=budget, **gaps)
                tree = {
                    name: leaf
                    for name, leaf in tree_of(spec).items()
                    if len(leaf.shape) > 1 or len(spec) < 2
                }
                load(f"{label} {how} {'exact' if gaps else 'default'} {budget}", tree, options)

    # Other devices, in another order; arrays that some processes hold nothing of; a cast.
    name = "model.embed_tokens.weight"
    half = devices[: len(devices) // 2]
    mixed = np.concatenate([devices[::2], devices[1::2]])
    tree = {
        name: NamedSharding(Mesh(half, ("x",)), P()),
        "model.norm.weight": NamedSharding(Mesh(mixed[::-1].reshape(2, -1), ("x", "y")), P("x")),
        "model.layers.0.mlp.up_proj.weight": NamedSharding(Mesh(mixed, ("x",)), P()),
        "model.layers.1.mlp.up_proj.weight": NamedSharding(
            Mesh(mixed.reshape(-1, 2), ("x", "y")), P(None, "y")
        ),
    }
    tree = {
        n: jax.ShapeDtypeStruct(expected[n].shape, np.float32, sharding=s) for n, s in tree.items()
    }
    load("elsewhere", tree, osl.ReadOptions(replicated="read_once", **exact))
    Path(out, f"{jax.process_index()}.json").write_text(json.dumps(results))
