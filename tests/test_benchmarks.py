"""`benchmarks/accelerator.py` runs on any backend: here on CPU devices, as a check of itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "accelerator.py"
ROWS = ["plain:dim1:cold", "transposed:fsdp:warm", "plain:dim0:save", "transposed:fsdp:save"]


def run(*arguments):
    command = [sys.executable, str(SCRIPT), "--platform", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory and page cache are asked of Linux")
def test_accelerator_check(tmp_path):
    """Every contender runs and is verified; the table comes from the saved figures, too."""
    figures = tmp_path / "accelerator.json"
    done = run("--check", "--dir", tmp_path, "--json", figures)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [f"{row['way']}:{row['split']}:{row['task']}" for row in rows] == ROWS
    contenders = [[*row["cells"]] for row in rows]
    assert contenders == [
        ["device_put", "ours", "load_file", "builtin", "ocdbt"],
        ["device_put", "ours", "load_file"],
        ["device_get", "ours", "ocdbt"],
        ["device_get", "ours"],
    ]
    assert "Devices: 8 x cpu (cpu)" in done.stdout
    assert "no figure of an accelerator" in done.stdout
    bars = [line for line in done.stdout.splitlines() if "at least 0." in line]
    assert "PASS" not in done.stdout
    assert "FAIL" not in done.stdout
    assert len(bars) == 3  # none for what is not in the page cache
    assert run("--render", figures).stdout == done.stdout


def test_an_unknown_contender_is_refused(tmp_path):
    done = run("--dir", tmp_path, "--contenders", "ours,theirs")
    assert done.returncode == 1
    assert "--contenders must be of device_put,ours," in done.stderr
