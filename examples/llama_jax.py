"""A forward pass of Llama-like models (Llama, Mistral, Qwen 2, Qwen 3) over the plain tree.

Small and whole: embedding, RMSNorm, rotary embedding, grouped attention, SwiGLU, logits. `params`
is flat, by dotted name, with layers stacked, as `osl.families.mapping(config)` gives it; all
float32. `tests/mapping/test_families.py` compares its logits with those of transformers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def logits(params, tokens, config):
    """`[batch, tokens, vocab]` of integer `[batch, tokens]`."""
    check(config, tokens.shape[1])
    before = "layers."
    layers = {n.removeprefix(before): p for n, p in params.items() if n.startswith(before)}
    rotation = rotary(config, tokens.shape[1])

    def layer(x, p):
        x = x + attention(norm(x, p["input_layernorm.scale"], config), p, rotation, config)
        return x + mlp(norm(x, p["post_attention_layernorm.scale"], config), p), None

    with jax.default_matmul_precision("highest"):
        embedding = jnp.asarray(params["embed_tokens.embedding"])
        x, _ = jax.lax.scan(
            layer, embedding[tokens], {n: jnp.asarray(p) for n, p in layers.items()}
        )
        x = norm(x, params["norm.scale"], config)
        head = params.get("lm_head.kernel", embedding.T)
        return x @ head


def check(config, length):
    """Refuses what this model has not."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise NotImplementedError(f"this model has no hidden_act {config['hidden_act']!r}")
    is_used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    window = config.get("sliding_window", 4096)  # transformers' default
    if is_used and window is not None and window < length:
        raise NotImplementedError(
            f"this model has no sliding_window: {window}, less than the {length} tokens"
        )


def norm(x, scale, config):
    variance = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(variance + config.get("rms_norm_eps", 1e-6)) * scale


def attention(x, p, rotation, config):
    q, k, v = (
        jnp.einsum("bte,ehd->bthd", x, p[f"self_attn.{n}_proj.kernel"])
        + p.get(f"self_attn.{n}_proj.bias", jnp.float32(0))
        for n in "qkv"
    )
    if "self_attn.q_norm.scale" in p:
        q = norm(q, p["self_attn.q_norm.scale"], config)
        k = norm(k, p["self_attn.k_norm.scale"], config)
    q, k = rotate(q, *rotation), rotate(k, *rotation)
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    out = jnp.einsum("bthd,hde->bte", mixed, p["self_attn.o_proj.kernel"])
    return out + p.get("self_attn.o_proj.bias", jnp.float32(0))


def mlp(x, p):
    def linear(x, name):
        return x @ p[f"mlp.{name}.kernel"] + p.get(f"mlp.{name}.bias", jnp.float32(0))

    return linear(jax.nn.silu(linear(x, "gate_proj")) * linear(x, "up_proj"), "down_proj")


def rotary(config, length):
    """Cosines and sines, `[tokens, head_dim / 2]`."""
    heads = config["num_attention_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    kind, theta, rope = rotary_settings(config)
    frequency = theta ** -(np.arange(0, d, 2) / d)
    if kind == "llama3":
        old = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((old * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
        frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
    angles = np.arange(length)[:, None] * frequency
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotary_settings(config):
    """Type, base and the rest: `rope_parameters` of transformers 5, or what older files have."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise NotImplementedError(f"this model has no rotary embedding of type {kind!r}")
    return kind, rope.get("rope_theta", config.get("rope_theta", 10000.0)), rope


def rotate(x, cos, sin):
    """Turns pairs whose members are in the two halves of a head."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
