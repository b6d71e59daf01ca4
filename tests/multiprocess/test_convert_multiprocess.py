"""Conversions that several real processes share."""

from __future__ import annotations

import os

import numpy as np
import pytest
from checkpoints import random_tensor, save
from orbax_calls import restore_standard
from programs import run_processes
from saved_files import raw_tensors

import orbax_safetensors_layout as osl

WEIGHTS = {f"layers.{n}.w": random_tensor((64, 48), np.float32, n) for n in range(12)} | {
    "big": random_tensor((256, 96), np.float32, 20),
    "small": random_tensor((5,), np.float32, 21),
}


@pytest.mark.parametrize("form", ["orbax", "sharded"])
def test_two_processes_share_a_conversion(tmp_path, form):
    source = save(tmp_path / "source", WEIGHTS, files=3)
    there, back = tmp_path / "there", tmp_path / "back"
    read = run_processes(
        "convert_multiprocess_convert.py",
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
    stored = {name: raw.data for name, raw in raw_tensors(back).items()}
    assert stored == {name: value.tobytes() for name, value in WEIGHTS.items()}
    if form == "orbax":
        plain = restore_standard(there)
        assert {n: v.tobytes() for n, v in plain.items()} == stored
    assert sorted(os.listdir(tmp_path)) == ["back", "source", "there"]


def test_a_failure_reaches_the_others_and_all_continue(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=3)
    (first, done), (second, _) = run_processes(
        "convert_multiprocess_fail.py",
        processes=2,
        devices=1,
        checkpoint=str(source),
        target=str(tmp_path / "target"),
    )
    assert "process 1 failed while converting" in first
    assert "the disk is full" in first
    assert "the disk is full" in second
    assert done > 0
    assert {n: v.tobytes() for n, v in osl.load(tmp_path / "target").items()} == {
        n: v.tobytes() for n, v in WEIGHTS.items()
    }
