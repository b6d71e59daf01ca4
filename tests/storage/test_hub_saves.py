"""Saves to the hub: every process uploads, one commit shows all, a failure leaves nothing."""

import functools
import json
import logging
import os
import tempfile
import threading
from pathlib import Path

import absl.logging
import huggingface_hub.constants
import numpy as np
import pytest
import safetensors.numpy
from programs import run_processes
from remote_checks import TOKEN, assert_no_secret, shown

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.conversion import FilesTarget
from orbax_safetensors_layout.storage import hub_upload

TREE = {f"layer.{n}.weight": np.arange(4000.0, dtype=np.float32) + n for n in range(6)}
OPTIONS = osl.WriteOptions(max_file_bytes=40_000, timeout_seconds=60)
NAME = "org/model"


# The library gives its client bytes as data.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


@pytest.fixture(autouse=True)
def writer(hub, monkeypatch, tmp_path):
    """A token that may write; files are sent by LFS, as no server for Xet is to be had."""
    hub.writers.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    # What huggingface_hub 1.0 made of HF_ENDPOINT when it was imported.
    template = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.hub.url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.hub.url}/{template}"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def files(hub, revision="main"):
    repo = hub.repo(f"models/{NAME}")
    folder = repo.commits[repo.refs[revision]]
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def commits(hub):
    return [r for r, status in hub.hub.log if "/commit/" in r.path and status == 200]


def nothing_is_left(tmp_path):
    return not [path for path in tmp_path.rglob("*") if path.is_file()]


def tensors(found):
    loaded = [safetensors.numpy.load(d) for n, d in found.items() if n.endswith(".safetensors")]
    return {name: value for file in loaded for name, value in file.items()}


def test_a_new_repository_is_private_and_gets_one_commit(hub, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"a": 1}')
    options = osl.WriteOptions(model=model, max_file_bytes=40_000, card={"license": "mit"})
    osl.save(f"hf://{NAME}", TREE, options=options)
    assert hub.repo(f"models/{NAME}").readers == {TOKEN}
    found = files(hub)
    assert found["config.json"] == b'{"a": 1}'
    assert b"license" in found["README.md"]
    assert set(json.loads(found["model.safetensors.index.json"])["weight_map"]) == TREE.keys()
    values = tensors(found)
    assert all(np.array_equal(values[name], TREE[name]) for name in TREE)
    assert len(commits(hub)) == 1
    loaded = osl.load(f"hf://{NAME}")
    assert all(np.array_equal(loaded[name], TREE[name]) for name in TREE)
    (model / "config.json").unlink()
    model.rmdir()
    assert nothing_is_left(tmp_path)


def test_a_branch_and_a_folder(hub):
    osl.save(f"hf://{NAME}", TREE)
    osl.save(f"hf://{NAME}@trial/inner", {"w": np.ones(3)})
    assert "inner/model.safetensors" in files(hub, "trial")
    assert "inner/model.safetensors" not in files(hub)
    assert np.array_equal(osl.load(f"hf://{NAME}@trial/inner")["w"], np.ones(3))


def test_an_overwrite_replaces_all_that_belongs_to_the_checkpoint(hub):
    osl.save(f"hf://{NAME}", TREE, options=OPTIONS)
    with pytest.raises(osl.CheckpointExistsError):
        osl.save(f"hf://{NAME}", {"w": np.ones(3)})
    osl.save(f"hf://{NAME}", {"w": np.ones(3)}, overwrite=True)
    expected = {".gitattributes", "model.safetensors", "orbax_safetensors_layout.json"}
    assert files(hub).keys() == expected
    assert len(commits(hub)) == 2


@pytest.mark.parametrize("part", ["/preupload/", "/lfs/", "/uploads/", "/commit/"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_failure_leaves_nothing(hub, tmp_path, part, is_new):
    if not is_new:
        osl.save(f"hf://{NAME}", {"w": np.ones(3)})
    before = None if is_new else files(hub)
    hub.hub.faults = lambda request: "403" if part in request.path else None
    with pytest.raises(osl.StorageError) as caught:
        osl.save(f"hf://{NAME}", TREE, overwrite=True, options=OPTIONS)
    assert_no_secret(shown(caught.value))
    hub.hub.faults = lambda request: None
    if part == "/commit/":  # whose reply alone was lost
        assert set(tensors(files(hub))) == TREE.keys()
    elif is_new:
        assert hub.repo(f"models/{NAME}") is None
    else:
        assert files(hub) == before
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("times", [1, 99])
def test_a_commit_of_which_the_answer_is_lost_is_known(hub, times):
    osl.save(f"hf://{NAME}", {"old": np.ones(3)}, options=OPTIONS)
    left = [times]

    def lost(request):
        if "/commit/" not in request.path or not left[0]:
            return None
        left[0] -= 1
        return "503"

    hub.hub.faults = lost
    osl.save(f"hf://{NAME}", TREE, overwrite=True, options=OPTIONS)
    assert set(tensors(files(hub))) == TREE.keys()


def test_an_ignored_name_is_no_reason_to_leave_a_file_out(hub, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ".gitignore").write_text("*.safetensors\n*.json\n")
    safetensors.numpy.save_file({"w": np.zeros(3)}, theirs / "model.safetensors")
    hub.add(NAME, theirs)
    osl.save(f"hf://{NAME}", {"w": np.ones(3)}, overwrite=True)
    assert np.array_equal(osl.load(f"hf://{NAME}")["w"], np.ones(3))
    assert "orbax_safetensors_layout.json" in files(hub)


@pytest.mark.parametrize("name", ["model.safetensors", "orbax_safetensors_layout.json"])
def test_a_file_that_the_hub_leaves_out_is_an_error(hub, name):
    osl.save(f"hf://{NAME}", {"w": np.zeros(3)})
    before = files(hub)
    hub.ignores.add(name)
    with pytest.raises(osl.StorageError, match=f"leaves files out of the commit: {name}"):
        osl.save(f"hf://{NAME}", {"w": np.ones(3)}, overwrite=True)
    assert files(hub) == before


def test_somebody_else_commits_meanwhile(hub):
    osl.save(f"hf://{NAME}", {"w": np.ones(3)})
    other = Path(tempfile.mkdtemp())
    (other / "note.txt").write_text("theirs")

    def commit(request):
        if "/preupload/" in request.path:
            hub.add(NAME, other)
        return None

    hub.hub.faults = commit
    with pytest.raises(osl.StorageError, match=r"somebody else has committed.*412.*Save again"):
        osl.save(f"hf://{NAME}", TREE, overwrite=True)
    hub.hub.faults = lambda request: None
    assert files(hub) == {"note.txt": b"theirs"}


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(absl.logging, "warning", lambda text, *args: texts.append(text % args))
    return texts


@pytest.mark.parametrize("branch", [None, "trial"])
@pytest.mark.parametrize("changed", ["main", "trial", "other"])
def test_a_failed_save_leaves_what_others_changed(hub, warnings, branch, changed):
    theirs = Path(tempfile.mkdtemp())
    (theirs / "note.txt").write_text("theirs")

    def commit(request):
        if "/preupload/" not in request.path:
            return None
        hub.add(NAME, theirs, revision=changed)
        return "403"

    hub.hub.faults = commit
    with pytest.raises(osl.StorageError):
        osl.save(f"hf://{NAME}@{branch}" if branch else f"hf://{NAME}", TREE)
    hub.hub.faults = lambda request: None
    assert files(hub, changed) == {"note.txt": b"theirs"}
    assert ("trial" in hub.repo(f"models/{NAME}").refs) == (changed == "trial")
    left = [NAME, f"{NAME}@trial"] if changed == branch == "trial" else [NAME]
    assert len(warnings) == len(left)
    for text, name in zip(reversed(warnings), left, strict=True):
        assert f"{name}, created for it, is left: others have changed it" in text


@pytest.mark.parametrize("branch", [None, "trial"])
@pytest.mark.parametrize("fault", [None, "/preupload/"])
def test_another_creates_it_first(hub, warnings, tmp_path, branch, fault):
    """Between the look for it and its creation: it is saved to, and never removed."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "note.txt").write_text("theirs")
    if branch:
        hub.add(NAME, theirs)
    real = hub.hub.answer

    def answer(request):
        if request.path.endswith(f"/branch/{branch}" if branch else "/repos/create"):
            hub.add(NAME, theirs, revision=branch or "main")
        return real(request)

    hub.hub.answer = answer
    hub.hub.faults = lambda request: "403" if fault and fault in request.path else None
    path = f"hf://{NAME}@{branch}" if branch else f"hf://{NAME}"
    if fault:
        with pytest.raises(osl.StorageError):
            osl.save(path, TREE)
    else:
        osl.save(path, TREE)
    found = files(hub, branch or "main")
    assert found["note.txt"] == b"theirs"
    assert tensors(found).keys() == (set() if fault else TREE.keys())
    assert not warnings


def test_what_cannot_be_removed_is_named(hub, warnings):
    parts = ("/preupload/", "/repos/delete")
    hub.hub.faults = lambda request: "403" if any(p in request.path for p in parts) else None
    with pytest.raises(osl.StorageError):
        osl.save(f"hf://{NAME}", TREE)
    assert [f"{NAME}, created for it, is left: HfHubHTTPError" in w for w in warnings] == [True]


def test_who_may_not_write(hub, monkeypatch):
    osl.save(f"hf://{NAME}", {"w": np.ones(3)})
    hub.writers.clear()
    with pytest.raises(osl.StorageError, match="write to it") as caught:
        osl.save(f"hf://{NAME}", TREE, overwrite=True)
    assert_no_secret(shown(caught.value))
    assert files(hub).keys() >= {"model.safetensors"}
    with pytest.raises(osl.StorageError, match="org/name"):
        osl.save("hf://model", TREE)
    with pytest.raises(osl.StorageError, match="org/name"):
        osl.save(f"hf://{NAME}@{'0' * 40}", TREE)


def test_a_temporary_folder_of_others_is_refused(hub, tmp_path):
    folder = tmp_path / f"orbax_safetensors_layout-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(osl.StorageError, match="may be changed by others"):
        osl.save(f"hf://{NAME}", TREE)
    assert hub.repo(f"models/{NAME}") is None


def test_processes_upload_their_own_files(hub, tmp_path):
    results = run_processes(
        "hub_save.py",
        processes=2,
        devices=2,
        endpoint=hub.hub.url,
        token=TOKEN,
        temporary=str(tmp_path),
        path=f"hf://{NAME}",
    )
    assert results == [2, 1], "each sent its share of the files"
    assert len(commits(hub)) == 1
    values = tensors(files(hub))
    assert len(values) == 6
    assert all(np.array_equal(v, np.arange(64.0).reshape(8, 8)) for v in values.values())
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("source_kind", ["orbax", "sharded"])
def test_a_conversion_ends_on_the_hub(hub, tmp_path, source_kind):
    osl.save(tmp_path / "pieces", TREE, options=osl.WriteOptions(layout="sharded"))
    source = tmp_path / "pieces"
    if source_kind == "orbax":
        source = tmp_path / "orbax"
        osl.convert(tmp_path / "pieces", source, format="orbax")
    assert osl.convert(source, f"hf://{NAME}").path == f"hf://{NAME}"
    assert len(commits(hub)) == 1
    loaded = osl.load(f"hf://{NAME}")
    assert all(np.array_equal(loaded[name], TREE[name]) for name in TREE)
    with pytest.raises(osl.CheckpointExistsError):
        osl.convert(source, f"hf://{NAME}")
    assert main(["convert", str(source), f"hf://{NAME}", "--overwrite"]) == 0
    assert not [*tmp_path.glob("orbax_safetensors_layout-*/*")]


def test_a_conversion_replaces_no_side_file_unasked(hub, tmp_path):
    source, theirs = tmp_path / "source", tmp_path / "theirs"
    osl.save(source, {"w": np.ones(3)})
    theirs.mkdir()
    (source / "config.json").write_text('{"a": 1}')
    (theirs / "config.json").write_text('{"a": 2}')
    hub.add(NAME, theirs)
    with pytest.raises(osl.CheckpointExistsError, match=r"config\.json"):
        osl.convert(source, f"hf://{NAME}", format="hf")
    assert files(hub) == {"config.json": b'{"a": 2}'}
    osl.convert(source, f"hf://{NAME}", format="hf", overwrite=True)
    assert files(hub)["config.json"] == b'{"a": 1}'


def test_buckets_of_the_hub_are_not_repositories():
    with pytest.raises(osl.StorageError, match="cannot open the path"):
        osl.save("hf://buckets/org/name", TREE)


def test_what_is_beside_a_model_is_not_replaced_with_it(hub, tmp_path):
    theirs = tmp_path / "theirs"
    osl.save(theirs, {"w": np.ones(2), "v": np.ones(3)})
    for name in ("adapter_model.safetensors", "ema.safetensors"):
        (theirs / name).write_bytes(b"theirs")
    hub.add(NAME, theirs)
    osl.save(f"hf://{NAME}", {"w": np.zeros(2)}, overwrite=True)
    left = files(hub)
    assert left["adapter_model.safetensors"] == left["ema.safetensors"] == b"theirs"
    assert osl.load(f"hf://{NAME}").keys() == {"w"}


def test_a_conversion_to_the_hub_that_was_interrupted_begins_anew(hub, tmp_path, monkeypatch):
    osl.save(tmp_path / "source", TREE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "note.txt").write_text("theirs")
    hub.add(NAME, tmp_path / "empty")
    commit = FilesTarget.commit

    def interrupt(*_):
        raise KeyboardInterrupt

    for error in (interrupt, commit):
        monkeypatch.setattr(FilesTarget, "commit", error)
        options = osl.ConvertOptions(dtype="float16" if error is interrupt else "bfloat16")
        call = functools.partial(
            osl.convert, tmp_path / "source", f"hf://{NAME}", format="hf", options=options
        )
        if error is interrupt:
            with pytest.raises(KeyboardInterrupt):
                call()
            assert not [*tmp_path.glob("orbax_safetensors_layout-*/*")]
        else:
            call()
    assert {str(value.dtype) for value in osl.load(f"hf://{NAME}").values()} == {"bfloat16"}


def test_the_log_of_uploads_shows_no_signatures(caplog):
    with hub_upload._quiet():
        text = "'%s' thrown while requesting PUT %s"
        url = "https://bucket.example/part?X-Amz-Signature=abc"
        logging.getLogger("huggingface_hub.utils._http").warning(text, "reset", url)
    assert "https://bucket.example/part" in caplog.text
    assert "abc" not in caplog.text


@pytest.mark.parametrize("part", ["/repos/create", "/api/models/", "/commit/"])
def test_a_hub_that_never_answers_ends_a_save(hub, monkeypatch, part):
    silent = threading.Event()

    def wait(request):  # when it has done what is asked
        if part in request.path:
            silent.wait(60)

    hub.hub.faults = wait
    monkeypatch.setattr(hub_upload, "_COMMIT_FACTOR", 1)
    retries = osl.RetryPolicy(attempts=1, attempt_seconds=1)
    options = osl.WriteOptions(retries=retries)
    try:
        if part == "/commit/":
            osl.save(f"hf://{NAME}", TREE, options=options)
            assert set(tensors(files(hub))) == TREE.keys()
        else:
            with pytest.raises(osl.StorageError, match="no complete answer in 1 s"):
                osl.save(f"hf://{NAME}", TREE, options=options)
    finally:
        silent.set()


def test_a_repository_that_was_made_without_an_answer_is_undone(hub):
    silent, left = threading.Event(), [1]

    def wait(request):
        if "/repos/create" in request.path and left[0]:
            left[0] -= 1
            silent.wait(60)

    hub.hub.faults = wait
    retries = osl.RetryPolicy(attempts=3, attempt_seconds=2, base_seconds=0.01)
    hub.ignores.add("model.safetensors")
    try:
        with pytest.raises(osl.StorageError, match="leaves files out"):
            osl.save(f"hf://{NAME}", {"w": np.ones(3)}, options=osl.WriteOptions(retries=retries))
    finally:
        silent.set()
    assert hub.repo(f"models/{NAME}") is None
