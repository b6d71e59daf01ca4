import zlib

import jax
import jax.numpy as jnp
import numpy as np
from cluster_trees import same_shards
from jax.sharding import NamedSharding, PartitionSpec as P
from mapped_llama import plain_mapping
from meshes import mesh_of

import orbax_safetensors_layout as osl


def main(source, target, is_mapped):
    mesh = mesh_of(x=2, y=-1)
    mapping = plain_mapping() if is_mapped else None

    def placed(number, leaf):
        spec = [P("x"), P(None, "x"), P("y", "x"), P()][number % 4]
        spec = spec if len(leaf.shape) >= len(spec) else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    leaves, treedef = jax.tree.flatten(osl.load(source, mapping=mapping))
    abstract = jax.tree.unflatten(treedef, [placed(n, leaf) for n, leaf in enumerate(leaves)])
    tree = osl.load(source, abstract, mapping=mapping)
    held = osl.Pulled(0, osl.load(source, abstract, mapping=mapping))
    same, values = [], {}
    for number in (1, 2, 3):
        tree = jax.tree.map(
            jax.jit(lambda v: (v * jnp.asarray(1.01, v.dtype)).astype(v.dtype)), tree
        )
        assert osl.publish(target, tree, mapping=mapping, base=source, whole_every=3) == number
        pulled = osl.pull(target, abstract, mapping=mapping, base=source)
        assert pulled.version == number
        pairs = zip(jax.tree.leaves(pulled.tree), jax.tree.leaves(tree), strict=True)
        same += [same_shards(a, b) for a, b in pairs]
        held = osl.pull(target, held, mapping=mapping, base=source, donate=True)
        pairs = zip(jax.tree.leaves(held.tree), jax.tree.leaves(tree), strict=True)
        same += [same_shards(a, b) for a, b in pairs]
        everywhere = NamedSharding(mesh, P())
        tensors = mapping.unapply(tree, everywhere) if is_mapped else tree
        if not is_mapped:
            tensors = jax.jit(lambda t: t, out_shardings=everywhere)(tensors)
        values[number] = {
            name: zlib.crc32(np.asarray(value.addressable_data(0)).tobytes())
            for name, value in tensors.items()
        }
    return {"same": all(same), "checksums": values}
