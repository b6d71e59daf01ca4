"""Mappings by name, as command lines take them."""

import json

import numpy as np
import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping import find_mapping

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "vocab_size": 16,
    "num_attention_heads": 2,
}

MODULE = """
from __future__ import annotations
import dataclasses
import orbax_safetensors_layout as osl

@dataclasses.dataclass
class Names:
    embed: str = "embed"

mapping = osl.Mapping([osl.rule(Names().embed, osl.tensor("model.embed.weight"))])

class Kept:
    inner = mapping

def make(checkpoint):
    return osl.families.mapping(checkpoint)

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_mappings.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "my_mappings.py"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("auto", {}),
        ("llama:plain", {}),
        ("llama:maxtext", {"target": "maxtext"}),
        ("auto:maxtext-scanned", {"target": "maxtext", "scan": True}),
        ("llama:maxtext-unscanned", {"target": "maxtext", "scan": False}),
        ("llama:plain-unscanned-quantized", {"scan": False, "quantized": "keep"}),
        ("llama:tunix", {"target": "tunix"}),
    ],
)
def test_a_family_and_a_model_side(name, options):
    expected = osl.families.mapping(CONFIG, **options)
    assert repr(find_mapping(name, CONFIG)) == repr(expected)


def test_a_family_of_a_configuration_file(tmp_path):
    config = CONFIG | {"model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mapping = find_mapping("mistral:plain", tmp_path / "config.json")
    assert repr(mapping) == repr(osl.families.mistral(config))
    osl.save(tmp_path, {"other": np.ones(1)})
    mapping = find_mapping("mistral:plain", tmp_path / "model.safetensors")
    assert repr(mapping) == repr(osl.families.mistral(tmp_path))
    with pytest.raises(osl.MappingError, match=r"mistral is asked for, .* model_type is 'llama'"):
        find_mapping("mistral:plain", CONFIG)


@pytest.mark.parametrize("where", ["module", "file"])
@pytest.mark.parametrize("attribute", ["mapping", "Kept.inner"])
def test_an_attribute_of_a_module(module, where, attribute):
    name = "my_mappings" if where == "module" else str(module)
    (rule,) = find_mapping(f"{name}:{attribute}").rules
    assert rule.target == "embed"


def test_a_function_is_given_the_checkpoint(module):
    assert repr(find_mapping(f"{module}:make", CONFIG)) == repr(osl.families.mapping(CONFIG))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama", "The nearest names are 'llama'"),
        ("lama:maxtext", "The nearest names are 'llama'"),
        ("llama:maxtex", "must be one of ['plain', 'maxtext', 'tunix']"),
        ("llama:maxtext-unscaned", "cannot be 'unscaned'"),
        ("llama:", "target='' must be"),
        ("mistral:tunix", "no ready mapping from mistral to tunix"),
        ("no_such_module:mapping", "cannot import 'no_such_module': ModuleNotFoundError"),
        ("/no/such.py:mapping", "cannot import '/no/such.py': FileNotFoundError"),
        ("my_mappings:maping", "The nearest names are 'mapping'"),
        ("my_mappings:number", "found: int"),
    ],
)
def test_a_name_that_means_nothing(module, name, said):
    with pytest.raises(osl.MappingError) as caught:
        find_mapping(name, CONFIG)
    assert said in str(caught.value)


def test_a_module_that_fails(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(osl.MappingError, match="No module named 'no_such_module'") as caught:
        find_mapping(f"{tmp_path}/broken.py:mapping")
    assert "FAMILY" not in str(caught.value)


def test_a_family_needs_a_configuration():
    with pytest.raises(osl.MappingError, match=r"config\.json"):
        find_mapping("llama:maxtext")
