"""What an interrupted call noted beside its folder is believed only where it can be true."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import publish

TREE = {"w": np.arange(4.0, dtype=np.float32)}
OTHER = {"w": -np.arange(4.0, dtype=np.float32)}


def interrupted(source, target):
    """A conversion that ends while it is published; returns its lock file, which holds a note."""
    with (
        mock.patch.object(publish, "publish_folder", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        osl.convert(source, target, format="hf")
    (lock,) = target.parent.glob(".*.lock")
    return lock


NAMES = [
    "../precious/x", "..", "", ".", "/", "other", "other/x", "{workspace}/..", "{workspace}/\0",
    "{workspace}/../other", "{workspace}/x/../../../precious", "{workspace}/\ud800", 5, None, ["x"],
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_note_removes_nothing_but_what_saves_and_conversions_work_in(tmp_path, name):
    for folder in ("work/other", "work/other/x", "precious/x"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    osl.save(tmp_path / "source", TREE)
    target = tmp_path / "work" / "target"
    lock = interrupted(tmp_path / "source", target)
    note = json.loads(lock.read_text())
    if isinstance(name, str):
        name = name.format(workspace=note["finished"].split("/")[0])
    lock.write_text(json.dumps(note | {"finished": name}))
    osl.save(target, OTHER)
    np.testing.assert_array_equal(osl.load(target)["w"], OTHER["w"])
    for folder in ("work/other", "work/other/x", "precious/x"):
        assert (tmp_path / folder / "file").exists()


@pytest.mark.parametrize("value", [5, [1], "x", {}, {"": "x"}])
@pytest.mark.parametrize("key", [0, 1, 2])
def test_a_note_of_other_types_is_none(tmp_path, key, value):
    osl.save(tmp_path / "source", TREE)
    target = tmp_path / "target"
    lock = interrupted(tmp_path / "source", target)
    note = json.loads(lock.read_text())
    lock.write_text(json.dumps(note | {[*note][key]: value}))
    osl.save(target, OTHER)
    lock.write_text(json.dumps(note | {[*note][key]: value}))
    with pytest.raises(osl.CheckpointExistsError):
        osl.convert(tmp_path / "source", target, format="hf")
    osl.convert(tmp_path / "source", target, format="hf", overwrite=True)
    np.testing.assert_array_equal(osl.load(target)["w"], TREE["w"])


@pytest.mark.parametrize("text", ["{", "[1, 2, 3]", "[" * 100_000, "\udcff"])
def test_a_note_that_is_none(tmp_path, text):
    osl.save(tmp_path / "source", TREE)
    target = tmp_path / "target"
    lock = interrupted(tmp_path / "source", target)
    lock.write_text(text, errors="surrogateescape")
    osl.save(target, OTHER)
    np.testing.assert_array_equal(osl.load(target)["w"], OTHER["w"])
