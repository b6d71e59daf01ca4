"""Sub-byte elements that files hold one a byte: every way of reading sees what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from saved_files import PACKED_BITS, assert_saved, raw_tensors, write_packed

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import inspect
from orbax_safetensors_layout.format import MANIFEST

FLOATS = ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"]
INTEGERS = ["int4", "uint4", "int2", "uint2"]
DTYPES = [np.dtype(getattr(ml_dtypes, name)) for name in FLOATS + INTEGERS]
LAYOUTS = ["hf", "sharded"]


def values_of(dtype: np.dtype, size: int) -> np.ndarray:
    """All values of a dtype, again and again."""
    if "int" in dtype.name:
        bounds = ml_dtypes.iinfo(dtype)
        return np.resize(np.arange(bounds.min, bounds.max + 1, dtype=np.int8), size).astype(dtype)
    bits = ml_dtypes.finfo(dtype).bits
    return np.resize(np.arange(1 << bits, dtype=np.uint8), size).view(dtype)


@pytest.fixture(params=LAYOUTS)
def layout(request) -> str:
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: dtype.name)
def stored(request, layout, tmp_path) -> tuple[Path, np.ndarray]:
    """A checkpoint whose `w` has an element a byte, for 63 fill no whole bytes; and its value."""
    value = values_of(request.param, 63).reshape(7, 9)
    osl.save(tmp_path / "x", {"w": value}, options=osl.WriteOptions(layout=layout))
    (raw,) = raw_tensors(tmp_path / "x").values()
    assert raw.code in ("U8", "I8")
    return tmp_path / "x", value


def test_every_way_of_reading_sees_the_recorded_dtype(stored):
    path, value = stored
    assert_same_bits(osl.load(path)["w"], value)
    assert_same_bits(osl.load(path, only="w")["w"], value)
    assert_same_bits(osl.load(path, {"w": value})["w"], value)
    assert osl.metadata(path)["w"].dtype == value.dtype
    mapping = osl.Mapping([osl.rule("m", osl.tensor("w"))])
    assert mapping.abstract(path)["m"].dtype == value.dtype
    assert osl.metadata(path, mapping=mapping)["m"].dtype == value.dtype
    assert_same_bits(osl.load(path, mapping=mapping)["m"], value)
    assert osl.plan_load(path, {"w": value}).needed_bytes == value.size


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float64", "float8_e4m3fn"])
def test_a_cast_that_a_mapping_asks_for_converts_the_values(stored, wanted):
    path, value = stored
    dtype = np.dtype(getattr(ml_dtypes, wanted, wanted))
    expected = value.astype(np.float32).astype(dtype)
    cast = osl.Mapping([osl.rule("w", osl.tensor("w").cast(dtype))])
    asked = {"w": np.zeros(value.shape, dtype)}
    assert_same_bits(osl.load(path, asked, mapping=cast)["w"], expected)
    if wanted != "float64":
        sharding = NamedSharding(mesh_of(x=7), P("x"))
        struct = jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding)
        assert_same_bits(np.asarray(osl.load(path, {"w": struct}, mapping=cast)["w"]), expected)
    if dtype.itemsize > 1:  # without it they may be codes
        with pytest.raises(osl.DtypeMismatchError, match="may be codes"):
            osl.load(path, asked)
    mapping = osl.Mapping([osl.rule("m", osl.tensor("w").transpose(1, 0).cast(dtype))])
    assert_same_bits(osl.load(path, mapping=mapping)["m"], np.ascontiguousarray(expected.T))


def test_a_conversion_and_a_comparison_see_the_values(stored, tmp_path):
    path, value = stored
    osl.save(tmp_path / "plain", {"w": value.astype(np.float32)})
    as_floats = osl.Mapping([osl.rule("w", osl.tensor("w").cast("float32"))])
    osl.convert(path, tmp_path / "to", format="hf", mapping=as_floats, inverse=False)
    assert_same_bits(osl.load(tmp_path / "to")["w"], value.astype(np.float32))
    assert osl.verify(tmp_path / "to", tmp_path / "plain").ok
    assert osl.verify(tmp_path / "plain", path, mapping=as_floats).ok
    other = "sharded" if (path / MANIFEST).read_text().find('"hf"') > 0 else "hf"
    osl.save(tmp_path / "other", {"w": value}, options=osl.WriteOptions(layout=other))
    assert osl.verify(path, tmp_path / "other").ok
    differs = osl.verify(path, tmp_path / "plain")
    assert [f"'w' is {value.dtype}" in str(f) for f in differs.findings] == [True]


def test_an_inspection_names_the_recorded_dtype(stored):
    path, value = stored
    (tensor,) = inspect(path).tensors
    expected = {
        "float4_e2m1fn": "F4", "float6_e2m3fn": "F6_E2M3", "float6_e3m2fn": "F6_E3M2",
        "int4": "I4", "uint4": "U4", "int2": "I2", "uint2": "U2",
    }  # fmt: skip
    assert (tensor.dtype, tensor.nbytes) == (expected[value.dtype.name], value.size)


def record(path: Path, dtype: object, tensor: str = "w") -> None:
    """Another recorded dtype."""
    text = (path / MANIFEST).read_text()
    document = json.loads(text)
    (leaf,) = [node for node in document["tree"] if node and node.get("tensor") == tensor]
    leaf["dtype"] = dtype
    (path / MANIFEST).write_text(json.dumps(document))


@pytest.mark.parametrize("dtype", ["float4_e2m1", "float32", "", "O", 7, "int8,int8"])
def test_an_unknown_recorded_dtype_is_refused_by_name(layout, dtype, tmp_path):
    options = osl.WriteOptions(layout=layout)
    osl.save(tmp_path, {"w": values_of(DTYPES[0], 9)}, options=options, overwrite=True)
    record(tmp_path, dtype)
    for read in (osl.load, osl.metadata, inspect, lambda path: osl.load(path, only="*")):
        with pytest.raises(osl.InvalidManifestError, match="dtype of a"):
            read(tmp_path)


def test_a_recorded_dtype_that_does_not_fit_the_file_is_refused(layout, tmp_path):
    options = osl.WriteOptions(layout=layout)
    osl.save(tmp_path, {"w": values_of(DTYPES[0], 9)}, options=options, overwrite=True)
    record(tmp_path, "int4")
    for read in (osl.load, osl.metadata, lambda path: osl.load(path, only="*")):
        with pytest.raises(osl.InvalidManifestError, match=r"I8 for int4.*U8"):
            read(tmp_path)
    assert not osl.verify(tmp_path).ok


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12])
def test_packed_elements_stay_packed_or_are_refused_without_a_manifest(tmp_path, dtype, size):
    value = values_of(np.dtype(getattr(ml_dtypes, dtype)), size)
    bits, same = PACKED_BITS[value.dtype], osl.Mapping([osl.rule("w", osl.tensor("w"))])
    others = osl.Mapping([osl.rule("w", osl.tensor("v").slice(0, 0, size))])
    osl.save(tmp_path / "others", {"v": values_of(value.dtype, 25)})
    osl.save(tmp_path / "saved", {"w": value})
    ways = {
        "mapped": lambda to: osl.save(to, {"w": value}, mapping=same),
        "cut": lambda to: osl.convert(tmp_path / "others", to, format="hf", mapping=others),
        "file": lambda to: osl.convert(tmp_path / "saved/model.safetensors", to, format="hf"),
    }
    for name, write in ways.items():
        if size * bits % 8:
            with pytest.raises(osl.SafetensorsLayoutError, match="fill whole bytes"):
                write(tmp_path / name)
            assert not (tmp_path / name).exists()
        else:
            write(tmp_path / name)
            assert_saved(tmp_path / name, {"w": value})
    assert_saved(tmp_path / "saved", {"w": value})
    if size * bits % 8 == 0:
        write_packed(tmp_path / "hf", {"w": value})
        for form in ("hf", "sharded"):
            osl.convert(tmp_path / "hf", tmp_path / f"to_{form}", format=form)
            osl.consolidate(tmp_path / f"to_{form}") if form == "sharded" else None
            assert_saved(tmp_path / f"to_{form}", {"w": value})


def test_a_file_of_pieces_by_itself_has_the_saved_dtypes(stored, tmp_path):
    path, value = stored
    mesh = mesh_of(jax.devices()[:7], x=7)
    if not value.dtype.name.startswith("float6"):
        leaf = jax.device_put(value, NamedSharding(mesh, P("x")))
        osl.save(path, {"w": leaf}, options=osl.WriteOptions(layout="sharded"), overwrite=True)
    (file,) = path.glob("*.safetensors")
    for name, piece in osl.load(file).items():
        start = int(name.partition("@")[2].partition(",")[0] or 0)
        assert_same_bits(piece, value[start : start + len(piece)])
        assert osl.metadata(file)[name].dtype == value.dtype


def test_bytes_that_are_no_values_are_refused(tmp_path):
    osl.save(tmp_path / "x", {"w": np.arange(9, dtype=np.int8)})
    record(tmp_path / "x", "int4")
    with pytest.raises(osl.FormatError, match=r"'w'.*values of int4.*8"):
        osl.load(tmp_path / "x")


def test_truth_values_of_other_bytes_are_refused(tmp_path):
    osl.save(tmp_path, {"w": np.array([0, 1, 2, 255], np.uint8).view(np.bool_)}, overwrite=True)
    device = jax.ShapeDtypeStruct((4,), np.bool_, sharding=NamedSharding(mesh_of(x=4), P("x")))
    for abstract in (None, np.zeros(4, np.bool_), np.zeros(4, np.float32), device):
        with pytest.raises(osl.FormatError, match=r"'w'.*0 or 1.*(2|255)"):
            osl.load(tmp_path, None if abstract is None else {"w": abstract})
    with pytest.raises(osl.FormatError, match=r"'w'.*0 or 1.*255"):
        osl.load(tmp_path, only="*")
    doubled = osl.concat([osl.tensor("w"), osl.tensor("w")], axis=0).cast("float32")
    with pytest.raises(osl.FormatError, match=r"0 or 1.*255"):
        osl.load(tmp_path, mapping=osl.Mapping([osl.rule("m", doubled)]))
