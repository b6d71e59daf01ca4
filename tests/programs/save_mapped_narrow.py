from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(target):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    values = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    mapping = osl.Mapping([osl.rule("w", osl.tensor("t").transpose())])
    for dtype, whole in ((jnp.int4, values), (jnp.int2, values.clip(-2, 1))):
        narrow = whole.astype(dtype)
        leaf = jax.make_array_from_callback(narrow.shape, sharding, narrow.__getitem__)
        osl.save(Path(target, np.dtype(dtype).name), {"w": leaf}, mapping=mapping)
