import jax
import numpy as np
from checkpoints import llama_like
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(cloud, local):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {"step": 7, "host": np.arange(5.0)}
    for number, (name, value) in enumerate(llama_like(layers=1, hidden=512).items()):
        spec = [P("x"), P(), P(None, "x")][number % 3] if value.ndim > 1 else P()
        sharding = NamedSharding(mesh, spec)
        tree[name] = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    arrays = [name for name, value in tree.items() if isinstance(value, jax.Array)]
    done = []
    for layout in ("hf", "sharded"):
        options = osl.WriteOptions(layout=layout, max_file_bytes=1_000_000)
        for parent in (cloud, local):
            osl.save(f"{parent}/{layout}", tree, options=options)
            osl.save(f"{parent}/{layout}-again", {"old": np.arange(3)}, options=options)
            osl.save(f"{parent}/{layout}-again", tree, options=options, overwrite=True)
        loaded = osl.load(f"{cloud}/{layout}", dict(tree))
        done += [
            np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
            for name in arrays
            for a, b in zip(
                tree[name].addressable_shards, loaded[name].addressable_shards, strict=True
            )
        ]
    return all(done)
