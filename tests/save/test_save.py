"""Saving from one process: every bit arrives, and what fails changes nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import math
import os
import pathlib
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from checkpoints import assert_same_bits, llama_like, random_tensor
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec, SingleDeviceSharding
from limits import few_descriptors, full_disk
from meshes import mesh_of, place
from programs import run_alone
from random_trees import random_bits, trees
from sampling import every
from saved_files import assert_saved, header, raw_file, raw_tensors

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, NewTensor, lay_out
from orbax_safetensors_layout.geometry import Box, Tile
from orbax_safetensors_layout.plan import FilePart, FileWrite, LeafWrite, WritePlan
from orbax_safetensors_layout.runtime import ProcessGroup, Workers
from orbax_safetensors_layout.sharding import GlobalShards
from orbax_safetensors_layout.storage import LocalStorage, partial_folder
from orbax_safetensors_layout.writing import CheckpointFolder, write_parts

P = PartitionSpec
MIB = 1 << 20
BF16 = np.dtype(ml_dtypes.bfloat16)
F4 = np.dtype(ml_dtypes.float4_e2m1fn)
MANIFEST = "orbax_safetensors_layout.json"


def quick(**options) -> osl.WriteOptions:
    return osl.WriteOptions(**{"fsync": False, **options})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    trees(),
    st.sampled_from([1, 100, 1000, 5 * 10**9]),
    st.sampled_from([1, 3]),
    st.sampled_from([None, 1, 1000]),
)
def test_every_bit_arrives(case, max_file_bytes, concurrency, budget):
    tree, expected = case
    options = quick(
        max_file_bytes=max_file_bytes, concurrency=concurrency, memory_budget_bytes=budget
    )
    with tempfile.TemporaryDirectory() as folder:
        osl.save(folder, tree, options=options)
        assert_saved(Path(folder), expected)
        for file in Path(folder).glob("*.safetensors"):
            start, document = header(file)
            assert start % 4096 == 0
            assert document["__metadata__"] == {"format": "pt"}
            with safetensors.safe_open(file, "np") as opened:
                assert set(opened.keys()) == document.keys() - {"__metadata__"}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees())
def test_the_same_values_make_the_same_bytes(case):
    """However they are placed, in whatever order the tree has them."""
    tree, expected = case
    flat = dict(reversed(expected.items()))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as other:
        osl.save(first, tree, options=quick(max_file_bytes=100, concurrency=3))
        osl.save(other, flat, options=quick(max_file_bytes=100, concurrency=1))
        for file in (*Path(first).glob("*.safetensors"), *Path(first).glob("*.index.json")):
            assert file.read_bytes() == (Path(other) / file.name).read_bytes()


# Numpy leaves, laid out in memory in any way.


def big_endian(value):
    return value.astype(value.dtype.newbyteorder(">"))


LAYOUTS = {
    "fortran": np.asfortranarray,
    "transposed": lambda v: np.ascontiguousarray(v.T).T,
    "strided": lambda v: np.repeat(v, 2, axis=-1)[..., ::2],
    "reversed": lambda v: np.ascontiguousarray(v[::-1])[::-1],
    "big-endian": big_endian,
    "big-endian fortran": lambda v: np.asfortranarray(big_endian(v)),
    "read-only": lambda v: np.frombuffer(v.tobytes(), v.dtype).reshape(v.shape),
    "unaligned": lambda v: np.frombuffer(b"x" + v.tobytes(), v.dtype, offset=1).reshape(v.shape),
}


@pytest.mark.parametrize("shape", [(7, 5), (3000, 701), (2, 3, 4, 5), (9,)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f4", "i2", "u1"])
def test_numpy_arrays_of_any_layout(tmp_path, layout, shape, dtype):
    value = random_tensor(shape, np.dtype(dtype))
    osl.save(tmp_path, {"t": LAYOUTS[layout](value)}, options=quick())
    assert_saved(tmp_path, {"t": value})


def test_other_numpy_leaves(tmp_path):
    (tmp_path / "bytes").write_bytes(np.arange(6, dtype="i2").tobytes())
    tree = {
        "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
        "memmap": np.memmap(tmp_path / "bytes", "i2", "r"),
        "scalar": np.float64(-0.0),
        "bf16": BF16.type(3),
        "flag": np.bool_(True),
        "big": np.array(7, ">i8"),
        "empty": np.zeros((0, 3), ">f8"),
    }
    osl.save(tmp_path / "saved", tree, options=quick())
    assert_saved(tmp_path / "saved", {name: np.asarray(value) for name, value in tree.items()})


def test_python_leaves_stand_beside_the_tensors(tmp_path):
    tree = {"a": np.zeros(2), "step": 7, "rate": 0.1, "on": True, "name": "x", "none": None}
    osl.save(tmp_path, tree, options=quick())
    assert_saved(tmp_path, {"a": tree["a"]})
    assert (tmp_path / MANIFEST).exists()


def test_a_flat_dict_of_names_gives_the_files_of_hugging_face(tmp_path):
    tensors = llama_like()
    osl.save(tmp_path, tensors, options=quick(max_file_bytes=40_000, metadata={"who": "me"}))
    assert_saved(tmp_path, tensors)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for file in files:
        with safetensors.safe_open(tmp_path / file, "np") as opened:
            assert opened.metadata() == {"format": "pt", "who": "me"}
    assert {file.name for file in tmp_path.iterdir()} == {
        *files,
        "model.safetensors.index.json",
        MANIFEST,
    }


@pytest.mark.slow
@pytest.mark.parametrize("max_file_bytes", [5 * 10**9, 50_000])
def test_transformers_opens_it(tmp_path, max_file_bytes):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.config.save_pretrained(tmp_path)
    mesh = mesh_of(x=8)
    tensors = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    tree = {
        name: place(value, P(None, "x") if value.ndim > 1 else P("x"), mesh)
        for name, value in tensors.items()
    }
    osl.save(tmp_path, tree, options=quick(max_file_bytes=max_file_bytes))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert_same_bits(value.detach().numpy(), tensors[name])


# Arrays that are put together from shards, in several blocks.

STAGED = [
    ((3001, 1112), "f4", P(None, "x")),  # 13 MB, rows that do not divide a block
    ((5000, 8), "u1", P(None, "x")),  # shards of one byte a row
    ((5000, 24), "u1", P(None, "x")),
    ((1000, 8, 3), "f2", P(None, "x")),
    ((65, 64, 1024), "bf16", P("x", None, None)),
    ((65, 64, 1024), "bf16", P(None, "x")),
    ((65, 64, 1024), "bf16", P(None, None, "x")),
    ((65, 64, 1024), "bf16", P(None, "x", "y")),
    ((8, 64, 1030), "f4", P("x", "y", "z")),
    ((3, 5, 16, 7, 64), "i1", P(None, None, "x", None, "y")),
    ((1, 1, 4096, 640), "f4", P(None, None, None, "x")),
    ((2, 400_000), "f4", P(None, "x")),  # rows larger than a block
    ((4, 2, 400_000), "f4", P("x", None, "y")),
    ((16, 2_000_000), "u1", P("x")),  # in order: written from where they are
    ((4_000_000,), "f4", P("x")),
    ((1, 4_000_000), "f4", P(None, "x")),
    ((4000, 1000), "c8", P(None, "x")),
    ((3001, 1112), "float4_e2m1fn", P(None, "x")),
    ((3001, 1112), "float4_e2m1fn", P()),
    ((3001, 1112), "int4", P(None, "x")),
    ((2_000_000, 2), "float4_e2m1fn", P(None, "x")),
    ((40, 3, 5), "float4_e2m1fn", P("x")),
]


@pytest.mark.parametrize(("shape", "dtype", "spec"), STAGED, ids=str)
def test_shards_are_put_together(tmp_path, shape, dtype, spec):
    names = [name for name in spec if name]
    axes = dict(zip(names, {0: [], 1: [8], 2: [4, 2], 3: [2, 2, 2]}[len(names)], strict=True))
    axes = axes or {"x": 8}
    if dtype == "float4_e2m1fn" and shape[-1] == 2:
        axes = {"x": 2}
    dtype = np.dtype({"bf16": BF16}.get(dtype) or getattr(ml_dtypes, dtype, None) or dtype)
    if any(n % axes[a] for n, a in zip(shape, [*spec, *[None] * 9], strict=False) if a):
        shape = tuple(
            n // 8 * 8 if a else n for n, a in zip(shape, [*spec, *[None] * 9], strict=False)
        )
    value = random_bits(shape, dtype)
    osl.save(tmp_path, {"t": place(value, spec, mesh_of(**axes)), "u": value[:1]}, options=quick())
    assert_saved(tmp_path, {"t": value, "u": value[:1]})


def test_arrays_with_a_layout_of_their_own(tmp_path):
    """Column-major in device memory is row-major in the file."""
    value = random_tensor((64, 40), np.dtype("f4"))
    placement = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))
    osl.save(tmp_path, {"t": jax.device_put(value, placement)}, options=quick())
    assert_saved(tmp_path, {"t": value})


def test_wide_arrays(tmp_path):
    mesh = mesh_of(x=8)
    jax.config.update("jax_enable_x64", True)
    try:
        values = {n: random_tensor((80, 24), np.dtype(n)) for n in ("f8", "i8", "u8")}
        tree = {name: place(value, P(None, "x"), mesh) for name, value in values.items()}
        osl.save(tmp_path, tree, options=quick())
    finally:
        jax.config.update("jax_enable_x64", False)
    assert_saved(tmp_path, values)


def test_memory_of_other_kinds(tmp_path):
    device = jax.devices()[3]
    kinds = [memory.kind for memory in device.addressable_memories()]
    assert "pinned_host" in kinds
    value = random_tensor((7, 5), np.dtype("f4"))
    tree = {
        kind: jax.device_put(value, SingleDeviceSharding(device, memory_kind=kind))
        for kind in kinds
    }
    osl.save(tmp_path, tree, options=quick())
    assert_saved(tmp_path, dict.fromkeys(kinds, value))


def test_under_a_transfer_guard(tmp_path):
    value = random_tensor((64, 40), np.dtype("f4"))
    array = place(value, P(None, "x"), mesh_of(x=8))
    with jax.transfer_guard("disallow"):
        osl.save(tmp_path, {"t": array}, options=quick())
    assert_saved(tmp_path, {"t": value})


# Casts.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32", "float64"])
def test_a_dtype_of_the_file_rounds_as_numpy(tmp_path, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    tree, expected = {}, {}
    mesh = mesh_of(x=4, y=2)
    for number, source in enumerate(["f4", "f2", BF16, "f8"]):
        value = random_tensor((320, 24), np.dtype(source), number)
        value.reshape(-1)[:4] = [-0.0, np.inf, -np.inf, np.nan]
        with np.errstate(all="ignore"):
            expected[f"{number}.host"] = expected[f"{number}.array"] = value.astype(dtype)
        tree[f"{number}.host"] = value
        spec = P(None, ("x", "y")) if number % 2 else P("x", None)
        tree[f"{number}.array"] = value if source == "f8" else place(value, spec, mesh)
    for name in ("i4", "u1", "bool", "c8", ml_dtypes.int4):
        kept = random_bits((16, 8), name)
        tree[f"kept.{np.dtype(name).name}"] = expected[f"kept.{np.dtype(name).name}"] = kept
    tree["scalar"] = np.float32(1 / 3)
    expected["scalar"] = np.asarray(tree["scalar"]).astype(dtype)
    osl.save(tmp_path, tree, options=quick(dtype=dtype))
    assert_saved(tmp_path, expected)


@pytest.mark.parametrize("size", [16, 5])
@pytest.mark.parametrize("source", ["f4", BF16])
@pytest.mark.parametrize("dtype", [ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn])
def test_a_packed_dtype_of_the_file_rounds_as_numpy_or_is_refused(tmp_path, size, source, dtype):
    value = np.arange(size).astype(source)
    try:
        osl.save(tmp_path, {"t": value}, options=quick(dtype=dtype))
    except (ValueError, osl.SafetensorsLayoutError):
        return
    assert_saved(tmp_path, {"t": value.astype(dtype)})


# Options.


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "orbax"},
        {"layout": None},
        {"max_file_bytes": 0},
        {"max_file_bytes": -1},
        {"max_file_bytes": 1.5},
        {"max_file_bytes": True},
        {"max_file_bytes": "5GB"},
        {"memory_budget_bytes": 0},
        {"concurrency": 0},
        {"concurrency": -3},
        {"fsync": 1},
        {"fsync": None},
        {"replicate_below_bytes": -1},
        {"timeout_seconds": 0},
        {"timeout_seconds": math.nan},
        {"timeout_seconds": math.inf},
        {"metadata": {"step": 1}},
        {"metadata": {1: "step"}},
        {"max_file_bytes": None},
        {"replicate_below_bytes": True},
        {"replicate_below_bytes": 1.5},
        {"replicate_below_bytes": "1"},
        {"timeout_seconds": "1"},
        {"timeout_seconds": True},
        {"progress": "yes"},
        {"progress": 1},
        {"metadata": [("a", "b")]},
        {"metadata": {"\ud800": "lone surrogate"}},
        {"dtype": "U5"},
        {"dtype": object},
        {"dtype": np.int32},
        {"dtype": bool},
        {"dtype": np.complex128},
        {"dtype": "no such"},
    ],
    ids=ascii,
)
def test_options_that_make_no_sense(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"WriteOptions.{name}"):
        osl.WriteOptions(**options)


# Where it is saved.

VALUE = np.arange(5.0)


def saved(folder, value=VALUE, **options):
    assert_saved(Path(folder), {"t": value})
    assert {p.name for p in Path(folder).iterdir()} == {"model.safetensors", MANIFEST}


@pytest.mark.parametrize(
    "spell",
    [
        lambda folder: folder,
        lambda folder: str(folder),
        lambda folder: f"{folder}/",
        lambda folder: f"{folder}/./sub/..",
        lambda folder: f"file://{folder}",
        lambda folder: os.path.relpath(folder),
        lambda folder: pathlib.PurePosixPath(folder),
    ],
    ids=["Path", "str", "slash", "dots", "url", "relative", "PathLike"],
)
def test_the_path(tmp_path, spell):
    osl.save(spell(tmp_path / "deep" / "er"), {"t": VALUE}, options=quick())
    saved(tmp_path / "deep" / "er")
    assert os.listdir(tmp_path / "deep") == ["er"]
    osl.save(spell(tmp_path / "deep" / "er"), {"t": VALUE + 1}, options=quick(), overwrite=True)
    saved(tmp_path / "deep" / "er", VALUE + 1)
    assert os.listdir(tmp_path / "deep") == ["er"]


def test_relative_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    osl.save("x", {"t": VALUE}, options=quick())
    saved("x")
    osl.save(Path("x/../y"), {"t": VALUE}, options=quick())
    saved("y")


@pytest.mark.parametrize("path", [".", "../here"])
def test_into_the_current_folder(tmp_path, monkeypatch, path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    osl.save(path, {"t": VALUE}, options=quick())
    assert Path.cwd() == tmp_path / "here"
    saved(".")


def test_an_empty_folder_is_filled(tmp_path):
    osl.save(tmp_path, {"t": VALUE}, options=quick())
    saved(tmp_path)


def test_a_symlink_stays_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for number in range(2):
        osl.save(tmp_path / "link", {"t": VALUE + number}, options=quick(), overwrite=True)
        assert (tmp_path / "link").is_symlink()
        saved(tmp_path / "real", VALUE + number)
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_symlink_that_leads_nowhere_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    osl.save(tmp_path / "link", {"t": VALUE}, options=quick())
    saved(tmp_path / "real")
    assert (tmp_path / "link").is_symlink()


def test_a_path_that_is_no_text(tmp_path):
    path = os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")
    for number in range(2):
        osl.save(path, {"t": VALUE + number}, options=quick(), overwrite=True)
        saved(path, VALUE + number)


def test_a_folder_with_the_longest_name(tmp_path):
    osl.save(tmp_path / ("n" * 255), {"t": VALUE}, options=quick())
    saved(tmp_path / ("n" * 255))


def test_other_paths_at_once(tmp_path):
    def work(number):
        for _ in range(3):
            osl.save(tmp_path / f"{number}", {"t": VALUE + number}, options=quick(), overwrite=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join()
        saved(tmp_path / f"{number}", VALUE + number)
    assert len(os.listdir(tmp_path)) == 6


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "f").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(osl.CheckpointExistsError, match="the path is a file") as caught:
            osl.save(tmp_path / "f", {"t": VALUE}, options=quick(), overwrite=overwrite)
        assert caught.value.file == str(tmp_path / "f")
        assert isinstance(caught.value, FileExistsError)
    assert (tmp_path / "f").read_text() == "mine"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors/"])
def test_a_path_that_names_a_file(tmp_path, name):
    with pytest.raises(osl.SafetensorsLayoutError, match="saved as a folder"):
        osl.save(f"{tmp_path}/{name}", {"t": VALUE}, options=quick(), overwrite=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "other.safetensors", "model.safetensors.index.json"]
)
def test_a_checkpoint_is_not_replaced_unasked(tmp_path, name):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_bytes(b"precious")
    with pytest.raises(osl.CheckpointExistsError, match="overwrite=True") as caught:
        osl.save(tmp_path / "x", {"t": VALUE}, options=quick())
    assert caught.value.file == str(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x" / name).read_bytes() == b"precious"


def test_what_belongs_to_no_checkpoint_stays(tmp_path):
    folder = tmp_path / "x"
    osl.save(folder, llama_like(), options=quick(max_file_bytes=40_000))
    assert len(list(folder.glob("*.safetensors"))) > 3
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("p")
    (folder / "original").mkdir()
    (folder / "original" / "params.safetensors").write_text("q")
    osl.save(folder, {"t": VALUE}, options=quick(), overwrite=True)
    assert raw_file(folder / "model.safetensors").keys() == {"t"}
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) == [
        "config.json",
        "model.safetensors",
        MANIFEST,
        "original",
        "original/params.safetensors",
        "pytorch_model.bin",
    ]
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_of_the_users_called_pieces_stays(tmp_path):
    (tmp_path / "x" / "pieces").mkdir(parents=True)
    (tmp_path / "x" / "pieces" / "mine.txt").write_text("mine")
    osl.save(tmp_path / "x", {"t": VALUE}, options=quick())
    assert (tmp_path / "x" / "pieces" / "mine.txt").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_comes_to_the_folder_meanwhile_is_not_replaced_unasked(tmp_path, name):
    folder, model = tmp_path / "to", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    complete = CheckpointFolder.complete

    def meanwhile(*arguments):
        complete(*arguments)
        folder.mkdir()
        safetensors.numpy.save_file({"t": VALUE + 1}, folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / name)

    with (
        mock.patch.object(CheckpointFolder, "complete", meanwhile),
        pytest.raises(osl.CheckpointExistsError),
    ):
        osl.save(folder, {"t": VALUE}, options=quick(model=model))
    assert os.listdir(folder) == [name]
    assert np.array_equal(safetensors.numpy.load_file(folder / name)["t"], VALUE + 1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_layout_replaces_the_other(tmp_path, overwrite):
    del overwrite
    array = place(np.arange(16.0, dtype=np.float32), P("x"), mesh_of(x=8))
    for layout in ("hf", "sharded", "hf", "sharded"):
        osl.save(tmp_path, {"t": array}, options=quick(layout=layout), overwrite=True)
        names = {file.name for file in tmp_path.iterdir()}
        if layout == "hf":
            assert names == {"model.safetensors", MANIFEST}
        else:
            assert names == {"shard-00001-of-00001.safetensors", MANIFEST}
        assert_same_bits(osl.load(tmp_path)["t"], np.asarray(array))


def test_metadata_is_in_every_file_of_layout_sharded(tmp_path):
    osl.save(tmp_path, {"t": VALUE}, options=quick(layout="sharded", metadata={"who": "me"}))
    with safetensors.safe_open(tmp_path / "shard-00001-of-00001.safetensors", "np") as opened:
        metadata = opened.metadata()
    assert len(metadata.pop("orbax_safetensors_layout.save")) == 32
    assert metadata == {"format": "pt", "who": "me"}


# Values that cannot be saved are errors before anything is written.


def refused(path, tree, kind=osl.SafetensorsLayoutError, **options):
    with pytest.raises(kind) as caught:
        osl.save(path, tree, options=quick(**options), overwrite=True)
    assert not path.exists()
    assert os.listdir(path.parent) == []
    return caught.value


def test_all_leaves_that_cannot_be_saved_are_named(tmp_path):
    tree = {
        "fine": VALUE,
        "object": object(),
        "bytes": b"x",
        "complex": 1j,
        "text": np.array(["x"]),
        "objects": np.array([None]),
        "wide": np.zeros(2, np.complex128),
        "time": np.array(0, "M8[s]"),
        "record": np.zeros(2, "f4,i4"),
        "odd": np.zeros(2, ml_dtypes.float8_e4m3b11fnuz),
        "deep": {"er": [VALUE, set()]},
    }
    error = refused(tmp_path / "x", tree, osl.UnsupportedDtypeError)
    for name in tree.keys() - {"fine", "deep"}:
        assert f"'{name}'" in str(error)
    assert "'deep.er.1'" in str(error)
    assert "'deep.er.0'" not in str(error)
    assert "'fine'" not in str(error)
    assert str(error).startswith("10 leaves cannot be saved")


def test_names_that_two_leaves_have(tmp_path):
    tree = {"a": {"b": VALUE, "c": VALUE}, "a.b": VALUE, "a.c": VALUE, "d": VALUE}
    error = refused(tmp_path / "x", tree, osl.MismatchError)
    assert "'a.b'" in str(error)
    assert "'a.c'" in str(error)
    assert "'d'" not in str(error)
    assert "two leaves have one name" in str(error)


@pytest.mark.parametrize("tree", [{"a": {"b": 1}, "a.b": VALUE}, {"a": {"b": 1}, "a.b": 2}])
def test_a_number_and_another_leaf_of_one_name(tmp_path, tree):
    """With an abstract tree both would come back as one of them."""
    error = refused(tmp_path / "x", tree, osl.MismatchError)
    assert "two leaves have one name" in str(error)


def test_problems_of_two_kinds_are_named_together(tmp_path):
    tree = {"a": {"b": VALUE}, "a.b": VALUE, "c": object(), "__metadata__": VALUE}
    error = refused(tmp_path / "x", tree)
    for name in ("a.b", "c", "__metadata__"):
        assert f"'{name}'" in str(error)


@pytest.mark.parametrize("tree", [{}, [], (), None], ids=repr)
def test_an_empty_tree(tmp_path, tree):
    refused(tmp_path / "x", tree, ValueError)


def test_a_name_that_is_no_text(tmp_path):
    error = refused(tmp_path / "x", {chr(0xD800): VALUE, chr(0xDFFF): VALUE})
    assert "d800" in str(error)
    assert "dfff" in str(error)


def test_abstract_arrays(tmp_path):
    abstract = jax.ShapeDtypeStruct((3,), np.float32)
    error = refused(tmp_path / "x", {"a": abstract, "b": VALUE, "c": abstract})
    assert "'a'" in str(error)
    assert "'c'" in str(error)


def test_deleted_arrays(tmp_path):
    tree = {"a": jax.numpy.zeros(3), "b": VALUE, "key": jax.random.key(0), "c": jax.numpy.ones(3)}
    for name in ("a", "key"):
        jax.block_until_ready(tree[name])
    tree["a"].delete()
    jax.random.key_data(tree["key"]).delete()
    error = refused(tmp_path / "x", tree)
    assert "'a'" in str(error)
    assert "'key'" in str(error)
    assert "'b'" not in str(error)
    assert "donated" in str(error)


def test_arrays_with_more_to_them_than_values(tmp_path):
    class OfAnotherFramework:
        shape, dtype = (3,), "float32"

    tree = {
        "masked": np.ma.masked_array(np.arange(3.0), [False, True, False]),
        "other": OfAnotherFramework(),
        "fine": VALUE,
    }
    error = refused(tmp_path / "x", tree, osl.UnsupportedDtypeError)
    assert "filled" in str(error)
    assert "a OfAnotherFramework cannot be saved" in str(error)
    assert "'fine'" not in str(error)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.grad(lambda x: f(x).sum()), jax.vmap])
def test_inside_a_function_that_jax_transforms(tmp_path, transform):
    def function(x):
        osl.save(tmp_path / "x", {"fine": VALUE, "t": {"x": x}}, options=quick())
        return x

    with pytest.raises(osl.UnsupportedDtypeError, match=r"Tracer cannot be saved.*'t\.x'.*jit"):
        transform(function)(jax.numpy.ones(3))
    assert os.listdir(tmp_path) == []


def test_a_tree_without_tensors_in_layout_sharded(tmp_path):
    osl.save(tmp_path, {"step": 3}, options=quick(layout="sharded"))
    with pytest.raises(osl.CheckpointExistsError):
        osl.save(tmp_path, {"step": 4}, options=quick(layout="sharded"))
    assert osl.load(tmp_path) == {"step": 3}


def test_a_tree_without_tensors(tmp_path):
    osl.save(tmp_path, {"step": 3}, options=quick())
    assert raw_tensors(tmp_path) == {}
    with pytest.raises(osl.CheckpointExistsError):
        osl.save(tmp_path, {"step": 4}, options=quick())


# Saves that fail.


@contextlib.contextmanager
def nothing_leaks():
    """No threads and no file descriptors are left."""

    def count():
        gc.collect()
        names = [t.name for t in threading.enumerate() if "safetensors" in t.name]
        return len(os.listdir("/proc/self/fd")), len(names)

    before = count()
    yield
    after = count()
    assert after[0] <= before[0]  # files of other tests may be closed meanwhile
    assert after[1] <= before[1]


OLD = {"t": np.arange(100.0), "u": np.arange(50.0)}
NEW = {f"n{number}": np.full(3000, number, np.float32) for number in range(6)}


@pytest.fixture
def old(tmp_path):
    """A checkpoint with a file of the user's."""
    folder = tmp_path / "x"
    osl.save(folder, OLD, options=quick())
    (folder / "config.json").write_text("{}")
    return folder


def check_untouched(folder):
    assert_saved(folder, OLD)
    assert (folder / "config.json").read_text() == "{}"
    assert os.listdir(folder.parent) == ["x"]


def save_new(folder, **options):
    options = {"max_file_bytes": 20_000, **options}
    osl.save(folder, NEW, options=osl.WriteOptions(**options), overwrite=True)


class FailingCalls:
    """Counts the calls of some functions of `os`, and fails the one of a number."""

    NAMES = ("pwritev", "fsync", "replace", "rename", "link", "mkdir")

    def __init__(self, patch, fail_at=None, code=errno.EIO):
        self.count = 0
        self._fail_at = fail_at
        self._code = code
        self._lock = threading.Lock()
        for name in self.NAMES:
            patch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real):
        def call(*arguments, **keywords):
            with self._lock:
                self.count += 1
                fails = self.count == self._fail_at
            if fails:
                raise OSError(self._code, os.strerror(self._code))
            return real(*arguments, **keywords)

        return call


@pytest.fixture
def call_count(tmp_path, monkeypatch):
    """How many system calls that can fail `save_new` makes."""
    folder = tmp_path / "probe" / "x"
    osl.save(folder, OLD, options=quick())
    (folder / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        calls = FailingCalls(patch)
        save_new(folder)
    shutil.rmtree(folder.parent)
    assert calls.count > 25
    return calls.count


def fail_each_call(old, call_count, patches):
    """The errors of saves of which one system call after the other fails."""
    errors = []
    for number in range(1, call_count + 1):
        with patches.context() as patch:
            FailingCalls(patch, number, errno.ENOSPC)
            try:
                save_new(old)
            except osl.StorageError as error:
                errors.append(str(error))
        if "n0" not in {n for f in old.glob("*.safetensors") for n in raw_file(f)}:
            check_untouched(old)
            continue
        assert_saved(old, NEW)  # links are made without, and flushing the parent comes afterwards
        assert os.listdir(old.parent) == ["x"]
        shutil.rmtree(old)
        osl.save(old, OLD, options=quick())
        (old / "config.json").write_text("{}")
    return errors


def test_a_save_that_fails_anywhere_changes_nothing(old, call_count, monkeypatch):
    """Every system call that can fail, one at a time."""
    errors = fail_each_call(old, call_count, monkeypatch)
    assert len(errors) >= call_count - 2
    assert all("No space left" in error and str(old.parent) in error for error in errors)


def test_a_save_that_fails_leaves_no_descriptors(old, call_count, monkeypatch):
    with nothing_leaks():
        fail_each_call(old, call_count, monkeypatch)


def test_a_disk_that_is_full(old):
    with (
        nothing_leaks(),
        full_disk(10_000),
        pytest.raises(osl.StorageError, match="cannot make room for") as caught,
    ):
        save_new(old)
    assert caught.value.file.startswith(str(old.parent))
    check_untouched(old)


@pytest.mark.slow
def test_a_small_disk(tmp_path):
    """A real file system of 2 MB."""
    assert run_alone("save_small_disk.py", tmp_path, mount=("2m", tmp_path)) == "refused\n"


@pytest.mark.slow
def test_what_is_mounted_in_the_folder_stays(tmp_path):
    (tmp_path / "x" / "data").mkdir(parents=True)
    printed = run_alone(
        "save_mounted_inside.py", tmp_path / "x", mount=("1m", tmp_path / "x" / "data")
    )
    assert printed == "['precious']\n"


@pytest.mark.slow
def test_a_folder_that_is_a_mount_point(tmp_path):
    """Saved to, or refused before anything is written; as a volume of a container."""
    (tmp_path / "x").mkdir()
    printed = run_alone("save_mount_point.py", tmp_path / "x", mount=("1m", tmp_path / "x"))
    assert printed in ("saved ['x']\n", "refused ['x']\n")


@pytest.mark.slow
def test_a_folder_without_write_permission():
    """As another user, if this one may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        osl.save(f"{folder}/x", OLD, options=quick())
        os.chmod(folder, 0o555)
        try:
            assert run_alone("save_without_permission.py", folder) == "refused ['x']\n" * 2
        finally:
            os.chmod(folder, 0o755)
        assert_saved(Path(folder) / "x", OLD)


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with nothing_leaks(), pytest.raises(osl.StorageError, match=r"File exists|Not a directory"):
        osl.save(tmp_path / "f" / "x", OLD, options=quick())
    assert os.listdir(tmp_path) == ["f"]


def test_a_progress_callback_that_fails(old):
    def fail(_):
        raise KeyError("mine")

    with nothing_leaks(), pytest.raises(KeyError, match="mine"):
        save_new(old, progress=fail)
    check_untouched(old)


def test_an_interrupt(old):
    """Ctrl-C, as it reaches a thread that waits for others."""

    def interrupt(_):
        raise KeyboardInterrupt

    with nothing_leaks(), pytest.raises(KeyboardInterrupt):
        save_new(old, progress=interrupt)
    check_untouched(old)


def test_what_an_earlier_crash_left_is_removed(old):
    partial = Path(partial_folder(os.path.realpath(old)))
    partial.mkdir()
    (partial / "model-00009-of-00009.safetensors.partial").write_bytes(b"rest")
    (partial / "sub").mkdir()
    save_new(old)
    assert_saved(old, NEW)
    assert os.listdir(old.parent) == ["x"]


class Gate:
    """Stops a save after its first part, until it is opened."""

    def __init__(self):
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, _):
        self.reached.set()
        assert self._opened.wait(30)

    def open(self):
        self._opened.set()


@pytest.mark.slow
def test_two_saves_to_one_path_at_once(tmp_path):
    """As when every task of a job believes that it is the only one. One may fail, none may tear."""
    values = [np.full(30_000, number, np.float32) for number in (1, 2)]
    gates = [Gate(), Gate()]
    outcomes: dict[int, str] = {}

    def save(number):
        tree = {f"t{i}": values[number] for i in range(6)}
        options = quick(max_file_bytes=130_000, concurrency=1, progress=gates[number])
        try:
            osl.save(tmp_path / "x", tree, options=options, overwrite=True)
            outcomes[number] = "saved"
        except osl.SafetensorsLayoutError:
            outcomes[number] = "failed"

    threads = [threading.Thread(target=save, args=(number,)) for number in (0, 1)]
    for thread, gate in zip(threads, gates, strict=True):
        thread.start()
        gate.reached.wait(10)
    for thread, gate in zip(threads, gates, strict=True):
        gate.open()
        thread.join()
    if (tmp_path / "x").exists():
        stored = {raw.data for raw in raw_tensors(tmp_path / "x").values()}
        assert stored in ({values[0].tobytes()}, {values[1].tobytes()})
    assert "saved" in outcomes.values()


# What a save costs.


def test_progress_reaches_the_whole(tmp_path):
    seen: list[osl.Progress] = []
    tree = {f"t{n}": np.zeros((n, 1000), np.float32) for n in range(20)}
    tree["large"] = place(np.zeros((3000, 2000), np.float32), P(None, "x"), mesh_of(x=8))
    tree["packed"] = np.zeros((100, 8), F4)
    with nothing_leaks():
        osl.save(tmp_path, tree, options=quick(progress=seen.append, max_file_bytes=10**6))
    total = sum(value.nbytes for value in tree.values()) - 400
    assert {progress.total_bytes for progress in seen} == {total}
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert {progress.tensor for progress in seen} <= tree.keys()
    assert len(seen) > 3


def test_many_files_take_few_descriptors(tmp_path):
    tree = {f"t{number}": np.full(3, number) for number in range(200)}
    with few_descriptors(len(os.listdir("/proc/self/fd")) + 60):
        osl.save(tmp_path, tree, options=osl.WriteOptions(max_file_bytes=1, concurrency=8))
    assert_saved(tmp_path, tree)


def test_nothing_leaks_from_many_saves(tmp_path):
    with nothing_leaks():
        for number in range(20):
            osl.save(tmp_path, NEW, options=quick(max_file_bytes=10_000 + number), overwrite=True)


def test_arrays_are_let_go(tmp_path):
    """Nothing keeps alive what was saved."""
    array = place(np.zeros((800, 800), np.float32), P(None, "x"), mesh_of(x=8))
    host = np.zeros((100, 100))
    gone = [weakref.ref(array), weakref.ref(host)]
    osl.save(tmp_path, {"a": array, "h": host}, options=quick())
    del array, host
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class HeldValues:
    """Values that are copies of what a device has, and how much of them lived at once."""

    def __init__(self, sizes):
        self._sizes = sizes
        self._lock = threading.Lock()
        self.live = self.most = 0

    def held_bytes(self, part):
        return self._sizes[part.leaf]

    def cut(self, part, budget_bytes):
        return [part]

    def in_order(self, part):
        return True

    def begin(self, part):
        value = np.full(self._sizes[part.leaf], part.leaf % 251, np.uint8)
        with self._lock:
            self.live += value.nbytes
            self.most = max(self.most, self.live)
        weakref.finalize(value, self._gone, value.nbytes)
        return [value]

    def wait(self, pending):
        return [*pending]

    def _gone(self, nbytes):
        with self._lock:
            self.live -= nbytes


BUDGETS = [1, 1000, 100_000, 20 * MIB, None]


@pytest.mark.parametrize(
    ("files", "large", "budget", "threads"),
    every(3, itertools.product((1, 3), (False, True), BUDGETS, (1, 4))),
)
def test_the_memory_budget(tmp_path, threads, budget, large, files):
    """Held values are counted until they are written, and the next waits for room."""
    live, largest = most_live(tmp_path, threads, budget, large, files)
    if budget is not None:
        # What was written last may live while the next is brought: twice the budget, at worst.
        assert live <= 2 * max(budget, largest) + threads * largest


@pytest.mark.parametrize("budget", BUDGETS[:4])
def test_the_memory_budget_is_kept(tmp_path, budget):
    """Together they are never more than the budget, or one part where that is larger."""
    live, largest = most_live(tmp_path, 1, budget, large=True)
    assert live <= max(budget, largest)


def test_files_are_written_side_by_side(tmp_path, monkeypatch):
    """As many as there are threads, where the storage writes anywhere in a file."""
    events = []
    begin, expect = CheckpointFolder.begin_file, CheckpointFolder.expect
    monkeypatch.setattr(
        CheckpointFolder, "begin_file", lambda s, p: (events.append(p.name), begin(s, p))[1]
    )
    monkeypatch.setattr(
        CheckpointFolder,
        "expect",
        lambda s, f, n: (events.append(f.plan.name), expect(s, f, n))[1],
    )

    def order(folder, threads):
        """The files, each time that another is begun or has its turn."""
        folder.mkdir()
        events.clear()
        most_live(folder, threads, None, large=True, file_count=5)
        return [name for name, _ in itertools.groupby(events)]

    names = [f"f{number}" for number in range(5)]
    assert order(tmp_path / "all", 8)[:5] == names
    assert len(events) > len(order(tmp_path / "all again", 8)) > 5
    two = order(tmp_path / "two", 2)
    assert two[:3] == ["f0", "f1", "f0"]
    assert len(two) > 5
    assert order(tmp_path / "one", 1) == names
    monkeypatch.setattr(LocalStorage, "appends", True)
    assert order(tmp_path / "in order", 8) == names


def test_who_waits_for_writes_learns_that_another_process_has_failed():
    """And does not wait until a storage that hangs gives up."""
    stuck, checks = threading.Event(), []

    def check():
        checks.append(None)
        if len(checks) > 2:
            raise osl.PeerError("process 1 failed")

    pool = Workers(1, "test", stuck.set, check)
    pool.submit(lambda: stuck.wait(60))
    with pytest.raises(osl.PeerError, match="process 1"):
        pool.join()
    stuck.set()
    pool.stop()


def test_the_first_failure_is_told_and_nothing_counts_on_what_was_left_out():
    for _ in range(20):
        begun, go, seen = threading.Barrier(4), threading.Event(), []

        def follows(begun=begun, go=go):
            begun.wait(30)
            go.wait(30)
            raise OSError("second")

        def fails(begun=begun):
            begun.wait(30)
            raise OSError("first")

        pool = Workers(4, "test", go.set)
        for work in (follows, follows, follows, fails):
            pool.submit(work)
        left_out = pool.submit(lambda seen=seen: seen.append(1))
        with pytest.raises(OSError, match="first"):
            pool.join()
        pool.stop()
        assert seen == []
        assert left_out.cancelled() or left_out.exception() is not None


def most_live(folder, threads, budget, large, file_count=1):
    """The most bytes that lived at once, and the largest part's."""
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 5000, 300).tolist(), *([9 * MIB, 17 * MIB, 10] if large else [])]
    u8 = DTYPES["U8"]
    leaves = [
        LeafWrite(
            NewTensor(f"t{n:03}", u8, (size,)),
            u8.numpy,
            GlobalShards((Box((0,), (size,)),), ((0,),)),
        )
        for n, size in enumerate(sizes)
    ]
    numbers = {leaf.tensor.name: number for number, leaf in enumerate(leaves)}
    plans = []
    for file in range(file_count):
        layout = lay_out(f"f{file}", [leaf.tensor for leaf in leaves[file::file_count]], {})
        parts = tuple(
            FilePart(
                numbers[e.name], Tile(Box((0,), e.shape), (1,), (0,)), e.dtype, e.start, e.stop
            )
            for e in layout.tensors
        )
        plans.append(FileWrite(f"f{file}", layout, parts, ()))
    values = HeldValues(sizes)
    options = quick(concurrency=threads, memory_budget_bytes=budget)
    with LocalStorage() as storage:
        checkpoint = CheckpointFolder(str(folder), storage, ProcessGroup.alone(), options)
        plan = WritePlan(tuple(leaves), (), tuple(plans), None, None, 0, 1)
        write_parts(checkpoint, plan, values, None)
        checkpoint.close()
    assert checkpoint.bytes_written == sum(plan.layout.size for plan in plans)
    for plan in plans:
        assert (folder / plan.name).stat().st_size == plan.layout.size
        for name, raw in raw_file(folder / plan.name).items():
            assert set(raw.data) == {numbers[name] % 251}
    gc.collect()
    assert values.live == 0
    return values.most, max(sizes)


@pytest.mark.parametrize(
    "kind",
    [
        "column",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("sharded", "cast", "one long row")
        ),
        *(
            pytest.param(kind, marks=pytest.mark.soak)
            for kind in (
                *("column of three", "long rows", "packed", "four bits", "fortran"),
                *("flushed", "files", "files flushed"),
            )
        ),
    ],
)  # fmt: skip
def test_the_peak_memory_of_a_save(tmp_path, kind):
    """256 MB, and no more than 64 MB and the memory budget beyond them."""
    # glibc would keep freed megabytes, for each thread that allocated them.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    assert int(run_alone("save_peak.py", tmp_path, kind, environment=environment)) < 64 << 20


def test_the_peak_memory_of_a_consolidation(tmp_path):
    """256 MB, and no more than 64 MB and the memory budget."""
    environment = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    grown = run_alone("consolidate_peak.py", tmp_path, environment=environment)
    assert int(grown) < (64 + 32) << 20


BESIDE = ("adapter_model.safetensors", "adapter_model.safetensors.index.json", "ema.safetensors")


def put_beside(folder):
    for name in BESIDE:
        (folder / name).write_bytes(name.encode())


def is_beside(folder):
    return all((folder / name).read_bytes() == name.encode() for name in BESIDE)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("numbered", [False, True])
def test_what_is_beside_a_model_is_not_replaced_with_it(tmp_path, layout, numbered):
    folder = tmp_path / "x"
    most = {"max_file_bytes": 40_000} if numbered else {}
    for _ in range(2):
        osl.save(folder, llama_like(), options=quick(**most), overwrite=True)
        put_beside(folder)
        assert (folder / "model.safetensors").exists() != numbered
        osl.save(folder, {"t": VALUE}, options=quick(layout=layout), overwrite=True)
        assert is_beside(folder)
        left = {path.name for path in folder.iterdir()} - {*BESIDE, MANIFEST}
        pieces = "shard-00001-of-00001.safetensors"
        assert left == {"model.safetensors" if layout == "hf" else pieces}
        assert_same_bits(osl.load(folder)["t"], VALUE)


def test_files_of_any_name_are_replaced_where_they_are_the_checkpoint(tmp_path):
    for name in ("a", "b"):
        safetensors.numpy.save_file({name: VALUE}, tmp_path / f"{name}.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"theirs")
    with pytest.raises(osl.CheckpointExistsError):
        osl.save(tmp_path, {"t": VALUE}, options=quick())
    osl.save(tmp_path, {"t": VALUE}, options=quick(file_stem="weights"), overwrite=True)
    names = {"weights.safetensors", MANIFEST, "consolidated.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert_same_bits(osl.load(tmp_path)["t"], VALUE)


def test_a_model_is_saved_beside_an_adapter(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"theirs")
    osl.save(tmp_path, {"t": VALUE}, options=quick())
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"theirs"
    assert_same_bits(osl.load(tmp_path)["t"], VALUE)


@pytest.mark.parametrize("stem", ["consolidated", "adapter_model"])
def test_a_model_is_saved_beside_a_set_of_others_with_an_index(tmp_path, stem):
    theirs = {f"{stem}-0000{n}-of-00002.safetensors": b"theirs" for n in (1, 2)}
    theirs[f"{stem}.safetensors.index.json"] = json.dumps(
        {"metadata": {}, "weight_map": {f"t{n}": name for n, name in enumerate(theirs)}}
    ).encode()
    for name, data in theirs.items():
        (tmp_path / name).write_bytes(data)
    osl.save(tmp_path, {"t": VALUE}, options=quick())
    osl.save(tmp_path, {"t": VALUE + 1}, options=quick(), overwrite=True)
    assert {name: (tmp_path / name).read_bytes() for name in theirs} == theirs
    assert_same_bits(osl.load(tmp_path)["t"], VALUE + 1)


def test_a_model_of_a_damaged_index_is_replaced_and_nothing_else(tmp_path):
    osl.save(tmp_path, {"t": VALUE, "u": VALUE}, options=quick(max_file_bytes=VALUE.nbytes))
    (tmp_path / "ema.safetensors").write_bytes(b"theirs")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-9])
    osl.save(tmp_path, {"t": VALUE + 1}, options=quick(), overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.safetensors",
        MANIFEST,
        "ema.safetensors",
    }
    assert_same_bits(osl.load(tmp_path)["t"], VALUE + 1)


@pytest.mark.parametrize("step", [False, True])
def test_pieces_are_replaced_where_they_are_and_nothing_else(tmp_path, step):
    run = tmp_path / "run"
    folder = run / "1000" / "default" if step else run
    osl.save(folder, {"t": VALUE}, options=quick(layout="sharded"))
    if step:
        (run / "1000" / "_CHECKPOINT_METADATA").write_text("{}")
    put_beside(folder)
    osl.consolidate(run / "1000" if step else run)
    assert is_beside(folder)
    assert not [*run.rglob("shard-*")]
    assert raw_file(folder / "model.safetensors").keys() == {"t"}
    if step:
        assert sorted(os.listdir(run / "1000")) == ["_CHECKPOINT_METADATA", "default"]


def test_an_index_of_others_beside_a_model_is_none_of_the_pieces_that_replace_it(tmp_path):
    safetensors.numpy.save_file({"t": VALUE + 1}, tmp_path / "model.safetensors")
    safetensors.numpy.save_file({"t": VALUE + 2}, tmp_path / "o0.safetensors")
    index = '{"metadata": {}, "weight_map": {"t": "o0.safetensors"}}'
    (tmp_path / "o.safetensors.index.json").write_text(index)
    for _ in range(2):
        osl.save(tmp_path, {"t": VALUE}, options=quick(layout="sharded"), overwrite=True)
        assert_same_bits(osl.load(tmp_path)["t"], VALUE)
        assert (tmp_path / "o.safetensors.index.json").read_text() == index
        assert (tmp_path / "o0.safetensors").exists()


@pytest.mark.parametrize("name", ["model_ema.safetensors", "my-shard-00001-of-00002.safetensors"])
@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_names_that_only_look_like_a_checkpoints_stay(tmp_path, layout, name):
    safetensors.numpy.save_file({"t": VALUE + 1}, tmp_path / "model.safetensors")
    (tmp_path / name).write_bytes(b"theirs")
    (tmp_path / "model.old.safetensors").mkdir()
    (tmp_path / "model.old.safetensors" / "mine.txt").write_text("mine")
    osl.save(tmp_path, {"t": VALUE}, options=quick(layout=layout), overwrite=True)
    assert (tmp_path / name).read_bytes() == b"theirs"
    assert (tmp_path / "model.old.safetensors" / "mine.txt").read_text() == "mine"
    assert_same_bits(osl.load(tmp_path)["t"], VALUE)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("digests", [False, True])
def test_what_speaks_of_a_whole_folder_is_not_written_beside_a_model(tmp_path, layout, digests):
    """A manifest or checksums of an adapter: the model would be what they say."""
    osl.save(tmp_path, {"t": VALUE}, options=quick(layout=layout, digests=digests))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for overwrite in (False, True):
        with pytest.raises(osl.CheckpointExistsError, match="has a model, which"):
            osl.save(
                tmp_path,
                {"t": VALUE},
                options=quick(file_stem="adapter_model"),
                overwrite=overwrite,
            )
    config = {"r": 2, "lora_alpha": 2, "target_modules": ["q"]}
    with pytest.raises(osl.CheckpointExistsError, match="digests"):
        osl.peft.save(
            tmp_path, {"q.lora_A.weight": VALUE}, config=config, options=quick(digests=True)
        )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_takes_no_place_from_what_speaks_of_an_adapter(tmp_path):
    options = quick(file_stem="adapter_model", digests=True)
    osl.save(tmp_path, {"t": VALUE}, options=options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(osl.CheckpointExistsError, match="overwrite=True"):
        osl.save(tmp_path, {"t": VALUE}, options=quick())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST])
def test_a_folder_of_a_name_of_the_checkpoint_stays(tmp_path, name, is_link):
    mine = tmp_path / "else" if is_link else tmp_path / "x" / name
    mine.mkdir(parents=True)
    (mine / "mine.txt").write_text("mine")
    if is_link:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / name).symlink_to(mine)
    for overwrite in (False, True):
        with pytest.raises(osl.CheckpointExistsError, match="something else of a name"):
            osl.save(tmp_path / "x", {"t": VALUE}, options=quick(), overwrite=overwrite)
    assert os.listdir(tmp_path / "x") == [name]
    assert (tmp_path / "x" / name / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("asked", [None, "", str, np.str_("y"), np.str_])
def test_numpys_strings_are_strings(tmp_path, asked):
    """As in Orbax, whose handlers save them as `str` too."""
    state = {"name": np.str_("x"), "w": np.ones(2, np.float32)}
    item = None if asked is None else state | {"name": asked}
    osl.save(tmp_path / "s", state)
    ocp.Checkpointer(osl.SafetensorsLayout()).save(tmp_path / "v0", state)
    for loaded in (
        osl.load(tmp_path / "s", item),
        ocp.Checkpointer(osl.SafetensorsLayout()).restore(tmp_path / "v0", item=item),
    ):
        assert type(loaded["name"]) is str
        assert loaded["name"] == "x"
