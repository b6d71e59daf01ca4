"""Bytes that one process of eight reads of models of real sizes, through the ready mappings.

`python tests/support/family_bytes.py` prints the table of `docs/families.md`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, NewTensor, lay_out
from orbax_safetensors_layout.plan import ReadPlan

BF16 = np.dtype(ml_dtypes.bfloat16)
PROCESSES = 8
PROCESS = 3
MODEL = osl.ReadOptions(
    replicated="each", memory_budget_bytes=8 << 30
)  # gate and up of GPT-OSS fit it together
NO_GAPS = dataclasses.replace(MODEL, latency_seconds={"local": 0.0})

# `config.json` of the models named, with four layers; of DeepSeek-V3 three dense and one sparse.
COMMON = {"num_hidden_layers": 4, "tie_word_embeddings": False}
CONFIGS = {
    "Llama 3 8B": ("llama", 4096, 32, 8, 128, 14336, 128256, {}),
    "Mistral 7B": ("mistral", 4096, 32, 8, 128, 14336, 32768, {}),
    "Qwen 2.5 7B": ("qwen2", 3584, 28, 4, 128, 18944, 152064, {}),
    "Qwen 3 8B": ("qwen3", 4096, 32, 8, 128, 12288, 151936, {}),
    "Qwen 3 30B-A3B": (
        "qwen3_moe",
        *(2048, 32, 4, 128, 768, 151936),
        {"num_experts": 128, "norm_topk_prob": True},
    ),
    "Gemma 2 9B": ("gemma2", 3584, 16, 8, 256, 14336, 256000, {"tie_word_embeddings": True}),
    "Gemma 3 12B": ("gemma3_text", 3840, 16, 8, 256, 15360, 262208, {"tie_word_embeddings": True}),
    "Mixtral 8x7B": ("mixtral", 4096, 32, 8, 128, 14336, 32000, {"num_local_experts": 8}),
    "DeepSeek-V3": (
        "deepseek_v3",
        *(7168, 128, 128, 0, 18432, 129280),
        {
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "GPT-OSS 20B": ("gpt_oss", 2880, 64, 8, 64, 2880, 201088, {"num_local_experts": 32}),
}

# Which axes are divided: e(mbed), and h(eads), f (MLP), v(ocabulary).
SPLITS = {
    "replicated": ((8,), {}),
    "fsdp": ((8,), {"e": "x"}),
    "tensor": ((8,), {"h": "x", "f": "x", "v": "x"}),
    "2-D": ((4, 2), {"e": "x", "h": "y", "f": "y", "v": "y"}),
}


def config_of(name):
    family, hidden, heads, kv, head_dim, inter, vocab, more = CONFIGS[name]
    return COMMON | {
        "model_type": family,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim or None,
        "intermediate_size": inter,
        "vocab_size": vocab,
    } | more  # fmt: skip


def tensors_of(config):
    """Names and shapes of a checkpoint, in the order of its layers."""
    e, v = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (v, e)}
    for i in range(config["num_hidden_layers"]):
        layer = _attention(config) | _mlp(config, i)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (e,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    return shapes


def _attention(c):
    family, e, h = c["model_type"], c["hidden_size"], c["num_attention_heads"]
    names = ["input_layernorm", "post_attention_layernorm"]
    if family.startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes = {f"{name}.weight": (e,) for name in names}
    if family == "deepseek_v3":
        q, kv, v = c["q_lora_rank"], c["kv_lora_rank"], c["v_head_dim"]
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        own = {
            "q_a_proj": (q, e),
            "q_a_layernorm": (q,),
            "q_b_proj": (h * (nope + rope), q),
            "kv_a_proj_with_mqa": (kv + rope, e),
            "kv_a_layernorm": (kv,),
            "kv_b_proj": (h * (nope + v), kv),
            "o_proj": (e, h * v),
        }
        return shapes | {f"self_attn.{name}.weight": shape for name, shape in own.items()}
    d, k = c.get("head_dim") or e // h, c["num_key_value_heads"]
    rows = {"q": h * d, "k": k * d, "v": k * d}
    for x, n in rows.items():
        shapes[f"self_attn.{x}_proj.weight"] = (n, e)
        if family in ("qwen2", "gpt_oss") or c.get("attention_bias"):
            shapes[f"self_attn.{x}_proj.bias"] = (n,)
    shapes["self_attn.o_proj.weight"] = (e, h * d)
    if family == "gpt_oss":
        shapes |= {"self_attn.o_proj.bias": (e,), "self_attn.sinks": (h,)}
    elif c.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (e,)
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {f"self_attn.{x}_norm.weight": (d,) for x in "qk"}
    return shapes


def _gated(before, e, f, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (f"{before}.{name}.weight" for name in names)
    return {gate: (f, e), up: (f, e), down: (e, f)}


def _mlp(c, layer):
    family, e = c["model_type"], c["hidden_size"]
    f = c["intermediate_size"]
    if family == "mixtral":
        n = c["num_local_experts"]
        shapes = {"block_sparse_moe.gate.weight": (n, e)}
        for expert in range(n):
            shapes |= _gated(f"block_sparse_moe.experts.{expert}", e, f, ("w1", "w3", "w2"))
        return shapes
    if family == "gpt_oss":
        n = c["num_local_experts"]
        return {
            "mlp.router.weight": (n, e),
            "mlp.router.bias": (n,),
            "mlp.experts.gate_up_proj": (n, e, 2 * f),
            "mlp.experts.gate_up_proj_bias": (n, 2 * f),
            "mlp.experts.down_proj": (n, f, e),
            "mlp.experts.down_proj_bias": (n, e),
        }
    n = c.get("num_experts") or c.get("n_routed_experts")
    if not n or layer < c.get("first_k_dense_replace", 0):
        return _gated("mlp", e, f)
    f = c.get("moe_intermediate_size", f)
    shapes = {"mlp.gate.weight": (n, e)}
    for expert in range(n):
        shapes |= _gated(f"mlp.experts.{expert}", e, f)
    if family == "deepseek_v3":
        shapes |= {"mlp.gate.e_score_correction_bias": (n,), **_gated("mlp.shared_experts", e, f)}
    return shapes


def write_headers(folder, shapes):
    """A checkpoint without data: a sparse file with a header."""
    tensors = [NewTensor(name, DTYPES["BF16"], shape) for name, shape in shapes.items()]
    layout = lay_out("model.safetensors", tensors, {})
    with open(Path(folder) / "model.safetensors", "wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


def abstract_family(specs, config, split):
    """The leaves; the first axis of each role is divided where that is even."""
    lengths, places = SPLITS[split]
    mesh = AbstractMesh(lengths, ("x", "y")[: len(lengths)])
    kinds = {
        "e": (config["hidden_size"],),
        "h": (config["num_attention_heads"], config["num_key_value_heads"]),
        "f": (config["intermediate_size"], config.get("moe_intermediate_size")),
        "v": (config["vocab_size"],),
    }

    def spec(shape):
        axes: list[str | None] = [None] * len(shape)
        for kind, mesh_axis in places.items():
            for number, extent in enumerate(shape):
                fits = extent in kinds[kind] and extent % mesh.shape[mesh_axis] == 0
                if fits and axes[number] is None and mesh_axis not in axes:
                    axes[number] = mesh_axis
        return P(*axes)

    return {
        name: jax.ShapeDtypeStruct(
            leaf_spec.shape, leaf_spec.dtype, sharding=NamedSharding(mesh, spec(leaf_spec.shape))
        )
        for name, leaf_spec in specs.items()
    }


def plans_of(name, target) -> dict[str, tuple[ReadPlan, ReadPlan]]:
    """For each sharding what one process reads: by the cost model, and if no gap may be read."""
    config = config_of(name)
    mapping = osl.families.mapping(config, target=target)
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        write_headers(folder, tensors_of(config))
        specs = mapping.leaf_facts(folder)
        for split in SPLITS:
            tree = abstract_family(specs, config, split)
            both = (
                osl.plan_load(
                    folder,
                    tree,
                    mapping=mapping,
                    options=options,
                    process_index=PROCESS,
                    process_count=PROCESSES,
                )
                for options in (MODEL, NO_GAPS)
            )
            counts[split] = tuple(both)
    return counts


def ratio(plan):
    cost = plan.cost()
    return cost.read_bytes / cost.needed_bytes


# Models whose weights MaxText takes as they are; of others it scales queries, or more.
IN_MAXTEXT = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")

CASES = [
    (name, target)
    for name, (family, *_) in CONFIGS.items()
    for target in ("plain", "tunix", "maxtext")
    if family.removesuffix("_text") in osl.families.TARGETS[target]
    and (target != "maxtext" or family in IN_MAXTEXT)
]


def row(name, target, plans):
    """The line of the table."""
    figures = [f"{ratio(plan):.2f}" for plan, _ in plans.values()]
    needed = plans["fsdp"][0].cost().needed_bytes / 1e9
    return f"| {name} | `{target}` | {needed:.2f} | {' | '.join(figures)} |"


def table():
    """The lines of the table, one by one."""
    yield f"| model | target | GB | {' | '.join(SPLITS)} |"
    yield "|---" * (3 + len(SPLITS)) + "|"
    for name, target in CASES:
        yield row(name, target, plans_of(name, target))


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
