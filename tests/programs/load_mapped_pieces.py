import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    value = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)

    def sharded(array, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    tree = {"a.weight": sharded(value, "x"), "b.weight": sharded(value + 100, None)}
    options = osl.WriteOptions(layout="sharded", replicate_below_bytes=0)
    osl.save(path, tree, options=options)
    rules = [
        osl.rule("a", osl.tensor("a.weight").transpose()),
        osl.rule("both", osl.concat([osl.tensor("b.weight"), osl.tensor("a.weight")], 1)),
    ]
    mapping = osl.Mapping(rules, strict=False)
    expected = {"a": value.T, "both": np.concatenate([value + 100, value], 1)}
    spec = {"a": P(None, "x"), "both": P("x")}
    abstract = {
        name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec[name]))
        for name, v in expected.items()
    }
    loaded = osl.load(path, abstract, mapping=mapping)
    for name, array in loaded.items():
        for shard in array.addressable_shards:
            assert np.array_equal(shard.data, expected[name][shard.index]), name
    return osl.plan_load(path, {"a": abstract["a"]}, mapping=mapping).cost().files
