"""What saves leave beside a checkpoint when they are killed, or meet another one there."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
from saved_files import assert_saved

SAVER = """
import os, signal, sys, time
import numpy as np
import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import publish

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
elif what == "die between renames":
    publish._renameat2 = lambda: None
    save(1.0)
    open(folder + "/config.json", "w").close()
    rename, calls = os.rename, []

    def second_is_fatal(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 2:
            die()
        rename(*arguments, **keywords)

    os.rename = second_is_fatal
    save(2.0)
elif what == "save":
    publish._renameat2 = lambda: None
    save(3.0)
    print("saved")
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


def test_the_rest_of_a_later_save_is_removed_by_the_next_process(tmp_path):
    run(tmp_path / "x", "die while writing")
    assert_saved(tmp_path / "x", tensors(1.0))
    assert run(tmp_path / "x", "save") == "saved"
    assert_saved(tmp_path / "x", tensors(3.0))
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_that_a_later_save_left_beside_its_place_is_put_back(tmp_path):
    """Where two folders can not be exchanged, as on NFS."""
    run(tmp_path / "x", "die between renames")
    assert run(tmp_path / "x", "save") == "saved"
    assert_saved(tmp_path / "x", tensors(3.0))
    assert (tmp_path / "x" / "config.json").exists()
    assert os.listdir(tmp_path) == ["x"]


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
