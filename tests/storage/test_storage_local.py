"""Local storage: exact ranges, files that change, and clear errors."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from limits import few_descriptors

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import LocalStorage, open_storage

MIB = 1 << 20


@pytest.fixture(scope="module")
def big_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("storage") / "data"
    path.write_bytes(np.random.default_rng(0).bytes(13 * MIB + 5))
    return path


def read(storage, path, offset, sizes, **kwargs):
    buffers = [memoryview(bytearray(size)) for size in sizes]
    storage.read_into(str(path), offset, buffers, **kwargs)
    return b"".join(buffers)


def drop_from_cache(path):
    """Evicts a file's pages, so that the next read is a cold one."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@given(
    offset=st.integers(0, 9 * MIB),
    sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=5),
)
def test_ranges_are_exact(big_file, offset, sizes):
    with LocalStorage() as storage:
        expected = big_file.read_bytes()[offset : offset + sum(sizes)]
        assert read(storage, big_file, offset, sizes) == expected


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 3 * MIB + 17])
@pytest.mark.parametrize("size", [MIB, 9 * MIB, 10 * MIB - 12])
def test_cold_ranges_are_exact(big_file, offset, size, shared):
    drop_from_cache(big_file)
    with LocalStorage() as storage:
        sizes = [size // 3, 1, size - size // 3 - 1]
        expected = big_file.read_bytes()[offset : offset + size]
        assert read(storage, big_file, offset, sizes, shared=shared) == expected
        drop_from_cache(big_file)
        assert read(storage, big_file, offset, [size], shared=shared) == expected


def test_the_last_bytes_of_a_cold_file(big_file):
    size = big_file.stat().st_size
    drop_from_cache(big_file)
    with LocalStorage() as storage:
        assert (
            read(storage, big_file, size - 2 * MIB, [2 * MIB]) == big_file.read_bytes()[-2 * MIB :]
        )


def test_more_buffers_than_one_system_call_takes(big_file):
    with LocalStorage() as storage:
        assert read(storage, big_file, 3, [7] * 5000) == big_file.read_bytes()[3:35003]


def test_reading_past_the_end_names_range_and_end(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    with LocalStorage() as storage, pytest.raises(osl.TruncatedFileError) as caught:
        read(storage, tmp_path / "f", 3, [4])
    assert "bytes [3, 7)" in str(caught.value)
    assert "end of file at 5" in str(caught.value)
    assert caught.value.file == str(tmp_path / "f")


@pytest.mark.parametrize("size", [100, 3 * MIB])
def test_a_file_that_shrinks_is_truncated(tmp_path, size):
    path = tmp_path / "f"
    path.write_bytes(bytes(size))
    with LocalStorage() as storage:
        assert storage.size(str(path)) == size
        os.truncate(path, size // 2)
        drop_from_cache(path)
        with pytest.raises(osl.TruncatedFileError, match="truncated"):
            read(storage, path, 0, [size])


def test_a_file_that_is_written_to_is_refused(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    with LocalStorage() as storage:
        storage.size(str(path))
        with open(path, "ab") as file:
            file.write(b"more")
        with pytest.raises(osl.StorageError, match="changed, replaced or removed while bytes"):
            read(storage, path, 0, [100])


def test_a_file_that_is_replaced_is_read_as_it_was_opened(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with LocalStorage() as storage:
        storage.size(str(path))
        (tmp_path / "g").write_bytes(b"new")
        os.replace(tmp_path / "g", path)
        assert read(storage, path, 0, [3]) == b"old"


def test_a_replaced_file_is_refused_once_its_descriptor_was_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("orbax_safetensors_layout.storage.local._MAX_OPEN_FILES", 1)
    path = tmp_path / "f"
    path.write_bytes(b"old")
    (tmp_path / "other").write_bytes(b"")
    with LocalStorage() as storage:
        storage.size(str(path))
        storage.size(str(tmp_path / "other"))
        (tmp_path / "g").write_bytes(b"new")
        os.replace(tmp_path / "g", path)
        with pytest.raises(osl.StorageError, match="replaced or removed while it was read"):
            read(storage, path, 0, [3])


def test_descriptors_are_bounded_and_released(tmp_path, monkeypatch):
    monkeypatch.setattr("orbax_safetensors_layout.storage.local._MAX_OPEN_FILES", 3)
    before = len(os.listdir("/proc/self/fd"))
    with LocalStorage() as storage:
        for number in range(20):
            (tmp_path / str(number)).write_bytes(b"x")
            assert read(storage, tmp_path / str(number), 0, [1]) == b"x"
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_program_with_few_descriptors_left(tmp_path):
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    spare = os.open(os.devnull, os.O_RDONLY)  # the number of the next one
    os.close(spare)
    with LocalStorage() as storage, few_descriptors(spare + 3):
        data = [read(storage, tmp_path / str(n), 0, [len(str(n))]) for n in range(20)]
    assert data == [b"%d" % number for number in range(20)]


def test_a_missing_file(tmp_path):
    with LocalStorage() as storage, pytest.raises(osl.CheckpointNotFoundError, match="no such"):
        storage.size(str(tmp_path / "gone"))


def test_a_folder_in_place_of_a_file(tmp_path):
    """A folder has a size, so the failure comes from the read itself."""
    with (
        LocalStorage() as storage,
        pytest.raises(osl.StorageError, match=r"bytes \[0, 1\)") as caught,
    ):
        read(storage, tmp_path, 0, [1])
    assert isinstance(caught.value.__cause__, IsADirectoryError)


def test_a_closed_storage_refuses(big_file):
    storage = LocalStorage()
    storage.close()
    with pytest.raises(osl.StorageError, match="closed"):
        storage.size(str(big_file))


def test_listing(tmp_path):
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with LocalStorage() as storage:
        assert storage.list(str(tmp_path)) == ["a", "b"]
        assert storage.list(str(tmp_path / "gone")) == []
        assert storage.is_file(str(tmp_path / "a"))
        assert not storage.is_file(str(tmp_path))


def test_links_that_lead_nowhere_are_not_passed_over(tmp_path):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "b.safetensors")
    with LocalStorage() as storage:
        assert storage.list(str(tmp_path)) == ["a.safetensors", "b.safetensors"]
    with pytest.raises((osl.CheckpointNotFoundError, osl.StorageError)) as caught:
        osl.load(tmp_path)
    assert str(tmp_path) in caught.value.file


def test_paths(tmp_path):
    for text in (str(tmp_path), f"file://{tmp_path}"):
        storage, path = open_storage(text)
        assert path == str(tmp_path)
        storage.close()
    with pytest.raises(osl.StorageError, match="cannot open a ftp:// path"):
        open_storage("ftp://host/model")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_what_is_no_path_is_not_the_working_folder(text, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert not osl.is_safetensors_checkpoint(text)
    with pytest.raises(osl.StorageError, match="path is empty"):
        osl.load(text)
    with pytest.raises(osl.StorageError, match="path is empty"):
        osl.save(text, {"a": np.zeros(1)}, overwrite=True)


def test_mapped_pages_outlive_the_storage(big_file):
    with LocalStorage() as storage:
        view = storage.map(str(big_file))
    assert bytes(view[:5]) == big_file.read_bytes()[:5]
    with LocalStorage() as storage:
        (big_file.parent / "empty").write_bytes(b"")
        with pytest.raises(osl.StorageError, match="cannot map"):
            storage.map(str(big_file.parent / "empty"))


def test_what_the_page_cache_holds(big_file):
    size = big_file.stat().st_size
    big_file.read_bytes()
    assert in_page_cache(big_file).all()
    with LocalStorage() as storage:
        assert all(storage.is_cached(str(big_file), place) for place in range(0, size, 99_999))


def test_what_the_page_cache_has_lost(big_file):
    """To ask begins a read, which has sometimes ended by then; a page in use is not evicted."""
    seen = set()
    with LocalStorage() as storage:
        for _ in range(1000):
            drop_from_cache(big_file)
            is_evicted = not in_page_cache(big_file)[0]
            seen.add((is_evicted, storage.is_cached(str(big_file), 0)))
            if (True, False) in seen:
                break
    assert (True, False) in seen or seen == {(False, True)}  # a tmpfs evicts nothing


def in_page_cache(path):
    """Whether the page cache holds each page of a file, as mincore(2) says."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:
        start = ctypes.c_char.from_buffer(pages)
        assert libc.mincore(ctypes.addressof(start), size, flags.ctypes.data) == 0
        del start
    return (flags & 1).astype(bool)
