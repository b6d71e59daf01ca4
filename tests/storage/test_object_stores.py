"""Checkpoints in buckets: loads read what the plan names, saves have the bytes of local ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import backends
import jax
import numpy as np
import obstore
import pytest
from checkpoints import assert_same_bits, llama_like, save
from faults import Fault
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from object_server import BUCKET
from programs import run_processes
from remote_checks import shown
from versions import NEW, OLD, trees_equal

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import cloud, cloud_commit, open_storage

MIB = 1 << 20


def upload(place, folder):
    for path in folder.rglob("*"):
        place.put(path.relative_to(folder).as_posix(), path.read_bytes())


def local_files(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): unstamped(path.read_bytes()) for path in files}


def files_of(place):
    return {name: unstamped(place.get(name)) for name in place.names()}


def unstamped(data):
    """Without the random mark by which pieces of one save know each other."""
    return re.sub(rb'("orbax_safetensors_layout\.save":|"save": ?)"[0-9a-f]{32}"', rb"\1-", data)


def sharded(tensors, spec):
    mesh = mesh_of(x=4, y=2)
    return {
        name: jax.ShapeDtypeStruct(
            value.shape,
            value.dtype,
            sharding=NamedSharding(mesh, P(*spec) if value.ndim > 1 else P()),
        )
        for name, value in tensors.items()
    }


@pytest.mark.parametrize("spec", [("x", "y"), (None, "x"), ("y", None), ()])
def test_a_load_equals_that_of_a_disk_and_reads_what_the_plan_names(place, tmp_path, spec):
    tensors = llama_like(layers=2, hidden=128)
    upload(place, save(tmp_path, tensors, files=3))
    abstract = sharded(tensors, spec)
    options = osl.ReadOptions(latency_seconds={place.server.kind: 0.0}, request_bytes=50_000)
    place.server.take_log()
    loaded = osl.load(place.url, abstract, options=options)
    log = place.server.take_log()
    for name, array in loaded.items():
        assert array.sharding == abstract[name].sharding
        assert_same_bits(np.asarray(array), tensors[name])

    gets = [e for e in log if e["method"] == "GET" and e["key"].endswith(".safetensors")]
    prefix = f"{place.server.kind}://{BUCKET}/"
    read = sorted((prefix + e["key"], e["first"], e["last"] + 1) for e in gets if e["first"])
    planned = sorted(osl.plan_load(place.url, abstract, options=options).ranges())
    assert joined(read) == joined(planned)
    assert sum(stop - start for _, start, stop in read) == sum(z - a for _, a, z in planned)
    headers = [e["key"] for e in gets if not e["first"]]
    assert len(headers) == len(set(headers)) == 3
    assert {e["method"] for e in log} == {"GET", "HEAD"}
    assert sum(e["method"] == "HEAD" for e in log) == 1, "sizes come from the listing"


def joined(ranges):
    """Ranges of which neighbours are one."""
    merged = []
    for file, start, stop in ranges:
        if merged and merged[-1][0] == file and merged[-1][2] == start:
            merged[-1] = (file, merged[-1][1], stop)
        else:
            merged.append((file, start, stop))
    return merged


def test_a_file_and_patterns(place, tmp_path):
    tensors = llama_like(layers=1)
    upload(place, save(tmp_path, tensors))
    assert osl.is_safetensors_checkpoint(place.url)
    assert osl.is_safetensors_checkpoint(f"{place.url}/model.safetensors")
    assert not osl.is_safetensors_checkpoint(f"{place.url}/other")
    loaded = osl.load(f"{place.url}/model.safetensors", only="*norm*")
    assert set(loaded) == {name for name in tensors if "norm" in name}
    assert set(osl.metadata(place.url)) == set(tensors)


def test_no_log_and_no_error_shows_a_secret(place, tmp_path, caplog):
    upload(place, save(tmp_path, llama_like(layers=1)))
    caplog.set_level(logging.DEBUG)
    options = osl.ReadOptions(retries=osl.RetryPolicy(attempts=2, base_seconds=0))
    osl.load(place.url)
    for status in (403, 500):
        place.server.fail(Fault("status", status=status, times=99))
        with pytest.raises(osl.StorageError) as caught:
            osl.load(place.url, options=options)
        assert "not-a-real-secret" not in shown(caught.value) + caplog.text
        assert "Signature" not in shown(caught.value) + caplog.text


def test_an_adapter_without_weights(place, tmp_path):
    place.put("lora/adapter_config.json", b'{"peft_type": "LORA", "r": 2, "lora_alpha": 3}')
    osl.save(tmp_path / "base", {"w": np.ones((2, 2))})
    adapter, missing = f"{place.url}/lora", r"adapter_model\.safetensors"
    with pytest.raises(osl.CheckpointNotFoundError, match=missing):
        osl.peft.load(adapter)
    with pytest.raises(osl.CheckpointNotFoundError, match=missing):
        osl.peft.merge(None, adapter, base=tmp_path / "base")


def test_nothing_there(place):
    with pytest.raises(osl.CheckpointNotFoundError, match="does not exist"):
        osl.load(place.url)
    with pytest.raises(osl.StorageError, match="no-such-bucket"):
        osl.load(f"{place.server.kind}://no-such-bucket/model")


def test_without_the_library_its_installation_is_told():
    modules = dict.fromkeys(("obstore", "orbax_safetensors_layout.storage.cloud"))
    with (
        mock.patch.dict(sys.modules, modules),
        pytest.raises(osl.StorageError, match="pip install --upgrade obstore"),
    ):
        osl.load("gs://bucket/model")


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_has_the_bytes_of_a_local_one(place, tmp_path, layout, overwrite):
    tree = {**llama_like(layers=1), "step": 7, "nested": {"a": [np.arange(3.0), None]}}
    options = osl.WriteOptions(layout=layout, max_file_bytes=50_000)
    osl.save(tmp_path / "local", tree, options=options)
    if overwrite:
        osl.save(place.url, {"old": np.arange(5)})
        place.put("config.json", b"{}")
    osl.save(place.url, tree, options=options, overwrite=overwrite)
    stored = files_of(place)
    assert stored.pop("config.json", None) == (b"{}" if overwrite else None)
    assert stored == local_files(tmp_path / "local")
    loaded = osl.load(place.url)
    assert loaded["step"] == 7
    np.testing.assert_array_equal(loaded["nested"]["a"][0], np.arange(3.0))
    assert place.server.uploads() == 0


def test_a_large_file_goes_up_in_parts(place, tmp_path):
    tree = {"weight": np.arange(9 * MIB, dtype=np.float32), "bias": np.arange(3)}
    osl.save(place.url, tree)
    osl.save(tmp_path / "local", tree)
    assert files_of(place) == local_files(tmp_path / "local")
    parts = [e["nbytes"] for e in place.server.take_log() if "partNumber" in e["query"]]
    assert len(parts) == 5
    assert max(parts) == 8 * MIB


def test_consolidating_in_place(place, tmp_path):
    tree = llama_like(layers=1)
    osl.save(tmp_path / "local", tree)
    osl.save(place.url, tree, options=osl.WriteOptions(layout="sharded"))
    osl.consolidate(place.url)
    assert files_of(place) == local_files(tmp_path / "local")


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_belongs_to_no_checkpoint_stays(place, overwrite):
    if overwrite:
        osl.save(place.url, {"a": np.arange(2)})
    for name in ("config.json", "pieces/mine.txt", "original/params.safetensors"):
        place.put(name, b"mine")
    osl.save(place.url, {"a": np.arange(3)}, overwrite=overwrite)
    for name in ("config.json", "pieces/mine.txt", "original/params.safetensors"):
        assert place.get(name) == b"mine"
    assert_same_bits(osl.load(place.url)["a"], np.arange(3))


def test_what_stands_there_is_not_replaced_unasked(place):
    osl.save(place.url, {"a": np.arange(3)})
    before = files_of(place)
    with pytest.raises(osl.CheckpointExistsError, match="overwrite=True"):
        osl.save(place.url, {"b": np.arange(3)})
    with pytest.raises(osl.CheckpointExistsError, match="the path is a file"):
        osl.save(f"{place.url}/orbax_safetensors_layout.json", {"b": np.arange(3)})
    assert files_of(place) == before


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_save_the_bytes_of_local_saves(place, tmp_path, processes):
    local = tmp_path / "local"
    local.mkdir()
    done = run_processes(
        "object_stores_save.py",
        processes=processes,
        devices=4 // processes,
        cloud=place.url,
        local=str(local),
    )
    assert done == [True] * processes
    stored = files_of(place)
    assert {name.partition("/")[0] for name in stored} == {
        "hf",
        "hf-again",
        "sharded",
        "sharded-again",
    }
    assert stored == local_files(local)
    assert place.server.uploads() == 0


class Crash(BaseException):
    """The process dies."""


@contextlib.contextmanager
def crash_after(changes):
    """After so many requests that change the store, none does anything any more."""
    left = itertools.count(changes, -1)
    lock = threading.Lock()

    def dying(function):
        def call(*args, **kwargs):
            with lock:
                if next(left) <= 0:
                    raise Crash
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("put", "copy", "delete"):
            patched = mock.patch.object(obstore, name, dying(getattr(obstore, name)))
            stack.enter_context(patched)
        yield


OTHER = {"a": np.arange(9.0) + 5, "d": np.ones(2), "step": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overwrite", "layout"),
    [
        (True, "hf"),
        (False, "sharded"),
        *(
            pytest.param(overwrite, layout, marks=pytest.mark.soak)
            for overwrite, layout in [
                *((False, "hf"), (True, "sharded")),
                *((True, "one file"), (False, "one file")),
            ]
        ),
    ],
)
def test_a_crash_never_leaves_what_passes_for_a_checkpoint(place, layout, overwrite):
    """After every single change of the store: what was there, or the new, or a clear error."""
    options = osl.WriteOptions(
        layout="sharded" if layout == "sharded" else "hf",
        max_file_bytes=10**6 if layout == "one file" else 1,
        concurrency=1,
    )
    outcomes = []
    for changes in itertools.count():
        target = f"{place.url}/{changes}"
        if overwrite:
            osl.save(target, OLD, options=options)
        try:
            with crash_after(changes):
                osl.save(target, NEW, options=options, overwrite=overwrite)
        except Crash:
            pass
        else:
            break
        outcomes.append(outcome(target))
    assert trees_equal(osl.load(target), NEW)
    assert len(outcomes) >= 2
    order = {"old": 0, "nothing": 1, "incomplete": 1, "new": 2}
    assert outcomes == sorted(outcomes, key=order.__getitem__)
    if overwrite:
        assert outcomes[0] == "old"
        assert "old" in outcomes[len(outcomes) // 3 :], "only putting it in place destroys the old"


def test_an_index_comes_after_the_checksums(place):
    """A folder with one is the whole save, of which all can be verified."""
    options = osl.WriteOptions(digests=True, max_file_bytes=1, concurrency=1)
    with_index = 0
    for changes in itertools.count():
        target = f"{place.url}/{changes}"
        try:
            with crash_after(changes):
                osl.save(target, OTHER, options=options)
        except Crash:
            pass
        else:
            break
        storage, folder = open_storage(target)
        with storage:
            if "model.safetensors.index.json" not in storage.list(folder):
                continue
        with_index += 1
        assert trees_equal(osl.load(target, options=osl.ReadOptions(verify=True)), OTHER)
    assert with_index


def outcome(target):
    try:
        loaded = osl.load(target)
    except osl.CheckpointNotFoundError:
        return "nothing"
    except osl.FormatError:
        return "incomplete"
    assert trees_equal(loaded, OLD) or trees_equal(loaded, NEW), "a mixture"
    return "old" if trees_equal(loaded, OLD) else "new"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_save_that_fails_leaves_what_was_there(place, tmp_path, overwrite, is_own):
    target = f"{place.url}/step"
    if overwrite:
        osl.save(target, OLD)
    place.put("step/config.json", b"{}")
    before = files_of(place)
    (tmp_path / "config.json").write_text("{}")
    place.server.fail(Fault("status", "PUT", key="model-00002", status=403, times=99))
    options = osl.WriteOptions(max_file_bytes=1, model=tmp_path if is_own else None)
    with pytest.raises(osl.StorageError, match="403"):
        osl.save(target, NEW, overwrite=overwrite, options=options)
    assert files_of(place) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_fails_says_what_it_could_not_remove(place, overwrite, caplog, monkeypatch):
    if overwrite:
        osl.save(place.url, OLD)
    put, delete, failed = obstore.put, obstore.delete, threading.Event()

    def refused(client, key, data, **options):
        if "model-00002" not in key:
            return put(client, key, data, **options)
        failed.set()
        raise obstore.exceptions.PermissionDeniedError("no")

    def broken(client, keys, **options):
        if failed.is_set():
            raise obstore.exceptions.GenericError("broken")
        return delete(client, keys, **options)

    monkeypatch.setattr(obstore, "put", refused)
    monkeypatch.setattr(obstore, "delete", broken)
    with pytest.raises(osl.StorageError, match="no"):
        osl.save(place.url, NEW, overwrite=overwrite, options=osl.WriteOptions(max_file_bytes=1))
    (text,) = [r.getMessage() for r in caplog.records if "is left in" in r.getMessage()]
    assert place.url.rpartition("/")[0] in text
    assert "overwrite=True" in text


def test_a_failing_copy_says_where_the_new_checkpoint_is(place):
    osl.save(place.url, OLD)
    with (
        mock.patch.object(obstore, "copy", side_effect=obstore.exceptions.GenericError("broken")),
        pytest.raises(osl.StorageError, match="putting the finished checkpoint in its place") as e,
    ):
        osl.save(
            place.url,
            NEW,
            overwrite=True,
            options=osl.WriteOptions(retries=osl.RetryPolicy(attempts=1)),
        )
    where = e.value.hint.split()[4].rstrip(":")
    assert trees_equal(osl.load(where), NEW)


def test_a_copy_that_is_not_whole_is_an_error(place):
    osl.save(place.url, OLD)

    def half(client, source, target, **_):
        data = obstore.get(client, source).bytes()
        obstore.put(client, target, bytes(data)[:-1])

    failure = pytest.raises(osl.StorageError, match="putting the finished checkpoint in its place")
    with mock.patch.object(obstore, "copy", half), failure as caught:
        osl.save(place.url, NEW, overwrite=True)
    where = re.search(r"It is complete in (\S+):", str(caught.value))[1]
    assert trees_equal(osl.load(where), NEW)


def test_a_copy_that_comes_later_is_waited_for(place, monkeypatch):
    monkeypatch.setattr(cloud, "_LATER_COPIES", {place.server.kind})
    put, late = obstore.put, []

    def later(client, source, target, **_):
        put(client, target, b"")
        data = bytes(obstore.get(client, source).bytes())
        late.append(threading.Timer(0.5, put, (client, target, data)))
        late[-1].start()

    osl.save(place.url, OLD)
    with mock.patch.object(obstore, "copy", later):
        osl.save(place.url, NEW, overwrite=True)
    assert late
    assert trees_equal(osl.load(place.url), NEW)


class Turns:
    """Lets puts of tensors happen in an order that a test sets, once all saves have begun.

    A turn ends when the object has been looked at.

    Args:
        saves: How many there are.
        order: Who puts what: the value of a tensor's bytes, and a part of its file's name.
    """

    def __init__(self, saves, order):
        self._left = [*order]
        self._begun = threading.Barrier(saves, timeout=60)
        self._changed = threading.Condition()
        self._thread = threading.local()

    def head(self, head, client, key):
        result = head(client, key)
        turn = getattr(self._thread, "turn", None)
        with self._changed:
            if turn in self._left:
                self._left.remove(turn)
            self._changed.notify_all()
        return result

    def put(self, put, client, key, data, **options):
        if "partial-save" not in key and key.endswith("layout.json"):
            result = put(client, key, data, **options)
            self._begun.wait()
            return result
        if not key.endswith(".safetensors"):
            return put(client, key, data, **options)
        turn = int(bytes(data)[-1]), key[-len("1-of-00003.safetensors")]
        with self._changed:
            assert self._changed.wait_for(lambda: turn not in self._left[1:], 60)
        self._thread.turn = turn
        return put(client, key, data, **options)


def test_two_programs_that_save_to_one_folder_at_once_are_told(place, monkeypatch):
    """Here each has replaced a file of the other, with one of the same name and size.

    Neither sees the claim of the other, as if it had been cut off for long.
    """
    for name in ("take", "check", "check_in_store"):
        monkeypatch.setattr(cloud_commit._BucketClaim, name, lambda claim: None)
    turns = Turns(2, [(1, "1"), (2, "1"), (2, "2"), (1, "2"), (1, "3"), (2, "3")])
    monkeypatch.setattr(obstore, "put", functools.partial(turns.put, obstore.put))
    monkeypatch.setattr(obstore, "head", functools.partial(turns.head, obstore.head))
    options = osl.WriteOptions(max_file_bytes=1, concurrency=1)

    def run(value):
        tree = {name: np.full(100, value, np.uint8) for name in "abc"}
        try:
            osl.save(place.url, tree, options=options)
        except osl.SafetensorsLayoutError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(run, [1, 2]))
    for error in errors:
        assert isinstance(error, osl.StorageError)
        assert "another program has written to the folder at the same time" in str(error)
    with pytest.raises(osl.CheckpointNotFoundError):
        osl.load(place.url)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_save_to_a_folder_that_is_being_saved_to_is_refused(place, monkeypatch, overwrite, fails):
    if overwrite:
        osl.save(place.url, OLD)
    put, other = obstore.put, []

    def put_both(client, key, data, **options):
        result = put(client, key, data, **options)
        if not other and key.endswith(".safetensors"):
            other.append(True)
            with pytest.raises(osl.StorageError, match="another save to this path is running"):
                osl.save(place.url, {"b": np.arange(3)}, overwrite=overwrite)
            if fails:
                raise obstore.exceptions.PermissionDeniedError("no")
        return result

    monkeypatch.setattr(obstore, "put", put_both)
    with pytest.raises(osl.StorageError) if fails else contextlib.nullcontext():
        osl.save(place.url, NEW, overwrite=overwrite)
    assert other
    monkeypatch.setattr(obstore, "put", put)
    osl.save(f"{place.url}-other", OTHER)
    if not fails or overwrite:
        assert trees_equal(osl.load(place.url), OLD if fails else NEW)
    else:
        osl.save(place.url, OTHER)  # nothing is left that keeps it out
        assert trees_equal(osl.load(place.url), OTHER)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_claim_that_is_renewed_while_files_are_looked_at(place, monkeypatch, overwrite):
    """Each time it is another object."""
    if overwrite:
        osl.save(place.url, OLD)
    head = obstore.head

    def slow(*arguments):
        time.sleep(0.02)
        return head(*arguments)

    monkeypatch.setattr(obstore, "head", slow)
    monkeypatch.setattr(cloud_commit, "_RENEWAL_SECONDS", 0.001)
    osl.save(place.url, NEW, overwrite=overwrite, options=osl.WriteOptions(max_file_bytes=1))
    assert trees_equal(osl.load(place.url), NEW)
    assert not [name for name in place.names() if "claims" in name]


def test_a_save_that_was_cut_off_goes_on_where_nobody_took_its_place(place, monkeypatch):
    put, offset = obstore.put, [0.0]

    def later(client, key, data, **options):
        if key.endswith(".safetensors"):
            offset[0] = 100.0
        return put(client, key, data, **options)

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr(cloud_commit, "time", clock)
    monkeypatch.setattr(obstore, "put", later)
    osl.save(place.url, NEW)
    assert trees_equal(osl.load(place.url), NEW)


def test_a_save_that_fails_removes_nothing_of_one_that_took_its_place(place, monkeypatch):
    put, taken = obstore.put, []

    def overtaken(client, key, data, **options):
        if not key.endswith(".safetensors") or taken:
            return put(client, key, data, **options)
        taken.append(key)
        for name in place.names():  # as of a process that died
            if "claims" in name:
                place.delete(name)
        osl.save(place.url, OTHER, overwrite=True)
        raise obstore.exceptions.PermissionDeniedError("no")

    monkeypatch.setattr(obstore, "put", overtaken)
    with pytest.raises(osl.StorageError):
        osl.save(place.url, NEW)
    assert taken
    assert trees_equal(osl.load(place.url), OTHER)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_save_that_could_not_renew_its_claim_removes_nothing(place, monkeypatch, comes_back):
    """While it had no network another took its place; a request on its way may arrive late."""
    put, offset, is_out, failed, lost = obstore.put, [0.0], threading.Event(), threading.Event(), []

    def cut_off(client, key, data, **options):
        if is_out.is_set() and "claims" in key:
            failed.set()
            raise obstore.exceptions.PermissionDeniedError("no")
        if not key.endswith(".safetensors") or failed.is_set():
            return put(client, key, data, **options)
        is_out.set()
        assert failed.wait(10)
        offset[0] = 100.0
        lost.extend(name for name in place.names() if "claims" in name)
        for name in lost:  # as of a process that died
            place.delete(name)
        time.sleep(0.2)  # the thread that renews the claim has noticed
        is_out.clear()
        osl.save(place.url, OTHER)
        if comes_back:
            place.put(lost[0], b"1")
        raise obstore.exceptions.PermissionDeniedError("no")

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr(cloud_commit, "time", clock)
    monkeypatch.setattr(cloud_commit, "_RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(obstore, "put", cut_off)
    with pytest.raises(osl.StorageError, match="no"):
        osl.save(place.url, NEW)
    assert len(lost) == 1
    assert trees_equal(osl.load(place.url), OTHER)


def test_a_save_that_failed_after_a_renewal_did_removes_what_it_wrote(place, monkeypatch):
    put, is_written, failed = obstore.put, threading.Event(), threading.Event()

    def failing(client, key, data, **options):
        if key.endswith(".safetensors"):
            put(client, key, data, **options)
            is_written.set()
            assert failed.wait(10)
            raise obstore.exceptions.PermissionDeniedError("no")
        if "claims" in key and is_written.is_set() and not failed.is_set():
            monkeypatch.setattr(cloud_commit, "_RENEWAL_SECONDS", 99.0)  # it stays the last one
            failed.set()
            raise obstore.exceptions.PermissionDeniedError("no")
        return put(client, key, data, **options)

    monkeypatch.setattr(cloud_commit, "_RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(obstore, "put", failing)
    with pytest.raises(osl.StorageError, match="no"):
        osl.save(place.url, NEW)
    assert failed.is_set()
    assert not place.names()


def test_a_claim_that_was_removed_is_not_renewed(place, monkeypatch):
    """As after a machine was suspended, whose clock stood still."""
    put, taken = obstore.put, []
    is_out, removed = threading.Event(), threading.Event()

    def overtaken(client, key, data, **options):
        if key.endswith(".safetensors") and not is_out.is_set():
            is_out.set()
            assert removed.wait(10)
            osl.save(place.url, OTHER)
            time.sleep(0.3)  # a claim is renewed meanwhile, if it is
            raise obstore.exceptions.PermissionDeniedError("no")
        result = put(client, key, data, **options)
        if "claims" in key and is_out.is_set() and not removed.is_set():
            taken.extend(name for name in place.names() if "claims" in name)
            for name in taken:  # between two renewals, in the thread that renews
                place.delete(name)
            removed.set()
        return result

    monkeypatch.setattr(cloud_commit, "_RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(obstore, "put", overtaken)
    with pytest.raises(osl.StorageError):
        osl.save(place.url, NEW)
    assert len(taken) == 1
    assert trees_equal(osl.load(place.url), OTHER)
    assert not [name for name in place.names() if "claims" in name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_whole_bucket_is_a_folder(server, overwrite):
    with backends.configured(server):
        bucket = f"{server.kind}://{BUCKET}"
        before = server.keys()
        try:
            osl.save(bucket, OLD)
            if overwrite:
                osl.save(bucket, NEW, overwrite=True)
            assert trees_equal(osl.load(bucket), NEW if overwrite else OLD)
            new = {*server.keys()}.difference(before)
            assert "orbax_safetensors_layout.json" in new
            assert not any("partial-save" in key for key in new)
        finally:
            for key in {*server.keys()}.difference(before):
                server.delete(key)


@pytest.mark.parametrize("inwards", [False, True])
def test_pieces_are_put_together_in_another_place(place, tmp_path, inwards):
    tree = llama_like(layers=1)
    osl.save(tmp_path / "whole", tree)
    here, there = str(tmp_path / "here"), f"{place.url}/there"
    source, target = (here, there) if inwards else (there, here)
    osl.save(source, tree, options=osl.WriteOptions(layout="sharded"))
    osl.consolidate(source, target)
    expected = local_files(tmp_path / "whole")
    copied = {name: unstamped(place.get(f"there/{name}")) for name in expected} if inwards else None
    assert (copied or local_files(tmp_path / "here")) == expected


def test_a_copy_takes_the_time_that_the_store_needs(place):
    """As S3 does for gigabytes: an answer comes when all is copied."""
    place.put("a", b"data")
    retries = osl.RetryPolicy(attempts=3, attempt_seconds=0.5, base_seconds=0)
    storage, folder = open_storage(place.url, retries=retries)
    with storage:
        place.server.fail(Fault("delay", "PUT", key="/b", seconds=1.5, times=99))
        storage.copy(f"{folder}/a", f"{folder}/b")
    assert place.get("b") == b"data"


def test_objects_too_large_for_one_copy_go_through_the_process(place, monkeypatch):
    where = "orbax_safetensors_layout.storage.cloud._LARGEST_COPY_BYTES"
    monkeypatch.setattr(where, {place.server.kind: 5000})
    osl.save(place.url, OLD)
    osl.save(place.url, {**NEW, "large": np.arange(3 * MIB)}, overwrite=True)
    assert trees_equal(osl.load(place.url), {**NEW, "large": np.arange(3 * MIB)})


@pytest.mark.slow
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.soak)])
def test_a_save_between_any_two_steps_of_another_one(place, monkeypatch, every):
    """One program stops before one of its requests, and another saves there meanwhile."""
    options = osl.WriteOptions(max_file_bytes=1, concurrency=1)
    names = ("put", "copy", "delete", "list", "head", "list_with_delimiter")
    real = {name: getattr(obstore, name) for name in names}
    ends, refused = [], []
    for step in itertools.count(step=every):
        target = f"{place.url}/{step}"
        osl.save(target, OLD, options=options)
        calls, lock = itertools.count(), threading.Lock()

        def stopping(name, step=step, target=target, calls=calls, lock=lock):
            def call(*args, **kwargs):
                with lock:
                    is_here = next(calls) == step
                if is_here:
                    try:
                        osl.save(target, OTHER, overwrite=True, options=options)
                    except osl.StorageError as error:
                        assert "another save to this path is running" in str(error)  # noqa: PT017
                        refused.append(step)
                return real[name](*args, **kwargs)

            return call

        for name in names:
            monkeypatch.setattr(obstore, name, stopping(name))
        osl.save(target, NEW, overwrite=True, options=options)
        for name in names:
            monkeypatch.setattr(obstore, name, real[name])
        if next(calls) <= step:
            break
        # The other one ended before this one had begun, or after it, or was refused.
        loaded = osl.load(target)
        ends.append(trees_equal(loaded, OTHER))
        assert ends[-1] or trees_equal(loaded, NEW), "a mixture"
        assert not (ends[-1] and step in refused)
    assert len(refused) > 20 // every
    assert len(ends) - len(refused) < 10 / every + 1


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_what_is_beside_a_model_is_not_replaced_with_it(place, layout):
    osl.save(place.url, {"a": np.arange(2), "b": np.arange(3)})
    beside = {"adapter_model.safetensors": b"lora", "ema.safetensors": b"ema"}
    for name, data in beside.items():
        place.put(name, data)
    options = osl.WriteOptions(layout=layout)
    osl.save(place.url, {"a": np.arange(3)}, options=options, overwrite=True)
    if layout == "sharded":
        osl.consolidate(place.url)
    assert {name: place.get(name) for name in beside} == beside
    assert_same_bits(osl.load(place.url)["a"], np.arange(3))
    assert {*place.names()} - {*beside} == {"model.safetensors", "orbax_safetensors_layout.json"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_pieces_have_names_of_their_own_whatever_the_stem(place, overwrite):
    options = osl.WriteOptions(layout="sharded", file_stem="adapter_model")
    for tree in (OLD, NEW) if overwrite else (NEW,):
        osl.save(place.url, tree, options=options, overwrite=overwrite)
        assert trees_equal(osl.load(place.url), tree)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_adapter_is_saved_beside_its_model(place, overwrite):
    osl.save(place.url, {"a": np.arange(3)})
    before = files_of(place)
    lora = {"q.lora_A.weight": np.ones((2, 4), np.float32)}
    config = {"r": 2, "lora_alpha": 2, "target_modules": ["q"]}
    osl.peft.save(place.url, lora, config=config)
    osl.peft.save(place.url, lora, config=config, overwrite=True)
    if overwrite:
        osl.save(place.url, {"a": np.arange(4)}, overwrite=True)
        assert_same_bits(osl.load(place.url)["a"], np.arange(4))
    adapter = {"adapter_model.safetensors", "adapter_config.json"}
    assert {*place.names()} == {*before, *adapter}
    assert overwrite or {name: unstamped(place.get(name)) for name in before} == before
