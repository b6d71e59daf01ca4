"""`inspect`: against `safetensors` and files whose contents are known."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from backends import place as served, running
from command_line import run
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, place

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import inspect, inspect_dequantized
from orbax_safetensors_layout.catalog import compile_pattern
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.cli.output import name_families
from orbax_safetensors_layout.storage import FIRST_READ_BYTES


def layers(count=12):
    rng = np.random.default_rng(0)
    tensors = {"embed.weight": rng.standard_normal((32, 8)).astype(np.float32)}
    for n in range(count):
        tensors[f"layers.{n}.up.weight"] = np.zeros((8, 16), ml_dtypes.bfloat16)
        tensors[f"layers.{n}.norm.weight"] = np.zeros(8, np.float16)
    return tensors


def test_json_says_what_safetensors_says(tmp_path, capsys):
    tensors = layers()
    osl.save(tmp_path, tensors, options=osl.WriteOptions(max_file_bytes=2000))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert set(by_name) == set(tensors)
    for file in report["files"]:
        assert report["files"][file] == (tmp_path / file).stat().st_size
        with safetensors.safe_open(tmp_path / file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                view = opened.get_slice(name)
                tensor = by_name.pop(name)
                assert tensor["files"] == [file]
                assert (tensor["dtype"], tensor["shape"]) == (view.get_dtype(), view.get_shape())
                assert tensor["nbytes"] == tensors[name].nbytes
                assert tensor["parameters"] == tensors[name].size
    assert not by_name
    assert report["total"] == {
        "tensors": len(tensors),
        "parameters": sum(t.size for t in tensors.values()),
        "nbytes": sum(t.nbytes for t in tensors.values()),
    }
    assert list(report["by_dtype"]) == ["BF16", "F32", "F16"]
    assert report["metadata"] == {"format": "pt"}


def test_rows_join_what_is_alike_and_can_be_filtered(tmp_path, capsys):
    osl.save(tmp_path, layers())
    assert main(["inspect", str(tmp_path), "--filter", "layers.*", "--sort", "size"]) == 0
    out = capsys.readouterr().out
    assert "layers.{0..11}.up.weight" in out
    assert "embed" not in out
    assert out.index("up.weight") < out.index("norm.weight")
    assert main(["inspect", str(tmp_path), "--filter", "layers.{3..4}.up.*", "--all"]) == 0
    out = capsys.readouterr().out
    assert [n for n in range(12) if f"layers.{n}.up.weight" in out] == [3, 4]
    assert main(["inspect", str(tmp_path), "--files"]) == 0
    out = capsys.readouterr().out
    assert "model.safetensors" in out
    assert "layers" not in out


def test_pieces_and_values_are_told(tmp_path, capsys):
    tree = {"w": np.arange(64.0), "step": 7}
    osl.save(tmp_path, tree, options=osl.WriteOptions(layout="sharded", metadata={"run": "a"}))
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "sharded, 1 file" in out
    assert "run=a" in out
    assert "step=7" in out
    assert main(["inspect", str(tmp_path), "--files", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == {"step": 7}


QUANTISED = {
    "block": (
        {"a.weight": np.zeros((8, 8), ml_dtypes.float8_e4m3fn), "a.weight_scale_inv": (1, 1)},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        64,
        "fp8 (weight_block_size=[128, 128])",
    ),
    "mxfp4": ({"a_blocks": np.zeros((4, 2, 16), np.uint8), "a_scales": (4, 2)}, {}, 256, None),
    "packed": (
        {
            "a.weight_packed": np.zeros((8, 4), np.int32),
            "a.weight_scale": (8, 1),
            "a.weight_shape": (2,),
        },
        {"quant_method": "compressed-tensors", "bits": 4},
        256,
        "compressed-tensors (bits=4)",
    ),
    "gptq": (
        {
            "a.qweight": np.zeros((2, 8), np.int32),
            "a.qzeros": (1, 1),
            "a.scales": (1, 8),
            "a.g_idx": (8,),
        },
        {"quant_method": "gptq", "bits": 8},
        64,
        "gptq (bits=8)",
    ),
    "bitsandbytes": (
        {
            "a.weight": np.zeros((32, 1), np.uint8),
            "a.weight.absmax": (1,),
            "a.weight.quant_map": (16,),
            "a.weight.quant_state.bitsandbytes__nf4": (80,),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        64,
        "bitsandbytes (load_in_4bit=True)",
    ),
    "bitsandbytes in another dtype": (
        {
            "a.weight": np.zeros((16, 1), ml_dtypes.bfloat16),
            "a.weight.absmax": (1,),
            "a.weight.quant_map": (16,),
            "a.weight.quant_state.bitsandbytes__nf4": (80,),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        64,
        "bitsandbytes (load_in_4bit=True)",
    ),
    "fused experts": (
        {
            "experts.up_proj": np.zeros((2, 8, 8), ml_dtypes.float8_e4m3fn),
            "experts.up_proj_scale_inv": (2, 1, 1),
        },
        {"quant_method": "fp8"},
        128,
        "fp8",
    ),
    "nvfp4": (
        {
            "a.weight": np.zeros((8, 4), np.uint8),
            "a.weight_scale": (8, 1),
            "a.weight_scale_2": (),
            "a.input_scale": (),
        },
        {},
        64,
        None,
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_parameters_of_quantised_weights_are_the_models(tmp_path, kind):
    tensors, settings, parameters, method = QUANTISED[kind]
    arrays = {
        name: np.zeros(value, np.float32) if isinstance(value, tuple) else value
        for name, value in tensors.items()
    }
    arrays["norm.weight"] = np.zeros(5, np.float32)
    arrays["other_scales"] = np.zeros(3, np.float32)  # of nothing: a tensor like others
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    config = {"architectures": ["Model"], "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect(tmp_path)
    assert report.total.parameters == parameters + 5 + 3
    assert sum(report.quantization.weights.values()) == 1
    assert report.quantization.method == method
    assert report.model == "Model"


def test_plain_weights_are_not_quantised(tmp_path):
    osl.save(tmp_path, {"a": {"weight": np.zeros(3), "scales": np.zeros(2)}})
    assert inspect(tmp_path).quantization is None
    assert inspect_dequantized(tmp_path, "bfloat16") == inspect(tmp_path)


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10", "01", "[x]", "w*"]), max_size=4).map(
        ".".join
    ),
    unique=True,
    max_size=30,
)


@given(NAMES)
def test_every_pattern_matches_the_names_it_stands_for(names):
    families = name_families((name, None) for name in names)
    assert sorted(n for family in families for n in family.members) == list(range(len(names)))
    for family in families:
        for member in family.members:
            if len(family.members) > 1:
                assert compile_pattern(family.pattern).fullmatch(names[member])
            else:
                assert family.pattern == names[member]


def test_names_may_have_more_digits_than_a_number_is_read_of():
    names = [f"layers.{n}.w" for n in (3, 4, "1" * 5000, "1" * 5001)]
    families = name_families((name, None) for name in names)
    assert [family.pattern for family in families] == ["layers.{3..4}.w", *names[2:]]


def test_nothing_there_and_streams(tmp_path):
    done = run("inspect", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("orbax-safetensors: the path does not exist")
    osl.save(tmp_path / "some", layers())
    done = run("inspect", tmp_path / "some")
    assert (done.returncode, done.stderr) == (0, "")


def write_config(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def test_bits_of_packed_weights(tmp_path):
    """compressed-tensors says them of a group; what cannot be is said, and 4 are assumed."""
    tensors = {"a.weight_packed": np.zeros((4, 2), np.int32), "a.weight_scale": np.zeros((4, 1))}
    osl.save(tmp_path, tensors)
    groups = {"group_0": {"weights": {"num_bits": 8}}}
    method = {"quant_method": "compressed-tensors"}
    for said, parameters, problem in (
        ({"config_groups": groups}, 32, None),
        ({"bits": 8}, 32, None),
        ({}, 64, None),
        ({"bits": 5}, 48, None),
        ({"bits": "8"}, 64, "its configuration says '8' bits a weight; 4 are assumed"),
        (
            {"config_groups": {n: {"weights": {"num_bits": n}} for n in (8, 4)}},
            64,
            "its configuration says [8, 4] bits a weight; 4 are assumed",
        ),
    ):
        write_config(tmp_path, {"quantization_config": method | said})
        report = inspect(tmp_path)
        assert (report.total.parameters, report.problem) == (parameters, problem)


def test_configurations_that_cannot_be_read_are_told(tmp_path):
    osl.save(tmp_path, layers())
    write_config(tmp_path, "{")
    done = run("inspect", tmp_path)
    assert done.returncode == 0
    assert "problem      cannot read a configuration: " in done.stdout
    write_config(tmp_path, {"quantization_config": "fp8"})
    problem = "its quantization_config is 'fp8', not an object"
    assert f"problem      {problem}\n" in run("inspect", tmp_path).stdout
    document = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert document["problem"] == problem


def test_names_do_not_command_the_terminal(tmp_path):
    name, folder = "red\x1b[31m\nline\x9b", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    osl.save(folder, {name: np.zeros(2)})
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "orbax_safetensors_layout", "inspect", folder]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(os.fsencode(folder))
    assert b"red\\x1b[31m\\nline\\x9b  F64" in done.stdout
    command.append("--json")
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False)
    (tensor,) = json.loads(done.stdout.decode(errors="surrogateescape"))["tensors"]
    assert tensor["name"] == name


@pytest.mark.parametrize("kind", ["s3", "gs", "https"])
def test_far_away_headers_alone_are_read(tmp_path, capsys, kind):
    tensors = {f"t{i}": np.zeros(4 << 20, np.uint8) for i in range(3)}
    osl.save(tmp_path / "ckpt", tensors, options=osl.WriteOptions(max_file_bytes=5 << 20))
    (tmp_path / "place").mkdir()
    with running(kind) as server, served(server, tmp_path / "place") as there:
        for file in (tmp_path / "ckpt").iterdir():
            there.put(file.name, file.read_bytes())
        server.take_log()
        assert main(["inspect", there.url, "--json"]) == 0
        log = [entry for entry in server.take_log() if entry.get("first") is not None]
    report = json.loads(capsys.readouterr().out)
    assert report["total"] == {"tensors": 3, "parameters": 12 << 20, "nbytes": 12 << 20}
    assert len(log) >= 3
    assert all(entry["last"] < FIRST_READ_BYTES for entry in log)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_orbax_saved(tmp_path, capsys, use_ocdbt):
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    tree = {
        "params": {
            "w": place(values, P("x", "y"), mesh_of(x=4, y=2)),
            "small": jnp.zeros((4, 6), jnp.int4),
        },
        "step": 7,
        "loss": float("nan"),
    }
    with ocp.CheckpointManager(
        tmp_path,
        item_handlers=ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt),
    ) as manager:
        manager.save(3, args=ocp.args.PyTreeSave(tree))
    step = tmp_path / "3"
    assert main(["inspect", str(step), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(step / "default")
    assert report["layout"] == "orbax"
    assert report["values"] == {"step": 7, "loss": "nan"}
    small, w = sorted(report["tensors"], key=lambda tensor: tensor["name"])
    assert (small["name"], small["dtype"], small["shape"]) == ("params.small", "int4", [4, 6])
    assert (w["name"], w["dtype"], w["shape"]) == ("params.w", "F32", [64, 48])
    assert (w["nbytes"], w["pieces"]) == (values.nbytes, 8)
    inside = (path for path in (step / "default").rglob("*") if path.is_file())
    sizes = {str(path.relative_to(step / "default")): path.stat().st_size for path in inside}
    assert report["files"] == sizes
    assert main(["inspect", str(step), "--filter", "*.w"]) == 0
    out = capsys.readouterr().out
    assert "8 chunks" in out
    assert "small" not in out
    assert main(["inspect", str(step), "--files"]) == 0
    assert main(["inspect", str(step), "--dequantize", "bfloat16"]) == 2
    assert "Orbax saved this in its own format" in capsys.readouterr().err
    assert main(["inspect", str(step), "--filter", "v"]) == 1
    assert "not found" in capsys.readouterr().err
