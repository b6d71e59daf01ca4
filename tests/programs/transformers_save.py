import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(folder, target, max_file_bytes):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    state = osl.load(
        folder,
        {
            name: jax.ShapeDtypeStruct(
                tensor.shape,
                tensor.dtype,
                sharding=NamedSharding(
                    mesh, P("fsdp", "tensor") if len(tensor.shape) > 1 else P(("fsdp", "tensor"))
                ),
            )
            for name, tensor in osl.metadata(folder).items()
        },
    )
    osl.save(target, state, options=osl.WriteOptions(max_file_bytes=max_file_bytes))
    return [array.is_fully_addressable for array in state.values()]
