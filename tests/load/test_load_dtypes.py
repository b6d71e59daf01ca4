"""Every dtype of the format, whole and sharded; tensors that no array can hold."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits
from every_dtype import SHAPE, decode, sample, write
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_host_arrays(tmp_path, code):
    raw = sample(code)
    path = write(tmp_path / "t.safetensors", {"t": (code, SHAPE, raw)})
    assert_same_bits(osl.load(path)["t"], decode(code, SHAPE, raw))


@pytest.mark.parametrize("spec", [(), ("a",), (None, "a"), ("a", "b"), (None, ("a", "b"))], ids=str)
@pytest.mark.parametrize("code", sorted(DTYPES))
def test_sharded_arrays(tmp_path, code, spec):
    raw = sample(code)
    path = write(tmp_path / "t.safetensors", {"t": (code, SHAPE, raw)})
    expected = decode(code, SHAPE, raw)
    mesh = mesh_of(a=4, b=2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    tree = {"t": jax.ShapeDtypeStruct(SHAPE, expected.dtype, sharding=sharding)}
    wide = expected.dtype.itemsize == 8 and code != "C64"
    if wide:
        jax.config.update("jax_enable_x64", True)
    try:
        if code.startswith("F6_") and jax.__version_info__ < (0, 12):
            with pytest.raises(osl.DtypeMismatchError, match="has no arrays of this dtype"):
                osl.load(path, tree)
            tree["t"] = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)
            expected = expected.astype(np.float32)
        array = osl.load(path, tree)["t"]
    finally:
        jax.config.update("jax_enable_x64", False)
    for shard in array.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index])


@pytest.mark.parametrize("shape", [(2, 3, 4), (4, 5), (8, 1), (16,), (2, 2, 2, 7)])
@pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
def test_packed_rows_that_share_bytes(tmp_path, code, shape):
    raw = sample(code, shape)
    path = write(tmp_path / "t.safetensors", {"t": (code, shape, raw)})
    expected = decode(code, shape, raw)
    mesh = mesh_of(a=2)
    for axis, extent in enumerate(shape):
        if extent % 2:
            continue
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, "a"))
        array = osl.load(path, {"t": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)})
        for shard in array["t"].addressable_shards:
            assert_same_bits(shard.data, expected[shard.index].astype(np.float32))


def test_a_shard_of_packed_rows_reads_its_own_bytes(tmp_path):
    path = write(tmp_path / "t.safetensors", {"t": ("F4", SHAPE, sample("F4"))})
    mesh = jax.sharding.AbstractMesh((4,), ("a",))
    leaf = jax.ShapeDtypeStruct(
        SHAPE, DTYPES["F4"].numpy, sharding=NamedSharding(mesh, PartitionSpec(None, "a"))
    )
    options = osl.ReadOptions(latency_seconds={"local": 0.0})
    plan = osl.plan_load(path, {"t": leaf}, options=options, process_index=1, process_count=4)
    assert plan.cost().read_bytes == 8 * 48 // 4 // 2


def test_more_dimensions_than_numpy_has(tmp_path):
    path = write(tmp_path / "t.safetensors", {"deep": ("U8", (1,) * 65, b"x")})
    assert osl.metadata(path)["deep"].shape == (1,) * 65
    for tree in (None, osl.metadata(path)):
        with pytest.raises(osl.ShapeMismatchError, match="65 dimensions") as caught:
            osl.load(path, tree)
        assert caught.value.tensor == "deep"


@pytest.mark.parametrize("shape", [(2**63, 0), (0, 2**64 - 1), (2**40, 0, 2**40)])
def test_empty_tensors_larger_than_numpy_has(tmp_path, shape):
    tensors = {"none": ("F32", shape, b""), "one": ("U8", (), b"\7")}
    path = write(tmp_path / "t.safetensors", tensors)
    assert osl.metadata(path)["none"].shape == shape
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    for tree in (None, {"none": osl.metadata(path)["none"]}, {"none": leaf}):
        with pytest.raises(osl.ShapeMismatchError, match=f"the largest {max(shape)}") as caught:
            osl.load(path, tree)
        assert caught.value.tensor == "none"
    assert osl.load(path, only="one")["one"] == 7


def test_empty_tensors(tmp_path):
    path = write(
        tmp_path / "t.safetensors", {"none": ("F32", (0, 8), b""), "one": ("U8", (), b"\7")}
    )
    loaded = osl.load(path, {"none": jax.ShapeDtypeStruct((0, 8), np.float32), "one": int})
    assert loaded["none"].shape == (0, 8)
    assert loaded["one"] == 7


CODES = {
    "blocks": ("up.weight", ml_dtypes.float8_e4m3fn, "up.weight_scale_inv"),
    "tensor": ("up.weight", ml_dtypes.float8_e5m2, "up.weight_scale"),
    "integers": ("up.weight", np.int8, "up.weight_scale"),
    "published DeepSeek-V4": ("up.weight", ml_dtypes.float8_e4m3fn, "up.scale"),
    "bitsandbytes": ("up.weight", np.int8, "up.SCB"),
    "ComfyUI": ("up.weight", ml_dtypes.float8_e4m3fn, "up.scale_weight"),
    "optimum-quanto": ("up.weight._data", ml_dtypes.float8_e4m3fn, "up.weight._scale"),
    "HQQ": ("up.W_q", np.uint8, "up.scale"),
    "NVFP4": ("up.weight", np.uint8, "up.weight_scale_2"),
    "compressed-tensors": ("up.weight_packed", np.uint8, "up.weight_scale"),
    "GPT-OSS": ("experts.up_proj_blocks", np.uint8, "experts.up_proj_scales"),
    "bitsandbytes of 4 bits": ("up.weight", np.uint8, "up.weight.absmax"),
    "torchao": ("up._weight_qdata", np.int8, "up._weight_scale"),
    "fused experts": ("experts.up_proj", ml_dtypes.float8_e4m3fn, "experts.up_proj_scale"),
}
OTHERS = ("bitsandbytes", "ComfyUI", "optimum-quanto", "HQQ")  # which are not decoded
REFUSED = r"quantised: a cast would leave out its scale.*'{}'.*osl\.(dequantized|opaque)"


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_not_cast_without_their_scales(tmp_path, kind):
    """Values would be those of another model; what is not cast stays as it is."""
    name, dtype, scale = CODES[kind]
    codes = np.arange(16).reshape(4, 4).astype(dtype)
    tensors = {name: codes, scale: np.full((1, 1), 0.01, np.float32)}
    osl.save(tmp_path / "in", tensors)
    for strict in (True, False):
        options = osl.ReadOptions(strict=strict)
        tree = {name: jax.ShapeDtypeStruct((4, 4), ml_dtypes.bfloat16), scale: ...}
        with pytest.raises(osl.DtypeMismatchError, match=REFUSED.format(name)) as caught:
            osl.load(tmp_path / "in", tree, options=options)
        assert (f"{scale!r} has the scale" in str(caught.value)) == (kind in OTHERS)
        with pytest.raises(osl.DtypeMismatchError, match=REFUSED.format(name)):
            osl.plan_load(tmp_path / "in", tree, options=options)
        tree[name] = jax.ShapeDtypeStruct((4, 4), dtype)
        assert_same_bits(osl.load(tmp_path / "in", tree, options=options)[name], codes)
    moved = osl.Mapping([osl.rule("up", osl.tensor(name).transpose())], strict=False)
    for wanted in (ml_dtypes.bfloat16, np.float32):
        tree = {"up": jax.ShapeDtypeStruct((4, 4), wanted)}
        with pytest.raises(osl.DtypeMismatchError, match=REFUSED.format(name)):
            osl.load(tmp_path / "in", tree, mapping=moved)
    tree = {"up": jax.ShapeDtypeStruct((4, 4), dtype)}
    assert_same_bits(osl.load(tmp_path / "in", tree, mapping=moved)["up"], codes.T)


def test_data_that_are_scaled_by_a_tensor_of_another_name_are_cast(tmp_path):
    pixels = np.arange(16, dtype=np.uint8)
    names = ("train_data", "train_scale", "a", "a.scale")
    osl.save(tmp_path / "in", dict.fromkeys(names, pixels))
    tree = dict.fromkeys(names, jax.ShapeDtypeStruct((16,), np.float32))
    for loaded in osl.load(tmp_path / "in", tree).values():
        assert np.array_equal(loaded, pixels.astype(np.float32))


@pytest.mark.parametrize(
    "kind", [kind for kind in CODES if np.dtype(CODES[kind][1]).kind not in "iu"]
)
def test_codes_are_not_cast_in_saves_and_conversions(tmp_path, kind):
    name, dtype, scale = CODES[kind]
    codes = np.arange(16).reshape(4, 4).astype(dtype)
    tensors = {name: codes, scale: np.full((1, 1), 0.01, np.float32)}
    osl.save(tmp_path / "in", tensors)
    out, refused = tmp_path / "out", REFUSED.format(name)
    write = osl.WriteOptions(dtype="bfloat16")
    copies = osl.Mapping([osl.rule(key, osl.tensor(key)) for key in tensors])
    for mapping in (None, copies):
        with pytest.raises(osl.DtypeMismatchError, match=refused):
            osl.save(out, tensors, mapping=mapping, options=write)
    for target in ("hf", "sharded", "orbax"):
        options = osl.ConvertOptions(dtype="bfloat16")
        with pytest.raises(osl.DtypeMismatchError, match=refused):
            osl.convert(tmp_path / "in", out, format=target, options=options)
    assert not out.exists()
    osl.convert(tmp_path / "in", out, format="hf")
    assert_same_bits(osl.load(out)[name], codes)
    # Without a scale they are values like others.
    alone = {name: codes, "bias": np.ones(4, np.float32)}
    osl.save(out, alone, options=write, overwrite=True)
    assert_same_bits(osl.load(out)[name], codes.astype(ml_dtypes.bfloat16))
    osl.save(out, alone, options=osl.WriteOptions(dtype=dtype), overwrite=True)
    assert osl.load(out)[name].dtype == dtype
