"""What the benchmark ran on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pages

_PACKAGES = ("jax", "orbax-checkpoint", "safetensors", "tensorstore", "numpy", "torch")


def describe(folder: Path) -> dict[str, str]:
    """Machine, file system of the folder, and versions."""
    return {
        "CPU": f"{_cpu_model()} x {os.cpu_count()}",
        "RAM": f"{pages.total_bytes() / (1 << 30):.0f} GiB",
        "kernel": platform.release(),
        "file system": _file_system(folder),
        "python": platform.python_version(),
        **dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # torch may be absent
            yield name, importlib.metadata.version(name)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the mount that holds the folder."""
    folder = folder.resolve()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    over = [mount for mount in mounts if folder.is_relative_to(mount[1])]
    return max(over, key=lambda mount: len(mount[1]))[2] if over else "unknown"
