import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of

import orbax_safetensors_layout as osl


def main(path, target, quantize=None, dtype=None, managed=False):
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
    if managed:
        export_managed(target, params, mapping.like(path), options)
    else:
        osl.save(target, params, mapping=mapping.like(path), options=options)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def export_managed(root, params, mapping, options):
    """Saves two steps of a state by a CheckpointManager, the first with an export beside it."""
    export = osl.SafetensorsCheckpointHandler(mapping=mapping, write=options)
    handlers = {"state": osl.SafetensorsCheckpointHandler(), "hf": export}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        for step in (1, 2):
            scaled = jax.tree.map(lambda leaf, step=step: leaf * step, params)
            items = {"state": osl.SafetensorsSave({"params": scaled, "step": step})}
            if step == 1:
                items["hf"] = osl.SafetensorsSave(scaled)
            manager.save(step, args=ocp.args.Composite(**items))
