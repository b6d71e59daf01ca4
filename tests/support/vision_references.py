"""The leaves of vision models, by plain numpy on whole tensors: written from the sources anew."""

from __future__ import annotations

import numpy as np

MAXTEXT = "params.vision_encoder."


def _put(leaves, name, tensors, source, last="kernel", turn=True):
    """A weight, transposed if `turn`, and a bias if the files have one."""
    weight = tensors[f"{source}.weight"]
    leaves[f"{name}.{last}"] = weight.T if turn else weight
    if f"{source}.bias" in tensors:
        leaves[f"{name}.bias"] = tensors[f"{source}.bias"]


def _heads(leaves, name, tensors, sources, heads):
    """Queries, keys, values and outputs of MaxText: the heads have an axis of their own."""
    for part, source in zip(("query", "key", "value"), sources, strict=False):
        weight = tensors[f"{source}.weight"]
        kernel = np.moveaxis(weight.reshape(heads, -1, weight.shape[1]), 2, 0)
        leaves[f"{name}.{part}.kernel"] = kernel
        if f"{source}.bias" in tensors:
            leaves[f"{name}.{part}.bias"] = tensors[f"{source}.bias"].reshape(heads, -1)
    out = tensors[f"{sources[3]}.weight"]
    leaves[f"{name}.out.kernel"] = np.moveaxis(out.reshape(out.shape[0], heads, -1), 0, 2)
    if f"{sources[3]}.bias" in tensors:
        leaves[f"{name}.out.bias"] = tensors[f"{sources[3]}.bias"]


def gemma3(tensors, vision):
    t = {name.removeprefix("vision_tower."): array for name, array in tensors.items()}
    encoder, before = {}, "Transformer.encoderblock_{}."
    kernel = t["embeddings.patch_embedding.weight"]
    encoder["embedding.kernel"] = np.einsum("ochw->hwco", kernel)
    encoder["embedding.bias"] = t["embeddings.patch_embedding.bias"]
    encoder["pos_embedding"] = t["embeddings.position_embedding.weight"][None]
    _put(encoder, "Transformer.encoder_norm", t, "post_layernorm", "scale", turn=False)
    for i in range(vision["num_hidden_layers"]):
        layer, block = f"encoder.layers.{i}.", before.format(i)
        for n in (0, 1):
            norm = f"layer_norm{n + 1}"
            _put(encoder, f"{block}LayerNorm_{n}", t, layer + norm, "scale", turn=False)
            _put(encoder, f"{block}MlpBlockViT_0.Dense_{n}", t, f"{layer}mlp.fc{n + 1}")
        sources = [f"{layer}self_attn.{x}_proj" for x in ("q", "k", "v", "out")]
        name = f"{block}MultiHeadDotProductAttention_0"
        _heads(encoder, name, t, sources, vision["num_attention_heads"])
    before, module = f"{MAXTEXT}VisionEmbedder_0.", "multi_modal_projector."
    leaves = {f"{MAXTEXT}Gemma3VisionEncoderLayer_0.{name}": a for name, a in encoder.items()}
    leaves[f"{before}mm_input_projection.w"] = t[f"{module}mm_input_projection_weight"]
    scale = t[f"{module}mm_soft_emb_norm.weight"].astype(np.float32) + np.float32(1)
    leaves[f"{before}mm_soft_embedding_norm.scale"] = scale
    return leaves


VISION_REFERENCES = {("maxtext", "gemma3"): gemma3}
