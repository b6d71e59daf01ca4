"""Saves by 1, 2 and 4 processes of 1, 2 and 4 devices: the same bytes, each its share, bounded."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from programs import free_port

PROGRAM = "save_clusters.py"
CLUSTERS = [*itertools.product((1, 2, 4), (1, 2, 4))]
SPLITS = ["leading", "inner", "both", "other"]


def save(fork_server, target: Path, processes: int, **arguments) -> list[dict[str, Any]]:
    """Return what each process wrote, and by how much its memory grew."""
    port = free_port() if processes > 1 else 0
    ended = fork_server.run(
        [
            {"target": str(target), "index": index, "count": processes, "port": port, **arguments}
            for index in range(processes)
        ]
    )
    for child in ended:
        assert child.status == 0, child.errors
    shutil.rmtree(f"{target}.warm")
    return [child.said[0] for child in ended]


def digests(folder: Path) -> dict[str, str]:
    """Return digests of the files, without what names the devices."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("model*")
    }


@pytest.mark.parametrize(
    "split", [*SPLITS[1:3], *(pytest.param(split, marks=pytest.mark.soak) for split in SPLITS[::3])]
)
def test_the_same_bytes_whoever_writes_them(fork_server, tmp_path, split):
    rows, tensors = 48, 9
    seen = []
    for processes, devices in CLUSTERS:
        target = tmp_path / f"{processes}x{devices}"
        results = save(
            fork_server, target, processes,
            devices=devices, split=split, layout="hf", rows=rows, tensors=tensors, budget=1 << 20,
        )  # fmt: skip
        written = [result["written"] for result in results]
        assert written == [result["planned"] for result in results]
        # A file has one writer: of nine equal files some process of four writes three.
        assert max(written) <= 1.4 * sum(written) / processes
        seen.append(digests(target))
    assert all(files == seen[0] for files in seen)
    stored = {}
    for file in target.glob("*.safetensors"):
        stored |= safetensors.numpy.load_file(file)
    assert stored.keys() == {f"layers.{n}" for n in range(tensors)}
    for n in range(tensors):
        expected = np.arange(n * 1024, (n + rows) * 1024, dtype=np.int32).reshape(rows, 1024)
        assert stored[f"layers.{n}"].tobytes() == expected.tobytes()


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("split", SPLITS)
def test_memory_beyond_the_shards_does_not_grow_with_the_model(
    fork_server, tmp_path, split, layout
):
    """With 128 MB and with 512 MB."""
    budget = 32 << 20
    for processes, devices in CLUSTERS:
        for rows in (4096, 16384):
            results = save(
                fork_server, tmp_path / "target", processes,
                devices=devices, split=split, layout=layout, rows=rows, tensors=8, budget=budget,
            )  # fmt: skip
            grown = [result["grown"] for result in results]
            print(f"{split} {layout} {processes}x{devices} {rows >> 5} MB:", end=" ")
            print(*(f"{nbytes / 2**20:.1f}" for nbytes in grown), end="; written ")
            print(*(f"{result['written'] / 2**20:.0f}" for result in results))
            assert max(grown) <= (64 << 20) + budget
            assert [result["written"] for result in results] == [
                result["planned"] for result in results
            ]
            shutil.rmtree(tmp_path / "target")
