"""Trees as data: abstract trees, saved trees, key paths and PRNG keys."""

from . import prng
from .abstract import (
    AbstractLeaf,
    AbstractTree,
    HostLeaf,
    SavedLeaf,
    abstract_array,
    abstract_dicts,
    current_mesh,
    in_host_memory,
    leaf_shapes,
    named_leaves,
)
from .keys import dotted_name, is_attribute_value, nested_dicts, unboxed_names
from .treedef import ValueBox, decode_treedef, encode_treedef
