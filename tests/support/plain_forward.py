"""A forward pass over the plain tree, layer by layer: dense, with experts, and hybrid models.

Qwen 3 with experts, Mixtral, OLMoE-like blocks, and Qwen3-Next's gated delta rule beside gated
attention, as `modeling_*.py` of transformers 5.23.0 compute them. `params` is flat, by dotted
name, with layers that are not stacked; all float32.
"""

import jax
import jax.numpy as jnp
import numpy as np


def logits(params, tokens, config):
    """`[tokens, vocab]` of integer `[tokens]`."""
    with jax.default_matmul_precision("highest"):
        x = jnp.asarray(params["embed_tokens.embedding"])[tokens]
        for i in range(config["num_hidden_layers"]):
            before = f"layers.{i}."
            p = {n.removeprefix(before): jnp.asarray(a) for n, a in params.items() if before in n}
            y = norm(x, p["input_layernorm.scale"], config)
            x = x + (delta_rule if "linear_attn.A_log" in p else attention)(y, p, config)
            y = norm(x, p["post_attention_layernorm.scale"], config)
            x = x + (experts if "mlp.router.kernel" in p else mlp)(y, p, config)
        return norm(x, params["norm.scale"], config) @ params["lm_head.kernel"]


def norm(x, scale, config):
    one = 1 if config["model_type"] == "qwen3_next" else 0
    return normed(x, config) * (one + scale)


def normed(x, config):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"])


def attention(x, p, config):
    q, k, v = (jnp.einsum("te,ehd->thd", x, p[f"self_attn.{n}_proj.kernel"]) for n in "qkv")
    gate = None
    if q.shape[-1] == 2 * k.shape[-1]:
        q, gate = jnp.split(q, 2, -1)
    if "self_attn.q_norm.scale" in p:
        q = norm(q, p["self_attn.q_norm.scale"], config)
        k = norm(k, p["self_attn.k_norm.scale"], config)
    q, k = rotate(q, config), rotate(k, config)
    k, v = (jnp.repeat(a, q.shape[1] // k.shape[1], 1) for a in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v)
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    return jnp.einsum("thd,hde->te", mixed, p["self_attn.o_proj.kernel"])


def rotate(x, config):
    rope = config["rope_parameters"]
    d = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** -(np.arange(0, d, 2) / d)
    cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    first, second = jnp.split(x[..., :d], 2, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, x[..., d:]], -1)


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def mlp(x, p, config, module="mlp"):
    names = ("gate_proj", "up_proj", "down_proj")
    return gated(x, *(p[f"{module}.{name}.kernel"] for name in names))


def experts(x, p, config):
    weights = jax.nn.softmax(x @ p["mlp.router.kernel"], -1)
    top, chosen = jax.lax.top_k(weights, config["num_experts_per_tok"])
    if config.get("norm_topk_prob", config["model_type"] == "mixtral"):
        top = top / top.sum(-1, keepdims=True)
    kernels = [p[f"mlp.experts.{n}.kernel"] for n in ("gate_proj", "up_proj", "down_proj")]
    rows = []
    for token, weight, number in zip(x, top, chosen, strict=True):
        parts = [gated(token, *(kernel[e] for kernel in kernels)) for e in number]
        rows.append(sum(w * part for w, part in zip(weight, parts, strict=True)))
    y = jnp.stack(rows)
    if "mlp.shared_expert_gate.kernel" in p:
        shared = mlp(x, p, config, "mlp.shared_expert")
        y = y + jax.nn.sigmoid(x @ p["mlp.shared_expert_gate.kernel"]) * shared
    return y


def delta_rule(x, p, config):
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    per = values // keys
    mixed = jnp.einsum("te,ekw->tkw", x, p["linear_attn.in_proj_qkvz.kernel"])
    q, k, v, z = jnp.split(mixed, np.cumsum([key_dim, key_dim, per * value_dim]), -1)
    rates = jnp.einsum("te,ekw->tkw", x, p["linear_attn.in_proj_ba.kernel"])
    b, a = (part.reshape(len(x), values) for part in jnp.split(rates, 2, -1))
    # A causal convolution of each channel by itself.
    kernel = p["linear_attn.conv1d.kernel"][:, 0]
    joined = jnp.concatenate([part.reshape(len(x), -1) for part in (q, k, v)], -1)
    padded = jnp.pad(joined, [(len(kernel) - 1, 0), (0, 0)])
    joined = jax.nn.silu(sum(padded[i : i + len(x)] * row for i, row in enumerate(kernel)))
    q, k, v = jnp.split(joined, np.cumsum([keys * key_dim, keys * key_dim]), -1)
    q, k = (jnp.repeat(part.reshape(len(x), keys, key_dim), per, 1) for part in (q, k))
    q, k = (part * jax.lax.rsqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v, z = v.reshape(len(x), values, value_dim), z.reshape(len(x), values, value_dim)
    decay = jnp.exp(
        -jnp.exp(p["linear_attn.A_log"]) * jax.nn.softplus(a + p["linear_attn.dt_bias"])
    )
    state, out = jnp.zeros((values, key_dim, value_dim)), []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        known = jnp.einsum("hkv,hk->hv", state, k[t])
        change = (v[t] - known) * jax.nn.sigmoid(b[t])[:, None]
        state = state + k[t][:, :, None] * change[:, None]
        out.append(jnp.einsum("hkv,hk->hv", state, q[t]) / np.sqrt(key_dim))
    y = normed(jnp.stack(out), config) * p["linear_attn.norm.scale"] * jax.nn.silu(z)
    return jnp.einsum("thd,hde->te", y, p["linear_attn.out_proj.kernel"])
