"""A model's configuration and tokenizer come along in saves and consolidations."""

import json
import os

import backends
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from checkpoints import save
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import MANIFEST
from orbax_safetensors_layout.storage.commit_note import entries_of
from orbax_safetensors_layout.writing import appearance_rank

TENSORS = {"w": np.arange(6, dtype=np.float32)}
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.model": b"\0\1"}


@pytest.fixture
def model(tmp_path):
    """A folder of Hugging Face."""
    save(tmp_path / "model", TENSORS)
    for name, data in FILES.items():
        (tmp_path / "model" / name).write_bytes(data)
    (tmp_path / "model" / "._config.json").write_bytes(b"what an archive of macOS leaves")
    (tmp_path / "model" / "adapter_config.json").write_bytes(b"with it no model opens")
    (tmp_path / "model" / "trainer_state.json").write_bytes(b"of a training")
    return tmp_path / "model"


def beside(folder):
    """The files of a folder that are no part of the checkpoint."""
    return {
        name: (folder / name).read_bytes()
        for name in os.listdir(folder)
        if not name.endswith(".safetensors") and name != MANIFEST
    }


def test_a_save_takes_the_files_of_a_model_along(tmp_path, model):
    osl.save(tmp_path / "out", TENSORS, options=osl.WriteOptions(model=model))
    assert beside(tmp_path / "out") == FILES
    assert osl.load(tmp_path / "out")["w"].tolist() == TENSORS["w"].tolist()
    osl.save(tmp_path / "bare", TENSORS)
    assert beside(tmp_path / "bare") == {}
    with pytest.raises(osl.CheckpointNotFoundError, match="tokenizer or similar file"):
        osl.save(tmp_path / "none", TENSORS, options=osl.WriteOptions(model=tmp_path / "nowhere"))
    assert not (tmp_path / "none").exists()


def test_files_of_another_model_are_replaced_only_when_asked(tmp_path, model):
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("mine")
    (target / "notes.txt").write_text("kept")
    with pytest.raises(osl.CheckpointExistsError, match=r"\['config.json'\]"):
        osl.save(target, TENSORS, options=osl.WriteOptions(model=model))
    assert beside(target) == {"config.json": b"mine", "notes.txt": b"kept"}
    osl.save(target, TENSORS, options=osl.WriteOptions(model=model), overwrite=True)
    assert beside(target) == {**FILES, "notes.txt": b"kept"}
    osl.save(
        target, TENSORS, options=osl.WriteOptions(model=model), overwrite=True
    )  # over the same files
    assert beside(target) == {**FILES, "notes.txt": b"kept"}


def test_consolidation_takes_along_what_stands_beside_the_pieces(tmp_path, model):
    pieces = tmp_path / "pieces"
    osl.save(pieces, TENSORS, options=osl.WriteOptions(layout="sharded", model=model))
    osl.consolidate(pieces, tmp_path / "whole")
    assert beside(tmp_path / "whole") == FILES
    osl.consolidate(pieces)
    assert beside(pieces) == FILES
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "gemma"}))
    osl.save(tmp_path / "again", TENSORS, options=osl.WriteOptions(layout="sharded", model=model))
    with pytest.raises(osl.CheckpointExistsError, match=r"config\.json"):
        osl.consolidate(tmp_path / "again", tmp_path / "other")
    assert beside(tmp_path / "other") == {"config.json": b'{"model_type": "gemma"}'}


@pytest.mark.parametrize("budget", [None, 1 << 16])
def test_consolidation_checks_the_checksums_of_pieces(tmp_path, budget):
    """While it reads them, before anything is replaced; what it makes has checksums, too."""
    tree = {f"l.{n}": np.full((100, 100), n, np.float32) for n in range(9)}
    sharded = osl.WriteOptions(layout="sharded", digests=True)
    osl.save(tmp_path / "x", tree, options=sharded)
    (file,) = (tmp_path / "x").glob("*.safetensors")
    whole, options = file.read_bytes(), osl.WriteOptions(memory_budget_bytes=budget)
    file.write_bytes(whole[:-2000] + b"\1" + whole[-1999:])
    for target in (None, tmp_path / "y"):
        with pytest.raises(osl.FormatError, match=rf"not what was saved: {file.name} \(CRC-32"):
            osl.consolidate(tmp_path / "x", target, options=options)
        assert os.listdir(tmp_path) == ["x"]
        assert file.exists()
    file.write_bytes(whole)
    with recording() as storage:
        osl.consolidate(tmp_path / "x", options=options)
    read = sum(stop - start for name, start, stop in storage.ranges if name == str(file))
    assert read <= len(whole) + (256 << 10) + 4000  # and its header, with what is read ahead
    assert osl.verify(tmp_path / "x").digested_files == 2
    assert osl.verify(tmp_path / "x").ok
    assert safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")["l.8"].all()


def test_consolidation_of_what_is_whole_already_changes_nothing(tmp_path):
    """As where an earlier call was killed in its last moments; not of what others have written."""
    osl.save(tmp_path / "x", TENSORS, options=osl.WriteOptions(layout="sharded"))
    osl.consolidate(tmp_path / "x")
    before = entries_of(tmp_path / "x")
    osl.consolidate(tmp_path / "x")
    assert entries_of(tmp_path / "x") == before
    with pytest.raises(osl.SafetensorsLayoutError, match="not stored in pieces"):
        osl.consolidate(tmp_path / "x", tmp_path / "y")
    (tmp_path / "x" / MANIFEST).unlink()
    with pytest.raises(osl.SafetensorsLayoutError, match="not stored in pieces"):
        osl.consolidate(tmp_path / "x")


@pytest.mark.parametrize("link", ["file", "folder", "blobs"])
def test_links_that_lead_out_of_a_model_are_refused(tmp_path, model, link):
    """Their content would be copied, and perhaps published."""
    (tmp_path / "secrets").mkdir()
    secret = tmp_path / "secrets" / "secret.json"
    secret.write_text("{}")
    if link == "blobs":  # that are not those of a cache
        (tmp_path / "blobs").symlink_to("secrets")
        (tmp_path / "snapshots").mkdir()
        model = model.rename(tmp_path / "snapshots" / "model")
        secret = tmp_path / "blobs" / "secret.json"
    elif link == "folder":
        (model / "inner").symlink_to(secret.parent)
        secret = model / "inner" / "secret.json"
    (model / "notes.txt").symlink_to(secret)
    problem = r"'notes\.txt' is a link.*secret\.json.*Copy the file"
    with pytest.raises(osl.StorageError, match=problem):
        osl.save(tmp_path / "out", TENSORS, options=osl.WriteOptions(model=model))
    with pytest.raises(osl.StorageError, match=problem):
        osl.convert(model, tmp_path / "out", format="hf")
    assert not (tmp_path / "out").exists()


def test_links_within_a_model_or_the_cache_of_the_hub_are_followed(tmp_path, model):
    (model / "more").mkdir()
    (model / "config.json").rename(model / "more" / "config")
    (model / "config.json").symlink_to("more/config")
    osl.save(tmp_path / "out", TENSORS, options=osl.WriteOptions(model=model))
    assert beside(tmp_path / "out") == FILES
    cached = tmp_path / "models--org--name"
    for folder in ("blobs", "snapshots/0123"):
        (cached / folder).mkdir(parents=True)
    for number, (name, data) in enumerate(FILES.items()):
        (cached / "blobs" / str(number)).write_bytes(data)
        (cached / "snapshots/0123" / name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "model-of-hub").symlink_to(cached / "snapshots/0123")
    for path in (cached / "snapshots/0123", tmp_path / "model-of-hub"):
        options = osl.WriteOptions(model=path)
        osl.save(tmp_path / "again", TENSORS, options=options, overwrite=True)
        assert beside(tmp_path / "again") == FILES


def test_files_too_large_to_be_side_files_are_not_read(tmp_path, model):
    with open(model / "train.json", "wb") as file:
        file.truncate(50 << 30)
    with pytest.raises(
        osl.FormatError, match=r"too large \(file: .*train\.json, expected: at most"
    ):
        osl.save(tmp_path / "out", TENSORS, options=osl.WriteOptions(model=model))


@pytest.mark.parametrize("kind", backends.REMOTE)
def test_in_a_bucket_too(tmp_path, model, kind):
    with backends.running(kind) as server, backends.place(server, tmp_path / "unused") as place:
        osl.save(place.url, TENSORS, options=osl.WriteOptions(model=model))
        osl.save(
            place.url,
            {"w": TENSORS["w"] + 1},
            options=osl.WriteOptions(model=model),
            overwrite=True,
        )
        assert osl.load(place.url)["w"].tolist() == (TENSORS["w"] + 1).tolist()
        assert set(place.names()) == {"model.safetensors", MANIFEST, *FILES}
        assert {name: place.get(name) for name in FILES} == FILES


def test_the_manifest_appears_first_and_the_index_last():
    names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    names = ["orbax_safetensors_layout.json", *names, "config.json"]
    assert [appearance_rank(name) for name in names] == [0, 1, 2, None]


def test_a_model_card_says_what_it_is_given(tmp_path):
    from huggingface_hub import ModelCard

    steps = iter((100, 200))
    card = {"base_model": 'org/name: "large"', "license": "mit", "tags": ["a", "b: c"]}
    options = osl.WriteOptions(
        card=lambda: {**card, "step": next(steps), "metrics": {"loss": 1.25, "note": "é"}}
    )
    for step in (100, 200):
        osl.save(tmp_path / "new", {"w": np.ones(3)}, options=options, overwrite=step > 100)
        written = ModelCard.load(tmp_path / "new/README.md")
        assert written.data.to_dict() == {**card, "library_name": "transformers"}
        assert f"Step {step} of the training." in written.text
        assert "| loss | 1.25 |" in written.text
    path = str(tmp_path / "item")
    checkpointer = ocp.Checkpointer(
        osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(card=card))
    )
    checkpointer.save(path, args=osl.SafetensorsSave({"w": np.ones(3)}))
    assert ModelCard.load(tmp_path / "item/README.md").data.license == "mit"


def test_a_model_card_of_no_values(tmp_path):
    for card in ({"loss": float("nan")}, {"x": object()}, {"metrics": 3}):
        with pytest.raises(osl.InvalidArgumentError, match="a model card cannot have"):
            osl.save(tmp_path, {"w": np.ones(3)}, options=osl.WriteOptions(card=card))
    with pytest.raises(ValueError, match=r"WriteOptions\.card must be a dict"):
        osl.WriteOptions(card="text")
    assert not any(tmp_path.iterdir())


def test_a_model_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(osl.CheckpointExistsError, match=r"README\.md"):
        osl.save(tmp_path, {"w": np.ones(3)}, options=osl.WriteOptions(card={"step": 1}))
    assert (tmp_path / "README.md").read_text() == "mine"
