"""The choice of weights that are saved quantised, their format, and its configuration."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from absl import logging

from orbax_safetensors_layout.catalog import compile_pattern
from orbax_safetensors_layout.errors import InvalidArgumentError, MappingError, listed
from orbax_safetensors_layout.options import is_floating

from ..affine.bound import BoundExpr
from ..dequantizing.dequantized import CONFIG, plain_configurations, with_settings
from .encoder import WeightLayout, add_parts
from .group_formats import FLOAT8, Fp8Groups, Int4Groups, Mxfp4Groups, Nvfp4Groups

if TYPE_CHECKING:
    from .like import FolderQuantization

QuantizedFormat = Literal[
    "fp8_block", "fp8_channel", "deepseek_fp8", "int4", "mxfp4", "nvfp4", "gpt_oss_mxfp4"
]
_WEIGHT = ".weight"
_HEAD = "lm_head"
_OF_BUFFERS = (np.dtype(np.bool_), np.dtype(np.int64))  # masks and indices
_SCALE = re.compile(r"(^|[._])(scales?|scale_inv)$")  # of a weight that is quantised
_FUSED = "gpt_oss_mxfp4"
_UINT8 = np.dtype(np.uint8)
_GROUP = 128
_BLOCK = (128, 128)
_MX_GROUP = 32
_NV_GROUP = 16


class _Preset(NamedTuple):
    """A format, and what the configuration of compressed-tensors says of it."""

    format: str
    weights: dict[str, Any]  # besides that they are symmetric and known beforehand
    activations: dict[str, Any] | None = None


_FP8 = {"num_bits": 8, "type": "float"}
_FP4 = {"num_bits": 4, "type": "float"}
# As the schemes FP8_BLOCK, FP8_DYNAMIC, W4A16, MXFP4A16 and NVFP4A16 of compressed-tensors 0.20.0.
_PRESETS = {
    "fp8_block": _Preset(
        "float-quantized",
        {**_FP8, "strategy": "block", "block_structure": [*_BLOCK]},
        {**_FP8, "strategy": "group", "group_size": 128},
    ),
    "fp8_channel": _Preset(
        "float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token"}
    ),
    "int4": _Preset("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
    "mxfp4": _Preset(
        "mxfp4-pack-quantized",
        {**_FP4, "strategy": "group", "group_size": _MX_GROUP, "scale_dtype": "torch.uint8"},
    ),
    "nvfp4": _Preset(
        "nvfp4-pack-quantized",
        {
            **_FP4,
            "strategy": "tensor_group",
            "group_size": _NV_GROUP,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """Weights that `save` writes quantised, and how: `WriteOptions(quantize=...)`.

    Attributes:
        format: `"fp8_block"`: FP8 (E4M3) with a scale for each block of 128 x 128;
            `"fp8_channel"`: with one for each row; `"int4"`: integers of four bits with a scale for
            each `group_size` of a row; `"mxfp4"` and `"nvfp4"`: floats of four bits with a scale
            for each 32 and 16; all as compressed-tensors has them, for vLLM and `transformers`.
            `"deepseek_fp8"`: blocks as DeepSeek-V3's; `"gpt_oss_mxfp4"`: experts as GPT-OSS's.
        modules: Patterns of modules that are quantised, written as for `Mapping(ignore=...)`; a
            module is a weight's name without `.weight`.
        ignore: Patterns of such that are not.
        group_size: Of `"int4"`: values of a row that share a scale.

    Raises:
        InvalidArgumentError: There is no such format, a pattern is malformed, or a size is.

    Examples:
        >>> import tempfile, numpy as np
        >>> import orbax_safetensors_layout as osl
        >>> weights = {"mlp.up_proj.weight": np.ones((4, 64), np.float32)}
        >>> folder = tempfile.mkdtemp()
        >>> osl.save(folder, weights, options=osl.WriteOptions(quantize=Quantization("mxfp4")))
        >>> {name: str(leaf.dtype) for name, leaf in osl.metadata(folder).items()}
        {'mlp.up_proj.weight_packed': 'uint8', 'mlp.up_proj.weight_scale': 'uint8'}
    """

    format: QuantizedFormat
    modules: str | Iterable[str] = ("*_proj", "*_proj_*")
    ignore: str | Iterable[str] = ()
    group_size: int = _GROUP

    def __post_init__(self) -> None:
        """Checks the arguments, and keeps patterns as tuples."""
        if self.format not in QuantizedFormat.__args__:  # type: ignore[attr-defined]
            raise InvalidArgumentError(
                f"Quantization has no format {self.format!r}; it has"
                f" {', '.join(QuantizedFormat.__args__)}."  # type: ignore[attr-defined]
            )
        size = self.group_size
        if type(size) is not int or size < 8 or size % 8:
            raise InvalidArgumentError(
                f"Quantization(group_size={size!r}): a group is a multiple of 8 values."
            )
        for field in ("modules", "ignore"):
            given = getattr(self, field)
            try:
                patterns = (given,) if isinstance(given, str) else tuple(given)
            except TypeError:
                raise InvalidArgumentError(
                    f"Quantization({field}={given!r}): patterns are strings, one or several."
                ) from None
            for pattern in patterns:
                compile_pattern(pattern)
            object.__setattr__(self, field, patterns)

    @staticmethod
    def like(path: str | os.PathLike[str]) -> FolderQuantization:
        """Return the formats of a quantised folder, weight by weight, for `WriteOptions(quantize)`.

        Weights get the names, formats and shapes that they have there, and the files beside them
        what that folder says of its quantisation. Groups that still have the values that the
        folder decodes to, in the dtype in which they are saved, keep their scales: what was not
        changed has the same bits. The folder is read again while the weights are saved.

        Args:
            path: A folder that `dequantized` reads: FP8 (E4M3), MXFP4, NVFP4 or symmetric int4.

        Raises:
            MappingError: Nothing is quantised, or something in a format that is not written.
        """
        from .like import FolderQuantization

        return FolderQuantization(path)

    def apply(
        self, weights: Mapping[str, BoundExpr], dtype: np.dtype[Any] | None = None
    ) -> dict[str, BoundExpr]:
        """Return the tensors of the files; `dtype` is that of what is not quantised, if given.

        Raises:
            MappingError: No weight is of these modules, or one cannot be quantised, or is already.
        """
        _refuse_quantized(weights)
        chosen = self._chosen(weights)
        axes = (3,) if self.format == _FUSED else (2, 3)  # two are those of biases of experts
        left = [
            name
            for name in self._named(weights)
            if name not in chosen and len(weights[name].shape) in axes
        ]
        if left:
            logging.warning(
                "%d tensors of modules that are to be quantised stay as they are; %s has"
                " floating-point weights %s: %s",
                len(left),
                self.format,
                "[expert, in, out]" if self.format == _FUSED else "called MODULE.weight",
                listed(map(repr, left), 3),
            )
        result: dict[str, BoundExpr] = {}
        for name, weight in weights.items():
            if name not in chosen:
                result[name] = weight
                continue
            if self.format == "deepseek_fp8":
                _check_blocks(name, weight.shape[-2:])
            scale_dtype = weight.dtype if dtype is None else dtype
            add_parts(result, name, self._layout(scale_dtype).tensors(name, weight), weights)
        return result

    def fingerprint(self) -> str:
        """Return a text that tells it from those that write other values."""
        return repr(self)

    def configured(
        self, files: Mapping[str, bytes], weights: Mapping[str, BoundExpr]
    ) -> dict[str, bytes]:
        """Return the files beside the model with the quantisation in its `config.json`, if any."""
        files = plain_configurations(files)
        if CONFIG in files:
            said = {"quantization_config": self.configuration(weights)}
            files[CONFIG] = with_settings(files[CONFIG], said)
        return files

    def configuration(self, weights: Mapping[str, BoundExpr]) -> dict[str, Any]:
        """Return the `quantization_config` of a model with these weights."""
        chosen = self._chosen(weights)
        kept = [
            name.removesuffix(_WEIGHT)
            for name, weight in weights.items()
            if name not in chosen and name.endswith(_WEIGHT) and len(weight.shape) == 2
        ]
        if not any(name.removesuffix(_WEIGHT).endswith(_HEAD) for name in weights):
            kept.append(_HEAD)  # a linear module that shares the embeddings' weight
        if self.format == "deepseek_fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [*_BLOCK],
                "modules_to_not_convert": kept,
            }
        if self.format == _FUSED:
            return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        preset = _PRESETS[self.format]
        given = {**preset.weights, "symmetric": True, "dynamic": False}
        if self.format == "int4":
            given["group_size"] = self.group_size
        activations = preset.activations and {**preset.activations, "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": preset.format,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": given,
                    "input_activations": activations and {**activations, "dynamic": True},
                    "output_activations": None,
                }
            },
            "ignore": kept,
            "kv_cache_scheme": None,
        }

    def _layout(self, dtype: np.dtype[Any]) -> WeightLayout:
        match self.format:
            case "fp8_block":
                return WeightLayout(Fp8Groups(_BLOCK), "", "_scale")
            case "fp8_channel":
                return WeightLayout(Fp8Groups((1, 0)), "", "_scale")
            case "deepseek_fp8":
                return WeightLayout(Fp8Groups(_BLOCK), "", "_scale_inv")
            case "int4":
                form = Int4Groups((1, self.group_size), dtype)
                return WeightLayout(form, "_packed", "_scale", shape="_shape")
            case "mxfp4":
                return WeightLayout(Mxfp4Groups((1, _MX_GROUP), _UINT8), "_packed", "_scale")
            case "nvfp4":
                form4 = Nvfp4Groups((1, _NV_GROUP), FLOAT8)
                return WeightLayout(form4, "_packed", "_scale", "_global_scale")
            case "gpt_oss_mxfp4":
                mx = Mxfp4Groups((1, _MX_GROUP), _UINT8)
                return WeightLayout(mx, "_blocks", "_scales", is_grouped=True)

    def _named(self, weights: Iterable[str]) -> list[str]:
        """Return the tensors that are weights of modules to be quantised, by their names."""
        patterns, left = (
            [compile_pattern(pattern) for pattern in given] for given in (self.modules, self.ignore)
        )
        modules = ((name, name.removesuffix(_WEIGHT)) for name in weights)
        return [
            name
            for name, module in modules
            if any(pattern.fullmatch(module) for pattern in patterns)
            and not any(pattern.fullmatch(module) for pattern in left)
        ]

    def _chosen(self, weights: Mapping[str, BoundExpr]) -> set[str]:
        is_fused = self.format == _FUSED
        chosen = set()
        for name in self._named(weights):
            weight = weights[name]
            is_wide = is_floating(weight.dtype) and weight.dtype.itemsize > 1
            fits = len(weight.shape) == 3 if is_fused else name.endswith(_WEIGHT)
            if is_wide and fits and name.endswith(_WEIGHT) != is_fused:
                chosen.add(name)
        if not chosen:
            raise MappingError(
                "no weight is of a module that is to be quantised",
                expected=f"one of {listed(map(repr, self.modules))}"
                + (f", without {listed(map(repr, self.ignore))}" if self.ignore else ""),
                found=listed(map(repr, weights), 5),
                hint="Say which: Quantization(..., modules=['*.attention.*']).",
            )
        return chosen


def _refuse_quantized(weights: Mapping[str, BoundExpr]) -> None:
    """Refuses weights that are quantised already: the configuration would say nothing of them."""
    scaled = {name.rpartition(".")[0] for name in weights if _SCALE.search(name)}
    quantized = [
        name
        for name, weight in weights.items()
        if name.rpartition(".")[0] in scaled
        and not _SCALE.search(name)
        and len(weight.shape) > 1
        and not (is_floating(weight.dtype) and weight.dtype.itemsize > 1)
        and weight.dtype not in _OF_BUFFERS
    ]
    if quantized:
        raise MappingError(
            "weights are quantised already",
            tensor=quantized[0],
            expected="floating-point weights of 16 bits or more",
            found=listed(map(repr, quantized), 3),
            hint="Decode them first: through osl.dequantized, or convert(..., dequantize=)"
            " (--dequantize).",
        )


def _check_blocks(name: str, shape: tuple[int, ...]) -> None:
    """Refuses a weight of which `transformers` would take other blocks.

    `Fp8Dequantize` divides the rows by those of the scales, and refuses what that does not divide.
    """
    blocks = [-(-n // size) for n, size in zip(shape, _BLOCK, strict=True)]
    is_even = not any(n % max(1, count) for n, count in zip(shape, blocks, strict=True))
    if is_even and any(
        count > 1 and n % size for n, count, size in zip(shape, blocks, _BLOCK, strict=True)
    ):
        raise MappingError(
            f"transformers would open {name!r} in 'deepseek_fp8' with other values",
            expected=f"rows and columns of whole blocks of {_BLOCK[0]}, or of one block",
            found=f"shape {list(shape)}",
            hint="Choose another: Quantization('fp8_block'); or leave it out: Quantization(...,"
            f" ignore=[{name.removesuffix(_WEIGHT)!r}]).",
        )
