"""Integers with scales and zero points: compressed-tensors, AWQ and GPTQ."""

from __future__ import annotations

import numpy as np

from orbax_safetensors_layout.format import short_repr

from ..expr.expression import Expr
from ..expr.quantized import dequantize_int4
from ..quantizing.encoder import WeightLayout
from ..quantizing.group_formats import Int4Groups
from .float_formats import FLOAT8_CODES, MX_SCALED, SCALED, fp8_layout, group_extents
from .found_weight import OWN_CONFIG, FoundWeight, WeightScheme
from .grouped_values import grouped, unpacked

_WORD = 32
_GPTQ_BITS = (2, 3, 4, 8)
_INTEGERS = {"I64": "<i8", "I32": "<i4"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of the values of eight columns
# By how much zeros are stored less in the formats of GPTQ, and in those of auto-round.
_STORED_LESS = {"gptq": 1, "gptq_v2": 0}
_PACKED_LESS = {
    "auto_round:gptq": 1,  # if nothing is said
    "auto_round:auto_gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}


def _scaled(weight: FoundWeight) -> Expr:
    """FP8 and INT8 with `weight_scale`."""
    if weight.code("_scale") in ("U8", "F8_E8M0"):
        return MX_SCALED(weight)
    index = weight.maybe("_g_idx")
    zero = None if weight.code("") in FLOAT8_CODES else weight.maybe("_zero_point")
    shape, block = group_extents(
        weight,
        "_scale",
        is_ordered=index is not None,
        has_zeros=weight.code("") in FLOAT8_CODES or zero is not None,
    )
    if zero is None and index is None:
        return SCALED(weight)
    if index is not None and block[:-1] != (1,) * (len(block) - 1):
        raise weight.error(f"{weight.name_of('_g_idx')!r} is beside scales of no groups of a row")
    scale, zero = weight.expr("_scale").reshape(*shape), zero and zero.reshape(*shape)
    operands = {"scale": scale, "zero": zero, "index": index}
    return grouped(weight.expr(""), block, weight.dtype, operands)


def _packed(weight: FoundWeight) -> Expr:
    """`pack-quantized`: rows packed densely, each value plus half the range."""
    *rows, words = weight.shape("_packed")
    *others, groups = weight.shape("_scale") or (0,)
    if others != rows and weight.shape("_scale") != (1,):
        raise weight.error(
            f"scales of shape {list(weight.shape('_scale'))} do not fit {rows} rows of values"
        )
    columns, bits = _columns_and_bits(weight, words, groups)
    group = -(-columns // max(1, groups))
    index, zero = weight.maybe("_g_idx"), weight.maybe("_zero_point")
    if groups > 1 and index is None and columns % groups:
        raise weight.error(f"{columns} columns are not {groups} groups of one size")
    weight.check_recipe(
        bits,
        "int",
        (*rows, columns),
        (1, group) if others == rows else (*rows, columns),
        is_ordered=index is not None,
        has_zeros=zero is not None,
    )
    scale = weight.expr("_scale")
    is_whole = others != rows
    if bits == 4 and index is None and zero is None and groups * group == columns and not is_whole:
        return dequantize_int4(weight.expr("_packed"), scale, group, weight.dtype)
    axis, offset = len(rows), 0
    block = (*[1] * axis, group)
    if is_whole:
        scale, block = scale.reshape(*[1] * (axis + 1)), (*rows, columns)
    if zero is None:
        offset = 1 << (bits - 1)
    elif weight.code("_zero_point") == "I32" and not is_whole:
        zero = unpacked(zero, bits, axis - 1, rows[-1])
    else:  # as it is, so without the half of the range
        offset = 1 << (bits - 1)
        zero = zero.reshape(*[1] * (axis + 1)) if is_whole else zero
    values = unpacked(weight.expr("_packed"), bits, axis, columns)
    operands = {"scale": scale, "zero": zero, "index": index}
    return grouped(values, block, weight.dtype, operands, offset=offset)


def _packed_layout(weight: FoundWeight) -> WeightLayout:
    rows, words = weight.shape("_packed")[:-1], weight.shape("_packed")[-1]
    *others, groups = weight.shape("_scale") or (0,)
    columns, bits = _columns_and_bits(weight, words, groups)
    is_symmetric = weight.entry("_g_idx") is None and weight.entry("_zero_point") is None
    scale = weight.entry("_scale")
    if bits != 4 or not is_symmetric or scale is None or tuple(others) != rows or columns % groups:
        raise weight.error("only symmetric integers of four bits in groups of a row are written")
    form = Int4Groups((1, columns // groups), scale.dtype.numpy)
    shape = "_shape" if weight.code("_shape") == "I64" else ""
    return WeightLayout(form, "_packed", "_scale", shape=shape)


def _columns_and_bits(weight: FoundWeight, words: int, groups: int) -> tuple[int, int]:
    """Return figures of a packed row: those configured, if they fit, or those of `weight_shape`."""
    said = weight.recipes()
    for bits, size in ((recipe.bits, recipe.block and recipe.block[1]) for recipe in said):
        if bits and size and groups > 1 and -(-groups * size * bits // _WORD) == words:
            return groups * size, bits
    data, dtype = weight.small("_shape"), _INTEGERS.get(weight.code("_shape"))
    if dtype is None:
        raise weight.error(f"{weight.name_of('_shape')!r} is not I64 or I32")
    stored = np.frombuffer(data, dtype)
    columns = int(stored[-1]) if stored.size else 0
    known = sorted({recipe.bits for recipe in said if recipe.bits}) or range(1, 9)
    fitting = [n for n in known if columns > 0 and -(-columns * n // _WORD) == words]
    if len(fitting) != 1:
        raise weight.error(
            f"{words} words of a row do not hold {columns} values of"
            f" {' or '.join(map(str, known))} bits",
            OWN_CONFIG,
        )
    return columns, fitting[0]


def _awq_or_gptq(weight: FoundWeight) -> Expr:
    rows, columns = _two(weight, "/qweight")
    groups, outputs = _two(weight, "/scales")
    if columns != outputs:
        return _awq(weight, rows, groups, outputs, outputs // max(1, columns))
    has_order = weight.entry("/g_idx") is not None and weight.shape("/g_idx") != (0,)
    words = _two(weight, "/qzeros")[1]
    known = sorted({said.bits for said in weight.recipes() if said.bits}) or _GPTQ_BITS
    fitting = [
        bits
        for bits in known
        if bits in _GPTQ_BITS
        and rows * _WORD % bits == 0
        and -(-outputs * bits // _WORD) == words
        and (not has_order or weight.shape("/g_idx") == (rows * _WORD // bits,))
    ]
    if len(fitting) != 1:
        raise weight.error(
            f"{rows} words of a column, and {words} of {outputs} zeros, are not values of"
            f" {' or '.join(map(str, known))} bits",
            OWN_CONFIG,
        )
    bits = fitting[0]
    inputs = rows * _WORD // bits
    group = _inputs_of_a_group(weight, bits, inputs, groups, has_order=has_order)
    return _outputs_first(
        weight,
        unpacked(weight.expr("/qweight"), bits, 0, inputs),
        unpacked(weight.expr("/qzeros"), bits, 1, outputs, added=_stored_less(weight)),
        group,
        index=weight.maybe("/g_idx") if has_order else None,
    )


def _stored_less(weight: FoundWeight) -> int:
    """Return by how much zeros are stored less than they are, as the configured format has it."""
    if "auto-round" in weight.settings.method.lower():
        keys, known = ("packing_format", "backend"), _PACKED_LESS
    else:
        keys, known = ("checkpoint_format", "format"), _STORED_LESS
    values = weight.settings.values
    for key in keys:
        if values.get(key) not in (None, "auto"):
            less = known.get(str(values[key]).lower())
            if less is None:
                raise weight.error(
                    f"{key} {short_repr(values[key])} is not one of {', '.join(known)}, so that it"
                    " is not known whether zeros are stored less one"
                )
            return less
    return next(iter(known.values()))


def _outputs_first(
    weight: FoundWeight,
    values: Expr,
    zero: Expr | None,
    group: int,
    *,
    index: Expr | None = None,
    offset: int = 0,
) -> Expr:
    """Return values that are stored [in, out], with scales [group, out], as a weight [out, in]."""
    operands = {
        "scale": weight.expr("/scales").transpose(),
        "zero": None if zero is None else zero.transpose(),
        "index": index,
    }
    return grouped(values.transpose(), (1, group), weight.dtype, operands, offset=offset)


def _inputs_of_a_group(
    weight: FoundWeight, bits: int, inputs: int, groups: int, *, has_order: bool
) -> int:
    """Return the inputs that share scales: those configured, or all where nothing is."""
    sizes = [said.block[1] or inputs for said in weight.recipes() if said.block is not None]
    fitting = [size for size in sizes or [inputs] if -(-inputs // size) == groups]
    if not fitting and (
        sizes or not has_order or not {*weight.small("/g_idx")} - {0, 255}  # all 0 or all -1
    ):
        raise weight.error(
            f"{inputs} inputs are not {groups} groups of the configured group_size"
            + ("" if sizes else ", and no g_idx says which"),
            OWN_CONFIG,
        )
    group = fitting[0] if fitting else -(-inputs // groups)
    shape = weight.shape("/qweight")[-1], inputs
    weight.check_recipe(bits, "int", shape, (1, group), is_ordered=has_order)
    return group


def _awq(weight: FoundWeight, inputs: int, groups: int, outputs: int, per_word: int) -> Expr:
    if per_word != len(_AWQ_ORDER) or outputs % per_word or inputs % groups:
        raise weight.error(f"{per_word} values a word; AWQ has {len(_AWQ_ORDER)}, of four bits")
    zero = weight.maybe("/qzeros")
    block = 1, inputs // groups
    weight.check_recipe(4, "int", (outputs, inputs), block, has_zeros=zero is not None)
    return _outputs_first(
        weight,
        unpacked(weight.expr("/qweight"), 4, 1, outputs, _AWQ_ORDER),
        None if zero is None else unpacked(zero, 4, 1, outputs, _AWQ_ORDER),
        inputs // groups,
        offset=0 if zero is not None else 8,
    )


def _two(weight: FoundWeight, part: str) -> tuple[int, int]:
    shape = weight.shape(part)
    if len(shape) != 2 or 0 in shape:
        raise weight.error(f"{part[1:]!r} has shape {list(shape)}, not two axes")
    return shape[0], shape[1]


SCHEMES = (
    WeightScheme(
        "packed integers",
        "_packed",
        ("I32",),
        ("_scale",),
        _packed,
        ("_shape", "_zero_point", "_g_idx"),
        layout=_packed_layout,
    ),
    WeightScheme(
        "FP8 or INT8",
        "",
        (*FLOAT8_CODES, "I8"),
        ("_scale",),
        _scaled,
        ("_zero_point", "_g_idx"),
        fp8_layout("_scale"),
    ),
    WeightScheme(
        "GPTQ or AWQ", "/qweight", ("I32",), ("/scales",), _awq_or_gptq, ("/qzeros", "/g_idx")
    ),
)
