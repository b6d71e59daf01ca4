"""Quantised weights: which tensors belong together, and how many parameters they hold.

The names are those that compressed-tensors, GPTQ and AWQ, bitsandbytes, ModelOpt, DeepSeek and
GPT-OSS write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.format import TensorEntry, short_repr

_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_DEFAULT_BITS = 4


class _Scheme(NamedTuple):
    name: str
    weight: str  # suffix of the name of the tensor with the values
    dtypes: tuple[str, ...]  # codes of that tensor
    beside: tuple[str, ...]  # suffixes of tensors without parameters of their own; `*` is any text
    bits: int | None  # of a value; None where the configuration says


# The first name beside the weight must exist; the first scheme that fits applies.
_SCHEMES = (
    _Scheme("FP8 with block scales", "weight", _FLOAT8, ("weight_scale_inv",), 8),
    _Scheme("MXFP4", "_blocks", ("U8",), ("_scales",), 4),
    _Scheme(
        "NVFP4",
        "weight",
        ("U8",),
        ("weight_scale_2", "weight_scale", "input_scale", "k_scale", "v_scale"),
        4,
    ),
    _Scheme(
        "packed integers",
        "weight_packed",
        ("I32", "U8"),
        ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "*_global_scale"),
        None,
    ),
    _Scheme(
        "FP8 or INT8",
        "weight",
        (*_FLOAT8, "I8"),
        ("weight_scale", "weight_zero_point", "input_scale", "k_scale", "v_scale"),
        8,
    ),
    _Scheme("GPTQ or AWQ", "qweight", ("I32",), ("qzeros", "scales", "g_idx"), None),
    _Scheme(
        "bitsandbytes 4 bit",
        "weight",
        ("U8",),
        ("weight.absmax", "weight.quant_map", "weight.nested_*", "weight.quant_state.*"),
        4,
    ),
)


class QuantizedWeights(NamedTuple):
    """The quantisation of a checkpoint."""

    method: str | None  # in the model's configuration, as `fp8`, with its figures
    weights: dict[str, int]  # number of tensors of each scheme, by its name
    parameters: dict[str, int]  # of tensors whose elements are not one parameter each
    problem: str | None = None  # a mistake in the configuration, and what is assumed


def find_quantization(
    entries: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> QuantizedWeights | None:
    """Finds quantised tensors by their names and dtypes; return None where none is."""
    configured = config.get("quantization_config") or config.get("compression_config")
    settings: Mapping[str, Any] = configured if isinstance(configured, dict) else {}
    bits, problem = _bits(settings)
    weights: dict[str, int] = {}
    parameters: dict[str, int] = {}
    stems: dict[str, list[_Scheme]] = {}
    for name, entry in entries.items():
        for scheme in _SCHEMES:
            stem = name.removesuffix(scheme.weight)
            is_stored = stem != name and entry.dtype.code in scheme.dtypes
            if is_stored and stem + scheme.beside[0] in entries:
                weights[scheme.name] = weights.get(scheme.name, 0) + 1
                nbits = math.prod(entry.shape) * entry.dtype.bits
                parameters[name] = nbits // (scheme.bits or bits)
                stems.setdefault(stem, []).append(scheme)
                break
    if stems:
        parameters |= dict.fromkeys(_beside(entries, stems), 0)
    method = _method(settings)
    if all(scheme.bits for schemes in stems.values() for scheme in schemes):
        problem = None
    if configured and configured is not settings:
        problem = f"its quantization_config is {short_repr(configured)}, not an object"
    if not (method or weights or problem):
        return None
    return QuantizedWeights(method, weights, parameters, problem)


def _bits(settings: Mapping[str, Any]) -> tuple[int, str | None]:
    """Return the bits of a packed value, and what is wrong with the configured number."""
    bits = settings.get("bits", settings.get("w_bit"))
    groups = settings.get("config_groups")
    if bits is None and isinstance(groups, dict):  # compressed-tensors
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)]
        counts = [w.get("num_bits") for w in weights if isinstance(w, dict)]
        bits = counts[0] if counts and all(count == counts[0] for count in counts) else counts
    if bits is None:
        return _DEFAULT_BITS, None
    if type(bits) is int and bits in (2, 3, 4, 8):
        return bits, None
    text = f"its configuration says {short_repr(bits)} bits a weight; {_DEFAULT_BITS} are assumed"
    return _DEFAULT_BITS, text


def _beside(
    entries: Mapping[str, TensorEntry], stems: Mapping[str, Sequence[_Scheme]]
) -> list[str]:
    endings = {end for schemes in stems.values() for scheme in schemes for end in scheme.beside}
    exact = tuple(ending for ending in endings if "*" not in ending)
    globs = [ending.partition("*") for ending in endings if "*" in ending]

    def is_beside(name: str) -> bool:
        if any(name.endswith(end) and name.removesuffix(end) in stems for end in exact):
            return True
        for head, _, tail in globs:
            stem = name.partition(head)[0] if head else name.rpartition(".")[0] + "."
            if stem in stems and name.endswith(tail):
                return True
        return False

    return [name for name in entries if is_beside(name)]


def _method(settings: Mapping[str, Any]) -> str | None:
    method = settings.get("quant_method") or settings.get("quant_algo")
    if not isinstance(method, str):
        return None
    keys = ("fmt", "format", "bits", "group_size", "weight_block_size", "load_in_4bit")
    given = {key: settings[key] for key in keys if settings.get(key)}
    details = [f"{k}={v[:80] if isinstance(v, str) else short_repr(v)}" for k, v in given.items()]
    return f"{method[:80]} ({', '.join(details)})" if details else method[:80]
