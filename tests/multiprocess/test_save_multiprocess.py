"""Saves by several real processes: the bytes of one process's save, each process its share."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, llama_like, random_tensor
from programs import run_processes

from orbax_safetensors_layout.plan.writes import PIECES_FOLDER

PRELUDE = """
import os, time
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import safetensors.numpy
import orbax_safetensors_layout as osl

def make_tree(path, split):
    tensors = safetensors.numpy.load_file(path + "/model.safetensors")
    devices = np.array(jax.devices())
    shape = {"2d": (-1, 2), "partial": (2, -1)}.get(split, (-1,))
    mesh = Mesh(devices.reshape(shape), ("x", "y")[: len(shape)])
    spec = {
        "replicated": lambda s: P(),
        "dim0": lambda s: P("x"),
        "dim1": lambda s: P(None, "x") if len(s) > 1 else P(),
        "2d": lambda s: P("x", "y") if len(s) > 1 else P("y"),
        "partial": lambda s: P("y"),
    }[split]
    tree = {}
    for name, value in tensors.items():
        sharding = NamedSharding(mesh, spec(value.shape))
        tree[name] = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    return {**tree, "step": 7, "host": np.arange(5.0)}

def same_shards(one, other):
    pairs = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes() for a, b in pairs)
"""

SAVE = (
    PRELUDE
    + """
def main(path, target, split, layout, max_file_bytes):
    tree = make_tree(path, split)
    written = []
    def listen(name, value, **_):
        if name.endswith("bytes_written"):
            written.append(value)
    jax.monitoring.register_scalar_listener(listen)
    options = osl.WriteOptions(layout=layout, max_file_bytes=max_file_bytes)
    osl.save(target, tree, options=options)
    loaded = osl.load(target, dict(tree))
    arrays = [name for name, value in tree.items() if isinstance(value, jax.Array)]
    ranges = osl.plan_load(target, dict(tree)).ranges()
    return {
        "written": written,
        "planned": osl.plan_save(tree, options=options).cost().written_bytes,
        "same": all(same_shards(tree[name], loaded[name]) for name in arrays),
        "step": loaded["step"],
        "files": sorted({os.path.basename(file) for file, _, _ in ranges}),
    }
"""
)

FAIL = (
    PRELUDE
    + """
def main(path, target, doing, process):
    from orbax_safetensors_layout.storage.local_write import LocalFileWriter
    tree = make_tree(path, "dim0")
    osl.save(target, {"old": np.arange(3)})
    if jax.process_index() == process:
        def broken(self, *args):
            raise OSError(5, f"the disk broke while {doing}")
        if doing == "planning":
            tree["bad"] = object()
        else:
            setattr(LocalFileWriter, doing, broken)
    begin = time.monotonic()
    try:
        osl.save(target, tree, overwrite=True, options=osl.WriteOptions(max_file_bytes=200_000))
    except Exception as error:
        found = [type(error).__name__, str(error)]
    else:
        found = None
    seconds = time.monotonic() - begin
    return {"error": found, "seconds": seconds, "old": osl.load(target)["old"].tolist()}
"""
)


@pytest.fixture(scope="module")
def tensors():
    found = {name: np.asarray(value) for name, value in llama_like(layers=6, hidden=128).items()}
    found["odd"] = random_tensor((8, 12), np.dtype(np.int8), 5)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("source")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def digests(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name.endswith((".safetensors", ".index.json"))
    }


def check(folder, tensors):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, value in tensors.items():
        file = safetensors.numpy.load_file(folder / index["weight_map"][name])
        assert_same_bits(file[name], value)


LIMIT = 200_000


@pytest.mark.parametrize("split", ["replicated", "dim0", "dim1", "2d", "partial"])
def test_every_number_of_processes_writes_the_same_bytes(tmp_path, source, tensors, split):
    seen = {}
    for processes, devices in [(1, 4), (2, 2), (4, 1)]:
        target = tmp_path / f"{processes}"
        results = run_processes(
            SAVE,
            processes=processes,
            devices=devices,
            path=str(source),
            target=str(target),
            split=split,
            layout="hf",
            max_file_bytes=LIMIT,
        )
        assert all(result["same"] and result["step"] == 7 for result in results)
        assert not [path for path in target.iterdir() if path.is_dir()]
        written = [sum(result["written"]) for result in results]
        assert written == [result["planned"] for result in results]
        assert max(written) / (sum(written) / processes) <= 1.3
        seen[processes] = digests(target)
        check(target, tensors)
    assert seen[1] == seen[2] == seen[4]


@pytest.mark.parametrize("split", ["replicated", "dim0", "dim1", "2d", "partial"])
def test_every_process_writes_its_own_file_of_pieces(tmp_path, source, tensors, split):
    results = run_processes(
        SAVE,
        processes=2,
        devices=2,
        path=str(source),
        target=str(tmp_path / "sharded"),
        split=split,
        layout="sharded",
        max_file_bytes=LIMIT,
    )
    assert all(result["same"] and result["step"] == 7 for result in results)
    written = [sum(result["written"]) for result in results]
    assert max(written) / (sum(written) / 2) <= 1.3
    names = {path.name for path in (tmp_path / "sharded").iterdir()}
    assert names == {
        "shard-00001-of-00002.safetensors",
        "shard-00002-of-00002.safetensors",
        "orbax_safetensors_layout.json",
    }
    for process, result in enumerate(results):
        own = f"shard-{process + 1:05}-of-00002.safetensors"
        # A large replicated tensor was written by one of the two.
        assert result["files"] == [own] or split in ("replicated", "partial")
        assert own in result["files"] or split == "replicated"


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("doing", ["planning", "write_at", "finish"])
def test_all_fail_with_the_first_cause_and_nothing_is_lost(tmp_path, source, doing, process):
    results = run_processes(
        FAIL,
        processes=2,
        devices=2,
        path=str(source),
        target=str(tmp_path / "target"),
        doing=doing,
        process=process,
    )
    for number, result in enumerate(results):
        kind, text = result["error"]
        assert ("'bad'" if doing == "planning" else f"the disk broke while {doing}") in text
        own = "UnsupportedDtypeError" if doing == "planning" else "OSError"
        assert kind == (own if number == process else "PeerError")
        assert result["seconds"] < 60
        assert result["old"] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


ALONE = (
    PRELUDE
    + """
def main(path, target, kind, process):
    import errno
    from unittest import mock

    tree = make_tree(path, "replicated")
    osl.save(target, tree, options=osl.WriteOptions(layout="sharded"))
    real = os.open

    def broken(file, *arguments, **keywords):
        if str(file).endswith((".json", ".safetensors")):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, *arguments, **keywords)

    begin = time.monotonic()
    try:
        with mock.patch.object(os, "open", broken if jax.process_index() == process else real):
            if kind == "consolidate":
                osl.consolidate(target)
            else:
                osl.convert(target, target + "-converted", format="hf")
    except osl.SafetensorsLayoutError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
"""
)


@pytest.mark.parametrize("kind", ["consolidate", "convert"])
def test_what_one_process_can_not_open_is_the_error_of_all(tmp_path, source, kind):
    """Before the first step that all take; the others would wait for half an hour."""
    results = run_processes(
        ALONE,
        processes=2,
        devices=1,
        path=str(source),
        target=str(tmp_path / "target"),
        kind=kind,
        process=1,
    )
    kinds, texts, seconds = zip(*results, strict=True)
    assert kinds == ("PeerError", "StorageError")
    assert all("Input/output error" in text for text in texts)
    assert max(seconds) < 60


KILLED = (
    PRELUDE
    + """
def main(path, target, kind, process):
    import signal
    from orbax_safetensors_layout.save import PreparedSave
    from orbax_safetensors_layout.storage.local_write import LocalFileWriter
    from orbax_safetensors_layout.storage.resumable import ResumableFile
    from orbax_safetensors_layout.runtime import heartbeat

    heartbeat.SILENCE_SECONDS = 5.0
    tree = make_tree(path, "replicated")
    osl.save(target, tree, options=osl.WriteOptions(layout="sharded"))
    if jax.process_index() == process:
        owner, name = {
            "plan": (PreparedSave, "of"),
            "capture": (PreparedSave, "capture"),
            "convert": (ResumableFile, "write_at"),
        }.get(kind, (LocalFileWriter, "write_at"))
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    try:
        if kind == "consolidate":
            osl.consolidate(target, options=osl.WriteOptions(max_file_bytes=200_000))
        elif kind == "convert":
            options = osl.ConvertOptions(memory_budget_bytes=1 << 20)
            osl.convert(path, target, format="hf", overwrite=True, options=options)
        elif kind == "capture":
            import orbax.checkpoint as ocp
            handler = osl.SafetensorsCheckpointHandler()
            handler.save(target, ocp.args.StandardSave(tree))
        else:
            options = osl.WriteOptions(layout="sharded")
            osl.save(target, tree, overwrite=True, options=options)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "no error"
    return found, time.monotonic() - begin, sorted(osl.load(target)) == sorted(tree)
"""
)


@pytest.mark.parametrize(
    ("kind", "process"),
    [
        ("write", 1),
        ("capture", 1),
        ("convert", 1),
        pytest.param("plan", 2, marks=pytest.mark.soak),
        pytest.param("consolidate", 1, marks=pytest.mark.soak),
    ],
)
def test_a_process_that_is_killed_is_named_within_seconds(tmp_path, source, kind, process):
    """`jax.distributed` notices after 100 s, and then ends everything."""
    results = run_processes(
        KILLED,
        processes=3,
        devices=1,
        lost=process,
        path=str(source),
        target=str(tmp_path / "target"),
        kind=kind,
        process=process,
    )
    for text, seconds, whole in (one for one in results if one is not None):
        assert f"PeerError: process {process} failed while " in text
        assert "no sign of life" in text
        assert seconds < 60
        assert whole


MEMORY = (
    PRELUDE
    + """
def peak_bytes():
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status]
    return next(int(fields[1]) << 10 for fields in lines if fields[0] == "VmHWM:")

def main(target, layout, megabytes, budget):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = megabytes * 256
    tree = {}
    for name in ("a", "b", "c", "d"):
        def part(index):
            extents = [len(range(*i.indices(n))) for i, n in zip(index, (rows, 1024))]
            return np.full(extents, 3.0, "f")
        sharding = NamedSharding(mesh, P(None, "x"))
        tree[name] = jax.make_array_from_callback((rows, 1024), sharding, part)
    osl.save(target, {"w": tree["a"][:8]}, options=osl.WriteOptions(layout=layout))  # warms up
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = peak_bytes()
    options = osl.WriteOptions(
        layout=layout, max_file_bytes=rows * 4096, memory_budget_bytes=budget, fsync=False
    )
    osl.save(target, tree, overwrite=True, options=options)
    return peak_bytes() - before
"""
)


DIFFER = (
    PRELUDE
    + """
def main(path, target, kind):
    tree = make_tree(path, "dim0")
    osl.save(target, {"old": np.arange(3)})
    if kind == "local":
        tree["count"] = jax.numpy.asarray(7)
    elif jax.process_index() == 1:
        tree.pop("odd")
    try:
        osl.save(target, tree, overwrite=True, options=osl.WriteOptions(max_file_bytes=200_000))
    except osl.PeerError as error:
        found = str(error)
    else:
        found = None
    return {"error": found, "old": osl.load(target)["old"].tolist()}
"""
)


FLUSHED = (
    PRELUDE
    + """
def main(path, target):
    flushed, real = [], os.fsync

    def fsync(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    os.fsync = fsync
    osl.save(target, make_tree(path, "dim0"), options=osl.WriteOptions(max_file_bytes=200_000))
    return flushed
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_stays_is_flushed_and_pieces_are_not(tmp_path, source):
    target = tmp_path / "target"
    results = run_processes(FLUSHED, processes=2, devices=2, path=str(source), target=str(target))
    flushed = [Path(name) for name in results[0] + results[1]]
    names = {path.name.removesuffix(".partial") for path in flushed}
    assert names >= {path.name for path in target.iterdir()}
    assert not any(PIECES_FOLDER in path.parts for path in flushed)


@pytest.mark.parametrize("kind", ["local", "tree"])
def test_processes_that_have_not_the_same_to_save(tmp_path, source, kind):
    results = run_processes(
        DIFFER,
        processes=2,
        devices=2,
        path=str(source),
        target=str(tmp_path / "target"),
        kind=kind,
    )
    for result in results:
        assert "not the same to save" in result["error"]
        assert "'count'" in result["error"] or kind == "tree"
        assert result["old"] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_memory_does_not_grow_with_the_model(tmp_path, layout):
    budget = 32 << 20
    grown = run_processes(
        MEMORY,
        processes=2,
        devices=2,
        target=str(tmp_path / "target"),
        layout=layout,
        megabytes=128,  # each of four tensors; a process holds half of them
        budget=budget,
    )
    assert max(grown) <= (64 << 20) + budget
