"""Threads, memory and processes: task pools, budgets, process groups, progress."""

from .cancellation import Cancellation, interrupt_when_cancelled
from .gc import frozen_heap, paused_collector
from .memory import (
    DIRECT_CHUNK_BYTES,
    SLOT_ALIGNMENT,
    Budget,
    Bytes,
    Register,
    Staging,
    align,
    allocate,
    batches,
    direct_scratch,
)
from .process_group import Fingerprint, ProcessGroup
from .progress import ProgressReport, progress_callback
from .tasks import DaemonThread, Then, Workers
from .text import (
    count_text,
    number_text,
    parse_seconds,
    parse_size,
    seconds_text,
    size_text,
    text_table,
)
