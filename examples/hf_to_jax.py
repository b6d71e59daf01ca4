"""From a Hugging Face folder to tokens of a JAX model: transposed, stacked and sharded on the way.

    python examples/hf_to_jax.py                    # makes a tiny Llama
    python examples/hf_to_jax.py PATH 1 15043 3186  # Llama, Mistral, Qwen 2 or 3; a prompt's tokens

Neither torch nor transformers is needed; the tiny Llama is made with `safetensors`. The model is
`llama_jax.py`, 90 lines of plain JAX.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from llama_jax import logits

import orbax_safetensors_layout as osl


def load(folder):
    """The model's parameters, each divided along its longest even axis among all devices."""
    mapping = osl.families.mapping(folder)  # the model side: `docs/families.md`, "The plain tree"
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))

    def leaf(shape):
        even = [(extent, axis) for axis, extent in enumerate(shape) if extent % mesh.size == 0]
        spec = [None] * len(shape)
        if even:
            spec[max(even)[1]] = "fsdp"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    abstract = {
        name: leaf(fact.shape) for name, fact in osl.metadata(folder, mapping=mapping).items()
    }
    return osl.load(folder, abstract, mapping=mapping)


def generate(folder, tokens, count=8):
    """The tokens, and the likeliest ones that follow."""
    config, params = json.loads((folder / "config.json").read_text()), load(folder)
    forward = jax.jit(lambda params, tokens: logits(params, tokens, config)[0, -1].argmax())
    for _ in range(count):
        tokens = [*tokens, int(forward(params, np.array([tokens])))]
    return tokens


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        if len(sys.argv) < 2:
            import tiny_llama

            sys.argv += [str(tiny_llama.make(Path(scratch) / "tiny")), "1", "2", "3"]
        print(*generate(Path(sys.argv[1]), [int(token) for token in sys.argv[2:]]))
