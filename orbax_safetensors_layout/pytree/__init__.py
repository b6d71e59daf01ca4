"""Trees as data: abstract trees, saved trees, key paths and PRNG keys."""

from . import prng
from .abstract import AbstractLeaf, AbstractTree, HostLeaf, SavedLeaf, in_host_memory
from .keys import dotted_name, unboxed_name
from .treedef import decode_treedef, encode_treedef
