"""The examples of every command's `--help` run, on small checkpoints of the names that they use."""

from __future__ import annotations

import json
import shlex

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import save

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.cli.main import COMMANDS

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "head_dim": 32,
}
SHAPES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (512, 256),
    "mlp.up_proj": (512, 256),
    "mlp.down_proj": (256, 512),
    "input_layernorm": (256,),
    "post_attention_layernorm": (256,),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a checkpoint of each name."""
    shapes = {"model.embed_tokens": (512, 256), "model.norm": (256,), "lm_head": (512, 256)}
    shapes |= {
        f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in SHAPES.items()
    }
    rng = np.random.default_rng(0)
    weights = {f"{n}.weight": rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    for name in ("Llama-3.1-8B", "Llama-3.1-405B", "DeepSeek-V3"):
        save(tmp_path / name, weights, files=2)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    llama = tmp_path / "Llama-3.1-8B"
    model = osl.load(llama, mapping=osl.families.mapping(llama, target="maxtext"))
    tree: dict = {}
    for name, value in model.items():
        *nodes, last = name.split(".")
        node = tree
        for key in nodes:
            node = node.setdefault(key, {})
        node[last] = value
    with ocp.CheckpointManager((tmp_path / "runs" / "a").absolute()) as manager:
        manager.save(1000, args=ocp.args.StandardSave({"params": tree, "step": 1000}))
    state = {"params": {"layers": [{"w": weights["lm_head.weight"]}]}}
    pieces = osl.WriteOptions(layout="sharded")
    osl.save(tmp_path / "run" / "1000" / "default", state, options=pieces)
    osl.save(tmp_path / "exported", state)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_examples_run(folder, command, capsys):
    for number, example in enumerate(command.examples):
        line, _, piped = example.partition(" | ")
        arguments = shlex.split(line)
        if command.name in ("convert", "consolidate") and "exported" in arguments:
            arguments[arguments.index("exported")] = f"exported-{number}"
        assert main(arguments) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        if piped:
            assert piped == "jq .total.parameters"
            assert json.loads(out)["total"]["parameters"] > 0
    if command.name == "convert":
        there = {"llama-orbax", "maxtext", "exported-2", "llama-pieces"}
        assert there <= {path.name for path in folder.iterdir()}
        loaded = osl.load(folder / "exported-2")
        source = osl.load(folder / "Llama-3.1-8B")
        for name, value in source.items():  # queries are scaled there and back, and rounded
            np.testing.assert_allclose(loaded[name], value, rtol=0.01, err_msg=name)
        assert (folder / "exported-2" / "config.json").exists()
