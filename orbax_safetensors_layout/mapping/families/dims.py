"""Resolves a Hugging Face `config.json` to the dimensions that a mapping needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

from .architectures import ARCHITECTURES, Architecture, ExpertsForm
from .config import SIZES, Section
from .weight_format import WeightFormat, weight_format

# Keys that no classes read but those of families with a default for them.
_OWN = (
    *("query_pre_attn_scalar", "sliding_window_pattern", "decoder_sparse_step", "mlp_only_layers"),
    *("first_k_dense_replace", "moe_layers", "interleave_moe_layer_step"),
    *("full_attention_interval", "norm_topk_prob"),
)

# Which value ties the output kernel of a model within another, by the outer `model_type`: the outer
# `tie_word_embeddings`. Where it is left out it is false, but true in these classes (those of
# transformers 5.23.0 that take any text model) ...
_TIED_BY_DEFAULT = """
    aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid florence2 gemma3 gemma3n gemma4 glmasr
    got_ocr2 granite_speech granite_speech_plus grounding-dino hyperclovax_vision_v2 internvl janus
    kimi_k25 lfm2_vl lfm3_vl lighton_ocr minicpm_ocr mistral3 mm-grounding-dino
    moss_transcribe_diarize ovis2 paligemma pe_audio_video pp_chart2table qwen3_asr voxtral_realtime
"""
_TIED_BY_TEXT = "perception_lm"  # ... or the text model's in this, ...
# ... which counts in these even where the outer one is false.
_TIED_BY_EITHER = """
    fast_vlm llava llava_next_video llava_onevision qwen2_5_vl qwen2_vl shieldgemma2 video_llama_3
"""

_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

# Several times the largest published models: 126 layers; 94 layers of 512 experts. Rules are made
# of each layer, and a message may list what each expert lacks.
_MOST_LAYERS = 1024
_MOST_EXPERTS = 1 << 17  # of all layers together


@dataclasses.dataclass(frozen=True, slots=True)
class Latent:
    """DeepSeek's multi-head latent attention; dimensions are those of a head."""

    query_rank: bool  # whether queries have a low rank (`q_a_proj`, `q_b_proj`)
    query_dim: int  # rotated elements included
    key_value_dim: int  # of `kv_b_proj`: keys that are not rotated, and values
    value_dim: int
    index_heads: int  # 0 without an indexer
    index_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Compressed:
    """DeepSeek-V4's compressed attention and hyper connections."""

    groups: int  # of heads, whose outputs are projected apart
    index_heads: int
    index_dim: int
    streams: int  # of the hidden state
    rates: tuple[int, int]  # tokens that are compressed to one, in sparse and in heavy attention
    published: bool  # whether tensors are named as published, and not as transformers saves them


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAttention:
    """The gated delta rule of Qwen; dimensions are those of a head."""

    key_heads: int  # of queries as well
    value_heads: int
    key_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateSpace:
    """The mixer of Mamba 2."""

    heads: int
    head_dim: int
    groups: int  # that share their B and C
    state: int  # size of the state

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels that are convolved: those of the heads, and B and C of each group."""
        return self.width + 2 * self.groups * self.state


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with the same tensors."""

    sparse: bool = False  # whether they have experts
    attention: str = ""  # one of `Architecture.attention_types`, where there are such
    reuses: bool = False  # whether keys and values are those of other layers
    hashed: bool = False  # whether a table of tokens says which experts they take


@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions of one model."""

    family: str  # one of `FAMILIES`
    architecture: Architecture
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    fused_width: int  # of gate, and of up, where they are one tensor; else 0
    shared_width: int  # the same of the MLP beside Granite's experts
    vocab: int  # rows of the embedding
    tied: bool  # whether the output kernel is the embedding where the files have none
    headless: bool  # whether the model is one without an output kernel, as embedders are
    query_scalar: float  # attention logits are divided by the square root of it
    top_sums_to_one: bool  # whether the weights of the experts of a token do
    rope: str  # the `rope_type` of the configuration; `default` where it has none
    experts: int  # routed ones of a layer; 0 in a dense model
    dense: tuple[int, ...]  # layers without experts
    shared_experts: bool  # whether layers have experts that all tokens take
    extra: int  # layers after the last, for multi-token prediction
    latent: Latent | None
    compressed: Compressed | None
    linear: LinearAttention | None  # of the layers that are not of full attention
    state_space: StateSpace | None  # in place of attention
    experts_form: ExpertsForm  # of those of a layer
    biased: frozenset[str]  # the projections that have a bias
    head_norms: bool  # whether queries and keys have norms
    quantized: WeightFormat | None
    multimodal: bool  # whether the checkpoint holds a vision model too
    layer_types: tuple[str, ...]  # the kind of attention of each; empty where none is given
    kinds: tuple[LayerKind, ...]  # of each layer
    full_kv_heads: int  # of layers of full attention
    full_head_dim: int
    keys_are_values: bool  # in layers of full attention
    stores_reused: bool  # whether layers that take the keys of others have some in the files
    layer_input: int  # dimension of the embedding of each layer; 0 without
    alternatives: int  # of the hidden state, in Gemma 3n; else 0

    @property
    def sparse(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.layers) if i not in self.dense)

    def check_uniform(self, target: str) -> None:
        """Refuses layers that are partly dense, which `target` does not have."""
        if self.dense and self.sparse:
            what = f"{target} has no {self.family} whose layers are partly dense"
            raise MappingError(what, found=f"dense layers {list(self.dense)} of {self.layers}")

    def check_cycle(
        self, target: str, length: int, *, rest: bool = False, local: str = "sliding"
    ) -> None:
        """Refuses layer types but the cycle of `target`, local layers and a global one."""
        if self.layers % length and not rest:
            raise MappingError(f"{target}'s {self.family} needs a multiple of {length} layers")
        for i, kind in enumerate(self.layer_types):
            expected = f"{local if (i + 1) % length else 'full'}_attention"
            if kind != expected:
                what = f"the type of layer {i} is not that of {target}'s {self.family}"
                raise MappingError(what, expected=expected, found=short_repr(kind))


def quantized_by(family: str, config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of quantised weights that a configuration says, if it does."""
    outer = Section(config, family)
    of_text = outer.section("text_config") or outer
    said = outer.section("quantization_config") or of_text.section("quantization_config")
    return weight_format(family, said)


def dims_of(
    family: str,
    config: Mapping[str, Any],
    names: Sequence[str] = (),
    shape_of: Callable[[str], Sequence[int]] | None = None,
) -> Dims:
    """Return the dimensions that a configuration gives; with vision, its `text_config` counts.

    `names` are those of the files' tensors, if there are files, and `shape_of` has their shapes.
    """
    architecture = ARCHITECTURES[family]
    defaults = architecture.defaults
    outer, read = _sections(config, family, architecture)
    layers = read.integer("num_hidden_layers", bounds=(1, _MOST_LAYERS))
    hidden = read.integer("hidden_size")
    heads_key = "num_heads" if architecture.mixer == "mixer" else "num_attention_heads"
    heads = read.integer(heads_key, bounds=(1, hidden))
    head_dim = read.integer("head_dim", hidden // heads)
    latent = _latent(read) if architecture.latent else None
    flag = architecture.experts_flag
    sparse = not defaults.keys().isdisjoint(_EXPERTS) and (flag is None or read.flag(flag, False))
    if architecture.mixer == "mamba":  # smaller ones have no experts beside the MLP
        sparse = read.integer("num_local_experts", bounds=(0, _MOST_EXPERTS)) > 0
    local = "linear" if architecture.linear else "sliding"
    n = read.integer(
        "full_attention_interval" if architecture.linear else "sliding_window_pattern", 0
    )
    cycle = [f"{local if i % n else 'full'}_attention" for i in range(1, layers + 1) if n]
    layer_types = read.texts("layer_types") or tuple(cycle)
    if architecture.mixer == "mamba":  # files on the hub have other names than transformers 5
        layer_types = tuple(_TYPES.get(kind, kind) for kind in layer_types)
        layer_types = layer_types or ("linear_attention",) * layers
    compressed = _compressed(read, names) if architecture.compressed else None
    if compressed is not None:
        layer_types = _types_by_rates(read, layers)
        if not compressed.published:
            architecture = dataclasses.replace(
                architecture, root="model.", embedding="embed_tokens.weight"
            )
    if "no_rope_layer_interval" in defaults:
        layer_types = _types_by_rotation(read, layers)
    if family == "gemma4":  # `Gemma4TextConfig` makes it so
        layer_types = (*layer_types[:-1], "full_attention")
    if layer_types and len(layer_types) != layers:
        read.raise_error("layer_types", f"one for each of {layers:,} layers", layer_types)
    flag = architecture.head_norms_flag
    types = [f"{kind}_attention" for kind in architecture.attention_types]
    if types and not set(types).issuperset(layer_types):
        read.raise_error("layer_types", f"each one of {types}", layer_types)
    dense = _dense(read, layers) if sparse else tuple(range(layers))
    kv_heads = read.integer("num_key_value_heads", heads)
    full_kv_heads, full_head_dim = _full_attention(read, layer_types, kv_heads, head_dim)
    most, most_experts = (0, _MOST_LAYERS), (1, _MOST_EXPERTS // layers)
    return Dims(
        family=family,
        architecture=architecture,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        fused_width=_fused_width(architecture, read),
        shared_width=read.integer("shared_intermediate_size")
        if architecture.mixer == "mamba"
        else 0,
        vocab=read.integer("vocab_size"),
        tied=_tied(outer, read),
        headless=_headless(outer),
        query_scalar=read.number("query_pre_attn_scalar", head_dim),
        top_sums_to_one=read.flag("norm_topk_prob", False),
        rope=_rope(read),
        experts=read.integer(read.need(*_EXPERTS), bounds=most_experts)
        if len(dense) < layers
        else 0,
        dense=dense,
        shared_experts=architecture.shared_experts is not None
        and read.integer("n_shared_experts", 1, bounds=most) > 0,
        extra=read.integer("num_nextn_predict_layers", 0, bounds=most)
        if architecture.prediction == "layers"
        else 0,
        latent=latent,
        compressed=compressed,
        linear=_linear(read) if architecture.linear else None,
        state_space=_state_space(architecture, read, heads, head_dim, hidden),
        experts_form=_experts_form(architecture, read, names, shape_of),
        biased=_biased(architecture, read),
        head_norms=architecture.head_norms is not None and (flag is None or read.flag(flag, False)),
        quantized=quantized_by(family, config),
        multimodal=outer.get("text_config") is not None or outer.get("vision_config") is not None,
        layer_types=layer_types,
        kinds=_kinds(architecture, read, dense, layer_types, layers),
        full_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        keys_are_values=bool(types) and read.flag("attention_k_eq_v", False),
        # Without files, as published ones.
        stores_reused=not names
        or any(name.endswith(f"layers.{layers - 1}.self_attn.k_proj.weight") for name in names),
        layer_input=read.integer("hidden_size_per_layer_input", bounds=(0, SIZES[1]))
        if architecture.layer_inputs
        else 0,
        alternatives=read.integer("altup_num_inputs", bounds=(1, _MOST_LAYERS))
        if architecture.alternating
        else 0,
    )


def _rope(read: Section) -> str:
    """The type of rotary embedding; the older name counts first, as in transformers 5.23.0."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = read.section(name)
        if rope is not None and (kind := rope.text("rope_type") or rope.text("type")):
            return kind
    return "default"


_RATES = ("compressed_sparse_attention", "heavily_compressed_attention")


def _compressed(read: Section, names: Sequence[str]) -> Compressed:
    rates = read.section("compress_rates") or Section({}, read.model)
    sparse = read.integer("compress_rate_csa", rates.integer(_RATES[0], 4))
    heavy = read.integer("compress_rate_hca", rates.integer(_RATES[1], 128))
    groups = read.integer("o_groups")
    heads = read.integer("num_attention_heads")
    if heads % groups:
        read.raise_error("o_groups", f"a divisor of {heads:,} heads", groups)
    return Compressed(
        groups,
        read.integer("index_n_heads"),
        read.integer("index_head_dim"),
        read.integer("hc_mult", bounds=(1, _MOST_LAYERS)),
        (sparse, heavy),
        # Without files, as published ones.
        not any(name.endswith("embed_tokens.weight") for name in names),
    )


def _types_by_rates(read: Section, layers: int) -> tuple[str, ...]:
    """`DeepseekV4Config`: older keys say it by the rate of each layer."""
    types, rates = read.texts("layer_types"), read.integers("compress_ratios", bounds=(0, 128))
    if not types and rates:
        of_rate = {0: "sliding_attention", 4: _RATES[0], 128: _RATES[1]}
        if not of_rate.keys() >= set(rates):
            read.raise_error("compress_ratios", f"each one of {[*of_rate]}", rates)
        types = tuple(of_rate[rate] for rate in rates)
    if not types:
        later = (_RATES[i % 2 == 0] for i in range(layers - 2))
        types = (_RATES[1], _RATES[1], *later)
    if len(types) < layers:
        key = "layer_types" if read.get("layer_types") else "compress_ratios"
        read.raise_error(key, f"one for each of {layers:,} layers", types)
    return types[:layers]


def _hashed(read: Section, layers: int) -> frozenset[int]:
    """The layers whose router is a table of tokens."""
    types = _mlp_types(read, layers, "hash_moe", "moe")
    if not types:
        return frozenset(range(read.integer("num_hash_layers", bounds=(0, _MOST_LAYERS))))
    return frozenset(i for i, kind in enumerate(types) if kind == "hash_moe")


def _mlp_types(read: Section, layers: int, *kinds: str) -> tuple[str, ...]:
    """The kind of MLP of each layer, each one of two; empty where the configuration has none."""
    types = read.texts("mlp_layer_types")
    if types and (len(types) < layers or not set(types).issubset(kinds)):
        expected = f"{' or '.join(kinds)} for each of {layers:,} layers"
        read.raise_error("mlp_layer_types", expected, types)
    return types[:layers]


def _types_by_rotation(read: Section, layers: int) -> tuple[str, ...]:
    """Layers without a rotary embedding attend to all tokens: `Llama4TextConfig`."""
    interval = read.integer("no_rope_layer_interval")
    rotated = read.integers("no_rope_layers", bounds=(0, 1))
    rotated = rotated or tuple(int(i % interval != 0) for i in range(1, layers + 1))
    if len(rotated) < layers:
        read.raise_error("no_rope_layers", f"one for each of {layers:,} layers", rotated)
    return tuple("chunked_attention" if turns else "full_attention" for turns in rotated[:layers])


def _sections(
    config: Mapping[str, Any], family: str, architecture: Architecture | None
) -> tuple[Section, Section]:
    """Return a configuration, and that of its language model, with a family's defaults."""
    outer, values = Section(config, family), config
    defaults = {} if architecture is None else architecture.defaults
    if outer.section("text_config") is not None:
        values = config["text_config"]
        if architecture is not None:
            defaults = {**architecture.inner_defaults, **defaults}
    known = {k: v for k, v in values.items() if k in defaults or k not in _OWN}
    return outer, Section({**defaults, **known}, family)


def is_tied(config: Mapping[str, Any], family: str | None) -> bool:
    """Whether a configuration ties the output kernel to the embedding; None has no defaults."""
    architecture = None if family is None else ARCHITECTURES[family]
    return _tied(*_sections(config, family or "known", architecture))


def _tied(outer: Section, read: Section) -> bool:
    inner = read.flag("tie_word_embeddings", False)
    if outer.get("text_config") is None:
        return inner
    kind = outer.text("model_type") or outer.model
    default = kind in _TIED_BY_DEFAULT.split() or (inner and kind in _TIED_BY_TEXT.split())
    return outer.flag("tie_word_embeddings", default) or (inner and kind in _TIED_BY_EITHER.split())


def _headless(outer: Section) -> bool:
    """Whether the classes of the files have no output kernel, as `LlamaModel`."""
    classes = outer.texts("architectures")
    heads = (not name.endswith("Model") or name.endswith("HeadModel") for name in classes)
    return bool(classes) and not any(heads)


def _biased(architecture: Architecture, read: Section) -> frozenset[str]:
    """The projections with a bias."""
    return frozenset(
        projection
        for biases in architecture.biases
        if biases.flag is None or read.flag(biases.flag, biases.default)
        for projection in biases.projections
    )


def _latent(read: Section) -> Latent:
    keys, rotated = read.integer("qk_nope_head_dim"), read.integer("qk_rope_head_dim")
    values = read.integer("v_head_dim")
    # `"q_lora_rank": null` says that there is none; the default counts only where it is left out.
    ranked = read.get("q_lora_rank") is not None and read.integer("q_lora_rank") > 0
    indexer = ("index_n_heads", "index_head_dim")
    sizes = map(read.integer, indexer) if ARCHITECTURES[read.model].indexer else (0, 0)
    return Latent(ranked, keys + rotated, keys + values, values, *sizes)


def _kinds(
    architecture: Architecture,
    read: Section,
    dense: Sequence[int],
    layer_types: Sequence[str],
    layers: int,
) -> tuple[LayerKind, ...]:
    reusing = 0
    if architecture.reuses_keys:
        reusing = read.integer("num_kv_shared_layers", bounds=(0, layers - 1))
    hashed = _hashed(read, layers) if architecture.compressed else ()
    return tuple(
        LayerKind(
            sparse=i not in dense,
            attention=layer_types[i].removesuffix("_attention")
            if architecture.attention_types
            else "",
            reuses=i >= layers - reusing,
            hashed=i in hashed,
        )
        for i in range(layers)
    )


def _full_attention(
    read: Section, layer_types: Sequence[str], kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Heads of keys and values of layers of full attention, and their size, in Gemma 4."""
    if "global_head_dim" not in ARCHITECTURES[read.model].defaults:
        return kv_heads, head_dim
    full = kv_heads, read.integer("global_head_dim")
    if read.flag("attention_k_eq_v", False):
        full = read.integer("num_global_key_value_heads", kv_heads), full[1]
    layers = read.section("per_layer_config")  # as transformers 5 writes it
    if layers is None:
        return full
    found: dict[str, set[tuple[int, int]]] = {}
    numbers = {name.lstrip("0") or "0": name for name in layers.names()}  # it pads them
    for i, kind in enumerate(layer_types):
        layer = layers.section(numbers.get(str(i), ""))
        heads = kv_heads if layer is None else layer.integer("num_key_value_heads", kv_heads)
        dim = head_dim if layer is None else layer.integer("head_dim", head_dim)
        found.setdefault(kind, set()).add((heads, dim))
    if any(len(sizes) > 1 for sizes in found.values()):
        read.raise_error("per_layer_config", "one size of heads for each of layer_types", found)
    if found.get("sliding_attention", {(kv_heads, head_dim)}) != {(kv_heads, head_dim)}:
        read.raise_error("per_layer_config", "local layers as the others say", found)
    return next(iter(found.get("full_attention", {full})))


def _linear(read: Section) -> LinearAttention:
    keys, values = read.integer("linear_num_key_heads"), read.integer("linear_num_value_heads")
    if values % keys:
        read.raise_error("linear_num_value_heads", f"a multiple of {keys:,} key heads", values)
    dims = read.integer("linear_key_head_dim"), read.integer("linear_value_head_dim")
    return LinearAttention(keys, values, *dims)


def _state_space(
    architecture: Architecture, read: Section, heads: int, head_dim: int, hidden: int
) -> StateSpace | None:
    if architecture.mixer is None:
        return None
    if architecture.mixer == "mixer":
        return StateSpace(heads, head_dim, read.integer("n_groups"), read.integer("state_size"))
    width = read.integer("mamba_expand") * hidden
    heads = read.integer("mamba_n_heads", bounds=(1, width))
    is_auto = read.get("mamba_d_head") == "auto"
    head_dim = width // heads if is_auto else read.integer("mamba_d_head")
    if heads * head_dim != width:
        read.raise_error("mamba_d_head", f"{width:,} / mamba_n_heads {heads:,}", head_dim)
    sizes = read.integer("mamba_n_groups"), read.integer("mamba_d_state")
    return StateSpace(heads, head_dim, *sizes)


def _fused_width(architecture: Architecture, read: Section) -> int:
    if not {"each", "stacked"}.issuperset(architecture.experts):
        if architecture.experts_flag and not read.flag(architecture.experts_flag, False):
            return 0
        hybrid = architecture.mixer == "mamba"
        return read.integer("intermediate_size" if hybrid else "moe_intermediate_size")
    is_fused = architecture.fused or "stacked" in architecture.experts
    return read.integer("intermediate_size") if is_fused else 0


def _experts_form(
    architecture: Architecture,
    read: Section,
    names: Sequence[str],
    shape_of: Callable[[str], Sequence[int]] | None,
) -> ExpertsForm:
    first, *others = architecture.experts
    if not others or not names or shape_of is None:
        return first
    joined = next((name for name in names if name.endswith(".experts.gate_up_proj")), None)
    if joined is None:
        return "each"
    if "each" in others:
        return first
    width, hidden = 2 * read.integer("moe_intermediate_size"), read.integer("hidden_size")
    if width != hidden:
        return "transposed" if [*shape_of(joined)[1:]] == [width, hidden] else "stacked"
    down = shape_of(joined.replace("gate_up_proj", "down_proj"))
    return "transposed" if [*down[1:]] == [hidden, width // 2] else "stacked"


def _dense(read: Section, layers: int) -> tuple[int, ...]:
    defaults = ARCHITECTURES[read.model].defaults
    if "mlp_layer_types" in defaults and (types := _mlp_types(read, layers, "dense", "sparse")):
        return tuple(i for i, kind in enumerate(types) if kind == "dense")
    if "first_k_dense_replace" in defaults:
        first = read.integer("first_k_dense_replace", bounds=(0, _MOST_LAYERS))
        return tuple(range(min(first, layers)))
    if "moe_layers" in defaults:
        sparse: Sequence[int] = read.integers("moe_layers", bounds=(0, _MOST_LAYERS))
        if read.get("moe_layers") is None:  # else the step says nothing, and may be 0
            step = read.integer("interleave_moe_layer_step", 1)
            sparse = range(step - 1, layers, step)
        return tuple(sorted({*range(layers)}.difference(sparse)))
    # `Qwen3MoeDecoderLayer` of transformers 5.23.0.
    only = set(read.integers("mlp_only_layers", bounds=(0, _MOST_LAYERS)))
    step = read.integer("decoder_sparse_step", 1)
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)
