"""Ties of ready mappings, and what is refused, against transformers itself."""

from __future__ import annotations

import functools
import itertools
import json
import re

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from sampling import every

pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.torch
import torch
import transformers
from family_models import DIMS, copy, make, read_one
from mapping_expressions import specs_of
from meshes import mesh_of
from transformers import CONFIG_MAPPING, AutoConfig

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.mapping import families
from orbax_safetensors_layout.mapping.families.dims import dims_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

FLAGS = list(itertools.product((None, True, False), repeat=2))


def nested(outer, text, tied, inner_tied):
    """A configuration with the flags that are not None."""
    config = {"model_type": outer, "text_config": {"model_type": text, **DIMS}}
    for part, flag in ((config, tied), (config["text_config"], inner_tied)):
        if flag is not None:
            part["tie_word_embeddings"] = flag
    return config


@pytest.mark.parametrize(
    "text", every(2, ["gemma3_text", "qwen2"])
)  # inner flags: true, false by default
def test_outer_and_inner_flags_as_transformers_reads_them(text):
    """The outer flag never counts, in all models that take any text model, but for VibeVoice."""
    if not transformers.__version__.startswith(("5.23.", "5.24.")):
        pytest.skip("knows the models of transformers 5.23 and 5.24")
    kinds = set()
    for outer in set(CONFIG_MAPPING) - {"vibevoice"}:
        for flags in FLAGS:
            config = nested(outer, text, *flags)
            try:
                theirs = AutoConfig.for_model(**nested(outer, text, *flags))
            except Exception:  # of models that are not nested
                break
            if type(getattr(theirs, "text_config", None)) is not CONFIG_MAPPING[text]:
                break
            expected = getattr(theirs, "tie_word_embeddings", False)
            assert dims_of(text.removesuffix("_text"), config).tied == expected, (outer, flags)
            kinds.add(outer)
    assert len(kinds) > 50


HEADS = ("absent", "same", "other")


def with_head(source, target, prefix, head):
    """The folder with no head, a copy of the embedding as head, or a head of its own."""
    name = prefix.removesuffix("model.") + "lm_head.weight"
    name = "lm_head.weight" if prefix.startswith("model.") else name
    embedding = read_one(source, f"{prefix}embed_tokens.weight")
    more = {"same": embedding.clone(), "other": torch.randn(embedding.shape).to(embedding.dtype)}
    return copy(source, target, without=[name], more={name: more[head]} if head in more else {})


def array(tensor):
    return tensor.detach().float().numpy()


def check_against(model, folder, make_mapping, head):
    """Loads give what transformers computes with, or refuse it by name."""
    theirs, embedding = array(model.lm_head.weight), array(model.get_input_embeddings().weight)
    default, untied = make_mapping(folder), make_mapping(folder, untie=True)
    if head == "other":
        assert not np.array_equal(theirs, embedding)
    if head == "other" and "lm_head.kernel" not in default.leaf_facts(folder):
        with pytest.raises(MappingError, match=r"lm_head.weight'\) is not a copy of .*untie=True"):
            osl.load(folder, mapping=default)
    else:
        tree = osl.load(folder, mapping=default)
        assert_same_bits(np.asarray(tree["embed_tokens.embedding"], np.float32), embedding)
        head_values = (
            tree["lm_head.kernel"].T if "lm_head.kernel" in tree else tree["embed_tokens.embedding"]
        )
        assert_same_bits(np.asarray(head_values, np.float32), theirs)
    tree = osl.load(folder, mapping=untied)
    assert_same_bits(np.asarray(tree["lm_head.kernel"].T, np.float32), theirs)
    assert_same_bits(np.asarray(tree["embed_tokens.embedding"], np.float32), embedding)


def check_logits(model, folder, make_mapping):
    """The head that is loaded is the one that transformers makes logits with."""
    kernel = osl.load(folder, mapping=make_mapping(folder, untie=True))["lm_head.kernel"]
    tokens = torch.arange(8)[None] + 3
    with torch.no_grad():
        states = model.model(input_ids=tokens).last_hidden_state.numpy()
        logits = model(input_ids=tokens).logits.numpy()
    text = model.config.get_text_config()
    scale = getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
    ours = states @ np.asarray(kernel) * scale
    if cap := getattr(text, "final_logit_softcapping", None):
        ours = np.tanh(ours / cap) * cap
    np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-4)


WITH_HEADS = """
    llama3 mistral qwen2 qwen3 gemma2 gemma3 mixtral qwen3_moe deepseek_v3 gpt_oss deepseek_v2
    deepseek_v32 glm4_moe olmo2 olmo3 phi3 granite granitemoehybrid starcoder2 cohere cohere2
    gemma3n gemma4 llama4 qwen2_moe qwen3_next qwen3_5 qwen3_5_moe
"""


@pytest.mark.parametrize(
    ("name", "tied"), every(5, itertools.product(WITH_HEADS.split(), (True, False)))
)
def test_heads_of_files_as_transformers_takes_them(tmp_path, name, tied):
    saved = make(name, tmp_path / "made", dtype="float32", tie_word_embeddings=tied)
    for head in HEADS:
        folder = with_head(saved.folder, tmp_path / head, "model.", head)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        if not tied and head == "absent":
            assert report["missing_keys"] == {"lm_head.weight"}
            for untie in (False, True):
                with pytest.raises(MappingError, match=r"there is no tensor 'lm_head.weight'"):
                    families.mapping(folder, untie=untie).abstract(folder)
        else:
            check_against(model, folder, families.mapping, head)
            check_logits(model, folder, families.mapping)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_models_without_a_head(tmp_path, name):
    """`architectures` names such a class; of any other an output kernel that lacks is an error."""
    model = make(name, tmp_path / "made")
    body = tmp_path / "body"
    model.model.model.save_pretrained(body)
    config = json.loads((body / "config.json").read_text())
    assert config["architectures"] == [type(model.model.model).__name__]
    assert not config["tie_word_embeddings"]
    for given in (body, config):
        mapping = families.mapping(given, prefix="")
        tree = osl.load(body, mapping=mapping)
        assert "lm_head.kernel" not in tree
        expected = families.mapping(model.folder).leaf_facts(model.folder)
        assert set(tree) == set(expected) - {"lm_head.kernel"}
    osl.save(tmp_path / "back", tree, mapping=families.mapping(body))
    (tmp_path / "back" / "config.json").write_text(json.dumps(config))
    _, report = transformers.AutoModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values())
    for classes in (None, [type(model.model).__name__]):
        (body / "config.json").write_text(json.dumps(config | {"architectures": classes}))
        with pytest.raises(MappingError, match=r"no tensor 'lm_head.weight'.*architectures"):
            families.mapping(body)
    # Files that have one count more than the name of a class.
    untied = families.mapping(config_in(model.folder, architectures=["LlamaModel"]))
    assert "lm_head.kernel" in untied.leaf_facts(model.folder)


def config_in(folder, **changes):
    """The folder, with changes in its configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
NESTED = {
    "gemma3": ("gemma3", "gemma3_text", {"mm_tokens_per_image": 4, "vision_config": VISION}),
    "mistral3": (
        "mistral",
        "mistral",
        {"vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION}},
    ),
    "internvl": (
        "qwen2",
        "qwen2",
        {"vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
}


def make_nested(outer, folder, tied, inner_tied):
    _, text, more = NESTED[outer]
    config = transformers.AutoConfig.for_model(**nested(outer, text, tied, inner_tied), **more)
    config.text_config.head_dim = 8
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    return folder


def prefix_of(folder):
    (name,) = [n for n in osl.metadata(folder) if n.endswith("embed_tokens.weight")]
    return name.removesuffix("embed_tokens.weight")


@pytest.mark.parametrize("outer", NESTED)
def test_nested_flags_and_heads_against_logits(tmp_path, outer):
    make_mapping = getattr(families, NESTED[outer][0])
    for tied, inner_tied in itertools.product((True, False), repeat=2):
        nested_model = make_nested(outer, tmp_path / f"{tied}{inner_tied}", tied, inner_tied)
        for head in HEADS:
            folder = tmp_path / f"{tied}{inner_tied}{head}"
            with_head(nested_model, folder, prefix_of(nested_model), head)
            model, report = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, output_loading_info=True
            )
            if not tied and head == "absent":
                assert report["missing_keys"] == {"lm_head.weight"}
                with pytest.raises(MappingError, match=r"there is no tensor '.*lm_head.weight'"):
                    make_mapping(folder).abstract(folder)
                continue
            check_against(model, folder, make_mapping, head)
            check_logits(model, folder, make_mapping)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return make("qwen2", tmp_path_factory.mktemp("qwen2")).folder


def sharded(tree, mesh=None):
    mesh = mesh or mesh_of(x=4, y=2)

    def leaf(x):
        spec = P("x", "y") if len(x.shape) == 2 and not (x.shape[0] % 4 or x.shape[1] % 2) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, tree)


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
@pytest.mark.parametrize("head", HEADS)
def test_heads_are_saved_back(qwen2, tmp_path, target, head):
    """With `like`: the files' own bits, under every kind of head."""
    folder = with_head(qwen2, tmp_path / "files", "model.", head)
    mapping = families.mapping(folder, target=target, untie=head == "other")
    tree = osl.load(folder, sharded(mapping.abstract(folder)), mapping=mapping)
    osl.save(tmp_path / "back", tree, mapping=mapping.like(folder))
    expected, loaded = osl.load(folder), osl.load(tmp_path / "back")
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        assert_same_bits(np.asarray(loaded[name]), np.asarray(value))


@pytest.mark.parametrize("like", [True, False])
@pytest.mark.parametrize("head", ["absent", "same"])
def test_a_head_that_was_trained_is_saved(qwen2, tmp_path, like, head):
    folder = with_head(qwen2, tmp_path / "files", "model.", head)
    mapping = families.mapping(folder, untie=True)
    tree = osl.load(folder, mapping=mapping)
    trained = np.asarray(tree["lm_head.kernel"]) * 2
    tree["lm_head.kernel"] = trained
    saving = mapping.like(folder) if like else mapping
    osl.save(tmp_path / "out", tree, mapping=saving)
    (tmp_path / "out" / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same_bits(array(model.lm_head.weight), trained.T.astype(np.float32))
    again = osl.load(tmp_path / "out", mapping=families.mapping(tmp_path / "out", untie=True))
    assert_same_bits(np.asarray(again["lm_head.kernel"]), trained)


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
@pytest.mark.parametrize("row", [0, 41, 95])
def test_one_bit_that_differs_is_found_in_its_shard(qwen2, tmp_path, target, row):
    embedding = read_one(qwen2, "model.embed_tokens.weight")
    head = embedding.clone()
    head[row, 31] *= -1
    folder = copy(qwen2, tmp_path / "files", more={"lm_head.weight": head})
    mapping = families.mapping(folder, target=target)
    abstract = sharded(mapping.abstract(folder))
    for call in (
        functools.partial(osl.load, folder, mapping=mapping),
        functools.partial(osl.load, folder, abstract, mapping=mapping),
        functools.partial(osl.convert, folder, tmp_path / "out", mapping=mapping),
    ):
        with pytest.raises(MappingError, match="is not a copy of"):
            call()
    own = families.mapping(folder, target=target, untie=True)
    osl.load(folder, sharded(own.abstract(folder)), mapping=own)


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_head_is_not_dropped_with_the_embedding(qwen2, tmp_path, target, whole):
    """Nothing compares them where the embedding is left out, by its name or with all beside it."""
    folder = with_head(qwen2, tmp_path / "files", "model.", "other")
    mapping = families.mapping(folder, target=target)
    tree = leave_out(mapping.abstract(folder), whole)
    for call in (osl.load, osl.plan_load):
        with pytest.raises(MappingError, match=r"is left out.*lm_head.weight.*untie=True"):
            call(folder, tree, mapping=mapping)
        call(qwen2, tree, mapping=mapping)  # has no head
    untied = families.mapping(folder, target=target, untie=True)
    osl.load(folder, leave_out(untied.abstract(folder), whole), mapping=untied)


def leave_out(tree, whole):
    """The tree without its embedding."""
    for name, value in tree.items():
        if name in ("embed_tokens.embedding", "embed_tokens", "embedder", "token_embedder"):
            tree[name] = ... if whole else jax.tree.map(lambda _: ..., value)
        elif isinstance(value, dict):
            leave_out(value, whole)
    return tree


def test_heads_of_another_shape_or_dtype_than_the_embedding(qwen2):
    mapping, specs = families.mapping(qwen2), dict(specs_of(osl.load(qwen2)))
    shape, dtype = specs["model.embed_tokens.weight"]
    for other in (((90, 32), dtype), (shape, np.dtype(np.float32))):
        with pytest.raises(MappingError, match="is not a copy of"):
            mapping.abstract(specs | {"lm_head.weight": other})


def test_each_process_compares_what_it_loads(qwen2, tmp_path):
    """A comparison reads as much of the head as of the embedding, and no more."""
    folder = with_head(qwen2, tmp_path / "files", "model.", "same")
    costs = []
    for path in (qwen2, folder):
        mapping = families.mapping(path)
        abstract = sharded(mapping.abstract(path), AbstractMesh((4, 2), ("x", "y")))
        plan = osl.plan_load(path, abstract, mapping=mapping, process_index=1, process_count=8)
        costs.append(plan.cost().needed_bytes)
    assert costs[1] - costs[0] == 96 * 32 * 2 // 8


def open_again(folder, saved):
    (saved / "config.json").write_bytes((folder / "config.json").read_bytes())
    return transformers.AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)


def test_vision_is_not_lost_without_a_word(tmp_path):
    folder = make_nested("gemma3", tmp_path / "gemma3", True, True)
    mapping = families.mapping(folder)
    with pytest.raises(MappingError, match=r"would lack .* tensors.*vision_tower.*leave_out="):
        mapping.like(folder)
    for name in ("out", "other"):  # a mapping of the folder, and one of its configuration alone
        config = json.loads((folder / "config.json").read_text())
        ready = mapping if name == "out" else families.mapping(config)
        with pytest.raises(MappingError, match=r"would lack tensors.*vision_tower.*leave_out="):
            osl.save(tmp_path / name, osl.load(folder, mapping=mapping), mapping=ready)
        assert not (tmp_path / name).exists()
    saving = mapping.like(folder, leave_out=["*vision_tower.*", "*multi_modal_projector.*"])
    osl.save(tmp_path / "text", osl.load(folder, mapping=mapping), mapping=saving)
    text, whole = osl.load(tmp_path / "text"), osl.load(folder)
    assert {name for name in whole if "vision" not in name and "multi_modal" not in name} == set(
        text
    )
    for name, value in text.items():
        assert_same_bits(np.asarray(value), np.asarray(whole[name]))
    osl.convert(folder, tmp_path / "orbax", mapping=mapping)
    back = [
        "convert",
        tmp_path / "orbax",
        tmp_path / "back",
        "--mapping",
        "auto",
        "--config",
        folder,
    ]
    assert main([*map(str, back), "--quiet"]) == 1
    left_out = ("--leave-out", "*vision_tower.*", "--leave-out", "*multi_modal_projector.*")
    assert main([*map(str, back), *left_out, "--quiet"]) == 0
    assert osl.verify(tmp_path / "back", tmp_path / "text").ok
    vision = osl.load(folder, only=["*vision_tower.*", "*multi_modal_projector.*"])
    osl.save(tmp_path / "both", text | vision)
    _, report = open_again(folder, tmp_path / "both")
    assert not any(report.values())


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_tied_model_of_which_save_model_keeps_the_head(tmp_path, name):
    """`safetensors.torch.save_model` says in the metadata which name it left out."""
    saved = make(name, tmp_path / "made", dtype="float32", tie_word_embeddings=True)
    folder = tmp_path / "folder"
    saved.model.config.save_pretrained(folder)
    safetensors.torch.save_model(saved.model, str(folder / "model.safetensors"))
    assert "model.embed_tokens.weight" not in osl.load(folder)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values())
    check_against(model, folder, families.mapping, "same")
    check_logits(model, folder, families.mapping)


OTHER_HEADS = {
    "ForSequenceClassification": ("score.weight", {"num_labels": 1}),
    "ForTokenClassification": ("score.weight", {"num_labels": 3}),
    "ForQuestionAnswering": ("qa_outputs.weight", {}),
}


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [*itertools.product(["Qwen2"], OTHER_HEADS), ("Gemma3Text", "ForSequenceClassification")],
)
def test_another_head_is_named_and_can_be_taken_by_a_rule(tmp_path, prefix, kind):
    head, more = OTHER_HEADS[kind]
    config = getattr(transformers, f"{prefix}Config")(**DIMS, **more, head_dim=8, pad_token_id=0)
    model = getattr(transformers, prefix + kind)(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(MappingError, match=rf"another head .*'{head}'") as caught:
        families.mapping(tmp_path)
    text = str(caught.value)
    assert "problems" not in text
    before = re.search("prefix='(.*?)'", text)[1]  # as the hint says
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    names = [name for name in osl.load(tmp_path) if not name.startswith(before)]
    rules = families.mapping(config, prefix=before).rules
    rules = [*rules, *(osl.rule(name, osl.tensor(name)) for name in names)]
    tree = osl.load(tmp_path, mapping=osl.Mapping(rules))
    assert_same_bits(tree[head], array(model.state_dict()[head]))
    expected = array(model.get_input_embeddings().weight)
    assert_same_bits(tree["embed_tokens.embedding"], expected)


def test_the_head_of_a_reward_model_whose_class_is_called_a_model(tmp_path, qwen2):
    heads = {f"score.{n}.{part}": torch.ones(1, 32) for n in (0, 2) for part in ("weight", "bias")}
    folder = copy(qwen2, tmp_path / "reward", without=["lm_head.weight"], more=heads)
    config_in(folder, architectures=["Qwen2ForRewardModel"])
    with pytest.raises(MappingError, match=r"another head .*'score.2.weight'"):
        families.mapping(folder)


FUSED = [
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "glm4_moe",
    "qwen2_moe",
    "deepseek_v3",
    "qwen3_next",
]


@pytest.mark.parametrize("name", every(3, FUSED))
def test_experts_as_in_memory_are_named_and_saved_again(tmp_path, name):
    saved = make(name, tmp_path / "made")
    saved.model.save_pretrained(tmp_path / "fused", save_original_format=False)
    with pytest.raises(MappingError, match=r"experts of a layer are one tensor") as caught:
        families.mapping(tmp_path / "fused")
    assert "problems" not in str(caught.value)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    copy = type(model)(model.config)  # as the hint says
    copy.load_state_dict(model.state_dict(), assign=True)
    copy.save_pretrained(tmp_path / "copy")
    copied = osl.load(tmp_path / "copy", mapping=families.mapping(tmp_path / "copy"))
    for leaf, value in osl.load(saved.folder, mapping=families.mapping(saved.folder)).items():
        assert_same_bits(np.asarray(copied[leaf], np.float32), np.asarray(value, np.float32))
