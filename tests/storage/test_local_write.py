"""Files of this machine that are being written: short writes, full disks, and what is left."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from limits import few_descriptors, full_disk

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import LocalStorage, flush_folder, local_write
from orbax_safetensors_layout.storage.local_write import LocalFileWriter

real_pwritev = os.pwritev


def data_of(size, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def written(path, size, writes, *, durable=False):
    """The bytes of a file after some writes of (offset, buffers)."""
    writer = LocalFileWriter(str(path), size, durable=durable)
    for offset, buffers in writes:
        writer.write_at(offset, buffers)
    assert not path.exists()
    writer.finish()
    return path.read_bytes()


@pytest.fixture
def fd_count():
    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    yield
    assert count() == before


@pytest.mark.usefixtures("fd_count")
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("ends", ["finish", "abort"])
def test_files_that_wait_are_not_all_open(tmp_path, durable, ends):
    before = len(os.listdir("/proc/self/fd"))
    writers = [LocalFileWriter(str(tmp_path / f"{n}"), 8, durable=durable) for n in range(200)]
    assert len(os.listdir("/proc/self/fd")) < before + 100
    assert all((tmp_path / f"{n}.partial").stat().st_size == 8 for n in range(200))
    for n, writer in enumerate(writers):
        if n % 2:
            writer.write_at(0, [memoryview(b"%8d" % n)])
        getattr(writer, ends)()
    names = {f"{n}" for n in range(200)} if ends == "finish" else set()
    assert {*os.listdir(tmp_path)} == names
    for name in names:
        expected = name.encode().rjust(8) if int(name) % 2 else bytes(8)
        assert (tmp_path / name).read_bytes() == expected


def test_too_many_open_files_have_a_hint(tmp_path):
    with few_descriptors(3), pytest.raises(osl.StorageError, match=r"ulimit -n.*max_file_bytes"):
        LocalFileWriter(str(tmp_path / "f"), 8, durable=False)


@pytest.mark.usefixtures("fd_count")
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_appears_when_it_is_finished(tmp_path, durable):
    data = data_of(10_000)
    writer = LocalFileWriter(str(tmp_path / "f"), 10_000, durable=durable)
    assert os.listdir(tmp_path) == ["f.partial"]
    assert os.stat(tmp_path / "f.partial").st_size == 10_000
    writer.write_at(5_000, [data[5_000:]])
    writer.write_at(0, [memoryview(data[:5_000])])
    writer.finish()
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == data.tobytes()
    writer.abort()
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.usefixtures("fd_count")
def test_an_aborted_file_leaves_nothing_and_the_old_one_stays(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    writer = LocalFileWriter(str(tmp_path / "f"), 100, durable=True)
    writer.write_at(0, [data_of(100)])
    writer.abort()
    writer.abort()
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_what_a_crash_left_is_overwritten(tmp_path):
    (tmp_path / "f.partial").write_bytes(bytes(1000))
    assert written(tmp_path / "f", 3, [(0, [data_of(3)])]) == data_of(3).tobytes()
    assert os.listdir(tmp_path) == ["f"]


def test_an_empty_file(tmp_path):
    assert written(tmp_path / "f", 0, [(0, [])]) == b""
    assert written(tmp_path / "g", 0, [(0, [data_of(0), data_of(0)])]) == b""


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000])
def test_more_buffers_than_one_system_call_takes(tmp_path, count):
    data = data_of(7 * count)
    buffers = [data[7 * i : 7 * i + 7] for i in range(count)]
    assert written(tmp_path / "f", 7 * count, [(0, buffers)]) == data.tobytes()


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    offset=st.integers(0, 20),
    takes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    most_buffers=st.integers(1, 40),
    kind=st.sampled_from(["array", "memoryview", "wide", "read-only"]),
)
def test_short_writes_go_on_where_they_ended(
    tmp_path_factory, sizes, offset, takes, most_buffers, kind
):
    """A file system may take fewer bytes than it is given, also none of a buffer or half of one."""
    if most_buffers <= len(sizes):  # a call's worth of empty buffers would write nothing
        sizes = [size or 1 for size in sizes]
    total = sum(sizes)
    data = data_of(total)
    buffers, position = [], 0
    for size in sizes:
        piece = data[position : position + size].copy()
        if kind == "memoryview":
            piece = memoryview(piece)
        elif kind == "wide":
            piece = piece.reshape(1, size)
        elif kind == "read-only":
            piece.flags.writeable = False
        buffers.append(piece)
        position += size
    calls = []

    def short(fd, given, at):
        given = [
            bytes(memoryview(buffer).cast("B") if memoryview(buffer).nbytes else b"")
            for buffer in given
        ]
        assert len(given) <= most_buffers
        calls.append(at)
        allowed = takes[len(calls) % len(takes)]
        return real_pwritev(fd, [b"".join(given)[:allowed]], at)

    path = tmp_path_factory.getbasetemp() / "short"
    path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", short)
        patch.setattr("orbax_safetensors_layout.storage.buffers._MAX_BUFFERS", most_buffers)
        data_written = written(path, offset + total, [(offset, buffers)])
    assert data_written == bytes(offset) + data.tobytes()


PAGE = 4096
MIB = 1 << 20


@st.composite
def cuts(draw):
    """A file of a few MB cut into ranges, on pages and off them."""
    size = draw(st.integers(1, 6 * MIB))
    near = st.integers(0, size // PAGE).map(lambda page: page * PAGE)
    places = draw(st.lists(st.one_of(near, st.integers(0, size)), max_size=6))
    places = sorted({0, size, *(min(place, size) for place in places)})
    return list(itertools.pairwise(places))


@settings(deadline=None, max_examples=60)
@given(cuts(), st.sampled_from([1, 2, 7, 1000]), st.randoms(use_true_random=False))
def test_durable_files_whatever_the_ranges(tmp_path_factory, ranges, count, random):
    """Large writes may go past the page cache, what is no whole page through it."""
    size = ranges[-1][1]
    data = data_of(size, seed=size)
    writes = []
    for start, stop in ranges:
        step = max(1, (stop - start) // count)
        pieces = [data[at : min(at + step, stop)] for at in range(start, stop, step)]
        writes.append((start, pieces))
    random.shuffle(writes)
    path = tmp_path_factory.getbasetemp() / "durable"
    path.unlink(missing_ok=True)
    assert written(path, size, writes, durable=True) == data.tobytes()


@pytest.mark.usefixtures("fd_count")
@pytest.mark.parametrize("threads", [2, 8])
def test_durable_files_from_many_threads(tmp_path, threads):
    """Neighbours share pages; each of them writes its part of those alone."""
    data = data_of(40 * MIB + 123)
    rng = np.random.default_rng(0)
    places = sorted({0, data.size, *rng.integers(0, data.size, 40).tolist()})
    for _ in range(3):
        writer = LocalFileWriter(str(tmp_path / "f"), data.size, durable=True)
        with ThreadPoolExecutor(threads) as pool:
            jobs = [
                pool.submit(writer.write_at, start, [data[start:stop]])
                for start, stop in rng.permutation(list(itertools.pairwise(places))).tolist()
            ]
            for job in jobs:
                job.result()
        writer.finish()
        assert (tmp_path / "f").read_bytes() == data.tobytes()


@pytest.mark.usefixtures("fd_count")
@pytest.mark.parametrize("how", ["short", errno.EINVAL, errno.EOPNOTSUPP, "unaligned"])
def test_durable_files_where_the_page_cache_cannot_be_passed(tmp_path, monkeypatch, how):
    real = os.pwrite

    def pwrite(fd, data, offset):
        if how == "short":
            return real(fd, data[:PAGE], offset)
        if how == "unaligned":
            return real(fd, data[: PAGE + 1], offset) if offset % (2 * PAGE) else 0
        raise OSError(how, os.strerror(how))

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = data_of(9 * MIB + 5)
    data_written = written(
        tmp_path / "f", data.size, [(7, [data[7:]]), (0, [data[:7]])], durable=True
    )
    assert data_written == data.tobytes()


@pytest.mark.usefixtures("fd_count")
def test_a_full_disk_past_the_page_cache(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "pwritev", full)
    writer = LocalFileWriter(str(tmp_path / "f"), 9 * MIB, durable=True)
    with pytest.raises(osl.StorageError, match="No space left"):
        writer.write_at(0, [data_of(9 * MIB)])
    writer.abort()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
def test_durable_files_in_memory():
    """A file system that has no pages to pass."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        data = data_of(3 * MIB + 1)
        assert written(Path(folder) / "f", data.size, [(0, [data])], durable=True) == data.tobytes()


@pytest.mark.usefixtures("fd_count")
def test_a_file_system_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    writer = LocalFileWriter(str(tmp_path / "f"), 10, durable=False)
    with pytest.raises(osl.StorageError, match=r"bytes \[3, 8\) failed") as caught:
        writer.write_at(3, [data_of(5)])
    assert caught.value.file == str(tmp_path / "f")
    writer.abort()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_write_names_file_range_and_cause(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    writer = LocalFileWriter(str(tmp_path / "f"), 10, durable=False)
    with pytest.raises(osl.StorageError) as caught:
        writer.write_at(0, [data_of(5), data_of(3)])
    assert "bytes [0, 8)" in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert ("Free space" in str(caught.value)) == (code != errno.EIO)
    assert isinstance(caught.value.__cause__, OSError)
    writer.abort()


def test_many_threads_write_one_file(tmp_path):
    size, step = 4_000_000, 10_007
    data = data_of(size)
    writer = LocalFileWriter(str(tmp_path / "f"), size, durable=False)
    starts = np.random.default_rng(0).permutation(np.arange(0, size, step)).tolist()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(writer.write_at, at, [data[at : at + step]]) for at in starts]
        for job in jobs:
            job.result()
    writer.finish()
    assert (tmp_path / "f").read_bytes() == data.tobytes()


@pytest.mark.usefixtures("fd_count")
def test_no_folder_no_file(tmp_path):
    with pytest.raises(osl.StorageError, match="cannot create") as caught:
        LocalFileWriter(str(tmp_path / "gone" / "f"), 10, durable=False)
    assert caught.value.file == str(tmp_path / "gone" / "f")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.usefixtures("fd_count")
@pytest.mark.parametrize("preallocates", [True, False])
def test_no_room_is_an_error_before_anything_is_written(tmp_path, monkeypatch, preallocates):
    if not preallocates:
        monkeypatch.setattr(local_write, "_libc_fallocate", lambda: None)
    with (
        full_disk(5_000),
        pytest.raises(osl.StorageError, match="cannot make room for 10000 bytes") as caught,
    ):
        LocalFileWriter(str(tmp_path / "f"), 10_000, durable=False)
    assert caught.value.file == str(tmp_path / "f")
    assert os.listdir(tmp_path) == []


def fallocate_that_fails(code, calls):
    def fallocate(*_):
        calls.append(code)
        ctypes.set_errno(code)
        return -1

    return lambda: fallocate


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_file_systems_that_cannot_preallocate(tmp_path, monkeypatch, code):
    calls = []
    monkeypatch.setattr(local_write, "_libc_fallocate", fallocate_that_fails(code, calls))
    data = data_of(10_000)
    assert written(tmp_path / "f", 10_000, [(0, [data])]) == data.tobytes()
    assert calls == [code]


def test_systems_without_fallocate(tmp_path, monkeypatch):
    monkeypatch.setattr(local_write, "_libc_fallocate", lambda: None)
    data = data_of(10_000)
    writer = LocalFileWriter(str(tmp_path / "f"), 10_000, durable=False)
    assert os.stat(tmp_path / "f.partial").st_size == 10_000
    writer.write_at(0, [data])
    writer.finish()
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_a_disk_without_room_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(local_write, "_libc_fallocate", fallocate_that_fails(errno.ENOSPC, []))
    with pytest.raises(osl.StorageError, match="No space left") as caught:
        LocalFileWriter(str(tmp_path / "f"), 10_000, durable=False)
    assert "Free space" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_signal_does_not_fail_a_save(tmp_path, monkeypatch):
    """fallocate(2) may end with EINTR; Python's own system calls are begun again (PEP 475)."""
    real = local_write._libc_fallocate()
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) < 3:
            ctypes.set_errno(errno.EINTR)
            return -1
        return real(*arguments)

    monkeypatch.setattr(local_write, "_libc_fallocate", lambda: interrupted)
    assert written(tmp_path / "f", 3, [(0, [data_of(3)])]) == data_of(3).tobytes()
    assert len(calls) == 3


def test_signals_while_writing(tmp_path):
    hits = []
    old = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        data = data_of(1_000_000)
        writer = LocalFileWriter(str(tmp_path / "f"), 50_000_000, durable=True)
        for number in range(50):
            writer.write_at(number * 1_000_000, [data])
        writer.finish()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert hits
    assert (tmp_path / "f").read_bytes() == data.tobytes() * 50


@pytest.mark.usefixtures("fd_count")
def test_finishing_that_fails_names_the_file(tmp_path):
    writer = LocalFileWriter(str(tmp_path / "f"), 10, durable=False)
    (tmp_path / "f").mkdir()
    with pytest.raises(osl.StorageError, match="completing the file failed") as caught:
        writer.finish()
    assert caught.value.file == str(tmp_path / "f")
    writer.abort()
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.usefixtures("fd_count")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("durable", [False, True])
def test_a_close_that_fails_is_not_repeated(tmp_path, monkeypatch, code, durable):
    """On NFS it may report a write that failed; the descriptor is closed all the same."""
    real, closed = os.close, []

    def close(fd):
        real(fd)
        closed.append(fd)
        raise OSError(code, os.strerror(code))

    writer = LocalFileWriter(str(tmp_path / "f"), 10, durable=durable)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(osl.StorageError, match="completing the file failed") as caught:
        writer.finish()
    writer.abort()
    monkeypatch.undo()
    assert os.strerror(code) in str(caught.value)
    assert closed
    assert len(set(closed)) == len(closed)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("durable", [False, True])
def test_what_must_survive_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch, durable):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, real=real: (order.append(name), real(*a))[1]
        )
    writer = LocalFileWriter(str(tmp_path / "f"), 0, durable=durable)
    writer.finish()
    assert order == (["fsync", "replace"] if durable else ["replace"])


@pytest.mark.usefixtures("fd_count")
def test_flushing_folders(tmp_path, monkeypatch):
    flush_folder(str(tmp_path))
    with pytest.raises(osl.StorageError, match="flushing failed"):
        flush_folder(str(tmp_path / "gone"))

    def fail(code):
        def fsync(_):
            raise OSError(code, os.strerror(code))

        return fsync

    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))  # as some network file systems do
    flush_folder(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(osl.StorageError, match="flushing failed"):
        flush_folder(str(tmp_path))


def test_files_keep_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        written(tmp_path / "f", 0, [])
    finally:
        os.umask(old)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_the_storage_makes_and_removes(tmp_path):
    with LocalStorage() as storage:
        folder = str(tmp_path / "a" / "b")
        storage.make_folder(folder)
        storage.make_folder(folder)
        storage.create(f"{folder}/f", 0, durable=False).finish()
        (tmp_path / "link").symlink_to(tmp_path / "a")
        storage.remove(str(tmp_path / "link"))
        assert (tmp_path / "a" / "b" / "f").exists()
        storage.remove(f"{folder}/f")
        storage.remove(f"{folder}/f")
        storage.remove(str(tmp_path / "a"))
        storage.remove(str(tmp_path / "a"))
        assert os.listdir(tmp_path) == []
        (tmp_path / "f").write_text("")
        with pytest.raises(osl.StorageError, match="cannot make the folder") as caught:
            storage.make_folder(str(tmp_path / "f" / "g"))
        assert caught.value.file == str(tmp_path / "f" / "g")
