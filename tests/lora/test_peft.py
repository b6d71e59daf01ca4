"""Adapters of PEFT against a merge of whole arrays in numpy, and against PEFT itself."""

from __future__ import annotations

import json
import math
import os
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import fingerprint

PREFIX = "base_model.model."
Q, K = "model.layers.0.q_proj", "model.layers.1.q_proj"
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def random(*shape, dtype=F32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def adapter(folder, tensors, **config):
    """A folder as PEFT writes it."""
    os.makedirs(folder, exist_ok=True)
    full = {PREFIX + name: value for name, value in tensors.items()}
    safetensors.numpy.save_file(full, f"{folder}/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    with open(f"{folder}/adapter_config.json", "w") as file:
        json.dump(config, file)
    return str(folder)


def base_of(folder, tensors):
    osl.save(folder, tensors)
    return str(folder)


def low_rank(module, outputs, inputs, rank=2, dtype=F32, seed=1):
    return {
        f"{module}.lora_A.weight": random(rank, inputs, dtype=dtype, seed=seed),
        f"{module}.lora_B.weight": random(outputs, rank, dtype=dtype, seed=seed + 1),
    }


def change(lora, module, scale):
    a, b = (lora[f"{module}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    return (b @ a * scale).astype(F32)


def plus(base, delta):
    return (base.astype(F32) + delta).astype(base.dtype)


def sharded(shape, dtype, *spec):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)  # fmt: skip
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_save_and_load_are_inverses_and_write_what_peft_writes(tmp_path):
    lora = low_rank(Q, 12, 8)
    osl.peft.save(tmp_path / "out", lora, config={"r": 2, "lora_alpha": 3, "target_modules": ["q"]})
    assert sorted(os.listdir(tmp_path / "out")) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    stored = safetensors.numpy.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(stored) == {PREFIX + name for name in lora}
    loaded = osl.peft.load(tmp_path / "out")
    assert loaded.keys() == lora.keys()
    for name, value in lora.items():
        assert_same_bits(loaded[name], value)
    assert osl.peft.config(tmp_path / "out")["peft_type"] == "LORA"
    leaf = f"{Q}.lora_A.weight"
    tree = osl.peft.load(tmp_path / "out", {leaf: sharded((2, 8), F32, None, "a")})
    assert_same_bits(np.asarray(tree[leaf]), lora[leaf])
    with pytest.raises(osl.CheckpointExistsError):
        osl.peft.save(tmp_path / "out", lora, config={"r": 2})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("spec", [(), ("a", "b"), ("b",), (None, ("a", "b"))], ids=str)
def test_any_sharding_gives_the_same_values(tmp_path, dtype, spec):
    weights = {f"{Q}.weight": random(12, 8, dtype=dtype), "norm.weight": random(8)}
    lora = low_rank(Q, 12, 8)
    base = base_of(tmp_path / "base", weights)
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", lora), base=base)
    tree = {f"{Q}.weight": sharded((12, 8), dtype, *spec), "norm.weight": sharded((8,), F32)}
    loaded = osl.load(base, tree, mapping=mapping)
    assert_same_bits(
        np.asarray(loaded[f"{Q}.weight"]), plus(weights[f"{Q}.weight"], change(lora, Q, 1.5))
    )
    assert_same_bits(np.asarray(loaded["norm.weight"]), weights["norm.weight"])


def test_patterns_rslora_and_stacked_layers_of_which_not_all_have_a_change(tmp_path):
    weights = {f"model.layers.{i}.q_proj.weight": random(6, 4, seed=i) for i in range(3)}
    lora = low_rank(Q, 6, 4, rank=4) | low_rank("model.layers.2.q_proj", 6, 4)
    path = adapter(
        tmp_path / "lora", lora, use_rslora=True,
        rank_pattern={"layers.0.q_proj": 4}, alpha_pattern={r"layers\.[12]\.q_proj": 7},
    )  # fmt: skip
    stacked = osl.stack(osl.tensor("model.layers.{i}.q_proj.weight").transpose(), over="i", axis=1)
    mapping = osl.peft.merge(osl.Mapping([osl.rule("q", stacked)]), path)
    loaded = osl.load(base_of(tmp_path / "base", weights), mapping=mapping)["q"]
    merged = list(weights.values())
    merged[0] = plus(merged[0], change(lora, Q, 3 / math.sqrt(4)))
    merged[2] = plus(merged[2], change(lora, "model.layers.2.q_proj", 7 / math.sqrt(2)))
    assert_same_bits(loaded, np.stack([weight.T for weight in merged], 1))


def test_patterns_are_searched_once_for_a_module(tmp_path, monkeypatch):
    lora = low_rank(Q, 8, 6) | low_rank(K, 8, 6)
    base = base_of(tmp_path / "base", {f"{name}.weight": random(8, 6) for name in (Q, K)})
    patterns = {f"layers.{n}.k_proj": 2 for n in range(20)}
    path = adapter(tmp_path / "lora", lora, rank_pattern=patterns, alpha_pattern=patterns)
    merged = osl.peft.merge(None, path, base=base)
    first = merged.bind(base).expressions
    monkeypatch.setattr(re, "finditer", lambda *_: pytest.fail("searched again"))
    assert merged.bind(base).expressions == first


@pytest.mark.parametrize("shape", [(8, 12), (8, 8)])
def test_weights_that_have_inputs_first(tmp_path, shape):
    """A shape tells where it can; else the configuration does."""
    weights = {f"{Q}.weight": random(*shape)}
    lora = low_rank(Q, shape[1], shape[0])
    path = adapter(tmp_path / "lora", lora, fan_in_fan_out=shape[0] == shape[1])
    base = base_of(tmp_path / "base", weights)
    loaded = osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    expected = plus(weights[f"{Q}.weight"], change(lora, Q, 1.5).T)
    assert_same_bits(loaded[f"{Q}.weight"], expected)


@pytest.mark.parametrize(
    ("flag", "square", "others"),
    [
        (False, "attn.c_proj", {"lm_head": (12, 8)}),  # GPT-2, or GPTBigCode
        (True, "encoder.query", {"attn.c_attn": (8, 24)}),  # a Linear beside Conv1D layers
        (False, "q_proj", {"k_proj": (8, 12)}),
        (True, "q_proj", {"k_proj": (12, 8)}),
    ],
)
def test_square_weights_whose_layout_the_configuration_does_not_tell(
    tmp_path, flag, square, others
):
    weights = {f"{square}.weight": random(8, 8), f"{square}.bias": random(8)}
    lora = low_rank(square, 8, 8)
    for name, shape in others.items():
        weights[f"{name}.weight"] = random(*shape)
        lora |= low_rank(name, max(shape), min(shape))
    base = base_of(tmp_path / "base", weights)
    path = adapter(tmp_path / "lora", lora, fan_in_fan_out=flag)
    with pytest.raises(osl.MappingError, match="fan_in_fan_out does not hold") as error:
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    assert "transposed=" in str(error.value)
    assert "Take the base" not in str(error.value)
    for patterns in ((), [f"*{square}"]):
        mapping = osl.peft.merge(None, path, base=base, transposed=patterns)
        delta = change(lora, square, 1.5)
        expected = plus(weights[f"{square}.weight"], delta.T if patterns else delta)
        assert_same_bits(osl.load(base, mapping=mapping)[f"{square}.weight"], expected)


@pytest.mark.parametrize(
    ("flag", "names", "shape"),
    [
        (False, ("attn.c_proj", "mlp.c_proj"), (16, 8)),  # those of one kind tell
        (True, ("attn.c_proj", "mlp.c_proj"), (8, 16)),
        (False, ("q_proj", "k_proj"), (4, 8)),
        (False, ("c_proj", "w1"), (16, 8)),  # without a bias, a Linear
    ],
)
def test_square_weights_whose_layout_others_tell(tmp_path, flag, names, shape):
    square, other = names
    outputs, inputs = (8, 16) if other == "mlp.c_proj" else shape
    weights = {f"{square}.weight": random(8, 8), f"{other}.weight": random(*shape)}
    if square == "attn.c_proj":
        weights[f"{square}.bias"] = random(8)
    lora = low_rank(square, 8, 8) | low_rank(other, outputs, inputs)
    base = base_of(tmp_path / "base", weights)
    path = adapter(tmp_path / "lora", lora, fan_in_fan_out=flag)
    loaded = osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    delta = change(lora, square, 1.5)
    is_transposed = other == "mlp.c_proj" and shape == (16, 8)
    expected = plus(weights[f"{square}.weight"], delta.T if is_transposed else delta)
    assert_same_bits(loaded[f"{square}.weight"], expected)


def test_embeddings_biases_and_modules_to_save(tmp_path):
    weights = {
        "model.embed.weight": random(10, 6),
        f"{Q}.weight": random(6, 6),
        f"{Q}.bias": random(6),
        f"{K}.bias": random(6, seed=3),
        "head.weight": random(10, 6, seed=5, dtype=BF16),
    }
    lora = low_rank(Q, 6, 6) | {
        "model.embed.lora_embedding_A": random(2, 10),
        "model.embed.lora_embedding_B": random(6, 2),
        f"{Q}.lora_B.bias": random(6, seed=7),
        f"{K}.bias": random(6, seed=9),
        "head.modules_to_save.weight": random(12, 6, seed=11),
        "score.weight": random(2, 6, seed=13),
    }
    base = base_of(tmp_path / "base", weights)
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", lora), base=base)
    loaded = osl.load(base, mapping=mapping)
    a, b = (lora[f"model.embed.lora_embedding_{x}"].astype(np.float64) for x in "AB")
    expected = {
        "model.embed.weight": plus(weights["model.embed.weight"], ((b @ a).T * 1.5).astype(F32)),
        f"{Q}.weight": plus(weights[f"{Q}.weight"], change(lora, Q, 1.5)),
        f"{Q}.bias": plus(weights[f"{Q}.bias"], lora[f"{Q}.lora_B.bias"] * F32.type(1.5)),
        f"{K}.bias": lora[f"{K}.bias"],
        "head.weight": lora["head.modules_to_save.weight"].astype(BF16),
        "score.weight": lora["score.weight"],
    }
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(loaded[name], value)


@pytest.mark.parametrize("spec", [("a", "b"), (None, "a")], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_dora_takes_norms_of_whole_rows_on_any_shard(tmp_path, spec, transposed):
    weight = random(12, 8)
    lora = low_rank(Q, 12, 8) | {f"{Q}.lora_magnitude_vector": random(12) ** 2}
    merged = plus(weight, change(lora, Q, 1.5))
    norms = np.sqrt((merged.astype(np.float64) ** 2).sum(1)).astype(F32)
    merged *= (lora[f"{Q}.lora_magnitude_vector"] / norms)[:, None]
    if transposed:
        weight, merged = np.ascontiguousarray(weight.T), merged.T
    base = base_of(tmp_path / "base", {f"{Q}.weight": weight})
    path = adapter(tmp_path / "lora", lora, use_dora=True)
    leaf = sharded(weight.shape, F32, *spec)
    mapping = osl.peft.merge(None, path, base=base)
    loaded = osl.load(base, {f"{Q}.weight": leaf}, mapping=mapping)
    np.testing.assert_allclose(np.asarray(loaded[f"{Q}.weight"]), merged, rtol=3e-7)


def experts_change(lora, module, experts, scale, layout):
    a, b = (lora[f"{module}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(len(b), -1, experts)
    return (np.einsum(f"ore,eri->{layout}", b, a) * scale).astype(F32)


@pytest.mark.parametrize("targets", ["q_proj", ["q_proj"]], ids=str)
@pytest.mark.parametrize("head", ["mlp.experts.", ""])  # "" for modules that are targets
@pytest.mark.parametrize("layout", ["eoi", "eio"])
def test_experts_that_are_one_tensor(tmp_path, layout, head, targets):
    experts, up, hidden = 3, 10, 8
    module = "model.layers.0.mlp.experts"
    gate = low_rank(f"{module}.base_layer", up, hidden, rank=2 * experts)
    down = low_rank(module, hidden, up // 2, rank=2 * experts, seed=5)
    shapes = {"gate_up_proj": (up, hidden), "down_proj": (hidden, up // 2)}
    if layout == "eio":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    weights = {f"{module}.{name}": random(experts, *shape) for name, shape in shapes.items()}
    weights[f"{Q}.weight"] = random(12, 8)
    parameters = [f"{head}down_proj", f"{head}gate_up_proj"]
    lora = gate | down | low_rank(Q, 12, 8)
    path = adapter(
        tmp_path / "lora", lora, target_parameters=parameters, target_modules=targets
    )  # fmt: skip
    base = base_of(tmp_path / "base", weights)
    mapping = osl.peft.merge(None, path, base=base)
    loaded = osl.load(
        base,
        {name: sharded(value.shape, F32, None, "a", "b") for name, value in weights.items()
         if value.ndim == 3 and not any(n % 2 for n in value.shape[1:])}
        | {name: value for name, value in weights.items()
           if value.ndim == 2 or any(n % 2 for n in value.shape[1:])},
        mapping=mapping,
    )  # fmt: skip
    expected = plus(weights[f"{Q}.weight"], change(lora, Q, 1.5))
    assert_same_bits(loaded[f"{Q}.weight"], expected)
    parts = ("gate_up_proj", gate, f"{module}.base_layer"), ("down_proj", down, module)
    for name, lora, of in parts:
        expected = weights[f"{module}.{name}"] + experts_change(lora, of, experts, 1.5, layout)
        np.testing.assert_allclose(
            np.asarray(loaded[f"{module}.{name}"]), expected, rtol=3e-7, atol=1e-6
        )


def test_parameters_whose_order_in_the_model_is_not_known_are_refused(tmp_path):
    """Wrappers are nested in that order, so changes would be those of other weights."""
    module, experts = "mlp.experts", 2
    lora = low_rank(module, 6, 6, rank=2 * experts)
    lora |= low_rank(f"{module}.base_layer", 6, 6, rank=2 * experts)
    names = ["mlp.experts.w1", "mlp.experts.v1"]
    base = base_of(tmp_path / "base", {name: random(experts, 6, 6) for name in names})
    path = adapter(tmp_path / "lora", lora, target_parameters=names)
    with pytest.raises(
        osl.MappingError, match=r"order in the model is not known.*merge_and_unload"
    ):
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))


def test_a_configuration_has_sets_as_peft_does(tmp_path):
    config = {"r": 2, "lora_alpha": 4, "target_modules": {"v_proj", "q_proj"}}
    osl.peft.save(tmp_path / "a", low_rank(Q, 6, 4), config=config)
    said = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert said["target_modules"] == ["q_proj", "v_proj"]
    with pytest.raises(osl.InvalidArgumentError, match=r"config\['layers'\] has no form in"):
        osl.peft.save(tmp_path / "b", low_rank(Q, 6, 4), config=config | {"layers": object()})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("gate", "up"), [("gate_proj", "up_proj"), ("w1", "w3")])
def test_fused_experts_of_a_base_that_stores_each_by_itself(tmp_path, gate, up):
    experts, half, hidden = 3, 5, 8
    module = "model.layers.0.mlp.experts"
    lora = low_rank(module, 2 * half, hidden, rank=2 * experts)
    path = adapter(tmp_path / "lora", lora, target_parameters=["mlp.experts.gate_up_proj"])
    weights = {
        f"{module}.{e}.{part}.weight": random(half, hidden, seed=e)
        for e in range(experts)
        for part in (gate, up)
    }
    base = base_of(tmp_path / "base", weights)
    delta = experts_change(lora, module, experts, 1.5, "eoi")
    rule = osl.rule("up", osl.stack(osl.tensor(f"{module}.{{e}}.{up}.weight"), over="e"))
    both = osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    alone = osl.load(
        base, mapping=osl.peft.merge(osl.Mapping([rule], ignore=f"*{gate}.weight"), path)
    )["up"]
    for e in range(experts):
        for part, rows in ((gate, slice(half)), (up, slice(half, None))):
            name = f"{module}.{e}.{part}.weight"
            np.testing.assert_allclose(both[name], weights[name] + delta[e, rows], atol=1e-6)
    np.testing.assert_array_equal(
        alone, np.stack([both[f"{module}.{e}.{up}.weight"] for e in range(experts)])
    )


def test_square_experts_have_to_be_told(tmp_path):
    experts, hidden, module = 3, 8, "mlp.experts"
    lora = low_rank(module, hidden, hidden, rank=2 * experts)
    weight = random(experts, hidden, hidden)
    base = base_of(tmp_path / "base", {f"{module}.down_proj": weight})
    path = adapter(tmp_path / "lora", lora, target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(osl.MappingError, match="is square"):
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    with pytest.raises(osl.MappingError, match=r"which no module .* 'mlp.experts.down_proj'"):
        osl.peft.merge(None, path, base=base, transposed=["*.expert.*"])
    for patterns, layout in (((), "eoi"), (["*.experts.*"], "eio")):
        mapping = osl.peft.merge(None, path, base=base, transposed=patterns)
        expected = weight + experts_change(lora, module, experts, 1.5, layout)
        np.testing.assert_allclose(
            osl.load(base, mapping=mapping)[f"{module}.down_proj"], expected, atol=1e-6
        )


def test_square_experts_that_the_base_stores_by_themselves_have_to_be_told(tmp_path):
    """Gate and up together are square, as PEFT sees them in one tensor."""
    experts, half, module = 3, 4, "mlp.experts"
    lora = low_rank(module, 2 * half, 2 * half, rank=2 * experts)
    weights = {
        f"{module}.{e}.{part}.weight": random(half, 2 * half, seed=e)
        for e in range(experts)
        for part in ("gate_proj", "up_proj")
    }
    base = base_of(tmp_path / "base", weights)
    path = adapter(tmp_path / "lora", lora, target_parameters=["mlp.experts.gate_up_proj"])
    for patterns, problem in ((None, "is square"), (["*.experts.*"], "stored each by itself")):
        with pytest.raises(osl.MappingError, match=problem):
            osl.load(base, mapping=osl.peft.merge(None, path, base=base, transposed=patterns))
    new = adapter(
        tmp_path / "new",
        lora,
        target_parameters=["mlp.experts.gate_up_proj"],
        peft_version="0.19.0.dev0@abc",
    )
    delta = experts_change(lora, module, experts, 1.5, "eoi")
    for merged in (
        osl.peft.merge(None, path, base=base, transposed=()),
        osl.peft.merge(None, new, base=base),
    ):
        loaded = osl.load(base, mapping=merged)
        for e in range(experts):
            for part, rows in (("gate_proj", slice(half)), ("up_proj", slice(half, None))):
                name = f"{module}.{e}.{part}.weight"
                np.testing.assert_allclose(loaded[name], weights[name] + delta[e, rows], atol=1e-6)


@pytest.mark.parametrize("spec", [("a", "b"), (None, "a")], ids=str)
def test_quantised_bases_are_decoded_first(tmp_path, spec):
    weight = (random(16, 8) * 50).astype(ml_dtypes.float8_e4m3fn)
    scale = np.abs(random(4, 2)) + F32.type(0.5)
    base = base_of(tmp_path / "base", {f"{Q}.weight": weight, f"{Q}.weight_scale_inv": scale})
    plain = osl.dequantize_block(
        osl.tensor(f"{Q}.weight"), osl.tensor(f"{Q}.weight_scale_inv"), block=(4, 4)
    )
    lora = low_rank(Q, 16, 8)
    path = adapter(tmp_path / "lora", lora)
    rules = osl.Mapping([osl.rule("q", plain)])
    decoded = osl.load(base, mapping=rules)["q"]
    tree = {"q": sharded((16, 8), BF16, *spec)}
    merged = osl.load(base, tree, mapping=osl.peft.merge(rules, path))["q"]
    assert_same_bits(np.asarray(merged), plus(decoded, change(lora, Q, 1.5)))
    with pytest.raises(osl.MappingError, match="decodes"):
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))


@pytest.mark.parametrize(
    ("table", "more", "config", "refused"),
    [
        ("model.embed_tokens", {}, {}, True),
        ("model.embed_tokens", {}, {"modules_to_save": None}, False),  # of a larger vocabulary
        ("model.embed_tokens", {}, {"task_type": "SEQ_CLS"}, False),
        ("model.embed_tokens", {"lm_head.weight": random(10, 6, seed=3)}, {}, False),
        ("embed_tokens", {}, {}, False),  # a model without a head
        ("model.embed_positions", {}, {"modules_to_save": ["embed_positions"]}, False),
    ],
)
def test_a_trained_embedding_of_a_model_with_tied_ones(tmp_path, table, more, config, refused):
    weights = {f"{table}.weight": random(10, 6), f"{Q}.weight": random(6, 4), **more}
    lora = low_rank(Q, 6, 4) | {f"{table}.weight": random(10, 6, seed=9)}
    config = {"modules_to_save": ["embed_tokens"], **config}
    base = base_of(tmp_path / "base", weights)
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", lora, **config), base=base)
    if refused:
        with pytest.raises(osl.MappingError, match="modules_to_save"):
            osl.load(base, mapping=mapping)
    else:
        loaded = osl.load(base, mapping=mapping)
        assert_same_bits(loaded[f"{table}.weight"], lora[f"{table}.weight"])


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({"model_type": "gemma"}, True),  # as its class has it
        ({"model_type": "gemma", "tie_word_embeddings": False}, False),
        ({"model_type": "other", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, True),
        ({"model_type": "llama"}, False),
        (None, False),
    ],
)
def test_a_stored_head_changes_as_the_embedding_where_the_configuration_ties_them(
    tmp_path, config, is_tied
):
    table, head = "model.embed_tokens", "lm_head.weight"
    weights = {f"{table}.weight": random(10, 6), head: random(10, 6)}
    base = base_of(tmp_path / "base", weights)
    if config is not None:
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    lora = {f"{table}.lora_embedding_A": random(2, 10), f"{table}.lora_embedding_B": random(6, 2)}
    merged = osl.peft.merge(None, adapter(tmp_path / "lora", lora), base=base)
    loaded = osl.load(base, mapping=merged)
    a, b = (lora[f"{table}.lora_embedding_{x}"].astype(np.float64) for x in "AB")
    expected = plus(weights[head], ((b @ a).T * 1.5).astype(F32))
    assert_same_bits(loaded[f"{table}.weight"], expected)
    assert_same_bits(loaded[head], expected if is_tied else weights[head])


def test_two_adapters_add_up(tmp_path):
    weight = random(6, 4)
    one, two = low_rank(Q, 6, 4), low_rank(Q, 6, 4, seed=5)
    base = base_of(tmp_path / "base", {f"{Q}.weight": weight})
    mapping = osl.peft.merge(None, adapter(tmp_path / "one", one), base=base)
    mapping = osl.peft.merge(mapping, adapter(tmp_path / "two", two))
    expected = plus(plus(weight, change(one, Q, 1.5)), change(two, Q, 1.5))
    assert_same_bits(osl.load(base, mapping=mapping)[f"{Q}.weight"], expected)


def test_a_shard_reads_its_part_of_the_base_alone(tmp_path):
    base = base_of(tmp_path / "base", {f"{Q}.weight": random(64, 64)})
    path = adapter(tmp_path / "lora", low_rank(Q, 64, 64))
    mapping = osl.peft.merge(None, path, base=base)
    bound = mapping.bind(base).expressions[f"{Q}.weight"]
    box = Box((3, 5), (40, 9))
    (piece,) = bound.pull_back(box)
    assert [needed for _, needed in piece.inputs] == [box]
    tree = {f"{Q}.weight": sharded((64, 64), F32, "a", "b")}
    plan = osl.plan_load(base, tree, mapping=mapping)
    assert plan.needed_bytes == 64 * 64 * 4


def test_merged_mappings_are_equal_in_every_process(tmp_path):
    base = base_of(tmp_path / "base", {f"{Q}.weight": random(6, 4)})
    path = adapter(tmp_path / "lora", low_rank(Q, 6, 4))
    first, again = (fingerprint(osl.peft.merge(None, path, base=base)) for _ in range(2))
    other = adapter(tmp_path / "other", low_rank(Q, 6, 4), use_rslora=True)
    assert first == again != fingerprint(osl.peft.merge(None, other, base=base))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, "'lora_ga', which changes the base's weights"),
        ({"target_parameters": ["up", "down"]}, "tensors of 1 parameters of"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"r": 3}, "the rank is not 3"),
        ({"r": None}, "no rank and alpha"),
        *(
            ({"lora_alpha": alpha}, "no rank and alpha")
            for alpha in (math.nan, math.inf, True, 10**400, -(10**400), "3")
        ),
        ({"r": 10**400}, "no rank and alpha"),
        ({"alpha_pattern": {"q_proj": math.nan}}, "no rank and alpha"),
        ({"rank_pattern": {"(a": 2}}, "regular expression '(a' of"),
        ({"target_modules": "(a"}, "regular expression '(a' of"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path, config, expected):
    base = base_of(tmp_path / "base", {f"{Q}.weight": random(6, 4)})
    path = adapter(tmp_path / "lora", low_rank(Q, 6, 4), **config)
    with pytest.raises(osl.SafetensorsLayoutError) as error:
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"lora_B.weight": random(6)}, "fewer than two axes"),
        ({"lora_A.weight": random(2)}, "fewer than two axes"),
        ({"lora_A.weight": np.array(1, F32)}, "fewer than two axes"),
        ({"lora_B.weight": np.array(1, F32)}, "fewer than two axes"),
        ({"lora_B.weight": random(6, 2, 3)}, "the rank is not 2"),
        ({"lora_magnitude_vector": random(1)}, "magnitudes are not those of 6 outputs"),
        ({"lora_magnitude_vector": random(4)}, "magnitudes are not those of 6 outputs"),
        ({"lora_magnitude_vector": random(12)}, "magnitudes are not those of 6 outputs"),
    ],
)
def test_tensors_of_other_shapes_are_refused(tmp_path, tensors, expected):
    """Those of another module look at these, too, to know what is [in, out]."""
    modules = [Q, "model.embed"]
    base = base_of(tmp_path / "base", {f"{name}.weight": random(6, 4) for name in modules})
    for name in modules:
        own = {f"{name}.{part}": value for part, value in tensors.items()}
        path = adapter(tmp_path / name, low_rank(Q, 6, 4) | low_rank("model.embed", 6, 4) | own)
        with pytest.raises(osl.MappingError, match=f"'{name}.weight': .*{expected}"):
            osl.load(base, mapping=osl.peft.merge(None, path, base=base))


@pytest.mark.parametrize("size", [1, 5, 10])
def test_magnitudes_of_an_embedding_are_those_of_its_outputs(tmp_path, size):
    base = base_of(tmp_path / "base", {"embed.weight": random(10, 6)})
    lora = {
        "embed.lora_embedding_A": random(2, 10),
        "embed.lora_embedding_B": random(6, 2),
        "embed.lora_magnitude_vector": random(6),
    }
    osl.load(base, mapping=osl.peft.merge(None, adapter(tmp_path / "fits", lora), base=base))
    lora["embed.lora_magnitude_vector"] = random(size)
    path = adapter(tmp_path / "lora", lora)
    with pytest.raises(osl.MappingError, match="magnitudes are not those of 6 outputs"):
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))


def test_experts_have_no_magnitudes(tmp_path):
    name = "model.layers.0.mlp.experts"
    base = base_of(tmp_path / "base", {f"{name}.up": random(2, 6, 4)})
    lora = low_rank(name, 6, 4, rank=4) | {f"{name}.lora_magnitude_vector": random(6)}
    path = adapter(tmp_path / "lora", lora, target_parameters=["mlp.experts.up"])
    with pytest.raises(osl.MappingError, match="magnitudes are not those of experts"):
        osl.load(base, mapping=osl.peft.merge(None, path, base=base))


@pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
def test_tensors_of_less_than_a_byte_an_element_are_refused(tmp_path, code):
    path = adapter(tmp_path / "lora", low_rank(Q, 6, 4))
    name = f"{PREFIX}{Q}.lora_A.weight"
    header = {name: {"dtype": code, "shape": [2, 4], "data_offsets": [0, 4 if code == "F4" else 6]}}
    text = json.dumps(header).encode()
    file = tmp_path / "lora" / "adapter_model.safetensors"
    file.write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(header[name]["data_offsets"][1])
    )
    with pytest.raises(osl.FormatError, match=rf"{file}, tensor: '{name}', .*found: {code}"):
        osl.peft.merge(osl.Mapping([]), path)


UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp"
    r"|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)?\.?(?:(?:k_proj|v_proj|q_proj|down_proj)))"
)


@pytest.mark.parametrize("pattern", [UNSLOTH, r"^(?!.*(?:visual|patch)).*(?:q|k)_proj.*", "q_proj"])
def test_regular_expressions_that_programs_write_are_taken(tmp_path, pattern):
    weight, lora = random(6, 4), low_rank(Q, 6, 4)
    base = base_of(tmp_path / "base", {f"{Q}.weight": weight})
    path = adapter(tmp_path / "lora", lora, target_modules=pattern, alpha_pattern={pattern: 7})
    loaded = osl.load(base, mapping=osl.peft.merge(None, path, base=base))
    assert_same_bits(loaded[f"{Q}.weight"], plus(weight, change(lora, Q, 3.5)))


def test_tensors_that_no_rule_takes_are_an_error_and_can_be_renamed(tmp_path):
    weight, lora = random(6, 4), low_rank(f"language_model.{Q}", 6, 4)
    base = base_of(tmp_path / "base", {f"{Q}.weight": weight})
    path = adapter(tmp_path / "lora", lora)
    with pytest.raises(osl.MappingError, match="rename="):
        osl.peft.merge(None, path, base=base)
    mapping = osl.peft.merge(
        None, path, base=base, rename=lambda name: name.removeprefix("language_model.")
    )
    expected = plus(weight, change(lora, f"language_model.{Q}", 1.5))
    assert_same_bits(osl.load(base, mapping=mapping)[f"{Q}.weight"], expected)
    with pytest.raises(osl.MappingError, match="base's folder"):
        osl.peft.merge(None, path)


def test_a_merged_mapping_does_not_save(tmp_path):
    base = base_of(tmp_path / "base", {f"{Q}.weight": random(6, 4)})
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", low_rank(Q, 6, 4)), base=base)
    with pytest.raises(osl.MappingError, match="does not invert"):
        osl.save(tmp_path / "out", osl.load(base, mapping=mapping), mapping=mapping)


@pytest.mark.parametrize("scheme", ["mxfp4", "int4"])
def test_the_plain_name_of_a_quantised_weight_counts(tmp_path, scheme):
    """Packed ones of GPT-OSS have their outputs first, unlike its plain ones, also where square."""
    rng, rank, module = np.random.default_rng(3), 2, "model.layers.0.mlp.experts"
    if scheme == "mxfp4":
        weights = {
            f"{module}.gate_up_proj_blocks": rng.integers(0, 256, (3, 64, 2, 16), dtype=np.uint8),
            f"{module}.gate_up_proj_scales": rng.integers(120, 130, (3, 64, 2), dtype=np.uint8),
        }
        lora = low_rank(module, 64, 64, rank=rank * 3)
        delta = experts_change(lora, module, 3, 1.5, "eoi")
        expr = osl.dequantize_mxfp4(*map(osl.tensor, weights), dtype="float32")
    else:
        weights = {
            f"{Q}.weight_packed": rng.integers(-(2**31), 2**31, (8, 8), dtype=np.int32),
            f"{Q}.weight_scale": random(8, 2),
        }
        lora = low_rank(Q, 8, 64)
        delta = change(lora, Q, 1.5)
        expr = osl.dequantize_int4(*map(osl.tensor, weights), dtype="float32")
    base = base_of(tmp_path / "base", weights)
    mapping = osl.Mapping([osl.rule("w", expr.transpose())])
    path = adapter(tmp_path / "lora", lora, target_parameters=["mlp.experts.gate_up_proj"])
    merged = osl.load(base, mapping=osl.peft.merge(mapping, path))["w"]
    decoded = osl.load(base, mapping=mapping)["w"]
    np.testing.assert_allclose(merged, plus(decoded, delta.transpose()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (32, 64)])  # a square one shows no layout
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_bases_of_gptq_and_awq_are_outputs_first_once_they_are_decoded(
    tmp_path, method, shape, dora
):
    rng, (outputs, inputs) = np.random.default_rng(4), shape
    words = (inputs // 8, outputs) if method == "gptq" else (inputs, outputs // 8)
    weights = {
        f"{Q}.qweight": rng.integers(-(2**31), 2**31, words, dtype=np.int32),
        f"{Q}.qzeros": np.full((inputs // 16, outputs // 8), 0x34567765, np.int32),
        f"{Q}.scales": np.abs(random(inputs // 16, outputs)).astype(np.float16),
    }
    base = base_of(tmp_path / "base", weights)
    said = {"quant_method": method, "bits": 4, "group_size": 16}
    (tmp_path / "base" / "config.json").write_text(json.dumps({"quantization_config": said}))
    mapping = osl.dequantized(base, dtype="float32")
    (decoded,) = jax.tree.leaves(osl.load(base, mapping=mapping))
    lora = low_rank(Q, outputs, inputs)
    expected = plus(decoded, change(lora, Q, 1.5))
    if dora:
        lora[f"{Q}.lora_magnitude_vector"] = random(outputs) ** 2
        norms = np.sqrt((expected.astype(np.float64) ** 2).sum(1)).astype(F32)
        expected *= (lora[f"{Q}.lora_magnitude_vector"] / norms)[:, None]
    path = adapter(tmp_path / "lora", lora, use_dora=dora)
    (merged,) = jax.tree.leaves(osl.load(base, mapping=osl.peft.merge(mapping, path)))
    np.testing.assert_allclose(np.asarray(merged), expected, rtol=3e-7)


@pytest.mark.parametrize("target", ["plain", "maxtext"])
def test_ready_mappings_take_adapters(tmp_path, target):
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16,
        "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": random(16, 8), "model.norm.weight": random(8)}
    weights["lm_head.weight"] = random(16, 8, seed=4)
    shapes = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
              "self_attn.o_proj": (8, 8), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8),
              "mlp.down_proj": (8, 12), "input_layernorm": (8,),
              "post_attention_layernorm": (8,)}  # fmt: skip
    for i in range(2):
        for n, (name, shape) in enumerate(shapes.items()):
            weights[f"model.layers.{i}.{name}.weight"] = random(*shape, seed=10 * i + n)
    modules = ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"]
    lora = low_rank(modules[0], 8, 12) | low_rank(modules[1], 8, 8, seed=6)
    mapping = osl.families.mapping(config, target=target)
    merged = osl.peft.merge(mapping, adapter(tmp_path / "lora", lora))
    loaded = osl.load(base_of(tmp_path / "base", weights), mapping=merged)
    for module in modules:
        name = f"{module}.weight"
        weights[name] = plus(weights[name], change(lora, module, 1.5))
    expected = osl.load(base_of(tmp_path / "merged", weights), mapping=mapping)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(loaded[name], value)


def test_a_conversion_takes_a_merged_mapping(tmp_path):
    weight, lora = random(64, 32), low_rank(Q, 64, 32)
    base = base_of(tmp_path / "base", {f"{Q}.weight": weight})
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", lora), base=base)
    osl.convert(base, tmp_path / "out", format="hf", mapping=mapping)
    merged = osl.load(tmp_path / "out")[f"{Q}.weight"]
    assert_same_bits(merged, plus(weight, change(lora, Q, 1.5)))
