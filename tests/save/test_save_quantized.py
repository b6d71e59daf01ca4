"""`WriteOptions(quantize=...)`: each format against numpy, and what folders then say of it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import any_sharding, mesh_of
from programs import run_alone, run_processes
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
UP = "model.layers.0.mlp.up_proj"
# Rows and columns of a group (0: all), and the numbers that groups are made of.
FP8 = np.unique(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
FORMATS = {
    "fp8_block": (128, 128, FP8),
    "deepseek_fp8": (128, 128, FP8),
    "fp8_channel": (1, 0, FP8),
    "int4": (1, 128, np.arange(8, dtype=np.float32)),
    "mxfp4": (1, 32, E2M1),
    "nvfp4": (1, 16, E2M1),
}
NAMES = {
    "fp8_block": ["", "_scale"],
    "deepseek_fp8": ["", "_scale_inv"],
    "fp8_channel": ["", "_scale"],
    "int4": ["_packed", "_scale", "_shape"],
    "mxfp4": ["_packed", "_scale"],
    "nvfp4": ["_packed", "_scale", "_global_scale"],
}


def with_model(options, folder):
    return dataclasses.replace(options, model=folder)


def quantized(kind, model=None, **kwargs):
    return osl.WriteOptions(quantize=osl.Quantization(kind, **kwargs), model=model)


def model(rows=256, columns=384, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"{UP}.weight": rng.standard_normal((rows, columns)).astype(dtype),
        "model.embed_tokens.weight": rng.standard_normal((64, 32)).astype(dtype),
        "model.norm.weight": np.ones(32, np.float32),
    }


def content(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def decoded(folder, dtype="float32"):
    loaded = osl.load(folder, mapping=osl.dequantized(folder, dtype=dtype))
    return {name: np.asarray(leaf) for name, leaf in loaded.items()}


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("kind", FORMATS)
def test_groups_are_the_nearest_numbers(tmp_path, kind, dtype):
    """Each value is within half a step of the numbers of its group, whatever its scale."""
    tensors = model(dtype=dtype)
    tensors[f"{UP}.weight"][:130, :40] *= dtype(1 / 32) if dtype is not BF16 else BF16.type(1 / 32)
    tensors[f"{UP}.weight"][7] = 0
    osl.save(tmp_path / "out", tensors, options=quantized(kind))
    stored = osl.metadata(tmp_path / "out")
    assert {n for n in stored if n.startswith(UP)} == {f"{UP}.weight{end}" for end in NAMES[kind]}
    again = decoded(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert again[name].tobytes() == tensors[name].tobytes()
    weight, other = tensors[f"{UP}.weight"].astype(np.float32), again[f"{UP}.weight"]
    down, across, numbers = FORMATS[kind]
    across = across or weight.shape[1]
    for i in range(0, weight.shape[0], down):
        for j in range(0, weight.shape[1], across):
            group, stored_as = (a[i : i + down, j : j + across] for a in (weight, other))
            largest = np.abs(group).max()
            if not largest:
                assert not stored_as.any()
                continue
            # The unit of a group is that of its decoded values: its largest is one of `numbers`.
            widest = np.diff(numbers).max() * largest / numbers[-1]
            bound = widest / 2 * {"mxfp4": 2.01, "int4": 1.1, "nvfp4": 1.2}.get(kind, 1.01)
            assert np.abs(group - stored_as).max() <= bound, (i, j)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sharding_gives_the_same_files(tmp_path_factory, data):
    kind = data.draw(st.sampled_from([*FORMATS]))
    rows = data.draw(st.sampled_from([1, 3, 128, 201, 256]))
    columns = 128 * data.draw(st.integers(1, 3))
    folder = tmp_path_factory.mktemp("quantized")
    tensors = model(rows, columns, seed=rows)
    osl.save(folder / "one", tensors, options=quantized(kind))
    sharded = {n: jax.device_put(t, any_sharding(data, t.shape)) for n, t in tensors.items()}
    osl.save(folder / "other", sharded, options=quantized(kind))
    assert content(folder / "one") == content(folder / "other")


@pytest.mark.parametrize("split", ["rows", "columns", "both"])
@pytest.mark.parametrize("kind", FORMATS)
def test_through_a_mapping(tmp_path, kind, split):
    tensors = model()
    osl.save(tmp_path / "plain", tensors)
    osl.save(tmp_path / "expected", tensors, options=quantized(kind))
    mapping = osl.Mapping(
        [
            osl.rule("up", osl.stack(osl.tensor("model.layers.{i}.mlp.up_proj.weight"), over="i")),
            osl.rule("embed", osl.tensor("model.embed_tokens.weight").transpose()),
            osl.rule("norm", osl.tensor("model.norm.weight")),
        ]
    )
    axes = {"rows": P(None, "x"), "columns": P(None, None, "x"), "both": P(None, "x", "y")}[split]
    mesh = mesh_of(x=4, y=2)
    tree = mapping.abstract(tmp_path / "plain")
    tree["up"] = tree["up"].update(sharding=NamedSharding(mesh, axes))
    loaded = osl.load(tmp_path / "plain", tree, mapping=mapping)
    osl.save(tmp_path / "out", loaded, mapping=mapping, options=quantized(kind))
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_each_process_writes_its_share(tmp_path):
    run_processes("save_quantized.py", processes=2, devices=2, folder=str(tmp_path))
    tensors = {name: np.asarray(leaf) for name, leaf in jax_model().items()}
    for kind in FORMATS:
        osl.save(tmp_path / f"{kind}-one", tensors, options=quantized(kind))
        assert content(tmp_path / kind) == content(tmp_path / f"{kind}-one")


def jax_model():
    rows = jnp.arange(256 * 384, dtype=jnp.float32).reshape(256, 384)
    return {f"{UP}.weight": jnp.sin(rows).astype(jnp.bfloat16), "model.norm.weight": rows[0]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*FORMATS, "gpt_oss_mxfp4"])
def test_what_has_not_changed_keeps_its_bits(tmp_path, kind, dtype):
    tensors = model()
    if kind == "gpt_oss_mxfp4":
        experts = np.random.default_rng(3).standard_normal((4, 64, 96)).astype(BF16)
        tensors["model.layers.0.mlp.experts.down_proj"] = experts
    # As others quantise: scales that are not those of the largest values.
    name = next(n for n in tensors if "_proj" in n and (kind != "gpt_oss_mxfp4" or "experts" in n))
    osl.save(tmp_path / "first", tensors, options=quantized(kind, configured(tmp_path)))
    halve_values(tmp_path / "first" / "model.safetensors")
    loaded = osl.load(tmp_path / "first", mapping=osl.dequantized(tmp_path / "first", dtype=dtype))
    like = osl.WriteOptions(quantize=osl.Quantization.like(tmp_path / "first"))
    osl.save(tmp_path / "again", loaded, options=with_model(like, tmp_path / "first"))
    assert content(tmp_path / "again") == content(tmp_path / "first")
    changed = dict(loaded)
    changed[name] = np.array(loaded[name])
    changed[name][..., 0] = np.abs(changed[name]).max() * 100
    osl.save(tmp_path / "changed", changed, options=like)
    before, after = decoded(tmp_path / "first"), decoded(tmp_path / "changed")
    np.testing.assert_allclose(
        after[name][..., 0], np.asarray(changed[name][..., 0], np.float32), rtol=0.2
    )
    if kind not in ("nvfp4", "fp8_channel"):  # of which other groups have new scales, too
        last = np.s_[..., -4:] if kind != "gpt_oss_mxfp4" else np.s_[:, -4:, 1:]
        assert before[name][last].tobytes() == after[name][last].tobytes()


def configured(tmp_path):
    folder = tmp_path / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def halve_values(path):
    """Every second row of the first quantised tensor of bytes gets smaller codes in the file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for entry in header.values():
        if entry.get("dtype") in ("U8", "F8_E4M3") and len(entry["shape"]) > 1:
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            values = np.frombuffer(data[start:stop], np.uint8).reshape(-1, entry["shape"][-1])
            if values.shape[1] < 32:
                continue
            values = values.copy()
            values[::2] &= 0b10110011 if entry["dtype"] == "U8" else 0b11011111
            path.write_bytes(data[:start] + values.tobytes() + data[stop:])
            return


def test_the_configuration_says_it(tmp_path):
    source = configured(tmp_path)
    osl.save(tmp_path / "out", model(), options=quantized("fp8_block", source))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == {"model_type": "llama", "hidden_size": 64}
    assert said["quant_method"] == "compressed-tensors"
    assert said["ignore"] == ["model.embed_tokens", "lm_head"]
    weights = said["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["block_structure"]) == ("block", [128, 128])
    assert (tmp_path / "out" / "tokenizer.json").exists()
    # Another format replaces what it says.
    osl.save(tmp_path / "next", model(), options=quantized("deepseek_fp8", tmp_path / "out"))
    config = json.loads((tmp_path / "next" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }


@pytest.mark.parametrize("how", ["save", "convert"])
def test_a_configuration_that_is_there_already_says_it(tmp_path, how):
    tensors, out = model(), configured(tmp_path).rename(tmp_path / "out")
    osl.save(tmp_path / "plain", tensors)
    for kind in ("int4", "fp8_block"):
        if how == "save":
            osl.save(out, tensors, options=quantized(kind), overwrite=True)
        else:
            quantize = osl.Quantization(kind)
            osl.convert(tmp_path / "plain", out, format="hf", quantize=quantize, overwrite=True)
        config = json.loads((out / "config.json").read_text())
        assert config["hidden_size"] == 64
        fmt = {"int4": "pack-quantized", "fp8_block": "float-quantized"}[kind]
        assert config["quantization_config"]["format"] == fmt
        assert (out / "tokenizer.json").read_text() == "{}"
    with pytest.raises(osl.CheckpointExistsError):
        osl.save(configured(tmp_path), tensors, options=quantized("int4"))


def test_modules_are_chosen_by_patterns(tmp_path):
    tensors = model() | {"model.layers.1.mlp.up_proj.weight": np.ones((32, 128), BF16)}
    options = quantized("mxfp4", modules=["*.up_proj", "*embed*"], ignore="*.layers.1.*")
    osl.save(tmp_path / "out", tensors, options=options)
    packed = {name for name in osl.metadata(tmp_path / "out") if name.endswith("_packed")}
    assert packed == {f"{UP}.weight_packed", "model.embed_tokens.weight_packed"}


def test_other_tensors_have_the_dtype_of_the_options(tmp_path):
    options = osl.WriteOptions(quantize=osl.Quantization("int4"), dtype="bfloat16")
    tensors = {name: np.asarray(t, np.float32) for name, t in model().items()}
    osl.save(tmp_path / "out", tensors, options=options)
    dtypes = {name: leaf.dtype.name for name, leaf in osl.metadata(tmp_path / "out").items()}
    assert dtypes["model.norm.weight"] == dtypes[f"{UP}.weight_scale"] == "bfloat16"
    assert dtypes[f"{UP}.weight_shape"] == "int64"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (1, 128), (259, 2048), (3, 131072 * 2)])
def test_weights_of_any_size(tmp_path, kind, shape):
    weight = np.random.default_rng(2).standard_normal(shape).astype(BF16)
    osl.save(tmp_path / "out", {f"{UP}.weight": weight}, options=quantized(kind))
    if weight.size:
        again = decoded(tmp_path / "out")[f"{UP}.weight"]
        assert np.abs(again - weight.astype(np.float32)).max() < 1
        rows = np.concatenate([weight, weight[:1]])  # the same in other chunks
        osl.save(tmp_path / "more", {f"{UP}.weight": rows}, options=quantized(kind))
        more = decoded(tmp_path / "more")[f"{UP}.weight"]
        if FORMATS[kind][0] == 1:
            assert more[: len(again)].tobytes() == again.tobytes()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e30, 3e38])
def test_values_of_any_magnitude(tmp_path, kind, scale):
    weight = np.random.default_rng(1).uniform(-1, 1, (16, 128)).astype(np.float32)
    weight = (weight * np.float32(scale)).astype(np.float32)
    osl.save(tmp_path / "out", {f"{UP}.weight": weight}, options=quantized(kind))
    again = decoded(tmp_path / "out")[f"{UP}.weight"]
    assert np.isfinite(again).all()
    assert np.abs(again - weight).max() <= np.abs(weight).max() / 3


def test_plans_know_it():
    leaf = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    tree = {f"{UP}.weight": leaf}
    plan = osl.plan_save(tree, options=quantized("nvfp4"))
    assert plan.cost().read_bytes == 0  # nothing is put together of pieces
    values, header = 4096 * 4096, 8192
    assert 0 < plan.cost().written_bytes - values * (1 / 2 + 1 / 16) <= header


@pytest.mark.parametrize(
    ("tensors", "options", "error", "said"),
    [
        (model(), quantized("mxfp4", modules="*.none"), osl.MappingError, "no weight is of a modu"),
        (model(columns=40), quantized("mxfp4"), osl.MappingError, "columns .* are not groups of 3"),
        (
            {f"{UP}.weight": np.array([[1, np.nan] * 16], BF16)},
            quantized("fp8_channel"),
            osl.SafetensorsLayoutError,
            "not finite",
        ),
        (
            {f"{UP}.weight": np.ones(32, BF16)},
            quantized("fp8_channel"),
            osl.MappingError,
            "rows and columns",
        ),
        (
            {**model(), f"{UP}.weight_packed": np.ones(3, BF16)},
            quantized("mxfp4"),
            osl.MappingError,
            "two tensors",
        ),
        ({**model(), "step": 3}, quantized("mxfp4"), osl.MappingError, "takes arrays alone"),
        (
            model(),
            osl.WriteOptions(quantize=osl.Quantization("mxfp4"), layout="sharded"),
            osl.InvalidArgumentError,
            "layout 'hf'",
        ),
    ],
)
def test_refusals(tmp_path, tensors, options, error, said):
    with pytest.raises(error, match=said):
        osl.save(tmp_path / "out", tensors, options=options)
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked(tmp_path):
    for arguments in (
        ("fp9",),
        ("int4", "*", (), 12),
        ("int4", "["),
        ("int4", None),
        ("int4", [3]),
    ):
        with pytest.raises(osl.InvalidArgumentError):
            osl.Quantization(*arguments)
    with pytest.raises(ValueError, match=r"osl\.Quantization"):
        osl.WriteOptions(quantize="fp8_block")
    with pytest.raises(ValueError, match=r"osl\.Quantization"):
        osl.WriteOptions(quantize=osl.Quantization)
    osl.save(tmp_path / "plain", model())
    with pytest.raises(osl.MappingError, match="no quantised weights"):
        osl.Quantization.like(tmp_path / "plain")
    layout = osl.WriteOptions(layout="sharded")
    osl.save(tmp_path / "pieces", model(), options=layout)
    with pytest.raises(osl.InvalidArgumentError, match="quantize"):
        osl.consolidate(tmp_path / "pieces", options=quantized("mxfp4"))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_configuration_that_is_malformed(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    osl.save(tmp_path / "first", model(), options=quantized("mxfp4", configured(tmp_path)))
    for how in (osl.Quantization("mxfp4"), osl.Quantization.like(tmp_path / "first")):
        options = osl.WriteOptions(quantize=how)
        if text == "{}":
            osl.save(
                tmp_path / "out", model(), options=with_model(options, tmp_path), overwrite=True
            )
            continue
        with pytest.raises(osl.FormatError, match=r"configuration.*config\.json"):
            osl.save(tmp_path / "out", model(), options=with_model(options, tmp_path))
        assert not (tmp_path / "out").exists()


def test_a_weight_of_another_shape_than_in_the_folder(tmp_path):
    osl.save(tmp_path / "first", model(), options=quantized("fp8_block"))
    like = osl.WriteOptions(quantize=osl.Quantization.like(tmp_path / "first"))
    with pytest.raises(osl.MappingError, match="another shape than in the folder"):
        osl.save(tmp_path / "out", model(rows=128), options=like)


def test_the_scales_of_a_folder_are_read_once(tmp_path):
    """A weight is quantised a few rows at a time."""
    osl.save(tmp_path / "first", model(4096, 4096), options=quantized("mxfp4"))
    loaded = osl.load(tmp_path / "first", mapping=osl.dequantized(tmp_path / "first"))
    like = osl.Quantization.like(tmp_path / "first")
    options = osl.WriteOptions(quantize=like, memory_budget_bytes=4 << 20)
    with recording() as storage:
        osl.save(tmp_path / "again", loaded, options=options)
    read = [r for r in storage.tensor_ranges() if "first" in r[0]]
    assert sum(stop - start for _, start, stop in read) == 4096 * 4096 // 32
    tensors = osl.load(tmp_path / "first")
    for name, tensor in osl.load(tmp_path / "again").items():
        assert np.asarray(tensor).tobytes() == np.asarray(tensors[name]).tobytes()


def test_exponents_as_scales_of_fp8(tmp_path):
    """DeepSeek-V3.1's: a changed block gets a power of two, too, and no value is cut off."""
    osl.save(tmp_path / "first", model(), options=quantized("deepseek_fp8"))
    path = tmp_path / "first" / "model.safetensors"
    tensors = {n: np.asarray(t) for n, t in osl.load(path).items()}
    scale = tensors[f"{UP}.weight_scale_inv"]
    tensors[f"{UP}.weight_scale_inv"] = scale.astype(ml_dtypes.float8_e8m0fnu)
    osl.save(tmp_path / "powers", tensors)
    loaded = osl.load(tmp_path / "powers", mapping=osl.dequantized(tmp_path / "powers"))
    like = osl.WriteOptions(quantize=osl.Quantization.like(tmp_path / "powers"))
    osl.save(tmp_path / "again", loaded, options=like)
    stored = osl.load(tmp_path / "again")
    for name, tensor in tensors.items():
        assert np.asarray(stored[name]).tobytes() == tensor.tobytes(), name
    changed = {name: np.array(leaf) for name, leaf in loaded.items()}
    changed[f"{UP}.weight"] *= BF16.type(1.7)
    osl.save(tmp_path / "changed", changed, options=like)
    again = decoded(tmp_path / "changed")[f"{UP}.weight"]
    weight = changed[f"{UP}.weight"].astype(np.float32)
    assert np.abs(again - weight).max() <= np.abs(weight).max() / 16


def test_steps_are_never_quantised(tmp_path):
    handler = osl.SafetensorsCheckpointHandler(write=quantized("mxfp4"))
    with ocp.Checkpointer(handler) as checkpointer, pytest.raises(Exception, match=r"osl\.save"):
        checkpointer.save(tmp_path / "step", args=osl.SafetensorsSave(model()))


@pytest.mark.parametrize("kind", ["fp8_block", "deepseek_fp8"])
def test_rows_that_do_not_fit_a_small_budget(tmp_path, kind):
    """Blocks are of 128 columns wherever a row is cut."""
    value = np.random.default_rng(0).standard_normal((256, 40_000)).astype(np.float32)
    value *= np.geomspace(1e-3, 1, value.shape[1], dtype=np.float32)
    tensors = {f"{UP}.weight": value}
    osl.save(tmp_path / "expected", tensors, options=quantized(kind))
    options = dataclasses.replace(quantized(kind), memory_budget_bytes=1 << 17)
    osl.save(tmp_path / "saved", tensors, options=options)
    osl.save(tmp_path / "plain", tensors)
    small = osl.ConvertOptions(memory_budget_bytes=2 << 20)
    how = {"quantize": osl.Quantization(kind), "options": small}
    osl.convert(tmp_path / "plain", tmp_path / "converted", format="hf", **how)
    expected = {n: t.tobytes() for n, t in decoded(tmp_path / "expected").items()}
    for folder in ("saved", "converted"):
        assert {n: t.tobytes() for n, t in decoded(tmp_path / folder).items()} == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_conversions_write_what_saves_do(tmp_path, kind):
    tensors = model(rows=640)
    osl.save(tmp_path / "expected", tensors, options=quantized(kind, configured(tmp_path)))
    osl.save(tmp_path / "plain", tensors, options=osl.WriteOptions(model=configured(tmp_path)))
    options = osl.ConvertOptions(memory_budget_bytes=2 << 20)
    how = {"quantize": osl.Quantization(kind), "options": options}
    osl.convert(tmp_path / "plain", tmp_path / "out", format="hf", **how)
    # A model's side of a mapping, in Orbax's format.
    mapping = osl.Mapping(
        [
            osl.rule("up", osl.tensor(f"{UP}.weight").transpose()),
            osl.rule("embed", osl.tensor("model.embed_tokens.weight")),
            osl.rule("norm", osl.tensor("model.norm.weight")),
        ]
    )
    osl.convert(tmp_path / "plain", tmp_path / "orbax", mapping=mapping)
    osl.convert(
        tmp_path / "orbax", tmp_path / "back", mapping=mapping, config=tmp_path / "config", **how
    )
    again = ["convert", str(tmp_path / "plain"), str(tmp_path / "by"), "--format", "hf", "-q"]
    assert main([*again, "--quantize", kind, "--memory-budget", "2MiB"]) == 0
    expected = decoded(tmp_path / "expected")
    for folder in ("out", "back", "by"):
        stored = decoded(tmp_path / folder)
        assert {n: t.tobytes() for n, t in stored.items()} == {
            n: t.tobytes() for n, t in expected.items()
        }
        config = (tmp_path / folder / "config.json").read_bytes()
        assert config == (tmp_path / "expected" / "config.json").read_bytes()
    with pytest.raises(osl.InvalidArgumentError, match="format 'hf'"):
        osl.convert(tmp_path / "plain", tmp_path / "no", format="orbax", **how)


def test_a_conversion_of_a_quantised_folder_to_another_format(tmp_path):
    tensors = model()
    osl.save(tmp_path / "fp8", tensors, options=quantized("fp8_block", configured(tmp_path)))
    osl.convert(
        tmp_path / "fp8",
        tmp_path / "int4",
        format="hf",
        dequantize="float32",
        quantize=osl.Quantization("int4"),
    )
    plain = {name: tensor for name, tensor in decoded(tmp_path / "fp8").items() if "_proj" in name}
    osl.save(tmp_path / "expected", plain, options=quantized("int4"))
    for name, tensor in decoded(tmp_path / "expected").items():
        assert tensor.tobytes() == decoded(tmp_path / "int4")[name].tobytes()
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["like", "nvfp4", "fp8_block", "int4"])
def test_the_peak_memory_beside_a_large_weight(tmp_path, kind):
    """256 MB are quantised in rows; each thread has some, and their values in float32.

    Like a folder with one scale for the weight, too.
    """
    environment = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    grown = run_alone("save_quantized_peak.py", tmp_path, kind, environment=environment)
    assert int(grown) < 128 << 20


@pytest.mark.parametrize("kind", ["fp8_block", "nvfp4"])
def test_the_peak_memory_of_several_processes(tmp_path, kind):
    """Of 128 MB that two processes hold, the one that writes has a few rows at a time, too."""
    grown = run_processes(
        "save_quantized_peak_of_processes.py",
        processes=2,
        devices=1,
        folder=str(tmp_path),
        kind=kind,
    )
    assert max(grown) < 96 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["nvfp4", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("like", "fp8_block"))],
)
def test_the_peak_memory_of_a_conversion(tmp_path, kind):
    """Of 128 MB a few rows are in memory; also where few scales take all of them."""
    environment = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    grown = run_alone("convert_quantized_peak.py", tmp_path, kind, environment=environment)
    assert int(grown) < 48 << 20


@pytest.mark.parametrize(
    "parts",
    [
        {"weight": ml_dtypes.float8_e4m3fn, "weight_scale_inv": np.float32},
        {"weight_packed": np.int32, "weight_scale": ml_dtypes.bfloat16},
        {"up_proj_blocks": np.uint8, "up_proj_scales": np.uint8},
        {"qweight": np.int32, "scales": np.float16},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_what_is_quantised_already_is_refused(tmp_path, parts):
    """The configuration would speak of the new weights alone, and leave these undecoded."""
    plain = np.ones((128, 128), ml_dtypes.bfloat16)
    tree = {"a.q_proj.weight": plain, "vision.scale": np.ones(4, np.float32)}
    options = osl.WriteOptions(quantize=osl.Quantization("int4"))
    osl.save(tmp_path / "plain", tree, options=options)
    tree |= {f"e.up_proj.{name}": np.ones((128, 128)).astype(kind) for name, kind in parts.items()}
    with pytest.raises(osl.MappingError, match=r"(?s)quantised already.*e\.up_proj.*dequantize"):
        osl.save(tmp_path / "partly", tree, options=options)
    assert not (tmp_path / "partly").exists()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["int4", "deepseek_fp8"])
def test_ready_mappings_leave_scales_of_caches_and_activations_out(tmp_path, kind, keep):
    """As compressed-tensors writes them with a `kv_cache_scheme`."""
    rng = np.random.default_rng(0)
    e, f, heads = 128, 256, 4
    shapes = {f"self_attn.{x}_proj": (e, e) for x in "qkvo"}
    shapes |= {"mlp.up_proj": (f, e), "mlp.gate_proj": (f, e), "mlp.down_proj": (e, f)}
    layer = "model.layers.0."
    tensors = {
        f"{layer}{name}.weight": rng.standard_normal(shape).astype(BF16)
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = np.ones(e, BF16)
    tensors |= {"model.norm.weight": np.ones(e, BF16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.standard_normal((64, e)).astype(BF16)
    config = {
        "model_type": "llama",
        "hidden_size": e,
        "intermediate_size": f,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    side = {"config.json": json.dumps(config).encode()}
    folder = tmp_path / "quantised"
    osl.save(folder, tensors, options=with_model(quantized(kind), side))
    how = {"quantized": "keep"} if keep else {}
    plain = osl.families.mapping(folder, **how)
    expected = osl.load(folder, mapping=plain)
    one = np.ones(1, np.float32)
    names = [f"self_attn.{name}" for name in ("k_scale", "v_scale", "q_proj.input_scale")]
    names.append("mlp.up_proj.activation_scale")
    stored = osl.load(folder) | {layer + name: one for name in names}
    as_it_is = osl.WriteOptions(model=folder)
    folder = tmp_path / "with scales"
    osl.save(folder, stored, options=as_it_is)
    found = osl.load(folder, mapping=osl.families.mapping(folder, **how))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    stored[f"{layer}self_attn.unknown"] = one
    osl.save(folder, stored, options=as_it_is, overwrite=True)
    with pytest.raises(osl.MappingError, match="no rule uses tensor"):
        osl.load(folder, mapping=osl.families.mapping(folder, **how))
