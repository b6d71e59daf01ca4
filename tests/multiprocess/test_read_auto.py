"""Several real processes that decide by cost who reads what several of them need."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from http_server import Server, serve_range
from programs import run_processes

import orbax_safetensors_layout as osl

TOTAL = 2 * 64 * 96 * 4


def write(folder, seed):
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal((64, 96), np.float32) for name in ("a", "b")}
    file = folder / "model.safetensors"
    safetensors.numpy.save_file(tensors, file)
    return str(file)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("auto"), 0)


def run(path, case, processes, devices=2, **arguments):
    options = {"path": path, "case": case, **arguments}
    return run_processes("read_auto.py", processes=processes, devices=devices, **options)


@pytest.mark.parametrize("processes", [2, 4])
def test_what_is_cheap_is_read_by_each_and_what_is_dear_once(path, processes):
    results, logged, warned = zip(*run(path, "choice", processes), strict=True)
    for lines, warnings in zip(logged, warned, strict=True):
        assert len(lines) == 7
        assert all("; about " in line for line in lines)
        # Of four processes each reads the rows of all for "near columns", as that is faster.
        assert len(warnings) == (2 if processes == 4 else 0)
        for line, helps in zip(warnings, (False, True), strict=False):
            assert ("ReadOptions(replicated='auto')" in line) == helps
            assert ("ReadOptions(replicated='read_once'), by which" in line) != helps
            assert "outer dimensions" in line
    read = {label: sum(result[label] for result in results) for label in results[0]}
    assert read["near replicated"] == processes * TOTAL
    assert read["near columns"] >= TOTAL
    for label in ("slow replicated", "shared replicated", "slow columns", "slow rows"):
        assert read[label] == TOTAL, label


@pytest.mark.parametrize("devices", [1, 2])
def test_two_loads_at_once_do_not_mix_what_they_exchange(path, tmp_path, devices):
    """They begin in any order; alone, a load exchanges again."""
    other = write(tmp_path, 1)
    results = run_processes("two_loads.py", processes=2, devices=devices, paths=[path, other])
    assert [wrong for wrong, _ in results] == [[], []]
    assert sum(read for _, read in results) == TOTAL


def link(folder, path):
    """Make a link to the folder of a path, and return the path through it."""
    folder.parent.mkdir(parents=True)
    folder.symlink_to(Path(path).parent)
    return str(folder / Path(path).name)


@pytest.mark.parametrize("linked", [False, True])
def test_processes_that_load_copies_at_other_paths_exchange_nothing(path, tmp_path, linked):
    first, other = path, write(tmp_path, 0)
    if linked:
        first, other = (link(tmp_path / str(n) / "latest", p) for n, p in enumerate((path, other)))
    for (*read, refused), warned, logged in run(first, "places", 2, other=other):
        assert [line.count("exchanged") for line in logged] == [0, 0]  # none of what is refused
        assert read == [TOTAL, TOTAL // 2]
        assert len(warned) == 1
        assert f"process 0 has {Path(path).resolve()}, process 1 has " in warned[0], warned
        assert "PeerError: processes cannot exchange what they read: process 0 has " in refused


def test_links_to_one_folder_are_one_path(path, tmp_path):
    results = run(path, "places", 2, other=link(tmp_path / "run" / "latest", path))
    assert [sum(read) for read in zip(*(outcomes for outcomes, *_ in results), strict=True)] == [
        TOTAL,
        TOTAL,
        TOTAL,
    ]


@pytest.mark.parametrize("case", ["places", "hosts"])
def test_processes_that_have_other_files_exchange_nothing(path, tmp_path, case):
    """As of hosts that disagree on the latest step of a run, or have two versions at one path."""
    for outcomes, warned, logged in run(path, case, 2, other=write(tmp_path, 1)):
        assert len(logged) == 1
        assert outcomes[1] == TOTAL // 2
        assert warned == []
        for text in outcomes[::2]:
            assert "process 1 failed while planning the load: its files are others: " in text
            said = re.findall("process ([01]) has [^ ]+ .content ([0-9a-f]+)", text)
            assert [number for number, _ in said] == ["0", "1"], text
            assert said[0][1] != said[1][1]


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"{edge}"'}, {"ETag": '"{edge}"'}])
def test_hosts_that_see_two_versions_of_a_file_are_told(headers):
    """Also by a date or a weak ETag alone, as edges of a network may have of what was replaced."""
    files = [
        safetensors.numpy.save({n: np.full((64, 96), edge, np.float32) for n in "ab"})
        for edge in range(2)
    ]

    def answer(request):
        edge = int(request.query["edge"])
        known = {name: text.format(edge=edge) for name, text in headers.items()}
        known["Last-Modified"] = f"Mon, 0{1 + edge} Jan 2024 00:00:00 GMT"
        return serve_range(request, files[edge], known)

    with Server(answer) as server:
        url = f"{server.url}/files/model.safetensors"
        assert run(url, "edges", 2, other="") == [[0.0, 0.0]] * 2
        for text in run(url, "edges", 2, other="other"):
            assert "PeerError: process 1 failed while " in text
            assert "its files are others" in text


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("int32", "int64")])
def test_what_a_process_did_before_is_no_difference(tmp_path, dtypes):
    """Of 64 bits JAX makes 32, where x64 is off, and may have two objects that are equal."""
    path = str(tmp_path / "model.safetensors")
    tensors = {d: np.arange(64 * 96, dtype=d).reshape(64, 96) for d in reversed(dtypes)}
    safetensors.numpy.save_file(tensors, path)
    assert run(path, "dtypes", 2, devices=1, other=dtypes[0]) == [[True, True]] * 2


@pytest.mark.parametrize("copied", [False, True])
def test_hosts_that_have_two_saves_at_one_path_are_told(tmp_path, copied):
    """Of which each would read its part, and the arrays be a mixture."""
    options = osl.WriteOptions(layout="sharded")
    first, other = (tmp_path / name / "pieces" for name in ("first", "other"))
    osl.save(first, {"a": np.zeros((64, 96), np.float32)}, options=options)
    if copied:
        shutil.copytree(first, other)
    else:
        osl.save(other, {"a": np.ones((64, 96), np.float32)}, options=options)
    for said in run(str(first), "saves", 2, other=str(other)):
        if copied:
            assert said == 1
        else:
            assert "PeerError: process 1 failed while " in said
            assert "its files are others: process 0 has /models/pieces (content " in said


def test_hosts_with_copies_at_one_path_exchange(path, tmp_path):
    results = run(path, "hosts", 2, other=write(tmp_path, 0))
    assert [sum(read) for read in zip(*(outcomes for outcomes, *_ in results), strict=True)] == [
        TOTAL,
        TOTAL,
        TOTAL,
    ]


@pytest.mark.parametrize(
    ("case", "first", "other"),
    [
        ("mappings", "leaf 'a' float32 (64, 96)", "leaf 'a' float32 (64, 96)"),
        ("mappings", ", of a F32 (64, 96) at ", ", of b F32 (64, 96) at "),
        ("trees", "leaf 'a' float32 (64, 96)", "leaf 'b' float32 (64, 96)"),
        ("kinds", " by replicated='auto'; ", " by replicated='read_once'. "),
    ],
)
def test_what_is_exchanged_must_be_the_same(path, case, first, other):
    for said, seconds in run(path, case, 2):
        assert "PeerError: process 1 failed while planning the load: it has something else" in said
        assert ("The first difference: process 0 has leaf 'a' " in said) == (case != "kinds")
        assert first in said
        assert other in said.partition(first)[2]
        assert seconds < 20


def test_columns_of_mapped_tensors_are_read_once(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "q": rng.standard_normal((32, 48), np.float32),
        "w": rng.integers(-99, 99, (64, 48), np.int8),
        "scale": rng.standard_normal((8, 6), np.float32),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    results = run(str(tmp_path / "model.safetensors"), "mapped", 2)
    assert sum(results) == sum(tensor.nbytes for tensor in tensors.values())


def test_hosts_with_other_cpus_decide_the_same(path):
    read, concurrency = zip(*run(path, "cpus", 2), strict=True)
    assert sum(read) == TOTAL
    assert concurrency == (8, 32)


def test_one_process_that_loads_for_itself_waits_for_no_other(path):
    results = run(path, "alone", 2)
    assert results == [[TOTAL, 2, TOTAL], None]


def test_a_tree_that_was_saved_on_own_devices_is_loaded_alone(path, tmp_path):
    array = jax.device_put(np.ones(8, np.float32), jax.devices()[0])
    osl.save(tmp_path / "saved", {"own": array})
    assert run(path, "saved", 2, other=str(tmp_path / "saved")) == [[0], None]


def test_all_meet_again_after_a_load_that_one_missed(path):
    first, other = run(path, "retries", 2)
    assert "PeerError: processes [1] did not finish planning the load within 3 s" in first[0]
    assert "process 1 failed while planning the load: CheckpointNotFoundError: " in first[1]
    assert "/nowhere/" in first[1]
    assert "CheckpointNotFoundError" in other[1]
    assert first[2:] == other[2:] == ["loaded", "loaded"]


def test_processes_without_devices_of_the_tree_take_no_part(path):
    results = run(path, "some", 3)
    assert results[1] is None
    assert results[0] + results[2] == TOTAL


@pytest.mark.parametrize("devices", [1, 2])  # with one the CPU backend waits for the others itself
def test_after_a_gather_that_not_all_began_nothing_is_exchanged(path, devices):
    """Its values could be taken for those of the next load."""
    (first, warned), (other, _) = run(path, "gather fails", 2, devices)
    assert (
        "PeerError: process 1 failed while loading tensors: MemoryError: no memory" in first[0][0]
    )
    assert first[1] == other[1] == TOTAL
    assert "began gathers that did not end (process 0: restart it)" in warned[0]
    for text, _ in (first[2], other[2]):
        assert "PeerError: processes cannot exchange what they read: process 0 has " in text
        assert "gathers that did not end" in text
    assert first[0][1] < 10
    assert max(seconds for outcomes in (first, other) for _, seconds in outcomes[::2]) < 20


def test_a_process_that_cannot_tell_the_format_fails_all(path):
    outcomes = [*zip(*run(path, "format unknown", 2), strict=True)]
    assert len(outcomes) == 4
    for (text, seconds), (own, _) in outcomes:
        assert "process 1 failed while " in text
        assert "stale file handle" in text
        assert "OSError: stale file handle" in own
        assert seconds < 10


def test_a_load_that_waits_for_others_is_cancelled_at_once(path):
    cancelled, seconds = run(path, "cancelled", 2)[0]
    assert cancelled
    assert seconds < 1


@pytest.mark.parametrize("devices", [1, 2])
def test_a_gather_that_another_does_not_begin_ends_in_time(path, devices):
    (first, _), (other, _) = run(path, "gather hangs", 2, devices)
    text, seconds = first[0]
    assert "PeerError: processes [1] did not finish loading tensors within 2 s" in text
    assert seconds < 4.5
    assert "process 0 failed while loading tensors: PeerError: processes [1]" in other[0][0]


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(path):
    text, seconds = run(path, "missing", 2)[0]
    assert "PeerError: processes [1] did not finish planning the load within 5 s" in text
    assert seconds < 60


def test_processes_that_decide_otherwise_are_told(path):
    for text, seconds in run(path, "different", 2):
        assert "PeerError: process 1 failed while " in text
        assert ": it has something else" in text
        assert " by bandwidth_bytes_per_second=2.57698e+09;" in text
        assert " by bandwidth_bytes_per_second=1000. " in text
        assert seconds < 60
