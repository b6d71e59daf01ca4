"""Notes of interrupted calls beside their folder are believed only where they can be true."""

from __future__ import annotations

import functools
import json
import os
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import commit_note, local_commit

TREE = {"w": np.arange(4.0, dtype=np.float32)}
OTHER = {"w": -np.arange(4.0, dtype=np.float32)}


def interrupted(source, target):
    """A conversion that ends while it is published; returns its lock file, which holds a note."""
    with (
        mock.patch.object(local_commit, "commit_folder", side_effect=KeyboardInterrupt),
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


def killed_after_publishing(call, target):
    """Ends a call as a kill would, right after it put the new folder in its place."""
    real, note = local_commit.commit_folder, []

    def commit_folder(*arguments, **keywords):
        real(*arguments, **keywords)
        note.extend((lock, lock.read_bytes()) for lock in target.parent.glob(".*.lock"))
        raise KeyboardInterrupt

    with (
        mock.patch.object(local_commit, "commit_folder", commit_folder),
        pytest.raises(KeyboardInterrupt),
    ):
        call()
    for lock, data in note:
        lock.write_bytes(data)


def put_other(target):
    """Another checkpoint of the same names and sizes, which gets the inodes of the first."""
    data = safetensors.numpy.save(OTHER, metadata={"format": "pt"})
    for path in target.glob("*.safetensors"):
        path.write_bytes(data)
        os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_conversion_is_not_done_when_another_checkpoint_has_its_inodes(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    osl.save(source, TREE)
    convert = functools.partial(osl.convert, source, target, format="hf")
    killed_after_publishing(convert, target)
    put_other(target)
    with pytest.raises(osl.CheckpointExistsError):
        convert()
    assert convert(overwrite=True).resumed_bytes == 0
    np.testing.assert_array_equal(osl.load(target)["w"], TREE["w"])


def test_a_consolidation_is_not_done_when_another_checkpoint_has_its_inodes(tmp_path):
    target = tmp_path / "target"
    osl.save(target, TREE, options=osl.WriteOptions(layout="sharded"))
    killed_after_publishing(lambda: osl.consolidate(target), target)
    put_other(target)
    osl.consolidate(target)  # in whole tensors already: it stays as it is
    np.testing.assert_array_equal(osl.load(target)["w"], OTHER["w"])


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
def test_a_conversion_that_took_its_place_is_done(tmp_path, form):
    source, target = tmp_path / "source", tmp_path / "target"
    osl.save(source, TREE)
    convert = functools.partial(osl.convert, source, target, format=form)
    killed_after_publishing(convert, target)
    (target / "notes.txt").write_text("mine")
    done = convert()
    assert done.resumed_bytes == done.nbytes
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("renames", [1, 2])
def test_a_save_that_was_killed_between_renames_had_kept_a_file_in_a_folder_of_its_own(
    tmp_path, renames
):
    """On a file system that cannot exchange two names."""
    target, templates = tmp_path / "target", "additional_chat_templates"
    save = functools.partial(
        osl.save, target, options=osl.WriteOptions(model={f"{templates}/a.jinja": b"a"})
    )
    save(TREE)
    (target / templates / "mine.jinja").write_text("mine")

    def killed(finished, folder):
        os.rename(folder, commit_note.aside_folder(folder))
        if renames == 2:
            os.rename(finished, folder)
        raise KeyboardInterrupt

    with (
        mock.patch.object(local_commit, "_replace", killed),
        pytest.raises(KeyboardInterrupt),
    ):
        save(OTHER, overwrite=True)
    expected = TREE if renames == 1 else OTHER
    np.testing.assert_array_equal(osl.load(target)["w"], expected["w"])
    save({"w": np.zeros(3)}, overwrite=True)
    np.testing.assert_array_equal(osl.load(target)["w"], np.zeros(3))
    assert (target / templates / "mine.jinja").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"target"}
