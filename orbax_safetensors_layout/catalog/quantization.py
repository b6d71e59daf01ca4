"""Quantised weights: which tensors belong together, and how many parameters they hold.

The names are those that compressed-tensors, GPTQ and AWQ, bitsandbytes, ModelOpt, DeepSeek and
GPT-OSS write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from orbax_safetensors_layout.format import TensorEntry, short_repr

_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_DEFAULT_BITS, _WORD = 4, 32


class _Scheme(NamedTuple):
    name: str
    weight: str  # suffix of the name of the tensor with the values
    dtypes: tuple[str, ...]  # codes of that tensor
    beside: tuple[str, ...]  # suffixes of tensors without parameters of their own; `*` is any text
    bits: int | None  # of a value; None where the configuration and shapes say


_ACTIVATIONS = "*_global_scale"
# The first name beside the weight must exist; the first scheme that fits applies.
_SCHEMES = (
    _Scheme("FP8 with block scales", "weight", _FLOAT8, ("weight_scale_inv",), 8),
    _Scheme("FP8 with block scales", "_proj", _FLOAT8, ("_proj_scale_inv",), 8),  # fused experts
    _Scheme("MXFP4", "_blocks", ("U8",), ("_scales",), 4),
    _Scheme(
        "NVFP4",
        "weight",
        ("U8",),
        ("weight_scale_2", "weight_scale", "input_scale", "k_scale", "v_scale", "pre_quant_scale"),
        4,
    ),
    _Scheme(
        "NVFP4", "weight_packed", ("U8",), ("weight_global_scale", "weight_scale", _ACTIVATIONS), 4
    ),
    _Scheme("MXFP4", "weight_packed", ("U8",), ("weight_scale",), 4),
    _Scheme(
        "packed integers",
        "weight_packed",
        ("I32",),
        ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", _ACTIVATIONS),
        None,
    ),
    _Scheme(
        "FP8 or INT8",
        "weight",
        (*_FLOAT8, "I8"),
        ("weight_scale", "weight_zero_point", "input_scale", "k_scale", "v_scale"),
        8,
    ),
    _Scheme("FP8 or INT8", "_proj", (*_FLOAT8, "I8"), ("_proj_scale", "_proj_input_scale"), 8),
    _Scheme("GPTQ or AWQ", "qweight", ("I32",), ("qzeros", "scales", "g_idx"), None),
    _Scheme(
        "bitsandbytes 4 bit",
        "weight",
        ("U8", "I8", "BF16", "F16", "F32"),
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
    figures = _Figures.of(settings)
    all_sure = True
    weights: dict[str, int] = {}
    parameters: dict[str, int] = {}
    stems: dict[str, list[_Scheme]] = {}
    for name, entry in entries.items():
        for scheme in _SCHEMES:
            stem = name.removesuffix(scheme.weight)
            is_stored = stem != name and entry.dtype.code in scheme.dtypes
            if is_stored and stem + scheme.beside[0] in entries:
                weights[scheme.name] = weights.get(scheme.name, 0) + 1
                count, is_sure = math.prod(entry.shape) * entry.dtype.bits, True
                if scheme.bits is None:
                    count, is_sure = figures.parameters(entry, stem, entries)
                parameters[name] = count // (scheme.bits or 1)
                all_sure &= is_sure
                stems.setdefault(stem, []).append(scheme)
                break
    problem = None if all_sure else figures.problem
    if stems:
        parameters |= dict.fromkeys(_beside(entries, stems), 0)
    method = _method(settings)
    if configured and configured is not settings:
        problem = f"its quantization_config is {short_repr(configured)}, not an object"
    if not (method or weights or problem):
        return None
    return QuantizedWeights(method, weights, parameters, problem)


class _Figures(NamedTuple):
    """The configured bits and groups of packed integers."""

    said: list[object]  # numbers of bits, as they are configured
    groups: list[tuple[int, int | None]]  # possible ones, with the values that share a scale

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        given = [(settings.get("bits", settings.get("w_bit")), settings.get("group_size"))]
        groups = settings.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():  # compressed-tensors
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                given.append((weights.get("num_bits"), weights.get("group_size")))
        said = [bits for bits, _ in given if bits is not None]
        return cls(
            [bits for n, bits in enumerate(said) if bits not in said[:n]],
            [
                (bits, size if type(size) is int and size > 0 else None)
                for bits, size in given
                if type(bits) is int and 1 <= bits <= 8
            ],
        )

    @property
    def problem(self) -> str | None:
        said = self.said[0] if len(self.said) == 1 else self.said
        text = f"its configuration says {short_repr(said)} bits a weight; {_DEFAULT_BITS} are"
        return f"{text} assumed" if self.said else None

    def parameters(
        self, words: TensorEntry, stem: str, entries: Mapping[str, TensorEntry]
    ) -> tuple[int, bool]:
        """Return how many values the words of a weight hold, and whether shapes or bits say so."""
        rows, length = math.prod(words.shape[:-1]), math.prod(words.shape[-1:])
        scales, index = (entries.get(stem + part) for part in ("scales", "g_idx"))
        if scales is not None:  # of GPTQ or AWQ, whose rows are inputs
            outputs = math.prod(scales.shape[-1:])
            if outputs != length:  # AWQ packs outputs
                return rows * outputs, True
            if index is not None and index.shape != (0,):
                return math.prod(index.shape) * outputs, True
            rows, length = outputs, rows
        scale = entries.get(stem + "weight_scale")
        groups = 0 if scale is None else math.prod(scale.shape[-1:])
        columns = {
            size * groups
            for bits, size in self.groups
            if size and -(-size * groups * bits // _WORD) == length
        }
        columns |= {
            length * _WORD // bits for bits, size in self.groups if not size and groups == 1
        }
        columns = columns or {length * _WORD // bits for bits, _ in self.groups}
        is_sure = len(columns) == 1
        return rows * (columns.pop() if is_sure else length * _WORD // _DEFAULT_BITS), is_sure


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
