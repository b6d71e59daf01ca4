import jax
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of

import orbax_safetensors_layout as osl


def main(path, target, quantize, dtype):
    """Loads a model through its family's mapping, sharded over all devices, and exports it."""
    mapping = osl.families.mapping(path)
    mesh = mesh_of(x=-1)

    def sharded(leaf):
        axes = [n for n, extent in enumerate(leaf.shape) if extent % len(jax.devices()) == 0]
        spec = ["x" if axes and n == axes[0] else None for n in range(len(leaf.shape))]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = osl.load(path, jax.tree.map(sharded, mapping.abstract(path)), mapping=mapping)
    options = osl.WriteOptions(
        model=path,
        dtype=dtype,
        quantize=osl.Quantization(quantize) if quantize else None,
        max_file_bytes=40_000,
    )
    osl.save(target, params, mapping=mapping.like(path), options=options)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
