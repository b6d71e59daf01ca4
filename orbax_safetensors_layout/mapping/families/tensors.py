"""The tensors of a layer of transformers 5.23.0 (for Mixtral: 4), and how they become leaves."""

from __future__ import annotations

import dataclasses

from .architectures import GATED
from .dims import Dims, Latent
from .steps import LINEAR, ROUTER, VECTOR, FamilyLeaf, TensorStep

EMBEDDING_TENSOR, NORM_TENSOR = "embed_tokens.weight", "norm.weight"
NORM_BIAS = FamilyLeaf("norm.bias", "norm.bias", VECTOR)
_OUT_OF_HEADS = "e (h d) -> h d e"


def head_name(prefix: str) -> str:
    """Return the name of the output kernel's tensor, for the prefix of the others.

    >>> head_name("model."), head_name("language_model.model."), head_name("model.language_model.")
    ('lm_head.weight', 'language_model.lm_head.weight', 'lm_head.weight')
    """
    return ("" if prefix.startswith("model.") else prefix.removesuffix("model.")) + "lm_head.weight"


def heads(h: int, d: int, pattern: str = "(h d) e -> e h d") -> TensorStep:
    """A projection to heads: `[heads * d, hidden]` as `[hidden, heads, d]`, or another pattern."""
    return TensorStep(pattern, (("h", h), ("d", d)), projection=True)


def layer_tensors(dims: Dims, *, sparse: bool) -> dict[str, TensorStep]:
    """Return the step of each tensor of a layer; `fused_experts` has the experts of GPT-OSS."""
    norms, parts = dims.architecture.norms, ("weight", "bias")[: 1 + dims.architecture.norm_biases]
    steps = {f"{norm}.{part}": VECTOR for norm in norms for part in parts}
    attention = _attention(dims) if dims.latent is None else _latent(dims, dims.latent)
    steps |= {f"self_attn.{name}": step for name, step in attention.items()}
    return steps | (_experts(dims) if sparse else _mlp(dims, "mlp"))


def _attention(dims: Dims) -> dict[str, TensorStep]:
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    steps = {}
    for x, n in (("q", h), ("k", k), ("v", k)):
        if not dims.architecture.fused:  # else they are parts of one tensor: `fused_projections`
            steps[f"{x}_proj.weight"] = heads(n, d)
        if f"{x}_proj" in dims.biased:
            steps[f"{x}_proj.bias"] = TensorStep("(h d) -> h d", (("h", n), ("d", d)))
    steps["o_proj.weight"] = heads(h, d, _OUT_OF_HEADS)
    if "o_proj" in dims.biased:
        steps["o_proj.bias"] = VECTOR
    if dims.head_norms:
        for x, n in (("q", h), ("k", k)):
            steps[f"{x}_norm.weight"] = _head_norm(dims, n)
    if dims.family == "gpt_oss":
        steps["sinks"] = VECTOR
    return steps


def _head_norm(dims: Dims, n: int) -> TensorStep:
    match dims.architecture.head_norms:
        case "each":
            return TensorStep("h d -> h d", (("h", n), ("d", dims.head_dim)))
        case "jointly":
            return TensorStep("(h d) -> h d", (("h", n), ("d", dims.head_dim)))
    # All heads share it; one over all heads at once, as in OLMoE, has another size.
    return TensorStep("d -> d", (("d", dims.head_dim),))


def _latent(dims: Dims, latent: Latent) -> dict[str, TensorStep]:
    steps = {
        "kv_a_layernorm.weight": VECTOR,
        "kv_a_proj_with_mqa.weight": LINEAR,
        "kv_b_proj.weight": heads(dims.heads, latent.key_value_dim),
        "o_proj.weight": heads(dims.heads, latent.value_dim, _OUT_OF_HEADS),
    }
    if latent.query_rank:
        steps |= {"q_a_layernorm.weight": VECTOR, "q_a_proj.weight": LINEAR}
    queries = "q_b_proj.weight" if latent.query_rank else "q_proj.weight"
    return steps | {queries: heads(dims.heads, latent.query_dim)}


def _mlp(dims: Dims, module: str) -> dict[str, TensorStep]:
    names = dims.architecture.mlp
    if dims.architecture.fused:
        return {f"{module}.{names[-1]}.weight": LINEAR}
    steps = {f"{module}.{name}.weight": LINEAR for name in names}
    return steps | {f"{module}.{name}.bias": VECTOR for name in names if name in dims.biased}


def _experts(dims: Dims) -> dict[str, TensorStep]:
    if dims.family == "gpt_oss":
        return {"mlp.router.weight": ROUTER, "mlp.router.bias": VECTOR}
    mixtral = dims.family == "mixtral"
    module, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", GATED)
    steps = {f"{module}.gate.weight": ROUTER}
    steps |= {f"{module}.experts.{{e}}.{name}.weight": LINEAR for name in names}
    if dims.architecture.routing_bias:
        steps["mlp.gate.e_score_correction_bias"] = VECTOR
    return steps | (_mlp(dims, "mlp.shared_experts") if dims.shared_experts else {})


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
        step = TensorStep("n f e -> e (n f)", (("f", dims.mlp),), projection=True, part=part)
        leaves.append(FamilyLeaf(f"mlp.{name}.kernel", "mlp.gate_up_proj.weight", step))
    return tuple(leaves)
