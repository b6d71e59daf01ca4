import json
from pathlib import Path

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from monitoring import reported

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.reading import replica_exchange


def main(path, sizes, out, every_pair, budget):
    if budget:  # as on devices whose arrays do not keep what they are read into
        replica_exchange._platform = lambda placement: "gpu"
    expected = {}
    with safetensors.safe_open(Path(path, "model.safetensors"), "numpy") as opened:
        expected |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    expected["head"] = expected["cube"]
    mapping = osl.Mapping(
        [osl.rule(name, osl.tensor(name)) for name in expected if name != "head"]
        + [osl.rule("head", None, tied_to="cube")]
    )
    devices = np.array(jax.devices())
    shuffled = np.random.default_rng(0).permutation(devices)
    read = reported("safetensors/bytes_read")
    results = {}
    for label, chosen in {"in order": devices, "shuffled": shuffled}.items():
        mesh = Mesh(chosen.reshape(sizes), ("a", "b"))
        two = [P(None, "a", "b"), P("a", None, "b"), P(None, None, ("a", "b"))]
        for number, spec in enumerate([P(), P("b"), P(None, "b"), *two]):
            dtypes = [None, np.float32]
            for dtype in dtypes if every_pair else [dtypes[(number + (label == "shuffled")) % 2]]:
                sharding = NamedSharding(mesh, spec)
                tree = {
                    name: jax.ShapeDtypeStruct(value.shape, dtype or value.dtype, sharding=sharding)
                    for name, value in expected.items()
                }
                more = {"memory_budget_bytes": budget} if budget else {}
                options = osl.ReadOptions(replicated="read_once", **more)
                plan = osl.plan_load(path, tree, mapping=mapping, options=options)
                read.clear()
                loaded = osl.load(path, tree, mapping=mapping, options=options)
                for name, array in loaded.items():
                    assert array.sharding == sharding, (label, spec, name)
                    for shard in array.addressable_shards:
                        part = expected[name][shard.index].astype(array.dtype)
                        values = np.asarray(shard.data)
                        assert values.tobytes() == part.tobytes(), (label, spec, name)
                results[f"{label} {spec} {dtype}"] = read[0]
                assert plan.cost().read_bytes == read[0]
                if budget and label == "in order" and spec == two[1]:  # columns of one process
                    assert plan.cost().exchanged_bytes
    Path(out, f"{jax.process_index()}.json").write_text(json.dumps(results))
