"""Storages of bytes: one small protocol, one module per kind of place."""

from .base import (
    FIRST_READ_BYTES,
    Buffer,
    ByteBuffer,
    FileWriter,
    NewFolder,
    RangeReader,
    Storage,
    join,
    new_file,
    read_file,
    read_range,
    write_file,
)
from .buffers import MemoryReader, cut_out, scatter
from .commit_note import partial_folder
from .local import LocalStorage
from .local_commit import Claim, check_replaceable, claimed, finish_interrupted, link_tree
from .local_file import FULL, check_link, closed_on_error, hub_hint, storage_errors
from .local_write import ResumableFile, flush_folder, flush_tree
from .schemes import check_path, local_path, open_storage
from .wrapped import WrappedStorage
