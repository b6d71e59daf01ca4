"""Tables of each family's decoder layers, as their classes in transformers 5.23.0 define them.

`modeling_<family>.py` has the modules, `configuration_<family>.py` the default values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

_QKV = ("q_proj", "k_proj", "v_proj")
_QKVO = (*_QKV, "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
MIXED, CONVOLVED = ("in_proj", "out_proj"), ("conv1d",)  # projections of a Mamba mixer
_TIED = {"tie_word_embeddings": True}
_SPARSE_STEP = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
_HYBRID = {"head_dim": 256, "full_attention_interval": 4} | {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LINEAR_OR_FULL = ("linear", "full")
_GEMMA_VISION = ("*vision_tower.*", "*embed_vision.*")
_GEMMA_AUDIO = ("*audio_tower.*", "*embed_audio.*")
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


ExpertsForm = Literal["each", "stacked", "transposed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Biases:
    """Projections with a bias: if a flag of the configuration says so, or always."""

    projections: tuple[str, ...]
    flag: str | None = None
    default: bool = False


_ATTENTION_BIAS = Biases(_QKVO, "attention_bias")
_MLP_BIAS = Biases(GATED, "mlp_bias")
_LATENT_BIAS = Biases(("q_a_proj", "kv_a_proj_with_mqa", "o_proj"), "attention_bias")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The layers of a family.

    Attributes:
        defaults: Values that configurations leave out because they are those of the family's class,
            which files on the hub rely on: Gemma's have no `tie_word_embeddings`, those of Gemma 3
            with vision no `head_dim`. A family has experts if it has a default for their number.
        inner_defaults: Values that only configurations within another model's leave out.
        norms: The modules with a weight of the hidden size in each layer.
        norm_biases: Whether these have a bias too, as the last norm.
        head_norms: Norms of queries and keys: one that all heads `share`, one for `each` head, or
            one over all heads `jointly`, whose weight is of one dimension.
        head_norms_flag: Key that says whether there are any, by default not; None if there are.
        biases: The projections with a bias.
        mlp: The projections of the MLP.
        feed_forward: The module of the MLP or the experts.
        fused: Whether queries, keys and values are one tensor, and gate and up another.
        latent: Whether attention is DeepSeek's multi-head latent attention.
        indexer: Whether an indexer chooses the tokens that are attended to.
        linear: Projections of the layers with linear attention, if there are such: those of the
            `joined` heads of queries, keys, values and gates, or `parted` ones.
        gated_queries: Whether the projection of queries has a gate beside each.
        routing_bias: Whether routers have an `e_score_correction_bias`.
        shared_experts: The module of the experts that all tokens take.
        shared_gate: Whether these have a gate.
        experts: Experts of a layer, one `each`, or all `stacked` in one tensor: as they are used,
            or with inputs last, `transposed`. Of two, the files decide; without, the first counts.
        router: The module that chooses experts.
        experts_flag: Key that says whether there are experts, by default not; None if there are.
        attention_types: Types of attention whose layers differ in their tensors.
        reuses_keys: Whether the last layers may reuse the keys and values of others.
        layer_inputs: Whether each layer may have an embedding of its own.
        alternating: Whether layers have the alternating updates and low ranks of Gemma 3n.
        prediction: Tensors for multi-token prediction: of more `layers`, or of a module `mtp`.
        vision: Patterns of the tensors of a vision model beside it.
        beside: The same of other models: for audio, or that speak.
        prefix: Prefix of the names of the language model's tensors, where there is such.
        root: The same of a model by itself.
        embedding: The tensor of the embedding, after the prefix.
        norm: The tensor of the last norm.
        head: The tensor of the output kernel.
        compressed: Whether attention is the compressed one of DeepSeek-V4, with its hyper
            connections and its routers by a table. `embedding` is then the published name.
        mixer: The module of a Mamba mixer: `mixer`, in place of attention and MLP of every layer,
            or `mamba`, in place of the attention of those with linear attention.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_biases: bool = False
    head_norms: Literal["share", "each", "jointly"] | None = None
    head_norms_flag: str | None = None
    biases: tuple[Biases, ...] = (_ATTENTION_BIAS,)
    mlp: tuple[str, ...] = GATED
    feed_forward: str = "mlp"
    fused: bool = False
    latent: bool = False
    indexer: bool = False
    linear: Literal["joined", "parted"] | None = None
    gated_queries: bool = False
    routing_bias: bool = False
    shared_experts: Literal["shared_experts", "shared_expert"] | None = None
    shared_gate: bool = False
    experts: tuple[ExpertsForm, ...] = ("each",)
    router: str = "gate"
    experts_flag: str | None = None
    attention_types: tuple[str, ...] = ()
    reuses_keys: bool = False
    layer_inputs: bool = False
    alternating: bool = False
    prediction: Literal["layers", "mtp"] | None = None
    vision: tuple[str, ...] = ("*vision_tower.*", "*multi_modal_projector.*", "*image_newline")
    beside: tuple[str, ...] = ()
    prefix: str = "language_model.model."
    root: str = "model."
    embedding: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    head: str = "lm_head.weight"
    compressed: bool = False
    mixer: Literal["mixer", "mamba"] | None = None


# `LlamaConfig` and `MistralConfig` of transformers 5.24.0: LLaVA 1.5 and 1.6 leave these out.
_OF_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(inner_defaults=_OF_7B, biases=(_ATTENTION_BIAS, _MLP_BIAS)),
    "mistral": Architecture(defaults={"num_key_value_heads": 8}, inner_defaults=_OF_7B, biases=()),
    "qwen2": Architecture(biases=(Biases(_QKV),)),
    "qwen3": Architecture(defaults={"head_dim": 128}, head_norms="share"),
    "qwen3_moe": Architecture(
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "norm_topk_prob": False,
            **_SPARSE_STEP,
        },
        head_norms="share",
    ),
    "qwen2_vl": Architecture(
        defaults={"num_key_value_heads": 8},
        biases=(Biases(_QKV),),
        vision=("*visual.*",),
        prefix="model.",
    ),
    "qwen3_vl": Architecture(
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        head_norms="share",
        vision=("*visual.*",),
        prefix="model.language_model.",
    ),
    "qwen3_vl_moe": Architecture(
        defaults={"num_key_value_heads": 16, "num_experts": 60, **_SPARSE_STEP},
        head_norms="share",
        experts=("stacked", "transposed"),  # as published, and as transformers 5 saves it
        vision=("*visual.*",),
        prefix="model.language_model.",
    ),
    "qwen3_omni_moe": Architecture(
        defaults={"num_key_value_heads": 4, "num_experts": 128, **_SPARSE_STEP},
        head_norms="share",
        vision=("*visual.*",),
        beside=("*audio_tower.*", "talker.*", "code2wav.*"),
        prefix="thinker.model.",
    ),
    "gemma": Architecture(defaults=_TIED | {"head_dim": 256}),
    "gemma2": Architecture(
        defaults=_TIED | {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
        norms=_GEMMA_NORMS,
    ),
    "gemma3": Architecture(
        defaults={
            **_TIED,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "vocab_size": 262208,
            "sliding_window_pattern": 6,
        },
        norms=_GEMMA_NORMS,
        head_norms="share",
    ),
    "mixtral": Architecture(
        defaults={"num_key_value_heads": 8, "num_local_experts": 8},
        biases=(),
        feed_forward="block_sparse_moe",
    ),
    "deepseek_v2": Architecture(
        defaults={"first_k_dense_replace": 0, "n_routed_experts": 64, "q_lora_rank": 1536},
        biases=(_LATENT_BIAS, _MLP_BIAS),
        latent=True,
        shared_experts="shared_experts",
    ),
    "deepseek_v3": Architecture(
        defaults={"first_k_dense_replace": 3, "n_routed_experts": 256, "q_lora_rank": 1536},
        biases=(_LATENT_BIAS,),
        latent=True,
        routing_bias=True,
        shared_experts="shared_experts",
        prediction="layers",
    ),
    "deepseek_v32": Architecture(
        defaults={
            "first_k_dense_replace": 3,
            "mlp_layer_types": None,
            "n_routed_experts": 256,
            "q_lora_rank": 1536,
            "index_n_heads": 64,
            "index_head_dim": 128,
        },
        biases=(_LATENT_BIAS,),
        latent=True,
        indexer=True,
        routing_bias=True,
        shared_experts="shared_experts",
        prediction="layers",
    ),
    "deepseek_v4": Architecture(
        defaults={
            "num_key_value_heads": 1,
            "head_dim": 512,
            "n_routed_experts": 256,
            "num_hash_layers": 3,
            "o_groups": 8,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "hc_mult": 4,
        },
        norms=("attn_norm", "ffn_norm"),
        biases=(),
        attention_types=("sliding", "compressed_sparse", "heavily_compressed"),
        shared_experts="shared_experts",
        prediction="mtp",
        root="",
        embedding="embed.weight",
        head="head.weight",
        compressed=True,
    ),
    "gpt_oss": Architecture(
        defaults={"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128},
        biases=(Biases(_QKVO, "attention_bias", default=True),),
    ),
    "glm4_moe": Architecture(
        defaults={
            "num_key_value_heads": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "num_nextn_predict_layers": 1,
        },
        head_norms="share",
        head_norms_flag="use_qk_norm",
        biases=(Biases(_QKV, "attention_bias"),),
        routing_bias=True,
        shared_experts="shared_experts",
        prediction="layers",
    ),
    "olmo2": Architecture(
        norms=("post_attention_layernorm", "post_feedforward_layernorm"), head_norms="jointly"
    ),
    "olmo3": Architecture(
        norms=("post_attention_layernorm", "post_feedforward_layernorm"), head_norms="jointly"
    ),
    "phi3": Architecture(biases=(), fused=True),
    "granite": Architecture(biases=(_ATTENTION_BIAS, _MLP_BIAS)),
    "starcoder2": Architecture(
        defaults={**_TIED, "num_key_value_heads": 2},
        norm_biases=True,
        biases=(Biases((*_QKVO, "c_fc", "c_proj"), "use_bias", default=True),),
        mlp=("c_fc", "c_proj"),
    ),
    "cohere": Architecture(
        defaults=_TIED,
        norms=("input_layernorm",),
        head_norms="each",
        head_norms_flag="use_qk_norm",
    ),
    "cohere2": Architecture(defaults=_TIED, norms=("input_layernorm",)),
    "llama4": Architecture(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
        },
        feed_forward="feed_forward",
        experts=("stacked",),
        router="router",
        shared_experts="shared_expert",
        vision=("*vision_model.*", "*multi_modal_projector.*"),
    ),
    "qwen2_moe": Architecture(
        defaults={"num_experts": 60, "qkv_bias": True, **_SPARSE_STEP},
        biases=(Biases(_QKV, "qkv_bias", default=True),),
        shared_experts="shared_expert",
        shared_gate=True,
    ),
    "qwen3_next": Architecture(
        defaults={"num_key_value_heads": 2, "num_experts": 512, **_SPARSE_STEP, **_HYBRID},
        head_norms="share",
        linear="joined",
        attention_types=_LINEAR_OR_FULL,
        gated_queries=True,
        shared_experts="shared_expert",
        shared_gate=True,
        prediction="mtp",
    ),
    "qwen3_5": Architecture(
        defaults={"num_key_value_heads": 4, **_HYBRID},
        head_norms="share",
        linear="parted",
        attention_types=_LINEAR_OR_FULL,
        gated_queries=True,
        prediction="mtp",
        vision=("*visual.*",),
        prefix="model.language_model.",
    ),
    "qwen3_5_moe": Architecture(
        defaults={"num_key_value_heads": 2, "num_experts": 256, **_HYBRID},
        head_norms="share",
        linear="parted",
        attention_types=_LINEAR_OR_FULL,
        gated_queries=True,
        experts=("transposed", "each"),
        shared_experts="shared_expert",
        shared_gate=True,
        prediction="mtp",
        vision=("*visual.*",),
        prefix="model.language_model.",
    ),
    "mamba2": Architecture(
        defaults={"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128},
        norms=("norm",),
        biases=(
            Biases(MIXED, "use_bias"),
            Biases(CONVOLVED, "use_conv_bias", default=True),
        ),
        root="backbone.",
        embedding="embeddings.weight",
        norm="norm_f.weight",
        mixer="mixer",
    ),
    "granitemoehybrid": Architecture(
        defaults={
            "num_local_experts": 8,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "shared_intermediate_size": 1024,
        },
        biases=(
            _ATTENTION_BIAS,
            Biases(MIXED, "mamba_proj_bias"),
            Biases(CONVOLVED, "mamba_conv_bias", default=True),
        ),
        feed_forward="block_sparse_moe",
        experts=("transposed",),
        router="router.layer",
        attention_types=_LINEAR_OR_FULL,
        mixer="mamba",
    ),
    "gemma3n": Architecture(
        defaults={
            **_TIED,
            "head_dim": 256,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 15,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
        },
        norms=_GEMMA_NORMS,
        head_norms="share",
        reuses_keys=True,
        layer_inputs=True,
        alternating=True,
        vision=_GEMMA_VISION,
        beside=_GEMMA_AUDIO,
        prefix="model.language_model.",
    ),
    "gemma4": Architecture(
        defaults={
            **_TIED,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "global_head_dim": 512,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256,
            "sliding_window_pattern": 6,
            "num_experts": None,
        },
        norms=_GEMMA_NORMS,
        head_norms="share",
        experts=("transposed",),
        experts_flag="enable_moe_block",
        attention_types=("sliding", "full"),
        reuses_keys=True,
        layer_inputs=True,
        vision=_GEMMA_VISION,
        beside=_GEMMA_AUDIO,
        prefix="model.language_model.",
    ),
}
FAMILIES = tuple(ARCHITECTURES)
