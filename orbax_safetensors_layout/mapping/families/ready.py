"""The public functions: a mapping for a model, from its configuration."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping as Dict, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, get_args, get_type_hints

from orbax_safetensors_layout.catalog import Catalog, nearest_names
from orbax_safetensors_layout.errors import CheckpointNotFoundError, MappingError, listed
from orbax_safetensors_layout.format import short_repr

from ..dequantizing.tensor_names import is_of_activations, patterns_to_ignore
from ..expr.expression import tensor
from ..expr.values import as_dtype
from ..matching import rule
from ..rules import Mapping
from . import maxtext, plain, tunix
from .architectures import FAMILIES
from .build import MappingBuilder
from .config import (
    QUANTIZATION_KEYS,
    SIZES,
    Config,
    count_stored,
    find_prefix,
    read_config,
    stored_names,
    stored_shape,
)
from .dims import Dims, dims_of, is_tied, quantized_by
from .steps import Tree
from .tensors import head_name
from .vision import with_vision
from .weight_format import OtherFormatError


class _ModelSide(NamedTuple):
    """A model side; `scan`, `scan_axis` and `root` are the defaults of `Options`."""

    tree: Callable[[Dims], Tree]
    families: tuple[str, ...]
    scan: bool | None  # None where there are no stacked layers
    scan_axis: int
    root: str


_TARGETS = {
    "plain": _ModelSide(plain.tree, FAMILIES, scan=True, scan_axis=0, root=""),
    # `scan_layers` and `param_scan_axis` of `configs/base.yml`, maxtext 0.2.5.
    "maxtext": _ModelSide(maxtext.tree, maxtext.FAMILIES, scan=True, scan_axis=1, root="params"),
    "tunix": _ModelSide(tunix.tree, tunix.FAMILIES, scan=None, scan_axis=0, root=""),
}

TARGETS: dict[str, tuple[str, ...]] = {name: side.families for name, side in _TARGETS.items()}
"""The model sides, and the families that each has."""

_FAMILY_OF = {family: family for family in FAMILIES} | {
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "kimi_k2": "deepseek_v3",
    "llama4_text": "llama4",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_omni_moe_text": "qwen3_omni_moe",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}


class Options(TypedDict, total=False):
    """Options of a model's mapping; all may be left out.

    Attributes:
        target: The model side: `plain` (the tree of `docs/families.md`), `maxtext` or `tunix`.
        scan: Whether layers are stacked into one leaf: `scan_layers` of MaxText. By default they
            are, but for `tunix`, which has no such models.
        scan_axis: The axis that layers are stacked along, `param_scan_axis` of MaxText: 1 there,
            else 0.
        dtype: Dtype that computed values (MaxText's scaled queries, Gemma's norms and embedding
            there, dequantised weights) are rounded to. By default they are float32, and dequantised
            ones bfloat16. It does not affect leaves that hold the checkpoint's values.
        vocab_size: Rows of the model's embedding, if not those of the checkpoint: added rows hold
            zeros, and a smaller number leaves the last ones out.
        untie: Give a model with tied embeddings an output kernel of its own: that of the files, or
            where they have none the embedding.
        prefix: Prefix of the embedding (`embed_tokens.weight`) in the checkpoint's names. By
            default that of the folder's names, else the family's, mostly `model.`.
        root: The name of the tree that holds the leaves: `params` for MaxText, else none.
        model_type: The `model_type` of a configuration that is another's by name: a family's
            function then takes it. By default it takes its own, and configurations without any.
        quantized: `decode` weights, or `keep` the tensors that they are stored as: these then have
            their own names and shapes, stacked over layers and experts. Only for `plain`.
        vision: Whether the leaves of the vision encoder and of its projector are part of the tree,
            for the families of `VISION`. By default the files' are ignored.
    """

    target: Literal["plain", "maxtext", "tunix"]
    scan: bool | None
    scan_axis: int | None
    dtype: str | None
    vocab_size: int | None
    untie: bool | None
    prefix: str | None
    root: str | None
    model_type: str | None
    quantized: Literal["decode", "keep"]
    vision: bool | None


def mapping(config: Config, **options: Unpack[Options]) -> Mapping:
    """Return a ready mapping for the model of a Hugging Face checkpoint.

    Args:
        config: The checkpoint's folder, its `config.json`, or the content of that as a dict;
            `model_type` chooses the family.
        **options: See docs/families.md, "Options".

    Raises:
        MappingError: There is no ready mapping for the model, or a value is missing.
        CheckpointNotFoundError: There is no configuration at the path.

    Examples:
        >>> config = {
        ...     "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16,
        ...     "num_attention_heads": 2, "num_key_value_heads": 1,
        ... }
        >>> maxtext = mapping(config, target="maxtext")
        >>> maxtext.rules[4]
        rule('params.decoder.layers.post_self_attention_layer_norm.scale',
            stack(tensor('model.layers.{i}.post_attention_layernorm.weight'), over='i', axis=1,
            indices=[0, 1]))
    """
    return _mapping_of(None, config, options)


class _Family(Protocol):
    def __call__(self, config: Config, **options: Unpack[Options]) -> Mapping: ...


def family_mapping(family: str, models: str) -> _Family:
    """Return the public function of a family; `models` is for its docstring."""

    def make(config: Config, **options: Unpack[Options]) -> Mapping:
        return _mapping_of(family, config, options)

    make.__name__ = make.__qualname__ = family
    make.__doc__ = f"Return a mapping for {models}; see `mapping` and `Options`."
    return make


def _mapping_of(family: str | None, config: Config, options: Options) -> Mapping:
    """Return the mapping of a family, by default that of the configuration's `model_type`."""
    parsed: Any = _read(config) if isinstance(config, str | os.PathLike) else config
    if not isinstance(parsed, Dict):
        what = "a mapping needs a model's configuration"
        expected = "a checkpoint's folder, its config.json, or what that holds as a dict"
        raise MappingError(what, expected=expected, found=short_repr(parsed))
    if family is None:
        family = _family_of(parsed)
    _check_options(options)
    side = _TARGETS[target := options.get("target", "plain")]
    if family not in side.families:
        expected = f"one of {', '.join(side.families)}"
        raise MappingError(f"no ready mapping from {family} to {target}", expected=expected)
    parsed = _language_part(parsed)
    _check_type(family, parsed, options.get("model_type"))
    names, source = stored_names(config), None
    if names and options.get("quantized") != "keep":
        source = _decoded(family, config, parsed, options)
    dims, builder = _dims_and_builder(family, config, parsed, options, names, source)
    tree = side.tree(dims)
    if not names:
        builder.check_peers(tree)
    elif not builder.keep and not builder.has_own_format(tree, {*names}):
        source = _dequantized(config, options)
        dims, builder = _dims_and_builder(family, config, parsed, options, names, source)
        tree = side.tree(dims)
    names = names if source is None else source.leaf_names(names)
    if options.get("vision"):
        tree = with_vision(tree, target, dims, parsed, names)
    if not tree.scans:
        if options.get("scan"):
            raise MappingError(f"scan=True: {target} has no such {family} with stacked layers")
        builder = dataclasses.replace(builder, scan=False)
    mapping = builder.build(tree)
    _check_names(builder, names, mapping)
    return mapping if source is None else mapping.over(source)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return read_config(path)
    except CheckpointNotFoundError as error:
        families = nearest_names(os.path.basename(os.fsdecode(path)), FAMILIES, "families")
        own = (
            "Give a model's folder, its config.json, or what that holds as a dict; families are"
            " functions that take it, as osl.families.llama(folder)."
        )
        error.hint = " ".join(filter(None, (error.hint, own, families)))
        raise


def _dims_and_builder(
    family: str,
    config: Config,
    parsed: Dict[str, Any],
    options: Options,
    names: Sequence[str],
    source: Mapping | None,
) -> tuple[Dims, MappingBuilder]:
    """Return those of a configuration, or of the plain tensors that a source makes of a folder."""
    shape_of = functools.partial(stored_shape, config)
    if source is not None:
        parsed = _without_quantization(parsed)
        names, shape_of = source.leaf_names(names), functools.partial(_made_shape, source, config)
    dims = dims_of(family, parsed, names, shape_of)
    builder = _builder(dims, names, options.get("target", "plain"), options)
    _check_counts(dims, names, f"{builder.prefix}layers.")
    return dims, builder


def _decoded(
    family: str, config: Config, parsed: Dict[str, Any], options: Options
) -> Mapping | None:
    """Return what makes plain tensors of a folder's quantised ones, if the family's rules do not.

    Those need no headers: names and shapes follow from the configuration.
    """
    from ..dequantizing.dequantized import configured_quantization

    assert isinstance(config, str | os.PathLike)
    with Catalog.open(config) as catalog:
        configured = configured_quantization(catalog)
    if not configured:
        return None
    try:
        if quantized_by(family, parsed) is not None:
            return None
    except OtherFormatError:
        pass
    return _dequantized(config, options)


def _dequantized(config: Config, options: Options) -> Mapping:
    from ..dequantizing.dequantized import dequantized

    assert isinstance(config, str | os.PathLike)
    return dequantized(config, dtype=options.get("dtype") or "bfloat16")


def _without_quantization(config: Dict[str, Any]) -> dict[str, Any]:
    parts = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    inner = parts.get("text_config")
    return parts | ({"text_config": _without_quantization(inner)} if inner else {})


def _made_shape(source: Mapping, config: Config, name: str) -> tuple[int, ...]:
    alone = Mapping([rule(name, tensor(name))], strict=False).over(source)
    return alone.leaf_facts(os.fspath(config))[name].shape  # type: ignore[arg-type]


def _language_part(config: Dict[str, Any]) -> Dict[str, Any]:
    """The configuration of the thinker of a Qwen 3 Omni, any other as it is."""
    thinker = config.get("thinker_config")
    if not isinstance(thinker, Dict):
        return config
    return {**thinker, "quantization_config": config.get("quantization_config")}


def has_tied_head(config: Dict[str, Any], *, unknown: bool = False) -> bool:
    """Whether a configuration of any model ties the output head to the embedding.

    `unknown` is the default of a type that is not known.
    """
    parsed = _language_part(config)
    inner = parsed.get("text_config")
    kind = (inner if isinstance(inner, Dict) else parsed).get("model_type")
    family = _FAMILY_OF.get(kind) if isinstance(kind, str) else None
    if family is None and kind is not None:
        parsed = {"tie_word_embeddings": unknown, **parsed}
    return is_tied(parsed, family)


def _check_options(options: Dict[str, Any]) -> None:
    """Refuses options that are not there, and values of other types than `Options` says."""
    types = get_type_hints(Options)
    for name, value in options.items():
        if name not in types:
            raise TypeError(f"unknown option {name!r}; expected one of {listed(types)}")
        choices = get_args(types[name])
        kind = type(value.item() if getattr(value, "ndim", None) == 0 else value)
        if name != "dtype" and repr(value) not in map(repr, choices) and kind not in choices:
            expected = str(types[name]).replace("typing.Literal", "one of ")
            raise MappingError(f"{name}={short_repr(value)} must be {expected}")


def _family_of(config: Dict[str, Any]) -> str:
    model_type, inner = config.get("model_type"), _inner_type(config)
    if isinstance(model_type, str) and model_type in _FAMILY_OF:
        return _FAMILY_OF[model_type]
    shown = short_repr(model_type)
    similar = _similar_families(model_type) if isinstance(model_type, str) else []
    calls = " or ".join(f"osl.families.{name}(config, model_type={shown})" for name in similar)
    hint = (
        "If the model is one of these by another name, call that family's function of"
        f" osl.families{calls and f': nearest by name are {calls}'}; else write an osl.Mapping."
    )
    if isinstance(inner, str) and inner in _FAMILY_OF:
        call = f"osl.families.{_FAMILY_OF[inner]}(config)"
        hint = f"Its language model is {inner!r}: {call} takes that part of it."
    raise MappingError(
        f"there is no ready mapping for model_type {shown}",
        expected=f"one of {', '.join(sorted(_FAMILY_OF))}",
        hint=hint,
    )


def _inner_type(config: Dict[str, Any]) -> object:
    """The `model_type` of a configuration's language model, where it is one of several."""
    inner = config.get("text_config")
    return inner.get("model_type") if isinstance(inner, Dict) else None


def _similar_families(model_type: str) -> list[str]:
    """Return the three families with the most similar names, however far they are."""
    match = difflib.SequenceMatcher(b=model_type[:80].lower(), autojunk=False)

    def likeness(name: str) -> tuple[float, str]:
        match.set_seq1(name)
        return match.ratio(), name  # of equal ones the latest

    names = sorted(_FAMILY_OF, key=likeness, reverse=True)
    return list(dict.fromkeys(_FAMILY_OF[name] for name in names))[:3]


def _check_type(family: str, config: Dict[str, object], said: str | None) -> None:
    """Refuses another type than the caller names: models of equal names may compute otherwise."""
    kind = _inner_type(config)
    kind = config.get("model_type") if kind is None else kind
    own = [name for name, of in _FAMILY_OF.items() if of == family]
    if kind != said if said is not None else kind is not None and kind not in own:
        shown = short_repr(kind)
        raise MappingError(
            f"a mapping for {family} is asked for, but the configuration's model_type is {shown}",
            expected=" or ".join(own) if said is None else short_repr(said),
            hint="Models of other types may have the same tensors and compute something else with"
            f" them. If this one is a {family} by another name, say so:"
            f" osl.families.{family}(config, model_type={shown}).",
        )


def _check_counts(dims: Dims, names: Sequence[str], before: str) -> None:
    """Refuses more layers or experts than files have, before anything is built for each of them."""
    layers, experts = count_stored(names, before), count_stored(names, ".experts.")
    for what, said, stored in (("layers", dims.layers, layers), ("experts", dims.experts, experts)):
        if stored and said > stored:
            raise MappingError(
                f"the configuration and the files disagree on the number of {what}",
                expected=f"{said:,}, as the configuration says",
                found=f"{stored:,} in the names of the files' tensors",
                hint="Take the config.json that belongs to these files, or complete them.",
            )


def _builder(dims: Dims, names: Sequence[str], target: str, options: Options) -> MappingBuilder:
    side, scan, axis = _TARGETS[target], options.get("scan"), options.get("scan_axis")
    if scan and side.scan is None:
        raise MappingError(f"scan=True: {target} has no models with stacked layers")
    if axis is not None and axis < 0:
        raise MappingError(f"scan_axis={axis} must be 0 or more")
    vocab = options.get("vocab_size")
    if vocab is not None and not SIZES[0] <= vocab <= SIZES[1]:
        raise MappingError(f"vocab_size={vocab} must be in {SIZES[0]:,}..{SIZES[1]:,}")
    quantized = options.get("quantized", "decode")
    if quantized == "keep" and target != "plain":
        raise MappingError(f"quantized='keep': {target} has no quantised leaves of that kind")
    dtype, root = options.get("dtype"), options.get("root")
    root = side.root if root is None else root
    architecture = dims.architecture
    default = architecture.prefix if dims.multimodal else architecture.root
    prefixes = (options.get("prefix"), find_prefix(names, architecture.embedding), default)
    prefix = next(prefix for prefix in prefixes if prefix is not None)
    stored = () if dims.quantized is None else {*names}
    spare = patterns_to_ignore(name for name in stored if is_of_activations(name, stored))
    return MappingBuilder(
        dims=dims,
        scan=bool(side.scan) if scan is None else scan,
        scan_axis=side.scan_axis if axis is None else axis,
        dtype=None if dtype is None else as_dtype(dtype).name,
        vocab_size=dims.vocab if vocab is None else vocab,
        untie=bool(options.get("untie")),
        prefix=prefix,
        root=f"{root}." if root else "",
        keep=quantized == "keep",
        head=dims.tied or _has_head(dims, names, prefix),
        extra=not names
        or count_stored(names, f"{prefix}layers.") > dims.layers
        or any(name.startswith("mtp.") for name in names),
        spare=tuple(spare),
    )


def _has_head(dims: Dims, names: Sequence[str], prefix: str) -> bool:
    """Whether an untied model has an output kernel."""
    return not dims.headless or head_name(prefix, dims.architecture.head) in names


def _check_names(builder: MappingBuilder, names: Sequence[str], mapping: Mapping) -> None:
    """Refuses files of another form, or with another head, than that of a family's models."""
    dims, prefix = builder.dims, builder.prefix
    joined = (name for name in names if name.endswith(".experts.gate_up_proj"))
    first = next((name for name in joined if not mapping.leaves_out(name)), None)
    if first is not None and not mapping.match([first]).taken():
        raise MappingError(
            "the experts of a layer are one tensor, as transformers 5 has them in memory and saves"
            " them with save_original_format=False",
            tensor=first,
            expected="tensors as models of this family are published",
            hint="Open it with transformers, and save a copy: copy = type(model)(model.config);"
            " copy.load_state_dict(model.state_dict(), assign=True); copy.save_pretrained(FOLDER).",
        )
    head = head_name(prefix, dims.architecture.head)
    if head in names or prefix + dims.architecture.embedding not in names:
        return
    root, dot, _ = prefix.partition(".")
    outside = (name for name in names if dot and not name.startswith(root + dot))
    others = [name for name in outside if not mapping.leaves_out(name)]
    if others and (others := [*{*others}.difference(mapping.match(names).taken())]):
        raise MappingError(
            "the model has another head than the output kernel of a language model",
            tensor=others[0],
            expected=repr(head),
            found=listed(map(repr, others)),
            hint='The rules of osl.families.mapping({**config, "architectures": ["LlamaModel"]},'
            f" prefix={prefix!r}) take the model without a head: add rules for this one.",
        )
    if not dims.tied and not dims.headless:
        raise MappingError(
            f"there is no tensor {head!r}, the output kernel of a model that is not tied",
            hint="If the model has none, name a class in config.json that has none, such as"
            ' "architectures": ["LlamaModel"]. If the embedding is to be it, set'
            " tie_word_embeddings to true. Else complete the files.",
        )
