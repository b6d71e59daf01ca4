"""Tiny Hugging Face models with random weights, and what `save_pretrained` writes of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DIMS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
HYBRID = {
    "head_dim": 16,
    "num_hidden_layers": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MIXER = {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2, "expand": 2}
GRANITE = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full") * 2][:5],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "shared_intermediate_size": 20,
}
SHARED = {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 20}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PARTED_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION_SIZES = {
    "llama4": {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14, "vision_output_dim": 16,
        "projector_input_dim": 16, "projector_output_dim": 16,
    },
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    "qwen3_vl": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
    "qwen3_5": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 32, "num_position_embeddings": 16,
    },
    "gemma4": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "position_embedding_size": 16,
    },
}  # fmt: skip
VISION_SIZES["qwen3_vl_moe"] = VISION_SIZES["qwen3_vl"]

# Name: prefix of transformers' classes, and what differs from `DIMS`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**MOE, "num_experts": 5, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen3_moe_mixed": ("Qwen3Moe", {**MOE, "num_experts": 4, "mlp_only_layers": [1]}),
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": PARTED_ROPE}),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": PARTED_ROPE, "head_dim": 8}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**MOE, "rope_parameters": PARTED_ROPE, "head_dim": 8, "num_experts": 4}
        | {"tie_word_embeddings": False},
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoe",
        {**MOE, "rope_parameters": PARTED_ROPE, "head_dim": 8, "num_experts": 5},
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "hidden_size": 40},
    ),
    "gemma2_scaled": (
        "Gemma2",
        {"num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 12, "hidden_size": 40},
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 14, "head_dim": 16, "query_pre_attn_scalar": 16, "hidden_size": 40},
    ),
    "gemma3_full_heads": (
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 8, "num_key_value_heads": 4},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MOE,
            **LATENT,
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"num_hidden_layers": 4, "num_local_experts": 5, "head_dim": 16, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**MOE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1}
        | {"n_routed_experts": 4, "n_shared_experts": 2},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**MOE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1}
        | {"n_routed_experts": 4, "q_lora_rank": None},
    ),
    "deepseek_v2_biased": (
        "DeepseekV2",
        {**MOE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1}
        | {"n_routed_experts": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v3_biased": (
        "DeepseekV3",
        {**MOE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1}
        | {"n_routed_experts": 4, "attention_bias": True},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {**MOE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "head_dim": 4}
        | {"n_routed_experts": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {**MOE, "n_routed_experts": 4, "num_hidden_layers": 7, "head_dim": 16, "q_lora_rank": 24}
        | {"num_key_value_heads": 1, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 12}
        | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 8}
        | {"compress_ratios": [0, 0, 4, 128, 4, 128, 4]},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**MOE, "n_routed_experts": 4, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4_moe_air": (
        "Glm4Moe",
        {**MOE, "n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 2},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 8}),
    "phi3": ("Phi3", {}),
    "phi4_mini": ("Phi3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "granite_biased": ("Granite", {"attention_bias": True, "mlp_bias": True}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 0, "attention_bias": True, "mamba_proj_bias": True}
        | {"mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2_unbiased": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "cohere_unnormed": ("Cohere", {"attention_bias": True}),
    "cohere2": ("Cohere2", {"head_dim": 16}),
    "llama4": (
        "Llama4",
        {"head_dim": 16, "num_local_experts": 5, "intermediate_size_mlp": 40}
        | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    ),
    "llama4_scout": ("Llama4", {"head_dim": 16, "num_local_experts": 3, "attention_bias": True}),
    "llama4_blocks": ("Llama4", {"head_dim": 16, "num_local_experts": 3, "num_hidden_layers": 8}),
    "qwen2_moe": ("Qwen2Moe", SHARED),
    "qwen2_moe_unbiased": ("Qwen2Moe", {**SHARED, "qkv_bias": False, "mlp_only_layers": [0]}),
    "qwen3_next": ("Qwen3Next", SHARED | HYBRID),
    "qwen3_next_mixed": ("Qwen3Next", SHARED | HYBRID | {"mlp_only_layers": [0, 3]}),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "mamba2": ("Mamba2", MIXER),
    "mamba2_biased": ("Mamba2", {**MIXER, "use_bias": True, "use_conv_bias": False}),
    "gemma3n": (
        "Gemma3n",
        {"num_hidden_layers": 5, "head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 80, "num_kv_shared_layers": 2, "laurel_rank": 4}
        | {"altup_num_inputs": 3, "activation_sparsity_pattern": [0.0] * 5}
        | {"layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full") * 2][:5]},
    ),
    "gemma4": (
        "Gemma4",
        {"num_hidden_layers": 10, "head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 80, "num_kv_shared_layers": 2, "global_head_dim": 24}
        | {"use_double_wide_mlp": True}
        | {"layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 5]},
    ),
    "gemma4_unshared": (
        "Gemma4",
        {"num_hidden_layers": 6, "head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 96, "global_head_dim": 24, "sliding_window": 6}
        | {"final_logit_softcapping": 30.0},
    ),
    "gemma4_e2b": (
        "Gemma4",
        {"num_hidden_layers": 10, "head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 5, "global_head_dim": 24}
        | {"use_double_wide_mlp": True, "sliding_window": 6, "final_logit_softcapping": 30.0}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2},
    ),
    "gemma4_dense": (
        "Gemma4",
        {"num_hidden_layers": 12, "head_dim": 16, "hidden_size_per_layer_input": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 24}
        | {"sliding_window": 6, "final_logit_softcapping": 30.0},
    ),
    "gemma4_moe": (
        "Gemma4",
        {"num_hidden_layers": 6, "head_dim": 16, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 24, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "global_head_dim": 24, "sliding_window": 6}
        | {"final_logit_softcapping": 30.0},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", SHARED | HYBRID),
}


_AUDIO_SIZES = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "output_dim": 32, "downsample_hidden_size": 8, "num_mel_bins": 16,
}  # fmt: skip


class Saved(NamedTuple):
    """A saved model: its folder, its configuration, and its tensors as they are in the files."""

    folder: Any
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    model: Any


def make(name: str, folder, dtype: str = "bfloat16", **more: Any) -> Saved:
    """Builds the model, with `more` in its configuration, and saves it in several files."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    make_config = text_config_of(kind)
    config = make_config(
        **DIMS | {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0} | changes | more
    )
    torch.manual_seed(0)
    if causal := getattr(transformers, f"{kind}ForCausalLM", None):
        model = causal(config)
    elif kind == "Qwen3OmniMoe":
        outer = transformers.Qwen3OmniMoeThinkerConfig(
            text_config=config.to_dict(),
            vision_config=VISION_SIZES["qwen3_vl"],
            audio_config=_AUDIO_SIZES,
        )
        model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(outer)
    else:
        outer = getattr(transformers, f"{kind}Config")(
            text_config=config.to_dict(), vision_config=VISION_SIZES[name]
        )
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(outer)
    model = model.eval().to(getattr(torch, dtype))
    with torch.no_grad():
        for tensor in [*model.parameters(), *_saved_buffers(model)]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
            else:  # DeepSeek-V4's table of experts
                tensor.copy_(torch.randint(config.n_routed_experts, tensor.shape))
    if causal:
        model.save_pretrained(folder, max_shard_size="40KB")
    else:
        _save_language_model(model, folder)
    return Saved(folder, json.loads((folder / "config.json").read_text()), read(folder), model)


def text_config_of(kind):
    """The class of a language model's configuration."""
    import transformers

    if kind == "Qwen3OmniMoe":
        return type(transformers.Qwen3OmniMoeThinkerConfig().text_config)
    text = "Text" if hasattr(transformers, f"{kind}TextConfig") else ""
    return getattr(transformers, f"{kind}{text}Config")


def _save_language_model(model, folder):
    """The language model of one with vision, as if it were one by itself."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    if hasattr(model.config, "audio_config"):  # whose experts transformers parts when it saves
        model.save_pretrained(folder)
        (file,) = folder.glob("*.safetensors")
        state = {n: t for n, t in load_file(file).items() if n.startswith(("model.", "lm_head."))}
        file.unlink()
        save_torch_state_dict(state, folder, max_shard_size="40KB", filename_pattern=PATTERN)
        model.config.text_config.save_pretrained(folder)
        return
    state = {f"model.{n}": t for n, t in model.model.language_model.state_dict().items()}
    state["lm_head.weight"] = model.lm_head.weight.detach()
    save_torch_state_dict(state, folder, max_shard_size="40KB", filename_pattern=PATTERN)
    model.config.text_config.save_pretrained(folder)


PATTERN = "model{suffix}.safetensors"
_SAVED = ("e_score_correction_bias", "layer_scalar", "tid2eid")


def _saved_buffers(model):
    return [b for name, b in model.named_buffers() if name.endswith(_SAVED)]


def read(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder, by safetensors itself."""
    import torch
    from safetensors.torch import load_file

    def array(tensor):
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: array(t) for file in files for name, t in load_file(file).items()}


def experts_in_one_tensor(config, tensors):
    """The tensors of a Qwen 3.5 as it is published, with the experts of a layer in one tensor."""
    stored = {name: array for name, array in tensors.items() if ".experts." not in name}
    for i in range(config["num_hidden_layers"]):
        before = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([tensors[f"{before}{e}.{n}_proj.weight"] for e in range(4)])
            for n in ("gate", "up", "down")
        )
        stored[f"{before}gate_up_proj"] = np.concatenate([gate, up], 1)
        stored[f"{before}down_proj"] = down
    return stored


def named_as_published(tensors):
    """The tensors of a DeepSeek-V4 by their published names, of which transformers saves others."""
    published = {}
    for name, array in tensors.items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed")
        name = name.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        published[name] = array
    return published


def experts_with_inputs_first(tensors):
    """The tensors of a Qwen 3 VL as it is published."""
    return {
        name: np.ascontiguousarray(array.transpose(0, 2, 1)) if ".experts." in name else array
        for name, array in tensors.items()
    }


def copy(source, target, without=(), more=()):
    """A checkpoint in one file, without some tensors and with others; returns the new folder."""
    import shutil

    from safetensors.torch import load_file, save_file

    files = sorted(source.glob("*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    kept = {name: t for name, t in tensors.items() if name not in without} | dict(more)
    target.mkdir(parents=True)
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", target)
    return target


def unused_keys_and_values(config):
    """Tensors of layers that take those of others, as published files of Gemma 4 have them."""
    import torch

    more, count = {}, config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(1)
    for i in range(count - config["num_kv_shared_layers"], count):
        own = (config.get("per_layer_config") or {}).get(str(i), {})
        heads = own.get("num_key_value_heads", config["num_key_value_heads"])
        width = own.get("head_dim", config["head_dim"])
        shapes = dict.fromkeys(("k_proj", "v_proj"), (heads * width, config["hidden_size"]))
        for part, shape in (shapes | {"k_norm": (width,)}).items():
            values = torch.randn(shape, generator=generator)
            more[f"model.layers.{i}.self_attn.{part}.weight"] = values.to(torch.bfloat16)
    return more


def read_one(folder, name):
    """One tensor, for torch."""
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118
                return opened.get_tensor(name)
    raise KeyError(name)
