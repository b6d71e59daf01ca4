"""Four-bit weights of bitsandbytes: NF4 and FP4, whose scales may be quantised too."""

from __future__ import annotations

import json
import math
from typing import Any

from orbax_safetensors_layout.format import short_repr

from ..expr.expression import Expr
from .found_weight import FoundWeight, WeightScheme
from .grouped_values import grouped, unpacked

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_MOST_OFFSET = 2.0**128  # above what float32 holds
_STORAGE = ("U8", "I8", "BF16", "F16", "F32")  # `bnb_4bit_quant_storage`: bytes in another guise


def _decode(weight: FoundWeight) -> Expr:
    state = _state(weight)
    shape, block = state["shape"], state["blocksize"]
    count = math.prod(shape)
    blocks = -(-count // block)
    scale = weight.expr(".absmax")
    if weight.entry(".nested_absmax") is not None:
        scale = grouped(
            scale,
            (state["nested_blocksize"],),
            "float32",
            {"scale": weight.expr(".nested_absmax"), "table": weight.expr(".nested_quant_map")},
            table_bits=8,
        ).add(state["nested_offset"])
    # The high half of a byte comes first, and values of all rows follow one another.
    packed, entry = weight.expr(""), weight.entry("")
    assert entry is not None
    values = unpacked(packed.reshape(-1), 4, 0, count, (1, 0), of_bytes=True)
    extents: tuple[int, ...] = (block,)
    columns, per_element = shape[-1] if len(shape) > 1 else 0, entry.dtype.bits // 4
    if columns and columns % block == columns % per_element == 0:  # a shard of columns then reads
        rows = math.prod(shape[:-1])  # its own alone
        packed = packed.reshape(rows, columns // per_element)
        values = unpacked(packed, 4, 1, columns, (1, 0), of_bytes=True)
        scale, extents = scale.reshape(rows, blocks // max(1, rows)), (1, block)
    table = weight.expr(".quant_map")
    operands = {"scale": scale, "table": table}
    decoded = grouped(values, extents, weight.dtype, operands, table_bits=4)
    return decoded.reshape(*shape)


def _state(weight: FoundWeight) -> dict[str, Any]:
    part = next(part for part in _STATES if weight.entry(part) is not None)
    try:
        state = json.loads(weight.small(part))
        sizes = [state["blocksize"], state.get("nested_blocksize", 1), *state["shape"]]
        offset = state.setdefault("nested_offset", 0.0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise weight.error(f"{part!r} is not what bitsandbytes writes: {error!r}") from error
    is_right = all(type(n) is int and 0 < n < 1 << 40 for n in sizes)
    is_right &= type(offset) in (int, float) and abs(offset) < _MOST_OFFSET
    if not is_right or sizes[0] % 2:
        raise weight.error(
            f"{part!r} has sizes {short_repr(sizes)} and the offset {short_repr(offset)}"
        )
    state["nested_blocksize"] = sizes[1]
    return dict(state)


SCHEMES = tuple(
    WeightScheme(
        f"bitsandbytes {part[-3:].upper()}",
        "",
        _STORAGE,
        (".absmax", ".quant_map", part),
        _decode,
        (".nested_absmax", ".nested_quant_map"),
    )
    for part in _STATES
)
