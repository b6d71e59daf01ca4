"""Folders that are no checkpoint: errors name those below; a step is read at its item."""

import os

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from checkpoints import save
from every_dtype import write

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.__main__ import main
from orbax_safetensors_layout.analysis import inspect
from orbax_safetensors_layout.catalog import discover
from orbax_safetensors_layout.storage import LocalStorage


def places(root, *folders):
    for folder in folders:
        save(root / folder, {"w": np.arange(4, dtype=np.float32)})


@pytest.mark.parametrize(
    ("folders", "files", "told"),
    [
        (["8/default", "9/default", "10/default"], [], "10/default, 9/default, 8/default"),
        (["unet", "vae", "text_encoder"], ["model_index.json"], "vae, unet, text_encoder"),
        (["models--a--b/snapshots/c0ffee"], [], "models--a--b/snapshots/c0ffee"),
        ([], [], None),
    ],
    ids=["steps", "components", "a cache of the hub", "nothing"],
)
def test_an_error_names_the_checkpoints_below_a_folder(tmp_path, folders, files, told):
    root = tmp_path / "root"
    root.mkdir()
    places(root, *folders)
    for name in files:
        (root / name).write_text("{}")
    for read in (osl.load, osl.metadata, inspect):
        with pytest.raises(osl.CheckpointNotFoundError, match="does not contain any") as raised:
            read(root)
        text = str(raised.value)
        assert ("Give a checkpoint below it" in text) == (told is not None)
        assert told is None or f"Give a checkpoint below it: {told}." in text
    if "10/default" in folders:  # steps are chosen by number where there is an option
        with pytest.raises(osl.CheckpointNotFoundError, match=r"as step=10 \(--step 10\); it has"):
            osl.verify(root)
        assert osl.verify(root, step=10).ok


def test_what_orbax_saved_below_a_folder_is_told_apart(tmp_path):
    (tmp_path / "3" / "params").mkdir(parents=True)
    (tmp_path / "3" / "params" / "_METADATA").write_text("{}")
    places(tmp_path, "4/default")
    with pytest.raises(osl.CheckpointNotFoundError) as raised:
        osl.load(tmp_path)
    assert "Give a checkpoint below it: 4/default." in str(raised.value)
    assert "Below it are in Orbax's own format: 3/params." in str(raised.value)


def test_a_step_is_read_at_its_item(tmp_path):
    with ocp.CheckpointManager(
        tmp_path / "run", handler_registry=osl.handler_registry("default")
    ) as manager:
        manager.save(18, args=ocp.args.StandardSave({"w": np.arange(4.0)}))
    step = tmp_path / "run" / "18"
    assert osl.load(step)["w"].tolist() == [0, 1, 2, 3]
    assert osl.metadata(step)["w"].shape == (4,)
    assert inspect(step).total.tensors == 1
    assert osl.verify(step).ok
    osl.save(
        step / "default", osl.load(step), overwrite=True, options=osl.WriteOptions(digests=True)
    )
    report = osl.verify(f"file://{step}")  # a URL is not resolved before its files are found
    assert (report.ok, report.path, report.digested_files > 0) == (True, f"{step}/default", True)
    places(step, "other")
    assert osl.load(step)["w"].dtype == np.float64  # `default` is the usual item
    (step / "default").rename(step / "another")
    with pytest.raises(osl.CheckpointNotFoundError, match="other, another"):
        osl.load(step)


@pytest.mark.parametrize(
    ("folders", "orbax", "is_step", "told"),
    [
        (["only"], [], False, "Give a checkpoint below it: only."),
        (["only"], [], True, None),
        (["default", ".hidden"], [], True, None),
        (["one", "one.orbax-checkpoint-tmp-7"], [], True, None),
        (["one", "other"], [], True, "the step has several items: one, other"),
        (["state", "other"], [], True, None),
        (["one"], ["other"], True, "the step has several items: one, other"),
        ([], ["one", "other"], True, "the step has several items: one, other"),
    ],
)
def test_all_open_a_folder_or_all_refuse_it(tmp_path, capsys, folders, orbax, is_step, told):
    root = tmp_path / "root"
    places(root, *folders)
    for name in orbax:
        (root / name).mkdir(parents=True)
        (root / name / "_METADATA").write_text("{}")
    if is_step:
        (root / "_CHECKPOINT_METADATA").write_text("{}")
    for read in (osl.load, osl.metadata, osl.verify):
        if told is None:
            read(root)
            continue
        with pytest.raises(osl.CheckpointNotFoundError) as raised:
            read(root)
        assert told in str(raised.value)
        assert ("item='one' (--item one)" in str(raised.value)) == (read is osl.verify and is_step)
    for command in (["inspect", root], ["plan", root, "--mesh", "x=2"], ["verify", root]):
        assert main(list(map(str, command))) == (0 if told is None else 1)
        assert told is None or told in capsys.readouterr().err
        if "one" in folders and is_step:
            assert main([*map(str, command), "--item", "one"]) == 0


@pytest.mark.parametrize(
    "read",
    [lambda path: main(["inspect", str(path), "--item", "x"]), osl.verify, osl.load],
)
def test_an_error_says_whether_the_path_or_its_content_is_missing(tmp_path, capsys, read):
    (tmp_path / "empty").mkdir()
    for path, told in {
        "empty": "does not contain any",
        "none": "the path does not exist (",
    }.items():
        try:
            read(tmp_path / path)
        except osl.CheckpointNotFoundError as error:
            text = str(error)
        else:
            text = capsys.readouterr().err
            told = told.replace("does not contain any", "there is no item 'x'")
        assert told in text
        assert "does not exist, or" not in text


@pytest.mark.parametrize("path", ["", "a\0b", "~/a\0b"])
def test_a_path_that_none_can_be_is_refused_by_all(tmp_path, path):
    places(tmp_path, "there")
    for use in (
        osl.load,
        osl.metadata,
        osl.verify,
        inspect,
        osl.consolidate,
        lambda path: osl.convert(path, tmp_path / "to"),
        lambda path: osl.convert(path, tmp_path / "to", step=3),
        lambda path: osl.verify(tmp_path / "there", path),
    ):
        with pytest.raises(osl.StorageError, match="is empty, or has a null byte"):
            use(path)


@pytest.mark.parametrize("use", [osl.load, lambda path: osl.save(path, {"a": np.ones(2)})])
def test_a_path_of_thousands_of_folders_is_refused(tmp_path, use):
    with pytest.raises(osl.StorageError, match=r"too deep.*at most 500.*found: 1\d{3} slashes"):
        use(str(tmp_path) + "/a" * 1800)


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 1 << 62)])
def test_shapes_that_numpy_cannot_hold_are_refused_by_all(tmp_path, shape):
    data = b"" if 0 in shape else bytes(4)
    (tmp_path / "from").mkdir()
    write(tmp_path / "from/model.safetensors", {"w": ("F32", shape, data)})
    same = osl.Mapping([osl.rule("w", osl.tensor("w"))])
    for use in (
        osl.load,
        same.abstract,
        same.explain,
        lambda path: osl.load(path, mapping=same),
        lambda path: osl.metadata(path, mapping=same),
        lambda path: osl.convert(path, tmp_path / "to", format="hf"),
        lambda path: osl.convert(path, tmp_path / "to", format="sharded"),
        lambda path: osl.verify(path, path),
    ):
        with pytest.raises(osl.SafetensorsLayoutError, match=r"dimensions|16 TiB"):
            use(tmp_path / "from")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_configuration_that_cannot_be_read_is_a_problem_beside_the_tensors(tmp_path, kind):
    places(tmp_path, "model")
    make = os.mkdir if kind == "folder" else os.mkfifo
    make(tmp_path / "model" / "config.json")
    report = inspect(tmp_path / "model")
    assert report.total.tensors == 1
    assert "config.json" in str(report.problem)


def test_numbers_in_names_of_files_may_have_any_length():
    """A server may give any names."""
    names = [
        f"model-{'1' * 5000}-of-{'2' * 5000}.safetensors",
        f"part-1-of-{'9' * 9999}.safetensors",
    ]

    class Listing(LocalStorage):
        def list(self, folder):
            return names

    with Listing() as storage:
        found = discover(storage, "/served")
    assert found.files == [f"/served/{names[0]}"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_numbered_set_counts_from_0_or_from_1(tmp_path, first):
    """Some publish one from 0 (inclusionAI/Ring-2.5-1T)."""
    names = [f"model-{n:05}-of-00003.safetensors" for n in range(first, first + 3)]
    for number, name in enumerate(names):
        safetensors.numpy.save_file({f"t{number}": np.full(2, number)}, tmp_path / name)
    assert osl.load(tmp_path).keys() == {"t0", "t1", "t2"}
    (tmp_path / names[1]).unlink()
    with pytest.raises(osl.InvalidIndexError, match=rf"1 missing: numbers 0000{first + 1}"):
        osl.load(tmp_path)
    safetensors.numpy.save_file({"t": np.ones(2)}, tmp_path / names[1])
    stray = f"model-0000{3 - 3 * first}-of-00003.safetensors"  # before the first, or after the last
    safetensors.numpy.save_file({"u": np.ones(2)}, tmp_path / stray)
    assert osl.verify(tmp_path).ok
