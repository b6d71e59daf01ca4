"""The tensors of a layer of transformers 5.23.0 (for Mixtral: 4), and how they become leaves."""

from __future__ import annotations

import dataclasses

from .architectures import CONVOLVED, GATED, MIXED
from .dims import Compressed, Dims, Latent, LayerKind, LinearAttention, StateSpace
from .steps import EMBEDDING, LINEAR, ROUTER, VECTOR, FamilyLeaf, TensorStep

_ALTERNATING = {
    "altup.correct_output_scale": VECTOR,
    "altup.correction_coefs.weight": ROUTER,
    "altup.modality_router.weight": ROUTER,
    "altup.prediction_coefs.weight": ROUTER,
    "altup.router_norm.weight": VECTOR,
    "laurel.linear_left.weight": LINEAR,
    "laurel.linear_right.weight": LINEAR,
    "laurel.post_laurel_norm.weight": VECTOR,
}
_OUT_OF_HEADS = "e (h d) -> h d e"


def head_name(prefix: str, head: str = "lm_head.weight") -> str:
    """Return the name of the output kernel's tensor, for the prefix of the others.

    >>> head_name("backbone."), head_name("model."), head_name("language_model.model.")
    ('lm_head.weight', 'lm_head.weight', 'language_model.lm_head.weight')
    """
    is_outer = prefix.startswith(("model.", "backbone."))
    return ("" if is_outer else prefix.removesuffix("model.")) + head


def heads(h: int, d: int, pattern: str = "(h d) e -> e h d") -> TensorStep:
    """A projection to heads: `[heads * d, hidden]` as `[hidden, heads, d]`, or another pattern."""
    return TensorStep(pattern, (("h", h), ("d", d)), projection=True)


def layer_tensors(dims: Dims, kind: LayerKind) -> dict[str, TensorStep]:
    """Return the step of each tensor of a layer that is a leaf.

    `fused_projections`, `fused_experts` and `stacked_experts` have the leaves that are parts.
    """
    norms, parts = dims.architecture.norms, ("weight", "bias")[: 1 + dims.architecture.norm_biases]
    steps = {f"{norm}.{part}": VECTOR for norm in norms for part in parts}
    if dims.compressed is not None:
        return steps | _compressed(dims, dims.compressed, kind)
    if dims.layer_input:
        steps |= {f"per_layer_{name}.weight": LINEAR for name in ("input_gate", "projection")}
        steps["post_per_layer_input_norm.weight"] = VECTOR
    if dims.alternatives:
        steps |= _ALTERNATING
    if dims.family == "gemma4":
        steps["layer_scalar"] = VECTOR
    if dims.state_space is not None and kind.attention != "full":
        module, mixer = dims.architecture.mixer, _mixer(dims, dims.state_space)
        steps |= {f"{module}.{name}": step for name, step in mixer.items()}
        if module == "mixer":
            return steps
    elif kind.attention == "linear" and dims.linear is not None:
        attention = _linear_attention(dims.linear, joined=dims.architecture.linear == "joined")
        steps |= {f"linear_attn.{name}": step for name, step in attention.items()}
    else:
        attention = _attention(dims, kind) if dims.latent is None else _latent(dims, dims.latent)
        steps |= {f"self_attn.{name}": step for name, step in attention.items()}
    if kind.sparse:
        steps |= _experts(dims)
    if dims.architecture.mixer:
        steps["shared_mlp.output_linear.weight"] = LINEAR
    elif not kind.sparse or dims.family == "gemma4":  # which has experts beside its MLP
        steps |= _mlp(dims, dims.architecture.feed_forward)
    return steps


def _linear_attention(linear: LinearAttention, *, joined: bool) -> dict[str, TensorStep]:
    keys, values = linear.key_heads, linear.value_heads
    per_key = values // keys
    steps = {
        "A_log": TensorStep("h -> h", (("h", values),)),
        "dt_bias": TensorStep("h -> h", (("h", values),)),
        "conv1d.weight": TensorStep("c n w -> w n c"),
        "norm.weight": TensorStep("d -> d", (("d", linear.value_dim),)),
        "out_proj.weight": heads(values, linear.value_dim, _OUT_OF_HEADS),
    }
    if joined:
        gated = heads(keys, 2 * linear.key_dim + 2 * per_key * linear.value_dim)
        rates = dataclasses.replace(heads(keys, 2 * per_key), projection=False)
        return steps | {"in_proj_qkvz.weight": gated, "in_proj_ba.weight": rates}
    steps |= {"in_proj_qkv.weight": LINEAR, "in_proj_z.weight": heads(values, linear.value_dim)}
    rate = TensorStep("h e -> e h", (("h", values),))
    return steps | {"in_proj_a.weight": rate, "in_proj_b.weight": rate}


def _mixer(dims: Dims, space: StateSpace) -> dict[str, TensorStep]:
    """`Mamba2Mixer`: of the inputs come gates, what is convolved, and a rate for each head."""
    h, width, channels = space.heads, space.width, space.convolved
    inputs = TensorStep("o i -> i o", (("o", width + channels + h),), projection=True)
    steps = {
        "in_proj.weight": inputs,
        "conv1d.weight": TensorStep("c n w -> w n c", (("c", channels),)),
        "norm.weight": TensorStep("e -> e", (("e", width),)),
        "out_proj.weight": heads(h, space.head_dim, _OUT_OF_HEADS),
    }
    steps |= {name: TensorStep("h -> h", (("h", h),)) for name in ("A_log", "D", "dt_bias")}
    biased = (name for name in (*MIXED, *CONVOLVED) if name in dims.biased)
    return steps | {f"{name}.bias": VECTOR for name in biased}


def _attention(dims: Dims, kind: LayerKind) -> dict[str, TensorStep]:
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    if full := kind.attention == "full":
        k, d = dims.full_kv_heads, dims.full_head_dim
    steps, queries = {}, d * (1 + dims.architecture.gated_queries)
    parts = [("q", h, queries)]
    if not kind.reuses:
        parts += [("k", k, d)] if full and dims.keys_are_values else [("k", k, d), ("v", k, d)]
    for x, n, width in parts:
        if not dims.architecture.fused:
            steps[f"{x}_proj.weight"] = heads(n, width)
        if f"{x}_proj" in dims.biased:
            steps[f"{x}_proj.bias"] = TensorStep("(h d) -> h d", (("h", n), ("d", width)))
    steps["o_proj.weight"] = heads(h, d, _OUT_OF_HEADS)
    if "o_proj" in dims.biased:
        steps["o_proj.bias"] = VECTOR
    if dims.head_norms:
        for x, n in (("q", h),) if kind.reuses else (("q", h), ("k", k)):
            steps[f"{x}_norm.weight"] = _head_norm(dims, n, d)
    if dims.family == "gpt_oss":
        steps["sinks"] = VECTOR
    return steps


def _head_norm(dims: Dims, n: int, d: int) -> TensorStep:
    match dims.architecture.head_norms:
        case "each":
            return TensorStep("h d -> h d", (("h", n), ("d", d)))
        case "jointly":
            return TensorStep("(h d) -> h d", (("h", n), ("d", d)))
    # All heads share it; one over all heads at once, as in OLMoE, has another size.
    return TensorStep("d -> d", (("d", d),))


def _latent(dims: Dims, latent: Latent) -> dict[str, TensorStep]:
    steps = {
        "kv_a_layernorm.weight": VECTOR,
        "kv_a_proj_with_mqa.weight": LINEAR,
        "kv_b_proj.weight": heads(dims.heads, latent.key_value_dim),
        "o_proj.weight": heads(dims.heads, latent.value_dim, _OUT_OF_HEADS),
    }
    if latent.query_rank:
        steps |= {"q_a_layernorm.weight": VECTOR, "q_a_proj.weight": LINEAR}
    if latent.index_heads:
        steps |= {
            "indexer.wq_b.weight": heads(latent.index_heads, latent.index_dim),
            "indexer.wk.weight": LINEAR,
            "indexer.k_norm.weight": VECTOR,
            "indexer.k_norm.bias": VECTOR,
            "indexer.weights_proj.weight": ROUTER,
        }
    modules = [name.removesuffix(".weight") for name in steps]
    steps |= {f"{name}.bias": VECTOR for name in modules if name in dims.biased}
    queries = "q_b_proj.weight" if latent.query_rank else "q_proj.weight"
    return steps | {queries: heads(dims.heads, latent.query_dim)}


def _compressed(dims: Dims, own: Compressed, kind: LayerKind) -> dict[str, TensorStep]:
    """A layer of `DeepseekV4Model`, by the names that files have."""
    outputs = TensorStep("(g r) i -> g i r", (("g", own.groups),), projection=True)
    attention = {
        "q_norm.weight": VECTOR,
        "wq_a.weight": LINEAR,
        "wq_b.weight": heads(dims.heads, dims.head_dim),
        "wkv.weight": LINEAR,
        "kv_norm.weight" if own.published else "norm.weight": VECTOR,
        "attn_sink": VECTOR,
        "wo_a.weight": outputs,
        "wo_b.weight": LINEAR,
    }
    compressor = {"wgate.weight": ROUTER, "wkv.weight": ROUTER, "norm.weight": VECTOR}
    compressor["ape"] = EMBEDDING
    if kind.attention != "sliding":
        attention |= {f"compressor.{name}": step for name, step in compressor.items()}
    if kind.attention == "compressed_sparse":
        attention |= {f"indexer.compressor.{name}": step for name, step in compressor.items()}
        attention["indexer.weights_proj.weight"] = ROUTER
        attention["indexer.wq_b.weight"] = heads(own.index_heads, own.index_dim)
    experts = {"gate.weight": ROUTER}
    experts["gate.tid2eid" if kind.hashed else "gate.bias"] = EMBEDDING if kind.hashed else VECTOR
    for name in ("w1", "w3", "w2"):
        experts |= {
            f"{module}.{name}.weight": LINEAR for module in ("shared_experts", "experts.{e}")
        }
    connections = {"fn": ROUTER, "base": VECTOR, "scale": VECTOR}
    return {
        **{f"hc_{on}_{part}": step for on in ("attn", "ffn") for part, step in connections.items()},
        **{f"attn.{name}": step for name, step in attention.items()},
        **{f"ffn.{name}": step for name, step in experts.items()},
    }


def hyper_head(dims: Dims, before: str = "") -> tuple[FamilyLeaf, ...]:
    """Return the leaves of what makes one of DeepSeek-V4's streams of the hidden state."""
    if dims.compressed is None:
        return ()
    source = "hc_head_" if dims.compressed.published else "hc_head.hc_"
    steps = {"fn": ROUTER, "base": VECTOR, "scale": VECTOR}
    return tuple(
        FamilyLeaf(f"{before}hc_head.hc_{part}", source + part, step)
        for part, step in steps.items()
    )


def _mlp(dims: Dims, module: str) -> dict[str, TensorStep]:
    names = dims.architecture.mlp
    if dims.architecture.fused:
        return {f"{module}.{names[-1]}.weight": LINEAR}
    steps = {f"{module}.{name}.weight": LINEAR for name in names}
    return steps | {f"{module}.{name}.bias": VECTOR for name in names if name in dims.biased}


def _experts(dims: Dims) -> dict[str, TensorStep]:
    if dims.family == "gpt_oss":
        return {"mlp.router.weight": ROUTER, "mlp.router.bias": VECTOR}
    if dims.family == "gemma4":
        norms = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        steps = {f"{name}.weight": VECTOR for name in (*norms, "pre_feedforward_layernorm_2")}
        parts = {"proj.weight": ROUTER, "scale": VECTOR, "per_expert_scale": VECTOR}
        return steps | {f"router.{part}": step for part, step in parts.items()}
    architecture = dims.architecture
    module = architecture.feed_forward
    names = ("w1", "w3", "w2") if dims.family == "mixtral" else GATED
    steps = {f"{module}.{architecture.router}.weight": ROUTER}
    if dims.experts_form == "each":
        steps |= {f"{module}.experts.{{e}}.{name}.weight": LINEAR for name in names}
    if architecture.routing_bias:
        steps[f"{module}.gate.e_score_correction_bias"] = VECTOR
    if architecture.shared_gate:
        steps[f"{module}.shared_expert_gate.weight"] = ROUTER
    shared = f"{module}.{architecture.shared_experts}"
    return steps | (_mlp(dims, shared) if dims.shared_experts else {})


def fused_experts(names: tuple[str, str, str], kernel: str, bias: str) -> tuple[FamilyLeaf, ...]:
    """Return the leaves of GPT-OSS's experts; names of gate, up and down take the place of `{}`."""
    # Kernels are `[in, out]`; gate and up take turns along the last axis (`GptOssExperts`).
    leaves = []
    gate, up, down = names
    parts = (gate, "gate_up_proj", (0, 2)), (up, "gate_up_proj", (1, 2)), (down, "down_proj", None)
    for name, tensor, every in parts:
        step = TensorStep("x i o -> x i o", packed=True, every=every)
        leaves.append(FamilyLeaf(kernel.format(name), f"mlp.experts.{tensor}", step))
        step = TensorStep("x o -> x o", every=every)
        leaves.append(FamilyLeaf(bias.format(name), f"mlp.experts.{tensor}_bias", step))
    return tuple(leaves)


def fused_projections(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """Return the plain leaves that are parts of one tensor: `qkv_proj` or `gate_up_proj`."""
    if dims.architecture.mixer == "mamba":
        step = TensorStep("n f e -> e (n f)", (("f", dims.shared_width),), projection=True)
        return tuple(
            FamilyLeaf(
                f"shared_mlp.{name}.kernel",
                "shared_mlp.input_linear.weight",
                dataclasses.replace(step, part=(i, i + 1, 2)),
            )
            for i, name in enumerate(GATED[:2])
        )
    if not dims.architecture.fused:
        return ()
    leaves, start, count = [], 0, dims.heads + 2 * dims.kv_heads
    for x, n in (("q", dims.heads), ("k", dims.kv_heads), ("v", dims.kv_heads)):
        step = heads(n, dims.head_dim, "h d e -> e h d")
        step = dataclasses.replace(step, part=(start, start + n, count))
        leaves.append(FamilyLeaf(f"self_attn.{x}_proj.kernel", "self_attn.qkv_proj.weight", step))
        start += n
    for i, name in enumerate(dims.architecture.mlp[:2]):
        part = (i, i + 1, 2)
        step = TensorStep(
            "n f e -> e (n f)", (("f", dims.fused_width),), projection=True, part=part
        )
        leaves.append(FamilyLeaf(f"mlp.{name}.kernel", "mlp.gate_up_proj.weight", step))
    return tuple(leaves)


def stacked_experts(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """Return the plain leaves of experts that are one tensor, with gate before up."""
    if dims.experts_form == "each":
        return ()
    module = "experts" if dims.family == "gemma4" else f"{dims.architecture.feed_forward}.experts"
    target = module.replace("feed_forward", "mlp").replace("block_sparse_moe", "mlp")
    tensors = f"{module}.gate_up_proj", f"{module}.down_proj"
    if dims.architecture.mixer:
        inner = dims.architecture.feed_forward
        tensors = f"{inner}.input_linear.weight", f"{inner}.output_linear.weight"
    if dims.experts_form == "stacked":  # kernels are `[in, out]`
        split, pattern, down = "x i (n r) -> n x i r", "n x i f -> x i (n f)", "x f o -> x f o"
    else:
        split, pattern, down = "x (n r) i -> n x r i", "n x f i -> x i (n f)", "x o f -> x f o"
    sizes = (("x", dims.experts), ("f", dims.fused_width))
    step = TensorStep(pattern, sizes, projection=True, split=split)
    leaves = [
        FamilyLeaf(
            f"{target}.{name}.kernel",
            tensors[0],
            dataclasses.replace(step, part=(i, i + 1, 2)),
        )
        for i, name in enumerate(("gate_proj", "up_proj"))
    ]
    step = TensorStep(down, sizes, projection=True)
    return (*leaves, FamilyLeaf(f"{target}.down_proj.kernel", tensors[1], step))


def other_leaves(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """Return the plain leaves that belong to no layer, but embedding, last norm and head."""
    leaves = [*hyper_head(dims)]
    if dims.architecture.norm_biases:
        leaves.append(FamilyLeaf("norm.bias", "norm.bias", VECTOR))
    if dims.layer_input:
        name, sizes = "per_layer_model_projection", (("l", dims.layers), ("p", dims.layer_input))
        table = TensorStep("v (l p) -> v l p", sizes)
        leaves.append(
            FamilyLeaf("embed_tokens_per_layer.embedding", "embed_tokens_per_layer.weight", table)
        )
        kernel = TensorStep("(l p) e -> e l p", sizes)
        leaves.append(FamilyLeaf(f"{name}.kernel", f"{name}.weight", kernel))
        name = "per_layer_projection_norm"
        leaves.append(FamilyLeaf(f"{name}.scale", f"{name}.weight", VECTOR))
    if dims.alternatives > 1:
        for name in ("altup_projections", "altup_unembed_projections"):
            sources = tuple(f"{name}.{i}.weight" for i in range(dims.alternatives - 1))
            leaves.append(FamilyLeaf(f"{name}.kernel", sources, TensorStep("o i -> 1 i o")))
    return tuple(leaves)
