"""The contract of storages: exact ranges, one version of a file, clear errors, whole files."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import backends
import numpy as np
import pytest
from faults import Fault
from remote_checks import shown

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import join, open_storage

MIB = 1 << 20
DATA = np.random.default_rng(0).bytes(3 * MIB + 5)
QUICK = osl.RetryPolicy(attempts=4, base_seconds=0.001, max_seconds=0.01, attempt_seconds=30)


@pytest.fixture(scope="module", params=backends.BACKENDS)
def server(request):
    with backends.running(request.param) as running:
        yield running


@pytest.fixture
def remote(place):
    """A place of `on_servers`."""
    return place


on_servers = pytest.mark.parametrize(
    "server", [*backends.REMOTE, *backends.READ_ONLY], indirect=True
)
on_object_stores = pytest.mark.parametrize("server", backends.REMOTE, indirect=True)
# A revision of the hub stays what it was.
on_what_changes = pytest.mark.parametrize("server", [*backends.REMOTE, "https"], indirect=True)
on_writable = pytest.mark.parametrize("server", backends.WRITABLE, indirect=True)
on_listing = pytest.mark.parametrize("server", backends.LISTING, indirect=True)


def opened(place, **policy):
    storage, folder = open_storage(
        place.url, retries=osl.RetryPolicy(**policy) if policy else QUICK
    )
    return storage, folder


def looked_at(place):
    """A storage that has looked at a file of `DATA`, and the file."""
    place.put("f", DATA)
    storage, folder = opened(place)
    file = join(folder, "f")
    assert storage.size(file) == len(DATA)
    place.server.take_log()
    return storage, file


def read(storage, file, offset, sizes):
    buffers = [memoryview(bytearray(size)) for size in sizes]
    storage.read_into(file, offset, buffers)
    return b"".join(buffers)


@pytest.mark.parametrize("offset", [0, 1, 4096, 2 * MIB + 3, len(DATA) - 1, len(DATA)])
@pytest.mark.parametrize("sizes", [[1], [0, 5, 0], [700_001, 3, 299_000], [7] * 2000])
def test_ranges_are_exact(place, offset, sizes):
    place.put("f", DATA)
    sizes = [min(size, len(DATA) - offset) for size in sizes]
    while sum(sizes) > len(DATA) - offset:
        sizes.pop()
    storage, folder = opened(place)
    with storage:
        expected = DATA[offset : offset + sum(sizes)]
        assert read(storage, join(folder, "f"), offset, sizes) == expected


def test_reading_past_the_end_is_refused_with_range_and_end(place):
    place.put("f", b"12345")
    storage, folder = opened(place)
    with storage, pytest.raises(osl.TruncatedFileError) as caught:
        read(storage, join(folder, "f"), 3, [4])
    assert "bytes [3, 7)" in str(caught.value)
    assert "end of file at 5" in str(caught.value)
    assert caught.value.file == join(folder, "f")


def test_a_missing_file(place):
    storage, folder = opened(place)
    file = join(folder, "gone")
    with storage:
        for look in (storage.size, storage.modified_seconds, lambda f: read(storage, f, 0, [1])):
            with pytest.raises(osl.CheckpointNotFoundError, match="no such") as caught:
                look(file)
            assert caught.value.file == file


@on_listing
def test_listing_and_looking(place):
    for name in ("b", "a", "folder/c", "folder/deep/d", "folder2/e", "with space"):
        place.put(name, name.encode())
    storage, folder = opened(place)
    with storage:
        assert storage.list(folder) == ["a", "b", "with space"]
        assert storage.folders(folder) == ["folder", "folder2"]
        assert storage.folders(join(folder, "folder")) == ["deep"]
        assert storage.folders(join(folder, "gone")) == []
        assert storage.list(join(folder, "folder")) == ["c"]
        assert storage.list(join(folder, "fold")) == []
        assert storage.list(join(folder, "gone")) == []
        assert storage.is_file(join(folder, "a"))
        assert storage.is_file(join(folder, "folder/deep/d"))
        assert not storage.is_file(join(folder, "folder"))
        assert not storage.is_file(join(folder, "gone"))
        assert storage.size(join(folder, "with space")) == len("with space")


@on_object_stores
def test_what_tools_put_for_a_folder_is_no_file_in_it(remote):
    for name in ("folder/", "folder/f"):
        remote.put(name, b"")
    storage, folder = opened(remote)
    with storage:
        assert storage.list(join(folder, "folder")) == ["f"]


@on_listing
def test_what_was_listed_is_read_and_unchanged(place):
    place.put("f", DATA)
    storage, folder = opened(place)
    file = join(folder, "f")
    with storage:
        assert storage.list(folder) == ["f"]
        assert read(storage, file, 7, [9]) == DATA[7:16]
        storage.check_unchanged(file)


@on_listing
def test_a_listing_of_many_files_is_complete(place):
    names = [f"f{number:04}" for number in range(60)]
    for name in names:
        place.put(name, b"x")
    storage, folder = opened(place)
    with storage:
        assert storage.list(folder) == names


def test_a_file_knows_when_it_was_written(place):
    place.put("f", b"x")
    storage, folder = opened(place)
    with storage:
        # Clocks of the same machine; object stores tell whole seconds.
        assert storage.modified_seconds(join(folder, "f")) > 1.7e9


@on_what_changes
def test_a_version_is_of_the_content_however_it_is_reached(remote):
    def version():
        storage, folder = opened(remote)
        with storage:
            file = join(folder, "f")
            known = storage.version(file), storage.content_key(file)
            assert (known[0] is None) == (known[1] is None)
            return known[0], file

    remote.put("f", DATA)
    first, file = version()
    assert version() == (first, file)
    assert first is not None
    assert file not in first
    remote.put("f", DATA[::-1])
    assert version()[0] != first


def test_many_threads_read_at_once(place):
    place.put("f", DATA)
    storage, folder = opened(place)
    file = join(folder, "f")

    def check(number):
        start = number * 37_117 % (len(DATA) - 100_000)
        return read(storage, file, start, [50_000, 50_000]) == DATA[start : start + 100_000]

    with storage, ThreadPoolExecutor(16) as pool:
        assert all(pool.map(check, range(100)))


def test_a_file_that_is_replaced_is_never_mixed(place):
    """Every read gives the file as it was when it was first looked at, or an error."""
    place.put("f", b"old" * 1000)
    storage, folder = opened(place)
    file = join(folder, "f")
    with storage:
        assert read(storage, file, 0, [3]) == b"old"
        place.put("f", b"new" * 1000)
        with contextlib.suppress(osl.StorageError):
            assert read(storage, file, 3, [2997]) == b"old" * 999


@on_object_stores
def test_a_file_that_is_replaced_after_it_was_listed_is_refused(remote):
    remote.put("f", b"old")
    storage, folder = opened(remote)
    with storage:
        assert storage.list(folder) == ["f"]
        remote.put("f", b"new")
        with pytest.raises(osl.StorageError, match="replaced"):
            read(storage, join(folder, "f"), 0, [3])


@on_what_changes
def test_a_file_that_is_replaced_after_it_was_looked_at_is_refused(remote):
    """Beyond what came along with its size."""
    remote.put("f", DATA)
    storage, folder = opened(remote)
    file = join(folder, "f")
    with storage:
        assert storage.size(file) == len(DATA)
        remote.put("f", bytes(len(DATA)))
        with pytest.raises(osl.StorageError, match="replaced"):
            read(storage, file, MIB, [3])
        with pytest.raises(osl.StorageError, match="replaced"):
            storage.check_unchanged(file)


@on_what_changes
def test_a_file_that_is_removed_while_it_is_read(remote):
    remote.put("f", DATA)
    storage, folder = opened(remote)
    file = join(folder, "f")
    with storage:
        assert read(storage, file, MIB, [3]) == DATA[MIB : MIB + 3]
        storage.check_unchanged(file)
        remote.delete("f")
        with pytest.raises(osl.StorageError, match="replaced or removed"):
            read(storage, file, MIB, [3])
        with pytest.raises(osl.StorageError, match="replaced or removed"):
            storage.check_unchanged(file)


def test_a_closed_storage_refuses(place):
    place.put("f", b"x")
    storage, folder = opened(place)
    storage.close()
    storage.close()
    with pytest.raises(osl.StorageError, match="closed"):
        storage.size(join(folder, "f"))


@on_servers
@pytest.mark.parametrize("kind", ["status", "reset", "truncate", "range"])
def test_transient_failures_are_tried_again(remote, kind):
    storage, file = looked_at(remote)
    with storage:
        remote.server.fail(Fault(kind, times=3))
        assert read(storage, file, 5, [MIB]) == DATA[5 : 5 + MIB]
    gets = [entry for entry in remote.server.take_log() if entry["method"] == "GET"]
    assert [entry["fault"] for entry in gets] == [kind] * 3 + [None]
    assert {(entry["first"], entry["last"]) for entry in gets} == {(5, 5 + MIB - 1)}


@on_servers
@pytest.mark.parametrize("kind", ["status", "reset", "truncate", "range"])
def test_the_error_after_the_last_attempt(remote, kind):
    storage, file = looked_at(remote)
    remote.server.fail(Fault(kind, times=99))
    with storage, pytest.raises(osl.StorageError) as caught:
        read(storage, file, 5, [MIB])
    assert "reading bytes [5, 1048581) failed after 4 attempts" in str(caught.value)
    assert caught.value.file == file
    assert caught.value.found
    assert "not-a-real-secret" not in shown(caught.value)


@on_servers
@pytest.mark.parametrize("status", [400, 403, 416])
def test_permanent_failures_are_not_tried_again(remote, status):
    storage, file = looked_at(remote)
    remote.server.fail(Fault("status", status=status, times=99))
    with storage, pytest.raises(osl.StorageError, match=str(status)) as caught:
        read(storage, file, 5, [7])
    assert caught.value.file == file
    assert [entry["fault"] for entry in remote.server.take_log()] == ["status"]


@on_servers
@pytest.mark.parametrize("status", [408, 429, 500, 502, 504])
def test_busy_servers_are_tried_again(remote, status):
    remote.put("f", DATA)
    faults = [Fault("status", method, status=status) for method in ("HEAD", "GET")]
    remote.server.fail(*faults)
    storage, folder = opened(remote)
    with storage:
        assert read(storage, join(folder, "f"), 5, [7]) == DATA[5:12]


@on_servers
def test_a_server_that_does_not_answer_is_a_time_out(remote):
    remote.put("f", DATA)
    remote.server.fail(Fault("delay", seconds=5, times=99))
    storage, folder = opened(remote, attempts=2, attempt_seconds=0.2, base_seconds=0)
    with storage, pytest.raises(osl.StorageError, match="failed after 2 attempts"):
        read(storage, join(folder, "f"), 5, [7])


@on_object_stores
def test_listing_and_removing_are_tried_again(remote):
    remote.put("folder/a", b"x")
    storage, folder = opened(remote)
    with storage:
        remote.server.fail(Fault("status", times=2))
        assert storage.list(join(folder, "folder")) == ["a"]
        methods = ("GET", "POST", "DELETE")
        remote.server.fail(*(Fault("status", method) for method in methods))
        storage.remove(join(folder, "folder"))
    assert remote.names() == []


@on_servers
def test_an_interrupted_storage_does_not_try_again(remote):
    remote.put("f", DATA)
    storage, folder = opened(remote, base_seconds=3600, max_seconds=3600, total_seconds=10_000)
    with storage:
        assert storage.size(join(folder, "f"))
        remote.server.fail(Fault("status", times=99))
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(read, storage, join(folder, "f"), MIB, [1])
            storage.interrupt()
            with pytest.raises(osl.StorageError, match="attempt"):
                job.result(60)


@pytest.fixture
def small_parts(monkeypatch):
    """Objects of a few MiB are already uploaded in parts, and few of their bytes are held back."""
    where = "orbax_safetensors_layout.storage.cloud_write"
    monkeypatch.setattr(f"{where}._PART_BYTES", 5 * MIB)
    monkeypatch.setattr(f"{where}.HELD_BYTES", MIB)


def pieces(data, step, order):
    starts = list(range(0, len(data), step))
    if order == "backwards":
        starts.reverse()
    elif order == "mixed":
        random.Random(7).shuffle(starts)
    return [(start, data[start : start + step]) for start in starts]


@on_writable
@pytest.mark.parametrize("order", ["forwards", "backwards", "mixed"])
@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 5 * MIB + 1, 11 * MIB + 17])
def test_a_file_is_written_in_any_order(place, small_parts, size, order):
    data = (DATA * 8)[:size]
    storage, folder = opened(place)
    with storage:
        writer = storage.create(join(folder, "f"), size, durable=True)
        for start, piece in pieces(data, 1_300_001, order):
            half = len(piece) // 2
            writer.write_at(start, [memoryview(piece)[:half], np.frombuffer(piece[half:], "u1")])
        assert "f" not in place.names()
        writer.finish()
        assert place.get("f") == data
        assert storage.size(join(folder, "f")) == size


@on_writable
@pytest.mark.parametrize("threads", [2, 9])
def test_a_file_is_written_by_many_threads(place, small_parts, threads):
    data = DATA * 6
    storage, folder = opened(place)
    with storage, ThreadPoolExecutor(threads) as pool:
        writer = storage.create(join(folder, "f"), len(data), durable=False)
        jobs = [
            pool.submit(writer.write_at, start, [memoryview(piece)])
            for start, piece in pieces(data, 200_003, "mixed")
        ]
        for job in jobs:
            job.result()
        writer.finish()
    assert place.get("f") == data


@on_writable
def test_a_new_file_replaces_the_old_one_at_once(place, small_parts):
    place.put("f", b"old")
    data = DATA * 3
    storage, folder = opened(place)
    file = join(folder, "f")
    with storage:
        assert storage.size(file) == 3
        writer = storage.create(file, len(data), durable=False)
        writer.write_at(0, [memoryview(data)])
        assert place.get("f") == b"old"
        writer.finish()
        assert place.get("f") == data
        if place.server is not None:  # a local file is still open as it was
            assert storage.size(file) == len(data)


@on_writable
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_an_aborted_file_leaves_nothing(place, small_parts, order):
    data = DATA * 6
    threads = threading.active_count()
    storage, folder = opened(place)
    with storage:
        writer = storage.create(join(folder, "f"), len(data), durable=False)
        for start, piece in pieces(data, MIB, order)[:-1]:
            writer.write_at(start, [memoryview(piece)])
        writer.abort()
        writer.abort()
        assert storage.list(folder) == []
    assert place.names() == []
    assert threading.active_count() == threads
    if place.server is not None:
        assert place.server.uploads() == 0


@on_writable
def test_aborting_a_finished_file_does_nothing(place):
    storage, folder = opened(place)
    with storage:
        writer = storage.create(join(folder, "f"), 1, durable=False)
        writer.write_at(0, [memoryview(b"x")])
        writer.finish()
        writer.abort()
    assert place.get("f") == b"x"


@on_object_stores
def test_uploads_survive_a_busy_server(remote, small_parts):
    data = DATA * 6
    remote.server.fail(
        Fault("status", "PUT", times=3), Fault("reset", "PUT", times=2), Fault("status", "POST")
    )
    storage, folder = opened(remote)
    with storage:
        writer = storage.create(join(folder, "f"), len(data), durable=False)
        writer.write_at(0, [memoryview(data)])
        writer.finish()
    assert remote.get("f") == data


@on_object_stores
@pytest.mark.parametrize("size", [100, 19 * MIB])
def test_an_upload_that_fails_is_one_clear_error_and_leaves_nothing(remote, small_parts, size):
    data = (DATA * 8)[:size]
    storage, folder = opened(remote)
    remote.server.fail(Fault("status", "PUT", status=403, times=99))
    with storage:
        writer = storage.create(join(folder, "f"), size, durable=False)

        def write_all():
            for start, piece in pieces(data, MIB, "forwards"):
                writer.write_at(start, [memoryview(piece)])
            writer.finish()

        with pytest.raises(osl.StorageError, match="writing") as caught:
            write_all()
        assert caught.value.file == join(folder, "f")
        assert "403" in str(caught.value)
        assert "uploadId" not in str(caught.value)
        writer.abort()
    assert remote.names() == []
    assert remote.server.uploads() == 0


@on_writable
def test_folders_are_made_and_removed(place):
    for name in ("folder/a", "folder/deep/b", "folder2/c", "folderless"):
        place.put(name, b"x")
    storage, folder = opened(place)
    with storage:
        storage.make_folder(join(folder, "new/deep"))
        storage.make_folder(join(folder, "new/deep"))
        storage.flush_folder(folder)
        storage.remove(join(folder, "folder"))
        assert place.names() == ["folder2/c", "folderless"]
        storage.remove(join(folder, "folderless"))
        storage.remove(join(folder, "gone"))
        assert place.names() == ["folder2/c"]


def test_neither_threads_nor_descriptors_are_left(place):
    place.put("f", DATA)

    def use():
        storage, folder = opened(place)
        with storage, ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(read, storage, join(folder, "f"), n, [MIB]) for n in range(16)]
            for job in jobs:
                job.result()

    use()  # what lives as long as the process does
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
