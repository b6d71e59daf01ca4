"""Helpers of the tests that save: what stands on the disk, and saves that wait or fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from programs import program_path

import orbax_safetensors_layout as osl

MARKERS = ("commit_success.txt",)  # Orbax's own, on some file systems


def tensor_files(folder: Path) -> dict[str, bytes]:
    """The files of an item and their bytes, without Orbax's own markers."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name not in MARKERS
    }


def opened(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of an item, as `safetensors` alone reads them."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= safetensors.numpy.load_file(file)
    return found


class Gate:
    """Holds a save back after the first tensor, which has a file of its own, until `open`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self.options = osl.WriteOptions(max_file_bytes=1, concurrency=1, progress=self._pass)

    def _pass(self, progress: osl.Progress) -> None:
        self.reached.set()
        assert self._opened.wait(30)

    def open(self) -> None:
        self._opened.set()


def run_alone(
    program: str,
    *arguments: object,
    mount: tuple[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what a program of `tests/programs` prints, perhaps with a file system of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    command = [sys.executable, program_path(program), *map(str, arguments)]
    if mount is not None:
        size, folder = mount
        mounting = f"mount -t tmpfs -o size={size} tmpfs {folder}"
        if (
            not shutil.which("unshare")
            or subprocess.run(
                ["unshare", "-m", "sh", "-c", mounting], capture_output=True, check=False
            ).returncode
        ):
            pytest.skip("may not mount")
        command = ["unshare", "-m", "sh", "-c", f'{mounting} && exec "$@"', "sh", *command]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
