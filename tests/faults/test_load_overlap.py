"""Loads while the same folder is saved again: one checkpoint or the other, or an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import safetensors.numpy
from limits import few_descriptors
from programs import program_path

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import local_commit

ROWS = 40
WRITERS = {
    "hf": osl.WriteOptions(fsync=False, max_file_bytes=ROWS * 400 + 500),
    "one file": osl.WriteOptions(fsync=False),
    "sharded": osl.WriteOptions(fsync=False, layout="sharded"),
}


def tree_of(version):
    layers = [{"w": np.full((ROWS, 100), version, np.float32)} for _ in range(4)]
    return {"layers": layers, "step": version, "name": f"version {version}"}


def versions_in(tree):
    """Each value's version; values of one array that differ count, too."""
    versions = {int(tree["step"]), int(tree["name"].split()[1])}
    for layer in tree["layers"]:
        versions |= {int(value) for value in np.unique(np.asarray(layer["w"]))}
    return versions


def outcome(load):
    """Return what a load gives, or "told" where it says that the checkpoint is being replaced."""
    try:
        return load()
    except osl.StorageError as error:
        return "told" if "Load again" in str(error) else str(error)


class Between:
    """Does something once, before a given call of those that a load makes to the system."""

    def __init__(self, monkeypatch, number, act):
        self.calls = 0
        self._number = number
        self._act = act
        self._busy = threading.RLock()
        self._is_acting = False
        for name in ("open", "scandir", "preadv", "stat"):
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real):
        def call(*arguments, **keywords):
            with self._busy:
                if not self._is_acting:
                    self.calls += 1
                    if self.calls - 1 == self._number:
                        self._is_acting = True
                        self._act()
                        self._is_acting = False
            return real(*arguments, **keywords)

        return call


@pytest.mark.parametrize(
    ("before", "after", "exchange"),
    [
        ("hf", "hf", True),
        ("hf", "sharded", False),
        ("sharded", "hf", True),
        ("sharded", "sharded", False),
        ("one file", "hf", False),
    ],
)
def test_a_save_at_each_moment_of_a_load(tmp_path, monkeypatch, before, after, exchange):
    if not exchange:
        monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    folder = tmp_path / "x"
    outcomes = []
    number = calls = 0
    while number <= calls:
        osl.save(folder, tree_of(1), options=WRITERS[before], overwrite=True)
        with monkeypatch.context() as patch:
            between = Between(
                patch,
                number,
                lambda: osl.save(folder, tree_of(2), options=WRITERS[after], overwrite=True),
            )
            outcomes.append(outcome(lambda: versions_in(osl.load(folder))))
        calls = max(calls, between.calls if number == 0 else 0)
        number += 1
    assert len(outcomes) > 10
    assert [result for result in outcomes if result not in ({1}, {2}, "told")] == []
    assert {1} in outcomes
    assert {2} in outcomes


def test_files_that_another_program_replaces_one_by_one(tmp_path, monkeypatch):
    """As `save_pretrained` does: what was read before, and what is read after, do not mix."""
    folder = tmp_path / "x"
    names = [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]

    def write(version, chosen=names):
        for number, name in enumerate(names):
            if name in chosen:
                value = {f"layers.{number}": np.full((ROWS, 100), version, np.float32)}
                safetensors.numpy.save_file(value, tmp_path / "new")
                os.replace(tmp_path / "new", folder / name)

    folder.mkdir()
    outcomes = []
    for number in range(40):
        write(1)
        with monkeypatch.context() as patch:
            Between(patch, number, lambda: write(2))
            outcomes.append(outcome(lambda: {int(v.max()) for v in osl.load(folder).values()}))
    assert [result for result in outcomes if result not in ({1}, {2}, "told")] == []
    assert {2} in outcomes
    assert "told" in outcomes


def overlap(folder, way, seconds):
    """Loads and verifications beside a process that saves without end; how each came out."""
    osl.save(folder, tree_of(1), options=WRITERS["hf"])
    tests = os.path.dirname(__file__)
    process = subprocess.Popen(
        [
            sys.executable,
            program_path("load_overlap_writer.py"),
            tests,
            str(folder),
            way,
            str(seconds),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    counts = {"whole": 0, "told": 0}
    wrong = []
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            versions = versions_in(osl.load(folder))
        except osl.StorageError as error:
            counts["told"] += 1
            if "Load again" not in str(error):
                wrong.append(str(error))
        except osl.SafetensorsLayoutError as error:
            wrong.append(f"{type(error).__name__}: {error}")
        else:
            counts["whole"] += 1
            if len(versions) != 1:
                wrong.append(str(versions))
    saves = int(process.communicate()[0])
    return counts, saves, wrong


@pytest.mark.parametrize("way", ["exchange", "renames"])
def test_loads_beside_saves_without_end(tmp_path, way):
    counts, saves, wrong = overlap(tmp_path / "x", way, 3)
    assert wrong == []
    assert sum(counts.values()) > 0
    assert saves > 1


@pytest.mark.soak
@pytest.mark.parametrize("way", ["exchange", "renames"])
def test_many_loads_beside_saves_without_end(tmp_path, way):
    counts, saves, wrong = overlap(tmp_path / "x", way, 60)
    print(f"{way}: {counts} beside {saves} saves, {len(wrong)} wrong")
    assert wrong == []


def test_an_index_of_more_folders_than_files_can_be_open(tmp_path):
    names = {f"t{n}": f"d{n}/model.safetensors" for n in range(400)}
    for number, (tensor, file) in enumerate(names.items()):
        (tmp_path / file).parent.mkdir()
        value = {tensor: np.full(2, number, np.float32)}
        safetensors.numpy.save_file(value, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with few_descriptors(256):
        loaded = osl.load(tmp_path)
    assert [loaded[tensor][0] for tensor in names] == [*range(400)]
