import hashlib
import json
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from jax.sharding import Mesh, NamedSharding, PartitionSpec

folder, ways = sys.argv[1], int(sys.argv[2])
mesh = Mesh(np.array(jax.devices()[:ways]), ("fsdp",))
with ocp.StandardCheckpointer() as checkpointer:
    plain = checkpointer.restore(folder)

    def struct(x):
        spec = PartitionSpec("fsdp") if x.ndim and x.shape[0] % ways == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    abstract = {name: struct(x) for name, x in plain.items() if x.dtype != np.int64}
    v0 = checkpointer.restore(folder, abstract | {"scalar": plain["scalar"]})
v1 = ocp_v1.load(folder, abstract | {"scalar": np.zeros((), np.int64)})


def digests(tree):
    return {k: hashlib.sha256(np.asarray(v).tobytes()).hexdigest() for k, v in tree.items()}


sharded = sum(len(v.sharding.device_set) == ways for v in v0.values() if isinstance(v, jax.Array))
ours = [name for name in sys.modules if name.startswith("orbax_safetensors")]
print("RESULT", json.dumps([digests(plain), digests(v0), digests(v1), sharded, ours]))
