from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as v1
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from monitoring import reported

import orbax_safetensors_layout as osl


def main(path):
    expected = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        expected |= safetensors.numpy.load_file(file)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    tree = {
        name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)
        for name, t in expected.items()
    }
    tree["norm"] = tree.pop("model.norm.weight")
    mapping = osl.Mapping(
        [osl.rule("norm", osl.tensor("model.norm.weight"))]
        + [osl.rule(name, osl.tensor(name)) for name in expected if name != "model.norm.weight"],
    )
    once = osl.ReadOptions(replicated="read_once")
    read = reported("safetensors/bytes_read")
    with v0.Checkpointer(osl.SafetensorsCheckpointHandler(read=once)) as checkpointer:
        args = osl.SafetensorsRestore(tree, mapping=mapping)
        loaded = [checkpointer.restore(path, args=args)]
    osl.install()
    with osl.using(read=once, mapping=mapping), v1.Context(checkpoint_layout="safetensors"):
        loaded.append(v1.load(path, tree))
    for arrays in loaded:
        for name, array in arrays.items():
            value = expected["model.norm.weight" if name == "norm" else name]
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == value.tobytes()
    return read
