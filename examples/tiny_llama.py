"""A tiny Llama with random weights, as a folder of the hub; made with numpy and safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

try:
    import safetensors.numpy
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install safetensors") from error

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def make(folder: Path) -> Path:
    """Writes `config.json`, two files of tensors, and their index."""
    e, f, v = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    k = e // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    layer = {f"self_attn.{x}_proj": (n, e) for x, n in (("q", e), ("k", k), ("v", k), ("o", e))}
    layer |= {"mlp.gate_proj": (f, e), "mlp.up_proj": (f, e), "mlp.down_proj": (e, f)}
    layer |= {"input_layernorm": (e,), "post_attention_layernorm": (e,)}
    layers = range(CONFIG["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (v, e), "model.norm": (e,), "lm_head": (v, e)}
    random = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": (random.standard_normal(shape) * 0.2).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True)
    weight_map = {}
    for number, names in enumerate(np.array_split(list(tensors), 2), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        some = {str(name): tensors[name] for name in names}
        safetensors.numpy.save_file(some, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
