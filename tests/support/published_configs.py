"""Configurations as the hub has them, with small numbers, and the headers of their checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from family_bytes import tensors_of

from orbax_safetensors_layout.format import DTYPES, NewTensor, lay_out

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_GEMMA = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
_GEMMA3_TEXT = _COMMON | _GEMMA | {
    "model_type": "gemma3_text",
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window_pattern": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}  # fmt: skip
_DEEPSEEK = _COMMON | _MOE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "mistral": _COMMON | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen2": _COMMON | {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "qwen3": _COMMON | {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 16,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * 3,
    },
    "qwen3_moe": _COMMON | _MOE | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
    "gemma2": _COMMON | _GEMMA | {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA3_TEXT,
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _GEMMA3_TEXT,
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "model_type": "siglip"},
        "mm_tokens_per_image": 256,
        "image_token_index": 127,
        "torch_dtype": "bfloat16",
    },
    "mixtral": _COMMON | {
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    },
    "deepseek_v3": _DEEPSEEK | {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [16, 16],
        },
    },
    "kimi": _DEEPSEEK | {
        "quantization_config": {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
            "format": "pack-quantized",
            "ignore": [
                *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
                "re:.*mlp\\.(gate|up|down)_proj.*",
            ],
            "quant_method": "compressed-tensors",
        },
    },
    "gpt_oss": _COMMON | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_bias": True,
        "num_local_experts": 4,
        "experts_per_token": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            "quant_method": "mxfp4",
        },
    },
}  # fmt: skip


def _stored(config: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor of a checkpoint, quantised as its configuration says."""
    inner = config.get("text_config", config)
    method = config.get("quantization_config", {}).get("quant_method")
    tensors = []
    for name, shape in tensors_of(inner).items():
        if method == "fp8" and "_proj" in name:
            tensors += [(name, "F8_E4M3", shape)]
            tensors += [(f"{name}_scale_inv", "F32", tuple(-(-n // 16) for n in shape))]
        elif method == "mxfp4" and name.endswith("_proj"):
            x, i, o = shape
            tensors += [(f"{name}_blocks", "U8", (x, o, i // 32, 16))]
            tensors += [(f"{name}_scales", "U8", (x, o, i // 32))]
        elif method == "compressed-tensors" and ".experts." in name:
            rows, columns = shape
            tensors += [(f"{name}_packed", "I32", (rows, columns // 8))]
            tensors += [(f"{name}_scale", "BF16", (rows, columns // 8))]
            tensors += [(f"{name}_shape", "I64", (2,))]
        else:
            tensors += [(name, "BF16", shape)]
    if inner is not config:
        tensors = [(f"language_model.{name}", *rest) for name, *rest in tensors]
        tensors += [("vision_tower.vision_model.embeddings.patch_embedding.bias", "BF16", (16,))]
    return tensors


def make(name: str, folder: Path) -> dict[str, Any]:
    """Writes a checkpoint's header and configuration, its data a hole; gives the configuration."""
    config = copy.deepcopy(CONFIGS[name])
    tensors = [NewTensor(name, DTYPES[code], shape) for name, code, shape in _stored(config)]
    layout = lay_out("model.safetensors", tensors, {})
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
    (folder / "config.json").write_text(json.dumps(config))
    return config
