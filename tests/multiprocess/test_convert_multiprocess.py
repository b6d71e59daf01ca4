"""Conversions that several real processes share."""

from __future__ import annotations

import os

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import random_tensor, save
from programs import run_processes
from saved_files import raw_tensors

import orbax_safetensors_layout as osl

CONVERT = """
import os, warnings
import orbax_safetensors_layout as osl
from recording import recording

def main(checkpoint, there, back, form):
    options = osl.ConvertOptions(memory_budget_bytes=256 << 10)
    with recording() as storage:
        osl.convert(checkpoint, there, format=form, mesh={"fsdp": 4}, processes=2, options=options)
    read = sum(b - a for file, a, b in storage.tensor_ranges() if file.startswith(checkpoint))
    osl.convert(there, back, options=options)
    return read
"""
WEIGHTS = {f"layers.{n}.w": random_tensor((64, 48), np.float32, n) for n in range(12)} | {
    "big": random_tensor((256, 96), np.float32, 20),
    "small": random_tensor((5,), np.float32, 21),
}


@pytest.mark.parametrize("form", ["orbax", "sharded"])
def test_two_processes_share_a_conversion(tmp_path, form):
    source = save(tmp_path / "source", WEIGHTS, files=3)
    there, back = tmp_path / "there", tmp_path / "back"
    read = run_processes(
        CONVERT,
        processes=2,
        devices=2,
        checkpoint=str(source),
        there=str(there),
        back=str(back),
        form=form,
    )
    total = sum(value.nbytes for value in WEIGHTS.values())
    assert total <= sum(read) <= 1.05 * total
    assert min(read) > total / 4
    found = {name: raw.data for name, raw in raw_tensors(back).items()}
    assert found == {name: value.tobytes() for name, value in WEIGHTS.items()}
    if form == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            plain = checkpointer.restore(there)
        assert {n: v.tobytes() for n, v in plain.items()} == found
    assert sorted(os.listdir(tmp_path)) == ["back", "source", "there"]


FAIL = """
import os
import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage.resumable import ResumableFile
import jax

def main(checkpoint, target):
    options = osl.ConvertOptions(memory_budget_bytes=64 << 10)
    real = ResumableFile.write_at
    def broken(self, offset, buffers):
        if jax.process_index() == 1 and offset > 200_000:
            raise OSError("the disk is full")
        real(self, offset, buffers)
    ResumableFile.write_at = broken
    try:
        osl.convert(checkpoint, target, format="hf", options=options)
    except (osl.PeerError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
    ResumableFile.write_at = real
    done = osl.convert(checkpoint, target, format="hf", options=options)
    return [text, done.resumed_bytes]
"""


def test_a_failure_reaches_the_others_and_all_continue(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=3)
    (first, done), (second, _) = run_processes(
        FAIL, processes=2, devices=1, checkpoint=str(source), target=str(tmp_path / "target")
    )
    assert "process 1 failed while converting" in first
    assert "the disk is full" in first
    assert "the disk is full" in second
    assert done > 0
    assert {n: v.tobytes() for n, v in osl.load(tmp_path / "target").items()} == {
        n: v.tobytes() for n, v in WEIGHTS.items()
    }
