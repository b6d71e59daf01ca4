"""Every dtype of the format, whole and sharded; tensors that no array can hold."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, save
from every_dtype import SHAPE, decode, sample, write
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES

CAST = osl.Mapping([osl.rule("t", osl.tensor("t").cast("float32"))])


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
    wide, mapping = expected.dtype.itemsize == 8 and code != "C64", None
    if wide:
        jax.config.update("jax_enable_x64", True)
    try:
        if code.startswith("F6_") and jax.__version_info__ < (0, 12):
            with pytest.raises(osl.DtypeMismatchError, match="has no arrays of this dtype"):
                osl.load(path, tree)
            tree["t"] = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)
            expected, mapping = expected.astype(np.float32), CAST
        array = osl.load(path, tree, mapping=mapping)["t"]
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
        tree = {"t": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}
        array = osl.load(path, tree, mapping=CAST)
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


# Names of codes and of what goes with them, as formats have them; others are drawn.
NAMES = (
    *("weight", "qweight", "weight_packed", "gate_up_proj", "up_proj_blocks", "w1", "W_q", "codes"),
    *("_weight_qdata", "Qidxs", "trellis", "q_weight", "indices", "kernel", "weight._data"),
)
BESIDE = (
    *(
        "weight_scale",
        "weight_scale_inv",
        "scales",
        "scale",
        "scale_weight",
        "SCB",
        "weight_scale_2",
    ),
    *(
        "gate_up_proj_weight_scale",
        "qscale_weight",
        "w1_weight_scale",
        "suh",
        "codebooks",
        "absmax",
    ),
    *("centroids", "up_proj_scales", "_weight_scale", "biases", "weight.absmax", "lut", "S"),
)
BYTES = [DTYPES[c].numpy for c in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "I8", "U8")]
WORDS = [np.dtype(d) for d in ("int16", "uint16", "int32", "uint32", "int64")]
FLOATS = [np.dtype(d) for d in (np.float32, ml_dtypes.bfloat16, np.float16)]
IDENTIFIERS = st.from_regex(r"[a-zA-Z_][a-z_0-9]{0,9}", fullmatch=True)


@st.composite
def quantised(draw):
    """Tensors among which the first are codes; what else there is, in any spelling and layout."""
    module = draw(st.sampled_from(["", "up.", "model.layers.0.mlp.experts."]))
    name = module + draw(st.sampled_from(NAMES) | IDENTIFIERS)
    dtype = draw(st.sampled_from([*BYTES, *WORDS, *FLOATS]))
    scales = np.ones((4, 1), draw(st.sampled_from([*FLOATS, np.dtype(np.uint8)])))
    beside = module + draw(st.sampled_from(BESIDE) | IDENTIFIERS)
    if dtype in FLOATS:
        beside = f"{name}.{draw(IDENTIFIERS)}"
    elif dtype in WORDS:
        beside = name.rpartition(".")[0] + "." * ("." in name) + beside.rpartition(".")[2]
    elif draw(st.booleans()):
        beside = "scales." + beside
    codes = np.arange(8).reshape(4, 2).astype(dtype)
    others = {beside: scales, "norm.weight": np.ones(4, np.float32)}
    return name, codes, {key: value for key, value in others.items() if key != name}


def refusal(call, *arguments, **options):
    with pytest.raises(osl.DtypeMismatchError, match="may be codes of quantised values") as caught:
        call(*arguments, **options)
    return str(caught.value)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=quantised(), wanted=st.sampled_from(FLOATS))
def test_codes_become_floats_only_where_someone_says_so(tmp_path, drawn, wanted):
    """Values would be those of another model; the hints of the error do what they say."""
    name, codes, others = drawn
    if codes.dtype == wanted or len(others) < 2:
        return
    folder, out = tmp_path / "in", tmp_path / "out"
    osl.save(folder, {name: codes, **others}, overwrite=True, options=osl.WriteOptions(fsync=False))
    tree = {name: jax.ShapeDtypeStruct(codes.shape, wanted)}
    lenient = osl.ReadOptions(strict=False)
    text = refusal(osl.load, folder, tree, options=lenient)
    assert repr(name) in text
    assert refusal(osl.load, folder, tree | dict.fromkeys(others, ...)) == text
    assert refusal(osl.plan_load, folder, tree, options=lenient) == text
    rules = [osl.rule("w", osl.tensor(name).reshape(2, 4))]
    tree = {"w": jax.ShapeDtypeStruct((2, 4), wanted)}
    if codes.dtype.name not in ("float4_e2m1fn", "float6_e2m3fn"):  # those are not rearranged
        refusal(osl.load, folder, tree, mapping=osl.Mapping(rules, strict=False))
    if codes.dtype.kind not in "iu" and codes.dtype.itemsize == 1:
        write = osl.WriteOptions(dtype=wanted, fsync=False)
        assert "leaf.astype" in refusal(osl.save, out, {name: codes, **others}, options=write)
        for target in ("hf", "sharded", "orbax"):
            cast = osl.ConvertOptions(dtype=wanted)
            refusal(osl.convert, folder, out, format=target, options=cast)
        assert not out.exists()
    # what the hint says
    assert f"ask for {codes.dtype} and cast what is loaded" in text
    tree = {name: np.empty_like(codes)}
    assert_same_bits(osl.load(folder, tree, options=lenient)[name], codes)
    said = f"osl.tensor({name!r}).cast({wanted.name!r})"
    assert said in text
    rules = osl.Mapping([osl.rule("w", eval(said, {"osl": osl}))], strict=False)
    assert_same_bits(osl.load(folder, mapping=rules)["w"], codes.astype(np.float32).astype(wanted))
    assert ("osl.dequantized does not decode it" in text) == (not decodes(folder, name))


def decodes(folder, name):
    try:
        leaves = osl.dequantized(folder).leaf_facts(folder)
    except osl.SafetensorsLayoutError:
        return False
    return name not in leaves or leaves[name].dtype in (*FLOATS, *WORDS, *BYTES)


def test_codes_that_are_decoded_have_a_hint_that_decodes_them(tmp_path):
    values = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    scale = np.full((4, 1), 0.25, np.float32)
    osl.save(tmp_path / "in", {"up.weight": values, "up.weight_scale": scale})
    tree = {"up.weight": jax.ShapeDtypeStruct((4, 4), ml_dtypes.bfloat16), "up.weight_scale": ...}
    text = refusal(osl.load, tmp_path / "in", tree)
    assert "Decode it with mapping=osl.dequantized(FOLDER)" in text
    decoded = osl.load(tmp_path / "in", mapping=osl.dequantized(tmp_path / "in"))
    assert (decoded["up.weight"] == 0.25).all()
    assert "convert(..., dequantize=) (--dequantize) writes the values" in text
    osl.convert(tmp_path / "in", tmp_path / "out", format="hf", dequantize="bfloat16")
    assert (osl.load(tmp_path / "out")["up.weight"] == 0.25).all()


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_values_of_8_bits_are_converted_where_a_mapping_says_so(tmp_path, kind):
    tensors = {"a.w": np.array([[0.5, 2]], ml_dtypes.float8_e4m3fn), "b": np.ones(3, np.float32)}
    osl.save(tmp_path / "in", tensors)
    source, options = tmp_path / "in", osl.ConvertOptions(dtype="bfloat16")
    if kind == "orbax":
        osl.convert(source, tmp_path / "orbax", format="orbax")
        source = tmp_path / "orbax"
    text = refusal(osl.convert, source, tmp_path / "out", format="hf", options=options)
    said = text[text.index("osl.Mapping(") :].removesuffix(".").partition(", of")[0]
    assert "of a checkpoint in Orbax's format convert it to safetensors first" in text
    if kind == "orbax":
        osl.convert(source, source := tmp_path / "first")
    mapping = eval(said, {"osl": osl, "SOURCE": source})
    osl.convert(source, tmp_path / "out", mapping=mapping, format="hf", options=options)
    for name, value in osl.load(tmp_path / "out").items():
        assert_same_bits(value, tensors[name].astype(ml_dtypes.bfloat16))
    leaf = tensors["a.w"].astype("bfloat16")
    osl.save(tmp_path / "cast", {"a.w": leaf}, options=osl.WriteOptions(dtype="bfloat16"))
    assert_same_bits(osl.load(tmp_path / "cast")["a.w"], leaf)
    own = osl.WriteOptions(dtype=tensors["a.w"].dtype)
    osl.save(tmp_path / "own", {"a.w": tensors["a.w"]}, options=own)
    assert_same_bits(osl.load(tmp_path / "own")["a.w"], tensors["a.w"])


def test_integers_without_floats_beside_them_are_cast_as_by_orbax(tmp_path):
    tensors = {
        "step": np.int32(3),
        "ids": np.arange(4, dtype=np.int64),
        "table.ids": np.arange(4, dtype=np.int32).reshape(2, 2),
        "table.mask": np.array([[True, False]]),
        "w": np.ones((2, 2), np.float32),
    }
    osl.save(tmp_path / "in", tensors)
    tree = {name: jax.ShapeDtypeStruct(t.shape, ml_dtypes.bfloat16) for name, t in tensors.items()}
    for name, loaded in osl.load(tmp_path / "in", tree).items():
        assert_same_bits(loaded, tensors[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("code", [np.int16, np.uint16, np.int32, np.uint32])
@pytest.mark.parametrize(
    ("words", "scale"),
    [
        ("l.w", "l.w.absmax"),
        ("l.weight", "l.weight.scales.0"),
        ("l.weight", "l_scale"),
        ("l.weight", "l.quant.scale"),
        ("l.weight", "scales.l.weight"),
        ("W", "W.scale"),
        ("l.experts.0.w", "l.experts.0_scale"),
    ],
)
def test_words_are_not_cast_whatever_their_scale_is_called(tmp_path, code, words, scale):
    tensors = {words: np.ones((8, 8), code), scale: np.ones(8, np.float32), "other": np.ones(3)}
    path = save(tmp_path / "model", tensors)
    asked = {words: jax.ShapeDtypeStruct((8, 8), jax.numpy.bfloat16)}
    with pytest.raises(osl.DtypeMismatchError, match="may be codes"):
        osl.load(path, asked)
    with pytest.raises(osl.MappingError, match="no known scheme has"):
        osl.dequantized(path)
    assert_same_bits(osl.load(path)[words], tensors[words])
    alone = save(tmp_path / "alone", {words: tensors[words], "other": tensors["other"]})
    assert osl.load(alone, asked)[words].dtype == jax.numpy.bfloat16
