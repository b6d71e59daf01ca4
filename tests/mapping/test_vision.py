"""Ready mappings of vision models against tiny Hugging Face models and plain numpy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_same_bits
from mapping_expressions import evaluate, specs_of

pytest.importorskip("torch")
pytest.importorskip("transformers")

from family_cases import family_of
from family_references import REFERENCES
from vision_models import make_whole, published
from vision_references import VISION_REFERENCES

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import families, find_mapping

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

TREES = json.loads((Path(__file__).parents[1] / "support" / "vision_trees.json").read_text())
del TREES["provenance"]
NAMES = {"gemma3": ("maxtext", "tunix"), "llama4": ("maxtext",)}
NAMES |= {"gemma4_dense": ("maxtext",), "gemma4_moe": ("maxtext",)}
NAMES |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5_moe"), ("maxtext",))
SCANS = {"gemma3": (True, False), "llama4": (True, False)}
SCANS |= {"gemma4_dense": (True, False), "gemma4_moe": (True, False)}
SCANS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"), (False,))
SCANS |= {"qwen3_5_moe": (True, False)}
CASES = [
    (name, target, scan)
    for name, targets in NAMES.items()
    for target in targets
    for scan in (SCANS[name] if target == "maxtext" else (False,))
]
UNREAD = ("num_attention_heads", "num_heads", "max_position_embeddings", "pooling_kernel_size")
MODULES = ("vision_tower.", "vision_model.", "multi_modal_projector.", "visual.", "embed_vision.")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_whole(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def is_vision(tensor):
    return any(module in tensor for module in MODULES)


def text_of(tensors):
    """The tensors of the language model, as if it were one by itself."""
    names = {"language_model.model.": "model.", "model.language_model.": "model."}
    text = {}
    for name, array in tensors.items():
        if is_vision(name) or "audio" in name:
            continue
        for before, after in names.items():
            name = name.replace(before, after)
        text[name.replace("language_model.lm_head", "lm_head")] = array
    return text


def expected_of(name, target, scan, config, tensors):
    family = family_of(name)
    text = REFERENCES[target](family, config["text_config"], text_of(tensors), scan)
    return text | VISION_REFERENCES[target, family](tensors, config["vision_config"])


def check(mapping, source, tensors, expected):
    """Every leaf, whole and in a random box, no leaf more; and back, the bits of the files."""
    rng = np.random.default_rng(0)
    stored = {n: a for n, a in tensors.items() if "audio" not in n}
    back = mapping.like(specs_of(stored)).inverse().bind(specs_of(expected), source)
    for bound, values, arrays in (
        (mapping.bind(source), tensors, expected),
        (back, expected, stored),
    ):
        assert set(bound.expressions) == set(arrays)
        for name, array in arrays.items():
            expression = bound.expressions[name]
            assert (name, expression.shape) == (name, array.shape)
            assert_same_bits(evaluate(expression, values), array)
            start = [int(rng.integers(0, n)) for n in array.shape]
            stop = [
                int(rng.integers(a + 1, n + 1)) for a, n in zip(start, array.shape, strict=True)
            ]
            box = Box(tuple(start), tuple(stop))
            assert_same_bits(evaluate(expression, values, box), array[box.slices])


@pytest.mark.parametrize(("name", "target", "scan"), CASES)
def test_leaves(whole, name, target, scan):
    folder, config, tensors, _ = whole(name)
    expected = expected_of(name, target, scan, config, tensors)
    mapping = families.mapping(folder, target=target, scan=scan, vision=True)
    check(mapping, folder, tensors, expected)
    # A configuration alone, and files that are named as published.
    named = published(name, tensors)
    mapping = families.mapping(config, target=target, scan=scan, vision=True)
    prefix = mapping.rules[0].patterns()[0].removesuffix("embed_tokens.weight")
    assert any(tensor.startswith(prefix) for tensor in named)
    check(mapping, specs_of(named), named, expected)


@pytest.mark.parametrize(("name", "target", "scan"), CASES)
def test_without_the_option_nothing_is_another(whole, name, target, scan):
    folder, config, tensors, _ = whole(name)
    mapping = families.mapping(folder, target=target, scan=scan)
    expected = REFERENCES[target](family_of(name), config["text_config"], text_of(tensors), scan)
    assert set(mapping.bind(folder).expressions) == set(expected)
    for value in (None, False):
        other = families.mapping(folder, target=target, scan=scan, vision=value)
        assert repr(other) == repr(mapping)


@pytest.mark.parametrize(("name", "target", "scan"), CASES)
def test_saved_files_are_those_that_were_loaded(whole, tmp_path, name, target, scan):
    folder, _, tensors, _ = whole(name)
    mapping = families.mapping(folder, target=target, scan=scan, vision=True)
    tree = osl.load(folder, mapping=mapping)
    audio = ["*audio_tower.*"] if any("audio" in tensor for tensor in tensors) else []
    osl.save(tmp_path / "out", tree, mapping=mapping.like(folder, leave_out=audio))
    back = osl.load(tmp_path / "out")
    assert set(back) == {n for n in tensors if "audio" not in n}
    for tensor, value in back.items():
        assert_same_bits(np.asarray(value), tensors[tensor])


IMAGES = {("maxtext", "gemma3"): {"image_size": 896}, ("maxtext", "llama4"): {"image_size": 336}}


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target in TREES for name in TREES[target]]
)
def test_trees_of_the_real_models(whole, tmp_path, target, name):
    """Names and shapes are those of MaxText's and Tunix's own models."""
    images = IMAGES.get((target, name))  # others, MaxText's models do not take
    folder = whole(name).folder if images is None else make_whole(name, tmp_path, **images).folder
    specs = families.mapping(folder, target=target, scan=False, vision=True).leaf_facts(folder)
    text = families.mapping(folder, target=target, scan=False).leaf_facts(folder)
    shapes = {leaf: list(spec.shape) for leaf, spec in specs.items() if leaf not in text}
    assert shapes == TREES[target][name]


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ("plain", {}, r"vision model of gemma3 to plain.*expected: maxtext with gemma3"),
        ("maxtext", {"vision_config": None}, r"of this gemma3 has no 'vision_config'"),
    ],
)
def test_vision_models_that_there_are_none_of(whole, target, config, message):
    config = whole("gemma3").config | config
    with pytest.raises(MappingError, match=message):
        families.mapping(config, target=target, vision=True)
    with pytest.raises(MappingError, match=r"vision=1 must be bool \| None"):
        families.mapping(config, target=target, vision=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"hidden_size": "24"}, r"'vision_config.hidden_size' of the configuration is"),
        ("gemma3", {"hidden_size": None}, r"lacks 'vision_config.hidden_size'"),
        (
            "gemma3",
            {"num_attention_heads": 5},
            r"num_attention_heads.*a divisor of the hidden_size",
        ),
        ("gemma3", {"num_hidden_layers": 257}, r"num_hidden_layers.*1\.\.256"),
        ("gemma3", {"image_size": 13}, r"image_size.*14\.\.16,384"),
        ("llama4", {"projector_output_dim": 16}, r"projector_output_dim.*projector_input_dim 20"),
        ("gemma4_dense", {"standardize": False}, "standardize.*is False .expected: true"),
        ("gemma4_dense", {"use_clipped_linears": True}, "use_clipped_linears.*expected: false"),
        ("gemma4_dense", {"num_key_value_heads": 1}, "num_key_value_heads.*expected: 2"),
        ("gemma4_dense", {"head_dim": 4}, "head_dim.*expected: 8"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 2]}, r"deepstack_visual_indexes.*0\.\.1"),
        ("qwen3_vl", {"deepstack_visual_indexes": None}, "lacks 'vision_config.deepstack"),
        ("qwen3_5_moe", {"deepstack_visual_indexes": [1]}, r"\[1\] .expected: none"),
        ("gemma3", {"patch_size": [14, 14]}, r"patch_size' of the configuration is \[14, 14\]"),
    ],
)
def test_configurations_that_are_refused(whole, name, changes, message):
    config = whole(name).config
    config = config | {"vision_config": config["vision_config"] | changes}
    with pytest.raises(MappingError, match=message):
        families.mapping(config, target="maxtext", vision=True)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_contradict_the_configuration(whole, name):
    """Each size that a tensor's shape shows, and each tensor that is there or is not."""
    _, config, tensors, _ = whole(name)
    named = specs_of(published(name, tensors))
    specs = {n: s for n, s in named.items() if "audio" not in n}
    vision = config["vision_config"]
    mapping = families.mapping(config, target="maxtext", scan=False, vision=True)
    mapping.bind(specs)
    keys = [key for key, value in vision.items()
            if type(value) is int and key not in UNREAD]  # fmt: skip
    assert len(keys) >= 5
    for key in keys:
        for value in (vision[key] * 2, max(vision[key] // 2, 1)):
            if value == vision[key]:
                continue
            other = config | {"vision_config": vision | {key: value}}
            with pytest.raises(MappingError):
                families.mapping(other, target="maxtext", scan=False, vision=True).bind(specs)
    for tensor in filter(is_vision, specs):
        with pytest.raises(MappingError, match=r"there is no tensor"):
            mapping.bind({n: s for n, s in specs.items() if n != tensor})
        with pytest.raises(MappingError, match=rf"no rule uses tensor '{tensor}_scale'"):
            mapping.bind(specs | {f"{tensor}_scale": specs[tensor]})


def test_vision_models_of_gemma_4_e2b(whole):
    """MaxText's has tables for it, but "not yet supported", and no converter that takes them."""
    config = whole("gemma4_dense").config
    small = {"hidden_size_per_layer_input": 8, "attention_k_eq_v": False}
    text = {k: v for k, v in config["text_config"].items() if k != "per_layer_config"} | small
    families.mapping(config | {"text_config": text}, target="maxtext")
    with pytest.raises(MappingError, match=r"MaxText has no vision model of Gemma 4 E2B and E4B"):
        families.mapping(config | {"text_config": text}, target="maxtext", vision=True)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"])
def test_mergers_of_single_layers_are_not_for_stacked_ones(whole, name):
    """MaxText: "Deepstack visual embedding injection requires scan_layers=False"."""
    folder, config, _, _ = whole(name)
    with pytest.raises(MappingError, match=rf"no such {name} with stacked layers"):
        families.mapping(folder, target="maxtext", scan=True, vision=True)
    mapping = families.mapping(folder, target="maxtext", vision=True)
    other = families.mapping(folder, target="maxtext", scan=False, vision=True)
    assert repr(mapping) == repr(other)
    without = config | {"vision_config": config["vision_config"] | {"deepstack_visual_indexes": []}}
    leaves = [
        rule.target for rule in families.mapping(without, target="maxtext", vision=True).rules
    ]
    assert any(".layers.mlp" in leaf or ".layers.moe" in leaf for leaf in leaves)
    assert not any("merger_" in leaf for leaf in leaves)


@pytest.mark.parametrize("name", NAMES)
def test_malformed_configurations(whole, name):
    """Any value of any key is a mapping or a refusal, and at once."""
    config = whole(name).config
    values = (None, True, "x", 1.5, float("nan"), -1, 0, 1 << 10, 1 << 40, [], [1], {}, {"a": 1})
    for target in NAMES[name]:
        for vision in values[1:]:
            if vision != {}:
                with pytest.raises(MappingError, match="vision_config"):
                    families.mapping(config | {"vision_config": vision}, target=target, vision=True)
        for key in config["vision_config"]:
            for value in values:
                vision = config["vision_config"] | {key: value}
                try:
                    families.mapping(config | {"vision_config": vision}, target=target, vision=True)
                except MappingError as error:
                    if "'vision_config." not in str(error):
                        raise


def test_the_table_of_vision_models():
    """`docs/families.md` has a row for each family that has one, and `osl.families.VISION` too."""
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    section = text.partition("\n## Vision\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    listed = {
        family: [side.startswith("yes") for side in sides]
        for names, *sides in rows
        for family in re.findall(r"`(\w+)`", names)
    }
    assert listed == {
        family: [family in families.VISION[side] for side in ("maxtext", "tunix")]
        for family in families.VISION["maxtext"]
    }
    tested = {family_of(name): targets for name, targets in NAMES.items()}
    assert tested == {
        family: tuple(side for side in ("maxtext", "tunix") if family in families.VISION[side])
        for family in families.VISION["maxtext"]
    }
    for target, names in families.VISION.items():
        assert set(names) <= set(families.TARGETS[target])


def test_the_name_on_a_command_line(whole):
    folder = whole("gemma3").folder
    for name, options in (
        ("gemma3:maxtext-unscanned-vision", {"target": "maxtext", "scan": False}),
        ("auto:tunix-vision", {"target": "tunix"}),
    ):
        expected = families.mapping(folder, vision=True, **options)
        assert repr(find_mapping(name, folder)) == repr(expected)
