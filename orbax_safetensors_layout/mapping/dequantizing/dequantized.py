"""`dequantized`: a mapping under which a quantised checkpoint is as if it were plain."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping as Dict
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    MappingError,
    SafetensorsLayoutError,
    listed,
)
from orbax_safetensors_layout.format import TensorEntry, short_repr
from orbax_safetensors_layout.options import is_floating
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.storage import join, read_range

from ..casting import RelatedNames
from ..expr.expression import Expr, tensor
from ..expr.values import as_dtype
from ..families.config import QUANTIZATION_KEYS, folder_of, parse_config, read_config
from ..matching import Rule, rule
from ..names import NameTree
from ..quantizing.encoder import joined_name
from ..rules import Mapping
from . import bitsandbytes, float_formats, integer_formats
from .found_weight import (
    INPUT_SCALE,
    OWN_RULES,
    FoundWeight,
    QuantizationSettings,
    WeightScheme,
)
from .grouped_values import grouped
from .tensor_names import is_of_activations, patterns_to_ignore, with_wildcards

_SCHEMES = (*bitsandbytes.SCHEMES, *float_formats.SCHEMES, *integer_formats.SCHEMES)
# What goes with a weight that is not decoded. The last are what AutoAWQ divides activations by,
# where it cannot fold that into the layer before (autoawq 0.2.9: awq/modules/act.py).
_OF_WEIGHTS = re.compile(
    r"(pre_quant_scale|svdquant_lora_[ab]|(^|\.)weight_(scale|zero_point)\w*"
    r"|(^|\.)(act|gelu_impl)\.scales)$"
)
_WORDS = re.compile(r"qweight$|_(blocks|packed)$")
_DECODED_METHODS = re.compile(
    r"compressed-tensors|fp8|fbgemm_fp8|gptq|awq|(intel/)?auto-round|bitsandbytes|modelopt\w*|mxfp4"
)
_OF_QUANTIZATION = re.compile(r"quant(?!izer|ile)")
_WIDE_DTYPE = re.compile(r"(torch\.)?(b?float(16|32)|[bf]f?p?(16|32)|auto)")
_OTHER_FORMATS = {  # that are not decoded, by the last part of a tensor's name
    "comfy_quant": "ComfyUI",
    "scaled_fp8": "ComfyUI",
    "scale_weight": "ComfyUI",
    "SCB": "bitsandbytes, 8 bits",
    "_data": "optimum-quanto",
    "W_q": "HQQ",
}
# Keys of a quantization_config: what is read, what says which modules, of activations and caches,
# and of how values were found or are computed with.
_KEYS = """
    quant_method quant_algo bits w_bit num_bits group_size q_group_size weight_block_size
    config_groups quantized_layers extra_config dynamic checkpoint_format packing_format format
    backend desc_act zero_point transform_config type strategy block_structure symmetric actorder
    ignore exclude_modules modules_to_not_convert modules_to_convert lm_head targets weights
    llm_int8_skip_modules block_name_to_quantize to_quant_block_names quant_block_list
    modules_in_block_to_quantize module_name_preceding_first_block sparsity_config regex_config
    activation_scheme activation_scale_ub kv_cache_scheme kv_cache_quant_algo input_activations
    output_activations act_bits act_data_type act_group_size act_sym act_dynamic static_kv_dtype
    static_attention_dtype fmt scale_fmt sym version meta producer quantization_status
    global_compression_ratio load_in_4bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype
    bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_threshold
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight data_type scale_dtype zp_dtype
    observer observer_kwargs has_zero_point pre_quant_scale awq_block_size run_compressed dequantize
    use_optimized_inference true_sequential static_groups damp_percent damp_auto_increment
    act_group_aware mse pack_dtype quant_type tokenizer dataset batch_size pad_token_id
    max_input_length model_seqlen cache_block_outputs use_cuda_fp16 use_exllama exllama_config
    disable_exllama is_marlin_format model_name_or_path model_file_base_name do_fuse
    fuse_max_seq_len modules_to_fuse autoround_version amp enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps iters lr minmax_lr
    low_gpu_mem_usage low_cpu_mem_usage nsamples seqlen train_bs supported_types provider
    not_use_best_mse dynamic_max_gap use_quant_input
"""
CONFIG = "config.json"
_CONFIGS = (
    (CONFIG, ("quantization_config", "compression_config", "quantization")),
    ("hf_quant_config.json", ("quantization",)),
)
OLDER_CONFIGS = ("quant_config.json", "quantize_config.json")
"""Files of AutoAWQ's and AutoGPTQ's, of before transformers had `quantization_config`."""


class DecodedWeight(NamedTuple):
    """A weight that is found quantised."""

    scheme: WeightScheme
    weight: FoundWeight
    expr: Expr  # of names with wildcards
    parts: tuple[str, ...]


class FoundWeights(NamedTuple):
    """The tensors of a checkpoint, and what is quantised of them."""

    entries: dict[str, TensorEntry]  # of all tensors
    weights: dict[str, DecodedWeight]  # by plain name
    unread: set[str]  # tensors beside them whose content is not needed, one of each pattern
    settings: QuantizationSettings


def dequantized(path: str | os.PathLike[str], *, dtype: Any = "bfloat16") -> Mapping:
    """Return a mapping under which any quantised checkpoint is as if it were plain.

    Each quantised weight is a leaf of its plain name and shape, `[out, in]`; what is not quantised
    is as it is. Names and dtypes of tensors decide what is what, tensor by tensor; the figures of
    `quantization_config` (`config.json`) or `hf_quant_config.json` are taken where these leave
    something open. A process reads the values of its shards and the scales that they need, and
    computes in float32; the result is rounded once. Scales of activations and caches are left out.

    Args:
        path: A safetensors folder or file. Headers are read, and of some formats a few bytes a
            weight.
        dtype: The dtype of weights that are decoded.

    Raises:
        MappingError: A weight is quantised in a way that is not known.
        CheckpointNotFoundError: There is no checkpoint.
        FormatError: A file is malformed.

    Examples:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> folder = tempfile.mkdtemp()
        >>> weights = {
        ...     "up.weight": np.ones((4, 2), np.int8),
        ...     "up.weight_scale": np.ones((4, 1), np.float32),
        ... }
        >>> safetensors.numpy.save_file(weights, f"{folder}/model.safetensors")
        >>> dequantized(folder).leaf_facts(folder)
        {'up.weight': TensorSpec(shape=(4, 2), dtype=dtype(bfloat16))}
    """
    result = as_dtype(dtype)
    if not is_floating(result):
        raise MappingError("dequantized gives floating-point numbers", found=result.name)
    with Catalog.open(path) as catalog, frozen_heap():
        return _mapping(decoded_weights(catalog, result))


def decoding_hint(path: str, name: str) -> str:
    """Return how a tensor that may be codes is decoded, or why it cannot be; empty if it is not."""
    try:
        leaves = dequantized(path).leaf_facts(path)
    except SafetensorsLayoutError as error:
        return f"osl.dequantized does not decode it: {error.message}. {error.hint or ''} ".lstrip()
    if name in leaves and not is_floating(np.dtype(leaves[name].dtype)):
        return ""
    return (
        "Decode it with mapping=osl.dequantized(FOLDER), or MAPPING.over(osl.dequantized(FOLDER));"
        " convert(..., dequantize=) (--dequantize) writes the values. "
    )


def decoded_weights(catalog: Catalog, dtype: np.dtype[Any]) -> FoundWeights:
    """Find the quantised weights of a checkpoint."""
    entries = catalog.all_entries()
    settings = QuantizationSettings(_settings(catalog), _other_format(catalog, entries))
    transforms = settings.values.get("transform_config")
    if settings.format is not None:
        raise MappingError(
            f"the weights are in the format of {settings.format}, which is not decoded",
            file=folder_of(catalog.path),
            hint=OWN_RULES,
        )
    if transforms and transforms != {"config_groups": {}}:
        raise MappingError(
            "weights that go with rotations of what they are multiplied by cannot be decoded",
            file=folder_of(catalog.path),
            found=f"transform_config {str(transforms)[:200]} of {settings.method!r}",
            expected="none",
            hint="Write a rule for each weight that is rotated, with osl.opaque.",
        )
    reads: list[TensorEntry] = []

    @functools.cache
    def read(entry: TensorEntry) -> bytes:
        return read_range(catalog.storage, entry.file, entry.start, entry.nbytes)

    def read_and_note(entry: TensorEntry) -> bytes:
        reads.append(entry)
        return read(entry)

    with_inputs = any(name.endswith(INPUT_SCALE[1:]) for name in entries)
    beside = (INPUT_SCALE,) if with_inputs else ()
    parts_of = {scheme.name: (*scheme.parts, *beside) for scheme in _SCHEMES}
    by_module = settings.varies
    similar: dict[object, Expr] = {}  # of weights of which nothing is read
    weights: dict[str, DecodedWeight] = {}
    unread: set[str] = set()
    for name, entry in entries.items():
        for scheme, plain in _candidates(name, entry):
            parts = [entries.get(joined_name(plain, part)) for part in parts_of[scheme.name]]
            if not scheme.fits(parts):
                continue
            named = with_wildcards(plain)
            weight = FoundWeight(plain, named, entries, settings, dtype.name, read_and_note)
            if plain in weights or (plain in entries and plain != name):
                raise weight.error("there are several weights of this name")
            stored = tuple(part.name for part in parts if part is not None)
            kinds = [part and (part.dtype.code, part.shape) for part in parts]
            likeness = (scheme.name, plain if by_module else named, *kinds)
            expr = similar.get(likeness)
            if expr is None:
                reads.clear()
                expr = _decode(scheme, weight)
                if not reads:
                    similar[likeness] = expr
                used = set(expr.patterns())
                unread.update(part for part in stored if with_wildcards(part) not in used)
            weights[plain] = DecodedWeight(scheme, weight, expr, stored)
            break
    return FoundWeights(entries, weights, unread, settings)


def _decode(scheme: WeightScheme, weight: FoundWeight) -> Expr:
    """Return a weight's values, by which inputs are multiplied that nothing else multiplies."""
    if weight.entry(INPUT_SCALE) is None:
        return scheme.decode(weight)
    if scheme.values or len(weight.shape("")) != 2:
        raise weight.error(f"{scheme.name} with {weight.name_of(INPUT_SCALE)!r} is not known")
    values = scheme.decode(dataclasses.replace(weight, dtype="float32"))
    scale = weight.expr(INPUT_SCALE).reshape(1, -1)
    return grouped(values, (weight.shape("")[0], 1), weight.dtype, {"scale": scale})


def plain_configurations(files: Dict[str, bytes]) -> dict[str, bytes]:
    """Return files of a checkpoint's folder without what they say of quantised weights."""
    plain = dict(files)
    for file, keys in _CONFIGS:
        try:
            config = json.loads(plain.get(file, b""))
        except (ValueError, RecursionError):
            continue
        if not isinstance(config, dict):
            continue
        parts = [part for part in _parts(config) if not part.keys().isdisjoint(keys)]
        for part in parts:
            for key in part.keys() & {*keys}:
                del part[key]
        if parts:
            plain[file] = json.dumps(config, indent=2).encode() + b"\n"
    for name in (_CONFIGS[1][0], *OLDER_CONFIGS):
        plain.pop(name, None)
    return plain


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what may speak of quantised weights: a configuration, or its text model's."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def with_settings(content: bytes, settings: Dict[str, Any], file: str = CONFIG) -> bytes:
    """Return a configuration, which is a JSON object, with these members."""
    return json.dumps({**parse_config(content, file), **settings}, indent=2).encode() + b"\n"


def configured_quantization(catalog: Catalog, *, whole: bool = False) -> dict[str, dict[str, Any]]:
    """Return what the files beside a checkpoint say of its quantisation, by file and key.

    `whole`: with all keys of a file that is about nothing else.
    """
    folder = folder_of(catalog.path)
    configured: dict[str, dict[str, Any]] = {}
    for file, keys in _CONFIGS:
        with contextlib.suppress(CheckpointNotFoundError):
            config = read_config(join(folder, file), storage=catalog.storage)
            settings = {
                key: part[key]
                for part in reversed(_parts(dict(config)))  # the outer one counts
                for key in keys
                if part.get(key)
            }
            if any(isinstance(value, dict) for value in settings.values()):
                configured[file] = dict(config) if whole and file != CONFIG else settings
    return configured


def _settings(catalog: Catalog) -> Dict[str, Any]:
    """Return the configured figures, empty where there are none."""
    for settings in configured_quantization(catalog).values():
        for values in settings.values():
            if isinstance(values, dict):
                return values
    return {}


def _candidates(name: str, entry: TensorEntry) -> Iterator[tuple[WeightScheme, str]]:
    """Yields the schemes that a tensor may have the values of, with its weight's plain name."""
    for scheme in _SCHEMES:
        if entry.dtype.code in scheme.dtypes:
            part = scheme.values
            if not part:
                yield scheme, name
            elif part[0] == "/":
                if name.endswith("." + part[1:]):
                    yield scheme, name.removesuffix(part[1:]) + "weight"
            elif name.endswith(part):
                yield scheme, name.removesuffix(part)


def _other_format(catalog: Catalog, entries: Dict[str, TensorEntry]) -> str | None:
    """Return the format of weights that are not decoded, by what marks it; None where nothing does.

    What a header or a configuration says counts where something may be codes: methods that
    quantise what they load, and weights that were decoded, leave it beside plain floats.
    """
    for name, entry in entries.items():
        module, _, last = name.rpartition(".")
        if last in _OTHER_FORMATS:
            return f"{_OTHER_FORMATS[last]} ({name!r})"
        if last == "scale" and entry.dtype.code == "F8_E8M0" and f"{module}.weight" in entries:
            return f"DeepSeek-V4 ({name!r} in F8_E8M0)"
        if last == "weight" and entry.dtype.code == "U32" and f"{module}.scales" in entries:
            return f"MLX ({name!r} in U32)"
    if not any(_may_be_codes(entry) for entry in entries.values()):
        return None
    for key, text in catalog.metadata().items():
        if "quant" in key.lower() and text.lower() not in ("", "{}", "null", "none", "false"):
            other = "ComfyUI" if key == "_quantization_metadata" else "another writer"
            return f"{other} ({key!r} in the header)"
    config: Dict[str, Any] = {}
    with contextlib.suppress(CheckpointNotFoundError):
        config = read_config(join(folder_of(catalog.path), CONFIG), storage=catalog.storage)
    said = {key: value for part in _parts(dict(config)) for key, value in part.items()}
    quantization, expert = said.get("quantization"), said.get("expert_dtype")
    if isinstance(quantization, dict) and "bits" in quantization:
        return f"MLX ('quantization' in {CONFIG})"
    expert = expert or _settings(catalog).get("expert_dtype")
    if isinstance(expert, str) and not _WIDE_DTYPE.fullmatch(expert):
        return f"DeepSeek-V4 ('expert_dtype' {short_repr(expert)} in {CONFIG})"
    for key, value in said.items():
        if _OF_QUANTIZATION.search(key) and value and key not in QUANTIZATION_KEYS:
            return f"another writer ({key!r} in {CONFIG})"
    return None


def _check_configured(settings: QuantizationSettings) -> None:
    """Refuses methods that are not decoded, and what a configuration says that is not known."""
    method = settings.values.get("quant_method")
    if isinstance(method, str) and not _DECODED_METHODS.fullmatch(method.lower()):
        raise MappingError(
            f"the weights are quantised with {short_repr(method)}, which is not decoded",
            hint=OWN_RULES,
        )
    said, known = [settings.values, *settings.groups()], {*_KEYS.split()}
    unknown = [key for part in said for key, value in part.items() if value and key not in known]
    if unknown:
        raise MappingError(
            f"the quantization_config has {listed(map(repr, unknown))}, of which it is not known"
            " whether stored values depend on it",
            hint="Take it out of the configuration if they do not. " + OWN_RULES,
        )


def _check_accounted(names: Iterable[str], checkpoint: FoundWeights) -> None:
    """Refuses tensors of decoded modules that no scheme explains, and codes of no known scheme."""
    entries, weights, _, settings = checkpoint
    # By what the names of a weight's module, or of its parts, begin with.
    owners = {p.removesuffix("weight") if _is_weight(p) else f"{p}.": p for p in weights}
    modules = {name.rpartition(".")[0] for name in entries}
    related = RelatedNames(
        name
        for name, entry in entries.items()
        if entry.dtype.code != "BOOL" and (entry.dtype.bits <= 8 or entry.dtype.code[0] in "BF")
    )
    for name in names:
        entry, last = entries[name], name.rpartition(".")[2]
        owner = _owner(name, owners, weights)
        if owner is not None and not (last.endswith("bias") and not _may_be_codes(entry)):
            problem = f"no known scheme has {name!r} in {entry.dtype.code} beside it"
        elif _OF_WEIGHTS.search(name):
            problem = f"no known scheme has {name!r}"
        elif _are_codes(entry, settings, related, bool(weights)):
            problem = f"no known scheme has {name!r} in {entry.dtype.code}"
        elif name in modules and not _may_be_codes(entry):  # bytes in the guise of floats
            problem = f"no known scheme has {name!r} in {entry.dtype.code} with parts of its own"
        else:
            continue
        plain = owner or name
        raise FoundWeight(plain, plain, entries, settings, "", lambda _: b"").error(problem)


def _owner(name: str, owners: Dict[str, str], weights: Container[str]) -> str | None:
    """Return the decoded weight whose module a tensor is in, or whose name it begins with."""
    if "." not in name and "" in owners:
        return owners[""]
    ends = [match.end() for match in re.finditer(r"\.", name)]
    for end in ends:
        if name[:end] in owners:
            return owners[name[:end]]
    parts = (
        match.start() for match in re.finditer("_", name) if match.start() >= max(ends, default=0)
    )
    return next((name[:end] for end in parts if name[:end] in weights), None)


def _are_codes(
    entry: TensorEntry, settings: QuantizationSettings, scales: RelatedNames, has_weights: bool
) -> bool:
    """Whether a tensor is taken for codes; `scales` has what may be such."""
    if not _may_be_codes(entry):
        return False
    last, is_matrix = entry.name.rpartition(".")[2], len(entry.shape) > 1
    is_configured = bool(settings.values)
    if entry.dtype.code[0] not in "IU":
        return True
    if is_configured and not has_weights and math.prod(entry.shape) > 1:  # then vectors count, too
        return True
    if entry.dtype.bits <= 8:
        return last.startswith("weight") or (is_matrix and not last.endswith(("bias", "mask")))
    return bool(_WORDS.search(last)) or (
        is_matrix and (is_configured or any(scales.of(entry.name)))
    )


def _is_weight(plain: str) -> bool:
    return plain == "weight" or plain.endswith(".weight")


def _may_be_codes(entry: TensorEntry) -> bool:
    """Whether a dtype is one that quantised values are stored in; indices of buffers are I64."""
    code = entry.dtype.code
    return code not in ("BOOL", "I64") and (entry.dtype.bits <= 8 or code[0] in "IU")


def _mapping(checkpoint: FoundWeights) -> Mapping:
    entries, weights, unread, settings = checkpoint
    taken = {part for weight in weights.values() for part in weight.parts}
    plain = [name for name in entries if name not in taken]
    dropped = [name for name in plain if is_of_activations(name, weights)]
    left = set(dropped)
    kept = {name: tensor(with_wildcards(name)) for name in plain if name not in left}
    _check_accounted(kept, checkpoint)
    if weights:
        _check_configured(settings)
    exprs = kept | {name: weight.expr for name, weight in weights.items()}
    ignore = patterns_to_ignore([*unread, *dropped])

    def literal(name: str) -> Expr:
        if name not in weights:
            return tensor(name)
        scheme, weight = weights[name].scheme, weights[name].weight
        return _decode(scheme, dataclasses.replace(weight, named=weight.plain))

    return Mapping(list(_rules(exprs, literal)), ignore=ignore)


def _rules(exprs: Dict[str, Expr], literal: Callable[[str], Expr]) -> Iterator[Rule]:
    """Yields a rule for all leaves that differ in numbers alone, or one for each of them."""
    by_pattern: dict[str, list[str]] = {}
    for name in exprs:
        by_pattern.setdefault(with_wildcards(name), []).append(name)
    tree = NameTree(exprs)
    for pattern, names in by_pattern.items():
        first = exprs[names[0]]
        is_one = all(exprs[name] is first or exprs[name] == first for name in names[1:])
        if is_one and {name for name, _ in tree.match(pattern)} == set(names):
            yield rule(pattern, first)
        else:
            yield from (rule(name, literal(name)) for name in names)
