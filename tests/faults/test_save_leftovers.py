"""What saves leave beside a checkpoint when they are killed, or meet another one there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from saved_files import assert_saved

import orbax_safetensors_layout as osl

SAVER = """
import os, signal, sys, time
import numpy as np
import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import local_commit

folder, what = sys.argv[1:3]


def save(value, **options):
    tree = {f"t{n}": np.full(300_000, value, np.float32) for n in range(4)}
    options = osl.WriteOptions(fsync=False, concurrency=1, max_file_bytes=1_300_000, **options)
    osl.save(folder, tree, options=options, overwrite=True)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


if what == "die while writing":
    save(1.0)
    save(2.0, progress=die)
elif what.startswith("die at rename"):
    local_commit._renameat2 = lambda: None
    save(1.0)
    open(folder + "/config.json", "w").close()
    rename, calls = os.rename, []

    def one_is_fatal(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == int(what.split()[-1]):
            die()
        rename(*arguments, **keywords)

    os.rename = one_is_fatal
    save(2.0)
elif what == "save":
    local_commit._renameat2 = lambda: None
    try:
        save(3.0)
        print("saved")
    except osl.SafetensorsLayoutError as error:
        print(f"{type(error).__name__}: {error}")
elif what == "meet":
    value, gate = float(sys.argv[3]), sys.argv[4]

    def wait(_):
        open(f"{gate}.reached", "w").close()
        while not os.path.exists(f"{gate}.opened"):
            time.sleep(0.01)

    try:
        save(value, progress=wait)
        print("saved")
    except osl.SafetensorsLayoutError:
        print("failed")
"""


def begin(*arguments) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    command = [sys.executable, "-c", SAVER, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def run(*arguments) -> str:
    process = begin(*arguments)
    return process.communicate(timeout=60)[0].strip()


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
    """Where two folders can not be exchanged, as on NFS."""
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
    running = []
    for number in (1, 2):
        gate = tmp_path / f"gate{number}"
        running.append(begin(tmp_path / "to" / "x", "meet", number, gate))
        deadline = time.monotonic() + 30
        while not os.path.exists(f"{gate}.reached") and running[-1].poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    outcomes = []
    for number, process in zip((1, 2), running, strict=True):
        (tmp_path / f"gate{number}.opened").touch()
        outcomes.append(process.communicate(timeout=60)[0].strip())
    assert "saved" in outcomes
    last = max(
        number for number, outcome in zip((1, 2), outcomes, strict=True) if outcome == "saved"
    )
    assert_saved(tmp_path / "to" / "x", tensors(float(last)))
    assert os.listdir(tmp_path / "to") == ["x"]
