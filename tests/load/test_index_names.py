"""Tensors of listed files that the index does not name are refused where nothing is left out."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

TENSORS = {name: np.full(2, number, np.float32) for number, name in enumerate("abc")}
REFUSED = r"file of the index holds a tensor that the index does not name .*'c'.*'c'\)"
STRICT = osl.ReadOptions(strict=True)
ABSTRACT = jax.ShapeDtypeStruct((2,), np.float32)


@pytest.fixture
def folder(tmp_path):
    """Two files; the second has a tensor that the index does not name, as `transformers` takes."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file, names in (("1", "a"), ("2", "bc")):
        safetensors.numpy.save_file(
            {name: TENSORS[name] for name in names}, folder / f"{file}.safetensors"
        )
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def mapping(**arguments):
    return osl.Mapping(
        [osl.rule("x", osl.tensor("a")), osl.rule("y", osl.tensor("b"))], **arguments
    )


def test_what_loads_all_refuses_them(folder, tmp_path):
    loads = [
        lambda: osl.load(folder),
        lambda: osl.load(folder, {"a": ABSTRACT, "b": ABSTRACT}, options=STRICT),
        lambda: osl.plan_load(folder, {"a": ABSTRACT, "b": ABSTRACT}, options=STRICT),
        lambda: osl.load(folder, {"x": ABSTRACT, "y": ABSTRACT}, mapping=mapping()),
        lambda: osl.load(
            folder,
            mapping=mapping().over(
                osl.Mapping([osl.rule("a", osl.tensor("a")), osl.rule("b", osl.tensor("b"))])
            ),
        ),
        lambda: osl.convert(folder, tmp_path / "out", format="hf"),
        lambda: osl.convert(folder, tmp_path / "out", mapping=mapping()),
    ]
    for load in loads:
        with pytest.raises(osl.InvalidIndexError, match=REFUSED) as caught:
            load()
        assert caught.value.tensor == "c"
        assert caught.value.file == str(folder / "2.safetensors")
    assert not (tmp_path / "out").exists()
    osl.save(tmp_path / "whole", {name: TENSORS[name] for name in "ab"})
    assert main(["verify", str(tmp_path / "whole"), "--against", str(folder)]) == 1


def test_they_may_be_left_out(folder):
    for loaded in (
        osl.load(folder, only="*"),
        osl.load(folder, {"a": ABSTRACT, "b": ABSTRACT}),
        osl.load(folder, {"a": ABSTRACT, "b": ABSTRACT, "c": ...}, options=STRICT),
    ):
        assert {n: v for n, v in loaded.items() if v is not ...}.keys() == {"a", "b"}
    for spare in ({"ignore": ["c"]}, {"strict": False}, {"buffers": ["c"]}):
        loaded = osl.load(folder, {"x": ABSTRACT, "y": ABSTRACT}, mapping=mapping(**spare))
        assert np.array_equal(loaded["y"], TENSORS["b"])


def test_a_file_of_which_nothing_is_asked_is_not_opened(folder):
    (folder / "2.safetensors").unlink()
    (folder / "2.safetensors").write_bytes(b"no header")
    loaded = osl.load(
        folder, {"x": ABSTRACT}, mapping=osl.Mapping([osl.rule("x", osl.tensor("a"))], ignore=["b"])
    )
    assert np.array_equal(loaded["x"], TENSORS["a"])


def test_a_tensor_that_the_index_has_in_another_file_is_that_one(folder):
    both = {name: TENSORS[name] for name in "bc"} | {"a": np.zeros(2, np.float32)}
    safetensors.numpy.save_file(both, folder / "2.safetensors")
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["c"] = "2.safetensors"
    index.write_text(json.dumps(document))
    loaded = osl.load(folder)
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in TENSORS.items()
    }


def test_a_buffer_that_programs_compute_may_be_left_out(folder, tmp_path):
    """Transformers saved it until 4.31, and none takes it."""
    buffer = {"layers.0.rotary_emb.inv_freq": np.ones(2, np.float32)}
    both = {name: TENSORS[name] for name in "b"} | buffer
    safetensors.numpy.save_file(both, folder / "2.safetensors")
    assert osl.load(folder).keys() == {"a", "b"}
    assert osl.load(folder, mapping=mapping()).keys() == {"x", "y"}
    osl.convert(folder, tmp_path / "out", format="hf")
    assert osl.load(tmp_path / "out").keys() == {"a", "b"}
