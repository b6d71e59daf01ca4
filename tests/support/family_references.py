"""The leaves of each model side, by plain numpy on whole tensors: written from the sources anew.

Nothing here is shared with the package: a layer is a dict, and layers are stacked at the end.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32 = np.float32


class Layer:
    """Tensors of one layer of a checkpoint."""

    def __init__(self, tensors, index, config):
        self.tensors = tensors
        self.before = f"model.layers.{index}."
        self.c = config
        self.heads = config["num_attention_heads"]
        self.kv = config["num_key_value_heads"]
        self.d = config.get("head_dim") or config["hidden_size"] // self.heads
        own = {int(n): c for n, c in (config.get("per_layer_config") or {}).items()}.get(index, {})
        self.d = own.get("head_dim", self.d)
        self.kv = own.get("num_key_value_heads", self.kv)

    def __call__(self, name):
        return self.tensors[self.before + name]

    def __contains__(self, name):
        return self.before + name in self.tensors

    def linear(self, name):
        return self(f"{name}.weight").T

    def experts(self, pattern, n):
        return np.stack([self(pattern.format(e)).T for e in range(n)])


def attention_kernels(x, d_v=None):
    """q, k, v, o as [hidden, heads, d] and [heads, d, hidden]."""
    leaves = {}
    if "self_attn.qkv_proj.weight" in x:
        ends = (x.heads * x.d, (x.heads + x.kv) * x.d)
        weights = dict(zip("qkv", np.split(x("self_attn.qkv_proj.weight"), ends), strict=True))
    else:
        weights = {
            name: x(f"self_attn.{name}_proj.weight")
            for name in "qkv"
            if f"self_attn.{name}_proj.weight" in x
        }
    for name, heads in (("q", x.heads), ("k", x.kv), ("v", x.kv)):
        if name not in weights:
            continue  # keys and values of another layer, or values that are the keys
        weight = weights[name]  # queries of some models have a gate beside each
        leaves[name] = weight.T.reshape(weight.shape[1], heads, -1)
        assert leaves[name].shape[2] in ((x.d, 2 * x.d) if name == "q" else (x.d,))
    weight = x("self_attn.o_proj.weight")
    leaves["o"] = weight.T.reshape(x.heads, x.d, weight.shape[0])
    return leaves


def latent_kernels(x):
    c, h = x.c, x.heads
    q_dim = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    kv_dim = c["qk_nope_head_dim"] + c["v_head_dim"]
    o = x("self_attn.o_proj.weight")
    leaves = {
        "kv_a": x.linear("self_attn.kv_a_proj_with_mqa"),
        "kv_b": x.linear("self_attn.kv_b_proj").reshape(c["kv_lora_rank"], h, kv_dim),
        "o": o.T.reshape(h, c["v_head_dim"], o.shape[0]),
    }
    if "self_attn.indexer.wk.weight" in x:
        query = x.linear("self_attn.indexer.wq_b")
        leaves["indexer.wq_b"] = query.reshape(len(query), c["index_n_heads"], c["index_head_dim"])
        for name in ("indexer.wk", "indexer.weights_proj"):
            leaves[name] = x.linear(f"self_attn.{name}")
    if c["q_lora_rank"] is None:
        leaves["q"] = x.linear("self_attn.q_proj").reshape(c["hidden_size"], h, q_dim)
    else:
        leaves["q_a"] = x.linear("self_attn.q_a_proj")
        leaves["q_b"] = x.linear("self_attn.q_b_proj").reshape(c["q_lora_rank"], h, q_dim)
    return leaves


def linear_attention(x):
    """The gated delta rule of Qwen3-Next and Qwen 3.5."""
    c = x.c
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    out = x("linear_attn.out_proj.weight")
    leaves = {
        "A_log": x("linear_attn.A_log"),
        "dt_bias": x("linear_attn.dt_bias"),
        "conv1d.kernel": x("linear_attn.conv1d.weight").transpose(2, 1, 0),
        "norm.scale": x("linear_attn.norm.weight"),
        "out_proj.kernel": out.T.reshape(values, c["linear_value_head_dim"], out.shape[0]),
    }
    if "linear_attn.in_proj_qkvz.weight" in x:
        for name in ("in_proj_qkvz", "in_proj_ba"):
            kernel = x.linear(f"linear_attn.{name}")
            leaves[f"{name}.kernel"] = kernel.reshape(len(kernel), keys, -1)
    else:
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"):
            leaves[f"{name}.kernel"] = x.linear(f"linear_attn.{name}")
        gate = leaves["in_proj_z.kernel"]
        leaves["in_proj_z.kernel"] = gate.reshape(len(gate), values, -1)
    return {f"linear_attn.{name}": array for name, array in leaves.items()}


def plain_layer(family, x):
    if family == "mamba2":
        return mamba_layer(x)
    if family == "deepseek_v4":
        return deepseek_v4_layer(x)
    leaves = {}
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
        "self_attn.indexer.k_norm",
    ):
        if f"{name}.weight" in x:
            leaves[f"{name}.scale"] = x(f"{name}.weight")
        if f"{name}.bias" in x:
            leaves[f"{name}.bias"] = x(f"{name}.bias")
    if family in ("olmo2", "olmo3"):
        for name, heads in (("q", x.heads), ("k", x.kv)):
            leaf = f"self_attn.{name}_norm.scale"
            leaves[leaf] = leaves[leaf].reshape(heads, x.d)
    if family in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
        names = {
            "q": "q_proj",
            "q_a": "q_a_proj",
            "q_b": "q_b_proj",
            "kv_a": "kv_a_proj_with_mqa",
            "kv_b": "kv_b_proj",
            "o": "o_proj",
        }
        kernels = latent_kernels(x).items()
        leaves |= {f"self_attn.{names.get(name, name)}.kernel": array for name, array in kernels}
        for name in ("self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias"):
            if name in x:
                leaves[name] = x(name)
    elif "linear_attn.A_log" in x:
        leaves |= linear_attention(x)
    elif "mamba.A_log" in x:
        leaves |= mamba_mixer(x, "mamba", x.c["mamba_n_heads"])
    else:
        kernels = attention_kernels(x).items()
        leaves |= {f"self_attn.{name}_proj.kernel": array for name, array in kernels}
    for name, heads in (("q", x.heads), ("k", x.kv), ("v", x.kv)):
        if f"self_attn.{name}_proj.bias" in x:
            bias = x(f"self_attn.{name}_proj.bias").reshape(heads, x.d)
            leaves[f"self_attn.{name}_proj.bias"] = bias
    if "self_attn.o_proj.bias" in x:
        leaves["self_attn.o_proj.bias"] = x("self_attn.o_proj.bias")
    if "self_attn.sinks" in x:
        leaves["self_attn.sinks"] = x("self_attn.sinks")
    if "mlp.gate_up_proj.weight" in x:
        gate, up = np.split(x.linear("mlp.gate_up_proj"), 2, axis=1)
        leaves |= {"mlp.gate_proj.kernel": gate, "mlp.up_proj.kernel": up}
    for name in ("gate_proj", "up_proj", "down_proj", "c_fc", "c_proj"):
        for before in ("mlp.", "mlp.shared_experts.", "mlp.shared_expert."):
            if f"{before}{name}.weight" in x:
                leaves[f"{before}{name}.kernel"] = x.linear(before + name)
            if f"{before}{name}.bias" in x:
                leaves[f"{before}{name}.bias"] = x(f"{before}{name}.bias")
    if "mlp.gate.weight" in x:
        leaves["mlp.router.kernel"] = x.linear("mlp.gate")
        n = leaves["mlp.router.kernel"].shape[1]
        if "mlp.experts.gate_up_proj" in x:
            kernels = [*np.split(x("mlp.experts.gate_up_proj"), 2, axis=1)]
            kernels = [a.transpose(0, 2, 1) for a in (*kernels, x("mlp.experts.down_proj"))]
        else:
            names = [f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")]
            kernels = [x.experts(name, n) for name in names]
        for name, kernel in zip(("gate", "up", "down"), kernels, strict=True):
            leaves[f"mlp.experts.{name}_proj.kernel"] = kernel
    if "mlp.shared_expert_gate.weight" in x:
        leaves["mlp.shared_expert_gate.kernel"] = x.linear("mlp.shared_expert_gate")
    if family == "llama4":
        leaves |= llama4_mlp(x)
    if family == "granitemoehybrid":
        leaves |= granite_mlp(x)
    if family in ("gemma3n", "gemma4"):
        leaves |= gemma_additions(x)
    if "mlp.gate.e_score_correction_bias" in x:
        leaves["mlp.router.e_score_correction_bias"] = x("mlp.gate.e_score_correction_bias")
    if family == "mixtral":
        leaves["mlp.router.kernel"] = x.linear("block_sparse_moe.gate")
        n = leaves["mlp.router.kernel"].shape[1]
        for name, w in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            leaves[f"mlp.experts.{name}.kernel"] = x.experts(
                f"block_sparse_moe.experts.{{}}.{w}.weight", n
            )
    if family == "gpt_oss":
        leaves["mlp.router.kernel"] = x.linear("mlp.router")
        leaves["mlp.router.bias"] = x("mlp.router.bias")
        fused, bias = x("mlp.experts.gate_up_proj"), x("mlp.experts.gate_up_proj_bias")
        for start, name in enumerate(("gate_proj", "up_proj")):
            leaves[f"mlp.experts.{name}.kernel"] = fused[..., start::2]
            leaves[f"mlp.experts.{name}.bias"] = bias[..., start::2]
        leaves["mlp.experts.down_proj.kernel"] = x("mlp.experts.down_proj")
        leaves["mlp.experts.down_proj.bias"] = x("mlp.experts.down_proj_bias")
    return leaves


def deepseek_v4_layer(x):
    """A layer by the names of transformers' modules, for files that have others."""
    leaves = {
        "input_layernorm.scale": x("attn_norm.weight"),
        "post_attention_layernorm.scale": x("ffn_norm.weight"),
        "mlp.router.kernel": x.linear("ffn.gate"),
    }
    for on in ("attn", "ffn"):
        leaves[f"{on}_hc.fn"] = x(f"hc_{on}_fn").T
        leaves[f"{on}_hc.base"], leaves[f"{on}_hc.scale"] = x(f"hc_{on}_base"), x(f"hc_{on}_scale")
    if "ffn.gate.bias" in x:
        leaves["mlp.router.e_score_correction_bias"] = x("ffn.gate.bias")
    else:
        leaves["mlp.router.tid2eid"] = x("ffn.gate.tid2eid")
    for w, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        leaves[f"mlp.shared_experts.{name}.kernel"] = x.linear(f"ffn.shared_experts.{w}")
        pattern = f"ffn.experts.{{}}.{w}.weight"
        leaves[f"mlp.experts.{name}.kernel"] = x.experts(pattern, x.c["n_routed_experts"])
    groups, kernel = x.c["o_groups"], x("attn.wo_a.weight")
    attention = {
        "q_a_norm.scale": x("attn.q_norm.weight"),
        "q_a_proj.kernel": x.linear("attn.wq_a"),
        "q_b_proj.kernel": x.linear("attn.wq_b").reshape(-1, x.heads, x.d),
        "kv_proj.kernel": x.linear("attn.wkv"),
        "kv_norm.scale": x("attn.norm.weight"),
        "sinks": x("attn.attn_sink"),
        "o_a_proj.kernel": np.stack([part.T for part in np.split(kernel, groups)]),
        "o_b_proj.kernel": x.linear("attn.wo_b"),
    }
    for module, to in (("compressor", ""), ("indexer.compressor", "indexer.")):
        if f"attn.{module}.ape" in x:
            attention[f"compressor.{to}position_bias"] = x(f"attn.{module}.ape")
            attention[f"compressor.{to}kv_norm.scale"] = x(f"attn.{module}.norm.weight")
            attention[f"compressor.{to}gate_proj.kernel"] = x.linear(f"attn.{module}.wgate")
            attention[f"compressor.{to}kv_proj.kernel"] = x.linear(f"attn.{module}.wkv")
    if "attn.indexer.wq_b.weight" in x:
        before, heads = "compressor.indexer.", x.c["index_n_heads"]
        queries = x.linear("attn.indexer.wq_b")
        attention[f"{before}q_b_proj.kernel"] = queries.reshape(len(queries), heads, -1)
        attention[f"{before}scorer.weights_proj.kernel"] = x.linear("attn.indexer.weights_proj")
    return leaves | {f"self_attn.{name}": array for name, array in attention.items()}


def granite_mlp(x):
    """The MLP of all tokens, and the experts beside it, of Granite 4."""
    gate, up = np.split(x("shared_mlp.input_linear.weight"), 2)
    leaves = {
        "shared_mlp.gate_proj.kernel": gate.T,
        "shared_mlp.up_proj.kernel": up.T,
        "shared_mlp.down_proj.kernel": x.linear("shared_mlp.output_linear"),
    }
    if "block_sparse_moe.router.layer.weight" in x:
        leaves["mlp.router.kernel"] = x.linear("block_sparse_moe.router.layer")
        kernels = [*np.split(x("block_sparse_moe.input_linear.weight"), 2, axis=1)]
        kernels.append(x("block_sparse_moe.output_linear.weight"))
        for name, kernel in zip(("gate", "up", "down"), kernels, strict=True):
            leaves[f"mlp.experts.{name}_proj.kernel"] = kernel.transpose(0, 2, 1)
    return leaves


def gemma_additions(x):
    """What layers of Gemma 3n and 4 have more than those of Gemma 3."""
    leaves = {}
    for name in ("layer_scalar", "altup.correct_output_scale", "router.scale",
                 "router.per_expert_scale"):  # fmt: skip
        if name in x:
            leaves[name] = x(name)
    for name in ("altup.router_norm", "laurel.post_laurel_norm", "post_per_layer_input_norm",
                 "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
                 "pre_feedforward_layernorm_2"):  # fmt: skip
        if f"{name}.weight" in x:
            leaves[f"{name}.scale"] = x(f"{name}.weight")
    for name in ("altup.correction_coefs", "altup.modality_router", "altup.prediction_coefs",
                 "laurel.linear_left", "laurel.linear_right", "per_layer_input_gate",
                 "per_layer_projection", "router.proj"):  # fmt: skip
        if f"{name}.weight" in x:
            leaves[f"{name}.kernel"] = x.linear(name)
    if "experts.gate_up_proj" in x:
        gate, up = np.split(x("experts.gate_up_proj"), 2, axis=1)
        down = x("experts.down_proj")
        for name, array in (("gate", gate), ("up", up), ("down", down)):
            leaves[f"experts.{name}_proj.kernel"] = array.transpose(0, 2, 1)
    return leaves


def llama4_mlp(x):
    """MLP or experts of a layer."""
    before = "feed_forward."
    names = ("gate_proj", "up_proj", "down_proj")
    if f"{before}router.weight" not in x:
        return {f"mlp.{name}.kernel": x.linear(before + name) for name in names}
    leaves = {
        f"mlp.shared_expert.{n}.kernel": x.linear(f"{before}shared_expert.{n}") for n in names
    }
    gate, up = np.split(x(f"{before}experts.gate_up_proj"), 2, axis=-1)
    return leaves | {
        "mlp.router.kernel": x.linear(f"{before}router"),
        "mlp.experts.gate_proj.kernel": gate,
        "mlp.experts.up_proj.kernel": up,
        "mlp.experts.down_proj.kernel": x(f"{before}experts.down_proj"),
    }


def kind_of(family, config, i, layers):
    """What layers that are stacked together are called."""
    sparse = ["mlp.router.kernel" in layer for layer in layers]
    words = ""
    if family == "deepseek_v4":
        table = "hash_" * (config["mlp_layer_types"][i] == "hash_moe")
        return table + config["layer_types"][i].removesuffix("attention")
    if family in ("gemma3n", "gemma4") and i >= len(layers) - config["num_kv_shared_layers"]:
        words += "kv_shared_"
    if any(sparse) and not all(sparse):
        words += "moe_" if sparse[i] else "dense_"
    if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4", "granitemoehybrid"):
        words += config["layer_types"][i].removesuffix("attention")
    return words


def mamba_layer(x):
    """`Mamba2Mixer` and the norm before it."""
    return {"norm.scale": x("norm.weight")} | mamba_mixer(x, "mixer", x.c["num_heads"])


def mamba_mixer(x, module, heads):
    out = x(f"{module}.out_proj.weight")
    leaves = {
        f"{module}.norm.scale": x(f"{module}.norm.weight"),
        f"{module}.conv1d.kernel": x(f"{module}.conv1d.weight").transpose(2, 1, 0),
        f"{module}.in_proj.kernel": x.linear(f"{module}.in_proj"),
        f"{module}.out_proj.kernel": out.T.reshape(heads, -1, len(out)),
    }
    same = [f"{module}.{name}" for name in ("A_log", "D", "dt_bias")]
    same += [f"{module}.{name}.bias" for name in ("in_proj", "conv1d", "out_proj")]
    return leaves | {name: x(name) for name in same if name in x}


def plain(family, config, tensors, scan):
    if family == "mamba2":
        names = {"backbone.": "model.", "embeddings": "embed_tokens", "norm_f": "norm"}
        for old, new in names.items():
            tensors = {name.replace(old, new): array for name, array in tensors.items()}
    leaves = {
        "embed_tokens.embedding": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
    }
    if family == "deepseek_v4":
        leaves["lm_head.kernel"] = tensors["head.weight"].T
        for name in ("hc_fn", "hc_base", "hc_scale"):
            leaves[f"hc_head.{name}"] = tensors[f"model.hc_head.{name}"].T
    if "model.norm.bias" in tensors:
        leaves["norm.bias"] = tensors["model.norm.bias"]
    if "lm_head.weight" in tensors:
        leaves["lm_head.kernel"] = tensors["lm_head.weight"].T
    n = config["num_hidden_layers"]
    if "model.embed_tokens_per_layer.weight" in tensors:
        table = tensors["model.embed_tokens_per_layer.weight"]
        leaves["embed_tokens_per_layer.embedding"] = table.reshape(len(table), n, -1)
        kernel = tensors["model.per_layer_model_projection.weight"].T
        leaves["per_layer_model_projection.kernel"] = kernel.reshape(len(kernel), n, -1)
        norm = tensors["model.per_layer_projection_norm.weight"]
        leaves["per_layer_projection_norm.scale"] = norm
    for name in ("altup_projections", "altup_unembed_projections"):
        parts = [t for t in tensors if t.startswith(f"model.{name}.")]
        if parts:
            leaves[f"{name}.kernel"] = np.stack([tensors[t].T for t in sorted(parts)])
    layers = [plain_layer(family, Layer(tensors, i, config)) for i in range(n)]
    if not scan:
        return leaves | {f"layers.{i}.{k}": v for i, x in enumerate(layers) for k, v in x.items()}
    kinds = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(kind_of(family, config, i, layers), []).append(layer)
    for before, group in kinds.items():
        leaves |= stacked(f"{before}layers.", group, 0)
    return leaves


def stacked(before, layers, axis, first=()):
    leaves = {}
    for name in layers[0] if layers else ():
        arrays = [layer[name] for layer in layers]
        at = axis if arrays[0].ndim >= axis and name not in first else 0
        leaves[before + name] = np.stack(arrays, at)
    return leaves


def maxtext_layer(family, x, rope="default"):
    """One layer of the checkpoint as `to_maxtext.py` of maxtext 0.2.5 turns it over."""
    gemma = family in ("gemma2", "gemma3")

    def norm(name):
        weight = x(f"{name}.weight")
        return weight.astype(F32) + F32(1) if gemma else weight

    if family in ("qwen3_next", "qwen3_5_moe"):
        return maxtext_hybrid(x)
    if family == "gemma4":
        return maxtext_gemma4(x)
    if family == "deepseek_v4":
        return maxtext_deepseek_v4(x)
    leaves = {}
    if gemma:
        leaves["pre_self_attention_norm.scale"] = norm("input_layernorm")
        leaves["post_self_attention_norm.scale"] = norm("post_attention_layernorm")
        leaves["pre_ffw_norm.scale"] = norm("pre_feedforward_layernorm")
        leaves["post_ffw_norm.scale"] = norm("post_feedforward_layernorm")
    elif family == "olmo3":
        leaves["post_self_attention_layer_norm.scale"] = norm("post_attention_layernorm")
        leaves["post_mlp_layer_norm.scale"] = norm("post_feedforward_layernorm")
    else:
        leaves["pre_self_attention_layer_norm.scale"] = norm("input_layernorm")
        leaves["post_self_attention_layer_norm.scale"] = norm("post_attention_layernorm")
    attention = {"gpt_oss": "GptOssAttention", "olmo3": "attention"}.get(family, "self_attention")
    deepseek = family in ("deepseek_v2", "deepseek_v3", "deepseek_v32")
    if deepseek:
        names = {"q": "query", "q_a": "wq_a", "q_b": "wq_b", "kv_a": "wkv_a", "kv_b": "wkv_b"}
        names["o"] = "out"
        kernels = latent_kernels(x).items()
        leaves |= {f"self_attention.{names.get(k, k)}.kernel": array for k, array in kernels}
        leaves["self_attention.kv_norm.scale"] = x("self_attn.kv_a_layernorm.weight")
        if "self_attn.q_a_layernorm.weight" in x:
            leaves["self_attention.q_norm.scale"] = x("self_attn.q_a_layernorm.weight")
        if family == "deepseek_v32":
            key_norm = "self_attn.indexer.k_norm"
            leaves["self_attention.indexer.k_norm.scale"] = x(f"{key_norm}.weight")
            leaves["self_attention.indexer.k_norm.bias"] = x(f"{key_norm}.bias")
    else:
        kernels = attention_kernels(x)
        if rope == "llama3":
            for name in "qk":
                first, second = np.split(kernels[name], 2, -1)
                kernels[name] = np.stack([first, second], -1).reshape(kernels[name].shape)
        if family in ("llama", "mistral", "mixtral", "gemma2"):
            d = x.c.get("query_pre_attn_scalar", x.d)
            kernels["q"] = kernels["q"].astype(F32) * F32(1 / np.sqrt(d))
        names = {"q": "query", "k": "key", "v": "value", "o": "out"}
        leaves |= {f"{attention}.{names[k]}.kernel": array for k, array in kernels.items()}
    for name, heads, to in (("q", x.heads, "query"), ("k", x.kv, "key"), ("v", x.kv, "value")):
        if f"self_attn.{name}_proj.bias" in x:
            leaves[f"{attention}.{to}.bias"] = x(f"self_attn.{name}_proj.bias").reshape(heads, x.d)
        if f"self_attn.{name}_norm.weight" in x:
            leaves[f"{attention}.{to}_norm.scale"] = norm(f"self_attn.{name}_norm")
    mlp = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    if "mlp.gate_proj.weight" in x:
        leaves |= {f"mlp.{k}.kernel": x.linear(f"mlp.{v}") for k, v in mlp.items()}
    if family == "llama4":
        block, part = "Llama4MoEBlock_0.", llama4_mlp(x)
        names = {f"mlp.{v}.kernel": f"mlp.{k}.kernel" for k, v in mlp.items()}
        names |= {f"mlp.experts.{v}.kernel": f"{block}MoeBlock_0.{k}" for k, v in mlp.items()}
        names |= {f"mlp.shared_expert.{v}.kernel": f"{block}shared_experts.{k}.kernel"
                  for k, v in mlp.items()}  # fmt: skip
        names["mlp.router.kernel"] = f"{block}MoeBlock_0.gate.kernel"
        leaves |= {names[name]: array for name, array in part.items()}
    if family == "qwen3_vl_moe":  # as transformers 5 saves it
        leaves["moe_block.gate.kernel"] = x.linear("mlp.gate")
        parts = [*np.split(x("mlp.experts.gate_up_proj"), 2, axis=1), x("mlp.experts.down_proj")]
        for k, part in zip(mlp, parts, strict=True):
            leaves[f"moe_block.{k}"] = part.transpose(0, 2, 1)
    if family in ("qwen3_moe", "qwen3_omni_moe"):
        leaves["moe_block.gate.kernel"] = x.linear("mlp.gate")
        for k, v in mlp.items():
            leaves[f"moe_block.{k}"] = x.experts(
                f"mlp.experts.{{}}.{v}.weight", x("mlp.gate.weight").shape[0]
            )
    if family == "mixtral":
        leaves["MoeBlock_0.gate.kernel"] = x.linear("block_sparse_moe.gate")
        n = x("block_sparse_moe.gate.weight").shape[0]
        for k, v in (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2")):
            leaves[f"MoeBlock_0.{k}"] = x.experts(f"block_sparse_moe.experts.{{}}.{v}.weight", n)
    if deepseek and "mlp.gate.weight" in x:
        block, n = "DeepSeekMoeBlock_0.", x("mlp.gate.weight").shape[0]
        leaves[f"{block}MoeBlock_0.gate.kernel"] = x.linear("mlp.gate")
        if family != "deepseek_v2":
            leaves[f"{block}MoeBlock_0.gate.bias"] = x("mlp.gate.e_score_correction_bias")
        for k, v in mlp.items():
            leaves[f"{block}MoeBlock_0.{k}"] = x.experts(f"mlp.experts.{{}}.{v}.weight", n)
            leaves[f"{block}shared_experts.{k}.kernel"] = x.linear(f"mlp.shared_experts.{v}")
    if family == "gpt_oss":
        leaves["GptOssAttention.out.bias"] = x("self_attn.o_proj.bias")
        leaves["GptOssAttention.sinks"] = x("self_attn.sinks")
        leaves["GptOssMlp.gate.kernel"] = x.linear("mlp.router")
        leaves["GptOssMlp.gate.bias"] = x("mlp.router.bias")
        fused, bias = x("mlp.experts.gate_up_proj"), x("mlp.experts.gate_up_proj_bias")
        leaves["GptOssMlp.wi_0"], leaves["GptOssMlp.wi_1"] = fused[..., ::2], fused[..., 1::2]
        leaves["GptOssMlp.wi_0_bias"], leaves["GptOssMlp.wi_1_bias"] = (
            bias[..., ::2],
            bias[..., 1::2],
        )
        leaves["GptOssMlp.wo"] = x("mlp.experts.down_proj")
        leaves["GptOssMlp.wo_bias"] = x("mlp.experts.down_proj_bias")
    return leaves


def maxtext_hybrid(x):
    """One layer as the hooks `QWEN3_NEXT_` and `QWEN3_5_MAXTEXT_TO_HF_PARAM_HOOK_FN` turn it."""
    names = ("input_layernorm", "post_attention_layernorm")
    leaves = {f"{name}.scale": x(f"{name}.weight") for name in names}
    if "linear_attn.A_log" in x:
        leaves["attention.A_log"] = x("linear_attn.A_log")
        leaves["attention.dt_bias"] = x("linear_attn.dt_bias")
        leaves["attention.norm.rms_norm.scale"] = x("linear_attn.norm.weight")
        leaves["attention.conv1d.kernel"] = x("linear_attn.conv1d.weight").transpose(2, 1, 0)
        leaves["attention.out_proj.kernel"] = x.linear("linear_attn.out_proj")
        if "linear_attn.in_proj_qkvz.weight" in x:
            for name in ("in_proj_qkvz", "in_proj_ba"):
                leaves[f"attention.{name}.kernel"] = x.linear(f"linear_attn.{name}")
        else:  # of each head of keys its queries, keys, values and gates, one after the other
            keys, size = x.c["linear_num_key_heads"], x.c["linear_key_head_dim"]
            qkv = x("linear_attn.in_proj_qkv.weight")
            parts = [
                *np.split(qkv, [keys * size, 2 * keys * size]),
                x("linear_attn.in_proj_z.weight"),
            ]
            rates = [x(f"linear_attn.in_proj_{name}.weight") for name in "ba"]
            for name, rows in (("qkvz", parts), ("ba", rates)):
                heads = [np.concatenate([np.split(r, keys)[k] for r in rows]) for k in range(keys)]
                leaves[f"attention.in_proj_{name}.kernel"] = np.concatenate(heads).T
    else:
        hidden = x.c["hidden_size"]
        for name, to, heads in (("q", "query", x.heads), ("k", "key", x.kv), ("v", "value", x.kv)):
            kernel = x.linear(f"self_attn.{name}_proj").reshape(hidden, heads, -1)
            leaves[f"attention.attention.{to}.kernel"] = kernel
        out = x.linear("self_attn.o_proj")
        leaves["attention.attention.out.kernel"] = out.reshape(x.heads, -1, hidden)
        leaves["attention.attention.query_norm.scale"] = x("self_attn.q_norm.weight")
        leaves["attention.attention.key_norm.scale"] = x("self_attn.k_norm.weight")
    n = x("mlp.gate.weight").shape[0]
    leaves["mlp.routed_experts.gate.kernel"] = x.linear("mlp.gate")
    leaves["mlp.shared_expert_gate.kernel"] = x.linear("mlp.shared_expert_gate")
    for name, to in (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo")):
        leaves[f"mlp.shared_expert.{to}.kernel"] = x.linear(f"mlp.shared_expert.{name}")
        leaves[f"mlp.routed_experts.{to}"] = x.experts(f"mlp.experts.{{}}.{name}.weight", n)
    return leaves


def maxtext_gemma4(x):
    """One layer as `GEMMA4_MAXTEXT_TO_HF_PARAM_HOOK_FN` turns it over."""
    kernels = attention_kernels(x)
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    leaves = {f"self_attention.{names[k]}.kernel": array for k, array in kernels.items()}
    for name, to in (
        ("self_attn.q_norm", "self_attention.query_norm"),
        *([("self_attn.k_norm", "self_attention.key_norm")] if "k" in kernels else []),
        ("input_layernorm", "pre_self_attention_norm"),
        ("post_attention_layernorm", "post_self_attention_norm"),
        ("pre_feedforward_layernorm", "pre_ffw_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ):
        leaves[f"{to}.scale"] = x(f"{name}.weight")
    leaves["layer_scalar"] = x("layer_scalar")
    if "per_layer_input_gate.weight" in x:  # `GEMMA4_SMALL_MAXTEXT_TO_HF_PARAM_MAPPING`
        for name in ("per_layer_input_gate", "per_layer_projection"):
            leaves[f"{name}.kernel"] = x.linear(name)
        norm = "post_per_layer_input_norm"
        leaves[f"{norm}.scale"] = x(f"{norm}.weight")
    sparse = "router.proj.weight" in x
    mlp = "mlp.moe_block.shared_experts" if sparse else "mlp"
    for name, to in (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo")):
        leaves[f"{mlp}.{to}.kernel"] = x.linear(f"mlp.{name}")
    if sparse:
        block = "mlp.moe_block.MoeBlock_0"
        for place in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1"):
            leaves[f"mlp.{place}.scale"] = x(f"{place}.weight")
        place = "post_feedforward_layernorm_2"
        leaves[f"mlp.{place}.scale"] = x(f"{place}.weight")
        leaves["mlp.pre_forward_scale_2"] = x("router.scale")
        leaves[f"{block}.per_expert_scale"] = x("router.per_expert_scale")
        leaves[f"{block}.gate.kernel"] = x.linear("router.proj")
        fused, down = x("experts.gate_up_proj"), x("experts.down_proj")
        for part, to in zip(np.split(fused, 2, 1), ("wi_0", "wi_1"), strict=True):
            leaves[f"{block}.{to}"] = part.transpose(0, 2, 1)
        leaves[f"{block}.wo"] = down.transpose(0, 2, 1)
    return leaves


def maxtext_deepseek_v4(x):
    """One layer as `DEEPSEEK_V4_MAXTEXT_TO_HF_PARAM_HOOK_FN` turns it over."""
    plain = deepseek_v4_layer(x)
    heavy = "self_attn.compressor.indexer.position_bias" not in plain
    moved = {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
        "self_attn.compressor.indexer.scorer.": "self_attention.csa_compressor.indexer.",
        "self_attn.compressor.indexer.q_b_proj": "self_attention.csa_compressor.indexer.q_proj",
        "self_attn.compressor.": f"self_attention.{'hca' if heavy else 'csa'}_compressor.",
        "self_attn.q_a_norm": "self_attention.q_norm",
        "self_attn.q_a_proj": "self_attention.wq_a",
        "self_attn.q_b_proj": "self_attention.wq_b",
        "self_attn.kv_proj": "self_attention.wkv",
        "self_attn.": "self_attention.",
        "mlp.router.e_score_correction_bias": "mlp.MoeBlock_0.gate.bias",
        "mlp.router.tid2eid": "mlp.MoeBlock_0.tid2eid",
        "mlp.router": "mlp.MoeBlock_0.gate",
        "mlp.experts.gate_proj.kernel": "mlp.MoeBlock_0.wi_0",
        "mlp.experts.up_proj.kernel": "mlp.MoeBlock_0.wi_1",
        "mlp.experts.down_proj.kernel": "mlp.MoeBlock_0.wo",
        "mlp.shared_experts.gate_proj": "mlp.shared_experts.wi_0",
        "mlp.shared_experts.up_proj": "mlp.shared_experts.wi_1",
        "mlp.shared_experts.down_proj": "mlp.shared_experts.wo",
    }
    leaves, n = {}, x.c["hc_mult"]
    for name, array in plain.items():
        if "_hc." in name:
            continue
        old = next(old for old in moved if name.startswith(old))
        leaves[name.replace(old, moved[old])] = array
    kernel = leaves["self_attention.wkv.kernel"]
    leaves["self_attention.wkv.kernel"] = kernel[:, None]
    queries = "self_attention.csa_compressor.indexer.q_proj.kernel"
    if queries in leaves:
        leaves[queries] = leaves[queries].reshape(len(leaves[queries]), -1)
    table = "mlp.MoeBlock_0.tid2eid"
    if table in leaves:
        leaves[table] = leaves[table].astype(F32)
    for module, on in (("mhc_attention", "attn"), ("mhc_mlp", "ffn")):
        leaves[f"{module}.mhc_norm.scale"] = np.ones(n * x.c["hidden_size"], F32)
        kernels = np.split(x(f"hc_{on}_fn"), [n, 2 * n])
        biases = np.split(x(f"hc_{on}_base"), [n, 2 * n])
        biases[2] = biases[2].reshape(n, n)
        scales = np.split(x(f"hc_{on}_scale"), 3)
        for part, a, b, c in zip(("pre", "post", "res"), kernels, biases, scales, strict=True):
            leaves[f"{module}.{part}_alpha"], leaves[f"{module}.{part}_beta"] = a.T, b
            leaves[f"{module}.{part}_alpha_scale"] = c
    return leaves


def maxtext(family, config, tensors, scan, axis=1):
    embedding, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    root = np.sqrt(config["hidden_size"])
    if family in ("gemma2", "gemma4"):
        embedding = embedding.astype(F32) * F32(root)
    if family == "gemma3":
        embedding = embedding.astype(F32) * F32(ml_dtypes.bfloat16(root))
    if family in ("gemma2", "gemma3"):
        norm = norm.astype(F32) + F32(1)
    leaves = {"token_embedder.embedding": embedding, "decoder.decoder_norm.scale": norm}
    if "lm_head.weight" in tensors:
        leaves["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    if family == "deepseek_v4":
        leaves["decoder.logits_dense.kernel"] = tensors["head.weight"].T
        for name in ("hc_fn", "hc_base", "hc_scale"):
            leaves[f"decoder.hc_head.{name}"] = tensors[f"model.hc_head.{name}"].T
    if "model.embed_tokens_per_layer.weight" in tensors:
        before = "decoder.per_layer_embedder."
        table, norm = "embed_tokens_per_layer", "per_layer_projection_norm"
        leaves[f"{before}{table}"] = tensors[f"model.{table}.weight"]
        leaves[f"{before}{norm}.scale"] = tensors[f"model.{norm}.weight"]
        kernel = tensors["model.per_layer_model_projection.weight"].T
        leaves[f"{before}per_layer_model_projection.kernel"] = kernel
    n = config["num_hidden_layers"]
    rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
    layers = [maxtext_layer(family, Layer(tensors, i, config), rope) for i in range(n)]
    leaves |= _maxtext_layers(family, config, layers, scan, axis)
    # Of DeepSeek; the model has them beside its parameters.
    variables = {"MoeBlock_0.gate.bias": "MoEBiasVar", "MoeBlock_0.tid2eid": "Tid2EidVar"}
    return {
        next((v for end, v in variables.items() if name.endswith(end)), "params")
        + f".{name}": array
        for name, array in leaves.items()
    }


def _maxtext_layers(family, config, layers, scan, axis):
    def one(before, layer):
        return {before + name: array for name, array in layer.items()}

    leaves = {}
    if family == "gemma2":
        pairs = []
        for local, full in zip(layers[::2], layers[1::2], strict=True):
            pair = {}
            for kind, layer in (("local", local), ("global", full)):
                for name, array in layer.items():
                    module, rest = name.split(".", 1)
                    pair[f"{module}_{kind}.{rest}"] = array
            pairs.append(pair)
        layers = pairs
    if family in ("deepseek_v2", "deepseek_v3", "deepseek_v32"):
        k = config["first_k_dense_replace"]
        bias = "DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"
        if scan:
            leaves |= stacked("decoder.dense_layers.", layers[:k], axis)
            return leaves | stacked("decoder.moe_layers.", layers[k:], axis, first=(bias,))
        for i, layer in enumerate(layers[:k]):
            leaves |= one(f"decoder.dense_layers_{i}.", layer)
        for i, layer in enumerate(layers[k:]):
            leaves |= one(f"decoder.moe_layers_{i}.", layer)
        return leaves
    if not scan:
        for i, layer in enumerate(layers):
            leaves |= one(f"decoder.layers_{i}.", layer)
        return leaves
    if family == "deepseek_v4":
        k = config["mlp_layer_types"].count("hash_moe")
        for i, layer in enumerate(layers[:k]):
            leaves |= one(f"decoder.layers_{i}.", layer)
        for i in range(2):
            before, bias = f"decoder.scanned_blocks.layers_{i}.", ("mlp.MoeBlock_0.gate.bias",)
            leaves |= stacked(before, layers[k + i :: 2], axis, first=bias)
        return leaves
    if family == "gemma3":
        whole = len(layers) // 6 * 6
        for i in range(6):
            leaves |= stacked(f"decoder.layers.layers_{i}.", layers[i:whole:6], axis)
        for i, layer in enumerate(layers[whole:]):
            leaves |= one(f"decoder.layers_remainder.layers_{i}.", layer)
        return leaves
    if family == "qwen3_5_moe":
        length = config["layer_types"].index("full_attention") + 1
        for i in range(length):
            leaves |= stacked(f"decoder.layers.layer_{i}.", layers[i::length], axis)
        return leaves
    if family in ("qwen3_next", "gemma4"):
        length = config["layer_types"].index("full_attention") + 1
        block = "layers" if family == "qwen3_next" else "scanned_blocks"
        whole = len(layers) // length * length
        blocks = [layers[i : i + length] for i in range(0, whole, length)]
        for name in blocks[0][0] if blocks else ():  # [.., blocks, layers of each, ..]
            at = min(axis, blocks[0][0][name].ndim)
            local = np.stack([np.stack([p[name] for p in b[:-1]], at) for b in blocks], at)
            leaves[f"decoder.{block}.local_layers.{name}"] = local
        for i, layer in enumerate(layers[whole:]):
            leaves |= one(f"decoder.layers_remainder.layers_{i}.", layer)
        full = [b[-1] for b in blocks]
        return leaves | stacked(f"decoder.{block}.global_layer.", full, axis)
    cycle = {"gpt_oss": 2, "olmo3": 4, "llama4": 4}.get(family)
    if cycle:
        for i in range(cycle):
            leaves |= stacked(f"decoder.layers.layers_{i}.", layers[i::cycle], axis)
        return leaves
    return stacked("decoder.layers.", layers, axis)


def tunix_gemma4(x):
    """One layer, as `gemma4/params_safetensors.py` turns it over."""
    kernels = attention_kernels(x)
    leaves = {"attn.attn_vec_einsum.w": kernels.pop("o")}
    ndh = {name: array.transpose(1, 0, 2) for name, array in kernels.items()}
    leaves["attn.q_einsum.w"] = ndh["q"]
    if "v" in ndh:
        leaves["attn.kv_einsum.w"] = np.stack([ndh["k"], ndh["v"]])
    else:
        leaves["attn.k_einsum.w"] = ndh["k"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        leaves[f"mlp.{name}.kernel"] = x.linear(f"mlp.{name}")
    norms = {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_feedforward_layernorm_1": "dense_post_ffw_norm",
        "post_feedforward_layernorm_2": "moe_post_ffw_norm",
        "pre_feedforward_layernorm_2": "moe_pre_ffw_norm",
        "self_attn.q_norm": "attn._query_norm",
        "self_attn.k_norm": "attn._key_norm",
        "post_per_layer_input_norm": "post_per_layer_input_norm",
    }
    leaves |= {f"{b}.scale": x(f"{a}.weight") for a, b in norms.items() if f"{a}.weight" in x}
    for name in ("per_layer_input_gate", "per_layer_projection"):
        if f"{name}.weight" in x:
            leaves[f"{name}.w"] = x.linear(name)
    leaves["skip_scale"] = x("layer_scalar")
    if "router.scale" in x:
        fused = x("experts.gate_up_proj")
        leaves["moe.router_logits"] = x.linear("router.proj")
        leaves["moe.router_scale"] = x("router.scale")
        leaves["moe.per_expert_scale"] = x("router.per_expert_scale")
        leaves["moe.gating_einsum"] = fused.reshape(len(fused), 2, -1, fused.shape[2])
        leaves["moe.linear"] = x("experts.down_proj").transpose(0, 2, 1)
    return leaves


def tunix_layer(family, x):
    """One layer of the checkpoint as the loaders of google-tunix 0.1.7 turn it over."""
    if family == "gemma4":
        return tunix_gemma4(x)
    gemma, kernels = family in ("gemma", "gemma2", "gemma3"), attention_kernels(x)
    mlp = {f"mlp.{n}.kernel": x.linear(f"mlp.{n}") for n in ("gate_proj", "up_proj", "down_proj")
           if f"mlp.{n}.weight" in x}  # fmt: skip
    if not gemma:
        leaves = {f"attn.{name}_proj.w": array for name, array in kernels.items()} | mlp
        for name in "qkv":
            if f"self_attn.{name}_proj.bias" in x:
                leaves[f"attn.{name}_bias"] = x(f"self_attn.{name}_proj.bias")
            if f"self_attn.{name}_norm.weight" in x:
                leaves[f"attn.{name}_norm.w"] = x(f"self_attn.{name}_norm.weight")
        for name in ("input_layernorm", "post_attention_layernorm"):
            leaves[f"{name}.w"] = x(f"{name}.weight")
        if "mlp.gate.weight" in x:
            leaves["mlp.router.kernel"] = x.linear("mlp.gate")
            n = x("mlp.gate.weight").shape[0]
            for name in ("gate_proj", "up_proj", "down_proj"):
                leaves[f"mlp.{name}"] = x.experts(f"mlp.experts.{{}}.{name}.weight", n)
        return leaves
    q, k, v = (kernels[name].transpose(1, 0, 2) for name in "qkv")
    leaves = {"attn.attn_vec_einsum.w": kernels["o"], **mlp}
    if x.heads == x.kv:
        leaves["attn.qkv_einsum.w"] = np.stack([q, k, v])
    else:
        leaves |= {"attn.q_einsum.w": q, "attn.kv_einsum.w": np.stack([k, v])}
    leaves["pre_attention_norm.scale"] = x("input_layernorm.weight")
    if family == "gemma":  # `params.py` has no other norms
        return leaves | {"pre_ffw_norm.scale": x("post_attention_layernorm.weight")}
    post = "post_attn_norm" if family == "gemma2" else "post_attention_norm"
    leaves[f"{post}.scale"] = x("post_attention_layernorm.weight")
    leaves["pre_ffw_norm.scale"] = x("pre_feedforward_layernorm.weight")
    leaves["post_ffw_norm.scale"] = x("post_feedforward_layernorm.weight")
    if family == "gemma3":
        leaves["attn._query_norm.scale"] = x("self_attn.q_norm.weight")
        leaves["attn._key_norm.scale"] = x("self_attn.k_norm.weight")
    return leaves


def tunix(family, config, tensors, scan):
    assert not scan
    norm = "final_norm.scale" if family.startswith("gemma") else "final_norm.w"
    leaves = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        norm: tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        leaves["lm_head.w"] = tensors["lm_head.weight"].T
    if "model.embed_tokens_per_layer.weight" in tensors:
        n, before = config["num_hidden_layers"], "embedder.per_layer_"
        table = tensors["model.embed_tokens_per_layer.weight"]
        leaves[f"{before}input_embedding"] = table.reshape(len(table), n, -1)
        kernel = tensors["model.per_layer_model_projection.weight"].T
        leaves[f"{before}model_projection.w"] = kernel.reshape(len(kernel), n, -1)
        norm = tensors["model.per_layer_projection_norm.weight"]
        leaves[f"{before}projection_norm.scale"] = norm
    for i in range(config["num_hidden_layers"]):
        layer = tunix_layer(family, Layer(tensors, i, config))
        leaves |= {f"layers.{i}.{name}": array for name, array in layer.items()}
    return leaves


REFERENCES = {"plain": plain, "maxtext": maxtext, "tunix": tunix}
