"""Leftovers beside a checkpoint of saves that are killed, or meet another one there."""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest
from programs import run_programs
from saved_files import assert_saved

import orbax_safetensors_layout as osl


def run(folder, what) -> str:
    """Return what a process says that saves, or dies while it does; "" of one that died."""
    (ended,) = run_programs("save_leftovers.py", [{"folder": str(folder), "what": what}])
    assert ended.said or ended.status == -signal.SIGKILL, ended.errors
    return ended.said[-1] if ended.said else ""


def tensors(value):
    return {f"t{n}": np.full(300_000, value, np.float32) for n in range(4)}


def assert_loads(folder, value):
    loaded = osl.load(folder)
    for name, tensor in tensors(value).items():
        np.testing.assert_array_equal(loaded[name], tensor)


def test_the_rest_of_a_later_save_is_removed_by_the_next_process(tmp_path):
    run(tmp_path / "x", "die while writing")
    assert_saved(tmp_path / "x", tensors(1.0))
    assert run(tmp_path / "x", "save") == "saved"
    assert_saved(tmp_path / "x", tensors(3.0))
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_that_a_later_save_left_beside_its_place_is_put_back(tmp_path):
    """Where two folders cannot be exchanged, as on NFS."""
    run(tmp_path / "x", "die at rename 2")
    assert run(tmp_path / "x", "save") == "saved"
    assert_saved(tmp_path / "x", tensors(3.0))
    assert (tmp_path / "x" / "config.json").exists()
    assert os.listdir(tmp_path) == ["x"]


def test_an_empty_folder_made_where_a_save_was_killed_hides_nothing(tmp_path):
    """As programs do that call `os.makedirs(folder, exist_ok=True)` before they load or save."""
    run(tmp_path / "x", "die at rename 2")
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()
    assert_loads(tmp_path / "x", 1.0)
    assert run(tmp_path / "x", "save") == "saved"
    assert_saved(tmp_path / "x", tensors(3.0))
    assert (tmp_path / "x" / "config.json").exists()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("rename", [2, 3])
def test_a_folder_that_was_replaced_is_kept_beside_one_of_somebody_else(tmp_path, rename):
    """Only what a save itself has put there shows that the old folder is not needed any more."""
    run(tmp_path / "x", f"die at rename {rename}")
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").touch()
    before = sorted(os.listdir(tmp_path))
    (old,) = tmp_path.glob(".*.old")
    said = run(tmp_path / "x", "save")
    assert said.startswith("StorageError")
    assert str(old) in said
    assert str(tmp_path / "x") in said
    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(tmp_path / "x") == ["mine.txt"]
    assert_saved(old, tensors(1.0))
    shutil.rmtree(tmp_path / "x")  # as the error says: one of the two is removed
    assert run(tmp_path / "x", "save") == "saved"
    assert_saved(tmp_path / "x", tensors(3.0))
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_save_has_put_there_is_kept(tmp_path):
    run(tmp_path / "x", "die at rename 3")
    assert_loads(tmp_path / "x", 2.0)
    assert run(tmp_path / "x", "save") == "saved"
    assert (tmp_path / "x" / "config.json").exists()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("makes", [False, True])
def test_a_checkpoint_that_the_user_removed_is_not_found(tmp_path, makes):
    """Though what a save replaced there still stands beside it."""
    run(tmp_path / "x", "die at rename 3")
    shutil.rmtree(tmp_path / "x")
    if makes:
        (tmp_path / "x").mkdir()
    with pytest.raises(osl.CheckpointNotFoundError):
        osl.load(tmp_path / "x")


def test_two_processes_that_do_not_know_of_each_other(tmp_path):
    """As when `jax.distributed.initialize` is forgotten. One may fail; what stands is complete."""
    gates = [str(tmp_path / "gate1"), str(tmp_path / "gate2")]
    folder = str(tmp_path / "to" / "x")
    saves = [
        {"folder": folder, "what": "meet", "value": 1.0, "gate": gates[0]},
        {"folder": folder, "what": "meet", "value": 2.0, "gate": gates[1], "after": gates[0]},
    ]
    outcomes = [ended.said[-1] for ended in run_programs("save_leftovers.py", saves)]
    assert "saved" in outcomes
    last = max(
        number for number, outcome in zip((1, 2), outcomes, strict=True) if outcome == "saved"
    )
    assert_saved(tmp_path / "to" / "x", tensors(float(last)))
    assert os.listdir(tmp_path / "to") == ["x"]
