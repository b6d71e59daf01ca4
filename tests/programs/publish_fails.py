import time

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.conversion import new_version


def main(source, target):
    """Process 1 fails at its first tensor; many more are gathered afterwards."""
    mesh = mesh_of(x=4)

    def placed(leaf):
        spec = P("x") if len(leaf.shape) > 1 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    tree = osl.load(source, jax.tree.map(placed, osl.metadata(source)))
    osl.publish(target, tree)

    def fail(old, new):
        raise OSError("the disk is gone")

    if jax.process_index() == 1:
        new_version.encoded_difference = fail
    begun = time.monotonic()
    try:
        osl.publish(target, tree)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "published", 0.0
