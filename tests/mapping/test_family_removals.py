"""Ready mappings refuse folders that lack tensors, and those of another family."""

from __future__ import annotations

import functools
import re

import published_configs
import pytest
from mapping_expressions import specs_of
from sampling import every

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers
from family_cases import CASES
from family_models import (
    DIMS,
    MOE,
    copy,
    experts_in_one_tensor,
    experts_with_inputs_first,
    named_as_published,
)

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.mapping import families

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers


def kind(name):
    """A tensor's name without the numbers of layers and experts."""
    return re.sub(r"\.[0-9]+(?=\.)", ".#", name)


def refused(call, names):
    """A call is refused with the name of one of some tensors, or with its pattern."""
    with pytest.raises(MappingError) as caught:
        call()
    told = re.sub(r"\{[a-z]\}", "#", str(caught.value))  # `{i}` and `{e}`, where names have numbers
    assert any(f"'{name}'" in told or f"'{kind(name)}'" in told for name in names), told


def kinds(names):
    """The names of each kind."""
    specs = {}
    for name in names:
        specs.setdefault(kind(name), []).append(name)
    return specs


@pytest.mark.parametrize(("name", "target", "scan"), every(5, CASES))
def test_each_kind_of_tensor_is_needed(saved, name, target, scan):
    folder, _, tensors, _ = saved[name]
    mapping = families.mapping(folder, target=target, scan=scan)
    specs = specs_of(tensors)
    for names in kinds(specs).values():
        for removed in (names, names[-1:]):
            lacking = {n: leaf_spec for n, leaf_spec in specs.items() if n not in removed}
            refused(functools.partial(mapping.abstract, lacking), removed)


@pytest.mark.parametrize(("name", "target", "scan"), every(15, CASES))
def test_each_tensor_is_needed(saved, name, target, scan):
    folder, _, tensors, _ = saved[name]
    mapping = families.mapping(folder, target=target, scan=scan)
    specs = specs_of(tensors)
    for removed in specs:
        lacking = {n: leaf_spec for n, leaf_spec in specs.items() if n != removed}
        refused(functools.partial(mapping.abstract, lacking), [removed])


@pytest.mark.parametrize("quantized", ["decode", "keep"])
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi", "gpt_oss"])
def test_each_tensor_of_quantised_weights_is_needed(tmp_path, name, quantized):
    published_configs.make(name, tmp_path)
    mapping = families.mapping(tmp_path, quantized=quantized)
    specs = {n: (t.shape, t.dtype) for n, t in osl.metadata(tmp_path).items()}
    mapping.abstract(specs)
    for names in kinds(specs).values():
        for removed in (names, *([name] for name in names)):
            lacking = {n: leaf_spec for n, leaf_spec in specs.items() if n not in removed}
            refused(functools.partial(mapping.abstract, lacking), removed)


@pytest.mark.parametrize(
    ("name", "target", "removed"),
    [
        ("llama", "plain", "lm_head.weight"),
        ("llama", "maxtext", "model.norm.weight"),
        ("llama3", "tunix", "model.embed_tokens.weight"),
        ("mistral", "plain", "model.layers.#.mlp.up_proj.weight"),
        ("qwen2", "plain", "model.layers.#.self_attn.q_proj.bias"),
        ("qwen3_moe", "maxtext", "model.layers.#.mlp.experts.#.up_proj.weight"),
        ("gemma2", "tunix", "model.layers.#.self_attn.q_proj.weight"),
        ("gemma3", "plain", "model.layers.#.self_attn.q_norm.weight"),
        ("mixtral", "plain", "model.layers.#.block_sparse_moe.gate.weight"),
        ("deepseek_v3", "plain", "model.layers.#.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "maxtext", "model.layers.#.mlp.shared_experts.down_proj.weight"),
        ("gpt_oss", "plain", "model.layers.#.self_attn.sinks"),
        ("glm4_moe", "plain", "model.layers.#.self_attn.q_proj.bias"),
        ("olmo3", "maxtext", "model.layers.#.self_attn.q_norm.weight"),
        ("phi3", "plain", "model.layers.#.self_attn.qkv_proj.weight"),
        ("starcoder2", "plain", "model.norm.bias"),
        ("llama4", "plain", "model.layers.#.feed_forward.experts.gate_up_proj"),
        ("qwen3_next", "plain", "model.layers.#.linear_attn.A_log"),
        ("gemma3n", "plain", "model.altup_projections.#.weight"),
        ("gemma4", "plain", "model.layers.#.layer_scalar"),
        ("qwen3_5", "plain", "model.layers.#.linear_attn.conv1d.weight"),
    ],
)
def test_no_load_and_no_conversion_without_it(saved, tmp_path, name, target, removed):
    whole, _, tensors, _ = saved[name]
    names = kinds(tensors)[removed]
    folder = copy(whole, tmp_path / "lacking", without=names)
    mapping = families.mapping(whole, target=target)
    abstract = mapping.abstract(whole)
    for call in (
        functools.partial(mapping.abstract, folder),
        functools.partial(osl.load, folder, mapping=mapping),
        functools.partial(osl.load, folder, abstract, mapping=mapping),
        functools.partial(osl.metadata, folder, mapping=mapping),
        functools.partial(osl.convert, folder, tmp_path / "out", mapping=mapping),
        functools.partial(mapping.like(folder).inverse().bind, specs_of_tree(abstract)),
    ):
        refused(call, names)
    assert not (tmp_path / "out").exists()


def specs_of_tree(tree, before=""):
    """Shape and dtype by dotted name."""
    specs = {}
    for name, value in tree.items():
        below = isinstance(value, dict)
        specs |= specs_of_tree(value, f"{before}{name}.") if below else {
            f"{before}{name}": (value.shape, value.dtype)
        }  # fmt: skip
    return specs


# Architectures whose tensors have the same names: the one is the other by another name.
SAME_NAMES = (
    *({"llama", "mistral"}, {"llama", "granite"}, {"mistral", "granite"}),
    {"qwen3_moe", "qwen3_omni_moe"},
    *({"olmo2", "olmo3"}, {"qwen2", "qwen2_vl"}, {"qwen3", "qwen3_vl"}),
    *({"gemma", "llama"}, {"gemma", "mistral"}, {"gemma", "granite"}),
)


# Names and shapes of tensors, and values of configurations that others do not have.
EXPECTED = r"no tensor|no rule|has extent|layer_types|no_rope_layers|intermediate_size|model lacks"


@pytest.mark.parametrize("theirs", every(3, families.TARGETS["plain"]))
def test_no_family_takes_the_folder_of_another(saved, theirs):
    """Whatever the configuration lacks for the other family is given to it."""
    tensors = saved[theirs].tensors
    if theirs == "qwen3_5_moe":
        tensors = experts_in_one_tensor(saved[theirs].config, tensors)
    if theirs == "qwen3_vl_moe":
        tensors = experts_with_inputs_first(tensors)
    if theirs == "deepseek_v4":
        tensors = named_as_published(tensors)
    specs = specs_of(tensors)
    for ours in families.TARGETS["plain"]:
        config = saved[ours].config | {"layer_types": None, "head_dim": None} | saved[theirs].config
        make = functools.partial(getattr(families, ours), config)

        def call(make=make, model_type=config["model_type"]):
            make(model_type=model_type).abstract(specs)

        if ours != theirs:
            with pytest.raises(MappingError, match=r"model_type is '.*by another name, say so"):
                make()
        if ours == theirs or {ours, theirs} in SAME_NAMES:
            call()
        else:
            with pytest.raises(MappingError, match=EXPECTED):
                call()


OTHERS = {
    "stablelm": ("llama", {}),
    "hunyuan_v1_moe": ("qwen3_moe", MOE | {"num_experts": 4, "head_dim": 8}),
    "olmo": ("llama", {}),
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_models_that_no_family_is_for(tmp_path, model_type):
    nearest, more = OTHERS[model_type]
    save_other(tmp_path, model_type, **more)
    with pytest.raises(MappingError, match=r"there is no tensor|no rule uses"):
        getattr(families, nearest)(tmp_path, model_type=model_type).abstract(tmp_path)
    with pytest.raises(MappingError, match=f"no ready mapping for model_type '{model_type}'"):
        families.mapping(tmp_path)


# Models with the tensors of a family, which compute something else with them: norms that multiply
# by 1 + weight, factors of embeddings, residuals and logits, pairs that are turned another way.
LOOK_ALIKES = {
    "gemma": ("llama", "mistral"),
    "granite": ("llama", "mistral"),
    "helium": ("llama", "mistral"),
    "ernie4_5": ("llama", "mistral"),
    "seed_oss": ("qwen2",),
}


@pytest.mark.parametrize("model_type", LOOK_ALIKES)
def test_look_alikes_are_refused_unless_they_are_named(tmp_path, model_type):
    save_other(tmp_path, model_type, head_dim=8, attention_bias=model_type == "seed_oss")
    for family in LOOK_ALIKES[model_type]:
        make = functools.partial(getattr(families, family), tmp_path)
        for options in ({}, {"model_type": family}):
            with pytest.raises(MappingError, match=rf"{family} .* model_type is '{model_type}'"):
                make(**options)
        make(model_type=model_type).abstract(tmp_path)  # else nothing would refuse it


def test_configurations_that_a_family_takes():
    """Its own, those without a type, and those with vision whose text model is its own."""
    config = dict(DIMS)
    for given in (
        config,
        config | {"model_type": "qwen2"},
        {"model_type": "internvl", "text_config": config | {"model_type": "qwen2"}},
    ):
        families.qwen2(given)
    for given, expected in (
        (config | {"model_type": 7}, "7"),
        ({"model_type": "qwen2", "text_config": config | {"model_type": "qwen3"}}, "'qwen3'"),
        ({"model_type": "internvl", "text_config": config}, "'internvl'"),
    ):
        with pytest.raises(MappingError, match=f"model_type is {expected}"):
            families.qwen2(given)
    with pytest.raises(MappingError, match="model_type is None"):
        families.qwen2(config, model_type="yi")


def test_norms_of_all_heads_are_not_those_of_each(tmp_path):
    """Those of OLMoE have the names of Qwen 3's, and as many elements as all heads."""
    more = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    save_other(tmp_path, "olmoe", head_dim=8, **more)
    for target in ("plain", "maxtext", "tunix"):
        mapping = families.qwen3_moe(tmp_path, target=target, model_type="olmoe")
        with pytest.raises(MappingError, match=r"q_norm.weight.*d=8"):
            mapping.abstract(tmp_path)


def save_other(folder, model_type, **more):
    ids = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **DIMS, **ids, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("model_type", "function"),
    [
        ("gemma5", "gemma3"),
        ("gemma5", "gemma4"),
        ("deepseek_v1", "deepseek_v3"),
        ("qwen4", "qwen3"),
        ("bert", None),
    ],
)
def test_the_nearest_families_are_named(model_type, function):
    expected = f"osl.families.{function}(config, model_type={model_type!r})"
    with pytest.raises(MappingError) as caught:
        families.mapping({"model_type": model_type})
    assert (expected in str(caught.value)) == (function is not None)
    assert "osl.families.llama" not in str(caught.value)


def test_layers_that_the_configuration_does_not_know(saved):
    config, tensors = saved["llama"].config, saved["llama"].tensors
    for scan in (True, False):
        mapping = families.mapping(config | {"num_hidden_layers": 2}, scan=scan)
        with pytest.raises(MappingError, match=r"no rule uses tensor 'model.layers.2"):
            mapping.abstract(specs_of(tensors))
