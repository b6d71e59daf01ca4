"""What completing files takes, from pieces that all processes have written or from host values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.plan import WritePlan
from orbax_safetensors_layout.runtime import Workers
from orbax_safetensors_layout.storage import Storage

from .open_files import FileSet


class Completion(NamedTuple):
    """Files that this process has begun, and that something is missing of.

    Attributes:
        plan: What goes where.
        files: The files, with what came from this process's own shards.
        pool: Threads that write.
        storage: Where the pieces are.
        pieces_folder: The folder that the names of the files of pieces are relative to.
        in_order: Whether the files are written from their first bytes to their last.
        memory_budget_bytes: Host bytes of values that are held at once.
        progress: Told of what is done.
        check: Called now and then; raises where another process has failed.
    """

    plan: WritePlan
    files: FileSet
    pool: Workers
    storage: Storage
    pieces_folder: str
    in_order: bool
    memory_budget_bytes: int
    progress: Callable[[Progress], None] | None
    check: Callable[[], None]
