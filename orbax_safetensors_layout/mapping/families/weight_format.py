"""Resolves a model's `quantization_config` to how its checkpoints store weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Set
from typing import Literal

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

from ..expr.choices import Beside
from ..expr.expression import Expr, tensor
from ..expr.quantized import dequantize_fp8, dequantize_int4, dequantize_mxfp4
from ..regexes import compiled_regex
from .config import SIZES, Section
from .steps import TensorStep

_MX_BLOCK = (1, 32)
_REGEX = "re:"
_ENDINGS = {
    "fp8": ("", "_scale_inv"),
    "mxfp4": ("_blocks", "_scales"),
    "int4": ("_packed", "_scale", "_shape"),
}
_HINT = (
    "Write rules with osl.dequantize_block, osl.dequantize_int4 or osl.opaque; or with osl.tensor,"
    " to keep the tensors as they are."
)


class OtherFormatError(MappingError):
    """Weights are quantised in a way that the families' own rules do not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """Formats of stored weights: FP8 with block scales, MXFP4, int4 of compressed-tensors."""

    method: Literal["fp8", "mxfp4", "int4"]
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale in FP8
    group: int = 0  # columns that share a scale in int4
    plain: tuple[str, ...] = ()  # unquantised modules: names, or `re:` and a regular expression

    def covers(self, name: str, step: TensorStep) -> bool:
        """Whether a tensor is stored quantised; its name may have wildcards."""
        if self.method == "mxfp4":
            return step.packed
        module = re.sub(r"\{\w+\}", "0", name).removesuffix(".weight")
        is_plain = any(
            re.match(pattern.removeprefix(_REGEX), module)
            if pattern.startswith(_REGEX)
            else f".{module}".endswith(f".{pattern}")
            or (self.method == "fp8" and f"{module}.".startswith(f"{pattern}."))
            for pattern in self.plain
        )
        return step.projection and not is_plain

    def has_own_parts(self, name: str, stored: Set[str]) -> bool:
        """Whether the files have all parts of a tensor, and none that is not read; or nothing."""
        parts = self.parts(name)
        others = {name, f"{name}_g_idx"} - {*parts}
        return len({part in stored for part in parts}) == 1 and others.isdisjoint(stored)

    def has_no_parts(self, name: str, stored: Set[str]) -> bool:
        """Whether the files have nothing of a tensor that it would have if it was quantised."""
        return not any(part in stored for part in self.parts(name) if part != name)

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of the tensors that a quantised one is stored as."""
        return tuple(name + ending for ending in _ENDINGS[self.method])

    def decoded(self, name: str, dtype: str) -> Expr:
        first, second = map(tensor, self.parts(name)[:2])
        match self.method:
            case "fp8":
                return dequantize_fp8(first, second, self.block, dtype)
            case "mxfp4":
                # `convert_moe_packed_tensors` of transformers 5.23.0, `integrations/mxfp4.py`:
                # decoded rows are outputs, but checkpoints without MXFP4 have [.., in, out].
                return dequantize_mxfp4(first, second, dtype=dtype).rearrange("x o i -> x i o")
            case "int4":
                values = dequantize_int4(first, second, group=self.group, dtype=dtype)
                # Rows and columns follow from the scales; `weight_shape` must exist, unread.
                return Beside(values, tensor(self.parts(name)[2]))


def weight_format(family: str, config: Section | None) -> WeightFormat | None:
    """Return what a `quantization_config` says; None where there is none."""
    if not config:
        return None
    method = config.text("quant_method")
    if method == "mxfp4" and family == "gpt_oss":
        return WeightFormat("mxfp4")
    if family == "deepseek_v4":  # published ones mix FP8 and FP4, with scales of their own names
        raise OtherFormatError(
            f"there is no ready mapping for {family} quantised with {short_repr(method)}",
            expected="its weights as bfloat16",
            hint=_HINT,
        )
    if method == "compressed-tensors" and config.text("format") == "pack-quantized":
        return _int4(family, config)
    block = config.integers("weight_block_size", bounds=SIZES)
    if method != "fp8" or not block or family == "gpt_oss":
        raise OtherFormatError(
            f"there is no ready mapping for {family} quantised with {short_repr(method)}"
            + ("" if block or method != "fp8" else " and one scale for each tensor"),
            hint=_HINT,
        )
    # Scales of blocks of 128 and of 129 have one shape: only published sizes are accepted.
    if len(block) != 2 or any(extent & (extent - 1) for extent in block):
        config.raise_error("weight_block_size", "rows and columns, powers of two", block)
    if block == _MX_BLOCK:
        raise OtherFormatError(
            f"there is no ready mapping for {family} quantised in blocks of {list(block)}, as MXFP8"
            " is, whose scales may be exponents",
            hint="Give the folder with the files: their dtypes say what they are.",
        )
    plain = _plain_modules(config, "modules_to_not_convert")
    return WeightFormat("fp8", (block[0], block[1]), plain=plain)


def _int4(family: str, config: Section) -> WeightFormat:
    """`compressed-tensors` 0.12, `config/base.py`; Kimi K2 Thinking is stored so."""
    groups = [group.section("weights") for group in config.sections("config_groups")]
    expected = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    weights = groups[0] if len(groups) == 1 else None
    if (
        weights is None
        or any(
            type(weights.get(key)) is not type(value) or weights.get(key) != value
            for key, value in expected.items()
        )
        or weights.get("actorder") not in (None, False, "weight", "static")
    ):
        raise OtherFormatError(
            f"there is no ready mapping for {family} quantised with 'compressed-tensors' in this"
            " way",
            expected=f"one group of weights with {expected}, and no actorder of groups",
            found=short_repr(config.get("config_groups")),
            hint=_HINT,
        )
    plain = _plain_modules(config, "ignore")
    return WeightFormat("int4", group=weights.integer("group_size"), plain=plain)


def _plain_modules(config: Section, key: str) -> tuple[str, ...]:
    """Return the modules that a configuration leaves as they are; checks regular expressions."""
    plain = config.texts(key)
    for pattern in plain:
        if pattern.startswith(_REGEX):
            try:
                compiled_regex(pattern.removeprefix(_REGEX), key)
            except MappingError:
                config.raise_error(key, "regular expressions", pattern)
    return plain
