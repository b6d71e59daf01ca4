"""An index says which files count, and their headers which tensors these hold."""

import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

TENSORS = {name: np.full(2, number, np.float32) for number, name in enumerate("abc")}
STRICT = osl.ReadOptions(strict=True)
ABSTRACT = jax.ShapeDtypeStruct((2,), np.float32)
HELD = {"1": "a", "2": "bc"}
STALE = {
    "the wrong listed file": ({"a": "2", "b": "1", "c": "2"}, "'a' is in .*1.safetensors"),
    "a tensor that is in none": ({"a": "1", "b": "2", "c": "2", "d": "1"}, "'d' is in no file"),
    "a tensor left out": ({"a": "1", "b": "2"}, "'c' is there, too"),
}


def write(folder, weight_map, held=HELD):
    folder.mkdir()
    for file, names in held.items():
        tensors = {name: TENSORS[name] for name in names}
        safetensors.numpy.save_file(tensors, folder / f"{file}.safetensors")
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    return folder


def mapping(**arguments):
    rules = [osl.rule(leaf, osl.tensor(name)) for leaf, name in zip("xyz", "abc", strict=True)]
    return osl.Mapping(rules, **arguments)


@pytest.mark.parametrize("stale", STALE)
def test_the_tensors_are_those_of_the_listed_files(tmp_path, stale, caplog):
    weight_map, warning = STALE[stale]
    folder = write(tmp_path / "model", weight_map)
    osl.convert(folder, tmp_path / "out", format="hf")
    tree = dict.fromkeys("abc", ABSTRACT)
    for loaded in (
        osl.load(folder),
        osl.load(folder, tree),
        osl.load(folder, tree, options=STRICT),
        osl.load(folder, only="*"),
        osl.load(tmp_path / "out"),
        {name: osl.load(folder, only=name)[name] for name in "abc"},
        {name: osl.load(folder, {name: ABSTRACT})[name] for name in "abc"},
        dict(zip("abc", osl.load(folder, mapping=mapping()).values(), strict=True)),
    ):
        assert {n: np.asarray(v).tolist() for n, v in loaded.items()} == {
            name: value.tolist() for name, value in TENSORS.items()
        }
    assert osl.metadata(folder).keys() == set("abc")
    assert re.search(f"does not say what its files hold: {warning}", caplog.text)
    assert main(["verify", str(folder)]) == 1  # which names the index


def test_a_tensor_that_no_file_holds_is_named_with_the_index(tmp_path):
    folder = write(tmp_path / "model", {"a": "1", "b": "2", "c": "2", "d": "1"})
    rules = [*mapping().rules, osl.rule("w", osl.tensor("d"))]
    for load in (
        lambda: osl.load(folder, {"d": ABSTRACT}),
        lambda: osl.load(folder, only="d"),
        lambda: osl.load(folder, mapping=osl.Mapping(rules)),
    ):
        with pytest.raises(osl.SafetensorsLayoutError, match=r"index names 'd' in .*1.safetensors"):
            load()


def test_a_tensor_in_two_listed_files_is_that_of_the_index_or_refused(tmp_path):
    held = {"1": "ab", "2": "bc"}
    zeros = {name: np.zeros(2, np.float32) for name in "ab"}
    folder = write(tmp_path / "model", {"a": "1", "b": "2", "c": "2"}, held)
    safetensors.numpy.save_file(zeros, folder / "1.safetensors")
    assert osl.load(folder)["b"].tolist() == TENSORS["b"].tolist()
    folder = write(tmp_path / "other", {"a": "1", "c": "2"}, held)
    with pytest.raises(osl.InvalidIndexError, match=r"Duplicate tensor b .*Say in 'model"):
        osl.load(folder)


def test_a_tree_opens_the_files_of_its_leaves_alone(tmp_path):
    folder = write(tmp_path / "model", {"a": "1", "b": "2", "c": "2"})
    (folder / "2.safetensors").write_bytes(b"no header")
    assert osl.load(folder, {"a": ABSTRACT})["a"].tolist() == [0, 0]


def test_a_buffer_that_programs_compute_may_be_left_out(tmp_path):
    """Transformers saved it until 4.31, and none takes it."""
    folder = write(tmp_path / "model", {"a": "1", "b": "2"}, {"1": "a", "2": "b"})
    buffer = {"layers.0.rotary_emb.inv_freq": np.ones(2, np.float32)}
    safetensors.numpy.save_file({"b": TENSORS["b"], **buffer}, folder / "2.safetensors")
    rules = osl.Mapping(mapping().rules[:2])
    assert osl.load(folder).keys() == {"a", "b"}
    assert osl.load(folder, mapping=rules).keys() == {"x", "y"}
    osl.convert(folder, tmp_path / "out", format="hf")
    assert osl.load(tmp_path / "out").keys() == {"a", "b"}


def shards(count):
    return {f"model-{n + 1:05}-of-{count:05}": "abc"[n] for n in range(count)}


@pytest.mark.parametrize("others", [{"model": "abc"}, shards(3)], ids=["one file", "other shards"])
def test_an_index_none_of_whose_files_is_there_is_left_out(tmp_path, others, caplog):
    """Of a model that was saved again, or quantised by a program that copies the index."""
    folder = write(tmp_path / "model", dict.fromkeys("abc", "model-00001-of-00009"), others)
    assert osl.load(folder).keys() == set("abc")
    assert "lists files that are all missing" in caplog.text
    (folder / f"{next(iter(others))}.safetensors").unlink()
    with pytest.raises(osl.InvalidIndexError):
        osl.load(folder)


def test_an_index_of_which_files_are_left_counts(tmp_path):
    folder = write(tmp_path / "model", {"a": "1", "b": "2", "c": "3"}, {"1": "a", "model": "abc"})
    with pytest.raises(osl.InvalidIndexError, match=r"2 missing.*whole model, remove the index"):
        osl.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert osl.load(folder).keys() == set("abc")


@pytest.mark.parametrize("place", ["file", "index"])
def test_other_names_of_a_tensor_can_be_asked_for(tmp_path, place):
    """As `safetensors.torch.save_model` leaves them of tied weights, and the hub's in an index."""
    other = {"embed": "head"}
    head = {"head": TENSORS["b"], "rest": TENSORS["c"]}
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.safetensors"
    safetensors.numpy.save_file(head, file, other if place == "file" else {"format": "pt"})
    if place == "index":
        index = {"metadata": other, "weight_map": dict.fromkeys(head, file.name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert osl.load(folder).keys() == head.keys()
    assert osl.load(folder, only="embed").keys() == {"embed"}
    asked = {"embed": ABSTRACT, "rest": ABSTRACT}
    assert osl.load(folder, asked, options=STRICT)["embed"].tolist() == [1, 1]
    assert osl.load(folder, asked | {"head": ABSTRACT})["embed"].tolist() == [1, 1]
    rules = [osl.rule(name, osl.tensor(name)) for name in ("embed", "rest")]
    one, both = osl.Mapping(rules), osl.Mapping([*rules, osl.rule("head", osl.tensor("head"))])
    for mapping, leaves in ((one, asked.keys()), (both, asked.keys() | {"head"})):
        loaded = osl.load(folder, mapping=mapping)
        assert loaded.keys() == leaves
        assert loaded["embed"].tolist() == [1, 1]
    osl.convert(folder, tmp_path / "orbax", mapping=one)
    assert osl.verify(folder).ok
