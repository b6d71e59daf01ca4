"""The writer of objects by itself: parts in order, bounded memory, failures at any moment."""

from __future__ import annotations

import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage.cloud_write import (
    HELD_BYTES,
    PARTS_AT_ONCE,
    CloudFileWriter,
    part_bytes,
)

MIB = 1 << 20
SIZE = 160 * MIB + 3
STEP = 4 * MIB


class Sink:
    """An upload that keeps only what it needs to tell whether the bytes were right."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.sizes: list[int] = []
        self.ended = False

    def __call__(self, parts):
        for part in parts:
            assert part.nbytes <= part_bytes(SIZE)
            self.sizes.append(part.nbytes)
            self.sums.append(int(part[:: 64 * 1024].sum()))
            del part
        self.ended = True


def nothing() -> None:
    """Does nothing when an upload is complete."""


def pattern(start, stop):
    """Bytes that tell where they are from."""
    return (
        (np.arange(start // 256, -(-stop // 256), dtype=np.uint32) % 251)
        .astype(np.uint8)
        .repeat(256)[start % 256 :][: stop - start]
    )


def write(writer, order):
    starts = list(range(0, SIZE, STEP))
    for start in reversed(starts) if order == "backwards" else starts:
        writer.write_at(start, [pattern(start, min(start + STEP, SIZE))])


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_memory_is_bounded_in_any_order(order):
    sink = Sink()
    tracemalloc.start()
    try:
        writer = CloudFileWriter("gs://bucket/f", SIZE, sink, nothing)
        write(writer, order)
        writer.finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sink.ended
    assert sum(sink.sizes) == SIZE
    assert set(sink.sizes[:-1]) == {part_bytes(SIZE)}
    starts = np.cumsum([0, *sink.sizes[:-1]])
    for start, size, checksum in zip(starts, sink.sizes, sink.sums, strict=True):
        assert checksum == int(pattern(int(start), int(start) + size)[:: 64 * 1024].sum())
    # One part being filled, one handed over, one in the sink, and what the test itself makes.
    assert peak < HELD_BYTES + 3 * part_bytes(SIZE) + 6 * STEP


def test_bytes_before_their_turn_leave_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    writer = CloudFileWriter("gs://bucket/f", SIZE, Sink(), nothing)
    for start in range(STEP, SIZE, STEP):  # the first bytes are missing
        writer.write_at(start, [pattern(start, min(start + STEP, SIZE))])
    with pytest.raises(osl.StorageError, match="not complete"):
        writer.finish()
    writer.abort()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failing_upload_is_told_to_who_writes(after):
    def failing(parts):
        for number, _ in enumerate(parts):
            if number == after:
                raise ConnectionResetError("connection reset")

    writer = CloudFileWriter("gs://bucket/f", SIZE, failing, nothing)

    def write_all():
        write(writer, "forwards")
        writer.finish()

    with pytest.raises(osl.StorageError, match=r"writing failed.*connection reset") as caught:
        write_all()
    assert caught.value.file == "gs://bucket/f"
    writer.abort()


def test_aborting_wakes_who_waits_for_a_slow_upload():
    begun, release = threading.Event(), threading.Event()

    def slow(parts):
        next(parts)
        begun.set()
        assert release.wait(60)
        for _ in parts:
            pass

    writer = CloudFileWriter("gs://bucket/f", SIZE, slow, nothing)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(write, writer, "forwards")
        assert begun.wait(60)
        aborting = pool.submit(writer.abort)
        with pytest.raises(osl.StorageError, match="given up"):
            writing.result(60)
        release.set()
        aborting.result(60)


@pytest.mark.parametrize("size", [0, 1, 10**9, 5 * 2**30, 80 * 10**9, 81 * 10**9, 5 * 10**12])
def test_ten_thousand_parts_suffice(size):
    assert -(-size // part_bytes(size)) <= 10_000
    assert part_bytes(size) >= 8 * MIB
    assert PARTS_AT_ONCE * part_bytes(80 * 10**9) <= 40 * MIB
