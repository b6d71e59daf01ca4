"""Vision encoders and their projectors, for `vision=True`: tables of tensors, axes and names.

Sources are transformers 5.23.0; `param_mapping.py`, `llama4_ckpt_unscanned.py` and `models/` of
maxtext 0.2.5; and `models/gemma3/` of google-tunix 0.1.7. None of them stacks these layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.errors import MappingError

from .config import Section, find_prefix
from .dims import Dims
from .maxtext import is_small
from .steps import FamilyLeaf, TensorStep, Tree, renamed

# Several times the largest published models: 45 layers, widths of 5,632, images of 960 pixels.
_MOST_LAYERS = (1, 256)
_EXTENTS = (1, 1 << 20)
_MOST_PIXELS = 1 << 14
_JOINED = ("query", "key", "value")  # as they are joined in one tensor

_Table = Mapping[str, str]
"""Tensors, as published files name them, and their axes before and after.

`{n}` is the number of a layer. Axes are e and p (hidden size), f (of an MLP), h (heads), d (of a
head), c (channels), y and x (pixels of a patch), t (positions), u (hidden size of the language
model); n is what is joined.
"""


class _Tower(NamedTuple):
    """The vision model of a family on one model side."""

    table: _Table
    names: tuple[tuple[str, str], ...]  # from tensors' to leaves', as `renamed` takes them
    modules: tuple[tuple[str, str], ...]  # prefixes of tensors; the end of a name that tells each
    sizes: Callable[[Section, Dims], dict[str, int]]  # of axes, and how many `{n}` there are
    shifted: str = ""  # the tensor to which 1 is added


def with_vision(
    tree: Tree, target: str, dims: Dims, config: Mapping[str, Any], names: Sequence[str]
) -> Tree:
    """Return the tree with the leaves of the vision model; refuses one that `target` has not.

    `names` are those of the files' tensors, if there are files; else they are as published.
    """
    tower = _TOWERS.get(target, {}).get(dims.family)
    if tower is None:
        what = f"vision=True: there is no mapping of the vision model of {dims.family} to {target}"
        listed = (f"{side} with {', '.join(families)}" for side, families in VISION.items())
        raise MappingError(what, expected="; ".join(listed))
    read = Section(config, dims.family).section("vision_config")
    if read is None:
        raise MappingError(
            f"vision=True: the configuration of this {dims.family} has no 'vision_config'",
            hint="Give that of the whole model, or leave the option out if there is none.",
        )
    sizes = tower.sizes(read, dims)
    steps = {tensor: _step(axes, sizes) for tensor, axes in tower.table.items()}
    if tower.shifted:
        steps[tower.shifted] = dataclasses.replace(steps[tower.shifted], term=1.0)
    leaves: list[FamilyLeaf] = []
    for leaf in renamed(steps, tower.names):
        module, ending = next(
            pair for pair in tower.modules if str(leaf.source).startswith(pair[0])
        )
        stored = find_prefix(names, ending)
        source = (module if stored is None else stored) + str(leaf.source).removeprefix(module)
        leaves += _expanded(dataclasses.replace(leaf, source=source), sizes)
    scans = tree.scans and not sizes.get("{m}")  # `deepstack_visual_indexes_for_vit` (`types.py`)
    return dataclasses.replace(tree, vision=tuple(leaves), scans=scans)


def _step(axes: str, sizes: Mapping[str, int]) -> TensorStep:
    """The step of a tensor, which refuses one of other sizes than the configuration says."""
    named = re.findall("[a-z]", axes.partition("->")[0])
    return TensorStep(axes, tuple((axis, sizes[axis]) for axis in named if axis in sizes))


def _expanded(leaf: FamilyLeaf, sizes: Mapping[str, int]) -> Iterator[FamilyLeaf]:
    """The leaves of each layer, and of each third of a joined tensor."""
    mark = next((mark for mark in ("{n}", "{m}") if mark in leaf.target), "")
    for i in range(sizes[mark] if mark else 1):
        target, source = (text.replace(mark, str(i)) if mark else text
                          for text in (leaf.target, str(leaf.source)))  # fmt: skip
        if "{x}" not in target:
            yield FamilyLeaf(target, source, leaf.step)
            continue
        split = "(n r) c -> n r c" if leaf.step.rank == 3 else "(n r) -> n r"
        for third, name in enumerate(_JOINED):
            step = dataclasses.replace(leaf.step, part=(third, third + 1, 3), split=split)
            yield FamilyLeaf(target.replace("{x}", name), source, step)


def _norm(tensor: str, axis: str = "e") -> _Table:
    return {f"{tensor}.{part}": f"{axis} -> {axis}" for part in ("weight", "bias")}


def _linear(tensor: str, i: str, o: str) -> _Table:
    return {f"{tensor}.weight": f"{o} {i} -> {i} {o}", f"{tensor}.bias": f"{o} -> {o}"}


def _heads(attention: str, out: str) -> _Table:
    """Kernels of heads, as MaxText has them, with biases."""
    into = {f"{attention}.{x}_proj.weight": "(h d) e -> e h d" for x in "qkv"}
    biases = {f"{attention}.{x}_proj.bias": "(h d) -> h d" for x in "qkv"}
    return {**into, **biases, f"{out}.weight": "e (h d) -> h d e", f"{out}.bias": "e -> e"}


def _block_sizes(read: Section, layers: str, heads: str) -> dict[str, int]:
    e, f = (read.integer(f"{name}_size", bounds=_EXTENTS) for name in ("hidden", "intermediate"))
    h = read.integer(heads, bounds=(1, e))
    if e % h:
        read.raise_error(heads, f"a divisor of the hidden_size {e:,}", h)
    n = read.integer(layers, bounds=_MOST_LAYERS)
    return {"e": e, "p": e, "f": f, "h": h, "d": e // h, "{n}": n}


def _square_sizes(read: Section, dims: Dims) -> dict[str, int]:
    """Images of one size, parted into patches."""
    patch = read.integer("patch_size", bounds=(1, _MOST_PIXELS))
    side = read.integer("image_size", bounds=(patch, _MOST_PIXELS)) // patch
    channels = read.integer("num_channels", 3, bounds=_EXTENTS)
    sizes = {"c": channels, "y": patch, "x": patch, "t": side**2, "u": dims.hidden}
    return sizes | _block_sizes(read, "num_hidden_layers", "num_attention_heads")


# Gemma 3 has a SigLIP.

_TOWER, _PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
_BLOCK = f"{_TOWER}encoder.layers.{{n}}."
_SIGLIP = {
    f"{_TOWER}embeddings.patch_embedding.weight": "e c y x -> y x c e",
    f"{_TOWER}embeddings.patch_embedding.bias": "e -> e",
    f"{_TOWER}embeddings.position_embedding.weight": "t e -> 1 t e",
    **_norm(f"{_TOWER}post_layernorm"),
    **_norm(f"{_BLOCK}layer_norm1"),
    **_norm(f"{_BLOCK}layer_norm2"),
    **_linear(f"{_BLOCK}mlp.fc1", "e", "f"),
    **_linear(f"{_BLOCK}mlp.fc2", "f", "e"),
    f"{_PROJECTOR}mm_input_projection_weight": "e u -> e u",
    f"{_PROJECTOR}mm_soft_emb_norm.weight": "e -> e",
}
_SIGLIP_MODULES = (
    (_TOWER, "embeddings.position_embedding.weight"),
    (_PROJECTOR, "mm_input_projection_weight"),
)
_SIGLIP_NAMES = (
    (r"embeddings\.patch_embedding", "embedding"),
    (r"embeddings\.position_embedding\.weight", "pos_embedding"),
    ("projection_weight", "projection.w"),
    ("soft_emb_norm", "soft_embedding_norm"),
    (r"norm(\d?)\.weight", r"norm\1.scale"),
    (r"\bweight\b", "kernel"),
)
_GEMMA3_MAXTEXT = _Tower(
    {**_SIGLIP, **_heads(f"{_BLOCK}self_attn", f"{_BLOCK}self_attn.out_proj")},
    (
        *_SIGLIP_NAMES,
        (rf"^{re.escape(_TOWER)}", "vision_encoder.Gemma3VisionEncoderLayer_0."),
        (rf"^{re.escape(_PROJECTOR)}", "vision_encoder.VisionEmbedder_0."),
        ("post_layernorm", "Transformer.encoder_norm"),
        (r"encoder\.layers\.{n}", "Transformer.encoderblock_{n}"),
        ("layer_norm1", "LayerNorm_0"),
        ("layer_norm2", "LayerNorm_1"),
        (r"mlp\.fc1", "MlpBlockViT_0.Dense_0"),
        (r"mlp\.fc2", "MlpBlockViT_0.Dense_1"),
        ("self_attn", "MultiHeadDotProductAttention_0"),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("out_proj", "out"),
    ),
    _SIGLIP_MODULES,
    _square_sizes,
    shifted=f"{_PROJECTOR}mm_soft_emb_norm.weight",  # `scale_rmsnorm`, as the language model's
)
_GEMMA3_TUNIX = _Tower(
    {
        **_SIGLIP,
        **{
            tensor: axes
            for x in ("q", "k", "v", "out")
            for tensor, axes in _linear(f"{_BLOCK}self_attn.{x}_proj", "e", "p").items()
        },
    },
    (
        *_SIGLIP_NAMES,
        (rf"^{re.escape(_TOWER)}", "vision_encoder.siglip_encoder."),
        (rf"^{re.escape(_PROJECTOR)}", "embedder."),
        ("post_layernorm", "transformer.encoder_norm"),
        (r"encoder\.layers", "transformer.blocks"),
        ("layer_norm", "ln"),
        ("self_attn", "attn"),
        (r"\bq_", "query_"),
        (r"\bk_", "key_"),
        (r"\bv_", "value_"),
    ),
    _SIGLIP_MODULES,
    _square_sizes,
)


# Llama 4; a is the width of the adapter, v that of its outputs.

_LLAMA4_BLOCK = "vision_model.model.layers.{n}."
_LLAMA4 = {
    "vision_model.class_embedding": "e -> e",
    "vision_model.positional_embedding_vlm": "t e -> t e",
    "vision_model.patch_embedding.linear.weight": "e (c y x) -> (c y x) e",
    **_norm("vision_model.layernorm_pre"),
    **_norm("vision_model.layernorm_post"),
    **_norm(f"{_LLAMA4_BLOCK}input_layernorm"),
    **_norm(f"{_LLAMA4_BLOCK}post_attention_layernorm"),
    **_heads(f"{_LLAMA4_BLOCK}self_attn", f"{_LLAMA4_BLOCK}self_attn.o_proj"),
    **_linear(f"{_LLAMA4_BLOCK}mlp.fc1", "e", "f"),
    **_linear(f"{_LLAMA4_BLOCK}mlp.fc2", "f", "e"),
    "vision_model.vision_adapter.mlp.fc1.weight": "a f -> f a",
    "vision_model.vision_adapter.mlp.fc2.weight": "o a -> a o",
    f"{_PROJECTOR}linear_1.weight": "u v -> v u",
}


def _llama4_sizes(read: Section, dims: Dims) -> dict[str, int]:
    names = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    a, o, v = (read.integer(name, bounds=_EXTENTS) for name in names)
    if o != a:  # `Llama4VisionMLP2` takes what is one for the other
        read.raise_error(names[1], f"the projector_input_dim {a:,}", o)
    sizes = _square_sizes(read, dims)
    return sizes | {"a": a, "o": o, "v": v, "t": sizes["t"] + 1}  # and that of the class


_LLAMA4_MAXTEXT = _Tower(
    _LLAMA4,
    (
        (rf"^{re.escape(_PROJECTOR)}linear_1", "Llama4MultiModalProjector_0.vit_multi_modal_p_"),
        ("modal_p_", "modal_projector"),
        (r"^vision_model\.", "Llama4VisionModel_0."),
        ("^", "vision_encoder."),
        (r"patch_embedding\.linear", "Llama4UnfoldConvolution_0.vit_unfold_linear"),
        (r"vision_adapter\.mlp\.", "Llama4VisionPixelShuffleMLP_0.pixel_shuffle_mlp.vit_pixel_s_"),
        ("vit_pixel_s_", "vit_pixel_shuffle_mlp_"),
        (r"model\.layers\.{n}\.", "Llama4VisionEncoder_0.layers_{n}."),
        (r"mlp\.fc", "Llama4VisionMLP_0.vit_encoder_layer_mlp_fc"),
        (r"(input|attention)_layernorm", r"\1_layer_norm"),
        ("self_attn", "self_attention_vision"),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("o_proj", "out"),
        (r"(norm\w*)\.weight", r"\1.scale"),
        (r"\bweight\b", "kernel"),
    ),
    (("vision_model.", "positional_embedding_vlm"), (_PROJECTOR, "linear_1.weight")),
    _llama4_sizes,
)


# Gemma 4, but E2B and E4B: "gemma4-small multimodal not yet supported" (`param_mapping.py`).

_GEMMA4, _EMBED_VISION = "model.vision_tower.", "model.embed_vision."
_GEMMA4_BLOCK = f"{_GEMMA4}encoder.layers.{{n}}."
_GEMMA4_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_GEMMA4_TABLE = {
    f"{_GEMMA4}patch_embedder.input_proj.weight": "e (y x c) -> (y x c) e",
    f"{_GEMMA4}patch_embedder.position_embedding_table": "s t e -> t s e",
    f"{_GEMMA4}std_scale": "e -> e",
    f"{_GEMMA4}std_bias": "e -> e",
    **{f"{_GEMMA4_BLOCK}{norm}_layernorm.weight": "e -> e" for norm in _GEMMA4_NORMS},
    **{f"{_GEMMA4_BLOCK}self_attn.{x}_norm.weight": "d -> d" for x in "qk"},
    **{f"{_GEMMA4_BLOCK}self_attn.{x}_proj.linear.weight": "(h d) e -> e h d" for x in "qkv"},
    f"{_GEMMA4_BLOCK}self_attn.o_proj.linear.weight": "e (h d) -> h d e",
    **{f"{_GEMMA4_BLOCK}mlp.{x}_proj.linear.weight": "f e -> e f" for x in ("gate", "up")},
    f"{_GEMMA4_BLOCK}mlp.down_proj.linear.weight": "e f -> f e",
    f"{_EMBED_VISION}embedding_projection.weight": "u e -> e u",
}


def _gemma4_sizes(read: Section, dims: Dims) -> dict[str, int]:
    if is_small(dims):
        what = "vision=True: MaxText has no vision model of Gemma 4 E2B and E4B"
        raise MappingError(what, expected="a model without inputs of single layers")
    for name, has in (("standardize", True), ("use_clipped_linears", False)):
        if read.flag(name, False) != has:
            expected = f"{str(has).lower()}, as in MaxText's gemma4"
            read.raise_error(name, expected, read.get(name))
    sizes = _block_sizes(read, "num_hidden_layers", "num_attention_heads")
    for name, size in (("num_key_value_heads", sizes["h"]), ("head_dim", sizes["d"])):
        if (found := read.integer(name, bounds=_EXTENTS)) != size:
            read.raise_error(name, f"{size:,}, as in MaxText's gemma4", found)
    patch = read.integer("patch_size", bounds=(1, _MOST_PIXELS))
    positions = read.integer("position_embedding_size", bounds=_EXTENTS)
    own = {"c": 3, "y": patch, "x": patch, "s": 2, "t": positions, "u": dims.hidden}
    return sizes | own


_GEMMA4_MAXTEXT = _Tower(
    _GEMMA4_TABLE,
    (
        (rf"^{re.escape(_GEMMA4)}", "vision_encoder.Gemma4VisionEncoderLayer_0."),
        (rf"^{re.escape(_EMBED_VISION)}embedding_", "vision_encoder.Gemma4VisionProjector_0."),
        (r"patch_embedder\.input_proj", "vision_entry.input_projection"),
        (r"patch_embedder\.position_embedding_table", "vision_entry.pos_emb_param"),
        (r"encoder\.layers\.{n}\.", "layer_{n}."),
        (r"input_layernorm", "pre_attention_norm"),
        (r"_layernorm", "_norm"),
        ("feedforward", "ffw"),
        ("self_attn", "attention"),
        (r"q_(proj|norm)", r"query_\1"),
        (r"k_(proj|norm)", r"key_\1"),
        ("v_proj", "value_proj"),
        ("o_proj", "out_proj"),
        ("gate_proj", "wi_0"),
        ("up_proj", "wi_1"),
        ("down_proj", "wo"),
        (r"(_proj)?\.linear", ""),
        (r"norm\.weight", "norm.scale"),
        (r"\bweight\b", "kernel"),
    ),
    (
        (_GEMMA4, "patch_embedder.position_embedding_table"),
        ("model.", "embed_vision.embedding_projection.weight"),
    ),
    _gemma4_sizes,
)


# Qwen 3 VL and Omni, Qwen 3.5; k are the images of a patch, w and z the width of what is merged, o
# that of the outputs. Mergers `{m}` are those of single layers, for "deepstack".

_QWEN_PARTS = ("norm", "linear_fc1", "linear_fc2")
_QWEN_NAMES = (
    (r"\w*merger_list\.{m}", "merger_{m}"),
    (r"blocks\.{n}", "blocks_{n}"),
    (r"pos_embed\.weight", "pos_embed_interpolate.pos_embed"),
    (r"attn\.qkv", "attn.attn.{x}"),
    (r"attn\.proj", "attn.attn.out"),
    (r"mlp\.linear_fc1", "mlp"),
    (r"mlp\.linear_fc2", "mlp_out"),
    ("linear_fc1", "mlp_0"),
    ("linear_fc2", "mlp_2"),
    (r"mlp\.(\d)", r"mlp_\1"),
    (r"norm(\d)", r"ln\1"),
    (r"\bnorm\b", "ln_q"),
    (r"(ln\w*)\.weight", r"\1.scale"),
    (r"\bweight\b", "kernel"),
)


def _qwen(
    kind: str, module: str, merger_list: str = "", *, parts: Sequence[str] = _QWEN_PARTS
) -> _Tower:
    before, norm, first, second = f"{module}visual.", *parts
    block, last = f"{before}blocks.{{n}}.", f"{before}merger."
    table = {
        f"{before}patch_embed.proj.weight": "e c k y x -> k y x c e",
        f"{before}patch_embed.proj.bias": "e -> e",
        f"{before}pos_embed.weight": "t e -> t e",
        **_norm(f"{block}norm1"),
        **_norm(f"{block}norm2"),
        f"{block}attn.qkv.weight": "n (h d) e -> e (n h) d",
        f"{block}attn.qkv.bias": "n (h d) -> (n h) d",
        f"{block}attn.proj.weight": "e (h d) -> h d e",
        f"{block}attn.proj.bias": "e -> e",
        **_linear(f"{block}mlp.linear_fc1", "e", "f"),
        **_linear(f"{block}mlp.linear_fc2", "f", "e"),
        **_norm(last + norm),
        **_linear(last + first, "w", "z"),
        **_linear(last + second, "w", "o"),
    }
    if merger_list:
        deep = f"{before}{merger_list}.{{m}}."
        table |= {
            **_norm(deep + norm, "w"),
            **_linear(deep + first, "w", "z"),
            **_linear(deep + second, "w", "o"),
        }
    names = (
        (rf"^{re.escape(last)}", f"vision_encoder.{kind}VisionProjector_0.merger."),
        (rf"^{re.escape(before)}", f"vision_encoder.{kind}VisionEncoder_0."),
        *_QWEN_NAMES,
    )
    sizes = _deep_sizes if merger_list else _merged_sizes
    return _Tower(table, names, ((module, "visual.pos_embed.weight"),), sizes)


def _merged_sizes(read: Section, dims: Dims) -> dict[str, int]:
    sizes = _block_sizes(read, "depth", "num_heads")
    patch = read.integer("patch_size", bounds=(1, _MOST_PIXELS))
    merged = sizes["e"] * read.integer("spatial_merge_size", 2, bounds=(1, _MOST_PIXELS)) ** 2
    if read.get("deepstack_visual_indexes") and dims.family == "qwen3_5_moe":
        found = read.get("deepstack_visual_indexes")
        read.raise_error("deepstack_visual_indexes", f"none, as in {dims.family}", found)
    return sizes | {
        "c": read.integer("in_channels", 3, bounds=_EXTENTS),
        "k": read.integer("temporal_patch_size", 2, bounds=_EXTENTS),
        "y": patch,
        "x": patch,
        "t": read.integer("num_position_embeddings", bounds=_EXTENTS),
        "w": merged,
        "z": merged,
        "o": read.integer("out_hidden_size", bounds=_EXTENTS),
    }


def _deep_sizes(read: Section, dims: Dims) -> dict[str, int]:
    sizes = _merged_sizes(read, dims)
    key = read.need("deepstack_visual_indexes")
    return sizes | {"{m}": len(read.integers(key, bounds=(0, sizes["{n}"] - 1)))}


_TOWERS: Mapping[str, Mapping[str, _Tower]] = {
    "maxtext": {
        "gemma3": _GEMMA3_MAXTEXT,
        "llama4": _LLAMA4_MAXTEXT,
        "gemma4": _GEMMA4_MAXTEXT,
        "qwen3_vl": _qwen("Qwen3VL", "model.", "deepstack_merger_list"),
        "qwen3_vl_moe": _qwen("Qwen3VL", "model.", "deepstack_merger_list"),
        "qwen3_omni_moe": _qwen(
            "Qwen3OmniMoe", "thinker.", "merger_list", parts=("ln_q", "mlp.0", "mlp.2")
        ),
        "qwen3_5_moe": _qwen("Qwen3_5Moe", "model."),
    },
    "tunix": {"gemma3": _GEMMA3_TUNIX},
}
VISION: dict[str, tuple[str, ...]] = {side: tuple(towers) for side, towers in _TOWERS.items()}
"""The model sides that have vision models, and of which families."""
