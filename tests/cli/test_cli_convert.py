"""`orbax-safetensors convert`, as a shell runs it."""

from __future__ import annotations

import os

import numpy as np
import orbax.checkpoint as ocp
from checkpoints import llama_like, random_tensor, save
from command_line import run
from orbax_calls import restore_standard

import orbax_safetensors_layout as osl

MAPPINGS = """
import orbax_safetensors_layout as osl

def doubled(config):
    return osl.Mapping([osl.rule("a.{x}", osl.tensor("{x}").transpose())])
"""


def test_there_through_a_mapping_and_back(tmp_path):
    weights = {"w": random_tensor((32, 8), np.float32), "v": random_tensor((8, 16), np.float32)}
    save(tmp_path / "hf", weights)
    (tmp_path / "mine.py").write_text(MAPPINGS)
    mapped = ("--mapping", "mine:doubled")
    rules = ("--spec", "'none' = fsdp", "--spec", "'.*' = -,fsdp")
    arguments = ("hf", "orbax", "--mesh", "fsdp=4", *rules, *mapped)
    done = run("convert", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/orbax\n"
    assert "2 arrays" in done.stderr
    assert done.stderr.count("is used by no array") == 1
    assert "The sharding rule 'none' = fsdp is used by no array." in done.stderr
    assert "every bit compared" in done.stderr
    restored = restore_standard(tmp_path / "orbax")
    np.testing.assert_array_equal(restored["a"]["w"], weights["w"].T)
    done = run("convert", "orbax", "back", *mapped, "--quiet", "--no-verify", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: value.tobytes() for name, value in osl.load(tmp_path / "back").items()} == {
        name: value.tobytes() for name, value in weights.items()
    }


def test_a_step_into_pieces(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        state = {"params": llama_like(), "step": 7}
        manager.save(7, args=ocp.args.PyTreeSave(state))
    done = run("convert", tmp_path / "run", tmp_path / "no")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Choose a step, as step=7 (--step 7)" in done.stderr
    done = run("convert",
        tmp_path / "run", tmp_path / "pieces", "--step", 7, "--subtree", "params",
        "--format", "sharded", "--mesh", "fsdp=8", "--hosts", 4, "--dtype", "float32",
        "--memory-budget-bytes", "4MiB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "pieces").glob("shard-*-of-00004.safetensors")]) == 4
    loaded = osl.load(tmp_path / "pieces")
    for name, value in llama_like().items():
        np.testing.assert_array_equal(loaded[name], value.astype(np.float32), strict=True)


def test_an_export_of_a_step_of_this_package(tmp_path):
    weights = {f"model.{i}.up.weight": np.arange(6, dtype="f4").reshape(2, 3) + i for i in range(2)}
    hf = save(tmp_path / "hf", weights)
    (tmp_path / "maps.py").write_text(
        "import orbax_safetensors_layout as osl\n"
        "up = osl.tensor('model.{i}.up.weight').transpose()\n"
        "layers = osl.Mapping([osl.rule('layers.up', osl.stack(up, over='i'))])\n"
    )
    stacked = np.stack([weight.T for weight in weights.values()])
    registry = osl.handler_registry("default")
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        state = {"params": {"layers": {"up": stacked}}, "step": 7}
        manager.save(7, args=ocp.args.StandardSave(state))
    arguments = ("convert", "run", "exported", "--step", 7, "--mapping", "maps.py:layers")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "(--subtree)" in done.stderr
    done = run(*arguments, "--subtree", "params", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run("verify", tmp_path / "exported", "--against", hf).returncode == 0


def test_misuse(tmp_path):
    save(tmp_path / "hf", {"w": np.zeros((3, 3), np.float32)})
    for arguments in (
        (tmp_path / "hf", tmp_path / "to", "--format", "torch"),
        (tmp_path / "hf", tmp_path / "to", "--spec", "'.*' = fsdp"),
        (tmp_path / "hf", tmp_path / "to", "--mesh", "fsdp"),
        (tmp_path / "hf", tmp_path / "to", "--mapping", "nothing"),
        (tmp_path / "hf", tmp_path / "to", "--dtype", "int8"),
    ):
        done = run("convert", *arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_an_interrupted_step_is_found_whatever_its_folder_is_called(tmp_path):
    weights = {f"w{n}": random_tensor((64, 64), np.float32, n) for n in range(8)}
    save(tmp_path / "run" / "step_0007", weights)
    arguments = ["convert", "run", "to", "--step", "7", "--format", "orbax"]
    arguments += ["--memory-budget-bytes", "256KiB"]
    done = run(*arguments, program="cli_convert_interrupted.py", cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    (left,) = (tmp_path / "to").iterdir()
    assert f"The files written so far stay in {left};" in done.stderr


def test_interrupted_and_continued(tmp_path):
    weights = {f"w{n}": random_tensor((64, 64), np.float32, n) for n in range(8)}
    save(tmp_path / "hf", weights)
    arguments = ["convert", "hf", "to", "--memory-budget-bytes", "256KiB"]
    done = run(*arguments, program="cli_convert_interrupted.py", cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
    assert (
        f"The files written so far stay in {left}; the same command continues there" in done.stderr
    )
    assert not (tmp_path / "to").exists()
    done = run("convert", *arguments[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "were there from an earlier run" in done.stderr
    assert "converting: 100%" in done.stderr
    assert "verifying: 100%" in done.stderr
    restored = restore_standard(tmp_path / "to")
    assert {n: v.tobytes() for n, v in restored.items()} == {
        n: v.tobytes() for n, v in weights.items()
    }
