"""The example that users copy, run as they run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from checkpoints import llama_like, random_tensor, save
from programs import REPOSITORY, program_path

from orbax_safetensors_layout.format import DTYPES

EXAMPLE = REPOSITORY / "examples" / "quickstart.py"
ROUTES = ("v0  ocp.Checkpointer", "v1  ocp.load", "v0  ocp.CheckpointManager")


def run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The example in a fresh process, with its temporary files below `tmp_path`."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, *arguments],
        env=kept | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert list(scratch.iterdir()) == [], "the example leaves files behind"
    return result


def row(output: str, name: str) -> list[str]:
    """The columns of a line that begins with `name`, or of the next one."""
    lines = output.splitlines()
    if name in lines:
        return re.split(r"\s{2,}", lines[lines.index(name) + 1].strip())
    (match,) = (line for line in lines if line.startswith(f"{name}  "))
    return re.split(r"\s{2,}", match.removeprefix(name).strip())


def check(result: subprocess.CompletedProcess[str], tensors: int, total_bytes: int) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert row(result.stdout, "total") == [f"{total_bytes:,}"] * 2
    for route in ROUTES:
        _, bytes_read, verdict = row(result.stdout, route)
        assert bytes_read == f"{total_bytes:,}"
        assert verdict == f"{tensors} of {tensors} tensors"


def test_without_a_path_it_makes_a_checkpoint_of_several_files(tmp_path):
    result = run(tmp_path)
    match = re.search(r"made (\d+) tensors, ([\d,]+) bytes, in (\d+) files", result.stdout)
    assert match is not None, result.stdout + result.stderr
    total = int(match[2].replace(",", ""))
    assert 150e6 < total < 250e6
    assert int(match[3]) > 1
    check(result, int(match[1]), total)
    size = "2,097,152"
    query = row(result.stdout, "model.layers.1.self_attn.q_proj.weight")
    assert query == ["[1024, 1024]", "(fsdp, tensor)", size, size]


def test_a_folder_of_odd_shapes(tmp_path):
    shapes = {
        "even": (8, 6),
        "first": (4, 3),
        "second": (3, 2),
        "neither": (3, 5),
        "deep": (4, 2, 3, 5),
        "scalar": (),
        "empty": (0, 8),
        "one": (1,),
    }
    tensors = {name: random_tensor(shape, np.dtype("f4")) for name, shape in shapes.items()}
    folder = save(tmp_path / "odd", tensors, files=3)
    (folder / "consolidated.safetensors").write_bytes(b"not listed in the index, so not read")
    result = run(tmp_path, folder)
    check(result, len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    shardings = {name: row(result.stdout, name)[1] for name in tensors}
    assert shardings == {
        "even": "(fsdp, tensor)",
        "first": "(fsdp, None)",
        "second": "(None, tensor)",
        "neither": "replicated",
        "deep": "(fsdp, tensor)",
        "scalar": "replicated",
        "empty": "(fsdp, tensor)",
        "one": "replicated",
    }


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "folder"])
def test_every_dtype_of_the_format(tmp_path, as_file):
    """64-bit integers that no 32-bit one holds, and what numpy itself has no name for."""
    shape, header, data = (16, 7), {}, b""  # four rows of any dtype are whole bytes
    for code, dtype in DTYPES.items():
        raw = random_tensor((112 * dtype.bits // 8,), np.dtype("?" if code == "BOOL" else "u1"))
        header[code] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [len(data), len(data) + raw.nbytes],
        }
        data += raw.tobytes()
    text = json.dumps(header).encode()
    file = tmp_path / "every" / "weights.safetensors"
    file.parent.mkdir()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert len(safetensors.deserialize(file.read_bytes())) == len(DTYPES)
    result = run(tmp_path, file if as_file else file.parent)
    check(result, len(DTYPES), len(data))
    assert row(result.stdout, "I64")[1] == "numpy array"
    assert row(result.stdout, "F8_E4M3")[1] == "(fsdp, None)"


def test_a_difference_fails(tmp_path):
    """One bit changed between what is restored and what `safetensors` reads."""
    folder = save(tmp_path / "hf", llama_like())
    result = subprocess.run(
        [sys.executable, program_path("quickstart_changed.py"), EXAMPLE, folder],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("DIFFERENT")]
    assert lines == [f"DIFFERENT  {route}: model.norm.weight" for route in ROUTES]


def test_a_path_that_is_no_checkpoint(tmp_path):
    result = run(tmp_path, tmp_path / "nothing")
    assert result.returncode == 2
    assert "neither a .safetensors file nor a folder that has any" in result.stderr
