"""Conversions that are killed, and continued: nothing finished is read again."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import shutil
from unittest import mock

import numpy as np
import pytest
from checkpoints import random_tensor, save
from http_server import Reply, Server, files_of, serve_range
from orbax_calls import restore_standard, save_pytree

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.conversion import FilesTarget, pipeline
from orbax_safetensors_layout.conversion.journal import Journal, WrittenGroup
from orbax_safetensors_layout.storage import local_commit

PROGRAM = "convert_resume.py"
WEIGHTS = {f"layers.{n}.w": random_tensor((32, 48 + n), np.float32, n) for n in range(4)} | {
    "big": random_tensor((64, 96), np.float32, 9),
    "small": random_tensor((5,), np.float32, 10),
}


def convert(fork_server, log, **command):
    """Exit status of a conversion in a child, and what it logged."""
    child = {
        name: value if isinstance(value, int) else str(value) for name, value in command.items()
    }
    (ended,) = fork_server.run([{"log": str(log), **child}])
    return ended.status, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(params=["hf", "orbax"])
def source(tmp_path, request):
    folder = tmp_path / "source"
    save(folder, WEIGHTS, files=2)
    if request.param == "orbax":
        shutil.move(folder, tmp_path / "hf")
        save_pytree(folder, WEIGHTS)
    return folder


def values_at(target, form):
    return restore_standard(target) if form == "orbax" else osl.load(target)


def finished_reads(log):
    """Return what was read for groups that are recorded as finished."""
    last = max((n for n, line in enumerate(log) if line[0] == "recorded"), default=-1)
    return {tuple(map(str, line[1:])) for line in log[: last + 1] if line[0] == "read"}


def reads(log):
    """Return what was read of arrays, before anything was read back to be compared."""
    end = [n for n, line in enumerate(log) if line[0] == "committed"]
    part = log if not end else log[: end[0]]
    return [tuple(map(str, line[1:])) for line in part if line[0] == "read"]


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
def test_killed_and_continued(fork_server, tmp_path, source, form):
    """Kills one conversion after the other; the next continues where the last one was."""
    log = tmp_path / "log"
    status, whole = convert(
        fork_server, log, source=source, target=tmp_path / "once", form=form, kill=-1
    )
    assert status == 0
    calls = whole[-1][1]
    assert calls > 20
    rng = random.Random(calls)
    target = tmp_path / "target"
    done: set[tuple[str, ...]] = set()
    runs = 0
    while True:
        kill = rng.randrange(2, calls // 2) if runs < 6 else -1
        status, lines = convert(
            fork_server, log, source=source, target=target, form=form, kill=kill
        )
        data = [line for line in reads(lines) if line[1] != "0"]  # not the headers
        assert not done & set(data)
        done |= {line for line in finished_reads(lines) if line[1] != "0"}
        runs += 1
        if status == 0:
            break
        assert status == -9
        assert not target.exists()
    assert runs > 2
    assert done
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    values = values_at(target, form)
    assert {name: np.asarray(value).tobytes() for name, value in values.items()} == {
        name: value.tobytes() for name, value in WEIGHTS.items()
    }


def interrupted(fork_server, tmp_path, source):
    status, _ = convert(
        fork_server, tmp_path / "log", source=source, target=tmp_path / "target", form="hf", kill=25
    )
    assert status == -9
    (workspace,) = tmp_path.glob(".*.partial-convert")
    return workspace


def test_a_restart_that_is_interrupted_leaves_no_journal_of_what_is_gone(
    fork_server, tmp_path, monkeypatch
):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    workspace = interrupted(fork_server, tmp_path, source)
    options = osl.ConvertOptions(memory_budget_bytes=128 << 10, verify=False)
    arguments = CONTINUED | {"options": options}
    rmtree = shutil.rmtree

    def interrupt(folder, **_):
        rmtree(os.path.join(folder, "finished"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            osl.convert(source, tmp_path / "target", restart=True, **arguments)
    assert workspace.exists()
    osl.convert(source, tmp_path / "target", **arguments)
    values = osl.load(tmp_path / "target")
    for name, value in WEIGHTS.items():
        np.testing.assert_array_equal(np.asarray(values[name]), value)


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified"])
def test_what_a_weak_version_tells_apart_is_another_source(tmp_path, tag):
    folder = save(tmp_path / "source", WEIGHTS, files=2)
    versions = {"ETag": ('W/"1"', 'W/"2"')}.get(
        tag, ("Thu, 26 Nov 2026 12:00:00 GMT", "Thu, 26 Nov 2026 12:00:01 GMT")
    )
    now = [versions[0]]

    def answer(request):
        path = folder / request.path.removeprefix("/files/")
        if not path.is_file():
            return Reply(404, {}, b"")
        return serve_range(request, path, {tag: now[0]})

    def interrupt(progress):
        if progress.done_bytes > progress.total_bytes // 2:
            raise KeyboardInterrupt

    target, budget = tmp_path / "target", {"memory_budget_bytes": 128 << 10}
    with Server(answer) as server:
        options = osl.ConvertOptions(**budget, progress=interrupt)
        with pytest.raises(KeyboardInterrupt):
            osl.convert(f"{server.url}/files", target, format="hf", options=options)
        save(folder, {name: -value for name, value in WEIGHTS.items()}, files=2)
        now[0] = versions[1]
        options = osl.ConvertOptions(**budget)
        with pytest.raises(osl.SafetensorsLayoutError, match="one that has changed since"):
            osl.convert(f"{server.url}/files", target, format="hf", options=options)
        now[0] = versions[0]


CONTINUED = {
    "format": "hf",
    "mesh": {"fsdp": 4},
    "options": osl.ConvertOptions(memory_budget_bytes=128 << 10),
}


def test_other_arguments_and_other_sources_are_refused(fork_server, tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    workspace = interrupted(fork_server, tmp_path, source)
    target = tmp_path / "target"
    with pytest.raises(osl.SafetensorsLayoutError, match=r"other arguments.*--restart"):
        osl.convert(source, target, **CONTINUED | {"format": "sharded"})
    other = osl.ConvertOptions(memory_budget_bytes=128 << 10, dtype="bfloat16")
    with pytest.raises(osl.SafetensorsLayoutError, match="other arguments"):
        osl.convert(source, target, **CONTINUED | {"options": other})
    save(source, {name: -value for name, value in WEIGHTS.items()}, files=2)
    with pytest.raises(osl.SafetensorsLayoutError, match="one that has changed since"):
        osl.convert(source, target, **CONTINUED)
    assert workspace.exists()
    done = osl.convert(source, target, restart=True, **CONTINUED)
    assert done.resumed_bytes == 0
    np.testing.assert_array_equal(osl.load(target)["big"], -WEIGHTS["big"])
    assert not workspace.exists()


@pytest.mark.parametrize("budget", [72 << 10, 16 << 20])
def test_another_memory_budget_continues_the_same_conversion(fork_server, tmp_path, budget):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    workspace = interrupted(fork_server, tmp_path, source)
    given = CONTINUED | {"options": osl.ConvertOptions(memory_budget_bytes=budget)}
    done = osl.convert(source, tmp_path / "target", **given)
    assert done.resumed_bytes > 0
    assert osl.verify(tmp_path / "target", source).ok
    assert not workspace.exists()


def test_chunks_of_orbax_do_not_depend_on_the_memory_of_the_run_that_continues(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)

    def interrupt(progress):
        if progress.done_bytes * 2 > progress.total_bytes:
            raise KeyboardInterrupt

    def convert(target, budget, progress=False):
        options = osl.ConvertOptions(memory_budget_bytes=budget, progress=progress)
        return osl.convert(source, tmp_path / target, options=options)

    with pytest.raises(KeyboardInterrupt):
        convert("target", 128 << 10, interrupt)
    assert convert("target", 16 << 20).resumed_bytes > 0
    convert("whole", 128 << 10)
    files = [
        sorted((p.relative_to(root), p.stat().st_size) for p in root.rglob("*.zarr*"))
        for root in (tmp_path / "target", tmp_path / "whole")
    ]
    assert files[0] == files[1]
    assert osl.verify(tmp_path / "target", source).ok


def test_far_less_memory_than_a_conversion_began_with_is_refused(fork_server, tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    workspace = interrupted(fork_server, tmp_path, source)
    less = {"options": osl.ConvertOptions(memory_budget_bytes=32 << 10)}
    with pytest.raises(osl.SafetensorsLayoutError, match=r"at least 65,536.*--restart"):
        osl.convert(source, tmp_path / "target", **CONTINUED | less)
    assert workspace.exists()
    assert osl.convert(source, tmp_path / "target", restart=True, **CONTINUED | less)
    assert osl.verify(tmp_path / "target", source).ok


def test_other_side_files_are_another_conversion_told_by_their_digests(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    tokenizer = source / "tokenizer.json"
    described = []

    def interrupt(progress):
        if progress.done_bytes * 2 > progress.total_bytes:
            raise KeyboardInterrupt

    def convert(text, progress=False):
        tokenizer.write_text(text)
        options = osl.ConvertOptions(memory_budget_bytes=128 << 10, progress=progress)
        return osl.convert(source, tmp_path / "target", format="hf", options=options)

    def describe(self, original=FilesTarget.describe):
        described.append(repr(original(self)))
        return original(self)

    long = "x" * 10_000_000
    with pytest.raises(KeyboardInterrupt):
        convert(long, interrupt)
    with pytest.raises(osl.SafetensorsLayoutError, match="other arguments"):
        convert(long[:-1] + "y")
    with mock.patch.object(FilesTarget, "describe", describe):
        assert convert(long).resumed_bytes > 0
    assert max(map(len, described)) < 100_000
    assert (tmp_path / "target" / "tokenizer.json").read_text() == long


def test_a_mapping_that_differs_late_in_a_long_list_is_another(tmp_path):
    """Messages leave out most of such a list."""
    layers = {f"layers.{n}": np.full((64, 32), n, np.float32) for n in range(12)}
    source = save(tmp_path / "source", layers, files=2)
    convert = functools.partial(osl.convert, source, tmp_path / "target", format="hf")

    def mapping(*last):
        expr = osl.stack(osl.tensor("layers.{i}"), "i", indices=[*range(10), *last])
        return osl.Mapping([osl.rule("all", expr)])

    def interrupt(progress):
        if progress.done_bytes * 2 > progress.total_bytes:
            raise KeyboardInterrupt

    small = functools.partial(osl.ConvertOptions, memory_budget_bytes=128 << 10)
    with pytest.raises(KeyboardInterrupt):
        convert(mapping=mapping(10, 11), options=small(progress=interrupt))
    with pytest.raises(osl.SafetensorsLayoutError, match="other arguments"):
        convert(mapping=mapping(11, 10), options=small())
    assert convert(mapping=mapping(10, 11), options=small()).resumed_bytes


def test_functions_of_a_mapping_that_differ_are_not_mixed(tmp_path):
    """Neither in what is continued, nor where a call ended just after its target became visible."""
    ones = {f"layers.{n}": np.ones((64, 32), np.float32) for n in range(12)}
    source = save(tmp_path / "source", ones, files=2)

    def interrupt(progress):
        if progress.done_bytes * 2 > progress.total_bytes:
            raise KeyboardInterrupt

    def convert(factor, *, progress=False, **options):
        expr = osl.opaque(
            functools.partial(np.multiply, np.float32(factor)),
            osl.tensor("layers.{i}"),
            shape=(64, 32),
            dtype="float32",
        )
        return osl.convert(
            source,
            tmp_path / "target",
            mapping=osl.Mapping([osl.rule("scaled.{i}", expr)]),
            inverse=False,
            format="hf",
            options=osl.ConvertOptions(memory_budget_bytes=128 << 10, progress=progress),
            **options,
        )

    def values():
        return {float(value) for x in osl.load(tmp_path / "target").values() for value in x.flat}

    with pytest.raises(KeyboardInterrupt):
        convert(2, progress=interrupt)
    with pytest.raises(osl.SafetensorsLayoutError, match="other arguments"):
        convert(3)
    assert convert(2).resumed_bytes
    assert values() == {2}
    with (
        mock.patch.object(pipeline.LocalStorage, "remove", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        convert(4, overwrite=True)
    assert values() == {4}
    convert(3, overwrite=True)
    assert values() == {3}


def test_a_line_that_a_crash_cut_off_is_no_line(fork_server, tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    workspace = interrupted(fork_server, tmp_path, source)
    journal = workspace / "journal-0.jsonl"
    groups = len(journal.read_text().splitlines()) - 1
    assert groups > 1
    journal.write_text(journal.read_text()[:-5])
    done = osl.convert(source, tmp_path / "target", **CONTINUED)
    assert 0 < done.resumed_bytes < done.nbytes
    np.testing.assert_array_equal(osl.load(tmp_path / "target")["big"], WEIGHTS["big"])


def test_lines_of_the_journal_are_written_whole(tmp_path):
    """A disk that is nearly full takes the first bytes of a write, without an error."""
    write = os.write
    journal = Journal(str(tmp_path), "source", "arguments", block_bytes=8, groups="groups")
    group = WrittenGroup(["digest"], [("file", 0, 8, 7)], [])
    few = mock.patch("os.write", lambda fd, data: write(fd, data[:7]))
    with few, journal.opened(0):
        journal.add(0, group)
        journal.add(1, group)
    assert journal.read() == {0: group, 1: group}


DEEP, LONG = "[" * 100_000, '{"version": 1' + "0" * 5000 + "}"


@pytest.mark.parametrize(
    "line", ["{", "[]", "1", '{"group": 1}', "null", '"text"', "\udcff", DEEP, LONG, "{}"]
)
def test_a_damaged_journal_is_named(tmp_path, line):
    journal = Journal(str(tmp_path), "source", "arguments", block_bytes=8, groups="groups")
    with journal.opened(0):
        journal.add(0, ["a"])
    file = tmp_path / "journal-0.jsonl"
    head, *groups = file.read_text().splitlines()
    for lines in ([line, *groups], [head, line, *groups]):
        file.write_text("\n".join([*lines, ""]), errors="surrogateescape")
        for read in (journal.read, lambda: Journal.block_bytes(str(tmp_path))):
            with pytest.raises(osl.SafetensorsLayoutError, match="restart=True"):
                read()


@pytest.mark.parametrize("block_bytes", [0, -1, True, None, "8", 8.0, [8]])
def test_a_journal_that_says_no_size_of_blocks_is_damaged(tmp_path, block_bytes):
    journal = Journal(str(tmp_path), "source", "arguments", block_bytes=8, groups="groups")
    with journal.opened(0):
        pass
    file = tmp_path / "journal-0.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block_bytes": block_bytes}) + "\n")
    for read in (journal.read, lambda: Journal.block_bytes(str(tmp_path))):
        with pytest.raises(osl.SafetensorsLayoutError, match=r"damaged.*block_bytes"):
            read()


def test_journals_of_two_sizes_of_blocks_are_not_mixed(tmp_path):
    for process in (0, 1):
        journal = Journal(
            str(tmp_path), "source", "arguments", block_bytes=8 + process, groups="groups"
        )
        with journal.opened(process):
            pass
    with pytest.raises(osl.SafetensorsLayoutError, match="in other parts"):
        journal.read()


def test_an_interrupt_leaves_what_is_done(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)

    def interrupt(progress):
        if progress.done_bytes * 2 > progress.total_bytes:
            raise KeyboardInterrupt

    options = osl.ConvertOptions(memory_budget_bytes=128 << 10, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        osl.convert(source, tmp_path / "target", **CONTINUED | {"options": options})
    done = osl.convert(source, tmp_path / "target", **CONTINUED)
    assert done.resumed_bytes * 3 > done.nbytes
    np.testing.assert_array_equal(osl.load(tmp_path / "target")["big"], WEIGHTS["big"])


def ends_while_publishing(source, target, *, after, **more):
    """A conversion that ends as a kill would end it: `after` the folder took its place, or not."""
    real = local_commit.commit_folder

    def commit_folder(*arguments, **keywords):
        if after:
            with mock.patch.object(local_commit, "_remove_old"):
                real(*arguments, **keywords)
        raise KeyboardInterrupt

    with (
        mock.patch.object(local_commit, "commit_folder", commit_folder),
        pytest.raises(KeyboardInterrupt),
    ):
        osl.convert(source, target, **CONTINUED | more)


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_ended_while_it_was_published(tmp_path, form, overwrite, after):
    """Where the finished folder was stands what it replaced: nothing may be written into that."""
    source = save(tmp_path / "source", WEIGHTS, files=2)
    target = tmp_path / "target"
    if overwrite:
        osl.convert(source, target, **CONTINUED | {"format": form})
        shutil.rmtree(source)
        save(source, {name: -value for name, value in WEIGHTS.items()}, files=2)
    options = osl.ConvertOptions(memory_budget_bytes=128 << 10, verify=False)
    same = CONTINUED | {"format": form, "overwrite": overwrite, "options": options}
    ends_while_publishing(source, target, after=after, **same)
    done = osl.convert(source, target, **same)
    assert done.resumed_bytes == done.nbytes
    values = values_at(target, form)
    for name, value in WEIGHTS.items():
        assert np.asarray(values[name]).tobytes() == (-value if overwrite else value).tobytes()
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_what_was_published_is_not_taken_for_what_came_after_it(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    target = tmp_path / "target"
    ends_while_publishing(source, target, after=True)
    with pytest.raises(osl.CheckpointExistsError):
        osl.convert(source, target, **CONTINUED | {"format": "sharded"})
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]
    ends_while_publishing(source, target, after=True, overwrite=True)
    shutil.rmtree(target)
    target.mkdir()
    assert osl.convert(source, target, **CONTINUED).resumed_bytes == 0
    np.testing.assert_array_equal(osl.load(target)["big"], WEIGHTS["big"])


def test_an_old_checkpoint_is_put_back_where_names_are_not_exchanged(tmp_path):
    source = save(tmp_path / "source", WEIGHTS, files=2)
    target = save(tmp_path / "target", {"old": np.arange(3)})
    rename, killed = os.rename, []

    def ends(first, other):
        if not killed:  # then nothing is put back
            rename(first, other)
        if killed or first == str(target):
            killed.append(first)
            raise KeyboardInterrupt

    with (
        mock.patch.object(local_commit, "_renameat2", return_value=None),
        mock.patch.object(os, "rename", ends),
        pytest.raises(KeyboardInterrupt),
    ):
        osl.convert(source, target, **CONTINUED | {"overwrite": True})
    assert not target.exists()
    with pytest.raises(osl.CheckpointExistsError):
        osl.convert(source, target, **CONTINUED)
    np.testing.assert_array_equal(osl.load(target)["old"], np.arange(3))


def test_what_a_killed_restart_left_is_not_taken_along(fork_server, tmp_path):
    """The journal goes first: then the files in the folder are nobody's."""
    source = save(tmp_path / "source", WEIGHTS, files=2)
    workspace = interrupted(fork_server, tmp_path, source)
    for journal in workspace.glob("journal-*"):
        journal.unlink()
    (workspace / "finished" / "other.txt").write_text("left")
    with (workspace / "finished" / "model.safetensors").open("ab") as file:
        file.write(bytes(100_000))
    options = osl.ConvertOptions(verify=False, dtype="bfloat16")
    osl.convert(source, tmp_path / "target", format="hf", options=options)
    assert not (tmp_path / "target" / "other.txt").exists()
    assert {str(v.dtype) for v in osl.load(tmp_path / "target").values()} == {"bfloat16"}


def test_an_orbax_source_that_is_saved_anew_meanwhile_is_an_error(tmp_path, monkeypatch):
    source = tmp_path / "source"
    save_pytree(source, WEIGHTS, use_ocdbt=False)
    commit = FilesTarget.commit

    def saved_anew(*arguments):
        shutil.rmtree(source)
        save_pytree(source, {name: -value for name, value in WEIGHTS.items()}, use_ocdbt=False)
        commit(*arguments)

    monkeypatch.setattr(FilesTarget, "commit", saved_anew)
    with pytest.raises(osl.StorageError, match="changed or replaced while it was converted"):
        osl.convert(source, tmp_path / "target", format="hf")
    assert not (tmp_path / "target").exists()


def test_scales_of_another_folder_are_not_continued(tmp_path, monkeypatch):
    weights = {"l.q_proj.weight": np.random.default_rng(0).normal(size=(128, 128)).astype("f4")}
    source = save(tmp_path / "source", weights)
    base = tmp_path / "base"
    options = osl.WriteOptions(quantize=osl.Quantization("fp8_block"))
    (source / "config.json").write_text('{"model_type": "llama"}')

    def quantized(scale):
        weights = {name: value * scale for name, value in osl.load(source).items()}
        osl.save(base, weights, options=dataclasses.replace(options, model=source), overwrite=True)
        return osl.Quantization.like(base)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FilesTarget, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            osl.convert(source, tmp_path / "to", format="hf", quantize=quantized(1.0))
    with pytest.raises(osl.SafetensorsLayoutError, match="other arguments"):
        osl.convert(source, tmp_path / "to", format="hf", quantize=quantized(2.0))


def test_a_web_source_is_converted_into_the_working_folder(tmp_path, monkeypatch):
    source = save(tmp_path / "source", WEIGHTS)
    (tmp_path / "to").mkdir()
    monkeypatch.chdir(tmp_path / "to")
    with Server(files_of(source)) as server:
        osl.convert(f"{server.url}/files/?sig=hunter2", ".", format="hf")
    assert osl.load(".").keys() == WEIGHTS.keys()
