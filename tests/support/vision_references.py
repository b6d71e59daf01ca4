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


def llama4(tensors, vision):
    t = {name.removeprefix("vision_model."): array for name, array in tensors.items()}
    model = {name: t[name] for name in ("class_embedding", "positional_embedding_vlm")}
    _put(model, "Llama4UnfoldConvolution_0.vit_unfold_linear", t, "patch_embedding.linear")
    for norm in ("layernorm_pre", "layernorm_post"):
        _put(model, norm, t, norm, "scale", turn=False)
    for i in range(vision["num_hidden_layers"]):
        layer, block = f"model.layers.{i}.", f"Llama4VisionEncoder_0.layers_{i}."
        for norm in ("input", "post_attention"):
            source = f"{layer}{norm}_layernorm"
            _put(model, f"{block}{norm}_layer_norm", t, source, "scale", turn=False)
        for n in (1, 2):
            name = f"{block}Llama4VisionMLP_0.vit_encoder_layer_mlp_fc{n}"
            _put(model, name, t, f"{layer}mlp.fc{n}")
        sources = [f"{layer}self_attn.{x}_proj" for x in "qkvo"]
        heads = vision["num_attention_heads"]
        _heads(model, f"{block}self_attention_vision", t, sources, heads)
    for n in (1, 2):
        name = f"Llama4VisionPixelShuffleMLP_0.pixel_shuffle_mlp.vit_pixel_shuffle_mlp_fc{n}"
        _put(model, name, t, f"vision_adapter.mlp.fc{n}")
    leaves = {f"{MAXTEXT}Llama4VisionModel_0.{name}": a for name, a in model.items()}
    name = f"{MAXTEXT}Llama4MultiModalProjector_0.vit_multi_modal_projector"
    _put(leaves, name, tensors, "multi_modal_projector.linear_1")
    return leaves


def gemma4(tensors, vision):
    t = {name.removeprefix("model.vision_tower."): array for name, array in tensors.items()}
    encoder = {name: t[name] for name in ("std_scale", "std_bias")}
    _put(encoder, "vision_entry.input_projection", t, "patch_embedder.input_proj")
    table = t["patch_embedder.position_embedding_table"]
    encoder["vision_entry.pos_emb_param"] = np.stack([table[0], table[1]], axis=1)
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
    }
    for i in range(vision["num_hidden_layers"]):
        layer, block = f"encoder.layers.{i}.", f"layer_{i}."
        for norm, source in norms.items():
            _put(encoder, block + norm, t, layer + source, "scale", turn=False)
        for name, source in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            _put(encoder, f"{block}mlp.{name}", t, f"{layer}mlp.{source}_proj.linear")
        sources = [f"{layer}self_attn.{x}_proj.linear" for x in "qkvo"]
        _heads(encoder, f"{block}attention", t, sources, vision["num_attention_heads"])
    leaves = {f"{MAXTEXT}Gemma4VisionEncoderLayer_0.{name}": a for name, a in encoder.items()}
    name = f"{MAXTEXT}Gemma4VisionProjector_0.projection"
    _put(leaves, name, tensors, "model.embed_vision.embedding_projection")
    return leaves


def qwen(kind, before, merger_list, parts):
    """Qwen 3 VL and Omni and Qwen 3.5; `parts` are the modules of a merger."""

    def reference(tensors, vision):
        t = {name.removeprefix(before): array for name, array in tensors.items()}
        encoder, projector = {}, {}
        kernel = t["patch_embed.proj.weight"]
        encoder["patch_embed.proj.kernel"] = np.einsum("octhw->thwco", kernel)
        encoder["patch_embed.proj.bias"] = t["patch_embed.proj.bias"]
        encoder["pos_embed_interpolate.pos_embed"] = t["pos_embed.weight"]
        for i in range(vision["depth"]):
            layer, block = f"blocks.{i}.", f"blocks_{i}."
            for n in (1, 2):
                _put(encoder, f"{block}ln{n}", t, f"{layer}norm{n}", "scale", turn=False)
                name = f"{block}mlp" if n == 1 else f"{block}mlp_out"
                _put(encoder, name, t, f"{layer}mlp.linear_fc{n}")
            attention = {"out.weight": t[f"{layer}attn.proj.weight"]}
            attention["out.bias"] = t[f"{layer}attn.proj.bias"]
            for part in ("weight", "bias"):
                joined = np.split(t[f"{layer}attn.qkv.{part}"], 3)
                attention |= {f"{x}.{part}": a for x, a in zip("qkv", joined, strict=True)}
            _heads(encoder, f"{block}attn.attn", attention, (*"qkv", "out"), vision["num_heads"])
        mergers = {f"merger_{i}": f"{merger_list}.{i}."
                   for i in range(len(vision.get("deepstack_visual_indexes") or ()))}  # fmt: skip
        for name, source in (*mergers.items(), ("merger", "merger.")):
            leaves = projector if name == "merger" else encoder
            norm, first, second = (source + part for part in parts)
            _put(leaves, f"{name}.ln_q", t, norm, "scale", turn=False)
            _put(leaves, f"{name}.mlp_0", t, first)
            _put(leaves, f"{name}.mlp_2", t, second)
        return {
            **{f"{MAXTEXT}{kind}VisionEncoder_0.{name}": a for name, a in encoder.items()},
            **{f"{MAXTEXT}{kind}VisionProjector_0.{name}": a for name, a in projector.items()},
        }

    return reference


_PARTS = ("norm", "linear_fc1", "linear_fc2")
_VL = qwen("Qwen3VL", "model.visual.", "deepstack_merger_list", _PARTS)
_OMNI_PARTS = ("ln_q", "mlp.0", "mlp.2")


def omni(tensors, vision):
    plain = {name.removeprefix("thinker."): array for name, array in tensors.items()}
    return qwen("Qwen3OmniMoe", "visual.", "merger_list", _OMNI_PARTS)(plain, vision)


def gemma3_tunix(tensors, vision):
    t = {name.removeprefix("vision_tower."): array for name, array in tensors.items()}
    encoder = {}
    kernel = t["embeddings.patch_embedding.weight"]
    encoder["embedding.kernel"] = np.einsum("ochw->hwco", kernel)
    encoder["embedding.bias"] = t["embeddings.patch_embedding.bias"]
    encoder["pos_embedding"] = t["embeddings.position_embedding.weight"][None]
    _put(encoder, "transformer.encoder_norm", t, "post_layernorm", "scale", turn=False)
    for i in range(vision["num_hidden_layers"]):
        layer, block = f"encoder.layers.{i}.", f"transformer.blocks.{i}."
        for n in (1, 2):
            _put(encoder, f"{block}ln{n}", t, f"{layer}layer_norm{n}", "scale", turn=False)
            _put(encoder, f"{block}mlp.fc{n}", t, f"{layer}mlp.fc{n}")
        for name, source in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out")):
            _put(encoder, f"{block}attn.{name}_proj", t, f"{layer}self_attn.{source}_proj")
    return {
        **{f"vision_encoder.siglip_encoder.{name}": a for name, a in encoder.items()},
        "embedder.mm_input_projection.w": t["multi_modal_projector.mm_input_projection_weight"],
        "embedder.mm_soft_embedding_norm.scale": t["multi_modal_projector.mm_soft_emb_norm.weight"],
    }


VISION_REFERENCES = {
    ("tunix", "gemma3"): gemma3_tunix,
    ("maxtext", "gemma3"): gemma3,
    ("maxtext", "llama4"): llama4,
    ("maxtext", "gemma4"): gemma4,
    ("maxtext", "qwen3_vl"): _VL,
    ("maxtext", "qwen3_vl_moe"): _VL,
    ("maxtext", "qwen3_omni_moe"): omni,
    ("maxtext", "qwen3_5_moe"): qwen("Qwen3_5Moe", "model.visual.", "", _PARTS),
}
