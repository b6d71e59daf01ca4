import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl

UP = "model.layers.0.mlp.up_proj"
KINDS = ("fp8_block", "deepseek_fp8", "fp8_channel", "int4", "mxfp4", "nvfp4")


def main(folder):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = np.arange(256 * 384, dtype=np.float32).reshape(256, 384)

    def placed(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    weight = np.asarray(jnp.sin(rows).astype(jnp.bfloat16))
    for spec in (P("x"), P(None, "x")):
        tree = {f"{UP}.weight": placed(weight, spec), "model.norm.weight": placed(rows[0], P())}
        for kind in KINDS:
            options = osl.WriteOptions(quantize=osl.Quantization(kind))
            osl.save(f"{folder}/{kind}", tree, options=options, overwrite=True)
