"""`dequantized`: each published format against a decoding of it, written from its description."""

from __future__ import annotations

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from boxes import boxes_in
from checkpoints import assert_same_bits
from hypothesis import given, settings, strategies as st
from mapping_expressions import evaluate
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import inspect
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import affine_pieces, described_rule
from orbax_safetensors_layout.mapping.dequantizing.found_weight import first_target

F32 = np.dtype(np.float32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # AWQ: of each column in its word
ROWS, COLUMNS = 16, 64
LLAMA_NORMS = ("input", "post_attention")
RNG = np.random.default_rng(15)


def floats(*shape):
    return (RNG.random(shape) + 0.5).astype(F32)


def packed(values, bits, axis):
    """Integers as one long number of bits for each row of an axis."""
    moved = np.moveaxis(values, axis, -1)
    count = -(-moved.shape[-1] * bits // 32)
    out = np.empty((*moved.shape[:-1], count), np.uint32)
    for row in np.ndindex(*moved.shape[:-1]):
        number = sum(int(value) << (bits * k) for k, value in enumerate(moved[row]))
        out[row] = [(number >> (32 * k)) & 0xFFFFFFFF for k in range(count)]
    return np.moveaxis(out.view(np.int32), -1, axis)


def nibbles(codes, high=False):
    first, second = codes[..., 0::2], codes[..., 1::2]
    return ((first << 4 | second) if high else (second << 4 | first)).astype(np.uint8)


def repeated(scale, shape):
    for axis, extent in enumerate(shape):
        scale = np.repeat(scale, -(-extent // scale.shape[axis]), axis).take(range(extent), axis)
    return scale


def fp8(scale, name="weight_scale", stored=None, **config):
    weight = RNG.standard_normal((ROWS, COLUMNS)).astype(FP8)
    stored = scale if stored is None else stored
    return (
        {"weight": weight, name: stored},
        weight.astype(F32) * repeated(scale, weight.shape),
        config,
    )


def mxfp8(name="weight_scale", **config):
    scale = RNG.integers(120, 130, (ROWS, COLUMNS // 32)).astype(np.uint8)
    return fp8((2.0 ** (scale.astype(F32) - 127)).astype(F32), name, stored=scale, **config)


def int8():
    weight = RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    scale, zero = floats(ROWS, 1), RNG.integers(-9, 9, (ROWS, 1)).astype(np.int8)
    tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    return tensors, (weight.astype(F32) - zero) * scale, {}


def nvfp4(dialect):
    codes = RNG.integers(0, 16, (ROWS, COLUMNS))
    scale = floats(ROWS, COLUMNS // 16).astype(FP8)
    factor = np.float32(1.7)
    if dialect == "modelopt":
        names, combined = ("weight", "weight_scale_2"), scale.astype(F32) * factor
        extra = {"input_scale": np.float32(3)}
    else:
        names, combined = ("weight_packed", "weight_global_scale"), scale.astype(F32) / factor
        extra = {"input_global_scale": floats(1)}
        factor = np.full(1, factor)
    tensors = {
        names[0]: nibbles(codes),
        "weight_scale": scale,
        names[1]: np.asarray(factor),
        **extra,
    }
    values = np.array(E2M1, F32)[codes]
    return tensors, values * repeated(combined, codes.shape), {}


def nvfp4_with_input_scales():
    """ModelOpt's `NVFP4_AWQ`: a scale multiplies each input of a layer."""
    tensors, values, config = nvfp4("modelopt")
    scale = floats(COLUMNS)
    return tensors | {"pre_quant_scale": scale}, values * scale, config


def mxfp4(dialect):
    codes = RNG.integers(0, 16, (ROWS, COLUMNS))
    scale = RNG.integers(120, 130, (ROWS, COLUMNS // 32)).astype(np.uint8)
    values = np.array(E2M1, F32)[codes] * repeated(2.0 ** (scale.astype(F32) - 127), codes.shape)
    if dialect == "gpt_oss":
        blocks = nibbles(codes).reshape(ROWS, -1, 16)
        return {"weight_blocks": blocks, "weight_scales": scale}, values.astype(F32).T, {}
    return {"weight_packed": nibbles(codes), "weight_scale": scale}, values.astype(F32), {}


def integers(bits, group, zeros=False, order=False, columns=COLUMNS, configured=True):
    codes = RNG.integers(0, 1 << bits, (ROWS, columns))
    groups = columns // group
    scale = floats(ROWS, groups)
    zero = RNG.integers(0, 1 << bits, (ROWS, groups)) if zeros else None
    index = RNG.permutation(np.arange(columns) // group).astype(np.int32)
    index = index if order else np.arange(columns, dtype=np.int32) // group
    tensors = {
        "weight_packed": packed(codes, bits, 1),
        "weight_scale": scale,
        "weight_shape": np.array([ROWS, columns]),
    }
    if zeros:
        tensors["weight_zero_point"] = packed(zero, bits, 0)
    if order:
        tensors["weight_g_idx"] = index
    offset = zero[:, index] if zeros else 1 << (bits - 1)
    values = (codes - offset).astype(F32) * scale[:, index]
    weights = {"num_bits": bits, "group_size": group} if configured else {}
    return tensors, values, {"config_groups": {"group_0": {"weights": weights}}}


def awq(group=16):
    codes = RNG.integers(0, 16, (COLUMNS, ROWS))  # [in, out]
    zero = RNG.integers(0, 16, (COLUMNS // group, ROWS))
    scale = floats(COLUMNS // group, ROWS).astype(np.float16)

    def words(values):
        placed = np.empty_like(values)
        for column in range(values.shape[1]):
            word, k = divmod(column, 8)
            placed[:, word * 8 + PLACE[k]] = values[:, column]
        return packed(placed, 4, 1)

    values = (codes - np.repeat(zero, group, 0)) * np.repeat(scale.astype(F32), group, 0)
    tensors = {"qweight": words(codes), "qzeros": words(zero), "scales": scale}
    return tensors, values.astype(F32).T, {"quant_method": "awq", "bits": 4}


def less_one(zero, bits):
    """As GPTQModel writes version 1: whole words less one for each value that they hold.

    Values of 3 bits are in two words, in part: each is less one by itself, modulo 8.
    """
    if bits == 3:
        return packed((zero - 1) % 8, bits, 1)
    ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
    words = packed(zero, bits, 1).view(np.uint32).astype(np.int64) - ones
    return (words % (1 << 32)).astype(np.uint32).view(np.int32)


def gptq(bits, version, ordered, group=16, columns=COLUMNS):
    codes = RNG.integers(0, 1 << bits, (columns, ROWS))
    zero = RNG.integers(0, 1 << bits, (-(-columns // group), ROWS))
    zero[0, :3] = 0, 0, (1 << bits) - 1
    scale = floats(-(-columns // group), ROWS).astype(np.float16)
    index = np.arange(columns, dtype=np.int32) // group
    index = RNG.permutation(index) if ordered else index
    tensors = {
        "qweight": packed(codes, bits, 0),
        "qzeros": packed(zero, bits, 1) if version == "gptq_v2" else less_one(zero, bits),
        "scales": scale,
        "g_idx": index,
    }
    values = (codes - zero[index]) * scale.astype(F32)[index]
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "desc_act": ordered,
        "checkpoint_format": version,
    }
    return tensors, values.astype(F32).T, config


def bitsandbytes(kind, nested, columns=COLUMNS, block=64):
    codes = RNG.integers(0, 16, (ROWS, columns))
    table = np.sort(RNG.standard_normal(16)).astype(F32)
    count = -(-codes.size // block)
    state = {"quant_type": kind, "blocksize": block, "shape": [ROWS, columns], "dtype": "bfloat16"}
    tensors = {"weight": nibbles(codes.reshape(-1), high=True)[:, None], "weight.quant_map": table}
    if nested:
        offset, inner = np.float32(0.25), np.sort(RNG.standard_normal(256)).astype(F32)
        stored = RNG.integers(0, 256, count).astype(np.uint8)
        outer = floats(-(-count // 256))
        absmax = inner[stored] * np.repeat(outer, 256)[:count] + offset
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner}
        state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
        tensors["weight.absmax"] = stored
    else:
        absmax = tensors["weight.absmax"] = floats(count)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    values = table[codes.reshape(-1)] * np.repeat(absmax, block)[: codes.size]
    return tensors, values.reshape(codes.shape), {"quant_method": "bitsandbytes"}


CASES = {
    "fp8 tensor": lambda: fp8(
        floats(1, 1), stored=np.float32(1.25).reshape(()) * floats(1, 1)[0, 0]
    ),
    "fp8 channel": lambda: fp8(floats(ROWS, 1)),
    "fp8 blocks": lambda: fp8(
        floats(2, 4), config_groups={"g": {"weights": {"block_structure": [8, 16]}}}
    ),
    "fp8 blocks of DeepSeek": lambda: fp8(
        floats(4, 2), "weight_scale_inv", weight_block_size=[4, 32]
    ),
    "mxfp8": mxfp8,
    "mxfp8 of transformers": lambda: mxfp8(
        "weight_scale_inv", quant_method="fp8", weight_block_size=[1, 32]
    ),
    "int8 zero points": int8,
    "nvfp4 modelopt": lambda: nvfp4("modelopt"),
    "nvfp4 compressed-tensors": lambda: nvfp4("compressed-tensors"),
    "nvfp4 modelopt awq": nvfp4_with_input_scales,
    "mxfp4 gpt-oss": lambda: mxfp4("gpt_oss"),
    "mxfp4 compressed-tensors": lambda: mxfp4("compressed-tensors"),
    **{f"pack-quantized {bits}": lambda bits=bits: integers(bits, 16) for bits in range(1, 9)},
    "pack-quantized 4 zero points": lambda: integers(4, 16, zeros=True),
    "pack-quantized 3 zero points and order": lambda: integers(3, 16, zeros=True, order=True),
    "pack-quantized order": lambda: integers(4, 16, order=True),
    "pack-quantized rows": lambda: integers(4, 61, columns=61),
    "pack-quantized without figures": lambda: integers(5, 20, columns=60, configured=False),
    "awq": awq,
    **{
        f"{version} {bits}{' order' * order}": lambda v=version, b=bits, o=order: gptq(b, v, o)
        for version in ("gptq", "gptq_v2")
        for bits, order in ((2, False), (3, True), (4, False), (4, True), (8, False))
    },
    "bitsandbytes nf4": lambda: bitsandbytes("nf4", nested=False),
    "bitsandbytes nf4 nested": lambda: bitsandbytes("nf4", nested=True),
    "bitsandbytes fp4 nested, odd rows": lambda: bitsandbytes("fp4", nested=True, columns=90),
}


def write(folder, tensors, config, model=()):
    folder.mkdir(exist_ok=True)
    ready = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(ready, folder / "model.safetensors")
    said = dict(model) | ({"quantization_config": config} if config or not model else {})
    (folder / "config.json").write_text(json.dumps(said))


def made(case):
    tensors, values, config = CASES[case]()
    if case == "fp8 tensor":
        values = tensors["weight"].astype(F32) * tensors["weight_scale"]
    norm = {"model.norm.weight": floats(5), "model.layers.0.up.bias": floats(ROWS)}
    named = {f"model.layers.0.up.{name}": value for name, value in tensors.items()} | norm
    return named, values, config, norm


@pytest.mark.parametrize("case", ["gptq 4", "gptq_v2 4", "fp8 blocks"])
def test_what_is_said_of_the_text_model(tmp_path, case):
    """`quantization_config` may stand in `text_config`, as transformers reads it there."""
    case = case if case in CASES else next(name for name in CASES if name.startswith("fp8"))
    tensors, values, config, norm = made(case)
    write(tmp_path / "stored", tensors, {}, {"text_config": {"quantization_config": config}})
    mapping = osl.dequantized(tmp_path / "stored", dtype="float32")
    name = "model.layers.0.up.weight"
    osl.convert(tmp_path / "stored", tmp_path / "plain", format="hf", dequantize="float32")
    (leaf,) = (
        leaf
        for path, leaf in jax.tree.leaves_with_path(osl.load(tmp_path / "stored", mapping=mapping))
        if jax.tree_util.keystr(path, simple=True, separator=".") == name
    )
    assert_same_bits(np.asarray(leaf), values)
    assert_same_bits(osl.load(tmp_path / "plain", only=name)[name], values)
    said = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in json.dumps(said)
    assert norm.keys() <= osl.metadata(tmp_path / "plain").keys()
    rotated = {"text_config": {"quantization_config": config | {"transform_config": {"a": 1}}}}
    write(tmp_path / "rotated", tensors, {}, rotated)
    with pytest.raises(osl.MappingError, match="rotations"):
        osl.dequantized(tmp_path / "rotated")


def test_a_weight_that_is_called_a_scale_is_kept(tmp_path):
    """Of Gemma 3n, beside scales of activations, which are none."""
    tensors, _, config, _ = made("gptq 4")
    kept, dropped = "model.layers.0.altup.correct_output_scale", "model.layers.0.up.output_scale"
    tensors |= {kept: floats(8), dropped: floats(1)}
    write(tmp_path, tensors, config)
    leaves = osl.dequantized(tmp_path).leaf_facts(tmp_path)
    assert kept in leaves
    assert dropped not in leaves


def test_scales_of_activations_and_of_caches_are_left_out(tmp_path):
    """Those of transformers' FP8 modules, of their experts, and of what vLLM loads as caches'."""
    experts, stored = "model.layers.0.mlp.experts", {}
    for name in ("gate_up_proj", "down_proj"):
        weight = RNG.standard_normal((2, 8, 8)).astype(FP8)
        stored |= {f"{experts}.{name}": weight, f"{experts}.{name}_scale_inv": floats(2, 1, 1)}
    module = "model.layers.0.self_attn"
    kept = {f"{experts}.router_activation_scale": floats(2), f"{module}.cache_scale": floats(1)}
    left = [f"{experts}.{name}_activation_scale" for name in ("gate_up_proj", "down_proj")]
    left += [
        f"{module}.{name}scale"
        for name in (
            *("activation_", "input_activation_", "output_activation_"),
            *("k_", "kv_", "k_cache_", "v_cache_", "kv_cache_"),
        )
    ]
    left += [f"{module}.q_proj.activation_scale_inv"]
    write(tmp_path, stored | kept | {name: floats(1) for name in left}, {"quant_method": "fp8"})
    leaves = osl.dequantized(tmp_path).leaf_facts(tmp_path)
    assert leaves.keys() == {f"{experts}.gate_up_proj", f"{experts}.down_proj", *kept}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("gptq", {"checkpoint_format": None}),
        ("gptq", {"checkpoint_format": "GPTQ", "format": "gptq_v2"}),
        ("gptq_v2", {"checkpoint_format": None, "format": "GPTQ_V2"}),
        ("gptq_v2", {"checkpoint_format": "gptq_v2", "format": "gptq"}),
        ("gptq", {"quant_method": "auto-round"}),
        ("gptq", {"quant_method": "auto-round", "backend": "auto"}),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
        ("gptq", {"quant_method": "intel/auto-round", "backend": "auto_round:auto_gptq"}),
        ("gptq_v2", {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}),
        ("gptq_v2", {"quant_method": "intel/auto-round", "packing_format": "auto_round"}),
        (
            "gptq_v2",
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:gptqmodel",
                "backend": "auto_round:auto_gptq",
            },
        ),
    ],
)
def test_how_zeros_are_stored_is_what_the_configured_format_says(tmp_path, stored, said):
    tensors, values, config = gptq(4, stored, False)
    named = {f"up.{name}": value for name, value in tensors.items()}
    write(tmp_path, named, {**config, **said})
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path).expressions["up.weight"]
    assert_same_bits(evaluate(bound, named), values)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"checkpoint_format": None, "format": "gptq_v3"}, "format 'gptq_v3'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:other"}, "packing_format"),
        ({"quant_method": "auto-round", "backend": "auto_round:rrq"}, "backend 'auto_round:rrq'"),
    ],
)
def test_a_format_of_zeros_that_is_not_known_is_refused(tmp_path, said, key):
    tensors, _, config = gptq(4, "gptq", False)
    named = {f"up.{name}": value for name, value in tensors.items()}
    write(tmp_path, named, {**config, **said})
    with pytest.raises(osl.MappingError, match=key):
        osl.dequantized(tmp_path)


def test_rules_say_what_their_values_follow_from(tmp_path):
    """By which hosts see that their configurations of the same tensors differ."""
    said = []
    tensors, _, config, _ = made("gptq 4")
    for version in ("gptq", "gptq_v2", "gptq"):
        write(tmp_path, tensors, config | {"checkpoint_format": version})
        rules = osl.dequantized(tmp_path, dtype="float32").rules
        said.append("".join(map(described_rule, rules)))
    assert said[0] == said[2] != said[1]


@pytest.mark.parametrize("case", CASES)
def test_each_format_loads_as_if_it_were_plain(tmp_path, case):
    tensors, values, config, norm = made(case)
    write(tmp_path, tensors, config)
    mapping = osl.dequantized(tmp_path, dtype="float32")
    name = "model.layers.0.up.weight"
    loaded = osl.load(tmp_path, mapping=mapping)
    loaded = {"".join(map(str, path)): leaf for path, leaf in jax.tree.leaves_with_path(loaded)}
    loaded = {key.strip("[']").replace("']['", "."): leaf for key, leaf in loaded.items()}
    assert_same_bits(np.asarray(loaded[name]), values)
    assert_same_bits(np.asarray(loaded["model.norm.weight"]), norm["model.norm.weight"])
    assert set(mapping.leaf_facts(tmp_path)) == {name, *norm}
    rounded = osl.dequantized(tmp_path).bind(tmp_path).expressions[name]
    assert rounded.dtype == ml_dtypes.bfloat16
    assert_same_bits(evaluate(rounded, tensors), values.astype(ml_dtypes.bfloat16))


def llama(case):
    """A layer of a Llama whose `up_proj` is in a format, the plain values of all, and config."""
    tensors, values, config = CASES[case]()
    if case == "fp8 tensor":
        values = tensors["weight"].astype(F32) * tensors["weight_scale"]
    rows, columns = values.shape
    layer = "model.layers.0."
    plain = {
        "model.embed_tokens.weight": floats(12, columns),
        "model.norm.weight": floats(columns),
        "lm_head.weight": floats(12, columns),
        **{f"{layer}{name}_layernorm.weight": floats(columns) for name in LLAMA_NORMS},
        **{f"{layer}self_attn.{name}_proj.weight": floats(columns, columns) for name in "qkvo"},
        f"{layer}mlp.gate_proj.weight": floats(rows, columns),
        f"{layer}mlp.down_proj.weight": floats(columns, rows),
    }
    stored = plain | {f"{layer}mlp.up_proj.{name}": value for name, value in tensors.items()}
    plain[f"{layer}mlp.up_proj.weight"] = values
    model = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": columns,
        "intermediate_size": rows,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 12,
    }
    others = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "v_proj", "lm_head"]
    config = {"quant_method": "compressed-tensors", "modules_to_not_convert": others} | config
    return stored, plain, model, config


@pytest.mark.parametrize("target", ["plain", "maxtext", "tunix"])
@pytest.mark.parametrize("case", CASES)
def test_families_take_each_format(tmp_path, case, target):
    """One projection is quantised, and the others are not: as of the plain model."""
    stored, plain, model, config = llama(case)
    write(tmp_path / "stored", stored, config, model)
    write(tmp_path / "plain", plain, {}, model)
    mapping = osl.families.mapping(tmp_path / "stored", target=target, dtype="float32")
    loaded = osl.load(tmp_path / "stored", mapping=mapping)
    mapping = osl.families.mapping(tmp_path / "plain", target=target, dtype="float32")
    expected = osl.load(tmp_path / "plain", mapping=mapping)
    jax.tree.map(lambda a, b: assert_same_bits(np.asarray(a), np.asarray(b)), loaded, expected)


@pytest.mark.parametrize("case", CASES)
def test_inspect_counts_what_each_format_decodes_to(tmp_path, case):
    tensors, values, config, norm = made(case)
    write(tmp_path, tensors, {"config_groups": {}} | config)
    report = inspect(tmp_path)
    if case != "pack-quantized without figures":  # only the content of `weight_shape` says them
        assert report.total.parameters == values.size + sum(part.size for part in norm.values())
    assert sum(report.quantization.weights.values()) == 1
    assert report.problem is None


@pytest.mark.parametrize("case", CASES)
def test_inspect_shows_what_each_format_decodes_to(tmp_path, capsys, case):
    tensors, values, config, norm = made(case)
    write(tmp_path, tensors, config)
    arguments = ["inspect", str(tmp_path), "--dequantize", "bfloat16"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {t["name"]: (t["dtype"], t["shape"], t["parameters"]) for t in report["tensors"]} == {
        "model.layers.0.up.weight": ("BF16", [*values.shape], values.size),
        **{name: ("F32", [*part.shape], part.size) for name, part in norm.items()},
    }
    assert {file for t in report["tensors"] for file in t["files"]} == {"model.safetensors"}
    assert report["by_dtype"]["BF16"]["nbytes"] == 2 * values.size
    assert report["problem"] is None
    assert main([*arguments, "--filter", "*up*", "--files"]) == 0
    assert "model.layers" not in capsys.readouterr().out


def test_inspect_counts_mixed_recipes(tmp_path):
    tensors, count, groups = {}, 0, {}
    for bits, group in ((8, 16), (4, 16), (6, 16), (3, None)):
        part, values, _ = integers(bits, group or COLUMNS)
        tensors |= {f"layers.{bits}.up.{name}": value for name, value in part.items()}
        groups[f"group_{bits}"] = {"weights": {"num_bits": bits, "group_size": group}}
        count += values.size
    write(tmp_path, tensors, {"quant_method": "compressed-tensors", "config_groups": groups})
    report = inspect(tmp_path)
    assert (report.total.parameters, report.problem) == (count, None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each format, with its tensors and values."""
    folders = {}
    for case in CASES:
        tensors, values, config, _ = made(case)
        write(folder := tmp_path_factory.mktemp("format"), tensors, config)
        bound = osl.dequantized(folder, dtype="float32").bind(folder)
        folders[case] = bound.expressions["model.layers.0.up.weight"], tensors, values
    return folders


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_part_of_each_format(folders, data):
    bound, tensors, values = folders[data.draw(st.sampled_from(sorted(CASES)))]
    box = data.draw(boxes_in(bound.shape))
    assert_same_bits(evaluate(bound, tensors, box, factored=True), values[box.slices])


@pytest.mark.parametrize("case", CASES)
def test_a_shard_needs_its_values_and_their_scales(folders, case):
    bound, tensors, values = folders[case]
    half = Box((0, 0), (values.shape[0] // 2, values.shape[1]))
    if case.startswith(("awq", "gptq", "mxfp4 gpt-oss")):  # stored with inputs first
        half = Box((0, 0), (values.shape[0], values.shape[1] // 2))
    needed = {}
    for piece in affine_pieces(bound.pull_back(half, factored=True)):
        size = np.prod(piece.view.shape, dtype=int)
        needed[piece.source] = needed.get(piece.source, 0) + size
    parts = {name.removeprefix("model.layers.0.up."): size for name, size in needed.items()}
    stored = next(n for n in ("weight_packed", "weight_blocks", "qweight", "weight") if n in parts)
    size = tensors[f"model.layers.0.up.{stored}"].size
    assert parts[stored] <= size / 2 + 1
    for scale in ("weight_scale", "weight_scale_inv", "scales", "weight_scales", "weight.absmax"):
        whole = tensors.get(f"model.layers.0.up.{scale}", np.zeros(()))
        has_order = any(name.endswith("g_idx") for name in parts)
        if scale in parts and whole.size > 8 and not has_order:
            assert parts[scale] <= whole.size / 2 + 1, scale


def test_a_load_reads_the_bytes_that_its_shard_needs(tmp_path):
    rows = 4096
    packed_values = RNG.integers(-(2**31), 2**31, (rows, 256)).astype(np.int32)
    tensors = {
        "up.weight_packed": packed_values,
        "up.weight_scale": floats(rows, 16),
        "up.weight_zero_point": RNG.integers(0, 2**31, (rows // 8, 16)).astype(np.int32),
        "up.weight_shape": np.array([rows, 2048]),
    }
    groups = {"g": {"weights": {"num_bits": 4, "group_size": 128}}}
    write(tmp_path, tensors, {"config_groups": groups})
    mapping = osl.dequantized(tmp_path)
    quarter = mapping.bind(tmp_path).expressions["up.weight"].pull_back(Box((0, 0), (1024, 2048)))
    sizes = {p.source: np.prod(p.view.shape, dtype=int) for p in affine_pieces(quarter)}
    assert sizes == {
        "up.weight_packed": 1024 * 256,
        "up.weight_scale": 1024 * 16,
        "up.weight_zero_point": 128 * 16,
    }
    with recording() as storage:
        osl.load(tmp_path, mapping=mapping)
    read = sum(stop - start for _, start, stop in storage.tensor_ranges())
    assert (
        read == sum(value.nbytes for value in tensors.values()) - tensors["up.weight_shape"].nbytes
    )


def test_recipes_may_be_mixed(tmp_path):
    tensors, values = {}, {}
    for layer, case in enumerate(["fp8 channel", "pack-quantized 4", "awq", "fp8 channel"]):
        part, expected, _, _ = made(case)
        tensors |= {
            name.replace(".0.", f".{layer}."): value
            for name, value in part.items()
            if "up." in name
        }
        values[f"model.layers.{layer}.up.weight"] = expected
    tensors["model.layers.4.up.weight"] = plain = floats(3, 2)
    tensors["model.layers.0.self_attn.k_scale"] = floats(1)
    write(tmp_path, tensors, {"quant_method": "fp8"})
    mapping = osl.dequantized(tmp_path, dtype="float32")
    bound = mapping.bind(tmp_path)
    for name, expected in values.items():
        assert_same_bits(evaluate(bound.expressions[name], tensors), expected)
    assert_same_bits(evaluate(bound.expressions["model.layers.4.up.weight"], tensors), plain)
    assert not any("scale" in name or "packed" in name for name in bound.expressions)


def groups_of_blocks(*groups):
    """A configuration of blocks, each with its targets."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            f"group_{n}": {
                "targets": targets,
                "weights": {"num_bits": 8, "strategy": "block", "block_structure": block},
            }
            for n, (block, targets) in enumerate(groups)
        },
    }


def test_blocks_are_those_that_fit_the_scales_or_that_the_module_is_a_target_of(tmp_path):
    def weight(rows, columns, down, across):
        scale = floats(-(-rows // down), -(-columns // across))
        full = np.repeat(np.repeat(scale, down, 0)[:rows], across, 1)[:, :columns]
        codes = RNG.standard_normal((rows, columns)).astype(FP8)
        return {"": codes, "_scale": scale}, codes.astype(F32) * full

    blocks = {
        "layers.0.fits": (256, 256, 128, 128),
        "layers.1.fits": (256, 256, 64, 64),
        "layers.2.small": (50, 300, 128, 128),
        # two rows of scales, whichever
        "layers.0.up": (192, 128, 96, 128),
        "layers.1.up": (192, 128, 128, 128),
        "layers.2.up": (192, 128, 96, 128),
        "layers.3.up": (192, 128, 100, 128),
    }
    config = groups_of_blocks(
        ([128, 128], ["Linear"]),
        ([64, 64], ["re:.*nothing"]),
        ([96, 128], ["layers.0.up", "re:layers[.][23]"]),
        ([100, 128], ["layers.3.up", "re:yers"]),
    )
    tensors, values = {}, {}
    for name, sizes in blocks.items():
        parts, values[f"{name}.weight"] = weight(*sizes)
        tensors |= {f"{name}.weight{part}": value for part, value in parts.items()}
    write(tmp_path, tensors, config)
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path)
    for name, expected in values.items():
        assert_same_bits(evaluate(bound.expressions[name], tensors), expected)
    for group in ("group_0", "group_2"):  # no target, or one whose blocks do not fit
        config["config_groups"][group]["targets"] = []
    config["config_groups"]["group_1"]["targets"] = ["layers.0.up"]
    write(tmp_path, tensors, config)
    with pytest.raises(osl.MappingError, match=r"'layers.0.up.weight'.* each block of .64, 64."):
        osl.dequantized(tmp_path)
    config["config_groups"]["group_1"]["targets"] = []
    write(tmp_path, tensors, config)
    with pytest.raises(osl.MappingError, match=r"'layers.0.up.weight'.* no target says which"):
        osl.dequantized(tmp_path)


def test_a_malformed_target_is_refused():
    with pytest.raises(osl.MappingError, match=r"regular expression .* of config_groups\.targets"):
        first_target("layers.0.up", ["re:("])


@pytest.mark.parametrize(
    "block", [[96.0, 96.0], "96x96", [96], [96, 0], [96, True], [96, 96, 1], 96, {}, [], "128"]
)
@pytest.mark.parametrize("key", ["weight_block_size", "block_structure"])
def test_blocks_that_are_malformed_are_refused(tmp_path, key, block):
    """Rather than taken as the usual ones."""
    config = {"quant_method": "fp8", "weight_block_size": block}
    if key == "block_structure":
        config = groups_of_blocks((block, []))
    tensors, values, _ = fp8(floats(1, 1), "weight_scale_inv")
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    if (key, block) == ("block_structure", "96x96"):  # as older files have it
        loaded = osl.load(tmp_path, mapping=osl.dequantized(tmp_path, dtype="float32"))
        assert_same_bits(loaded["up.weight"], values)
        return
    with pytest.raises(osl.MappingError, match=f"{key}.* is .*two positive integers"):
        osl.dequantized(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("entries", [8, 15, 17])
def test_tables_have_an_entry_for_each_value(tmp_path, nested, entries):
    tensors, _, config = bitsandbytes("nf4", nested=nested)
    tensors["weight.quant_map"] = tensors["weight.quant_map"].repeat(2)[:entries]
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(osl.MappingError, match=rf"table has shape \[{entries}\].* need \[16\]"):
        osl.dequantized(tmp_path).bind(tmp_path)


def test_values_of_a_table_are_bytes(tmp_path):
    tensors, _, config = bitsandbytes("nf4", nested=True)
    tensors["weight.absmax"] = tensors["weight.absmax"].astype(np.int16) + 300
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(osl.MappingError, match="values of a table are uint8, not int16"):
        osl.dequantized(tmp_path).bind(tmp_path)


@pytest.mark.parametrize("offset", ["NaN", "-Infinity", "1e39", "1" * 400, "true", '"1"'])
def test_offsets_of_nested_scales_are_finite(tmp_path, offset):
    tensors, _, config = bitsandbytes("nf4", nested=True)
    name = "weight.quant_state.bitsandbytes__nf4"
    state = (
        tensors[name]
        .tobytes()
        .replace(b'"nested_offset": 0.25', b'"nested_offset": ' + offset.encode())
    )
    tensors[name] = np.frombuffer(state, np.uint8)
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(osl.MappingError, match=r"'up.weight', .* and the offset"):
        osl.dequantized(tmp_path)


@pytest.mark.parametrize(
    "stored", [np.ones(7, np.uint8), np.array([16, 64], F32), np.ones(3, "i2")]
)
def test_shapes_of_packed_weights_are_integers(tmp_path, stored):
    tensors, *_ = integers(4, 16)
    tensors["weight_shape"] = stored
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, {})
    with pytest.raises(
        osl.MappingError, match=r"'up.weight', .*'up.weight_shape' is not I64 or I32"
    ):
        osl.dequantized(tmp_path)


def test_the_target_that_counts_is_that_of_the_library():
    torch = pytest.importorskip("torch")
    match = pytest.importorskip("compressed_tensors.utils.match")
    targets = ["Linear", "re:.*up", "re:layers", "layers.1.up", "re:yers", "up", "Embedding"]
    module = torch.nn.Linear(1, 1)
    for name in ("layers.0.up", "layers.1.up", "head", "up", "yers"):
        for k in range(len(targets) + 1):
            given = targets[:k]
            theirs = match.match_targets(name, module, given)
            assert first_target(name, given) == (theirs[0] if theirs else None)


def test_layers_of_one_kind_are_one_rule(tmp_path):
    tensors = {}
    for layer in range(30):
        tensors |= {
            name.replace(".0.", f".{layer}."): value for name, value in made("awq")[0].items()
        }
    write(tmp_path, tensors, {"quant_method": "awq"})
    assert len(osl.dequantized(tmp_path).rules) == 3


def method(name):
    return {"quant_method": name}


HALF = np.ones((4, 4), np.float16)
OF_OTHERS = [  # formats of other packages, as their modules name the tensors
    (
        {"codes": np.ones((4, 2, 1), np.int16), "codebooks": HALF, "scales": HALF},
        method("aqlm"),
        r"with 'aqlm', .* 'up.codes' in I16",
    ),
    (
        {"indices": np.ones((1, 4, 4), np.uint16), "centroids.weight": HALF},
        method("vptq"),
        "'up.indices' in U16",
    ),
    ({"weight": np.ones((4, 4), np.int16), "tables": HALF}, method("higgs"), "'up.weight' in I16"),
    (
        {"qweight": np.ones((4, 4), np.int16), "qzeros": HALF, "scales": HALF},
        method("awq") | {"version": "gemv_fast"},
        "'up.qweight' in I16",
    ),
    (
        {"dense_weights": np.ones(9, np.int64), "row_offsets": np.ones(5, np.int32)},
        method("spqr"),
        "'up.row_offsets' in I32",
    ),
    ({"weight": HALF, "pre_quant_scale": HALF[0]}, method("modelopt"), "'up.pre_quant_scale'"),
    ({"weight": HALF, "act.scales": HALF[0]}, method("awq"), "'up.act.scales'"),
    (
        {"weight": np.ones((4, 4), FP8), "weight_scale": HALF[:1, :1], "svdquant_lora_a": HALF},
        method("modelopt"),
        "'up.svdquant_lora_a'",
    ),
    # and without a configuration, by the scales beside them
    ({"W_q": np.ones((4, 4), np.uint8), "scale": HALF, "zero": HALF}, {}, "HQQ .'up.W_q'"),
    ({"weight._data": np.ones((4, 4), np.int8), "weight._scale": HALF}, {}, "'up.weight._data'"),
    ({"weight": np.ones((4, 4), np.uint32), "scales": HALF}, {}, "'up.weight' in U32"),
    ({"codes": np.ones((4, 4, 1), np.int16), "codebooks": HALF}, {}, "'up.codes' in I16"),
]


def test_rotations_that_weights_go_with_are_refused(tmp_path):
    tensors, values, config = fp8(floats(ROWS, 1))
    named = {f"up.{name}": value for name, value in tensors.items()}
    for transforms in (None, {}, {"config_groups": {}}):
        write(tmp_path, named, config | {"transform_config": transforms})
        bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path).expressions["up.weight"]
        assert_same_bits(evaluate(bound, named), values)
    rotation = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    write(tmp_path, named, config | {"transform_config": {"config_groups": {"u": rotation}}})
    with pytest.raises(osl.MappingError, match=r"rotations .* transform_config .*hadamard"):
        osl.dequantized(tmp_path)


def test_buffers_of_integers_are_no_quantised_weights(tmp_path):
    buffers = {
        "attn.relative_position_index": np.ones((4, 4), np.int64),
        "attn.logit_scale": floats(2, 1),
        "vision.position_ids": np.ones((1, 4), np.int64),
    }
    plain = {
        "attn.bias": np.ones((1, 4), np.uint8),
        "table.weight": np.ones((2, 2), np.int32),
        "table.ids": np.ones((2, 2), np.int16),
        "mask.weight": np.ones((2, 2), np.bool_),
    }
    weight = {"up.weight": np.ones((4, 4), FP8), "up.weight_scale": floats(4, 1)}
    for tensors, config in (
        (buffers | plain, {}),
        (buffers, method("bitnet")),  # quantised when it is loaded
        (buffers | weight, method("fp8")),
    ):
        write(tmp_path, tensors, config)
        loaded = osl.dequantized(tmp_path).leaf_facts(tmp_path)
        assert set(loaded) == set(tensors) - {"up.weight_scale"}


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        (
            {"up.weight": np.zeros((4, 4), np.int8), "up.SCB": floats(4)},
            {"quant_method": "bitsandbytes"},
            r"format of bitsandbytes, 8 bits \('up.SCB'\), which is not decoded",
        ),
        ({"up.weight": np.zeros((4, 4), FP8)}, {}, "no known scheme has 'up.weight'"),
        (
            {"up.weight_q": np.zeros((4, 4), np.int8), "up.weight_step": floats(4)},
            {"quant_method": "made_up"},
            r"'up.weight_q', quantised with 'made_up', .* 'up.weight_q' in I8",
        ),
        *(
            ({f"up.{name}": value for name, value in tensors.items()}, config, problem)
            for tensors, config, problem in OF_OTHERS
        ),
        (
            {"up.weight": np.zeros((4, 4), FP8), "up.weight_scale": floats(3)},
            {"quant_method": "fp8"},
            r"scales of shape \[3\] do not fit values of shape \[4, 4\]",
        ),
        (
            {
                "up.weight_packed": np.zeros((4, 24), np.uint8),
                "up.weight_scale": np.zeros((4, 1), "u1"),
            },
            {"format": "mxfp6-pack-quantized"},
            "24 bytes a row and 1 exponents are not four bits",
        ),
        (
            {"up.weight_packed": np.zeros((4, 8), np.int32), "up.weight_scale": floats(4, 1)},
            {"quant_method": "compressed-tensors"},
            "there is no 'up.weight_shape'",
        ),
        (
            {
                "up.weight_packed": np.zeros((4, 12), np.int32),
                "up.weight_scale": floats(4, 2),
                "up.weight_shape": np.array([4, 96]),
            },
            {"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 64}}}},
            "1 rows and 48 columns, .* 1 rows and 64 columns",  # compressed-tensors refuses it, too
        ),
        (
            {"up.qweight": np.zeros((5, 8), np.int32), "up.scales": floats(2, 8)},
            {"quant_method": "gptq"},
            "there is no 'up.qzeros'",
        ),
        (
            {
                "up.weight": np.zeros((4, 1), np.uint8),
                "up.weight.absmax": floats(1),
                "up.weight.quant_map": floats(16),
                "up.weight.quant_state.bitsandbytes__nf4": np.frombuffer(b"[]", np.uint8),
            },
            {},
            "is not what bitsandbytes writes",
        ),
    ],
)
def test_what_is_not_known_is_an_error_that_names_it(tmp_path, tensors, config, problem):
    write(tmp_path, tensors, config)
    with pytest.raises(osl.MappingError, match=problem) as caught:
        osl.dequantized(tmp_path)
    assert "up." in str(caught.value)
    assert re.search(r"osl.opaque|Put the quantization_config", str(caught.value))
    with pytest.raises(osl.MappingError, match="floating-point"):
        osl.dequantized(tmp_path, dtype="int8")


def test_groups_that_are_not_there(tmp_path):
    tensors, *_, config = integers(4, 16, order=True)
    tensors["weight_g_idx"][3] = 9
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(osl.MappingError, match="g_idx"):
        osl.load(tmp_path, mapping=osl.dequantized(tmp_path))


@pytest.mark.parametrize("dtype", [np.int8, FP8])
@pytest.mark.parametrize("zeros", [False, True])
def test_unpacked_values_in_groups_of_an_index(tmp_path, dtype, zeros):
    group = 16
    weight = RNG.integers(-100, 100, (ROWS, COLUMNS)).astype(F32).astype(dtype)
    scale, index = floats(ROWS, COLUMNS // group), RNG.permutation(np.arange(COLUMNS) // group)
    zero = RNG.integers(-9, 9, scale.shape).astype(np.int8)
    tensors = {"weight": weight, "weight_scale": scale, "weight_g_idx": index.astype(np.int32)}
    values = weight.astype(F32)
    if zeros:
        tensors["weight_zero_point"] = zero if dtype == np.int8 else zero.astype(FP8)
        values = values - (zero[:, index] if dtype == np.int8 else 0)
    config = {"config_groups": {"group_0": {"weights": {"group_size": group, "num_bits": 8}}}}
    named = {f"up.{name}": value for name, value in tensors.items()}
    write(tmp_path, named, config)
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path).expressions["up.weight"]
    for box in (None, Box((1, 20), (9, 50))):
        part = () if box is None else (box,)
        expected = values * scale[:, index]
        assert_same_bits(
            evaluate(bound, named, *part), expected if box is None else expected[box.slices]
        )
    named["up.weight_scale"] = floats(ROWS // 4, COLUMNS // group)
    write(tmp_path, named, {"weight_block_size": [4, group], **method("fp8")})
    with pytest.raises(osl.MappingError, match=r"g_idx.*beside scales of no groups|do not fit"):
        osl.dequantized(tmp_path)


def test_a_plan_has_each_tensor_once(tmp_path):
    """However many blocks it is read in."""
    tensors = {
        "up.weight": np.ones((2048, 4096), FP8),
        "up.weight_scale_inv": floats(16, 32),
    }
    write(tmp_path, tensors, {"weight_block_size": [128, 128], **method("fp8")})
    mapping = osl.dequantized(tmp_path, dtype="float32")
    options = osl.ReadOptions(memory_budget_bytes=1 << 22)
    tree = {"up.weight": jax.ShapeDtypeStruct((2048, 4096), np.float32)}
    plan = osl.plan_load(tmp_path, tree, mapping=mapping, options=options)
    assert len(plan.leaves) > 2
    assert plan.cost().tensors == 2
    rows = [line.split()[:-2] for line in str(plan).splitlines()[1:3]]
    assert rows == [
        ["up.weight", "[2048,", "4096]", "F8_E4M3"],
        ["up.weight", "[16,", "32]", "F32"],
    ]


def test_words_that_do_not_hold_values_of_the_configured_bits(tmp_path):
    tensors, *_ = integers(8, COLUMNS)
    config = {"config_groups": {"group_0": {"weights": {"num_bits": 7}}}}
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(osl.MappingError, match=f"do not hold {COLUMNS} values of 7 bits"):
        osl.dequantized(tmp_path)


def test_an_order_that_was_never_set_is_that_of_the_columns(tmp_path):
    tensors, values, config = integers(4, 16)
    tensors["weight_g_idx"] = np.full(COLUMNS, -1, np.int32)
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, config)
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path).expressions["up.weight"]
    named = {f"up.{name}": value for name, value in tensors.items()}
    box = Box((1, 20), (9, 50))
    assert_same_bits(evaluate(bound, named, box), values[box.slices])


@pytest.mark.parametrize(
    ("ordered", "stored"),
    [(False, True), (False, False), (False, []), (False, [0] * 96), (True, True)],
)
def test_groups_of_gptq_are_those_of_its_index_or_of_the_configured_size(tmp_path, ordered, stored):
    tensors, values, config = gptq(4, "gptq", ordered, group=64, columns=96)
    if stored is not True:
        tensors["g_idx"] = np.array(stored or [], np.int32)
    if stored is False:
        del tensors["g_idx"]
    named = {f"up.{name}": value for name, value in tensors.items()}
    # vLLM takes the order of the columns where `desc_act` is false, the torch kernels the index.
    write(tmp_path, named, {**config, "desc_act": False, "group_size": 64})
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path).expressions["up.weight"]
    for box in (Box((0, 0), values.shape), Box((1, 50), (9, 90)), Box((0, 0), (4, 1))):
        assert_same_bits(evaluate(bound, named, box, factored=True), values[box.slices])
    write(tmp_path, named, {**config, "group_size": 32})
    with pytest.raises(osl.MappingError, match="96 inputs are not 2 groups of the configured"):
        osl.dequantized(tmp_path)


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_conversion_to_a_plain_checkpoint(tmp_path, format):
    tensors, values, config, norm = made("awq")
    write(tmp_path / "quantised", tensors, config)
    command = ["convert", tmp_path / "quantised", tmp_path / "plain", "--format", format]
    assert main([*map(str, command), "--dequantize", "float32", "--quiet"]) == 0
    if format == "hf":
        stored = safetensors.numpy.load_file(tmp_path / "plain" / "model.safetensors")
        assert_same_bits(stored["model.layers.0.up.weight"], values)
        assert stored.keys() == {"model.layers.0.up.weight", *norm}
        assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {}
    with pytest.raises(osl.InvalidArgumentError, match="no mapping"):
        osl.convert(
            tmp_path / "quantised",
            tmp_path / "other",
            mapping=osl.dequantized(tmp_path / "quantised"),
            dequantize="float32",
        )


def weights(**figures):
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": figures}}}


CONTRADICTED = [  # a case, and what its configuration must not say
    ("fp8 tensor", {"weight_block_size": [8, 16]}),
    ("fp8 tensor", weights(num_bits=8, type="float", strategy="channel")),
    ("fp8 channel", weights(num_bits=8, type="float", strategy="tensor")),
    ("fp8 channel", weights(num_bits=8, type="int", strategy="channel")),
    ("fp8 channel", weights(num_bits=8, type="float", group_size=32, strategy="group")),
    ("fp8 blocks", weights(block_structure=[8, 32])),
    ("fp8 blocks of DeepSeek", {"weight_block_size": [4, 64]}),
    ("fp8 blocks of DeepSeek", {"weight_block_size": [2, 32]}),
    ("mxfp8", weights(num_bits=8, type="float", group_size=16)),
    ("mxfp8", weights(num_bits=4, type="float", group_size=32)),
    ("int8 zero points", weights(num_bits=8, type="int", group_size=16)),
    ("int8 zero points", weights(num_bits=4, type="int", strategy="channel")),
    ("nvfp4 modelopt", {"quant_algo": "NVFP4", "group_size": 32}),
    ("nvfp4 modelopt", {"quant_algo": "NVFP4", "group_size": 128}),
    ("nvfp4 modelopt", weights(num_bits=4, type="float", group_size=8)),
    ("nvfp4 compressed-tensors", weights(num_bits=4, type="float", group_size=32)),
    ("nvfp4 compressed-tensors", weights(num_bits=4, type="int", group_size=16)),
    ("mxfp4 compressed-tensors", weights(num_bits=4, type="float", group_size=16)),
    ("mxfp4 gpt-oss", {"group_size": 64}),
    ("pack-quantized 4", weights(num_bits=4, type="int", group_size=8)),
    ("pack-quantized 4", weights(num_bits=4, type="int", group_size=32)),
    ("pack-quantized 4", weights(num_bits=4, type="int", strategy="channel")),
    ("pack-quantized 4", weights(num_bits=8, type="int", group_size=16)),
    ("pack-quantized 4", weights(num_bits=4, group_size=16, symmetric=False)),
    ("pack-quantized 4", weights(num_bits=4, group_size=16, actorder="group")),
    ("awq", {"bits": 4, "group_size": 32}),
    ("awq", {"bits": 4, "group_size": -1}),
    ("awq", {"bits": 8, "group_size": 16}),
    ("gptq 4", {"bits": 4, "group_size": 8}),
    ("gptq 4 order", {"bits": 4, "group_size": 32}),
    ("gptq 4", {"bits": 8, "group_size": 16}),
    ("gptq 4", {"bits": 4, "group_size": 16, "extra_config": {"up": {"group_size": 32}}}),
]


@pytest.mark.parametrize(("case", "said"), CONTRADICTED, ids=str)
def test_figures_that_contradict_the_tensors_are_refused(tmp_path, case, said):
    """Of every scheme; with the configuration that belongs to the tensors they are decoded."""
    tensors, values, config = CASES[case]()
    if case == "fp8 tensor":
        values = tensors["weight"].astype(F32) * tensors["weight_scale"]
    named = {f"up.{name}": value for name, value in tensors.items()}
    others = {key: value for key, value in config.items() if key not in said and key != "bits"}
    write(tmp_path, named, others | said)
    with pytest.raises(osl.MappingError, match=r"'up.weight'.*") as caught:
        osl.dequantized(tmp_path)
    hint = "Put the quantization_config that belongs to these tensors beside them."
    assert caught.value.hint == hint
    write(tmp_path, named, config)
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path).expressions["up.weight"]
    assert_same_bits(evaluate(bound, named), values)


def test_nvfp4_has_groups_of_sixteen_where_nothing_is_said(tmp_path):
    tensors, *_ = nvfp4("modelopt")
    tensors["weight_scale"] = tensors["weight_scale"][:, ::2]
    write(tmp_path, {f"up.{name}": value for name, value in tensors.items()}, {})
    with pytest.raises(osl.MappingError, match=r"1 rows and 32 columns"):
        osl.dequantized(tmp_path)


def test_modules_have_the_figures_that_are_said_of_them(tmp_path):
    tensors, values, groups = {}, {}, {}
    for name, bits, group in (("a", 4, 16), ("b", 4, 32), ("c", 8, 16)):
        part, values[f"{name}.weight"], _ = integers(bits, group)
        tensors |= {f"{name}.{key}": value for key, value in part.items()}
        figures = {"num_bits": bits, "type": "int", "group_size": group}
        groups[name] = {"targets": [name], "weights": figures}
    write(tmp_path, tensors, {"config_groups": groups})
    bound = osl.dequantized(tmp_path, dtype="float32").bind(tmp_path)
    for name, expected in values.items():
        assert_same_bits(evaluate(bound.expressions[name], tensors), expected)
    groups["a"]["targets"], groups["b"]["targets"] = ["b"], ["a"]
    write(tmp_path, tensors, {"config_groups": groups})
    with pytest.raises(osl.MappingError, match=r"'a.weight'.*16 columns.* says .*32 columns"):
        osl.dequantized(tmp_path)


ANY_NAME = st.from_regex(r"[a-z][a-z_]{0,11}(\.[a-z]{1,5})?", fullmatch=True)
ANY_DTYPE = st.sampled_from([np.dtype(np.uint8), np.dtype(np.bool_), FP8, F32, np.dtype(np.int64)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_beside_a_decoded_weight_and_not_explained_is_refused(tmp_path_factory, data):
    case = data.draw(st.sampled_from(sorted(CASES)))
    tensors, _, config = CASES[case]()
    known = ("rotation", "weight_scale_3", "comfy_quant", "swizzle", "weight.hadamard", "lora_A.w")
    extra = data.draw(st.sampled_from(known) | ANY_NAME)
    if extra in tensors or extra.endswith("bias"):
        return
    tensors[extra] = np.ones(4, data.draw(ANY_DTYPE))
    folder = tmp_path_factory.mktemp("beside")
    write(folder, {f"up.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(osl.MappingError) as caught:
        osl.dequantized(folder)
    assert f"'up.{extra}'" in str(caught.value)


@pytest.mark.parametrize("case", ["fp8 channel", "mxfp4 gpt-oss", "gptq 4"])
def test_biases_beside_decoded_weights_are_as_they_are(tmp_path, case):
    tensors, _, config = CASES[case]()
    bias = "weight_bias" if "gpt-oss" in case else "bias"
    write(tmp_path, {f"up.{n}": t for n, t in (tensors | {bias: floats(4)}).items()}, config)
    facts = osl.dequantized(tmp_path).leaf_facts(tmp_path)
    assert facts.keys() == {"up.weight", f"up.{bias}"}


def quantised_with(**config):
    tensors = {"up.weight": np.ones((4, 4), FP8), "up.weight_scale": floats(4, 1)}
    return tensors, {"quantization_config": config}


E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FORMATS = {  # what is in a folder that is not decoded, and by what it is known
    "DeepSeek-V4 .'up.scale' in F8_E8M0": (
        {"up.weight": np.ones((4, 16), np.int8), "up.scale": np.ones((4, 1), E8M0)},
        {"quantization_config": method("fp8"), "expert_dtype": "fp4"},
    ),
    "DeepSeek-V4 .'expert_dtype' 'fp4' in config.json": (
        quantised_with()[0],
        {"quantization_config": method("fp8"), "expert_dtype": "fp4"},
    ),
    "MLX .'up.weight' in U32": (
        {"up.weight": np.ones((4, 8), np.uint32), "up.scales": HALF, "up.biases": HALF},
        {"quantization": {"group_size": 64, "bits": 4}},
    ),
    "MLX .'quantization' in config.json": (
        {"up.w": np.ones((4, 8), np.uint32), "up.s": HALF},
        {"quantization": {"group_size": 64, "bits": 4}},
    ),
    "ComfyUI .'up.comfy_quant'": (
        quantised_with()[0] | {"up.comfy_quant": np.ones(9, np.uint8)},
        {},
    ),
    "ComfyUI .'scaled_fp8'": (quantised_with()[0] | {"scaled_fp8": np.ones(0, FP8)}, {}),
    "ComfyUI .'up.scale_weight'": (
        {"up.weight": np.ones((4, 4), FP8), "up.scale_weight": floats(1), "up.scale_input": F32},
        {},
    ),
    "with 'quark', which": quantised_with(quant_method="quark", global_quant_config={"weight": {}}),
    "with 'torchao', which": quantised_with(quant_method="torchao"),
    "has 'rotation', 'swizzled', of which": quantised_with(
        quant_method="fp8", rotation={"kind": "hadamard"}, swizzled=True, unset=None
    ),
    "has 'lut', of which": quantised_with(
        quant_method="compressed-tensors", **weights(num_bits=8, type="float", lut=[1])
    ),
    "another writer .'quantization_method' in config.json": (
        quantised_with()[0],
        {"quantization_method": "own"},
    ),
    "another writer .'quantization' in config.json": (  # Mistral's own
        quantised_with()[0],
        {"quantization": {"qformat_weight": "fp8_e4m3"}},
    ),
}


@pytest.mark.parametrize("known_by", FORMATS)
def test_formats_that_are_not_decoded_are_refused_by_name(tmp_path, known_by):
    """And no hint leads in a circle: what each says can be done."""
    tensors, config = FORMATS[known_by]
    tensors = {name: np.ones(1, F32) if t is F32 else t for name, t in tensors.items()}
    write(tmp_path, tensors, {}, config or {"model_type": "llama"})
    with pytest.raises(osl.MappingError, match=known_by) as caught:
        osl.dequantized(tmp_path)
    assert caught.value.hint.endswith(
        "Its tensors load as they are stored without osl.dequantized; a rule with osl.opaque"
        " decodes them."
    )
    for name, loaded in osl.load(tmp_path).items():
        assert_same_bits(loaded, tensors[name])
    code, *others = tensors
    decoded = osl.opaque(
        lambda codes, _: codes.astype(F32),
        osl.tensor(code),
        osl.tensor(others[0]),
        shape=tensors[code].shape,
        dtype="float32",
    )
    mapping = osl.Mapping([osl.rule("up", decoded)], strict=False)
    assert_same_bits(osl.load(tmp_path, mapping=mapping)["up"], tensors[code].astype(F32))
    if caught.value.hint.startswith("Take it out of the configuration"):
        write(tmp_path, tensors, method("fp8"))
        assert osl.dequantized(tmp_path).leaf_facts(tmp_path).keys() == {"up.weight"}
    tree = {code: jax.ShapeDtypeStruct(tensors[code].shape, F32)}
    with pytest.raises(osl.DtypeMismatchError, match="codes"):
        osl.load(tmp_path, tree, options=osl.ReadOptions(strict=False))


@pytest.mark.parametrize("key", ["_quantization_metadata", "quantization", "my_quant_recipe"])
def test_headers_that_speak_of_quantisation_are_refused(tmp_path, key):
    tensors, _ = quantised_with()
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, {key: "{}", "format": "pt"})
    assert osl.dequantized(path).leaf_facts(path)
    safetensors.numpy.save_file(tensors, path, {key: '{"layers": {"up": 1}}', "format": "pt"})
    with pytest.raises(osl.MappingError, match=f"'{key}' in the header"):
        osl.dequantized(path)


def test_marks_of_formats_beside_plain_floats_say_nothing(tmp_path):
    """As of weights that were decoded, where the configuration was left as it was."""
    said = {"expert_dtype": "fp4", "quantization": {"bits": 4, "group_size": 64}}
    write(tmp_path, {"up.weight": floats(4, 4)}, {"quant_method": "fp8", "odd": 1}, said)
    assert osl.dequantized(tmp_path).leaf_facts(tmp_path).keys() == {"up.weight"}
