"""Ready mappings against tiny Hugging Face models and plain numpy on whole tensors."""

from __future__ import annotations

import collections
import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_same_bits
from mapping_expressions import evaluate, index_only, specs_of
from sampling import every

pytest.importorskip("torch")
pytest.importorskip("transformers")

import ml_dtypes
import safetensors.numpy
import torch
import transformers
from family_cases import CASES, FAMILY, family_of
from family_models import (
    MODELS,
    VISION_SIZES,
    copy,
    experts_in_one_tensor,
    experts_with_inputs_first,
    make,
    named_as_published,
    read_one,
    text_config_of,
    unused_keys_and_values,
)
from family_references import REFERENCES, maxtext
from llama_jax import logits
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    MappingError,
    StorageError,
)
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import families

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

TREES = json.loads((Path(__file__).parents[1] / "support" / "family_trees.json").read_text())
del TREES["provenance"]


def random_boxes(shape, rng, count=3):
    for _ in range(count):
        start = [int(rng.integers(0, n)) for n in shape]
        stop = [int(rng.integers(a + 1, n + 1)) for a, n in zip(start, shape, strict=True)]
        yield Box(tuple(start), tuple(stop))


def check(mapping, source, tensors, expected):
    """Every leaf, whole and in random boxes, and no leaf more."""
    bound = mapping.bind(source)
    assert set(bound.expressions) == set(expected)
    rng = np.random.default_rng(0)
    for name, array in expected.items():
        expression = bound.expressions[name]
        assert (name, expression.shape) == (name, array.shape)
        assert_same_bits(evaluate(expression, tensors), array)
        for box in random_boxes(array.shape, rng):
            assert_same_bits(evaluate(expression, tensors, box), array[box.slices])
    # A model that wants these very leaves is served as well.
    mapping.bind(source, {name: array.shape for name, array in expected.items()})


def check_inverse(mapping, source, tensors, leaves):
    """Back from the leaves: the bits of the files."""
    bound = mapping.inverse().bind(specs_of(leaves), source)
    assert set(bound.expressions) == set(tensors)
    rng = np.random.default_rng(0)
    for name, array in tensors.items():
        assert_same_bits(evaluate(bound.expressions[name], leaves), array)
        for box in random_boxes(array.shape, rng, 1):
            assert_same_bits(evaluate(bound.expressions[name], leaves, box), array[box.slices])


@pytest.mark.parametrize(("name", "target", "scan"), every(2, CASES))
def test_leaves(saved, name, target, scan):
    folder, config, tensors, _ = saved[name]
    mapping = families.mapping(folder, target=target, scan=scan)
    expected = REFERENCES[target](family_of(name), config, tensors, scan)
    check(mapping, folder, tensors, expected)
    check_inverse(mapping, folder, tensors, expected)


@pytest.mark.parametrize(("name", "target", "scan"), CASES)
def test_names_and_shapes_of_the_files_follow_from_the_leaves(saved, name, target, scan):
    folder, config, tensors, _ = saved[name]
    leaves = REFERENCES[target](family_of(name), config, tensors, scan)
    inverse = families.mapping(folder, target=target, scan=scan).inverse().bind(specs_of(leaves))
    shapes = {tensor: leaf_spec.shape for tensor, leaf_spec in inverse.specs().items()}
    assert shapes == {tensor: array.shape for tensor, array in tensors.items()}


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_scan_axis(saved, name, axis):
    folder, config, tensors, _ = saved[name]
    expected = maxtext(name, config, tensors, True, axis)
    mapping = families.mapping(config, target="maxtext", scan_axis=axis)
    check(mapping, folder, tensors, expected)


def test_shapes_that_maxtext_documents(saved):
    """`param_scan_axis=1`: [embed, layer, heads, head_dim] and [expert, layer, embed, mlp]."""
    folder = saved["deepseek_v3"].folder
    specs = families.mapping(folder, target="maxtext").leaf_facts(folder)
    shapes = {name.partition(".decoder.")[2]: leaf_spec.shape for name, leaf_spec in specs.items()}
    block = "moe_layers.DeepSeekMoeBlock_0."
    assert shapes["dense_layers.self_attention.wq_b.kernel"] == (24, 2, 4, 12)
    assert shapes["dense_layers.self_attention.wkv_b.kernel"] == (16, 2, 4, 20)
    assert shapes["dense_layers.self_attention.out.kernel"] == (4, 2, 12, 32)
    assert shapes["dense_layers.pre_self_attention_layer_norm.scale"] == (32, 2)
    assert shapes[f"{block}MoeBlock_0.wi_0"] == (4, 3, 32, 24)
    assert shapes[f"{block}MoeBlock_0.gate.kernel"] == (32, 3, 4)
    assert shapes[f"{block}MoeBlock_0.gate.bias"] == (3, 4)


def number_free(names):
    layer = re.compile(r"\b(layers_|dense_layers_|moe_layers_|layers\.)[0-9]+")
    return {layer.sub(r"\1#", name): list(shape) for name, shape in names.items()}


@pytest.mark.parametrize(
    ("target", "case"), [(target, case) for target in TREES for case in TREES[target]]
)
def test_trees_of_the_real_models(saved, target, case):
    """Names and shapes are those of MaxText's and Tunix's own models."""
    name, _, layers = case.partition(" ")
    folder = saved[name].folder
    scan = layers == "scanned" if layers else None
    specs = families.mapping(folder, target=target, scan=scan).leaf_facts(folder)
    shapes = {leaf: leaf_spec.shape for leaf, leaf_spec in specs.items()}
    assert number_free(shapes) == TREES[target][case]


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (None, "MoEBiasVar.decoder"),
        ("params.params", "params.MoEBiasVar.decoder"),
        ("", "decoder"),
        ("model", "model.decoder"),
    ],
)
def test_variables_stand_beside_parameters(saved, root, expected):
    rules = families.mapping(saved["deepseek_v3"].config, target="maxtext", root=root).rules
    (bias,) = [rule.target for rule in rules if rule.target.endswith("gate.bias")]
    assert bias == f"{expected}.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"


@pytest.mark.parametrize("name", ["gemma2_scaled", "gemma3", "llama3"])
def test_dtype_rounds_what_is_computed(saved, name):
    folder, config, tensors, _ = saved[name]
    mapping = families.mapping(folder, target="maxtext", scan=False, dtype="bfloat16")
    expected = maxtext(family_of(name), config, tensors, False)
    bf16 = tensors["model.norm.weight"].dtype
    check(mapping, folder, tensors, {leaf: array.astype(bf16) for leaf, array in expected.items()})


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
def test_untied_output_kernel(saved, target):
    folder, config, tensors, _ = saved["qwen2"]
    scan = target != "tunix"
    expected = REFERENCES[target]("qwen2", config, tensors, scan)
    leaf = {"plain": "lm_head.kernel", "tunix": "lm_head.w"}
    leaf = leaf.get(target, "params.decoder.logits_dense.kernel")
    expected[leaf] = tensors["model.embed_tokens.weight"].T
    mapping = families.mapping(folder, target=target, untie=True)
    check(mapping, folder, tensors, expected)
    check_inverse(mapping, folder, tensors, expected)
    assert set(mapping.bind(folder).ties) == {leaf}


@pytest.mark.parametrize("target", ["plain", "maxtext"])
def test_vocabulary_with_room(saved, target):
    folder, config, tensors, _ = saved["llama"]
    expected = REFERENCES[target]("llama", config, tensors, True)
    for leaf, axis in (("embed", 0), ("lm_head", 1), ("logits", 1)):
        for name in [name for name in expected if leaf in name]:
            widths = [(0, 0), (0, 0)]
            widths[axis] = (0, 32)
            expected[name] = np.pad(expected[name], widths)
    mapping = families.llama(config, target=target, vocab_size=128)
    check(mapping, folder, tensors, expected)
    check_inverse(mapping, folder, tensors, expected)


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
def test_vocabulary_without_its_last_rows(saved, target):
    """Gemma 3 has rows for images, which neither MaxText nor Tunix has."""
    folder, config, tensors, _ = saved["llama"]
    fewer = {name: array[:90] if array.shape[0] == 96 and "layers" not in name else array
             for name, array in tensors.items()}  # fmt: skip
    expected = REFERENCES[target]("llama", config, fewer, target != "tunix")
    mapping = families.llama(config, target=target, vocab_size=90)
    check(mapping, folder, tensors, expected)
    back = mapping.inverse().bind(specs_of(expected)).expressions
    for name, array in fewer.items():
        assert_same_bits(evaluate(back[name], expected).astype(array.dtype), array)
    mapping.bind(specs_of(fewer))  # what was saved loads again
    with pytest.raises(MappingError, match=r"vocab_size=0 must be in 1\.\.2,147,483,647"):
        families.llama(config, vocab_size=0)
    for size, message in ((1 << 31, "must be in 1"), (1.5, r"must be int \| None")):
        with pytest.raises(MappingError, match=message):
            families.llama(config, vocab_size=size)


def test_root_and_prefix(saved):
    _, config, tensors, _ = saved["gemma3"]
    renamed = {f"language_{k.replace('model.', 'model.model.', 1)}": v for k, v in tensors.items()}
    renamed["vision_tower.vision_model.post_layernorm.weight"] = np.zeros(3, np.float32)
    outer = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    expected = REFERENCES["plain"]("gemma3", config, tensors, True)
    expected = {f"a.b.{name}": array for name, array in expected.items()}
    mapping = families.mapping(outer, root="a.b")
    check(mapping, specs_of(renamed), renamed, expected)
    renamed = {k.replace("language_model.model", "model.language_model"): v
               for k, v in renamed.items()}  # fmt: skip
    mapping = families.mapping(outer, root="a.b", prefix="model.language_model.")
    check(mapping, specs_of(renamed), renamed, expected)


def test_prefix_of_a_folder(saved, tmp_path):
    _, config, _, _ = saved["gemma3"]
    text = transformers.Gemma3TextConfig(**config)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    both = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(both).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    specs = families.mapping(tmp_path, target="maxtext").leaf_facts(tmp_path)
    assert specs["params.token_embedder.embedding"].shape == (96, 40)


@pytest.mark.parametrize("name", VISION_SIZES)
def test_language_models_of_those_with_vision(saved, tmp_path, name):
    """The folder's names are found, and nothing of the vision model is asked for or lost."""
    text = getattr(transformers, f"{MODELS[name][0]}TextConfig")(**saved[name].config)
    text, vision = text.to_dict(), VISION_SIZES[name]
    outer = transformers.AutoConfig.for_model(name, text_config=text, vision_config=vision)
    model = transformers.AutoModelForImageTextToText.from_config(outer).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    files = osl.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (embedding,) = (n for n in files if n.endswith("embed_tokens.weight"))
    assert embedding in families.mapping(config).rules[0].patterns()
    mapping = families.mapping(tmp_path)
    expected = families.mapping(saved[name].folder).leaf_facts(saved[name].folder)
    assert {n: f.shape for n, f in mapping.leaf_facts(tmp_path).items()} == {
        n: f.shape for n, f in expected.items()
    }
    tree = osl.load(tmp_path, mapping=mapping)
    with pytest.raises(MappingError, match=r"would lack tensors|lack \d+ of"):
        osl.save(tmp_path / "out", tree, mapping=mapping.like(tmp_path))
    left = ["*vision_model.*", "*visual.*", "*multi_modal_projector.*"]
    left += ["*vision_tower.*", "*embed_vision.*"]
    osl.save(tmp_path / "out", tree, mapping=mapping.like(tmp_path, leave_out=left))
    back = osl.load(tmp_path / "out")
    assert set(back) == {n for n in files if "vis" not in n and "projector" not in n}
    for tensor, value in back.items():
        assert_same_bits(np.asarray(value), np.asarray(files[tensor]))


def test_experts_of_a_layer_in_one_tensor(saved):
    """Published Qwen 3.5 has them so; what transformers saves, and FP8, has each by itself."""
    folder, config, tensors, _ = saved["qwen3_5_moe"]
    expected = REFERENCES["plain"]("qwen3_5_moe", config, tensors, True)
    stored = experts_in_one_tensor(config, tensors)
    mapping = families.mapping(config)
    check(mapping, specs_of(stored), stored, expected)
    check_inverse(mapping.like(specs_of(stored)), specs_of(stored), stored, expected)
    for name in [name for name in stored if ".experts." in name]:
        lacking = {n: spec for n, spec in specs_of(stored).items() if n != name}
        with pytest.raises(MappingError, match=f"there is no tensor '{name}'"):
            mapping.abstract(lacking)
    check(families.mapping(folder), folder, tensors, expected)


def test_types_of_layers_of_granite_4_as_it_is_published(saved):
    config = saved["granitemoehybrid"].config
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    published = config | {"layer_types": [names[kind] for kind in config["layer_types"]]}
    assert families.mapping(published).rules == families.mapping(config).rules
    without = {k: v for k, v in published.items() if k not in ("mamba_d_head", "layer_types")}
    leaves = families.mapping(without).rules
    assert not any("self_attn" in rule.target for rule in leaves)
    with pytest.raises(MappingError, match="mamba_d_head"):
        families.mapping(config | {"mamba_d_head": 7})


@pytest.mark.parametrize("hidden", [32, 48, 24])
def test_experts_of_qwen_3_vl_lie_either_way(tmp_path, hidden):
    """Published ones have inputs first, and what transformers 5 saves has them last."""
    (saved := tmp_path / "saved").mkdir()
    folder, config, tensors, _ = make("qwen3_vl_moe", saved, hidden_size=hidden)
    expected = REFERENCES["plain"]("qwen3_vl_moe", config, tensors, True)
    check(families.mapping(folder), folder, tensors, expected)
    published = experts_with_inputs_first(tensors)
    state = {name: torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
             for name, a in published.items()}  # fmt: skip
    turned = copy(folder, tmp_path / "published", without=tensors, more=state)
    mapping = families.mapping(turned)
    check(mapping, turned, published, expected)
    check_inverse(mapping.like(turned), turned, published, expected)
    check(families.mapping(config), specs_of(published), published, expected)


@pytest.mark.parametrize(("name", "kind"), [("qwen2_vl", "Qwen2VL"), ("qwen2_vl", "Qwen2_5_VL")])
@pytest.mark.parametrize("tied", [False, True])
def test_configurations_of_vision_without_a_text_config(saved, tmp_path, name, kind, tied):
    """As Qwen 2 VL and 2.5 VL were published: the text model's values are the outer ones."""
    text = {k: v for k, v in saved[name].config.items() if k not in ("model_type", "layer_types")}
    sizes = VISION_SIZES[name] | {"intermediate_size": 16, "out_hidden_size": 32}
    model_type = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl"}[kind]
    flat = text | {"model_type": model_type, "vision_config": sizes, "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(**flat)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    files = osl.load(tmp_path)
    assert ("lm_head.weight" in files) != tied
    tree = osl.load(tmp_path, mapping=families.mapping(tmp_path))
    assert ("lm_head.kernel" in tree) != tied
    query = model.model.language_model.layers[1].self_attn.q_proj.weight.detach().float().numpy()
    kernel = np.asarray(tree["layers.self_attn.q_proj.kernel"][1])
    np.testing.assert_array_equal(kernel.reshape(32, -1).T.astype(np.float32), query)


def test_a_module_for_multi_token_prediction_is_ignored_and_not_lost(saved, tmp_path):
    whole, _, tensors, _ = saved["qwen3_next"]
    folder = copy(whole, tmp_path / "files", more={"mtp.fc.weight": torch.ones(2, 2)})
    mapping = families.mapping(folder)
    tree = osl.load(folder, mapping=mapping)
    with pytest.raises(MappingError, match=r"would lack tensors.*mtp"):
        osl.save(tmp_path / "out", tree, mapping=mapping)
    osl.save(tmp_path / "out", tree, mapping=mapping.like(folder, leave_out="mtp.*"))
    assert set(osl.metadata(tmp_path / "out")) == set(tensors)
    osl.save(tmp_path / "back", tree, mapping=families.mapping(whole))  # files that have none
    assert set(osl.metadata(tmp_path / "back")) == set(tensors)


def test_types_of_layers_that_a_hybrid_model_has_not(saved):
    config = saved["qwen3_next"].config
    types = [*config["layer_types"][:-1], "sliding_attention"]
    with pytest.raises(MappingError, match=r"each one of .*linear_attention"):
        families.mapping(config | {"layer_types": types})
    ratio = {"linear_num_value_heads": 3}
    with pytest.raises(MappingError, match=r"a multiple of 2 key heads"):
        families.mapping(config | ratio)


@pytest.mark.parametrize("interval", [None, 2, 4, 8])
def test_layers_of_full_attention_by_their_interval(saved, interval):
    """As published configurations of Qwen3-Next say it, without `layer_types`."""
    config = {k: v for k, v in saved["qwen3_next"].config.items() if k != "layer_types"}
    config |= {} if interval is None else {"full_attention_interval": interval}
    types = transformers.Qwen3NextConfig(**config).layer_types
    assert repr(families.mapping(config)) == repr(families.mapping(config | {"layer_types": types}))


def test_heads_of_global_layers_as_published_and_as_transformers_5_writes_them(saved):
    for name in ("gemma4", "gemma4_moe"):
        config = saved[name].config
        full = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]
        short = {k: v for k, v in config.items() if k != "per_layer_config"}
        short |= {"global_head_dim": full["head_dim"]}
        short |= {"num_global_key_value_heads": full.get("num_key_value_heads")}
        assert repr(families.mapping(short)) == repr(families.mapping(config))
    for layer, sizes in (("0", {"head_dim": 8}), ("5", {"head_dim": 8}), ("3", {"head_dim": 8})):
        other = config["per_layer_config"] | {layer: sizes}
        config = config | {"layer_types": ["sliding_attention", "full_attention"] * 3}
        with pytest.raises(MappingError, match=r"'per_layer_config' of the configuration is"):
            families.mapping(config | {"per_layer_config": other})


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_keys_and_values_that_no_layer_uses(saved, tmp_path, name):
    """Published files have them in layers that take those of others; transformers drops them."""
    whole, _, tensors, _ = saved[name]
    count = len({t.split(".")[2] for t in tensors if ".layers." in t})
    more = {
        f"model.layers.{i}.self_attn.{part}.weight": torch.ones(2, 2)
        for i in (count - 2, count - 1)
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    folder = copy(whole, tmp_path / "files", more=more)
    mapping = families.mapping(folder)
    tree = osl.load(folder, mapping=mapping)
    osl.save(tmp_path / "out", tree, mapping=mapping)
    assert set(osl.metadata(tmp_path / "out")) == set(tensors)
    used = {f"model.layers.0.self_attn.{part}.lora": torch.ones(2, 2) for part in ("k_proj",)}
    other = copy(whole, tmp_path / "other", more=used)
    with pytest.raises(MappingError, match=r"no rule uses tensor 'model.layers.0"):
        osl.load(other, mapping=families.mapping(other))


def test_keys_and_values_that_no_layer_of_tunix_uses(saved, tmp_path):
    """Tunix's Gemma 4 has them in every layer: published files fill them, others are refused."""
    whole, config, tensors, _ = saved["gemma4_e2b"]
    with pytest.raises(MappingError, match=r"in these files only some.*num_kv_shared_layers 5"):
        families.mapping(whole, target="tunix")
    folder = copy(whole, tmp_path / "files", more=unused_keys_and_values(config))
    stored = {
        name: array.astype(tensors["model.norm.weight"].dtype)
        for name, array in osl.load(folder).items()
    }
    stored = {name: np.asarray(array) for name, array in stored.items()}
    expected = REFERENCES["tunix"]("gemma4", config, stored, False)
    for source in (folder, config):
        mapping = families.mapping(source, target="tunix")
        check(mapping, folder, stored, expected)
        check_inverse(mapping, folder, stored, expected)


@pytest.mark.parametrize("target", ["plain", "maxtext"])
@pytest.mark.parametrize("scan", [True, False])
def test_published_names_of_deepseek_v4(saved, tmp_path, target, scan):
    """They differ from those that transformers saves; a configuration alone is a published one."""
    whole, config, tensors, _ = saved["deepseek_v4"]
    expected = REFERENCES[target]("deepseek_v4", config, tensors, scan)
    published = named_as_published(tensors)
    more = {"mtp.0.attn.wq_a.weight": np.zeros((2, 2), np.float32)}
    mapping = families.mapping(config, target=target, scan=scan)
    check(mapping, specs_of(published | more), published | more, expected)
    check_inverse(families.mapping(config, target=target, scan=scan).like(specs_of(published)),
                  specs_of(published), published, expected)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(named_as_published({n: read_one(whole, n) for n in tensors}),
              tmp_path / "model.safetensors")  # fmt: skip
    check(families.mapping(tmp_path, target=target, scan=scan), tmp_path, published, expected)


def test_the_thinker_of_an_omni_model(saved):
    """What is beside the language model is ignored; a save of it alone would lose that."""
    _, config, tensors, _ = saved["qwen3_omni_moe"]
    whole = {f"thinker.{name}": array for name, array in tensors.items()}
    others = ("thinker.visual.pos_embed.weight", "thinker.audio_tower.conv_out.weight",
              "talker.model.layers.0.mlp.experts.0.gate_proj.weight",
              "talker.model.codec_embedding.weight", "code2wav.decoder.0.conv.bias")  # fmt: skip
    more = dict.fromkeys(others, np.zeros((2, 2), np.float32))
    outer = {"model_type": "qwen3_omni_moe", "talker_config": {}, "code2wav_config": {}}
    outer["thinker_config"] = {"model_type": "qwen3_omni_moe_thinker", "text_config": config}
    for target, scan in (("plain", True), ("maxtext", False)):
        expected = REFERENCES[target]("qwen3_omni_moe", config, tensors, scan)
        mapping = families.mapping(outer, target=target, scan=scan)
        check(mapping, specs_of(whole | more), whole | more, expected)
        check_inverse(mapping.like(specs_of(whole)), specs_of(whole), whole, expected)
    with pytest.raises(MappingError, match=r"model_type is 'qwen3_omni_moe_text'.*say so"):
        families.qwen3_moe(outer)
    with pytest.raises(MappingError, match="lacks 'num_hidden_layers'"):
        families.mapping(outer | {"thinker_config": None})


def test_layers_of_deepseek_v4_by_older_keys(saved):
    """As published configurations say them; both spellings are one model."""
    config = saved["deepseek_v4"].config
    absent = ("layer_types", "mlp_layer_types", "compress_rates")
    old = {key: value for key, value in config.items() if key not in absent}
    for keys in (
        {"compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0], "num_hash_layers": 3},
        {"compress_ratios": [4, 0, 4, 128, 4, 128, 4], "num_hash_layers": 0},
        {},
        {"num_hash_layers": 5},
        {"compress_rate_csa": 4, "compress_rate_hca": 128},
    ):
        new = transformers.DeepseekV4Config(**old | keys)
        types = {"layer_types": new.layer_types, "mlp_layer_types": new.mlp_layer_types}
        assert repr(families.mapping(old | keys)) == repr(families.mapping(old | types))
    # Types that MaxText does not stack are those of its other layout.
    mapping = families.mapping(old, target="maxtext")
    assert repr(mapping) == repr(families.mapping(old, target="maxtext", scan=False))


def test_kimi_k2_is_a_deepseek_v3(saved):
    config = saved["deepseek_v3"].config
    kimi = families.mapping(config | {"model_type": "kimi_k2"}, target="maxtext")
    assert repr(kimi) == repr(families.mapping(config, target="maxtext"))


def test_buffers_and_tied_heads_of_old_checkpoints_are_ignored(saved):
    _, config, tensors, _ = saved["llama3"]
    specs = specs_of(tensors)
    specs["model.layers.0.self_attn.rotary_emb.inv_freq"] = ((4,), np.dtype(np.float32))
    specs["lm_head.weight"] = specs["model.embed_tokens.weight"]
    for target in ("plain", "maxtext", "tunix"):
        families.mapping(config, target=target).bind(specs)
    specs["model.layers.0.self_attn.q_proj.lora"] = ((4,), np.dtype(np.float32))
    with pytest.raises(MappingError, match=r"no rule uses tensor 'model\.layers\.0\.self"):
        families.mapping(config).bind(specs)


@pytest.mark.parametrize("target", ["plain", "maxtext"])
def test_old_checkpoints_with_buffers_are_saved_without_them(saved, tmp_path, target):
    """Models that transformers opens then have the same logits."""
    whole, _, tensors, _ = saved["llama"]
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    folder = copy(whole, tmp_path / "old", more={name.format(i): torch.ones(4) for i in range(3)})
    mapping = families.mapping(folder, target=target)
    osl.save(tmp_path / "new", osl.load(folder, mapping=mapping), mapping=mapping.like(folder))
    assert set(osl.metadata(tmp_path / "new")) == set(tensors)
    (tmp_path / "new" / "config.json").write_bytes((folder / "config.json").read_bytes())
    opened = [
        transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        for path in (whole, tmp_path / "new")
    ]
    assert not any(names for _, report in opened for names in report.values())
    tokens = torch.arange(8)[None] + 3
    with torch.no_grad():
        expected, logits = (model(tokens).logits for model, _ in opened)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("target", ["plain", "maxtext"])
@pytest.mark.parametrize("scan", [True, False])
def test_layers_for_multi_token_prediction_are_ignored(saved, target, scan):
    _, config, tensors, _ = saved["deepseek_v3"]
    expected = REFERENCES[target]("deepseek_v3", config, tensors, scan)
    last = [name for name in tensors if name.startswith("model.layers.4.")]
    more = {name.replace("layers.4.", "layers.5."): tensors[name] for name in last}
    more["model.layers.5.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    mapping = families.mapping({**config, "num_nextn_predict_layers": 1}, target=target, scan=scan)
    check(mapping, specs_of(tensors | more), tensors | more, expected)


def test_layers_for_multi_token_prediction_are_not_lost_without_a_word(saved, tmp_path):
    whole, config, tensors, _ = saved["deepseek_v3"]
    config = {**config, "num_nextn_predict_layers": 1}
    more = {f"model.layers.5.{name}.weight": torch.ones(2, 2) for name in ("eh_proj", "enorm")}
    # A layer as those of the model, of which no stack takes it.
    layer = [name for name in tensors if ".layers.4." in name]
    more |= {name.replace("s.4.", "s.5."): read_one(whole, name) for name in layer}
    folder = copy(whole, tmp_path / "files", more=more)
    (folder / "config.json").write_text(json.dumps(config))
    mapping = families.mapping(folder)
    tree = osl.load(folder, mapping=mapping)
    for ready in (mapping, families.mapping(config)):
        with pytest.raises(MappingError, match=r"would lack tensors.*layers\.\{5..5\}.*leave_out="):
            osl.save(tmp_path / "out", tree, mapping=ready)
    with pytest.raises(MappingError, match=rf"lack {len(more)} of .*layers.*eh_proj"):
        mapping.like(folder)
    with pytest.raises(MappingError, match=rf"lack {len(layer)} of .*layers.#.mlp"):
        mapping.like(folder, leave_out=["*.eh_proj.*", "*.enorm.*"])
    extra = "model.layers.5.*"
    osl.save(tmp_path / "out", tree, mapping=mapping.like(folder, leave_out=extra))
    osl.save(tmp_path / "all", osl.load(tmp_path / "out") | osl.load(folder, only=extra))
    assert set(osl.metadata(tmp_path / "out")) == set(tensors)
    assert set(osl.metadata(tmp_path / "all")) == set(tensors) | set(more)
    # Files that transformers saved have none, whatever their configuration says.
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    osl.save(tmp_path / "back", tree, mapping=families.mapping(tmp_path / "out"))
    assert set(osl.metadata(tmp_path / "back")) == set(tensors)


def test_queries_of_full_rank(saved):
    _, config, tensors, _ = saved["deepseek_v3"]
    config = {**config, "q_lora_rank": None}
    lite = {name: array for name, array in tensors.items() if ".q_a_" not in name}
    for name in [name for name in lite if ".q_b_proj." in name]:
        del lite[name]
        rng = np.random.default_rng(len(lite))
        lite[name.replace("q_b_proj", "q_proj")] = rng.random((48, 32), np.float32)
    for target in ("plain", "maxtext"):
        expected = REFERENCES[target]("deepseek_v3", config, lite, True)
        check(families.mapping(config, target=target), specs_of(lite), lite, expected)


def fp8(tensors, names, block):
    """Tensors as FP8 with a scale for each block, and what they decode to."""
    stored, decoded = dict(tensors), dict(tensors)
    rng = np.random.default_rng(0)
    for name in names:
        rows, columns = tensors[name].shape
        scale = rng.random((-(-rows // block), -(-columns // block)), np.float32) + 0.5
        values = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        stored |= {name: values, f"{name}_scale_inv": scale}
        spread = scale.repeat(block, 0).repeat(block, 1)[:rows, :columns]
        product = values.astype(np.float32) * spread
        decoded[name] = product.astype(tensors["model.norm.weight"].dtype)
    return stored, decoded


@pytest.mark.parametrize("target", ["plain", "maxtext"])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "qwen3"])
def test_fp8_with_block_scales(saved, name, target, scan):
    _, config, tensors, _ = saved[name]
    projections = [
        tensor
        for tensor in tensors
        if tensor.endswith(("_proj.weight", "_mqa.weight"))
    ]  # fmt: skip
    stored, decoded = fp8(tensors, projections, 16)
    config = config | {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        }
    }
    expected = REFERENCES[target](name, config, decoded, scan)
    mapping = families.mapping(config, target=target, scan=scan)
    check(mapping, specs_of(stored), stored, expected)
    with pytest.raises(MappingError, match="does not invert"):
        mapping.inverse()


@pytest.mark.parametrize("target", ["plain", "maxtext"])
@pytest.mark.parametrize("scan", [True, False])
def test_mxfp4(saved, target, scan):
    """Against transformers' own decoder."""
    _, config, tensors, _ = saved["gpt_oss"]
    config = config | {"quantization_config": {"quant_method": "mxfp4"}}
    bf16 = tensors["model.norm.weight"].dtype
    stored, decoded = dict(tensors), dict(tensors)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows, groups = (96, 2) if name.endswith("gate_up_proj") else (64, 1)
        blocks = rng.integers(0, 256, (5, rows, groups, 16), np.uint8)
        scales = rng.integers(120, 134, (5, rows, groups), np.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
        decoded[name] = values.contiguous().view(torch.uint16).numpy().view(bf16)
        assert decoded[name].shape == (5, groups * 32, rows)
    expected = REFERENCES[target]("gpt_oss", config, decoded, scan)
    check(families.mapping(config, target=target, scan=scan), specs_of(stored), stored, expected)


def stacked(stored, name):
    """Stacks what is stored under a name with `{i}` and `{e}` over these."""
    pattern = re.compile(re.sub(r"\\\{\w\\\}", r"(\\d+)", re.escape(name)))
    numbers = {tuple(map(int, m.groups())): n for n in stored if (m := pattern.fullmatch(n))}
    arrays = np.stack([stored[numbers[index]] for index in sorted(numbers)])
    lengths = [len({index[axis] for index in numbers}) for axis in range(len(min(numbers)))]
    return arrays.reshape(*lengths, *arrays.shape[1:])


def check_kept(config, stored, kept, decoded):
    """Quantised tensors keep names and bits; all other leaves are those of the decoded model."""
    mapping = families.mapping(config, quantized="keep")
    expressions = mapping.bind(specs_of(stored)).expressions
    plain = REFERENCES["plain"](config["model_type"], config, decoded, True)
    for name, array in kept.items():
        assert_same_bits(evaluate(expressions.pop(name), stored), array)
    for name, bound in expressions.items():
        assert_same_bits(evaluate(bound, stored), plain[name])
    saving = mapping.like(specs_of(stored))  # the configuration tells of layers that are not there
    back = saving.inverse().bind(mapping.leaf_facts(specs_of(stored))).expressions
    leaves = {n: evaluate(b, stored) for n, b in mapping.bind(specs_of(stored)).expressions.items()}
    assert set(back) == set(stored)
    for name, bound in back.items():
        assert_same_bits(evaluate(bound, leaves), stored[name])


@pytest.mark.parametrize("ending", ["weight", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "bfloat16", "int32"])
def test_fp8_of_other_dtypes_is_refused(saved, ending, dtype):
    _, config, tensors, _ = saved["qwen3"]
    projections = [name for name in tensors if "_proj.weight" in name]
    specs = specs_of(fp8(tensors, projections, 16)[0])
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    mapping = families.mapping(config | {"quantization_config": quantization})
    name = f"model.layers.0.mlp.up_proj.{ending}"
    specs[name] = (specs[name][0], np.dtype(dtype))
    if (ending, dtype) == ("weight_scale_inv", "bfloat16"):
        mapping.abstract(specs)
        return
    with pytest.raises(MappingError, match=rf"must be floats.*, not {dtype}"):
        mapping.abstract(specs)


def test_fp8_that_is_kept(saved):
    _, config, tensors, _ = saved["deepseek_v3"]
    projections = [t for t in tensors if t.endswith(("_proj.weight", "_mqa.weight"))]
    stored, decoded = fp8(tensors, projections, 16)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    config = config | {"quantization_config": quantization}
    first = config["first_k_dense_replace"]
    dense, sparse = ({}, {})
    for name, array in stored.items():
        if "_proj.weight" in name or "_mqa.weight" in name:
            number = int(name.split(".")[2])
            (dense if number < first else sparse)[name] = array
    kept = {}
    for root, layers in (("dense_layers", dense), ("moe_layers", sparse)):
        for name in layers:
            after = re.sub(r"experts\.\d+", "experts.{e}", name.split(".", 3)[3])
            leaf = f"{root}.{after.replace('{e}.', '')}"
            kept[leaf] = stacked(layers, f"model.layers.{{i}}.{after}")
    assert kept["moe_layers.mlp.experts.up_proj.weight"].dtype.name == "float8_e4m3fn"
    check_kept(config, stored, kept, decoded)


def test_mxfp4_that_is_kept(saved):
    _, config, tensors, _ = saved["gpt_oss"]
    config = config | {"quantization_config": {"quant_method": "mxfp4"}}
    rng, stored, kept = np.random.default_rng(0), dict(tensors), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        del stored[name]
        stored[f"{name}_blocks"] = rng.integers(0, 256, (5, 96, 2, 16), np.uint8)
        stored[f"{name}_scales"] = rng.integers(120, 134, (5, 96, 2), np.uint8)
    for name in ("gate_up_proj", "down_proj"):
        for part in ("blocks", "scales"):
            full = f"mlp.experts.{name}_{part}"
            kept[f"layers.{full}"] = stacked(stored, f"model.layers.{{i}}.{full}")
    check_kept(config, stored, kept, tensors)


@pytest.mark.parametrize("quantized", ["decode", "keep"])
def test_int4_of_experts(saved, quantized):
    """As Kimi K2 Thinking: the experts are packed, attention and the like are not."""
    _, config, tensors, _ = saved["deepseek_v3"]
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    config = config | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights | {"group_size": 8}}},
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        }
    }
    rng, stored, decoded, kept = np.random.default_rng(0), dict(tensors), dict(tensors), {}
    bf16 = tensors["model.norm.weight"].dtype
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = stored.pop(name).shape
        values = rng.integers(0, 16, (rows, columns), np.int64)
        scale = rng.random((rows, columns // 8), np.float32).astype(bf16)
        shifted = values.reshape(rows, -1, 8) << (4 * np.arange(8))
        packed = shifted.sum(-1).astype(np.uint32).view(np.int32)
        shape = np.array([rows, columns], np.int64)
        stored |= {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}
        spread = scale.astype(np.float32).repeat(8, 1)
        decoded[name] = ((values - 8).astype(np.float32) * spread).astype(bf16)
    if quantized == "decode":
        expected = REFERENCES["plain"]("deepseek_v3", config, decoded, True)
        check(families.mapping(config), specs_of(stored), stored, expected)
        for part in ("packed", "scale", "shape"):
            lacking = next(name for name in stored if name.endswith(f"weight_{part}"))
            specs = {
                name: leaf_spec for name, leaf_spec in specs_of(stored).items() if name != lacking
            }
            with pytest.raises(MappingError, match=f"there is no tensor '{lacking}'"):
                families.mapping(config).abstract(specs)
        return
    for name in ("gate_proj", "up_proj", "down_proj"):
        for part in ("packed", "scale", "shape"):
            source = f"model.layers.{{i}}.mlp.experts.{{e}}.{name}.weight_{part}"
            kept[f"moe_layers.mlp.experts.{name}.weight_{part}"] = stacked(stored, source)
    check_kept(config, stored, kept, decoded)


KEPT = {  # of FP8: modules that are not converted, and the tensors that these are
    "projections of latent attention": (["kv_b_proj", "q_a_proj"], r"kv_b_proj|q_a_proj"),
    "a whole module of one layer": (["model.layers.1.self_attn"], r"layers\.1\.self_attn"),
    "one layer's projection": (["layers.1.self_attn.o_proj"], r"layers\.1\.self_attn\.o_proj"),
    "what only the files say": ([], r"layers\.\d\.mlp\.experts\.2\."),
}


@pytest.mark.parametrize("target", ["plain", "maxtext"])
@pytest.mark.parametrize("case", KEPT)
def test_fp8_that_leaves_modules_as_they_are(saved, tmp_path, case, target):
    """As other layers have them quantised, too: the files say which."""
    _, config, tensors, _ = saved["deepseek_v3"]
    kept, named = KEPT[case]
    projections = [
        name
        for name in tensors
        if name.endswith(("_proj.weight", "_mqa.weight")) and not re.search(named, name)
    ]
    assert projections
    stored, decoded = fp8(tensors, projections, 16)
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": [*kept, "lm_head", "model.layers.0.mlp.gate"],
    }
    check_folder(tmp_path, config, quantization, stored, decoded, target)
    mapping = partial(families.mapping, config | {"quantization_config": quantization})
    if kept and "layers.1." in kept[0]:
        with pytest.raises(MappingError, match=f"leaves '.*{kept[0]}.*' unquantised, unlike"):
            mapping()
    elif kept:  # of all layers
        expected = REFERENCES[target]("deepseek_v3", config, decoded, True)
        check(mapping(target=target), specs_of(stored), stored, expected)


def check_folder(folder, config, quantization, stored, decoded, target="plain"):
    """A folder's mapping gives what one of the decoded tensors gives."""
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    said = config | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(said))
    expected = REFERENCES[target]("deepseek_v3", config, decoded, True)
    check(families.mapping(folder, target=target), specs_of(stored), stored, expected)


@pytest.mark.parametrize("case", ["order", "ignored layers"])
def test_int4_of_experts_that_the_own_rules_do_not_have(saved, tmp_path, case):
    _, config, tensors, _ = saved["deepseek_v3"]
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    weights |= {"group_size": 8} | ({"actorder": "group"} if case == "order" else {})
    experts = [name for name in tensors if ".experts." in name]
    last = max(name.split(".")[2] for name in experts)
    plain = [n for n in experts if n.split(".")[2] == last and case == "ignored layers"]
    ignored = [name.removesuffix(".weight") for name in plain]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
        "ignore": [*ignored, "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                   r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    }  # fmt: skip
    rng, stored, decoded = np.random.default_rng(0), dict(tensors), dict(tensors)
    bf16 = tensors["model.norm.weight"].dtype
    for name in set(experts) - set(plain):
        rows, columns = stored.pop(name).shape
        values = rng.integers(0, 16, (rows, columns), np.int64)
        scale = rng.random((rows, columns // 8), np.float32).astype(bf16)
        shifted = values.reshape(rows, -1, 8) << (4 * np.arange(8))
        index = np.arange(columns) // 8
        if case == "order":
            index = rng.permutation(index)
            stored[f"{name}_g_idx"] = index.astype(np.int32)
        stored |= {
            f"{name}_packed": shifted.sum(-1).astype(np.uint32).view(np.int32),
            f"{name}_scale": scale,
            f"{name}_shape": np.array([rows, columns], np.int64),
        }
        decoded[name] = ((values - 8) * scale.astype(np.float32)[:, index]).astype(bf16)
    check_folder(tmp_path, config, quantization, stored, decoded)
    refused = "no actorder of groups" if case == "order" else "unquantised, unlike its peers"
    with pytest.raises(MappingError, match=refused):
        families.mapping(config | {"quantization_config": quantization})


def test_the_table_of_families():
    """`docs/families.md` has a row for each family, with what there is a mapping to."""
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    listed = {}
    for names, *sides in rows:
        for name in re.findall(r"`(\w+)`", names):
            if name in families.TARGETS["plain"] and len(sides) == len(families.TARGETS):
                listed[name] = [side.startswith("yes") for side in sides]
    expected = {
        name: [name in targets for targets in families.TARGETS.values()]
        for name in families.TARGETS["plain"]
    }
    assert listed == expected


def test_named_functions(saved):
    for name in families.TARGETS["plain"]:
        config = {k: v for k, v in saved[name].config.items() if k != "model_type"}
        ready = getattr(families, name)(config, target="plain", scan=False)
        assert repr(ready) == repr(families.mapping(saved[name].config, scan=False))


def test_configurations_as_version_4_of_transformers_writes_them(saved):
    """Names of older versions, and nothing that is a default."""
    _, config, _, _ = saved["llama3"]
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "head_dim")}
    old["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0}
    for target in ("plain", "maxtext"):
        ready = families.mapping(old, target=target)
        assert repr(ready) == repr(families.mapping(config, target=target))
    _, config, _, _ = saved["qwen3_moe"]
    old = {k: v for k, v in config.items() if k != "num_local_experts"} | {"num_experts": 5}
    assert repr(families.mapping(old)) == repr(families.mapping(config))
    inner = {"num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}
    ready = families.mapping({"model_type": "gemma3", "text_config": inner}, scan=False)
    assert "rearrange('(h d) e -> e h d', d=256, h=8)" in repr(ready)
    assert not any(rule.target.startswith("lm_head") for rule in ready.rules)


def test_layers_that_the_checkpoint_lacks(saved):
    _, config, tensors, _ = saved["llama"]
    specs = {
        name: leaf_spec for name, leaf_spec in specs_of(tensors).items() if "layers.2." not in name
    }
    with pytest.raises(MappingError, match=r"there is no tensor 'model.layers.2.self_attn"):
        families.mapping(config).bind(specs)


THREE_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("llama", {"model_type": "bert"}, {}, "no ready mapping for model_type 'bert'"),
        ("llama", {"vocab_size": None}, {}, "lacks 'vocab_size'"),
        ("llama", {"hidden_size": "32"}, {}, "'hidden_size' of the configuration is '32'"),
        ("llama", {}, {"target": "flax"}, "target='flax' must be one of"),
        ("mixtral", {}, {"target": "tunix"}, "no ready mapping from mixtral to tunix"),
        ("llama", {}, {"target": "tunix", "scan": True}, "tunix has no models with stacked"),
        ("llama", {}, {"scan_axis": -1}, "scan_axis=-1 must be 0 or more"),
        ("llama", {}, {"dtype": "float3"}, "'float3' is not a dtype"),
        ("qwen3_moe_mixed", {}, {"target": "maxtext"}, "layers are partly dense"),
        ("qwen3_moe_mixed", {}, {"target": "tunix"}, "layers are partly dense"),
        ("gemma2", THREE_LAYERS, {"target": "maxtext"}, "a multiple of 2 layers"),
        ("olmo3", THREE_LAYERS, {"target": "maxtext"}, "a multiple of 4 layers"),
        (
            "gemma2_scaled",
            {},
            {"target": "tunix"},
            "expected: query_pre_attn_scalar 16, found: 12",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, {"target": "tunix"}, "norm_topk_prob true"),
        (
            "deepseek_v32",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            {"target": "maxtext"},
            r"MaxText's deepseek_v32, which are the first.*found: \[1\]",
        ),
        ("deepseek_v32", {"mlp_layer_types": ["dense"]}, {}, "dense or sparse for each of 3"),
        ("gemma4_e2b", {}, {"target": "maxtext", "scan": True}, "no such gemma4 with stacked"),
        ("gemma4", {}, {"target": "maxtext"}, "type of layer 1 is not that of MaxText's gemma4"),
        (
            "gemma4_e2b",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
            {"target": "maxtext"},
            "attention_k_eq_v false",
        ),
        (
            "gemma4_e2b",
            {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 24},
            {"target": "maxtext"},
            "enable_moe_block false",
        ),
        (
            "gemma4_e2b",
            {"num_kv_shared_layers": 4},
            {"target": "tunix"},
            "from the last local and the last global layer",
        ),
        ("llama4_scout", {}, {"target": "maxtext"}, "a multiple of 4 layers"),
        ("llama4", {"moe_layers": [0, 1]}, {"target": "maxtext"}, r"every second.*layers \[0, 1\]"),
        ("llama4", {"no_rope_layers": [1, 0, 1, 0]}, {"target": "maxtext"}, "type of layer 1"),
        ("llama4", {"no_rope_layers": [1, 0, 1]}, {"target": "maxtext"}, "one for each of 4"),
        (
            "llama4",
            {"no_rope_layers": [], "no_rope_layer_interval": 2},
            {"target": "maxtext"},
            "type of layer 1",
        ),
        (
            "deepseek_v4",
            {"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 5},
            {"target": "maxtext"},
            r"expected: layers 0 to 0, found: \[1\]",
        ),
        (
            "deepseek_v4",
            {"compress_rates": {"compressed_sparse_attention": 8}},
            {"target": "maxtext"},
            r"compress_rates \[4, 128\].*found: \[8, 128\]",
        ),
        (
            "deepseek_v4",
            {"layer_types": ["heavily_compressed_attention"] * 7},
            {"target": "maxtext", "scan": True},
            "no such deepseek_v4 with stacked layers",
        ),
        ("deepseek_v4", {"layer_types": ["full_attention"] * 7}, {}, "each one of"),
        ("deepseek_v4", {"layer_types": ["sliding_attention"]}, {}, "one for each of 7 layers"),
        ("deepseek_v4", {"mlp_layer_types": ["dense"] * 7}, {}, "hash_moe or moe for each of 7"),
        (
            "deepseek_v4",
            {"layer_types": None, "compress_ratios": [2] * 7},
            {},
            r"one of \[0, 4, 128",
        ),
        ("deepseek_v4", {"o_groups": 3}, {}, "a divisor of 4 heads"),
        (
            "deepseek_v4",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}},
            {},
            "deepseek_v4 quantised with 'fp8'",
        ),
        ("gpt_oss", THREE_LAYERS, {"target": "maxtext"}, "a multiple of 2 layers"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, {}, "quantised with 'gptq'"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            {},
            "one scale for each tensor",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}},
            {},
            "as MXFP8 is",
        ),
        (
            "llama",
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "weight_block_size": [128, 128],
                    "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"],
                }
            },
            {},
            "leaves 'model.layers.0.self_attn.q_proj' unquantised",
        ),
    ],
)
def test_what_there_is_no_mapping_for(saved, name, changes, options, message):
    with pytest.raises(MappingError, match=message):
        families.mapping(saved[name].config | changes, **options)


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("scan", ["no", 1, []], r"bool \| None"),
        ("untie", ["no", 1, {}], r"bool \| None"),
        ("scan_axis", ["1", 1.0, True, [1]], r"int \| None"),
        ("vocab_size", ["32000", 2.0, True, (7,)], r"int \| None"),
        ("prefix", [5, b"model."], r"str \| None"),
        ("root", [5, False], r"str \| None"),
        ("model_type", [5, ["llama"]], r"str \| None"),
        ("target", [None, ["plain"], {"plain"}, 0], r"one of \['plain', 'maxtext', 'tunix'\]"),
        ("quantized", [None, ["keep"], True], r"one of \['decode', 'keep'\]"),
    ],
)
def test_options_of_another_type(saved, option, values, message):
    for value in values:
        with pytest.raises(MappingError, match=rf"^{option}=.* must be {message}"):
            families.llama(saved["llama"].config, **{option: value})


def test_scalars_of_numpy_are_options(saved):
    config = saved["llama"].config
    options = {"scan": True, "scan_axis": 0, "vocab_size": 128, "untie": False}
    arrays = {name: np.array(value)[()] for name, value in options.items()}
    assert repr(families.llama(config, **arrays)) == repr(families.llama(config, **options))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in FAMILY])
def test_keys_that_transformers_does_not_read(saved, name):
    """Another family's keys change nothing; the classes of transformers say whose they are."""
    config = saved[name].config
    kind = MODELS[name][0]
    text = name == "gemma3" or "_vl" in name or "_omni" in name
    own = (text_config_of(kind) if text else getattr(transformers, f"{kind}Config"))()
    foreign = {
        key: value
        for key, value in {
            "query_pre_attn_scalar": 4,
            "sliding_window_pattern": 2,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        }.items()
        if not hasattr(own, key) and (name, key) != ("gemma3", "sliding_window_pattern")
    }
    assert foreign
    for target in {target for case, target, _ in CASES if case == name} - {"tunix"}:
        expected = families.mapping(config, target=target)
        assert repr(families.mapping(config | foreign, target=target)) == repr(expected)


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
@pytest.mark.parametrize("pattern", [None, 1, 2, 3, 5, 6, 7, 100])
def test_layer_types_by_their_pattern(saved, target, pattern):
    """Transformers says which layers a pattern means; both spellings are one model."""
    absent = ("layer_types", "sliding_window_pattern", "_sliding_window_pattern")
    short = {key: value for key, value in saved["gemma3"].config.items() if key not in absent}
    short |= {} if pattern is None else {"sliding_window_pattern": pattern}
    types = transformers.Gemma3TextConfig(**short).layer_types
    fits = all((kind == "full_attention") == (i % 6 == 5) for i, kind in enumerate(types))
    results = []
    for config in (short, short | {"layer_types": types}):
        if fits or target == "plain":
            results.append(repr(families.mapping(config, target=target)))
            continue
        with pytest.raises(MappingError, match=r"the type of layer \d is not that of") as caught:
            families.mapping(config, target=target)
        results.append(str(caught.value))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "target"),
    [("llama_biased", "maxtext"), ("llama_biased", "tunix"), ("deepseek_v3_biased", "maxtext")],
)
def test_biases_that_a_model_side_lacks(saved, name, target):
    _, config, tensors, _ = saved[name]
    with pytest.raises(MappingError, match=r"bias"):
        families.mapping(config, target=target).bind(specs_of(tensors))


def test_scalars_that_tunix_divides_by(saved):
    """Its Gemma 3 knows two, of which the configuration of the model says one."""
    config = saved["gemma3"].config
    for scalar in (16, 10):
        families.mapping(config | {"query_pre_attn_scalar": scalar}, target="tunix")
    with pytest.raises(MappingError, match="query_pre_attn_scalar 16 or 10, found: 12"):
        families.mapping(config | {"query_pre_attn_scalar": 12}, target="tunix")


def test_the_kinds_of_layers_count_before_the_number_of_dense_ones(saved):
    config = {**saved["deepseek_v32"].config, "first_k_dense_replace": 3}
    types = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    for target in ("plain", "maxtext"):
        mapping = families.mapping(config | types, target=target)
        others = config | {"mlp_layer_types": None, "first_k_dense_replace": 1}
        assert repr(mapping) == repr(families.mapping(others, target=target))


def test_a_llama_4_without_experts(tmp_path):
    """As Llama Guard 4: no layer is of experts, and their number and step are 0."""
    config = transformers.Llama4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=24, intermediate_size_mlp=40, head_dim=8,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, moe_layers=[],
        interleave_moe_layer_step=0, num_local_experts=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config)
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["moe_layers"], said["num_local_experts"]) == ([], 0)
    leaves = osl.load(tmp_path, mapping=families.mapping(tmp_path))
    names = ("gate_proj", "up_proj", "down_proj")
    kernels = {f"layers.mlp.{name}.kernel": name for name in names}
    assert {leaf for leaf in leaves if ".mlp." in leaf} == kernels.keys()
    for leaf, name in kernels.items():
        for i, kernel in enumerate(leaves[leaf]):
            weight = model.state_dict()[f"model.layers.{i}.feed_forward.{name}.weight"]
            np.testing.assert_array_equal(kernel, weight.float().numpy().T)
    with pytest.raises(MappingError, match="every layer, every second or every fourth"):
        families.mapping(tmp_path, target="maxtext")


@pytest.mark.parametrize("kind", ["mistral3", "llava", "kimi_k25", "aria"])
def test_a_model_within_another_names_its_function(saved, kind):
    text = saved["mistral"].config
    config = {"model_type": kind, "text_config": text}
    with pytest.raises(MappingError) as caught:
        families.mapping(config)
    assert "osl.families.mistral(config) takes that part" in str(caught.value)
    assert "tensor('language_model.model.embed_tokens.weight')" in repr(families.mistral(config))


def test_what_stands_beside_a_language_model_is_ignored(saved):
    _, config, tensors, _ = saved["qwen2"]
    specs = {f"language_model.{name}": spec for name, spec in specs_of(tensors).items()}
    beside = dict.fromkeys(
        ("image_newline", "vision_tower.a", "multi_modal_projector.b"), ((4,), np.float32)
    )
    config = {"model_type": "llava_onevision", "text_config": config}
    bound = families.qwen2(config).bind(specs | beside)
    assert bound.leaves.keys() == families.qwen2(config).bind(specs).leaves.keys()
    with pytest.raises(MappingError, match="no rule uses tensor 'image_oldline'"):
        families.qwen2(config).bind(specs | {"image_oldline": ((4,), np.float32)})


def nearest(model_type):
    with pytest.raises(MappingError, match="no ready mapping for model_type") as caught:
        families.mapping({"model_type": model_type})
    calls = re.findall(r"osl\.families\.(\w+)\(config, model_type=(.+?)\)", str(caught.value))
    assert {said for _, said in calls} == {repr(model_type)}
    return [family for family, _ in calls]


def test_every_name_that_is_not_known_gets_its_nearest_families():
    with pytest.raises(MappingError) as caught:
        families.mapping({})
    known = re.findall(r"\w+", str(caught.value).partition("one of ")[2].partition(")")[0])
    names = [name for name in CONFIG_MAPPING_NAMES if name not in known]
    assert len(names) > 100
    for name in (*names, "gemma5", "kimi_k25", "X", "日本", "a" * 30):
        found = nearest(name)
        assert len({*found}) == 3
        assert all(callable(getattr(families, family)) for family in found)
    assert nearest("kimi_k25")[0] == "deepseek_v3"  # which is `kimi_k2`
    assert nearest("gemma5")[0].startswith("gemma")
    assert nearest("falcon_mamba")[0] == "mamba2"
    assert nearest("olmoe")[0].startswith("olmo")
    with pytest.raises(MappingError, match=r"function of osl\.families; else"):
        families.mapping({})
    with pytest.raises(MappingError, match=r"nearest by name are osl\.families"):
        families.mapping({"model_type": "a" * 100_000})


def test_options_that_are_not_there(saved):
    with pytest.raises(TypeError, match="unknown option 'scanned'"):
        families.mapping(saved["llama"].config, scanned=True)


def test_configurations_that_cannot_be_read(saved, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"config.json"):
        families.mapping(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"no folder .*llamma' either") as caught:
        families.mapping("llamma")
    assert caught.value.file == f"{os.getcwd()}/llamma/config.json"
    assert "The nearest families are 'llama'" in str(caught.value)
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(StorageError, match=r"config.json.*found: a pipe"):
            families.mapping(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="not a JSON object"):
        families.mapping(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="cannot read a configuration"):
        families.mapping(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(saved["llama"].config))
    for path in (tmp_path / "config.json", tmp_path):  # there are no weights yet
        assert repr(families.mapping(path)) == repr(families.mapping(saved["llama"].config))


def test_index_only(saved):
    """The plain tree and Tunix's compute nothing, of any family."""
    counts = collections.Counter()
    for name, target, scan in CASES:
        folder = saved[name].folder
        expressions = families.mapping(folder, target=target, scan=scan).bind(folder).expressions
        whole = all(index_only(x.pull_back(Box.whole(x.shape))) for x in expressions.values())
        counts[target, whole] += 1
        computes = ("llama", "mistral", "mixtral", "gemma2", "gemma3", "gemma4", "deepseek_v4")
        assert whole == (target != "maxtext" or family_of(name) not in computes)
    assert counts["plain", False] == counts["tunix", False] == 0


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
def test_a_mixture_whose_layers_are_all_dense_has_no_experts(target):
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "mlp_only_layers": [0, 1],
        "hidden_size": 8, "intermediate_size": 12, "vocab_size": 16, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
    }  # fmt: skip
    leaves = [str(rule.target) for rule in families.mapping(config, target=target).rules]
    assert any("mlp" in leaf for leaf in leaves)
    assert not [leaf for leaf in leaves if "expert" in leaf or "moe" in leaf or "router" in leaf]


@pytest.mark.parametrize("name", ["llama", "llama3", "llama_biased", "mistral", "qwen2", "qwen3"])
def test_logits_of_the_plain_tree(saved, name, tmp_path):
    """A JAX model of the plain tree and torch's give equal logits."""
    folder, config, tensors, model = make(name, tmp_path, dtype="float32")
    bound = families.mapping(folder, target="plain").bind(folder)
    params = {leaf: evaluate(expression, tensors) for leaf, expression in bound.expressions.items()}
    tokens = np.random.default_rng(0).integers(0, 96, (2, 11))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(params, tokens, config), expected, rtol=2e-4, atol=2e-4)
