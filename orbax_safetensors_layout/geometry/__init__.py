"""Index arithmetic: boxes of an array, their byte runs, copies of strided ones. No I/O, no JAX."""

from .affine import AffineView, Gather, Ints, StridedRuns, filled_boxes, row_major_strides
from .box import MAX_RANK, Box, Tile, chunk_parts, cover, cut, replaced, row_blocks, tile
from .packing import pack_bits, packed_box, unpack_box
from .strided_copy import copy_elements
