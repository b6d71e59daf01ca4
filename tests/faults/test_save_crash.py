"""Saving processes that are killed: what stands is the old checkpoint or the new one, complete."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from checkpoints import layers_of
from saved_files import raw_tensors

PROGRAM = "save_crash.py"
FILES = 5


def save(fork_server, folder, version, *, kill=-1, exchange=True, after_seconds=None, rows=50):
    """Exit status of a save, how many calls it made, and how many seconds it took.

    Args:
        fork_server: Where the child is forked.
        folder: Where to.
        version: What is saved.
        kill: The system call before which the child kills itself.
        exchange: Whether the system can exchange two folders.
        after_seconds: When the child is killed from outside, instead.
        rows: Rows of each tensor.
    """
    child = {
        "folder": str(folder), "version": version, "files": FILES, "rows": rows,
        "kill": kill, "exchange": exchange,
    }  # fmt: skip
    (ended,) = fork_server.run([child], after_seconds=after_seconds)
    return ended.status, ended.said[0] if ended.said else None, ended.seconds


def expected(version, rows=50):
    return layers_of(version, FILES, rows) | {"odd": np.full(version + 3, version, np.int8)}


def version_of(folder: Path) -> int:
    """Which version stands there, every bit of it, with its index, and with what is the user's."""
    stored = raw_tensors(folder)
    version = stored["odd"].shape[0] - 3
    rows = stored["layers.0.w"].shape[0]
    assert {name: raw.data for name, raw in stored.items()} == {
        name: value.tobytes() for name, value in expected(version, rows).items()
    }
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "sub" / "mine").read_text() == "mine"
    manifest = json.loads((folder / "orbax_safetensors_layout.json").read_text())
    assert manifest["layout"] == "hf"
    assert sorted(name.name for name in folder.iterdir()) == sorted(
        [*(f"model-{n:05}-of-00005.safetensors" for n in range(1, 6)), "config.json", "sub",
         "model.safetensors.index.json", "orbax_safetensors_layout.json"]
    )  # fmt: skip
    return version


@pytest.fixture
def folder(tmp_path, fork_server):
    folder = tmp_path / "x"
    assert save(fork_server, folder, 1)[0] == 0
    (folder / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "mine").write_text("mine")
    return folder


@pytest.mark.slow
def test_killed_before_each_system_call(fork_server, folder):
    """Each crash is followed by a save that succeeds, over whatever the crash left."""
    status, calls, _ = save(fork_server, folder, 2)
    assert status == 0
    assert calls > 40
    version, seen = 2, set()
    for number in range(calls):
        status, _, _ = save(fork_server, folder, version + 1, kill=number)
        assert status == -signal.SIGKILL
        standing = version_of(folder)
        assert standing in (version, version + 1)
        seen.add(standing - version)
        version = standing
        if number % 5 == 0:  # else the next crash stands on the remains of this one
            assert save(fork_server, folder, version + 1)[0] == 0
            version += 1
            assert version_of(folder) == version
            assert os.listdir(folder.parent) == ["x"]
    assert seen == {0, 1}
    assert save(fork_server, folder, version + 1)[0] == 0
    assert version_of(folder) == version + 1
    assert os.listdir(folder.parent) == ["x"]


def test_killed_at_any_moment(fork_server, folder):
    """From outside, at random times, also while a system call runs."""
    rows = 6000  # 1.4 MB a file, which is also written past the page cache
    seconds = min(save(fork_server, folder, version, rows=rows)[2] for version in (2, 3, 4))
    rng = random.Random(0)
    version, killed = 4, 0
    for _ in range(25):
        status, _, _ = save(
            fork_server, folder, version + 1, rows=rows, after_seconds=rng.uniform(0, 1.1 * seconds)
        )
        standing = version_of(folder)
        assert standing in (version, version + 1)
        if status == 0:
            assert standing == version + 1
        else:
            killed += 1
        version = standing
    assert killed > 5
    assert save(fork_server, folder, version + 1)[0] == 0
    assert version_of(folder) == version + 1
    assert os.listdir(folder.parent) == ["x"]


def test_a_first_save_that_is_killed_leaves_no_checkpoint(fork_server, tmp_path):
    status, calls, _ = save(fork_server, tmp_path / "probe", 1)
    assert status == 0
    for number in range(0, calls, 3):
        target = tmp_path / f"{number}" / "x"
        assert save(fork_server, target, 1, kill=number)[0] == -signal.SIGKILL
        if target.exists():
            assert raw_tensors(target).keys() == expected(1).keys()
        assert save(fork_server, target, 2)[0] == 0
        assert {n: r.data for n, r in raw_tensors(target).items()} == {
            n: v.tobytes() for n, v in expected(2).items()
        }
        assert os.listdir(target.parent) == ["x"]


@pytest.mark.slow
def test_killed_where_two_folders_cannot_be_exchanged(fork_server, folder):
    """As on NFS: for an instant nothing stands there, with both beside it."""
    status, calls, _ = save(fork_server, folder, 2, exchange=False)
    assert status == 0
    version = 2
    for number in range(calls // 2, calls):
        assert (
            save(fork_server, folder, version + 1, kill=number, exchange=False)[0]
            == -signal.SIGKILL
        )
        if folder.exists():
            version = version_of(folder)
        else:
            beside = [p for p in folder.parent.iterdir() if p.is_dir()]
            assert {version_of(p) for p in beside} >= {version}
        status, _, _ = save(fork_server, folder, version + 1, exchange=False)
        assert status == 0, f"the save after a crash before call {number} fails"
        version += 1
        assert raw_tensors(folder)["odd"].shape == (version + 3,)
    assert os.listdir(folder.parent) == ["x"]
