"""A finished folder takes its place: all at once, with what else stood in the old one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import local_commit
from orbax_safetensors_layout.storage.local_commit import commit_folder


def tree(folder):
    """Every path below a folder, and what it is."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            contents[name] = f"-> {os.readlink(path)}"
        else:
            contents[name] = "folder" if path.is_dir() else path.read_text()
    return contents


def make(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def is_replaced(name):
    return name.startswith("model")


def put(new, old):
    commit_folder(str(new), str(old), is_replaced=is_replaced)


@pytest.fixture(params=["exchange", "no system call", "refused"])
def way(request, monkeypatch):
    """Linux exchanges two names at once; other systems, and some file systems, do not."""
    if request.param == "no system call":
        monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    elif request.param == "refused":
        monkeypatch.setattr(local_commit, "_renameat2", lambda: lambda *_: -1)
    return request.param


@pytest.mark.usefixtures("way")
def test_where_nothing_stood(tmp_path):
    new = make(tmp_path / "new", model="1")
    put(new, tmp_path / "checkpoint")
    assert tree(tmp_path) == {"checkpoint": "folder", "checkpoint/model": "1"}


@pytest.mark.usefixtures("way")
def test_in_place_of_an_empty_folder(tmp_path):
    make(tmp_path / "checkpoint")
    put(make(tmp_path / "new", model="1"), tmp_path / "checkpoint")
    assert tree(tmp_path) == {"checkpoint": "folder", "checkpoint/model": "1"}


@pytest.mark.usefixtures("way")
def test_what_is_not_replaced_stays(tmp_path):
    old = make(tmp_path / "checkpoint", model="old", model_2="old", config="c", readme="r")
    make(old / "sub" / "deep", file="f", model="not one of ours")
    (old / "empty").mkdir()
    (old / "link").symlink_to("config")
    (old / "broken").symlink_to("/nowhere")
    (old / "sub" / "up").symlink_to("../config")
    (old / "folder").symlink_to("sub")
    new = make(tmp_path / "new", model="new")
    put(new, old)
    assert tree(tmp_path) == {
        "checkpoint": "folder",
        "checkpoint/model": "new",
        "checkpoint/config": "c",
        "checkpoint/readme": "r",
        "checkpoint/sub": "folder",
        "checkpoint/sub/deep": "folder",
        "checkpoint/sub/deep/file": "f",
        "checkpoint/sub/deep/model": "not one of ours",
        "checkpoint/sub/up": "-> ../config",
        "checkpoint/empty": "folder",
        "checkpoint/link": "-> config",
        "checkpoint/broken": "-> /nowhere",
        "checkpoint/folder": "-> sub",
    }


@pytest.mark.usefixtures("way")
def test_names_in_the_new_folder_are_replaced(tmp_path):
    """Of a folder that both have, file by file."""
    old = make(tmp_path / "checkpoint", config="old", readme="r")
    make(old / "sub", file="old", more="old")
    new = make(tmp_path / "new", config="new")
    make(new / "sub", file="new")
    put(new, old)
    assert tree(tmp_path) == {
        "checkpoint": "folder",
        "checkpoint/config": "new",
        "checkpoint/readme": "r",
        "checkpoint/sub": "folder",
        "checkpoint/sub/file": "new",
        "checkpoint/sub/more": "old",
    }


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_is_of_another_kind_is_not_replaced(tmp_path, kind):
    """A folder, or a link to one, where a file goes; a file where a folder goes."""
    old = make(tmp_path / "checkpoint", config="old")
    new = make(tmp_path / "new", config="new")
    if kind == "file":
        make(new / "other", file="new")
        (old / "other").write_text("mine")
    else:
        (new / "other").write_text("new")
        place = make(tmp_path / "place" if kind == "link" else old / "other", file="mine")
        if kind == "link":
            (old / "other").symlink_to(place)
    before = tree(tmp_path)
    with pytest.raises(osl.CheckpointExistsError, match="something else of a name"):
        put(new, old)
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("way")
def test_again_and_again(tmp_path):
    make(tmp_path / "checkpoint", config="c")
    for number in range(4):
        put(make(tmp_path / "new", model=str(number)), tmp_path / "checkpoint")
        assert tree(tmp_path) == {
            "checkpoint": "folder",
            "checkpoint/config": "c",
            "checkpoint/model": str(number),
        }


@pytest.mark.usefixtures("way")
def test_a_file_keeps_its_mode_and_times(tmp_path):
    old = make(tmp_path / "checkpoint", config="c")
    os.chmod(old / "config", 0o600)
    os.utime(old / "config", (1_000_000_000, 1_000_000_000))
    put(make(tmp_path / "new"), old)
    stat = (old / "config").stat()
    assert (stat.st_mode & 0o777, stat.st_mtime) == (0o600, 1_000_000_000)


def test_where_the_file_system_has_no_hard_links(tmp_path, monkeypatch):
    def no_links(*_, **__):
        raise OSError(1, "Operation not permitted")

    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), flushed.append(os.fstat(fd).st_ino)))
    monkeypatch.setattr(os, "link", no_links)
    old = make(tmp_path / "checkpoint", config="c")
    make(old / "sub", file="f")
    (old / "link").symlink_to("config")
    os.chmod(old / "config", 0o600)
    put(make(tmp_path / "new", model="new"), old)
    assert tree(old) == {
        "model": "new",
        "config": "c",
        "sub": "folder",
        "sub/file": "f",
        "link": "-> config",
    }
    assert (old / "config").stat().st_mode & 0o777 == 0o600
    # The first files are gone, so that their copies have to be on the disk.
    copies = (old, old / "config", old / "sub", old / "sub" / "file")
    assert {path.stat().st_ino for path in copies} <= {*flushed}


def test_readers_of_the_old_files_read_on(tmp_path):
    old = make(tmp_path / "checkpoint", model="old")
    with open(old / "model") as reader:
        put(make(tmp_path / "new", model="new"), old)
        assert reader.read() == "old"


def test_the_old_folder_is_as_it_was_when_something_cannot_be_kept(tmp_path, monkeypatch):
    old = make(tmp_path / "checkpoint", model="old", config="c")
    new = make(tmp_path / "new", model="new")

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copy2", fail)
    with pytest.raises(osl.StorageError, match="cannot put the finished folder") as caught:
        put(new, old)
    assert caught.value.file == str(old)
    assert tree(old) == {"model": "old", "config": "c"}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("links", [True, False])
def test_what_somebody_writes_meanwhile_is_kept(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(1, "no")))
    old = make(tmp_path / "checkpoint", model="old", config="c", log="1", same="s")
    make(old / "sub", note="n")
    replace = local_commit._replace

    def meanwhile(*arguments):
        (old / "late").write_text("late")
        (old / "sub" / "late").write_text("late")
        make(old / "new folder", late="late")
        (old / "log").write_text("1 2")
        (old / "config.new").write_text("newer")
        os.replace(old / "config.new", old / "config")
        for name in ("config", "log"):
            os.utime(old / name)
        return replace(*arguments)

    monkeypatch.setattr(local_commit, "_replace", meanwhile)
    put(make(tmp_path / "new", model="new"), old)
    assert tree(old) == {
        "config": "newer", "late": "late", "log": "1 2", "model": "new", "new folder": "folder",
        "new folder/late": "late", "same": "s", "sub": "folder", "sub/late": "late",
        "sub/note": "n",
    }  # fmt: skip
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_missing_new_folder_changes_nothing(tmp_path):
    old = make(tmp_path / "checkpoint", model="old", config="c")
    with pytest.raises(osl.StorageError):
        put(tmp_path / "new", old)
    assert tree(tmp_path)["checkpoint/model"] == "old"


def fail_nth_rename(monkeypatch, nth):
    real, calls = os.rename, []

    def rename(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(5, "Input/output error")
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, "rename", rename)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder(tmp_path, monkeypatch, nth):
    monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    old = make(tmp_path / "checkpoint", model="old")
    new = make(tmp_path / "new", model="new")
    fail_nth_rename(monkeypatch, nth)
    with pytest.raises(osl.StorageError):
        put(new, old)
    assert old.is_dir()
    assert tree(old) == {"model": "old"}


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_after_a_rename_leaves_a_whole_folder(tmp_path, monkeypatch, nth):
    monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    old = make(tmp_path / "checkpoint", model="old")
    new = make(tmp_path / "new", model="new")
    real, calls = os.rename, []

    def rename(*arguments, **keywords):
        real(*arguments, **keywords)
        calls.append(arguments)
        if len(calls) == nth:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        put(new, old)
    assert tree(old) == {"model": "old" if nth == 1 else "new"}


def test_an_old_folder_that_cannot_be_put_back_is_found_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    folder = tmp_path / "model"
    osl.save(folder, {"a": np.zeros(3)})
    real, calls = os.rename, []

    def rename(*arguments, **keywords):
        calls.extend([arguments] * (str(folder) in map(str, arguments)))
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        return real(*arguments, **keywords)

    with monkeypatch.context() as failing:
        failing.setattr(os, "rename", rename)
        with pytest.raises(osl.StorageError):
            osl.save(folder, {"a": np.ones(3)}, overwrite=True)
    assert osl.load(folder)["a"].tolist() == [0] * 3
    osl.save(folder, {"a": np.ones(3)}, overwrite=True)
    assert osl.load(folder)["a"].tolist() == [1] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_crash_left_beside_is_not_removed(tmp_path, monkeypatch):
    """Whether it is needed, only the claim of the place knows."""
    monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    old = make(tmp_path / "checkpoint", model="old")
    aside = make(Path(local_commit.aside_folder(str(old))), model="older")
    with pytest.raises(osl.StorageError):
        put(make(tmp_path / "new", model="new"), old)
    assert tree(old) == {"model": "old"}
    assert tree(aside) == {"model": "older"}


@pytest.mark.parametrize("way", ["exchange", "two renames"])
def test_an_old_folder_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch, way):
    """On NFS a file that is still open leaves a `.nfs…` behind, and its folder stays."""
    if way != "exchange":
        monkeypatch.setattr(local_commit, "_renameat2", lambda: None)
    real = os.rmdir

    def busy(path, **keywords):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(os, "rmdir", busy)
    old = make(tmp_path / "checkpoint", model="old")
    try:
        put(make(tmp_path / "new", model="new"), old)
    finally:
        monkeypatch.setattr(os, "rmdir", real)
        assert tree(old) == {"model": "new"}


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o2775])
def test_the_folder_keeps_its_mode(tmp_path, mode):
    """A private folder does not become readable for all, a shared one not for its owner alone."""
    old = make(tmp_path / "checkpoint", model="old")
    os.chmod(old, mode)
    put(make(tmp_path / "new", model="new"), old)
    assert old.stat().st_mode & 0o7777 == mode
