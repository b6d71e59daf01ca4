"""MaxText's parameters, as maxtext 0.2.5 names and lays them out.

Sources are its `checkpoint_conversion/utils/param_mapping.py`, `models/` and `layers/`. Values that
MaxText computes in another dtype are computed in float32 here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

from .dims import Compressed, Dims, LayerKind, LinearAttention
from .steps import (
    EMBEDDING,
    LINEAR,
    ROUTER,
    VECTOR,
    FamilyLeaf,
    JoinedKernel,
    LayerGroup,
    TensorStep,
    Tree,
    renamed,
)
from .tensors import fused_experts, heads, hyper_head, layer_tensors, stacked_experts

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "mixtral"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gpt_oss", "olmo3"),
    "qwen3_next",
    *("qwen3_5_moe", "gemma4", "llama4", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"),
)
_NAMES = (
    (r"experts\.\{e\}\.(\w+)\.weight", r"\1"),
    (r"norm\.weight", "norm.scale"),
    (r"\bweight\b", "kernel"),
    ("input_layernorm", "pre_self_attention_layer_norm"),
    ("post_attention_layernorm", "post_self_attention_layer_norm"),
    (r"self_attn\.q_norm", "self_attention.query_norm"),
    (r"self_attn\.k_norm", "self_attention.key_norm"),
    ("self_attn", "self_attention"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("o_proj", "out"),
    (r"gate_proj|\bw1\b", "wi_0"),
    (r"up_proj|\bw3\b", "wi_1"),
    (r"down_proj|\bw2\b", "wo"),
)
_GEMMA_NAMES = (
    ("input_layernorm", "pre_self_attention_norm"),
    ("post_attention_layernorm", "post_self_attention_norm"),
    (r"pre_feedforward_layernorm(?!_\d)", "pre_ffw_norm"),
    (r"post_feedforward_layernorm(?!_\d)", "post_ffw_norm"),
)
_MOE_NAMES = (("block_sparse_moe", "MoeBlock_0"), (r"^mlp\.(gate|experts)\b", r"moe_block.\1"))
_GPT_OSS_NAMES = (("self_attn", "GptOssAttention"), (r"mlp\.router", "GptOssMlp.gate"))
_OLMO3_NAMES = (
    (r"self_attn\.q_norm", "attention.query_norm"),
    (r"self_attn\.k_norm", "attention.key_norm"),
    ("self_attn", "attention"),
    ("post_feedforward_layernorm", "post_mlp_layer_norm"),
)
_LLAMA4_NAMES = (
    (r"^feed_forward\.router", "Llama4MoEBlock_0.MoeBlock_0.gate"),
    (r"^feed_forward\.shared_expert", "Llama4MoEBlock_0.shared_experts"),
    ("^feed_forward", "mlp"),
    (r"^mlp\.experts", "Llama4MoEBlock_0.MoeBlock_0.experts"),
)
_DEEPSEEK_NAMES = (
    (r"self_attn\.q_a_layernorm", "self_attention.q_norm"),
    (r"self_attn\.kv_a_layernorm", "self_attention.kv_norm"),
    ("kv_a_proj_with_mqa", "wkv_a"),
    ("kv_b_proj", "wkv_b"),
    ("q_a_proj", "wq_a"),
    ("q_b_proj", "wq_b"),
    (r"^mlp\.(gate|experts)\b", r"DeepSeekMoeBlock_0.MoeBlock_0.\1"),
    (r"mlp\.shared_experts", "DeepSeekMoeBlock_0.shared_experts"),
    ("e_score_correction_bias", "bias"),
)
_DEEPSEEK_V4_NAMES = (
    *_NAMES,
    ("^attn_norm", "pre_self_attention_layer_norm"),
    ("^ffn_norm", "post_self_attention_layer_norm"),
    (r"^attn\.", "self_attention."),
    (r"^ffn\.shared_experts", "mlp.shared_experts"),
    (r"^ffn\.", "mlp.MoeBlock_0."),
    (r"gate\.tid2eid", "tid2eid"),
    ("attn_sink", "sinks"),
    (r"indexer\.compressor", "compressor.indexer"),
    (r"attention\.indexer\.wq_b", "attention.compressor.indexer.q_proj"),
    (r"attention\.indexer", "attention.compressor.indexer"),
    (r"\bnorm\.scale", "kv_norm.scale"),
    (r"\bape\b", "position_bias"),
    (r"\bw(o_a|o_b|gate)\b", r"\1_proj"),
    (r"compressor(.*)\.wkv\b", r"compressor\1.kv_proj"),
)
_GEMMA4_EXPERT_NAMES = (
    (r"^mlp\.", "mlp.moe_block.shared_experts."),
    (r"^experts\.\{e\}\.(\w+)\.weight", r"mlp.moe_block.MoeBlock_0.\1"),
    (r"^router\.scale", "mlp.pre_forward_scale_2"),
    (r"^router\.proj", "mlp.moe_block.MoeBlock_0.gate"),
    (r"^router\.per_expert_scale", "mlp.moe_block.MoeBlock_0.per_expert_scale"),
    (r"^(p\w+_feedforward_layernorm_\d)\.weight", r"mlp.\1.scale"),
)
_HYBRID_NAMES = (
    (r"linear_attn\.norm\.weight", "attention.norm.rms_norm.scale"),
    ("linear_attn", "attention"),
    (r"self_attn\.q_norm", "attention.attention.query_norm"),
    (r"self_attn\.k_norm", "attention.attention.key_norm"),
    ("self_attn", "attention.attention"),
    (r"^mlp\.(gate|experts)\b", r"mlp.routed_experts.\1"),
    *(pair for pair in _NAMES if "layernorm" not in pair[0]),
)

# `scale_query_layer` (Llama 3.1, Mixtral, Gemma 2) and `llama_or_mistral_ckpt.py` divide queries:
# `init_query_w` of `layers/attentions.py` folds it into the kernel where a model has neither norms
# of queries nor a `query_pre_attn_scalar`. For Gemma 2 the hook takes the head's size, which is
# wrong for 27B alone; `convert_gemma2_chkpt.py` takes 144 there, as the model's configuration says.
_QUERY_SCALED = ("llama", "mistral", "mixtral", "gemma2")

# `ROPE_INIT_FUNCTIONS` of transformers 5.23.0; which of them it is decides how heads are turned.
_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_GEMMA4_CYCLE = 6  # `attention_pattern_length` of `GEMMA4_MAXTEXT_TO_HF_PARAM_MAPPING`
_GEMMA4_SMALL_CYCLES = (5, 6)  # of E2B and E4B: `get_attention_pattern` (`gemma4_small.py`)
_GEMMA3_CYCLE = 6  # layers that are scanned together: `GEMMA3_ATTENTION_PATTERN` (`gemma3.py`)
_DEEPSEEK4_RATES = (4, 128)  # of `DeepSeek4ScannableBlock` (`deepseek4.py`), the latter first
_OLMO3_CYCLE = 4  # `OLMO3_ATTENTION_PATTERN` (`olmo3.py`)
_LLAMA4_CYCLE = 4  # the same key of `configs/models/llama4-*.yml`
_GPT_OSS_CYCLE = 2  # `inhomogeneous_layer_cycle_interval` of `configs/models/gpt-oss-*.yml`


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model; refuses one that MaxText does not have."""
    norm, embedding = VECTOR, EMBEDDING
    groups = {
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "deepseek_v32": _deepseek,
        "gpt_oss": _gpt_oss,
        "llama4": _llama4,
        "olmo3": _olmo3,
        "qwen3_next": _hybrid,
        "qwen3_5_moe": _hybrid,
        "gemma4": _gemma4,
    }
    if dims.family in ("gemma2", "gemma3", "gemma4"):
        # Rows are multiplied by sqrt(hidden) when they are converted, not when they are used: in
        # float32 for Gemma 2 and 4 (`pad_hf_embedding_layer`), rounded to bfloat16 for Gemma 3
        # (`pad_and_scale_embedding`).
        root = math.sqrt(dims.hidden)
        factor = float(ml_dtypes.bfloat16(root) if dims.family == "gemma3" else np.float32(root))
        embedding = dataclasses.replace(EMBEDDING, factor=factor)
        norm = VECTOR if dims.family == "gemma4" else _gemma_norm(VECTOR)
    if dims.compressed is not None:
        return _deepseek4(dims, dims.compressed)
    small = dims.family == "gemma4" and is_small(dims)
    return Tree(
        "token_embedder.embedding",
        "decoder.logits_dense.kernel",
        "decoder.decoder_norm.scale",
        _gemma4_small(dims) if small else groups.get(dims.family, _uniform)(dims),
        embedding,
        norm,
        others=_layer_inputs(dims) if small else (),
        scans=not small,
    )


def _steps(dims: Dims, *, sparse: bool) -> dict[str, TensorStep]:
    """Return the steps of those tensors of a layer that MaxText has, with the values it has."""
    steps = layer_tensors(dims, LayerKind(sparse))
    if dims.family not in ("qwen2", "gpt_oss"):
        biases = [name for name in steps if name.endswith(".bias") and "indexer" not in name]
        steps = {name: step for name, step in steps.items() if name not in biases}
    query, key = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
    if dims.family == "llama":
        # `adjust_rope` (Llama 3.1): `LLaMARotaryEmbedding` of `layers/embeddings.py` rotates pairs
        # of neighbours; `RotaryEmbedding`, which serves where `rope_type` is not "llama3.1",
        # halves.
        if dims.rope not in _ROPES:
            what = "MaxText's Llama has no rotary embedding of the configuration's rope_type"
            expected = f"one of {', '.join(_ROPES)}"
            raise MappingError(what, expected=expected, found=short_repr(dims.rope))
        if dims.rope == "llama3":
            steps[query] = _interleaved_heads(dims.heads, dims.head_dim)
            steps[key] = _interleaved_heads(dims.kv_heads, dims.head_dim)
    if dims.family in _QUERY_SCALED:
        factor = float(np.float32(1 / math.sqrt(dims.query_scalar)))
        steps[query] = dataclasses.replace(steps[query], factor=factor)
    if dims.family in ("gemma2", "gemma3"):
        norms = [tensor for tensor in steps if tensor.endswith("norm.weight")]
        steps |= {tensor: _gemma_norm(steps[tensor]) for tensor in norms}
    return steps


def _gemma_norm(step: TensorStep) -> TensorStep:
    """Hugging Face multiplies by 1 + weight, MaxText's `scale_rmsnorm` by scale."""
    return dataclasses.replace(step, term=1.0)


def _interleaved_heads(h: int, d: int) -> TensorStep:
    """A projection to heads with rotated pairs side by side, not in halves (HF's `rotate_half`)."""
    sizes = (("h", h), ("t", 2), ("f", d // 2))
    return TensorStep("(h t f) e -> e h (f t)", sizes, projection=True)


def _uniform(dims: Dims) -> tuple[LayerGroup, ...]:
    """Llama, Mistral, Qwen and Mixtral: all layers have the same leaves."""
    dims.check_uniform("MaxText")
    names = (*_MOE_NAMES, *_NAMES)
    leaves = renamed(_steps(dims, sparse=bool(dims.sparse)), names)
    if dims.sparse:
        leaves += _renamed_leaves(stacked_experts(dims), names)
    return (
        LayerGroup("decoder.layers.", "decoder.layers_{n}.", tuple(range(dims.layers)), leaves),
    )


def _gemma2(dims: Dims) -> tuple[LayerGroup, ...]:
    """A layer of MaxText is two of the checkpoint, one local and one global."""
    dims.check_cycle("MaxText", 2)
    groups = []
    for start, kind in enumerate(("local", "global")):
        modules = (
            (r"norm\.weight", f"norm_{kind}.scale"),
            ("self_attn", f"self_attention_{kind}"),
            ("mlp", f"mlp_{kind}"),
        )
        leaves = renamed(_steps(dims, sparse=False), (*modules, *_GEMMA_NAMES, *_NAMES))
        layers = tuple(range(start, dims.layers, 2))
        groups.append(LayerGroup("decoder.layers.", "decoder.layers_{n}.", layers, leaves, first=0))
    return tuple(groups)


def _gemma3(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by sixes; those that remain are not stacked."""
    dims.check_cycle("MaxText", _GEMMA3_CYCLE, rest=True)
    leaves = renamed(_steps(dims, sparse=False), (*_GEMMA_NAMES, *_NAMES))
    scanned = dims.layers - dims.layers % _GEMMA3_CYCLE
    rest = tuple(range(scanned, dims.layers))
    remainder = LayerGroup(
        "decoder.layers_remainder.layers_{n}.", "decoder.layers_{n}.", rest, leaves, scans=False
    )
    return (*_cycle([leaves] * _GEMMA3_CYCLE, scanned), remainder)


def _gemma4(dims: Dims) -> tuple[LayerGroup, ...]:
    """Blocks of five local layers and a global one; those that remain are not stacked."""
    dims.check_cycle("MaxText", _GEMMA4_CYCLE, rest=True)
    sparse = bool(dims.sparse)
    names = (*(_GEMMA4_EXPERT_NAMES if sparse else ()), *_GEMMA_NAMES, *_NAMES)
    local, full = (
        renamed(layer_tensors(dims, LayerKind(sparse, attention=kind)), names)
        + (_renamed_leaves(stacked_experts(dims), names) if sparse else ())
        for kind in ("sliding", "full")
    )
    return _blocks("decoder.scanned_blocks.", _GEMMA4_CYCLE, dims.layers, local, full)


def is_small(dims: Dims) -> bool:
    """Whether MaxText's model of a Gemma 4 is that of E2B and E4B, `gemma4_small`."""
    return dims.layer_input > 0 or any(kind.reuses for kind in dims.kinds)


def _gemma4_small(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers with inputs of their own, the last of which take the keys and values of others."""
    for key, is_set in (
        ("attention_k_eq_v", dims.keys_are_values),
        ("enable_moe_block", dims.experts > 0),
    ):
        if is_set:
            what = "MaxText's gemma4 has no such layers beside inputs of single layers (E2B, E4B)"
            raise MappingError(what, expected=f"{key} false", found="true")
    shorter, longer = _GEMMA4_SMALL_CYCLES
    is_shorter = dims.layer_types[shorter - 1 : shorter] == ("full_attention",)
    dims.check_cycle("MaxText", shorter if is_shorter else longer, rest=True)
    groups = []
    for kind in dict.fromkeys(dims.kinds):
        leaves = renamed(layer_tensors(dims, kind), (*_GEMMA_NAMES, *_NAMES))
        layers = tuple(i for i, other in enumerate(dims.kinds) if other == kind)
        groups.append(LayerGroup("", "decoder.layers_{n}.", layers, leaves))
    return tuple(groups)


def _layer_inputs(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """`Gemma4SmallPLE`, whose embedding and projection do not part layers."""
    if not dims.layer_input:
        return ()
    before = "decoder.per_layer_embedder."
    table, kernel = "embed_tokens_per_layer", "per_layer_model_projection"
    norm = "per_layer_projection_norm"
    return (
        FamilyLeaf(f"{before}{table}", f"{table}.weight", EMBEDDING),
        FamilyLeaf(f"{before}{kernel}.kernel", f"{kernel}.weight", ROUTER),
        FamilyLeaf(f"{before}{norm}.scale", f"{norm}.weight", VECTOR),
    )


def _renamed_leaves(
    leaves: tuple[FamilyLeaf, ...], names: tuple[tuple[str, str], ...]
) -> tuple[FamilyLeaf, ...]:
    """Return plain leaves of stacked experts with the names of those of single ones."""
    targets = [
        leaf.target.replace("experts.", "experts.{e}.").replace(".kernel", ".weight")
        for leaf in leaves
    ]
    renaming = {leaf.source: leaf.target for leaf in renamed(dict.fromkeys(targets, VECTOR), names)}
    return tuple(
        dataclasses.replace(leaf, target=renaming[target])
        for leaf, target in zip(leaves, targets, strict=True)
    )


def _olmo3(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by fours, three local and one global."""
    dims.check_cycle("MaxText", _OLMO3_CYCLE)
    steps = _steps(dims, sparse=False)
    for x, n in (("q", dims.heads), ("k", dims.kv_heads)):  # `GlobalRMSNorm` of `normalizations.py`
        steps[f"self_attn.{x}_norm.weight"] = TensorStep("d -> d", (("d", n * dims.head_dim),))
    leaves = renamed(steps, (*_OLMO3_NAMES, *_NAMES))
    return _cycle([leaves] * _OLMO3_CYCLE, dims.layers)


def _gpt_oss(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by twos, one local and one global."""
    dims.check_cycle("MaxText", _GPT_OSS_CYCLE)
    leaves = renamed(_steps(dims, sparse=True), (*_GPT_OSS_NAMES, *_NAMES))
    leaves += fused_experts(("wi_0", "wi_1", "wo"), "GptOssMlp.{}", "GptOssMlp.{}_bias")
    return _cycle([leaves] * _GPT_OSS_CYCLE, dims.layers)


def _llama4(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by fours, the last of which has no rotary embedding.

    `MoeBlock_0` and MLP are those of `determine_is_moe_layer` (`llama4.py`). Heads are as they are
    stored: both sides turn neighbours, and MaxText scales queries when it uses them.
    """
    dims.check_cycle("MaxText", _LLAMA4_CYCLE, local="chunked")
    steps = [n for n in (1, 2, 4) if dims.sparse == tuple(range(n - 1, dims.layers, n))]
    if not steps:
        what = "the layers with experts are not those of MaxText's llama4"
        expected = "every layer, every second or every fourth (interleave_moe_layer_step)"
        raise MappingError(what, expected=expected, found=f"layers {short_repr([*dims.sparse])}")
    names = (*_LLAMA4_NAMES, *_NAMES)
    dense = renamed(_steps(dims, sparse=False), names)
    sparse = renamed(_steps(dims, sparse=True), names)
    sparse += _renamed_leaves(stacked_experts(dims), names)
    block = [sparse if i in dims.sparse else dense for i in range(_LLAMA4_CYCLE)]
    return _cycle(block, dims.layers)


def _hybrid(dims: Dims) -> tuple[LayerGroup, ...]:
    """Qwen3-Next and Qwen 3.5: blocks of linear layers and a full one.

    Linear layers of Qwen3-Next are scanned within their block; of Qwen 3.5 each has a name.
    """
    if dims.dense:
        what = f"some layers have no experts, as all of MaxText's {dims.family} have"
        raise MappingError(what, found=f"layers {short_repr([*dims.dense])}")
    length = [*dims.layer_types, "full_attention"].index("full_attention") + 1
    dims.check_cycle("MaxText", length, local="linear")
    leaves = {kind: _hybrid_layer(dims, kind) for kind in ("linear", "full")}
    if dims.family == "qwen3_5_moe":
        block = [leaves["linear"]] * (length - 1) + [leaves["full"]]
        return _cycle(block, dims.layers, "decoder.layers.layer_{}.")
    return _blocks("decoder.layers.", length, dims.layers, leaves["linear"], leaves["full"])


def _blocks(
    before: str,
    length: int,
    layers: int,
    local: tuple[FamilyLeaf, ...],
    last: tuple[FamilyLeaf, ...],
) -> tuple[LayerGroup, ...]:
    """Blocks of layers: local ones, which are scanned within their block, and a last one."""
    unscanned, scanned = "decoder.layers_{n}.", layers - layers % length
    ends = tuple(range(length - 1, scanned, length))
    inner = tuple(i for i in range(scanned) if i not in ends)
    return (
        LayerGroup(f"{before}local_layers.", unscanned, inner, local, inner=length - 1),
        LayerGroup(f"{before}global_layer.", unscanned, ends, last),
        LayerGroup(
            "decoder.layers_remainder.layers_{n}.",
            unscanned,
            tuple(range(scanned, layers)),
            local,
            scans=False,
        ),
    )


def _hybrid_layer(dims: Dims, kind: str) -> tuple[FamilyLeaf, ...]:
    steps = layer_tensors(dims, LayerKind(sparse=True, attention=kind))
    leaves: tuple[FamilyLeaf, ...] = ()
    if kind == "linear":  # `Qwen3NextGatedDeltaNet` of `models/qwen3.py` keeps heads together
        steps["linear_attn.out_proj.weight"] = LINEAR
        if dims.family == "qwen3_next":
            steps |= {f"linear_attn.in_proj_{x}.weight": LINEAR for x in ("qkvz", "ba")}
        else:
            steps = {n: step for n, step in steps.items() if not n.startswith("linear_attn.in_")}
            assert dims.linear is not None
            leaves = _joined_projections(dims.linear)
    leaves += _renamed_leaves(stacked_experts(dims), _HYBRID_NAMES)
    return renamed(steps, _HYBRID_NAMES) + leaves


def _joined_projections(linear: LinearAttention) -> tuple[FamilyLeaf, ...]:
    """Projections of Qwen 3.5 with what each head of keys is used with side by side."""
    n, per = linear.key_heads, linear.value_heads // linear.key_heads
    keys, wide = n * linear.key_dim, per * linear.value_dim

    def part(name: str, start: int, stop: int, pattern: str = "(n w) e -> e n w") -> Any:
        rows = (start, stop) if name == "in_proj_qkv" else None
        quantized = name in ("in_proj_qkv", "in_proj_z")
        step = TensorStep(pattern, (("n", n),), projection=quantized, rows=rows)
        return f"linear_attn.{name}.weight", step

    qkvz = JoinedKernel(
        (
            part("in_proj_qkv", 0, keys),
            part("in_proj_qkv", keys, 2 * keys),
            part("in_proj_qkv", 2 * keys, 2 * keys + n * wide),
            part("in_proj_z", 0, n * wide),
        ),
        n,
        (linear.key_dim, linear.key_dim, wide, wide),
    )
    ba = JoinedKernel((part("in_proj_b", 0, n * per), part("in_proj_a", 0, n * per)), n, (per, per))
    return tuple(
        FamilyLeaf(f"attention.in_proj_{name}.kernel", (), LINEAR, joined=joined)
        for name, joined in (("qkvz", qkvz), ("ba", ba))
    )


def _cycle(
    block: Sequence[tuple[FamilyLeaf, ...]], layers: int, name: str = "decoder.layers.layers_{}."
) -> tuple[LayerGroup, ...]:
    """Layers of which as many as in `block` are scanned together, each with the leaves there."""
    return tuple(
        LayerGroup(
            name.format(i), "decoder.layers_{n}.", tuple(range(i, layers, len(block))), leaves
        )
        for i, leaves in enumerate(block)
    )


def _deepseek(dims: Dims) -> tuple[LayerGroup, ...]:
    """Dense layers first, counted by themselves, then those with experts."""
    if dims.dense != tuple(range(len(dims.dense))):
        raise MappingError(
            f"the dense layers are not those of MaxText's {dims.family}, which are the first",
            expected=f"layers 0 to {len(dims.dense) - 1}",
            found=short_repr([*dims.dense]),
        )
    names = (*_DEEPSEEK_NAMES, *_NAMES)
    # `GateLogit` of `layers/moe.py`: the bias is a variable of its own kind. Flax keeps it beside
    # the parameters, and `param_scan_axis` is that of parameters only (`layers/nnx_decoders.py`).
    # `param_mapping.py` still looks for it among the parameters, where it is not.
    sparse = tuple(
        dataclasses.replace(leaf, variable="MoEBiasVar")
        if leaf.target.endswith("gate.bias")
        else leaf
        for leaf in renamed(_steps(dims, sparse=True), names)
    )
    dense = renamed(_steps(dims, sparse=False), names)
    return (
        LayerGroup("decoder.dense_layers.", "decoder.dense_layers_{n}.", dims.dense, dense),
        LayerGroup("decoder.moe_layers.", "decoder.moe_layers_{n}.", dims.sparse, sparse, first=0),
    )


def _deepseek4(dims: Dims, own: Compressed) -> Tree:
    """Layers whose experts a table chooses, then pairs of heavy and sparse attention."""
    if own.rates != _DEEPSEEK4_RATES:
        what = "MaxText's deepseek4 compresses other numbers of tokens to one"
        expected = f"compress_rates {list(_DEEPSEEK4_RATES)} of sparse and heavy attention"
        raise MappingError(what, expected=expected, found=short_repr([*own.rates]))
    hashed = sum(kind.hashed for kind in dims.kinds)
    if any(kind.hashed for kind in dims.kinds[hashed:]):
        what = "the layers with a table of experts are not MaxText's, which are the first"
        tables = short_repr([i for i, kind in enumerate(dims.kinds) if kind.hashed])
        raise MappingError(what, expected=f"layers 0 to {hashed - 1}", found=tables)
    types = [kind.attention for kind in dims.kinds[hashed:]]
    leaves = {kind: _deepseek4_layer(dims, own, kind) for kind in dict.fromkeys(dims.kinds)}
    name = "decoder.layers_{}."
    scans = types == ["heavily_compressed", "compressed_sparse"] * (len(types) // 2)
    single = range(hashed if scans else dims.layers)
    groups = [
        LayerGroup(name.format(i), name.format(i), (i,), leaves[dims.kinds[i]], scans=False)
        for i in single
    ]
    for i in range(2 if scans and types else 0):
        layers = tuple(range(hashed + i, dims.layers, 2))
        group = LayerGroup(
            f"decoder.scanned_blocks.layers_{i}.",
            "decoder.layers_{n}.",
            layers,
            leaves[dims.kinds[layers[0]]],
        )
        groups.append(group)
    return Tree(
        "token_embedder.embedding",
        "decoder.logits_dense.kernel",
        "decoder.decoder_norm.scale",
        tuple(groups),
        others=hyper_head(dims, "decoder."),
        scans=scans,
    )


def _deepseek4_layer(dims: Dims, own: Compressed, kind: LayerKind) -> tuple[FamilyLeaf, ...]:
    """`DEEPSEEK_V4_MAXTEXT_TO_HF_PARAM_HOOK_FN`: it parts the tensors of hyper connections."""
    steps = layer_tensors(dims, kind)
    steps["attn.wkv.weight"] = heads(1, dims.head_dim)
    if "attn.indexer.wq_b.weight" in steps:
        steps["attn.indexer.wq_b.weight"] = LINEAR
    if kind.hashed:  # `Tid2EidVar` of `layers/moe.py` holds them as float32
        table = dataclasses.replace(steps["ffn.gate.tid2eid"], as_float=True)
        steps["ffn.gate.tid2eid"] = table
    steps = {tensor: step for tensor, step in steps.items() if not tensor.startswith("hc_")}
    compressor = "csa_compressor" if kind.attention == "compressed_sparse" else "hca_compressor"
    variables = {"gate.bias": "MoEBiasVar", "tid2eid": "Tid2EidVar"}
    leaves = []
    for leaf in renamed(steps, _DEEPSEEK_V4_NAMES):
        target = leaf.target.replace(".compressor", f".{compressor}")
        variable = next((v for end, v in variables.items() if target.endswith(end)), "")
        leaves.append(dataclasses.replace(leaf, target=target, variable=variable))
    n = own.streams
    for module, tensor in (("mhc_attention", "hc_attn"), ("mhc_mlp", "hc_ffn")):
        rows = {"pre": (0, n), "post": (n, 2 * n), "res": (2 * n, (2 + n) * n)}
        for i, (part, span) in enumerate(rows.items()):
            before = f"{module}.{part}_"
            bias = TensorStep("(a b) -> a b", (("a", n),)) if part == "res" else VECTOR
            for name, source, step, cut in (
                ("alpha", "fn", ROUTER, span),
                ("beta", "base", bias, span),
                ("alpha_scale", "scale", VECTOR, (i, i + 1)),
            ):
                step = dataclasses.replace(step, rows=cut)
                leaves.append(FamilyLeaf(f"{before}{name}", f"{tensor}_{source}", step))
        # `mhc_dummy_norm`: the norm has no weights in the checkpoint.
        ones = FamilyLeaf(f"{module}.mhc_norm.scale", (), VECTOR, ones=n * dims.hidden)
        leaves.append(ones)
    return tuple(leaves)
