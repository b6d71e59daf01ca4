import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping.quantizing import encoder

WRITING = sys.modules["orbax_safetensors_layout.writing.assemble_files"]


def main(folder):
    """Saves what is in `folder`/plain like `folder`/first, in small parts, from every sharding."""
    encoder._MOST_IN_ROWS = encoder.CHUNK_ELEMENTS = 5000
    WRITING._ROWS_BYTES = 16 << 10
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))
    tensors = {name: np.asarray(leaf) for name, leaf in osl.load(f"{folder}/plain").items()}
    name = next(name for name in tensors if name.endswith("_proj.weight"))
    transposed = osl.Mapping(
        [osl.rule("up", osl.tensor(name).transpose()), osl.rule("norm", osl.tensor("norm"))]
    )

    def placed(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    for kind in ("like", "nvfp4", "int4"):
        quantize = (
            osl.Quantization.like(f"{folder}/first") if kind == "like" else osl.Quantization(kind)
        )
        options = osl.WriteOptions(quantize=quantize, memory_budget_bytes=64 << 10)
        for number, spec in enumerate((P("x"), P(None, "x"), P("x", "y"), P(("x", "y")), P())):
            tree = {name: placed(tensors[name], spec), "norm": placed(tensors["norm"], P())}
            osl.save(f"{folder}/{kind}-{number}", tree, options=options)
            tree = {"up": placed(tensors[name].T, spec), "norm": tree["norm"]}
            osl.save(f"{folder}/{kind}-{number}-t", tree, mapping=transposed, options=options)
