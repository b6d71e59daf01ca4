"""Merged models against `merge_and_unload` of PEFT, and adapters that PEFT opens."""

from __future__ import annotations

import pickle
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy
from libraries import need

import orbax_safetensors_layout as osl

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "head_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LINEAR = ["q_proj", "v_proj", "down_proj"]
CASES = {
    "plain": ("LlamaConfig", SMALL, {"target_modules": LINEAR}),
    "rslora": ("LlamaConfig", SMALL, {"target_modules": LINEAR, "use_rslora": True}),
    "patterns": (
        "LlamaConfig", SMALL,
        {"target_modules": LINEAR, "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.down_proj": 1},
         "alpha_pattern": {"layers.0.self_attn.v_proj": 7}},
    ),
    "dora": ("LlamaConfig", SMALL, {"target_modules": LINEAR, "use_dora": True}),
    "embeddings": ("LlamaConfig", SMALL, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embeddings with dora": (
        "LlamaConfig", SMALL, {"target_modules": ["embed_tokens"], "use_dora": True},
    ),
    "modules to save": (
        "LlamaConfig", SMALL, {"target_modules": LINEAR, "modules_to_save": ["lm_head", "norm"]},
    ),
    "bias": (
        "LlamaConfig", {**SMALL, "attention_bias": True},
        {"target_modules": LINEAR[:2], "bias": "all"},
    ),
    "lora_bias": (
        "LlamaConfig", {**SMALL, "attention_bias": True},
        {"target_modules": LINEAR[:2], "lora_bias": True},
    ),
    "inputs first": (
        "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "inputs first, and a head whose flag PEFT writes": (
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "tie_word_embeddings": False},
        {"target_modules": ["c_proj", "lm_head"], "use_dora": True},
    ),
    "fused experts": (
        "GptOssConfig",
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
        {"target_modules": ["q_proj"],
         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "experts stored one by one": (
        "Qwen3MoeConfig", {**SMALL, **EXPERTS},
        {"target_modules": ["q_proj"],
         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "modules of experts, which PEFT calls parameters of one": (
        "Qwen3MoeConfig", {**SMALL, **EXPERTS},
        {"target_modules": ["q_proj", "gate", "gate_proj", "up_proj", "down_proj"]},
    ),
    "experts of Mixtral": (
        "MixtralConfig", {**SMALL, "num_local_experts": 3},
        {"target_modules": ["q_proj", "w1", "w2", "w3"], "modules_to_save": ["gate"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def torch():
    torch = need("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        need("transformers")
        need("peft")
    return torch


def trained(torch, kind, sizes, config, folder):
    """A base and an adapter in folders, with random values; the model of both."""
    import peft
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    model = model.to(torch.float32)
    model.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **config))
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if value.requires_grad:
                value.copy_(torch.randn_like(value) * (0.1 if "lora" in name else 1))
    wrapped.save_pretrained(folder / "lora")
    return wrapped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(torch, tmp_path, case):
    """Each is rounded to float32 once here, and up to three times there."""
    kind, sizes, config = CASES[case]
    wrapped = trained(torch, kind, sizes, config, tmp_path)
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    base = str(tmp_path / "base")
    mapping = osl.peft.merge(None, tmp_path / "lora", base=base)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2],
                         axis_types=(jax.sharding.AxisType.Auto,))  # fmt: skip
    tree = {
        name: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype,
            sharding=jax.sharding.NamedSharding(
                mesh,
                jax.sharding.PartitionSpec(
                    *[None] * (len(spec.shape) - 1), "x" if spec.shape[-1] % 2 == 0 else None
                ),
            ),
        )
        for name, spec in mapping.leaf_facts(base).items()
    }  # fmt: skip
    merged = osl.load(base, tree, mapping=mapping)
    stored = safetensors.numpy.load_file(tmp_path / "base" / "model.safetensors")
    assert merged.keys() == expected.keys()
    changed = 0
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(merged[name]), value, rtol=1e-6, atol=1e-6)
        changed += not np.array_equal(stored[name], merged[name])
    assert changed >= len(config["target_modules"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_embedding_whose_head_stays_the_bases_is_refused(torch, tmp_path, tied):
    """PEFT's merged model has both, of which a mapping of a tied model has one leaf."""
    config = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    sizes = {**SMALL, "tie_word_embeddings": tied}
    model = trained(torch, "LlamaConfig", sizes, config, tmp_path).merge_and_unload()
    head, table = model.lm_head.weight.detach(), model.model.embed_tokens.weight.detach()
    base = str(tmp_path / "base")
    stored = safetensors.numpy.load_file(tmp_path / "base" / "model.safetensors")
    first = stored["model.embed_tokens.weight"]
    np.testing.assert_array_equal(head, first if tied else stored["lm_head.weight"])
    assert not np.array_equal(table, first)
    family = osl.families.mapping(base, target="plain", untie=tied)
    for mapping in (None, family):
        merged = osl.peft.merge(mapping, tmp_path / "lora", base=base)
        if tied:
            with pytest.raises(osl.MappingError, match="no longer tied"):
                osl.load(base, mapping=merged)
        else:
            assert len(osl.load(base, mapping=merged)) == len(osl.load(base, mapping=mapping))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_tied_head_takes_its_change_where_the_embedding_stands_in(torch, tmp_path, is_saved):
    config = {"target_modules": ["q_proj", "lm_head"]}
    sizes = {**SMALL, "tie_word_embeddings": True}
    model = trained(torch, "LlamaConfig", sizes, config, tmp_path)
    model.save_pretrained(tmp_path / "lora", save_embedding_layers=is_saved)
    head = model.base_model.model.lm_head
    table = head.base_layer.weight.detach().numpy()
    expected = table + head.get_delta_weight("default").detach().numpy()
    base = str(tmp_path / "base")
    family = osl.families.mapping(base, target="plain", untie=True)
    loaded = osl.load(base, mapping=osl.peft.merge(family, tmp_path / "lora"))
    np.testing.assert_allclose(loaded["lm_head.kernel"].T, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(loaded["embed_tokens.embedding"], table)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_a_stored_copy_of_a_tied_head_changes_as_the_embedding(torch, tmp_path, dora, tied):
    """PEFT merges into the one tensor of both; a head that is not tied stays as it is."""
    config = {"target_modules": ["embed_tokens", "q_proj"], "use_dora": dora}
    sizes = {**SMALL, "tie_word_embeddings": tied}
    model = trained(torch, "LlamaConfig", sizes, config, tmp_path).merge_and_unload()
    expected = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    base, file = str(tmp_path / "base"), tmp_path / "base" / "model.safetensors"
    stored = safetensors.numpy.load_file(file)
    assert ("lm_head.weight" in stored) != tied
    stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
    safetensors.numpy.save_file(stored, file)
    plain = osl.Mapping([osl.rule(name, osl.tensor(name)) for name in stored])
    for mapping in (None, plain):
        merged = osl.peft.merge(mapping, tmp_path / "lora", base=base)
        loaded = osl.load(base, mapping=pickle.loads(pickle.dumps(merged)))
        flat = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree.leaves_with_path(loaded)
        }
        assert flat.keys() == stored.keys()
        for name, value in flat.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore")
def test_peft_opens_a_saved_adapter(torch, tmp_path):
    import peft
    import transformers

    kind, sizes, config = CASES["plain"]
    wrapped = trained(torch, kind, sizes, config, tmp_path)
    lora = osl.peft.load(tmp_path / "lora")
    changed = {name: jax.numpy.asarray(value) * 2 for name, value in lora.items()}
    osl.peft.save(tmp_path / "again", changed, config=osl.peft.config(tmp_path / "lora"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "again")
    first, again = (dict(peft.get_peft_model_state_dict(model)) for model in (wrapped, opened))
    assert first.keys() == again.keys()
    assert len(again) == len(lora)
    for name, value in again.items():
        np.testing.assert_array_equal(value.detach().numpy(), first[name].detach().numpy() * 2)
