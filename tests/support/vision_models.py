"""Tiny models with vision, whole: random weights, and what `save_pretrained` writes of them."""

from __future__ import annotations

import json

from family_models import (
    DIMS,
    MODELS,
    VISION_SIZES,
    Saved,
    experts_in_one_tensor,
    experts_with_inputs_first,
    read,
    text_config_of,
)

_BLOCKS = {"hidden_size": 24, "intermediate_size": 40}
_QWEN = _BLOCKS | {
    "depth": 2, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_DEEP = _QWEN | {"deepstack_visual_indexes": [0, 1]}
SIZES = {
    "gemma3": _BLOCKS
    | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 84, "patch_size": 14}
    | {"vision_use_head": False},
    "llama4": VISION_SIZES["llama4"] | {"num_hidden_layers": 2, "vision_output_dim": 20}
    | {"projector_input_dim": 20, "projector_output_dim": 20},
    "gemma4_dense": VISION_SIZES["gemma4"] | {"num_hidden_layers": 2, "intermediate_size": 40}
    | {"standardize": True},
    "qwen3_vl": _DEEP,
    "qwen3_vl_moe": _DEEP,
    "qwen3_omni_moe": _DEEP,
    "qwen3_5_moe": _QWEN,
}  # fmt: skip
SIZES["gemma4_moe"] = SIZES["gemma4_dense"]
_AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "output_dim": 32, "downsample_hidden_size": 8, "num_mel_bins": 16,
}  # fmt: skip


def make_whole(name: str, folder, dtype="bfloat16", **vision) -> Saved:
    """Builds the model, with `vision` in the configuration of its tower, and saves it."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    ids = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    text = text_config_of(kind)(**DIMS | ids | changes)
    parts = {"text_config": text.to_dict(), "vision_config": SIZES[name] | vision}
    if name == "gemma3":
        parts["mm_tokens_per_image"] = 9
    if kind == "Qwen3OmniMoe":
        kind, parts["audio_config"] = f"{kind}Thinker", _AUDIO
    config = getattr(transformers, f"{kind}Config")(**parts)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model = model.eval().to(getattr(torch, dtype))
    with torch.no_grad():
        for tensor in [*model.parameters(), *_saved_buffers(model)]:
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB")
    return Saved(folder, json.loads((folder / "config.json").read_text()), read(folder), model)


def _saved_buffers(model):
    names = set(model.state_dict())
    return [buffer for name, buffer in model.named_buffers() if name in names]


def published(name: str, tensors: dict) -> dict:
    """The tensors by their published names, of which transformers 5 saves others."""
    if name == "gemma3":
        return {k.replace("vision_tower.", "vision_tower.vision_model."): v
                for k, v in tensors.items()}  # fmt: skip
    if name == "qwen3_omni_moe":
        return {f"thinker.{k}": v for k, v in tensors.items()}
    if name == "qwen3_5_moe":
        text, inner = {"num_hidden_layers": 8}, "model.language_model.layers."
        short = {k.replace(inner, "model.layers."): v for k, v in tensors.items()}
        joined = experts_in_one_tensor(text, short)
        return {k.replace("model.layers.", inner): v for k, v in joined.items()}
    return experts_with_inputs_first(tensors) if name == "qwen3_vl_moe" else tensors
