"""A model's configuration and tokenizer come along in saves and consolidations."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import backends
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
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
    (tmp_path / "model" / "notes.txt").write_bytes(b"of somebody")
    (tmp_path / "model" / "modeling_own.py").write_bytes(b"code")
    for folder in ("checkpoint-7", "notes"):
        (tmp_path / "model" / folder).mkdir()
        (tmp_path / "model" / folder / "config.json").write_bytes(b"of another")
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
    with pytest.raises(osl.CheckpointNotFoundError, match=r"model=\.\.\.\) names a path that does"):
        osl.save(tmp_path / "none", TENSORS, options=osl.WriteOptions(model=tmp_path / "nowhere"))
    relative = os.path.relpath(tmp_path / "bare")
    with pytest.raises(osl.CheckpointNotFoundError, match="names no such files") as caught:
        osl.save(tmp_path / "none", TENSORS, options=osl.WriteOptions(model=relative))
    assert caught.value.file == str(tmp_path / "bare")
    assert not (tmp_path / "none").exists()


NAMES = """
bpe.codes byte_maps.json dict.txt emoji.json entity_vocab.json merges.txt normalizer.json
prophetnet.tokenizer sentencepiece.bpe.model sentencepiece.model source.spm spiece.model spm.model
spm_char.model target.spm target_vocab.json tokenizer.json tokenizer.model tokenizer_config.json
vocab-src.json vocab-tgt.json vocab.json vocab.txt word_pronunciation.json word_shape.json
special_tokens_map.json added_tokens.json tekken.json tiktoken.model qwen.tiktoken
chat_template.jinja chat_template.json additional_chat_templates/tool_use.jinja
qformer_tokenizer/vocab.txt qformer_tokenizer/tokenizer_config.json 1_Pooling/config.json
config.json generation_config.json processor_config.json preprocessor_config.json
video_preprocessor_config.json audio_tokenizer_config.json modules.json LICENSE
"""


def write_files(folder, names):
    """Write files of a model, each of other content, but of JSON where that is looked into."""
    files = {name: name.encode() for name in names} | {"config.json": b"{}"}
    files["tokenizer_config.json"] = files["processor_config.json"] = b"{}"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return files


@pytest.mark.parametrize("kind", ["local", *backends.REMOTE])
def test_all_that_tokenizers_and_processors_save_comes_along(tmp_path, kind):
    files = write_files(tmp_path / "model", NAMES.split())
    options = osl.WriteOptions(model=tmp_path / "model")
    with backends.running(kind) as server, backends.place(server, tmp_path / "out") as place:
        kept = {}
        if kind == "local":
            kept = {"additional_chat_templates/mine.jinja": b"kept", "notes/1": b"kept"}
            for name, data in kept.items():
                (Path(place.url) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(place.url) / name).write_bytes(data)
        for step in (1, 2):  # the second in place of the first
            osl.save(place.url, {"w": TENSORS["w"] * step}, options=options, overwrite=step > 1)
            assert osl.load(place.url)["w"].tolist() == (TENSORS["w"] * step).tolist()
            data = {name: place.get(name) for name in place.names()}
            assert {"model.safetensors", MANIFEST} == data.keys() - files.keys() - kept.keys()
            assert data.items() >= {**files, **kept}.items()
        osl.convert(place.url, tmp_path / "converted", format="hf")
    for name, text in files.items():
        assert (tmp_path / "converted" / name).read_bytes() == text


def test_names_of_the_installed_transformers(tmp_path):
    root = Path(pytest.importorskip("transformers").__file__).parent
    texts = [file.read_text() for file in root.glob("models/*/tokenization_*.py")]
    tables = [re.search(r"^VOCAB_FILES_NAMES = (\{.*?\})", text, re.S | re.M) for text in texts]
    named = [re.findall(r':\s*"([^"]+)"', table[1]) for table in tables if table]
    files = write_files(tmp_path / "model", {name for names in named for name in names})
    assert len(files) > 20
    osl.save(tmp_path / "out", TENSORS, options=osl.WriteOptions(model=tmp_path / "model"))
    assert beside(tmp_path / "out") == files


def user_folder(target):
    (target / "LICENSE").mkdir()
    (target / "LICENSE/apache.txt").write_text("mine")


def user_file(target):
    (target / "additional_chat_templates").write_text("mine")


def user_link(target):
    (target.parent / "elsewhere").mkdir()
    (target.parent / "elsewhere/mine.jinja").write_text("mine")
    (target / "additional_chat_templates").symlink_to("../elsewhere")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("put", [user_folder, user_file, user_link])
@pytest.mark.parametrize("call", ["save", "convert", "consolidate"])
def test_what_has_the_name_of_a_side_file_but_is_of_another_kind_stays(
    tmp_path, put, call, overwrite
):
    files = ["config.json", "LICENSE", "additional_chat_templates/a.jinja"]
    write_files(tmp_path / "model", files)
    options = osl.WriteOptions(model=tmp_path / "model")
    source, target = tmp_path / "source", tmp_path / "out"
    layout = "sharded" if call == "consolidate" else "hf"
    osl.save(source, TENSORS, options=dataclasses.replace(options, layout=layout))
    target.mkdir()
    put(target)
    (name,) = os.listdir(target)
    inner = {user_folder: "apache.txt", user_link: "mine.jinja", user_file: ""}[put]
    file = target / name / inner if inner else target / name
    calls = {
        "save": lambda: osl.save(target, TENSORS, options=options, overwrite=overwrite),
        "convert": lambda: osl.convert(source, target, format="hf", overwrite=overwrite),
        "consolidate": lambda: osl.consolidate(source, target, overwrite=overwrite),
    }
    with pytest.raises(osl.CheckpointExistsError, match=f"other things of these names.*{name}"):
        calls[call]()
    assert os.listdir(target) == [name]
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("tied", "warns"), [(False, True), (True, False)])
def test_weights_of_the_model_that_are_not_written_are_named(tmp_path, tied, warns, caplog):
    config = {"model_type": "llama", "tie_word_embeddings": tied}
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ones((2, 2), np.float32) for name in names}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    written = {name: tensors[name] for name in names[:2]}
    osl.save(tmp_path / "out", written, options=osl.WriteOptions(model=folder))
    assert ("not written, which programs start anew: 'lm_head.weight'" in caplog.text) == warns


def test_code_comes_along_when_asked(tmp_path, model, caplog):
    config = {"auto_map": {"AutoConfig": "own.Config", "AutoModel": "org/name--other.Model"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text("class Config: ...")
    (model / "custom_generate").mkdir()
    (model / "custom_generate/generate.py").write_text("def generate(): ...")
    (model / "processor_config.json").write_text("[]")  # which is not looked into
    for code in (False, True):
        caplog.clear()
        out = tmp_path / f"out-{code}"
        osl.save(out, TENSORS, options=osl.WriteOptions(model=model, code=code))
        converted = tmp_path / f"converted-{code}"
        osl.convert(model, converted, format="hf", options=osl.ConvertOptions(code=code))
        for folder in (out, converted):
            for name in ("own.py", "modeling_own.py", "custom_generate/generate.py"):
                assert (folder / name).exists() == code
            assert (folder / "processor_config.json").read_text() == "[]"
        assert caplog.text.count("has code of its own (own.py)") == (0 if code else 2)


def test_the_files_of_a_model_by_name(tmp_path, model):
    files = {**FILES, "additional_chat_templates/a.jinja": b"a"}
    osl.save(tmp_path / "out", TENSORS, options=osl.WriteOptions(model=files))
    assert (tmp_path / "out/additional_chat_templates/a.jinja").read_bytes() == b"a"
    assert {n: (tmp_path / "out" / n).read_bytes() for n in FILES} == FILES
    names = (
        "../a.json",
        "/a.json",
        "a/",
        "a//b",
        "a/b/c",
        "..",
        ".a",
        "a/.b",
        "a\nb",
        "a\n",
        "",
        3,
    )
    for odd in ({}, {"a": "text"}, *({name: b"data"} for name in (*names, 3))):
        with pytest.raises(
            ValueError, match=r"WriteOptions\.model must be the path or URL"
        ) as caught:
            osl.WriteOptions(model=FILES | odd if odd else odd)
        assert str(caught.value).endswith(f"not {[*odd] or odd}.")
    with pytest.raises(osl.InvalidArgumentError, match="another of its files, has: a"):
        osl.save(tmp_path / "odd", TENSORS, options=osl.WriteOptions(model={"a": b"", "a/b": b""}))
    for name in ("model.safetensors", MANIFEST, "orbax_safetensors_layout.pieces/x"):
        with pytest.raises(osl.InvalidArgumentError, match="a name that a save, or another of its"):
            osl.save(tmp_path / "odd", TENSORS, options=osl.WriteOptions(model={name: b""}))


def test_a_handler_takes_the_names_that_a_save_takes(tmp_path, model):
    names = [
        "LICENSE (MIT).txt",
        "chat template.jinja",
        "LICENSE ñ+v1..2",
        "ü & co_tokenizer/vocab.txt",
    ]
    for name in names:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"text")
    (model / ".hidden_tokenizer").mkdir()
    (model / ".hidden_tokenizer/vocab.txt").write_bytes(b"text")
    options = osl.WriteOptions(model=model)
    osl.save(tmp_path / "a", TENSORS, options=options)
    handler = osl.SafetensorsCheckpointHandler(write=options)
    ocp.Checkpointer(handler).save(tmp_path / "b", args=osl.SafetensorsSave(TENSORS))
    for folder in ("a", "b"):
        assert all((tmp_path / folder / name).read_bytes() == b"text" for name in names)
        assert not (tmp_path / folder / ".hidden_tokenizer").exists()


def test_a_handler_reads_the_files_of_a_model_when_it_is_made(tmp_path, model):
    """So that no step is lost to a model that went away, nor to a misspelt one."""
    with pytest.raises(osl.CheckpointNotFoundError, match=r"model=\.\.\.\) names a path that does"):
        osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(model=tmp_path / "misspelt"))
    handler = osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(model=model))
    with (
        ocp_v1.training.Checkpointer(tmp_path / "v1", context=osl.context("hf")) as training,
        osl.using(write=osl.WriteOptions(model=model)),
    ):
        shutil.rmtree(model)
        for step in (1, 2):
            training.save_checkpointables(step, {"hf": TENSORS})
    with ocp.CheckpointManager(tmp_path / "v0", item_handlers={"hf": handler}) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.Composite(hf=osl.SafetensorsSave(TENSORS)))
    for run in ("v0/1", "v0/2", "v1/1", "v1/2"):
        assert {n: (tmp_path / run / "hf" / n).read_bytes() for n in FILES} == FILES


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
    (model / "merges.txt").symlink_to(secret)
    problem = r"'merges\.txt' is a link.*secret\.json.*Copy the file"
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
    with open(model / "vocab.json", "wb") as file:
        file.truncate(50 << 30)
    with pytest.raises(
        osl.FormatError, match=r"too large \(file: .*vocab\.json, expected: at most"
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
