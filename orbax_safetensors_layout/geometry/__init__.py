"""Index arithmetic: boxes of an array and their byte runs in a file. No I/O, no JAX."""

from .affine import AffineView, Gather, filled_boxes, row_major_strides
from .blocks import chunk_parts, cut, row_blocks
from .box import Box, Tile, cover, tile
from .packing import pack_bits, packed_box, unpack_bits, unpack_box
from .runs import StridedRuns
