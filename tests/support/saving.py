"""Helpers of the tests that save: what stands on the disk, and saves that wait or fail."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import safetensors.numpy

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
    stored: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        stored |= safetensors.numpy.load_file(file)
    return stored


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
