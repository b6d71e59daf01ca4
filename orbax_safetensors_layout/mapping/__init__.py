"""Mappings: each leaf of a model as an expression over a checkpoint's tensors, and the inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

from .affine.binding import LeafExpr
from .affine.bound import BoundExpr, Valued, WholeTensor
from .affine.index_nodes import Decoded, Scanning, bytes_by_rows, row_major, unseen_inputs
from .affine.leaf_pieces import (
    AffinePiece,
    DecodedPiece,
    FillPiece,
    Piece,
    affine_pieces,
    apply_view,
    assemble_box,
)
from .casting import (
    AskedCast,
    Subject,
    assign,
    cast_into,
    check_castable,
    hint_to_cast_before,
    is_whole,
    python_scalar,
    refuse_casts_of_codes,
    rounded,
    to_whole,
)
from .expr.choices import check_left_out
from .expr.concat_stack import concat, stack
from .expr.expression import Expr, fill, tensor
from .expr.low_rank import LowRank, Replacement
from .expr.opaque_ops import is_opaque, opaque
from .expr.overlaid import overlaid
from .expr.quantized import dequantize_block, dequantize_int4, dequantize_mxfp4
from .expr.values import Cast, ValueOp, apply_ops, in_chunks
from .inverse.inverse_patches import whole_tensor
from .matching import described_rule, rule
from .names import NameTree, TensorSpec, TensorSpecs
from .regexes import compiled_regex
from .rules import Mapping, check_mapping, fingerprint, saved_tensors

if TYPE_CHECKING:
    from . import families
    from .dequantizing.dequantized import decoding_hint, dequantized, plain_configurations
    from .families.config import parse_config, read_config
    from .families.ready import TARGETS, has_tied_head
    from .lookup import find_mapping, imported
    from .quantizing.quantize import Quantization

__getattr__ = lazy_exports(
    __name__,
    {
        ".dequantizing.dequantized": "decoding_hint dequantized plain_configurations",
        ".families": "",
        ".families.config": "parse_config read_config",
        ".families.ready": "TARGETS has_tied_head",
        ".lookup": "find_mapping imported",
        ".quantizing.quantize": "Quantization",
    },
)
