import jax


def main(base, adapters):
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    import orbax_safetensors_layout as osl
    from orbax_safetensors_layout.mapping import fingerprint

    adapter = adapters[jax.process_index() % len(adapters)]
    mapping = osl.peft.merge(None, adapter, base=base)
    expected = osl.load(base, mapping=mapping)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    for how in ("each", "read_once"):
        for spec in (P(), P("y"), P(None, ("x", "y")), P("x", "y")):
            tree = {
                name: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=NamedSharding(mesh, spec))
                for name, w in expected.items()
            }
            try:
                options = osl.ReadOptions(replicated=how)
                loaded = osl.load(base, tree, mapping=mapping, options=options)
            except osl.SafetensorsLayoutError as error:
                return f"{how}: {error}"
            for name, array in loaded.items():
                for shard in array.addressable_shards:
                    value = expected[name][shard.index]
                    assert np.asarray(shard.data).tobytes() == value.tobytes(), (how, spec, name)
    return fingerprint(mapping)
