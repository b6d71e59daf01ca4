"""The tensors of a layer of transformers 5.23.0 (for Mixtral: 4), and how they become leaves."""

from __future__ import annotations

from .dims import Dims, Latent
from .steps import LINEAR, ROUTER, VECTOR, FamilyLeaf, TensorStep

EMBEDDING_TENSOR, NORM_TENSOR = "embed_tokens.weight", "norm.weight"
_MLP = ("gate_proj", "up_proj", "down_proj")
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
    norms = ["input_layernorm", "post_attention_layernorm"]
    if dims.family in ("gemma2", "gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    steps = {f"{norm}.weight": VECTOR for norm in norms}
    attention = _attention(dims) if dims.latent is None else _latent(dims, dims.latent)
    steps |= {f"self_attn.{name}": step for name, step in attention.items()}
    return steps | (_experts(dims) if sparse else _mlp(dims, "mlp"))


def _attention(dims: Dims) -> dict[str, TensorStep]:
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    steps = {}
    for x, n in (("q", h), ("k", k), ("v", k)):
        steps[f"{x}_proj.weight"] = heads(n, d)
        if f"{x}_proj" in dims.biased:
            steps[f"{x}_proj.bias"] = TensorStep("(h d) -> h d", (("h", n), ("d", d)))
    steps["o_proj.weight"] = heads(h, d, _OUT_OF_HEADS)
    if "o_proj" in dims.biased:
        steps["o_proj.bias"] = VECTOR
    if dims.family in ("qwen3", "qwen3_moe", "gemma3"):
        # All heads share these; one over all heads at once, as in OLMoE, has another size.
        norm = TensorStep("d -> d", (("d", d),))
        steps |= {"q_norm.weight": norm, "k_norm.weight": norm}
    if dims.family == "gpt_oss":
        steps["sinks"] = VECTOR
    return steps


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
    steps = {f"{module}.{name}.weight": LINEAR for name in _MLP}
    return steps | {f"{module}.{name}.bias": VECTOR for name in _MLP if name in dims.biased}


def _experts(dims: Dims) -> dict[str, TensorStep]:
    if dims.family == "gpt_oss":
        return {"mlp.router.weight": ROUTER, "mlp.router.bias": VECTOR}
    mixtral = dims.family == "mixtral"
    module, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", _MLP)
    steps = {f"{module}.gate.weight": ROUTER}
    steps |= {f"{module}.experts.{{e}}.{name}.weight": LINEAR for name in names}
    if dims.family == "deepseek_v3":
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
