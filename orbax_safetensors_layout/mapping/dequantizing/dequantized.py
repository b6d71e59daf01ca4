"""`dequantized`: a mapping under which a quantised checkpoint is as if it were plain."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping as Dict
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import CheckpointNotFoundError, MappingError
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.options import is_floating
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.storage import join, read_range

from ..expr.expression import Expr, tensor
from ..expr.values import as_dtype
from ..families.config import folder_of, parse_config, read_config
from ..matching import Rule, rule
from ..names import NameTree
from ..quantizing.encoder import joined_name
from ..rules import Mapping
from . import bitsandbytes, float_formats, integer_formats
from .found_weight import INPUT_SCALE, FoundWeight, QuantizationSettings, WeightScheme
from .grouped_values import grouped
from .tensor_names import is_of_activations, patterns_to_ignore, with_wildcards

_SCHEMES = (*bitsandbytes.SCHEMES, *float_formats.SCHEMES, *integer_formats.SCHEMES)
# Beside quantised values: what they are multiplied by, counted from, or stand for.
_OF_GROUPS = re.compile(r"(^|\.)(weight_|_)?(scales?|zeros?|zero_point|absmax|codebooks?|SCB)$")
# Which weights go with. The last are what AutoAWQ divides activations by, where it cannot fold that
# into the layer before (autoawq 0.2.9: awq/modules/act.py).
_OF_INPUTS = re.compile(r"(pre_quant_scale|svdquant_lora_[ab]|(^|\.)(act|gelu_impl)\.scales)$")
CONFIG = "config.json"
_CONFIGS = (
    (CONFIG, ("quantization_config", "compression_config")),
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


def decoded_weights(catalog: Catalog, dtype: np.dtype[Any]) -> FoundWeights:
    """Find the quantised weights of a checkpoint."""
    entries = catalog.all_entries()
    settings = QuantizationSettings(_settings(catalog))
    transforms = settings.values.get("transform_config")
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
    by_module = len(settings.blocks()) > 1
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


def _check_plain(names: Iterable[str], checkpoint: FoundWeights) -> None:
    """Refuses tensors that look like quantised values of no known scheme."""
    entries, weights, _, settings = checkpoint
    packed = [name for name in names if _may_be_packed(entries[name])]
    scaled = {name.rpartition(".")[0] for name in entries if packed and _OF_GROUPS.search(name)}
    for name in packed:
        entry, (module, _, last) = entries[name], name.rpartition(".")
        is_weight = last in ("qweight", "weight_packed") or last.endswith(("_blocks", "_packed"))
        is_weight |= last == "weight" and entry.dtype.bits <= 8
        if settings.values:  # then vectors count, too, where nothing else is quantised
            is_weight |= len(entry.shape) > 1 or (not weights and math.prod(entry.shape) > 1)
        if is_weight or (len(entry.shape) > 1 and module in scaled):
            plain = name.removesuffix(last) + "weight"
            weight = FoundWeight(plain, plain, entries, settings, "float32", lambda _: b"")
            raise weight.error(f"no known scheme has {name!r} in {entry.dtype.code}")
    for name in filter(_OF_INPUTS.search, names):
        weight = FoundWeight(
            name.rpartition(".")[0] + ".weight", "", entries, settings, "", lambda _: b""
        )
        raise weight.error(f"no known scheme has {name!r}")


def _may_be_packed(entry: TensorEntry) -> bool:
    """Whether a dtype is one that quantised values are stored in; indices of buffers are I64."""
    code = entry.dtype.code
    return code not in ("BOOL", "I64") and (entry.dtype.bits <= 8 or code[0] in "IU")


def _mapping(checkpoint: FoundWeights) -> Mapping:
    entries, weights, unread, _ = checkpoint
    taken = {part for weight in weights.values() for part in weight.parts}
    plain = [name for name in entries if name not in taken]
    dropped = [name for name in plain if is_of_activations(name, weights)]
    left = set(dropped)
    kept = {name: tensor(with_wildcards(name)) for name in plain if name not in left}
    _check_plain(kept, checkpoint)
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
