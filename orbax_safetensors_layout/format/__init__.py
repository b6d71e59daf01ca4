"""Parses headers, indexes, manifests and digests once into types, and makes their bytes."""

from .digests import (
    DIGESTS,
    ByteRange,
    RangeChecksums,
    dump_digests,
    join_crc32,
    parse_digests,
    ranges_by_file,
)
from .dtypes import (
    DTYPES,
    NARROW_INTEGERS,
    ONE_A_BYTE,
    PACKED,
    SUB_BYTE,
    DType,
    dtype_from_numpy,
    storage_dtype,
)
from .file_layout import FileLayout, NewTensor, index_bytes, lay_out, natural_key, split
from .header import (
    LFS_HINT,
    LFS_POINTER,
    PREFIX_BYTES,
    Header,
    OnError,
    TensorEntry,
    header_length,
    parse_header,
    raise_error,
)
from .index import INDEX_SUFFIX, MAIN_INDEX, SUFFIX, WeightIndex, parse_index
from .manifest import (
    MANIFEST,
    UNCONSTRAINED,
    Layout,
    Manifest,
    MeshRecord,
    NamedRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecPart,
    parse_manifest,
)
from .pieces import (
    DCP_KEYS,
    NO_SAVE_ID,
    SAVE_ID,
    StoredBox,
    StoredPieces,
    StoredTensor,
    absent_files,
    is_piece_file,
    piece_file_prefix,
    piece_name,
    pieces_by_offsets,
    without_rank,
)
from .schema import Schema, short_repr
from .tree import (
    MAX_DEPTH,
    Container,
    Key,
    Leaf,
    Node,
    TensorKind,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    leaves,
    unboxed_aliases,
)
