"""Messages about thousands of tensors are short, and name the first of each kind."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import save

import orbax_safetensors_layout as osl

LAYERS = 1000
WEIGHT = np.zeros(2, np.float32)


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "hf", {f"layers.{i}.w": WEIGHT for i in range(LAYERS)})


def layers(**leaves: np.ndarray) -> dict:
    return {"layers": {str(i): leaves for i in range(LAYERS)}}


def lines(kind: type[Exception], call) -> list[str]:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value).splitlines()


def test_leaves_that_differ_in_numbers_are_told_once(path):
    text = lines(osl.MissingTensorError, lambda: osl.load(path, layers(w=WEIGHT, b=WEIGHT)))
    assert text == [
        f"1,000 problems (file: {path}):",
        "  Tensor 'layers.0.b' not found (tensor: 'layers.0.b'). The nearest names are"
        " 'layers.0.w', 'layers.20.w', 'layers.10.w'. (999 more like it)",
    ]
    two = layers(w=np.zeros(3, np.float32), b=WEIGHT)
    two["layers"]["7"] = {"w": np.zeros((4, 4), np.float32)}
    wrong = {"layers": {i: {"w": leaves["w"]} for i, leaves in two["layers"].items()}}
    text = lines(osl.ShapeMismatchError, lambda: osl.load(path, wrong))
    assert text[1].endswith("(998 more like it)")
    assert "'layers.7.w', expected: (4, 4)" in text[2]
    assert text[3:] == [
        "Ask for the file's shapes, which osl.metadata(path) has, or give a mapping that makes"
        " others of them: rule('w', tensor('w').transpose()) in an osl.Mapping."
    ]
    strict = osl.ReadOptions(strict=True)
    text = lines(osl.UnexpectedTensorError, lambda: osl.load(path, {}, options=strict))
    assert len(text) == 3
    assert text[1].endswith(" (999 more like it)")
    text = lines(osl.UnsupportedDtypeError, lambda: osl.save(path, layers(w=object())))
    assert text[0] == "1,000 leaves cannot be saved:"
    assert text[2:] == ["Take the leaf out of the tree, or save it under an item of its own."]


def test_names_of_many_patterns_are_counted(path):
    abstract = {f"leaf_{i}_of_no_layer": WEIGHT for i in range(10_000)}
    (text,) = lines(osl.MissingTensorError, lambda: osl.load(path, abstract))
    assert text.startswith("10,000 of the 10,000 leaves have names that no tensor has: 'leaf_0_of_")
    assert "' and 9,995 more (" in text
    mapping = osl.Mapping([osl.rule("layers.{i}.w", osl.tensor("layers.{i}.w"))])
    text = lines(osl.MappingError, lambda: osl.load(path, abstract, mapping=mapping))
    assert len(text) < 30
    assert text[-1] == "  - ... 9,981 more."


def test_a_report_tells_the_first_of_many_differences(path, tmp_path):
    other = {f"layers.{i}.w": WEIGHT + 1 for i in range(500)}
    differs = "differs: 2 elements, the first at [0]: 0.0 and 1.0"
    report = osl.verify(path, save(tmp_path / "other", other))
    assert len(report.findings) == 1000
    assert str(report).splitlines() == [
        "value: 'layers.500.w' is not in the other checkpoint (499 more like it)",
        f"value: 'layers.0.w' {differs} (499 more like it)",
        f"{path}: 1,000 findings (1 file, 1,000 tensors, 500 tensors compared)",
    ]
