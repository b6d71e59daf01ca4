"""Small floats with scales: FP8, MXFP8, NVFP4 and MXFP4, in the names of every known writer."""

from __future__ import annotations

import math
from collections.abc import Callable

from orbax_safetensors_layout.options import is_floating

from ..expr.expression import Expr
from ..expr.quantized import dequantize_block, dequantize_mxfp4
from ..quantizing.encoder import WeightLayout
from ..quantizing.group_formats import (
    FLOAT8,
    Fp8Groups,
    ModelOptNvfp4Groups,
    Mxfp4Groups,
    Nvfp4Groups,
    PowersFp8Groups,
)
from .found_weight import OWN_CONFIG, FoundWeight, WeightScheme
from .grouped_values import grouped, unpacked

_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_MX_GROUP, _NV_GROUP = 32, 16
_BLOCK = (128, 128)


def group_extents(
    weight: FoundWeight, part: str, *, is_ordered: bool = True, has_zeros: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape that scales are taken in, and the extents of a group of each."""
    scale, block = _group_extents(weight, part)
    kind = "float" if weight.code("") in _FLOAT8 else "int"
    weight.check_recipe(
        8, kind, weight.shape(""), block, is_ordered=is_ordered, has_zeros=has_zeros
    )
    return scale, block


def _group_extents(weight: FoundWeight, part: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, scale = weight.shape(""), weight.shape(part)
    rows = shape[:-1]
    if math.prod(scale) == 1:
        return (1,) * len(shape), shape
    if len(shape) > 2 and scale in (shape[:1], (*shape[:1], *[1] * (len(shape) - 1))):
        return (*shape[:1], *[1] * (len(shape) - 1)), (1, *shape[1:])
    if scale in (rows, (*rows, 1)):
        return (*rows, 1), (*[1] * len(rows), shape[-1])
    if len(shape) < 2 or len(scale) != len(shape):
        raise weight.error(
            f"scales of shape {list(scale)} do not fit values of shape {list(shape)}", OWN_CONFIG
        )
    free = shape[:-2]
    block = _block(weight, shape[-2:], scale[-2:]) if scale[:-2] == free else None
    if block is not None:
        return scale, (*[1] * len(free), *block)
    group = shape[-1] // max(1, scale[-1])
    if scale[:-1] == rows and group and scale[-1] * group == shape[-1]:
        return scale, (*[1] * len(rows), group)
    raise weight.error(
        f"scales of shape {list(scale)} do not fit values of shape {list(shape)}, neither one for"
        f" the tensor, for each row or group, nor for each block of"
        f" {' or '.join(sorted(map(str, _blocks(weight))))}",
        OWN_CONFIG,
    )


def _blocks(weight: FoundWeight) -> list[tuple[int, int]]:
    """Return the blocks that a weight may have: those configured, or the usual."""
    return [said.block for said in weight.recipes() if said.block is not None] or [_BLOCK]


def _block(
    weight: FoundWeight, shape: tuple[int, ...], scale: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the configured block that has so many scales."""
    fitting: dict[tuple[int, ...], tuple[int, ...]] = {}
    for configured in _blocks(weight):
        block = tuple(size or n for n, size in zip(shape, configured, strict=True))
        if scale == tuple(-(-n // size) for n, size in zip(shape, block, strict=True)):
            fitting.setdefault(tuple(map(min, block, shape)), block)
    if len(fitting) > 1:
        _, said = weight.settings.targeted(weight.module)
        if said.block in fitting.values():
            return said.block
        raise weight.error(
            f"scales of shape {list(scale)} fit blocks of"
            f" {' and '.join(map(str, fitting.values()))}, and no target says which",
            OWN_CONFIG,
        )
    return next(iter(fitting.values()), None)


def _fp8(part: str) -> Callable[[FoundWeight], Expr]:
    def decode(weight: FoundWeight) -> Expr:
        shape, block = group_extents(weight, part)
        scale = weight.expr(part)
        scale = scale if weight.shape(part) == shape else scale.reshape(*shape)
        if weight.code(part) == "U8":  # exponents, as of MXFP8
            return grouped(weight.expr(""), block, weight.dtype, {"scale": scale})
        return dequantize_block(weight.expr(""), scale, block, weight.dtype)

    return decode


def _mxfp8(weight: FoundWeight) -> Expr:
    shape, scale = weight.shape(""), weight.shape("_scale")
    if not shape or scale != (*shape[:-1], -(-shape[-1] // _MX_GROUP)):
        raise weight.error(f"exponents of shape {list(scale)} are not of groups of {_MX_GROUP}")
    block = (*[1] * (len(shape) - 1), _MX_GROUP)
    weight.check_recipe(8, "float", shape, block)
    return grouped(weight.expr(""), block, weight.dtype, {"scale": weight.expr("_scale")})


def _nvfp4(part: str, role: str, beside: str) -> Callable[[FoundWeight], Expr]:
    def decode(weight: FoundWeight) -> Expr:
        *rows, packed = weight.shape(part)
        *others, groups = weight.shape("_scale") or (0,)
        if others != rows or not groups or packed * 2 % groups:
            raise weight.error(
                f"scales of shape {list(weight.shape('_scale'))} do not fit {packed * 2} values in"
                f" each of {rows} rows"
            )
        values = unpacked(weight.expr(part), 4, len(rows), packed * 2)
        block = (*[1] * len(rows), packed * 2 // groups)
        weight.check_recipe(4, "float", (*rows, packed * 2), block, (1, _NV_GROUP))
        operands = {"scale": weight.expr("_scale"), role: weight.single(beside)}
        return grouped(values, block, weight.dtype, operands, is_e2m1=True)

    return decode


def _mxfp4(weight: FoundWeight) -> Expr:
    *rows, packed = weight.shape("_packed")
    *others, groups = weight.shape("_scale") or (0,)
    if others != rows or groups * _MX_GROUP != packed * 2:
        raise weight.error(
            f"{packed} bytes a row and {groups} exponents are not four bits in groups of"
            f" {_MX_GROUP}"
        )
    weight.check_recipe(4, "float", (*rows, packed * 2), (1, _MX_GROUP))
    blocks = weight.expr("_packed").reshape(*rows, groups, _MX_GROUP // 2)
    return dequantize_mxfp4(blocks, weight.expr("_scale"), weight.dtype)


def _gpt_oss(weight: FoundWeight) -> Expr:
    # Decoded rows are outputs, but checkpoints without MXFP4 have [.., in, out].
    values = dequantize_mxfp4(weight.expr("_blocks"), weight.expr("_scales"), weight.dtype)
    axes = len(weight.shape("_scales"))
    *rows, groups = weight.shape("_scales") or (1,)
    weight.check_recipe(4, "float", (*rows, groups * _MX_GROUP), (1, _MX_GROUP))
    return values.transpose(*range(axes - 2), axes - 1, axes - 2) if axes > 1 else values


def fp8_layout(part: str) -> Callable[[FoundWeight], WeightLayout]:
    """Return how FP8 is written with scales of this name, in the blocks that they are found in."""

    def layout(weight: FoundWeight) -> WeightLayout:
        scale = weight.entry(part)
        if weight.code("") != "F8_E4M3" or scale is None or not is_floating(scale.dtype.numpy):
            raise weight.error("only E4M3 with scales that are floats is written")
        if weight.entry("_g_idx") is not None:
            raise weight.error("an index of groups is not written")
        _, block = group_extents(weight, part)
        are_powers = weight.settings.values.get("scale_fmt") == "ue8m0"
        form = PowersFp8Groups if are_powers or scale.dtype.code == "F8_E8M0" else Fp8Groups
        rows, columns = (1, 1, *block)[-2:]
        return WeightLayout(form((rows, columns), scale.dtype.numpy), "", part)

    return layout


def _mxfp4_layout(values: str, scales: str) -> Callable[[FoundWeight], WeightLayout]:
    is_grouped = values == "_blocks"

    def layout(weight: FoundWeight) -> WeightLayout:
        scale = weight.entry(scales)
        assert scale is not None
        form = Mxfp4Groups((1, _MX_GROUP), scale.dtype.numpy)
        return WeightLayout(form, values, scales, is_grouped=is_grouped)

    return layout


def _nvfp4_layout(
    form: type[Nvfp4Groups], values: str, factor: str
) -> Callable[[FoundWeight], WeightLayout]:
    def layout(weight: FoundWeight) -> WeightLayout:
        group = weight.shape(values)[-1] * 2 // weight.shape("_scale")[-1]
        return WeightLayout(form((1, group), FLOAT8), values, "_scale", factor)

    return layout


SCHEMES = (
    WeightScheme(
        "FP8 with block scales",
        "",
        _FLOAT8,
        ("_scale_inv",),
        _fp8("_scale_inv"),
        layout=fp8_layout("_scale_inv"),
    ),
    WeightScheme(
        "MXFP4 of GPT-OSS",
        "_blocks",
        ("U8",),
        ("_scales",),
        _gpt_oss,
        layout=_mxfp4_layout("_blocks", "_scales"),
    ),
    WeightScheme(
        "NVFP4 of ModelOpt",
        "",
        ("U8",),
        ("_scale", "_scale_2"),
        _nvfp4("", "factor", "_scale_2"),
        layout=_nvfp4_layout(ModelOptNvfp4Groups, "", "_scale_2"),
    ),
    WeightScheme(
        "NVFP4 of compressed-tensors",
        "_packed",
        ("U8",),
        ("_scale", "_global_scale"),
        _nvfp4("_packed", "divisor", "_global_scale"),
        layout=_nvfp4_layout(Nvfp4Groups, "_packed", "_global_scale"),
    ),
    WeightScheme(
        "MXFP4 of compressed-tensors",
        "_packed",
        ("U8",),
        ("_scale",),
        _mxfp4,
        layout=_mxfp4_layout("_packed", "_scale"),
    ),
)
SCALED = _fp8("_scale")
MX_SCALED = _mxfp8
FLOAT8_CODES = _FLOAT8
