from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as v1
import safetensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from monitoring import reported

import orbax_safetensors_layout as osl


def main(path, api, options):
    expected = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as opened:
            expected |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
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

    read = reported("safetensors/bytes_read")
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
    devices = [d for d in jax.devices() if d.process_index == 0]
    few = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    name = "model.embed_tokens.weight"
    leaf = jax.ShapeDtypeStruct(expected[name].shape, expected[name].dtype, sharding=few)
    read.clear()
    array = load({name: leaf})[name]
    results["stage"] = {
        "read": list(read),
        "own": sum(shard.data.nbytes for shard in array.addressable_shards),
        "total": expected[name].nbytes,
    }

    # Nor has one a part of a recorded number that is placed there.
    saved = Path(path).with_name("recorded")
    if api == "osl":
        osl.save(saved, {"step": 7}, overwrite=True)
        step = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(few.mesh, P()))
        array = osl.load(saved, {"step": step}, options=reader)["step"]
        assert (array.shape, array.dtype) == ((), np.int32)
        assert [int(shard.data) for shard in array.addressable_shards] == (
            [7] * len(devices) if jax.process_index() == 0 else []
        )
    return results
