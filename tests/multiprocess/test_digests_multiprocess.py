"""Conversions and consolidations by two processes of what was saved with digests."""

from __future__ import annotations

import json
import shutil
import zlib

import numpy as np
import pytest
from programs import run_processes

import orbax_safetensors_layout as osl

DIGESTS = "orbax_safetensors_layout.digests.json"
VALUES = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)  # of `w0` of verify_save.py
SHARDED = {"format": "sharded", "mesh": {"x": 2}, "processes": 2}


def flip_bit(file):
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("layout", "verb", "options", "in_place"),
    [
        ("hf", "convert", {"format": "hf"}, False),
        ("hf", "convert", SHARDED, False),
        ("sharded", "consolidate", {}, False),
        ("sharded", "consolidate", {}, True),
    ],
    ids=["to hf", "to sharded", "consolidated", "in place"],
)
def test_each_file_is_held_against_its_digest(tmp_path, layout, verb, options, in_place):
    """A bit that differs in any file of the source is an error of both; targets have digests."""
    whole, target = tmp_path / "whole", tmp_path / "target"
    run_processes("verify_save.py", processes=2, devices=2, folder=str(whole), layout=layout)
    files = sorted(file.name for file in whole.glob("*.safetensors"))
    assert len(files) == (5 if layout == "hf" else 2)
    damaged = [tmp_path / f"damaged-{number}" for number in range(len(files))]
    for folder, name in zip(damaged, files, strict=True):
        shutil.copytree(whole, folder)
        flip_bit(folder / name)
    before = [*map(contents, damaged)]
    calls = [(str(folder), None if in_place else str(target)) for folder in damaged]
    calls.append((str(whole), calls[0][1]))
    ends = run_processes(
        "digests_multiprocess.py",
        processes=2,
        devices=2,
        verb=verb,
        calls=calls,
        options=options,
    )
    for *refused, done in ends:
        for name, error in zip(files, refused, strict=True):
            assert f"files are not what was saved: {name} (CRC-32" in error
        assert done is None
    for first, second in zip(*(end[:-1] for end in ends), strict=True):
        assert sorted(error.partition(":")[0] for error in (first, second)) == [
            "FormatError",
            "PeerError",
        ]
    assert [*map(contents, damaged)] == before
    assert {*tmp_path.iterdir()} == {*damaged, whole, *([] if in_place else [target])}

    converted = contents(whole if in_place else target)
    digests = json.loads(converted.pop(DIGESTS))["files"]
    assert digests == {name: f"{zlib.crc32(data):08x}" for name, data in converted.items()}
    loaded = osl.load(whole if in_place else target, options=osl.ReadOptions(verify=True))
    assert loaded.keys() == {f"w{number}" for number in range(5)}
    for number in range(5):
        np.testing.assert_array_equal(loaded[f"w{number}"], VALUES + number)
