"""Saves by several real processes: the bytes of one process's save, each process its share."""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, llama_like, random_tensor
from programs import run_processes
from sampling import every

from orbax_safetensors_layout.plan import PIECES_FOLDER


@pytest.fixture(scope="module")
def tensors():
    values = {name: np.asarray(value) for name, value in llama_like(layers=6, hidden=128).items()}
    values["odd"] = random_tensor((8, 12), np.dtype(np.int8), 5)
    return values


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


@pytest.mark.parametrize("split", every(2, ["partial", "dim0", "2d", "dim1", "replicated"]))
def test_every_number_of_processes_writes_the_same_bytes(tmp_path, source, tensors, split):
    seen = {}
    for processes, devices in [(1, 4), (2, 2), (4, 1)]:
        target = tmp_path / f"{processes}"
        results = run_processes(
            "save_multiprocess_save.py",
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
        "save_multiprocess_save.py",
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


@pytest.mark.parametrize(
    ("doing", "process"),
    [*itertools.product(("planning", "write_at", "finish"), (0, 1)), ("commit", 0)],
)
def test_all_fail_with_the_first_cause_and_nothing_is_lost(tmp_path, source, doing, process):
    results = run_processes(
        "save_multiprocess_fail.py",
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
        assert result["seconds"] < 25  # less than the first process waits for others at most
        assert result["old"] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("kind", ["consolidate", "convert"])
def test_what_one_process_cannot_open_is_the_error_of_all(tmp_path, source, kind):
    """Before the first step that all take; the others would wait for half an hour."""
    results = run_processes(
        "save_multiprocess_alone.py",
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "process"),
    [
        ("write", 1),
        pytest.param("convert", 1, marks=pytest.mark.soak),
        pytest.param("capture", 1, marks=pytest.mark.soak),
        pytest.param("plan", 2, marks=pytest.mark.soak),
        pytest.param("consolidate", 1, marks=pytest.mark.soak),
    ],
)
def test_a_process_that_is_killed_is_named_within_seconds(tmp_path, source, kind, process):
    """`jax.distributed` notices after 100 s, and then ends everything."""
    results = run_processes(
        "save_multiprocess_killed.py",
        processes=3,
        devices=1,
        lost=process,
        path=str(source),
        target=str(tmp_path / "target"),
        kind=kind,
        process=process,
    )
    for text, seconds, whole in (result for result in results if result is not None):
        assert f"PeerError: process {process} failed while " in text
        assert "no sign of life" in text
        assert seconds < 60
        assert whole


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_stays_is_flushed_and_pieces_are_not(tmp_path, source):
    target = tmp_path / "target"
    results = run_processes(
        "save_multiprocess_flushed.py", processes=2, devices=2, path=str(source), target=str(target)
    )
    flushed = [Path(name) for name in results[0] + results[1]]
    names = {path.name.removesuffix(".partial") for path in flushed}
    assert names >= {path.name for path in target.iterdir()}
    assert not any(PIECES_FOLDER in path.parts for path in flushed)


@pytest.mark.parametrize("kind", ["local", "tree", "mapping"])
def test_processes_that_have_not_the_same_to_save(tmp_path, source, kind):
    results = run_processes(
        "save_multiprocess_differ.py",
        processes=2,
        devices=2,
        path=str(source),
        target=str(tmp_path / "target"),
        kind=kind,
    )
    for result in results:
        assert "something else to save" in result["error"]
        if kind == "local":
            assert "'count'" in result["error"]
            assert "'count'" in result["in_background"]
        assert result["old"] == [0, 1, 2]
    assert not (tmp_path / "target-step").exists()
    left = [path for path in tmp_path.iterdir() if not path.name.startswith("target-step")]
    assert [path.name for path in left] == ["target"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_memory_does_not_grow_with_the_model(tmp_path, layout):
    budget = 32 << 20
    grown = run_processes(
        "save_multiprocess_memory.py",
        processes=2,
        devices=2,
        target=str(tmp_path / "target"),
        layout=layout,
        megabytes=128,  # each of four tensors; a process holds half of them
        budget=budget,
    )
    assert max(grown) <= (64 << 20) + budget
