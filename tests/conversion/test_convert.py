"""Conversions between Hugging Face files, layout `sharded` and Orbax's own format."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import safetensors.numpy
import tensorstore as ts
from checkpoints import assert_same_bits, llama_like, random_tensor, save
from http_server import file_server
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of
from orbax_calls import restore_standard, save_pytree, save_standard
from programs import program_path
from recording import recording
from remote_checks import hub_in_use
from saved_files import raw_tensors

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.conversion import pipeline
from orbax_safetensors_layout.storage import ResumableFile, local_commit, partial_folder

SMALL = osl.ConvertOptions(memory_budget_bytes=256 << 10)  # blocks of 16 KiB


def bits(tree):
    """The arrays of a flat dict as bytes, dtypes and shapes."""
    return {
        name: (np.asarray(v).tobytes(), np.asarray(v).dtype, np.shape(v))
        for name, v in tree.items()
    }


@pytest.fixture
def weights():
    return llama_like() | {
        "odd": random_tensor((7, 3), np.float32, 1),
        "scalar": random_tensor((), np.int64, 2),
        "flags": random_tensor((5,), np.bool_, 3),
        "fp8": random_tensor((16, 16), ml_dtypes.float8_e4m3fn, 4),
    }


@pytest.fixture
def hf(tmp_path, weights):
    folder = save(tmp_path / "hf", weights, files=3)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.model").write_bytes(b"\0\1")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    return folder


@pytest.mark.parametrize("options", [osl.ConvertOptions(), SMALL], ids=["roomy", "tight"])
@pytest.mark.parametrize("middle", ["hf", "sharded", "orbax"])
def test_every_kind_comes_back_bit_by_bit(tmp_path, hf, weights, middle, options):
    there, back = tmp_path / "there", tmp_path / "back"
    done = osl.convert(hf, there, format=middle, mesh={"fsdp": 4}, processes=2, options=options)
    assert (done.tensors, done.resumed_bytes) == (len(weights), 0)
    assert done.nbytes == sum(value.nbytes for value in weights.values())
    osl.convert(there, back, format="hf", options=options)
    stored = {name: raw.data for name, raw in raw_tensors(back).items()}
    assert stored == {name: value.tobytes() for name, value in weights.items()}
    assert bits(osl.load(back)) == bits(weights)
    assert sorted(os.listdir(tmp_path)) == ["back", "hf", "there"]


def test_every_byte_of_the_source_is_read_once(tmp_path, hf, weights):
    for number, options in enumerate((osl.ConvertOptions(), SMALL)):
        with recording() as storage:
            osl.convert(hf, tmp_path / f"to{number}", mesh={"fsdp": 8}, options=options)
        read = sum(
            stop - start
            for file, start, stop in storage.tensor_ranges()
            if Path(file).parent == hf and file.endswith(".safetensors")
        )
        total = sum(value.nbytes for value in weights.values())
        assert total <= read <= 1.05 * total


def test_chunks_are_the_shards_of_the_target(tmp_path, hf, weights):
    osl.convert(
        hf,
        tmp_path / "orbax",
        mesh={"fsdp": 4, "tensor": 2},
        spec=[r"'.*(up|down)_proj.*' = tensor,fsdp", r"'model\.embed.*' = fsdp+tensor"],
    )
    chunk = {}
    for name in weights:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/orbax/", "path": f"{name}/"},
        }
        chunk[name] = ts.open(spec).result().chunk_layout.write_chunk.shape or ()
    for name, value in weights.items():
        ways = (1,) * value.ndim
        if "up_proj" in name or "down_proj" in name:
            ways = (2, 4)
        elif "embed" in name:
            ways = (8, 1)
        assert chunk[name] == tuple(n // w for n, w in zip(value.shape, ways, strict=True)), name


def test_pieces_are_the_shards_of_the_target(tmp_path, hf, weights):
    osl.convert(hf, tmp_path / "pieces", format="sharded", mesh={"fsdp": 8}, processes=4)
    files = sorted(path.name for path in (tmp_path / "pieces").glob("*.safetensors"))
    assert files == [f"shard-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    mesh = mesh_of(fsdp=8)
    name = "model.embed_tokens.weight"
    struct = jax.ShapeDtypeStruct(
        weights[name].shape,
        weights[name].dtype,
        sharding=NamedSharding(mesh, PartitionSpec("fsdp")),
    )
    loaded = osl.load(tmp_path / "pieces", {name: struct})[name]
    assert_same_bits(np.asarray(loaded), weights[name])
    manifest = json.loads((tmp_path / "pieces" / "orbax_safetensors_layout.json").read_text())
    number = manifest["pieces"]["tensors"][name][2]
    boxes = manifest["pieces"]["classes"][number]
    # Two devices of a process hold neighbouring rows, which it stores as one piece.
    rows = weights[name].shape[0] // 4
    assert [(start[0], file) for start, _, file in boxes] == [(n * rows, n) for n in range(4)]


@pytest.mark.parametrize("rows", [12, 12 << 12])
def test_pieces_do_not_overlap_where_processes_hold_overlapping_parts(tmp_path, rows):
    """Three processes of four devices, two of which hold each of six parts."""
    weights = {"w": random_tensor((rows, 4), np.float32)}
    save(tmp_path / "hf", weights)
    topology = {"mesh": {"data": 2, "fsdp": 6}, "processes": 3, "spec": ["'w' = fsdp"]}
    osl.convert(tmp_path / "hf", tmp_path / "pieces", format="sharded", **topology)
    assert bits(osl.load(tmp_path / "pieces")) == bits(weights)
    assert osl.verify(tmp_path / "pieces").ok


@pytest.mark.parametrize("ways", [16, 8])
def test_orbax_alone_restores_a_converted_checkpoint(tmp_path, hf, weights, ways):
    osl.convert(hf, tmp_path / "orbax", mesh={"fsdp": 16})
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    command = [
        sys.executable,
        program_path("convert_orbax_alone.py"),
        str(tmp_path / "orbax"),
        str(ways),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr
    plain, v0, v1, sharded, ours = json.loads(lines[0].removeprefix("RESULT "))
    expected = {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in weights.items()}
    assert plain == v0 == v1 == expected
    assert sharded == len(weights) - 1
    assert ours == []


@pytest.fixture
def state():
    mesh = mesh_of(fsdp=8)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    return {
        "params": {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), sharding)},
        "list": [np.arange(3), 7, 2.5],
        "key": jax.random.key(3),
        "none": None,
        "step": 12,
    }


def save_plain_zarr(folder, state):
    save_pytree(folder, state, use_ocdbt=False)


def write_v1(folder, state):
    ocp_v1.save(folder, state | {"text": "x"})


@pytest.mark.parametrize("write", [save_standard, save_plain_zarr, write_v1])
@pytest.mark.parametrize("middle", ["hf", "sharded", "orbax"])
def test_trees_of_orbax_survive(tmp_path, state, write, middle):
    write(tmp_path / "stock", state)
    osl.convert(tmp_path / "stock", tmp_path / "there", format=middle)
    if middle == "orbax":
        restored = restore_standard(tmp_path / "there")
    else:
        restored = osl.load(tmp_path / "there")
        tensors = raw_tensors(tmp_path / "there")
        assert "params.w" in tensors
    if write is write_v1:
        assert restored.pop("text") == "x"
    np.testing.assert_array_equal(
        np.asarray(restored["params"]["w"]), np.asarray(state["params"]["w"])
    )
    np.testing.assert_array_equal(restored["list"][0], np.arange(3))
    assert restored["list"][1:] == [7, 2.5]
    assert (restored["none"], restored["step"]) == (None, 12)
    assert restored["key"].dtype == state["key"].dtype
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(state["key"])).all()


def test_a_step_is_found_and_kept(tmp_path, state):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (3, 9, 12):
            manager.save(step, args=ocp.args.StandardSave(state | {"step": step}))
        manager.wait_until_finished()
    steps = r"step=12 \(--step 12\); it has 12, 9, 3"
    with pytest.raises(osl.CheckpointNotFoundError, match=steps):
        osl.convert(tmp_path / "run", tmp_path / "no")
    with pytest.raises(osl.CheckpointNotFoundError, match=r"there is no step 2.*12, 9, 3"):
        osl.convert(tmp_path / "run", tmp_path / "no", step=2)
    done = osl.convert(tmp_path / "run", tmp_path / "copy", step=12, format="orbax")
    assert done.path == str(tmp_path / "copy" / "12")
    with ocp.CheckpointManager(tmp_path / "copy") as manager:
        assert manager.latest_step() == 12
        restored = manager.restore(12, args=ocp.args.StandardRestore())
    assert restored["step"] == 12
    np.testing.assert_array_equal(np.asarray(restored["params"]["w"])[3], [12, 13, 14, 15])
    osl.convert(tmp_path / "run", tmp_path / "params", step=3, subtree="params")
    assert [*safetensors.numpy.load_file(tmp_path / "params" / "model.safetensors")] == ["w"]
    with pytest.raises(osl.MissingTensorError, match="no such part"):
        osl.convert(tmp_path / "run", tmp_path / "no", step=3, subtree="weights")
    assert sorted(os.listdir(tmp_path)) == ["copy", "params", "run"]


@pytest.mark.parametrize("name", ["step_00000012", "12"])
def test_our_own_steps_are_sources_too(tmp_path, name):
    osl.save(tmp_path / "run" / name / "state", {"a": np.arange(6.0)})
    osl.convert(tmp_path / "run", tmp_path / "copy", step=12, format="orbax")
    assert_same_bits(restore_standard(tmp_path / "copy" / name / "state")["a"], np.arange(6.0))


def test_dtype(tmp_path, weights):
    options = osl.ConvertOptions(dtype="float32")
    weights = {name: value for name, value in weights.items() if name != "fp8"}
    osl.save(tmp_path / "hf", weights)
    for kind, name in {"orbax": "orbax", "hf": "copy", "sharded": "pieces"}.items():
        osl.convert(tmp_path / "hf", tmp_path / name, format=kind, options=options)
    expected = {
        name: value.astype(np.float32) if value.dtype.kind not in "ib" else value
        for name, value in weights.items()
    }
    for loaded in (restore_standard(tmp_path / "orbax"), osl.load(tmp_path / "copy"),
                  osl.load(tmp_path / "pieces")):  # fmt: skip
        for name, value in expected.items():
            np.testing.assert_array_equal(np.asarray(loaded[name]), value, strict=True)


LAYERS = osl.Mapping(
    [
        osl.rule("embed", osl.tensor("model.embed_tokens.weight")),
        osl.rule(
            "layers.up",
            osl.stack(
                osl.tensor("model.layers.{i}.mlp.up_proj.weight").transpose(), over="i", axis=1
            ),
        ),
        osl.rule("q.{i}", osl.tensor("model.layers.{i}.self_attn.q_proj.weight").rearrange(
            "(h d) e -> e h d", d=16)),
        osl.rule("norm", osl.tensor("model.norm.weight")),
    ],
    strict=False,
)  # fmt: skip


@pytest.mark.parametrize("options", [osl.ConvertOptions(), SMALL], ids=["roomy", "tight"])
@pytest.mark.parametrize("middle", ["orbax", "sharded"])
def test_through_a_mapping_and_back(tmp_path, middle, options):
    used = {
        name: value  # so large that no tensor is read through as a gap
        for name, value in llama_like(hidden=128).items()
        if any(part in name for part in ("embed", "up_proj", "q_proj", "model.norm"))
    }
    save(tmp_path / "hf", used)
    (tmp_path / "hf" / "config.json").write_text("{}")
    with recording() as storage:
        osl.convert(
            tmp_path / "hf",
            tmp_path / "model",
            format=middle,
            mapping=LAYERS,
            mesh={"fsdp": 4},
            options=options,
        )
    read = sum(
        stop - start
        for file, start, stop in storage.tensor_ranges()
        if file == str(tmp_path / "hf" / "model.safetensors")
    )
    total = sum(value.nbytes for value in used.values())
    assert total <= read <= 1.05 * total
    model = (
        restore_standard(tmp_path / "model") if middle == "orbax" else osl.load(tmp_path / "model")
    )
    up = np.stack([used[f"model.layers.{i}.mlp.up_proj.weight"].T for i in range(2)], 1)
    assert_same_bits(np.asarray(model["layers"]["up"]), up)
    q = used["model.layers.1.self_attn.q_proj.weight"].reshape(-1, 16, 128).transpose(2, 0, 1)
    assert_same_bits(np.asarray(model["q"]["1"]), np.ascontiguousarray(q))
    osl.convert(
        tmp_path / "model",
        tmp_path / "back",
        mapping=LAYERS,
        config=tmp_path / "hf",
        options=options,
    )
    assert bits(safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")) == bits(used)
    assert sorted(os.listdir(tmp_path / "back")) == ["config.json", "model.safetensors"]


def test_a_mapping_wants_its_leaves(tmp_path, state):
    save_standard(tmp_path / "stock", state)
    with pytest.raises(osl.MappingError, match=r"(?s)no rule makes leaf 'step'"):
        osl.convert(tmp_path / "stock", tmp_path / "no", mapping=LAYERS)
    assert os.listdir(tmp_path) == ["stock"]


def test_arrays_larger_than_the_budget_pass_through_a_file(tmp_path):
    values = random_tensor((512, 1024), np.float32)  # 2 MiB; half the budget is 128 KiB
    save(tmp_path / "hf", {"big": values, "small": values[0].copy()})
    osl.convert(tmp_path / "hf", tmp_path / "orbax", mesh={"fsdp": 16}, options=SMALL)
    osl.convert(tmp_path / "orbax", tmp_path / "back", options=SMALL)
    osl.convert(
        tmp_path / "orbax",
        tmp_path / "columns",
        format="orbax",
        mesh={"fsdp": 16},
        spec=["'big' = -,fsdp"],
        options=SMALL,
    )
    assert_same_bits(osl.load(tmp_path / "back")["big"], values)
    assert_same_bits(restore_standard(tmp_path / "columns")["big"], values)
    assert sorted(os.listdir(tmp_path)) == ["back", "columns", "hf", "orbax"]


def stacked_columns():
    """Layers as one array, transposed, that is cut across the rows of every tensor."""
    layers = osl.stack(osl.tensor("layers.{i}.w").transpose(), over="i", axis=1)
    return osl.Mapping([osl.rule("layers", layers)]), ["'layers' = fsdp"]


@pytest.mark.parametrize("budget", [256 << 10, 2 << 20, 8 << 20])
@pytest.mark.parametrize("mapped", [True, False])
def test_cut_across_the_rows_of_the_source_each_byte_is_read_once(tmp_path, budget, mapped):
    weights = {f"layers.{n}.w": random_tensor((256, 512), np.float32, n) for n in range(3)}
    save(tmp_path / "hf", weights)
    mapping, spec = stacked_columns() if mapped else (None, ["'.*' = -,fsdp"])
    with recording() as storage:
        osl.convert(
            tmp_path / "hf",
            tmp_path / "orbax",
            mapping=mapping,
            mesh={"fsdp": 64},
            spec=spec,
            options=osl.ConvertOptions(memory_budget_bytes=budget),
        )
    read = sum(stop - start for _, start, stop in storage.tensor_ranges())
    total = sum(value.nbytes for value in weights.values())
    assert total <= read <= 1.05 * total
    restored = restore_standard(tmp_path / "orbax")
    if mapped:
        expected = np.stack([weights[f"layers.{n}.w"].T for n in range(3)], 1)
        assert_same_bits(restored["layers"], expected)
    else:
        assert bits(restored) == bits(weights)
    assert sorted(os.listdir(tmp_path)) == ["hf", "orbax"]
    osl.convert(
        tmp_path / "orbax",
        tmp_path / "back",
        mapping=mapping,
        options=osl.ConvertOptions(memory_budget_bytes=budget),
    )
    assert bits(osl.load(tmp_path / "back")) == bits(weights)


def test_chunks_larger_than_memory_are_refused(tmp_path):
    save_standard(tmp_path / "stock", {"big": random_tensor((512, 1024), np.float32)})
    with pytest.raises(osl.SafetensorsLayoutError, match="8,388,608 or more"):
        osl.convert(tmp_path / "stock", tmp_path / "no", options=SMALL)
    assert os.listdir(tmp_path) == ["stock"]


def test_what_cannot_be_held_is_refused_before_a_byte_is_written(tmp_path):
    six = np.arange(16, dtype=np.uint8).view(ml_dtypes.float6_e2m3fn)
    osl.save(tmp_path / "f6", {"a": six, "b": {"c": six}, "d": np.zeros(3)})
    with pytest.raises(osl.UnsupportedDtypeError, match=r"float6_e2m3fn.*'a', 'b.c'"):
        osl.convert(tmp_path / "f6", tmp_path / "no", format="orbax")
    osl.save(tmp_path / "empty", {"a": np.zeros((0, 3)), "d": np.zeros(3)})
    with pytest.raises(osl.SafetensorsLayoutError, match=r"no empty arrays: 'a'"):
        osl.convert(tmp_path / "empty", tmp_path / "no", format="orbax")
    osl.save(tmp_path / "large", {"a": 1 << 80, "d": np.zeros(3)})
    with pytest.raises(osl.SafetensorsLayoutError, match="a is an integer of more than 64 bits"):
        osl.convert(tmp_path / "large", tmp_path / "no", format="orbax")
    with pytest.raises(osl.MismatchError, match="not divisible by 2"):
        osl.convert(tmp_path / "f6", tmp_path / "no", format="sharded", mesh={"x": 2},
                    spec=["'.*' = x"])  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["empty", "f6", "large"]


@pytest.mark.parametrize("middle", ["hf", "sharded"])
def test_arrays_without_elements(tmp_path, middle):
    weights = {"none": np.zeros((0, 3), np.float32), "some": np.arange(4.0), "flat": np.zeros(0)}
    save(tmp_path / "hf", weights)
    osl.convert(tmp_path / "hf", tmp_path / "there", format=middle, mesh={"x": 2})
    osl.convert(tmp_path / "there", tmp_path / "back", format="hf")
    assert bits(osl.load(tmp_path / "back")) == bits(weights)


@pytest.mark.parametrize("kind", ["hf", "sharded", "orbax"])
def test_packed_elements_stay_packed(tmp_path, kind):
    rng = np.random.default_rng(0)
    four = rng.integers(0, 16, (24, 64), np.uint8).view(ml_dtypes.float4_e2m1fn)
    tree = {"a": four, "n": np.arange(-8, 8, dtype=np.int8).astype(ml_dtypes.int4)}
    osl.save(tmp_path / "saved", tree)
    osl.convert(tmp_path / "saved", tmp_path / "from", format=kind, options=SMALL)
    osl.convert(tmp_path / "from", tmp_path / "to", format="hf", options=SMALL)
    osl.convert(tmp_path / "to", tmp_path / "pieces", format="sharded", options=SMALL)
    assert raw_tensors(tmp_path / "to")["a"].code == "F4"
    for name in ("to", "pieces"):
        loaded = osl.load(tmp_path / name)
        assert loaded["a"].dtype == four.dtype
        np.testing.assert_array_equal(loaded["a"].view(np.uint8), four.view(np.uint8))
        np.testing.assert_array_equal(loaded["n"].astype(np.int8), np.arange(-8, 8, dtype=np.int8))


def test_companions(tmp_path, hf):
    (hf / "._config.json").write_bytes(b"what an archive of macOS leaves")
    osl.convert(hf, tmp_path / "copy", format="hf")
    assert (tmp_path / "copy" / "config.json").read_text() == '{"model_type": "llama"}'
    assert (tmp_path / "copy" / "tokenizer.model").read_bytes() == b"\0\1"
    assert sorted(os.listdir(tmp_path / "copy")) == [
        "config.json", "model.safetensors", "tokenizer.model",
    ]  # fmt: skip
    osl.convert(hf, tmp_path / "orbax")
    osl.convert(tmp_path / "orbax", tmp_path / "back", config=hf)
    assert (tmp_path / "back" / "config.json").exists()
    osl.convert(tmp_path / "orbax", tmp_path / "bare")
    assert not (tmp_path / "bare" / "config.json").exists()
    osl.convert(tmp_path / "orbax", tmp_path / "one", config=hf / "config.json")
    assert (tmp_path / "one" / "config.json").exists()
    assert not (tmp_path / "one" / "tokenizer.model").exists()
    with pytest.raises(osl.CheckpointNotFoundError, match="config= names a path that does"):
        osl.convert(tmp_path / "orbax", tmp_path / "no", config=tmp_path / "nowhere")


def test_companions_of_another_checkpoint_stay(tmp_path, hf):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "config.json").write_text("mine")
    (tmp_path / "to" / "tokenizer.model").write_bytes(b"\0\1")  # the same
    with pytest.raises(osl.CheckpointExistsError, match=r"\['config.json'\]"):
        osl.convert(hf, tmp_path / "to", format="hf")
    assert (tmp_path / "to" / "config.json").read_text() == "mine"
    osl.convert(hf, tmp_path / "to", format="hf", overwrite=True)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("form", ["hf", "orbax"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_to_the_target_meanwhile_is_replaced_only_if_asked(
    tmp_path, hf, weights, form, overwrite
):
    target = tmp_path / "to"

    def meanwhile(*_):
        save(target, {"theirs": weights["odd"]})

    with mock.patch.object(pipeline.Conversion, "_verify", meanwhile):
        if overwrite:
            osl.convert(hf, target, format=form, overwrite=True)
        else:
            with pytest.raises(osl.CheckpointExistsError):
                osl.convert(hf, target, format=form)
    if overwrite:
        assert osl.verify(target, hf).ok
    else:
        assert_same_bits(osl.load(target)["theirs"], weights["odd"])


def test_values_of_sixteen_bytes(tmp_path):
    value = np.arange(24).reshape(4, 6) * (1 + 2j)
    save_pytree(tmp_path / "from", {"z": value})
    osl.convert(tmp_path / "from", tmp_path / "to", format="orbax")
    assert osl.verify(tmp_path / "to", tmp_path / "from").ok
    with ocp.PyTreeCheckpointer() as plain:
        assert_same_bits(np.asarray(plain.restore(tmp_path / "to")["z"]), value)


def test_orbax_files_are_on_the_disk_before_they_appear(tmp_path, hf, monkeypatch):
    flushed, commit = set(), local_commit.commit_folder
    fsync = os.fsync

    def noted(fd):
        flushed.add(os.fstat(fd).st_ino)
        fsync(fd)

    def checked(finished, folder, **options):
        inside = [os.path.join(root, n) for root, _, files in os.walk(finished) for n in files]
        folders = [root for root, _, _ in os.walk(finished)]
        assert len(inside) > 3
        own = [path for path in inside if os.stat(path).st_nlink == 1]  # not TensorStore's
        assert len(own) > 2
        assert not [path for path in own + folders if os.stat(path).st_ino not in flushed]
        checks.append(finished)
        commit(finished, folder, **options)

    checks = []
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(local_commit, "commit_folder", checked)
    osl.convert(hf, tmp_path / "to", format="orbax")
    assert checks


@pytest.mark.parametrize("form", ["hf", "sharded"])
def test_a_target_of_a_source_with_checksums_has_its_own(tmp_path, weights, form):
    osl.save(tmp_path / "saved", weights, options=osl.WriteOptions(digests=True))
    copy = tmp_path / "copy"
    osl.convert(tmp_path / "saved", copy, format=form, mesh={"x": 2}, processes=2, options=SMALL)
    report = osl.verify(copy, tmp_path / "saved")
    assert report.ok, str(report)
    assert report.compared_tensors == len(weights)
    assert report.digested_files == (3 if form == "sharded" else 2)
    plain = {"a": weights["scalar"]}
    osl.save(tmp_path / "plain", plain)
    osl.convert(tmp_path / "plain", tmp_path / "other", format=form)
    assert osl.verify(tmp_path / "other").digested_files == 0


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
def test_a_source_that_is_not_what_its_checksums_say_is_refused(tmp_path, weights, form):
    """By the names of files, before anything appears; nothing is left to be continued."""
    source, target = tmp_path / "source", tmp_path / "target"
    osl.save(source, weights, options=osl.WriteOptions(digests=True, max_file_bytes=10**5))
    file = next(iter(sorted(source.glob("*.safetensors"))))
    whole = file.read_bytes()
    file.write_bytes(whole[:-10] + bytes([whole[-10] ^ 0x40]) + whole[-9:])
    with pytest.raises(osl.FormatError, match=rf"not what was saved: {file.name} \(CRC-32"):
        osl.convert(source, target, format=form, options=SMALL)
    assert sorted(os.listdir(tmp_path)) == ["source"]
    file.write_bytes(whole)
    osl.convert(source, target, format=form, options=SMALL)
    assert osl.verify(source, target).ok


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
def test_checksums_are_worked_out_of_what_is_read_anyway(tmp_path, weights, form):
    read = []
    for digests in (False, True):
        source = tmp_path / f"source-{digests}"
        osl.save(source, weights, options=osl.WriteOptions(digests=digests))
        file = source / "model.safetensors"
        with recording() as storage:
            osl.convert(source, tmp_path / f"target-{digests}", format=form, options=SMALL)
        read.append(sum(stop - start for name, start, stop in storage.ranges if name == str(file)))
    header = file.stat().st_size - sum(value.nbytes for value in weights.values())
    assert read[1] <= read[0] + 2 * header


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
def test_bytes_that_are_no_truth_values_are_refused(tmp_path, form):
    osl.save(tmp_path / "source", {"a": np.zeros(3), "flags": np.array([True, False])})
    (file,) = (tmp_path / "source").glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"\1\0", b"\2\0"))
    for mapping in (None, osl.Mapping([osl.rule("b", osl.tensor("flags"))], strict=False)):
        with pytest.raises(osl.FormatError, match=r"source/model\..*'(flags|b)'.*found: 2"):
            osl.convert(tmp_path / "source", tmp_path / "to", format=form, mapping=mapping)
    assert os.listdir(tmp_path) == ["source"]


def test_parts_of_trees_are_named_as_leaves_are(tmp_path):
    state = optax.adam(1e-3).init({"w": np.ones((4, 2), np.float32)})
    osl.save(tmp_path / "saved", {"opt": state, "step": 3})
    osl.convert(tmp_path / "saved", tmp_path / "mu", format="hf", subtree="opt.0.mu")
    assert [*osl.load(tmp_path / "mu")] == ["w"]
    for subtree in ("step.x", "opt.0.mu.w.x", "opt.7", "opt.0.none"):
        with pytest.raises(osl.MissingTensorError, match="no such part"):
            osl.convert(tmp_path / "saved", tmp_path / "no", format="hf", subtree=subtree)


@pytest.mark.timeout(60)
def test_many_rows_without_elements_take_no_time(tmp_path):
    entry = {"dtype": "F32", "shape": [1 << 60, 0], "data_offsets": [0, 0]}
    header = json.dumps({"none": entry}).encode()
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    for form in ("hf", "sharded"):
        osl.convert(tmp_path / "source", tmp_path / form, format=form, mesh={"x": 2})
        assert osl.verify(tmp_path / form, tmp_path / "source").ok


def test_one_array_is_a_part_too(tmp_path):
    osl.save(tmp_path / "saved", {"a": {"b": np.arange(3.0), "c": 1}})
    for form in ("orbax", "hf"):
        osl.convert(tmp_path / "saved", tmp_path / form, format=form, subtree="a.b")
    assert bits(restore_standard(tmp_path / "orbax")) == bits({"b": np.arange(3.0)})
    assert bits(osl.load(tmp_path / "hf")) == bits({"b": np.arange(3.0)})
    safetensors.numpy.save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(osl.CheckpointNotFoundError, match="has no leaves to convert"):
        osl.convert(tmp_path / "empty.safetensors", tmp_path / "no")
    assert not (tmp_path / "no").exists()


NAMES = ["", "a", "a/b", "c/0", "ü/コ", " ", "x" * 300, "..", "../../evil", "a//b", "/abs", ".",
         "a\nb", "zarr.json", "manifest.ocdbt", "_METADATA", "a\\b", "a..b"]  # fmt: skip


@pytest.mark.parametrize("form", ["hf", "sharded", "orbax"])
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, form):
    source = tmp_path / "source"
    osl.save(source, {"a": np.ones(3), "b": np.ones(2), "k": jax.random.key(0)})
    file = source / "orbax_safetensors_layout.json"
    manifest = json.loads(file.read_text())
    tree = {key: number for number, key in enumerate(["", "a", "b", "k"])}

    def refused(name, node, *, match, tensor):
        nodes = [*manifest["tree"]]
        nodes[tree[name]] = node
        file.write_text(json.dumps(manifest | {"tree": nodes}))
        with pytest.raises(osl.SafetensorsLayoutError, match=match) as caught:
            osl.convert(source, tmp_path / "target", format=form)
        assert caught.value.tensor == tensor
        assert not (tmp_path / "target").exists()

    refused("b", {"tensor": "c"}, match="does not name", tensor="b")
    keys = manifest["tree"][tree["k"]]
    refused("k", keys | {"key_impl": "none"}, match="PRNG key data", tensor="k")
    refused("k", keys | {"key_impl": "rbg"}, match="PRNG key data", tensor="k")  # of four numbers
    refused("", {"dict": [0, "b", "k"]}, match="not one that JAX can have", tensor=None)


def test_names_of_every_kind(tmp_path):
    weights = {name: np.arange(6.0) + n for n, name in enumerate(NAMES)}
    save(tmp_path / "hf", weights)
    osl.convert(tmp_path / "hf", tmp_path / "orbax")
    assert bits(restore_standard(tmp_path / "orbax")) == bits(weights)
    files = osl.ConvertOptions(use_ocdbt=False)
    with pytest.raises(osl.SafetensorsLayoutError, match="no-ocdbt") as refused:
        osl.convert(tmp_path / "hf", tmp_path / "no", options=files)
    bad = [name for name in NAMES if repr(name) in str(refused.value)]
    assert bad == ["", "x" * 300, "..", "../../evil", "a//b", "/abs", ".", "_METADATA", "a\\b"]
    assert sorted(os.listdir(tmp_path)) == ["hf", "orbax"]
    good = {name: value for name, value in weights.items() if name not in bad}
    save(tmp_path / "good", good)
    osl.convert(tmp_path / "good", tmp_path / "folders", options=files)
    assert bits(restore_standard(tmp_path / "folders")) == bits(good)


def test_targets_and_meshes_that_make_no_sense(tmp_path, hf):
    with pytest.raises(osl.SafetensorsLayoutError, match="saved as a folder"):
        osl.convert(hf, tmp_path / "to.safetensors", format="hf")
    for topology in ({"processes": 0}, {"processes": -1}, {"mesh": {"x": 0}}):
        with pytest.raises(ValueError, match="processes, must be positive integers"):
            osl.convert(hf, tmp_path / "to", format="sharded", **topology)
    mesh = {"x": 2}
    for wrong, expected in (
        ({"mesh": (4, 2)}, r"mesh must be names and sizes of axes.*not \(4, 2\)"),
        ({"mesh": 4}, "mesh must be .*not 4"),
        ({"mesh": "fsdp=4"}, "mesh must be .*not 'fsdp=4'"),
        ({"mesh": jax.devices()}, "mesh must be"),
        ({"mesh": np.array(jax.devices())}, "mesh must be"),
        ({"mesh": {"x": "4"}}, r"must be positive integers, not \['4', 1\]"),
        ({"processes": "3"}, "must be positive integers, not"),
        ({"processes": None}, "must be positive integers, not"),
        ({"subtree": ("a",)}, r"subtree must be a dotted name, not \('a',\)"),
        ({"subtree": 5}, "subtree must be a dotted name, not 5"),
        ({"mesh": mesh, "spec": 5}, "spec must be a list of sharding rules.*not 5"),
        ({"mesh": mesh, "spec": "'.*' = x"}, "spec must be a list of sharding rules"),
        ({"mesh": mesh, "spec": {".*": "x"}}, r"a list of sharding rules, as \[\"'.*kernel' = "),
        ({"mesh": mesh, "spec": [("a", "b")]}, r"\('a', 'b'\) is not a sharding rule"),
    ):
        with pytest.raises(ValueError, match=expected):
            osl.convert(hf, tmp_path / "to", **wrong)
    for mapping in ("auto:maxtext", {"a": "b"}, [], osl.families):
        with pytest.raises(TypeError, match=r"is not an osl\.Mapping"):
            osl.convert(hf, tmp_path / "to", mapping=mapping)
    assert os.listdir(tmp_path) == ["hf"]


def test_a_name_that_begins_another_is_refused_by_name(tmp_path, hf):
    first, second = list(osl.metadata(hf))[:2]
    rules = [osl.rule("a", osl.tensor(first)), osl.rule("a.b", osl.tensor(second))]
    with pytest.raises(osl.MappingError, match=r"prefix of another's.*'a\.b'"):
        osl.convert(hf, tmp_path / "to", mapping=osl.Mapping(rules, strict=False))
    assert os.listdir(tmp_path) == ["hf"]


def test_from_the_hub(tmp_path, hf, weights, monkeypatch):
    with hub_in_use(monkeypatch, tmp_path / "home") as hub:
        hub.add("org/model", hf)
        osl.convert("hf://org/model", tmp_path / "orbax", mesh={"fsdp": 4})
        osl.convert("hf://org/model", tmp_path / "copy", format="hf")
    assert bits(restore_standard(tmp_path / "orbax")) == bits(weights)
    assert bits(osl.load(tmp_path / "copy")) == bits(weights)
    assert (tmp_path / "copy" / "config.json").read_text() == '{"model_type": "llama"}'


def test_what_stands_at_the_target(tmp_path, hf, weights):
    single = save(tmp_path / "one", {"a": np.zeros(3, np.float32)})
    (single / "README.md").write_text("mine")
    with pytest.raises(osl.CheckpointExistsError, match="is there already"):
        osl.convert(hf, single, format="hf")
    osl.convert(hf, single, format="hf", overwrite=True)
    assert bits(osl.load(single)) == bits(weights)
    assert (single / "README.md").read_text() == "mine"
    osl.convert(hf, tmp_path / "orbax")
    with pytest.raises(osl.CheckpointExistsError):
        osl.convert(hf, tmp_path / "orbax")
    osl.convert(hf, tmp_path / "orbax", format="hf", overwrite=True)
    assert not (tmp_path / "orbax" / "_METADATA").exists()
    assert bits(osl.load(tmp_path / "orbax")) == bits(weights)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(osl.CheckpointExistsError, match="not empty"):
        osl.convert(hf, tmp_path / "full")
    for target in (hf, hf / "below", tmp_path):
        with pytest.raises(osl.SafetensorsLayoutError, match="same folder"):
            osl.convert(hf, target, overwrite=True)
    with pytest.raises(osl.SafetensorsLayoutError, match=r"gs://"):
        osl.convert(hf, "gs://bucket/target")


def test_a_bit_that_is_written_wrong_is_found(tmp_path, hf):
    real = ResumableFile.write_at

    def wrong(file, offset, buffers):
        if offset:  # no header
            buffers = [np.array(buffers[0])]
            buffers[0][-1] ^= 4
        real(file, offset, buffers)

    with (
        mock.patch.object(ResumableFile, "write_at", wrong),
        pytest.raises(osl.MismatchError, match="what was written differs from the source"),
    ):
        osl.convert(hf, tmp_path / "to", format="hf")
    assert not (tmp_path / "to").exists()
    with pytest.raises(osl.MismatchError, match="restart"):
        osl.convert(hf, tmp_path / "to", format="hf")
    osl.convert(hf, tmp_path / "to", format="hf", restart=True)
    assert bits(osl.load(tmp_path / "to")) == bits(osl.load(hf))


def test_names_of_both_sides_leave_no_doubt_which_the_source_is(tmp_path):
    """A bias has one name in the model and in the files; kernels have two."""
    tree = {"up": {"kernel": random_tensor((8, 4), np.float32), "bias": np.ones(4, np.float32)}}
    mapping = osl.Mapping(
        [
            osl.rule("{x}.kernel", osl.tensor("{x}.weight").transpose()),
            osl.rule("{x}.bias", osl.tensor("{x}.bias")),
        ]
    )
    osl.save(tmp_path / "saved", tree)
    osl.convert(tmp_path / "saved", tmp_path / "files", mapping=mapping)
    files = safetensors.numpy.load_file(tmp_path / "files" / "model.safetensors")
    assert bits(files) == bits({"up.bias": tree["up"]["bias"], "up.weight": tree["up"]["kernel"].T})
    osl.save(tmp_path / "named", files)  # recorded, and of the other side
    osl.convert(tmp_path / "named", tmp_path / "model", mapping=mapping, format="hf")
    model = osl.load(tmp_path / "model")
    assert bits(model) == bits({f"up.{name}": leaf for name, leaf in tree["up"].items()})


def test_leaves_that_take_no_array_of_an_orbax_source(tmp_path):
    save_standard(tmp_path / "stock", {"w": np.arange(6.0)})
    mapping = osl.Mapping(
        [osl.rule("w", osl.tensor("w")), osl.rule("zeros", osl.fill((4, 2), 0, "float32"))]
    )
    osl.convert(tmp_path / "stock", tmp_path / "to", format="hf", mapping=mapping, inverse=False)
    loaded = osl.load(tmp_path / "to")
    np.testing.assert_array_equal(loaded["w"], np.arange(6.0))
    np.testing.assert_array_equal(loaded["zeros"], np.zeros((4, 2), np.float32))


@pytest.mark.parametrize("spec", [[], ["'w' = x"]])
def test_a_mesh_of_whole_tensors_is_said_not_to_count(tmp_path, caplog, spec):
    """The format of a source of Orbax is by default `hf`."""
    weights = {"w": random_tensor((8, 4), np.float32)}
    save_standard(tmp_path / "orbax", weights)
    with caplog.at_level("WARNING"):
        osl.convert(tmp_path / "orbax", tmp_path / "hf", mesh={"x": 2}, spec=spec)
    assert caplog.text.count("are ignored") == 1
    assert "is used by no array" not in caplog.text
    assert bits(safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")) == bits(weights)


@pytest.mark.parametrize("form", ["orbax", "hf"])
def test_what_is_in_the_way_of_the_conversions_folder_is_named(tmp_path, form):
    save(tmp_path / "source", {"w": random_tensor((8, 4), np.float32)})
    workspace = Path(partial_folder(str(tmp_path / "to"), "convert"))
    workspace.touch()
    with pytest.raises(osl.StorageError, match=rf"cannot make the folder.*{workspace.name}"):
        osl.convert(tmp_path / "source", tmp_path / "to", format=form)


def test_side_files_come_from_a_web_server_too(tmp_path):
    """It lists no folder, so the names that Hugging Face uses are asked for."""
    source = save(tmp_path / "model", {"w": np.ones((4, 4), np.float32)})
    side_files = {"config.json": b"{}", "tokenizer.model": b"\0\1", "merges.txt": b"a b"}
    for name, data in side_files.items():
        (source / name).write_bytes(data)
    with file_server(tmp_path) as server:
        osl.convert(f"{server.url}/files/model", tmp_path / "to", format="hf")
    for name, data in side_files.items():
        assert (tmp_path / "to" / name).read_bytes() == data


def test_a_direction_without_a_mapping_is_refused(tmp_path, hf):
    with pytest.raises(osl.InvalidArgumentError, match="there is no mapping"):
        osl.convert(hf, tmp_path / "to", inverse=True)
    with pytest.raises(osl.InvalidArgumentError, match="there is no mapping"):
        osl.convert(hf, tmp_path / "to", dequantize="bfloat16", inverse=True)


@pytest.mark.parametrize("below", ["", "/below"])
def test_source_and_target_are_apart_however_they_are_spelled(hf, below):
    with pytest.raises(osl.SafetensorsLayoutError, match="the same folder"):
        osl.convert(f"file://{hf}", f"{hf}{below}", format="sharded", overwrite=True)
    with pytest.raises(osl.SafetensorsLayoutError, match="the same folder"):
        osl.convert(hf, f"file://{hf}{below}", format="sharded", overwrite=True)


def test_safetensors_to_safetensors_needs_no_orbax(hf, tmp_path):
    program = (
        "import sys, orbax_safetensors_layout as osl\n"
        "osl.convert(sys.argv[1], sys.argv[2], format='sharded')\n"
        "assert 'orbax.checkpoint' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, hf, tmp_path / "apart"], check=True)


def test_what_is_beside_a_checkpoint_stays_when_one_is_converted_there(tmp_path, hf, weights):
    """In a folder that Orbax made for this package's layout, too."""
    folder = tmp_path / "to"
    ocp.Checkpointer(osl.SafetensorsLayout()).save(folder, {"a": np.ones(3)})
    kept = {"adapter_model.safetensors", "notes.txt"}
    for name in kept:
        (folder / name).write_text("theirs")
    osl.convert(hf, folder, format="hf", overwrite=True)
    assert {name for name in kept if (folder / name).read_text() == "theirs"} == kept
    assert bits(osl.load(folder)) == bits(weights)
    with pytest.raises(osl.CheckpointExistsError, match=r"beside the checkpoint.*adapter_model"):
        osl.convert(hf, folder, format="orbax", overwrite=True)
    assert bits(osl.load(folder)) == bits(weights)


@pytest.mark.parametrize("target_format", [None, "hf"])
def test_a_step_through_a_mapping_with_a_leaf_of_no_tensor(tmp_path, target_format):
    rules = [
        osl.rule("w", osl.tensor("m.w").transpose()),
        osl.rule("ones", osl.fill((4,), 1, "float32")),
    ]
    tree = {"w": np.arange(8, dtype=np.float32).reshape(4, 2), "ones": np.ones(4, np.float32)}
    osl.save(tmp_path / "run", tree)
    osl.convert(
        tmp_path / "run", tmp_path / "out", mapping=osl.Mapping(rules), format=target_format
    )
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == {"m.w"}
    np.testing.assert_array_equal(stored["m.w"], tree["w"].T)
