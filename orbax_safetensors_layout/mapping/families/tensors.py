"""The tensors of a layer in Hugging Face's checkpoints, and how each becomes a leaf.

Modules are those of transformers 5.23.0 (`modeling_<family>.py`); of Mixtral those of version 4.
"""

from __future__ import annotations

from .dims import Dims, Latent
from .steps import FamilyLeaf, TensorStep

EMBEDDING_TENSOR, HEAD = "embed_tokens.weight", "lm_head.weight"

AS_IT_IS = TensorStep("... -> ...")
VECTOR = TensorStep("e -> e")
EMBEDDING = TensorStep("v e -> v e")  # rows of tokens
LINEAR = TensorStep("o i -> i o", projection=True)  # PyTorch's `[out, in]` as `[in, out]`
ROUTER = TensorStep("o i -> i o")  # a kernel that no checkpoint quantises

_MLP = ("gate_proj", "up_proj", "down_proj")


def head_name(prefix: str) -> str:
    """Return the name of the output kernel's tensor, for the prefix of the others.

    >>> head_name("model."), head_name("language_model.model."), head_name("model.language_model.")
    ('lm_head.weight', 'language_model.lm_head.weight', 'lm_head.weight')
    """
    return HEAD if prefix.startswith("model.") else prefix.removesuffix("model.") + HEAD


def heads(h: int, d: int, pattern: str = "e h d") -> TensorStep:
    """A projection to heads: `[heads * d, hidden]` as `pattern`, `[hidden, heads, d]`."""
    return TensorStep(f"(h d) e -> {pattern}", (("h", h), ("d", d)), projection=True)


def _out_of_heads(h: int, d: int) -> TensorStep:
    """A projection from heads: `[hidden, heads * d]` as `[heads, d, hidden]`."""
    return TensorStep("e (h d) -> h d e", (("h", h), ("d", d)), projection=True)


def layer_tensors(dims: Dims, *, sparse: bool) -> dict[str, TensorStep]:
    """Return the step of each tensor of a layer with (`sparse`) or without experts.

    Names are those after the layer's. GPT-OSS's experts are in `fused_experts`.
    """
    norms = ["input_layernorm", "post_attention_layernorm"]
    if dims.family in ("gemma2", "gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    steps = {f"{norm}.weight": VECTOR for norm in norms}
    attention = _attention(dims) if dims.latent is None else _latent(dims, dims.latent)
    steps |= {f"self_attn.{name}": step for name, step in attention.items()}
    return steps | (_experts(dims) if sparse else _mlp(dims, "mlp"))


def _attention(dims: Dims) -> dict[str, TensorStep]:
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    steps = {f"{x}_proj.weight": heads(n, d) for x, n in (("q", h), ("k", k), ("v", k))}
    steps["o_proj.weight"] = _out_of_heads(h, d)
    for x, n in (("q", h), ("k", k), ("v", k)):
        if f"{x}_proj" in dims.biased:
            steps[f"{x}_proj.bias"] = TensorStep("(h d) -> h d", (("h", n), ("d", d)))
    if "o_proj" in dims.biased:
        steps["o_proj.bias"] = VECTOR
    if dims.family in ("qwen3", "qwen3_moe", "gemma3"):
        # All heads share these; one over all heads at once, as in OLMoE, has another size.
        steps |= dict.fromkeys(
            ("q_norm.weight", "k_norm.weight"), TensorStep("d -> d", (("d", d),))
        )
    if dims.family == "gpt_oss":
        steps["sinks"] = VECTOR
    return steps


def _latent(dims: Dims, latent: Latent) -> dict[str, TensorStep]:
    queries = heads(dims.heads, latent.query_dim)
    steps = {
        "kv_a_layernorm.weight": VECTOR,
        "kv_a_proj_with_mqa.weight": LINEAR,
        "kv_b_proj.weight": heads(dims.heads, latent.key_value_dim),
        "o_proj.weight": _out_of_heads(dims.heads, latent.value_dim),
    }
    if not latent.query_rank:
        return {**steps, "q_proj.weight": queries}
    low_rank = {"q_a_layernorm.weight": VECTOR, "q_a_proj.weight": LINEAR}
    return {**steps, **low_rank, "q_b_proj.weight": queries}


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
    """Return the leaves of GPT-OSS's experts.

    Their kernels are `[in, out]` already, and gate and up take turns along the last axis
    (`GptOssExperts`; MaxText's `interleave`). `names` are those of gate, up and down, in the place
    of `{}` in `kernel` and `bias`.
    """
    leaves = []
    gate, up, down = names
    parts = (gate, "gate_up_proj", (0, 2)), (up, "gate_up_proj", (1, 2)), (down, "down_proj", None)
    for name, tensor, every in parts:
        step = TensorStep("x i o -> x i o", packed=True, every=every)
        leaves.append(FamilyLeaf(kernel.format(name), f"mlp.experts.{tensor}", step))
        step = TensorStep("x o -> x o", every=every)
        leaves.append(FamilyLeaf(bias.format(name), f"mlp.experts.{tensor}_bias", step))
    return tuple(leaves)
