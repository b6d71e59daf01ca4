"""A cache of ranges on this host: what was fetched is not fetched again, and no byte is wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import random
import shutil
import threading
import time
import uuid
from collections import defaultdict
from pathlib import Path
from unittest import mock

import absl.logging
import backends
import checkpoints
import numpy as np
import pytest
from format_helpers import MemoryStorage
from http_server import Reply, Server, file_server, serve_range
from jax.sharding import PartitionSpec as P
from meshes import abstract_of, over_matrices
from programs import run_processes
from remote_checks import TOKEN, assert_same, hub_in_use

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.options import CacheFolder
from orbax_safetensors_layout.storage import join, open_storage
from orbax_safetensors_layout.storage.cache import CachedStorage, RangeCache

PROGRAM = "cache_load.py"
MIB = 1 << 20
TENSORS = checkpoints.llama_like() | {
    "large": checkpoints.random_tensor((3000, 1024), np.float32, 1),
    "larger": checkpoints.random_tensor((2048, 2064), np.float32, 2),
}
OTHERS = {
    name: checkpoints.random_tensor(value.shape, value.dtype, 100 + number)
    for number, (name, value) in enumerate(TENSORS.items())
}
SMALL = {name: checkpoints.random_tensor((900, 1024), np.uint8, len(name)) for name in ("a", "bb")}
SMALL |= {"large": checkpoints.random_tensor((1100, 1024), np.float32, 3)}
TOTAL = sum(value.nbytes for value in TENSORS.values())
PLENTY = 10 * TOTAL
QUICK = osl.RetryPolicy(attempts=3, base_seconds=0.001, attempt_seconds=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.save(tmp_path_factory.mktemp("cache") / "model", TENSORS, files=3)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return checkpoints.save(tmp_path_factory.mktemp("cache") / "other", OTHERS, files=3)


@pytest.fixture(scope="module", params=["https", "hf", *backends.REMOTE])
def running(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    with contextlib.ExitStack() as stack:
        if request.param == "https":
            yield stack.enter_context(file_server(root)), root
        elif request.param == "hf":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            yield stack.enter_context(hub_in_use(patch, root)), root
        else:
            yield stack.enter_context(backends.running(request.param)), root


class WebRemote:
    """A checkpoint on a server, and what of its content went out."""

    is_pinned = False  # one commit is read, whatever comes after it

    def __init__(self, server, root):
        self.server, self._root, self._name = server, root, uuid.uuid4().hex
        self.url = f"{server.url}/files/{self._name}"

    def publish(self, folder):
        for path in folder.iterdir():
            fresh = shutil.copy(path, self._root / "fresh")
            (self._root / self._name).mkdir(exist_ok=True)
            os.replace(fresh, self._root / self._name / path.name)

    def fetched(self):
        """(File, start, stop) of the content that went out since the last call."""
        sent = [request for request, status in self.server.log if status in (200, 206)]
        self.server.log.clear()
        return [(request.path, *request.range) for request in sent]


class HubRemote(WebRemote):
    is_pinned = True

    def __init__(self, hub, root):
        self._hub, self._name = hub, uuid.uuid4().hex
        self.url = f"hf://org/{self._name}"

    def publish(self, folder):
        self._hub.add(f"org/{self._name}", folder)

    def fetched(self):
        sent = self._hub.hub.ranges() + self._hub.cdn.ranges()
        self._hub.hub.log.clear()
        self._hub.cdn.log.clear()
        return sent


class BucketRemote(WebRemote):
    def __init__(self, server, root):
        self._place = backends.BucketPlace(server)
        self.url = self._place.url

    def publish(self, folder):
        for path in folder.iterdir():
            self._place.put(path.name, path.read_bytes())

    def fetched(self):
        log = self._place.server.take_log()
        sent = [entry for entry in log if entry["method"] == "GET" and entry["key"]]
        return [(entry["key"], entry["first"], entry["last"] + 1) for entry in sent]


@pytest.fixture
def remote(running):
    server, root = running
    kinds = {Server: WebRemote, backends.ObjectServer: BucketRemote}
    remote = kinds.get(type(server), HubRemote)(server, root)
    remote.fetched()
    return remote


@pytest.fixture
def empty_web(tmp_path):
    """A web server of its own."""
    with file_server(tmp_path) as server:
        yield WebRemote(server, tmp_path)


@pytest.fixture
def web(empty_web, folder):
    empty_web.publish(folder)
    return empty_web


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def load(remote, cache, tree=None, *, cache_bytes=PLENTY, **kwargs):
    options = osl.ReadOptions(cache=cache, cache_bytes=cache_bytes, retries=QUICK)
    return osl.load(getattr(remote, "url", remote), tree, options=options, **kwargs)


def total(ranges):
    return sum(stop - start for _, start, stop in ranges)


def union(*lists):
    """Disjoint ranges of each file that cover the same bytes."""
    by_file = defaultdict(list)
    for file, start, stop in sorted(range_ for ranges in lists for range_ in ranges):
        merged = by_file[file]
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return [(file, *range_) for file, ranges in by_file.items() for range_ in ranges]


def hashes(tensors):
    """As the children of `PROGRAM` tell them."""
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in tensors.items()}


def entries(cache):
    """The files in which ranges are kept."""
    return sorted(path for path in cache.rglob("*-*") if path.is_file())


def kept_bytes(cache):
    """Bytes of all files, at a moment at which none can be begun: under the lock for that."""
    root = cache / "orbax_safetensors_layout.cache"
    with contextlib.suppress(FileNotFoundError), open(root / "usage", "rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        sizes = {}
        for path in root.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.is_file():  # it may be renamed meanwhile
                    sizes[status.st_ino] = -(-status.st_size // 4096) * 4096
        return sum(sizes.values())
    return 0


@pytest.fixture
def warnings_of(monkeypatch):
    """Warnings of the package's log."""
    texts = []
    monkeypatch.setattr(absl.logging, "warning", lambda text, *args: texts.append(text % args))
    return texts


def test_the_second_load_fetches_nothing(remote, folder, cache):
    remote.publish(folder)
    remote.fetched()
    assert_same(osl.load(remote.url), TENSORS)
    plain = remote.fetched()
    assert total(plain) > TOTAL
    assert_same(load(remote, cache), TENSORS)
    first = remote.fetched()
    assert union(first) == union(plain)
    assert total(first) <= total(plain)
    for spec in (P("x", "y"), P(None, ("x", "y")), P(("x", "y")), P()):
        assert_same(load(remote, cache, abstract_of(TENSORS, over_matrices(spec))), TENSORS)
    osl.plan_load(remote.url, options=osl.ReadOptions(cache=cache))
    assert remote.fetched() == []


def test_plans_are_of_needed_bytes_with_and_without_a_cache(remote, folder, cache):
    remote.publish(folder)
    tree = abstract_of(TENSORS, over_matrices(P("x", "y")))
    plan = osl.plan_load(remote.url, tree)
    load(remote, cache)
    cached = osl.plan_load(remote.url, tree, options=osl.ReadOptions(cache=cache))
    assert cached.cost() == plan.cost()
    assert sorted(cached.ranges()) == sorted(plan.ranges())


def test_conversions_plans_and_checks_fetch_nothing_twice(web, cache, tmp_path, capsys):
    kept = {"cache": cache, "cache_bytes": PLENTY}
    calls = [
        lambda: osl.convert(
            web.url,
            tmp_path / f"converted-{uuid.uuid4().hex}",
            format="hf",
            options=osl.ConvertOptions(**kept),
        ),
        lambda: main(["plan", web.url, "--mesh", "x=4", "-q", "--cache", str(cache)]),
        lambda: osl.verify(web.url, options=osl.ReadOptions(**kept)),
        lambda: main(["verify", web.url, "-q", "--cache", str(cache), "--cache-bytes", "1GB"]),
    ]
    for call in calls:
        shutil.rmtree(cache, ignore_errors=True)
        call()
        assert total(web.fetched()) > 0
        call()
        assert web.fetched() == []
    first, second, *_ = tmp_path.glob("converted-*")
    for converted in (first, second):
        assert_same(osl.load(converted), TENSORS)


def test_a_part_is_fetched_once(remote, folder, cache):
    remote.publish(folder)
    remote.fetched()
    part = load(remote, cache, only=["model.layers.1.*", "large"])
    assert_same(part, {name: TENSORS[name] for name in part})
    first = remote.fetched()
    assert_same(load(remote, cache), TENSORS)
    second = remote.fetched()
    assert total(union(first, second)) == total(first) + total(second)
    load(remote, cache)
    assert remote.fetched() == []


def test_what_is_read_between_what_is_needed_is_kept_as_it_is(remote, tmp_path):
    tensors = {
        name: checkpoints.random_tensor((64, 256), np.float32, ord(name)) for name in "abcdefg"
    }
    remote.publish(checkpoints.save(tmp_path / "model", tensors))
    every_other, part_first = [*"bdf"], tmp_path / "part first"
    assert_same(load(remote, part_first, only=every_other), {n: tensors[n] for n in every_other})
    assert_same(load(remote, part_first), tensors)
    load(remote, tmp_path / "all first")
    remote.fetched()
    for only in (every_other, ["a", "c", "e", "g"], "*"):
        loaded = load(remote, tmp_path / "all first", only=only)
        assert_same(loaded, {name: tensors[name] for name in loaded})
    assert remote.fetched() == []


def test_versions_never_mix(remote, folder, other_folder, cache):
    remote.publish(folder)
    load(remote, cache, only=["model.layers.1.*", "large"])
    for version, tensors in ((other_folder, OTHERS), (folder, TENSORS), (other_folder, OTHERS)):
        remote.publish(version)
        assert_same(load(remote, cache), tensors)
        remote.fetched()
        assert_same(load(remote, cache), tensors)
        assert remote.fetched() == []


def test_a_file_that_is_replaced_during_a_load(remote, folder, other_folder, cache):
    remote.publish(folder)
    load(remote, cache, only="model.layers.1.*")
    storage, path = open_storage(remote.url, retries=QUICK, cache=CacheFolder(str(cache), PLENTY))
    name = next(path.name for path in folder.iterdir() if path.stat().st_size > TOTAL // 3)
    old = (folder / name).read_bytes()
    buffer = memoryview(bytearray(100_000))
    with storage:
        storage.read_into(join(path, name), 0, [buffer])
        remote.publish(other_folder)
        for start in range(0, 5 * MIB, MIB):
            is_cached = remote.is_pinned or start == 0
            with (
                contextlib.nullcontext()
                if is_cached
                else pytest.raises(osl.StorageError, match="changed")
            ):
                storage.read_into(join(path, name), start, [buffer])
                assert buffer == old[start : start + len(buffer)]
    assert_same(load(remote, cache), OTHERS)


@pytest.mark.parametrize(
    "headers", [{}, {"ETag": 'W/"1"'}, {"Last-Modified": "Fri, 21 Nov 2025 10:00:00 GMT"}], ids=str
)
def test_what_has_no_strong_version_is_not_kept(folder, cache, headers, warnings_of):
    def answer(request):
        path = folder / request.path.rpartition("/")[2]
        return serve_range(request, path, headers) if path.is_file() else Reply(404, {})

    with Server(answer) as server:
        for _ in range(2):
            assert_same(load(f"{server.url}/model", cache), TENSORS)
    assert entries(cache) == []
    assert len(warnings_of) == 2
    assert "a strong ETag" in warnings_of[0]


@pytest.mark.parametrize("told", [None, 'W/"1"', '"2"'])
def test_an_answer_that_confirms_another_version_does_not_count(folder, cache, told):
    def answer(request):
        path = folder / request.path.rpartition("/")[2]
        if not path.is_file():
            return Reply(404, {})
        if request.if_none_match is not None:
            return Reply(304, {} if told is None else {"ETag": told})
        return serve_range(request, path, {"ETag": '"1"'})

    with Server(answer) as server:
        for _ in range(2):
            assert_same(load(f"{server.url}/model", cache), TENSORS)
        assert {status for _, status in server.log} == {206, 304, 404}


@pytest.mark.parametrize("fault", ["ignored range", "other size"])
def test_a_wrong_size_is_not_noted_for_good(web, cache, fault):
    server = web.server
    server.faults = lambda request: fault if request.range == (0, 256 << 10) else None
    with pytest.raises(osl.SafetensorsLayoutError):
        load(web, cache)
    server.faults = lambda request: None
    with contextlib.suppress(osl.SafetensorsLayoutError):
        load(web, cache)
    assert_same(load(web, cache), TENSORS)


def _flip(path, rng, folder):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path, rng, folder):
    os.truncate(path, rng.randrange(path.stat().st_size))


def _extend(path, rng, folder):
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 100)))


def _empty(path, rng, folder):
    path.write_bytes(bytes(path.stat().st_size))


def _exchange(path, rng, folder):
    """Puts another entry, or a part of one, in its place."""
    data = rng.choice(entries(folder)).read_bytes()
    size = path.stat().st_size
    path.write_bytes((data * -(-size // len(data)))[:size])


def _delete(path, rng, folder):
    path.unlink()


def _misname(path, rng, folder):
    start, stop = map(int, path.name.split("-"))
    path.rename(path.with_name(f"{start + 1}-{stop + 1}"))


def _overstate(path, rng, folder):
    start, _ = map(int, path.name.split("-"))
    path.rename(path.with_name(f"{start}-{start + (1 << 62)}"))


@pytest.mark.parametrize(
    "damage",
    [_flip, _cut, _extend, _empty, _exchange, _delete, _misname, _overstate],
    ids=lambda d: d.__name__,
)
def test_damaged_entries_are_fetched_again(web, cache, damage):
    load(web, cache)
    rng = random.Random(0)
    for share in (1.0, 0.4, 0.1):
        for path in entries(cache):
            if rng.random() < share and path.exists():
                damage(path, rng, cache)
        assert_same(load(web, cache), TENSORS)
    web.fetched()
    assert_same(load(web, cache), TENSORS)
    assert web.fetched() == []


def test_the_count_of_bytes_may_be_damaged(web, cache):
    for text in (b"", b"no number", b"-1", b"9" * 30, b"\0" * 99):
        load(web, cache)
        (cache / "orbax_safetensors_layout.cache" / "usage").write_bytes(text)
    for path in entries(cache):
        path.unlink()
    assert_same(load(web, cache), TENSORS)
    web.fetched()
    assert_same(load(web, cache), TENSORS)
    assert web.fetched() == []


def test_the_folder_is_deleted_while_it_is_in_use(web, cache):
    """While it is filled, and while it is read from."""
    done = threading.Event()

    def delete():
        while not done.is_set():
            shutil.rmtree(cache, ignore_errors=True)
            time.sleep(0.002)

    deleter = threading.Thread(target=delete)
    deleter.start()
    try:
        for _ in range(15):
            assert_same(load(web, cache), TENSORS)
    finally:
        done.set()
        deleter.join()
    load(web, cache)
    web.fetched()
    assert_same(load(web, cache), TENSORS)
    assert web.fetched() == []


def test_any_ranges(tmp_path):
    """Equal bytes, of which none is fetched twice, and none that was not asked for."""
    data = np.random.default_rng(0).bytes(270 * MIB)  # the place of entries changes at 256 MiB

    class Memory(MemoryStorage):
        kind, save_hint = "https", ""

        def content_key(self, file):
            return file

        def remember(self, notes):
            pass

    storage = Memory({"f": data})
    cached = CachedStorage(storage, CacheFolder(str(tmp_path), 1 << 40))
    rng = random.Random(1)
    longest = len(data) - 1
    for begin in (0, 250 * MIB):
        for _ in range(60):
            start = min(longest, begin + rng.randrange(20 * MIB))
            size = rng.choice([1, 1000, MIB, 9 * MIB])
            size = min(len(data) - start, rng.randint(1, size))
            before = len(storage.requests)
            parts = [bytearray(size // 3), bytearray(0), bytearray(size - size // 3)]
            cached.read_into("f", start, [memoryview(part) for part in parts])
            assert b"".join(parts) == data[start : start + size]
            fetched = storage.requests[before:]
            assert all(start <= r.start < r.stop <= start + size for r in fetched)
    assert total(union(storage.requests)) == total(storage.requests)
    cached.read_into("f", len(data), [memoryview(bytearray(0))])
    with pytest.raises(osl.TruncatedFileError):
        cached.read_into("f", len(data) - 1, [memoryview(bytearray(2))])


def test_the_least_recently_used_goes_first(web, other_folder, cache, tmp_path):
    with file_server(tmp_path) as server:
        other = WebRemote(server, tmp_path)
        other.publish(other_folder)
        most = TOTAL * 5 // 4
        for _ in range(3):
            load(web, cache, cache_bytes=most, only="large")
            assert_same(load(other, cache, cache_bytes=most), OTHERS)
            assert kept_bytes(cache) <= most
            other.fetched()
            assert_same(load(other, cache, cache_bytes=most), OTHERS)
            assert other.fetched() == []
        load(web, cache, cache_bytes=MIB)  # a lower bound holds from the beginning
        assert kept_bytes(cache) <= MIB


def test_a_checkpoint_larger_than_the_cache_keeps_a_part(web, cache, warnings_of):
    load(web, cache, cache_bytes=TOTAL // 2)
    kept = kept_bytes(cache)
    assert TOTAL // 4 < kept <= TOTAL // 2
    for _ in range(3):
        web.fetched()
        assert_same(load(web, cache, cache_bytes=TOTAL // 2), TENSORS)
        assert total(web.fetched()) < TOTAL - kept + 100_000  # headers, and ends of entries
        assert kept <= kept_bytes(cache) <= TOTAL // 2
    assert len(warnings_of) == 4
    assert "cache_bytes" in warnings_of[0]


def test_what_is_being_written_counts(tmp_path):
    most = 100_000
    first, second = (RangeCache(CacheFolder(str(tmp_path), most)) for _ in range(2))
    data = memoryview(bytearray(64_000))
    real, sizes = os.pwritev, []

    def write(*args):
        if not sizes:
            sizes.append(kept_bytes(tmp_path))
            (tmp_path / "orbax_safetensors_layout.cache" / "usage").unlink()
            second.keep("another", 0, [data])
            sizes.append(kept_bytes(tmp_path))
        return real(*args)

    with mock.patch.object(os, "pwritev", write):
        first.keep("content", 0, [data])
    assert 64_000 <= sizes[0] == sizes[1] <= most
    assert first.read_into("content", 0, [data]) == []


def test_what_is_renamed_while_another_process_counts(tmp_path):
    """The first entry of a content, whose folder appears while the others are looked at."""
    most = 8 * MIB
    first, second = (RangeCache(CacheFolder(str(tmp_path), most)) for _ in range(2))
    root = tmp_path / "orbax_safetensors_layout.cache"
    replace, lstat, waiting = os.replace, os.lstat, []

    def look(path, *args, **kwargs):
        if waiting and path == waiting[0][0]:
            replace(*waiting.pop())
        return lstat(path, *args, **kwargs)

    def rename(*paths):
        waiting.append(paths)
        (root / "usage").unlink()
        with mock.patch.object(os, "replace", replace), mock.patch.object(os, "lstat", look):
            second.keep("another", 0, [memoryview(bytearray(MIB))])
        assert not waiting

    with mock.patch.object(os, "replace", rename):
        first.keep("content", 0, [memoryview(bytearray(3 * MIB))])
    for n in range(1, 12):
        second.keep("another", n * MIB, [memoryview(bytearray(MIB))])
    assert 7 * MIB < kept_bytes(tmp_path) <= most


def test_the_count_is_removed_while_an_entry_is_begun(tmp_path):
    most = 100_000
    first, second = (RangeCache(CacheFolder(str(tmp_path), most)) for _ in range(2))
    data = memoryview(bytearray(64_000))
    real, begun = os.ftruncate, []

    def truncate(*args):
        if not begun:
            begun.append(True)
            (tmp_path / "orbax_safetensors_layout.cache" / "usage").unlink()
            second.keep("another", 0, [data])
        real(*args)

    with mock.patch.object(os, "ftruncate", truncate):
        first.keep("content", 0, [data])
    assert 64_000 < kept_bytes(tmp_path) <= most
    assert second.read_into("another", 0, [data]) == []


@pytest.mark.parametrize("how", ["too small", "copied", "of an earlier boot"])
def test_a_count_that_is_not_of_these_files(tmp_path, how, monkeypatch):
    most = 2 * MIB
    usage = tmp_path / "orbax_safetensors_layout.cache" / "usage"
    RangeCache(CacheFolder(str(tmp_path), most))
    few = usage.read_bytes()
    RangeCache(CacheFolder(str(tmp_path), most)).keep("f", 0, [memoryview(bytearray(MIB))])
    if how == "too small":
        usage.write_bytes(usage.read_bytes().replace(b"1", b"0"))
    elif how == "copied":
        (usage.parent / "other").write_bytes(few)
        (usage.parent / "other").rename(usage)
    else:
        usage.write_bytes(few)
        monkeypatch.setattr("orbax_safetensors_layout.storage.cache._boot", lambda: "another")
    second = RangeCache(CacheFolder(str(tmp_path), most))
    for n in range(3):
        second.keep("g", n * MIB, [memoryview(bytearray(900_000))])
    assert MIB < kept_bytes(tmp_path) <= most


def test_a_bound_below_one_block_keeps_nothing(web, cache):
    for most in (1, 4096):
        assert_same(load(web, cache, cache_bytes=most), TENSORS)
        assert entries(cache) == []
        assert kept_bytes(cache) <= 4096


def test_processes_share_it(hub, tmp_path, cache):
    tensors = {f"w{n}": checkpoints.random_tensor((64, 1024), np.float32, n) for n in range(4)}
    hub.add("org/model", checkpoints.save(tmp_path / "model", tensors, files=2))
    names, path = list(tensors), str(cache)
    run_processes("hub_load.py", processes=2, devices=2, names=names, shape=(64, 1024), cache=path)
    hub.cdn.log.clear()
    assert_same(load("hf://org/model", cache), tensors)
    assert total(hub.cdn.ranges()) == 0


def test_the_bound_holds_while_processes_fill_it(web, cache, fork_server):
    most = TOTAL * 2 // 3
    child = {"url": web.url, "cache": str(cache), "cache_bytes": most}
    children = [child, {**child, "only": "large*"}, {**child, "only": "model.*"}, child]
    ended = []

    def run():
        for _ in range(3):
            ended.extend(fork_server.run(children))

    runner = threading.Thread(target=run)
    runner.start()
    largest = 0
    while runner.is_alive():
        largest = max(largest, kept_bytes(cache))
        time.sleep(0.005)
    runner.join()
    assert TOTAL // 3 < largest <= most
    expected = hashes(TENSORS)
    for child in ended:
        assert child.status == 0, child.errors
        assert child.said[-1].items() <= expected.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [10, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_killed_while_it_is_filled(empty_web, cache, fork_server, tmp_path, kills):
    """Before any system call, by themselves; what they leave gives no wrong byte."""
    web, expected = empty_web, hashes(SMALL)
    web.publish(checkpoints.save(tmp_path / "small", SMALL, files=2))
    child = {"url": web.url, "cache": str(cache), "cache_bytes": PLENTY}
    (whole,) = fork_server.run([child])
    calls = whole.said[0]
    assert whole.said[-1] == expected
    assert calls > 30
    rng = random.Random(0)
    killed, most = 0, PLENTY
    while killed < kills:
        if rng.random() < 0.7:  # else on what the ones before have left
            shutil.rmtree(cache, ignore_errors=True)
            most = rng.choice([PLENTY, 3 * MIB])
        children = [{**child, "cache_bytes": most, "kill": rng.randrange(calls)} for _ in range(2)]
        for ended in fork_server.run(children):
            killed += ended.status < 0
            assert ended.status < 0 or ended.said[-1] == expected, ended.errors
        assert kept_bytes(cache) <= most
        assert_same(load(web, cache, cache_bytes=most), SMALL)
        assert kept_bytes(cache) <= most
    load(web, cache)
    web.fetched()
    assert_same(load(web, cache), SMALL)
    assert web.fetched() == []


def test_a_folder_that_cannot_be_written_to(web, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "gone")
    for place in ("file", "file/inside", "dangling"):
        with pytest.raises(osl.StorageError, match="cannot write to the cache folder") as caught:
            load(web, tmp_path / place)
        assert caught.value.file == str(tmp_path / place)
        assert "ReadOptions(cache=" in caught.value.hint


def test_files_that_are_not_of_the_cache_stay(cache):
    RangeCache(CacheFolder(str(cache), PLENTY)).keep("f", 0, [memoryview(bytearray(MIB))])
    root, (entry,) = cache / "orbax_safetensors_layout.cache", entries(cache)
    stretch = entry.parent
    own = [entry, stretch / "1-2", root / "left.partial"]
    others = [root / "file", root / "0-10", root / "a" / "0" / "0-10", stretch.parent / "0-10"]
    others += [stretch / "file", stretch / "0" / "0-10"]
    for path in (*own, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(MIB))
        os.utime(path, (0, 0))
    ranges = RangeCache(CacheFolder(str(cache), MIB))
    ranges.keep("g", 0, [memoryview(bytearray(MIB // 2))])
    assert ranges.read_into("g", 0, [memoryview(bytearray(MIB // 2))]) == []
    assert not [path for path in own if path.exists()]
    assert all(path.exists() for path in others)


def test_what_is_forgotten_is_of_the_cache(cache):
    ranges = RangeCache(CacheFolder(str(cache), PLENTY))
    ranges.keep("f", 0, [memoryview(bytearray(MIB))])
    (entry,) = entries(cache)
    other = entry.parent.parent / "notes.txt"
    other.write_text("mine")
    assert ranges.forget("f")
    assert other.read_text() == "mine"
    assert not entry.parent.exists()
    other.unlink()
    assert ranges.forget("f")
    assert not other.parent.exists()
    assert not ranges.forget("f")


def test_folders_are_the_owner_s_whatever_the_mask(web, cache):
    before = os.umask(0)
    try:
        for _ in range(2):
            assert_same(load(web, cache), TENSORS)
    finally:
        os.umask(before)
    for path in (cache, *cache.rglob("*")):
        assert not path.stat().st_mode & 0o077, path


@pytest.mark.parametrize("call", ["pwritev", "ftruncate", "replace"])
def test_a_disk_that_becomes_full_is_warned_of_once(web, cache, call, warnings_of):
    real, count = getattr(os, call), []

    def full(*args, **kwargs):
        count.append(call)
        if len(count) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    with mock.patch.object(os, call, full):
        assert_same(load(web, cache), TENSORS)
        assert len(warnings_of) == 1
        assert "No space left" in warnings_of[0]
        assert_same(load(web, cache), TENSORS)  # what there is serves on
    assert len(warnings_of) == 2
    assert not list(cache.rglob("*.partial"))
    load(web, cache)
    web.fetched()
    assert_same(load(web, cache), TENSORS)
    assert web.fetched() == []


def test_a_lock_that_nobody_gives_up_does_not_stop_a_load(web, cache, warnings_of, monkeypatch):
    load(web, cache, only="model.*")
    monkeypatch.setattr("orbax_safetensors_layout.storage.cache._LONGEST_LOCK_SECONDS", 0.1)
    with open(cache / "orbax_safetensors_layout.cache" / "usage", "rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        assert_same(load(web, cache), TENSORS)
    assert len(warnings_of) == 1
    assert "locked" in warnings_of[0]


def test_threads_that_waited_for_a_lock_that_was_given_up_keep_nothing(tmp_path, monkeypatch):
    """Each would wait as long again, one after the other."""
    monkeypatch.setattr("orbax_safetensors_layout.storage.cache._LONGEST_LOCK_SECONDS", 0.5)
    ranges = RangeCache(CacheFolder(str(tmp_path), PLENTY))
    with open(tmp_path / "orbax_safetensors_layout.cache" / "usage", "rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        monkeypatch.setattr(absl.logging, "warning", lambda *_: fcntl.flock(usage, fcntl.LOCK_UN))
        threads = [
            threading.Thread(target=ranges.keep, args=("f", n * MIB, [memoryview(bytearray(8))]))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert entries(tmp_path) == []


def test_no_secret_is_kept_and_another_signature_finds_the_same(web, cache):
    secrets = ("pass word", "pass%20word", "f00ba4", "c0ffee", "Signature")
    address = web.url.replace("//", "//me:pass%20word@")
    assert_same(load(f"{address}?X-Amz-Signature=f00ba4&X-Amz-Date=1&v=1", cache), TENSORS)
    web.fetched()
    assert_same(load(f"{web.url}?v=1&X-Amz-Date=2&X-Amz-Signature=c0ffee", cache), TENSORS)
    assert web.fetched() == []
    load(f"{web.url}?v=2", cache, only="large")  # which may be another file
    assert total(web.fetched()) > TENSORS["large"].nbytes
    names = [str(path.relative_to(cache)) for path in cache.rglob("*")]
    kept = b"".join(path.read_bytes() for path in cache.rglob("*") if path.is_file())
    for secret in secrets:
        assert not [name for name in names if secret in name]
        assert secret.encode() not in kept
    for path in (cache / "orbax_safetensors_layout.cache", *entries(cache)):
        assert not path.stat().st_mode & 0o077


def test_no_token_of_the_hub_is_kept(hub, folder, cache, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("org/private", folder, readers=frozenset([TOKEN]))
    assert_same(load("hf://org/private", cache), TENSORS)
    for path in cache.rglob("*"):
        assert TOKEN not in path.name
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(osl.CheckpointNotFoundError):  # the hub is still asked
        load("hf://org/private", cache)


def test_local_paths_do_without(folder, cache):
    assert_same(load(folder, cache), TENSORS)
    assert not cache.exists()


@pytest.mark.parametrize("cache", ["", "gs://bucket/cache", "a\0b", b"bytes", 1])
def test_folders_that_make_no_sense(cache):
    with pytest.raises(ValueError, match=r"^ReadOptions\.cache must be the path of a local folder"):
        osl.ReadOptions(cache=cache)


def test_a_relative_folder_and_that_of_a_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert osl.ReadOptions(cache=Path("c")).cache_folder.path == str(tmp_path / "c")
    assert osl.ReadOptions(cache="~/c").cache_folder.path == str(tmp_path / "home" / "c")
    assert osl.ReadOptions().cache_folder is None
