"""`Quantization.like`: folders as others write them keep their bits, and no value is lost."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
from http_server import file_server
from programs import run_processes
from remote_checks import shown

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping.quantizing import encoder

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
UP = "model.layers.0.mlp.up_proj"
WRITING = "orbax_safetensors_layout.writing.assemble_files"


def stored(folder):
    return {name: np.asarray(leaf) for name, leaf in osl.load(folder).items()}


def decoded(folder, dtype="float32"):
    loaded = osl.load(folder, mapping=osl.dequantized(folder, dtype=dtype))
    return {name: np.asarray(leaf) for name, leaf in loaded.items()}


def like(folder, model=None):
    return osl.WriteOptions(quantize=osl.Quantization.like(folder), model=model)


def assert_same_bits(tmp_path, tensors, dtype="bfloat16"):
    """What is loaded from a folder of these tensors and saved like it gives them again."""
    osl.save(tmp_path / "first", tensors, overwrite=True)
    values = decoded(tmp_path / "first", dtype)
    osl.save(tmp_path / "again", values, options=like(tmp_path / "first"), overwrite=True)
    again = stored(tmp_path / "again")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype, name
        assert again[name].shape == tensor.shape, name
        assert again[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "blocks", "rows", "nvfp4", "int4", "rows of int4"])
def test_groups_with_a_scale_of_zero(tmp_path, monkeypatch, kind, is_tall, dtype):
    """Their values are zero whatever their elements are, which stay, too."""
    monkeypatch.setattr(encoder, "_MOST_IN_ROWS", 0 if is_tall else 1 << 22)
    monkeypatch.setattr(encoder, "CHUNK_ELEMENTS", 64)
    rng = np.random.default_rng(3)
    elements = rng.integers(0, 127, (256, 256)).astype(np.uint8)
    shapes = {"tensor": (1,), "blocks": (2, 2), "rows": (256, 1), "int4": (256, 8)}
    scales = rng.uniform(0.01, 1, shapes.get(kind, (256, 32))).astype(np.float32)
    scales.reshape(-1)[0 if kind in ("tensor", "blocks") else slice(3, 9)] = 0
    if kind == "nvfp4":
        parts = {"": elements, "_scale": scales.astype(F8), "_scale_2": np.ones(1, np.float32)}
    elif kind == "int4":
        parts = {"_packed": elements.view(np.int32), "_scale": scales}
        parts["_shape"] = np.array([256, 512])
    elif kind == "rows of int4":
        parts = {"_packed": elements[:, :20].copy().view(np.int32), "_scale": scales[:, :1].copy()}
        parts["_packed"][:, -1] &= 0xFFFFFFF  # seven of the last eight values
        parts["_shape"] = np.array([256, 39])
    else:
        parts = {"": elements.view(F8), "_scale": scales}
    assert_same_bits(tmp_path, {f"{UP}.weight{name}": part for name, part in parts.items()}, dtype)


def test_weights_with_scales_of_inputs_are_not_written(tmp_path):
    parts = {
        "weight": np.ones((4, 16), np.uint8),
        "weight_scale": np.ones((4, 2), F8),
        "weight_scale_2": np.ones(1, np.float32),
        "pre_quant_scale": np.ones(32, np.float32),
    }
    osl.save(tmp_path, {f"{UP}.{name}": part for name, part in parts.items()})
    with pytest.raises(osl.MappingError, match="NVFP4 of ModelOpt with scales of inputs can be"):
        osl.Quantization.like(tmp_path)


def test_credentials_of_a_folder_s_url_are_not_shown(tmp_path):
    parts = {"weight": np.ones((4, 4), F8), "weight_scale": np.ones(1, np.float32)}
    osl.save(tmp_path / "first", {f"{UP}.{name}": part for name, part in parts.items()})
    osl.save(tmp_path / "plain", {"w": np.ones(3, np.float32)})
    with file_server(tmp_path) as server:
        url = server.url.replace("//", "//me:hunter2@") + "/files/{}?sig=hunter2"
        quantize = osl.Quantization.like(url.format("first"))
        assert repr(quantize) == f"Quantization.like('{server.url}/files/first')"
        with pytest.raises(osl.MappingError, match="no quantised weights") as caught:
            osl.Quantization.like(url.format("plain"))
        assert "hunter2" not in shown(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt"])
def test_nvfp4_of_any_factor(tmp_path, kind, dtype):
    """The largest value, rounded, may be a little more than 6 x 448 times the factor."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (32, 64)).astype(np.uint8)
        scales = rng.uniform(1, 448, (32, 8)).astype(F8)
        codes[0, :8], scales[0, 0] = 0x77, 448
        factor = np.array([rng.uniform(100, 10000)], np.float32)
        if kind == "modelopt":
            names = ("", "_scale", "_scale_2")
            factor = 1 / factor
        else:
            names = ("_packed", "_scale", "_global_scale")
        parts = zip(names, (codes, scales, factor), strict=True)
        assert_same_bits(tmp_path, {f"{UP}.weight{name}": part for name, part in parts}, dtype)


@pytest.mark.parametrize("kind", ["fp8_channel", "int4", "nvfp4"])
def test_scales_of_zero(tmp_path, kind):
    weight = np.random.default_rng(0).standard_normal((8, 128)).astype(BF16)
    weight[3] = 0
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    osl.save(tmp_path / "plain", {f"{UP}.weight": weight}, options=options)
    tensors = {name: np.array(tensor) for name, tensor in stored(tmp_path / "plain").items()}
    tensors[f"{UP}.weight_scale"][3] = 0
    assert_same_bits(tmp_path, tensors)


@pytest.mark.parametrize("kind", ["fp8_channel", "int4"])
def test_scales_in_float16(tmp_path, kind):
    """Changed groups get scales that float16 has, or an error: never NaN."""
    weight = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float16)
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    osl.save(tmp_path / "plain", {f"{UP}.weight": weight}, options=options)
    tensors = stored(tmp_path / "plain")
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].astype(np.float16)
    assert_same_bits(tmp_path, tensors)
    changed = decoded(tmp_path / "first")[f"{UP}.weight"].copy()
    changed[0], changed[1], changed[2] = 1e-4, 1e-12, 1e5
    changed[:3, ::2] = 0
    osl.save(tmp_path / "out", {f"{UP}.weight": changed}, options=like(tmp_path / "first"))
    again = decoded(tmp_path / "out")[f"{UP}.weight"]
    np.testing.assert_allclose(again[0], changed[0], rtol=0.1)
    np.testing.assert_allclose(again[1], changed[1], atol=1e-6)
    np.testing.assert_allclose(again[2], changed[2], rtol=0.1)
    changed[2, 0] = 1e9
    with pytest.raises(osl.SafetensorsLayoutError, match=r"too large.*float16.*up_proj"):
        osl.save(tmp_path / "no", {f"{UP}.weight": changed}, options=like(tmp_path / "first"))
    assert not (tmp_path / "no").exists()


def static_fp8():
    """FP8 with a scale for each tensor and each activation, as AutoFP8 and ModelOpt write it."""
    rng = np.random.default_rng(0)
    attention = "model.layers.0.self_attn"
    return {
        f"{UP}.input_scale": np.array([0.25], np.float32),
        f"{UP}.weight": rng.standard_normal((256, 128)).astype(F8),
        f"{UP}.weight_scale": np.array([0.5], np.float32),
        f"{UP}.weight_zero_point": np.zeros((256, 1), np.int8),
        f"{attention}.k_scale": np.array(2, np.float32),
        f"{attention}.q_proj.weight": rng.standard_normal((128, 128)).astype(F8),
        f"{attention}.q_proj.weight_scale": np.array(0.125, np.float32),
        "model.norm.weight": np.ones(8, np.float32),
    }


def test_scales_of_activations_stay(tmp_path):
    tensors = static_fp8()
    assert_same_bits(tmp_path, tensors)
    values = decoded(tmp_path / "first", "bfloat16")
    del values["model.layers.0.self_attn.q_proj.weight"]
    osl.save(tmp_path / "part", values, options=like(tmp_path / "first"))
    assert not [name for name in osl.metadata(tmp_path / "part") if "self_attn" in name]
    # A conversion does the same.
    osl.save(tmp_path / "plain", decoded(tmp_path / "first", "bfloat16"))
    quantize = osl.Quantization.like(tmp_path / "first")
    osl.convert(tmp_path / "plain", tmp_path / "out", format="hf", quantize=quantize)
    again = stored(tmp_path / "out")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].tobytes() == tensor.tobytes(), name


def test_a_folder_that_was_replaced_is_refused(tmp_path):
    """What stays as it is comes from the folder, at the offsets that it had."""
    tensors = static_fp8()
    osl.save(tmp_path / "first", tensors)
    values, options = decoded(tmp_path / "first"), like(tmp_path / "first")
    more = {"a.first.tensor": np.zeros(3, np.float32), **tensors}
    osl.save(tmp_path / "first", more, overwrite=True)
    with pytest.raises(osl.SafetensorsLayoutError, match="changed or replaced"):
        osl.save(tmp_path / "again", values, options=options)
    assert not (tmp_path / "again").exists()
    osl.save(tmp_path / "again", values, options=like(tmp_path / "first"))
    again = stored(tmp_path / "again")
    assert all(again[name].tobytes() == tensors[name].tobytes() for name in tensors)


def test_a_transposed_weight_is_refused(tmp_path):
    for kind in ("fp8_block", "fp8_channel", "int4"):
        weight = np.random.default_rng(0).standard_normal((128, 256)).astype(BF16)
        options = osl.WriteOptions(quantize=osl.Quantization(kind))
        osl.save(tmp_path / kind, {f"{UP}.weight": weight}, options=options)
        with pytest.raises(osl.MappingError, match="another shape than in the folder"):
            osl.save(tmp_path / "out", {f"{UP}.weight": weight.T}, options=like(tmp_path / kind))


def test_a_part_beside_its_weight_is_refused(tmp_path):
    tensors = static_fp8()
    osl.save(tmp_path / "first", tensors)
    values = decoded(tmp_path / "first")
    values[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"]
    with pytest.raises(osl.MappingError, match=r"two tensors.*weight_scale"):
        osl.save(tmp_path / "out", values, options=like(tmp_path / "first"))


@pytest.mark.parametrize("kind", ["tensor", "fp8_block", "fp8_rows"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_groups_of_many_rows_are_seen_twice(tmp_path, monkeypatch, kind, dtype):
    """What does not fit in memory at once gives the same files as what does."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((300, 256)).astype(dtype)
    osl.save(tmp_path / "plain", {f"{UP}.weight": weight})
    scale = {"tensor": (1,), "fp8_block": (3, 2), "fp8_rows": (300, 1)}[kind]
    before = {
        f"{UP}.weight": rng.standard_normal(weight.shape).astype(F8),
        f"{UP}.weight_scale": rng.uniform(0.5, 1, scale).astype(np.float32),
    }
    osl.save(tmp_path / "first", before)
    loaded = decoded(tmp_path / "first", dtype.__name__ if dtype is np.float32 else "bfloat16")
    changed = loaded[f"{UP}.weight"].copy()
    changed[200:, 100:] *= dtype(3) if dtype is np.float32 else BF16.type(3)
    trees = {"other": weight, "same": loaded[f"{UP}.weight"], "changed": changed}
    files = {}
    for limit in (1 << 30, 5000):
        monkeypatch.setattr(encoder, "_MOST_IN_ROWS", limit)
        monkeypatch.setattr(encoder, "CHUNK_ELEMENTS", limit)
        for rows in (1 << 30, 16 << 10):
            monkeypatch.setattr(sys.modules[WRITING], "_ROWS_BYTES", rows)
            for name, tree in trees.items():
                out = tmp_path / "out"
                osl.save(
                    out, {f"{UP}.weight": tree}, options=like(tmp_path / "first"), overwrite=True
                )
                content = (out / "model.safetensors").read_bytes()
                assert files.setdefault(name, content) == content, (name, limit, rows)
            quantize = osl.Quantization.like(tmp_path / "first")
            osl.convert(
                tmp_path / "plain",
                out,
                format="hf",
                quantize=quantize,
                overwrite=True,
                options=osl.ConvertOptions(memory_budget_bytes=1 << 20),
            )
            again = stored(out)
            osl.save(
                out, {f"{UP}.weight": weight}, options=like(tmp_path / "first"), overwrite=True
            )
            for name, tensor in stored(out).items():
                assert again[name].tobytes() == tensor.tobytes()
    first = (tmp_path / "first" / "model.safetensors").read_bytes()
    assert files["same"] == first
    assert files["changed"] != first


@pytest.mark.parametrize("kind", ["nvfp4", "fp8_channel"])
def test_values_that_are_not_finite_in_the_last_rows(tmp_path, kind):
    weight = np.ones((512, 128), BF16)
    weight[-1, -1] = np.nan
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    with pytest.raises(osl.SafetensorsLayoutError, match=r"not finite.*up_proj"):
        osl.save(tmp_path / "out", {f"{UP}.weight": weight}, options=options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_several_processes_see_a_weight_twice_too(tmp_path, processes):
    tensors = static_fp8()
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(UP)} | {
        "norm": np.ones(8, np.float32)
    }
    osl.save(tmp_path / "first", tensors)
    values = decoded(tmp_path / "first")
    values[f"{UP}.weight"] = values[f"{UP}.weight"].copy()
    values[f"{UP}.weight"][200:] *= 1.5
    osl.save(tmp_path / "plain", values)
    run_processes(
        "save_quantized_tall.py",
        processes=processes,
        devices=4 // processes,
        folder=str(tmp_path),
    )
    for kind in ("like", "nvfp4", "int4"):
        quantize = (
            osl.Quantization.like(tmp_path / "first") if kind == "like" else osl.Quantization(kind)
        )
        options = osl.WriteOptions(quantize=quantize)
        osl.save(tmp_path / "expected", values, options=options, overwrite=True)
        expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
        for number in range(5):
            for end in ("", "-t"):
                out = tmp_path / f"{kind}-{number}{end}"
                assert (out / "model.safetensors").read_bytes() == expected, out.name


def test_the_file_of_modelopt_stays_whole(tmp_path):
    """vLLM asks it for its producer."""
    tensors = {name: tensor for name, tensor in static_fp8().items() if "zero" not in name}
    osl.save(tmp_path / "first", tensors)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "first" / "hf_quant_config.json").write_text(json.dumps(said))
    values = decoded(tmp_path / "first")
    for config in (None, tmp_path / "first"):
        out = tmp_path / f"out-{config is None}"
        osl.save(out, values, options=like(tmp_path / "first", config))
        assert json.loads((out / "hf_quant_config.json").read_text()) == said


def test_formats_that_are_only_read(tmp_path):
    weight = np.ones((8, 16), ml_dtypes.float8_e5m2)
    scale = np.ones((8, 1), np.float32)
    osl.save(tmp_path / "first", {f"{UP}.weight": weight, f"{UP}.weight_scale": scale})
    with pytest.raises(osl.MappingError, match=r"up_proj.*cannot be written.*E4M3"):
        osl.Quantization.like(tmp_path / "first")


def test_groups_that_end_within_a_word(tmp_path):
    parts = {
        "_packed": np.zeros((8, 5), np.int32),
        "_scale": np.ones((8, 4), np.float32),
        "_shape": np.array([8, 40]),
    }
    osl.save(tmp_path / "first", {f"{UP}.weight{end}": part for end, part in parts.items()})
    values = decoded(tmp_path / "first")
    with pytest.raises(osl.MappingError, match=r"groups of 10 columns.*multiple of 8"):
        osl.save(tmp_path / "out", values, options=like(tmp_path / "first"))


@pytest.mark.parametrize("kind", ["mxfp4", "gpt_oss_mxfp4"])
def test_what_stays_plain_is_told(tmp_path, caplog, kind):
    """A model whose experts are fused has few weights that other formats take."""
    experts = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        experts: np.ones((2, 32, 32), BF16),
        f"{experts}_bias": np.ones((2, 32), BF16),
        f"{UP}.weight": np.ones((32, 32), BF16),
    }
    options = osl.WriteOptions(quantize=osl.Quantization(kind))
    with caplog.at_level("WARNING", "absl"):
        osl.save(tmp_path / "out", tensors, options=options)
    said = "2 tensors of modules that are to be quantised stay as they are"
    assert (said in caplog.text, repr(experts) in caplog.text) == (kind == "mxfp4",) * 2
    assert (experts in osl.metadata(tmp_path / "out")) == (kind == "mxfp4")
