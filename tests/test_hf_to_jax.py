"""The example that runs a JAX model on a Hugging Face folder, run as users run it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import llama_jax
import numpy as np
import pytest
from programs import REPOSITORY, program_path

EXAMPLE = REPOSITORY / "examples" / "hf_to_jax.py"


def run(*arguments, devices=1):
    kept = {k: v for k, v in os.environ.items() if k != "JAX_NUMPY_DTYPE_PROMOTION"}
    more = {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            program_path("without_modules.py"),
            "torch,transformers",
            str(EXAMPLE),
            *map(str, arguments),
        ],
        env=kept | more,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.split()]


def test_it_makes_a_checkpoint_and_runs_without_torch():
    tokens = run()
    assert tokens[:3] == [1, 2, 3]
    assert len(tokens) == 11


@pytest.mark.parametrize(
    ("example", "missing"),
    [
        ("quickstart", "safetensors"),
        ("tiny_llama", "safetensors"),
        ("train_and_resume", "flax"),
        ("train_and_resume", "optax"),
    ],
)
def test_examples_say_what_they_need(example, missing):
    done = subprocess.run(
        [
            sys.executable,
            program_path("without_modules.py"),
            missing,
            EXAMPLE.with_name(f"{example}.py"),
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(missing)
    assert " is missing: pip install " in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_under_forty_lines_of_code():
    source = EXAMPLE.read_text()
    documented = (ast.Module, ast.FunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    code = [text for number, text in lines if number not in docstrings and text.strip()]
    assert len([text for text in code if not text.lstrip().startswith("#")]) < 40


def as_published(config):
    """As the hub's files have it: the base at the top, and what stretches it beside."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None


def as_first_published(config):
    """As transformers wrote it before 4.43: `type`, and nothing that is a default."""
    as_published(config)
    if config["rope_scaling"]:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    else:
        del config["rope_theta"], config["rope_scaling"]


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({}, None),
        ({"hidden_act": "swish", "sliding_window": 2}, None),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 2}, "sliding_window: 2, less than the 3"),
        ({"model_type": "mistral", "sliding_window": 3}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 2}, "sliding_window: 2, less than the 3"),
    ],
)
def test_its_model_refuses_by_name_what_it_has_not(config, refused):
    if refused is None:
        llama_jax.check(config, 3)
        return
    with pytest.raises(NotImplementedError, match=refused):
        llama_jax.logits({}, np.array([[1, 2, 3]]), config)


def test_its_model_has_the_default_of_transformers():
    x = np.array([1e-4, 1e-3], np.float32)
    expected = llama_jax.norm(x, 1, {"rms_norm_eps": 1e-6})
    np.testing.assert_array_equal(llama_jax.norm(x, 1, {}), expected)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3", None),
        pytest.param("qwen3", as_published, marks=pytest.mark.soak),
        pytest.param("llama3", as_published, marks=pytest.mark.soak),
        ("llama3", as_first_published),
    ],
)
def test_its_tokens_are_those_of_transformers(tmp_path, name, written):
    """Sharded over eight devices, float32, against torch."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from family_models import make

    _, config, _, model = make(name, tmp_path, dtype="float32")
    file = tmp_path / "config.json"
    assert json.loads(file.read_text()) == config
    if written is not None:
        written(config)
        file.write_text(json.dumps(config))
    expected = [5, 17, 60]
    with torch.no_grad():
        for _ in range(8):
            logits = model(torch.tensor([expected])).logits[0, -1].numpy()
            best, second = np.sort(logits)[[-1, -2]]
            assert best - second > 1e-3, "a tie would be settled by rounding"
            expected.append(int(logits.argmax()))
    assert run(tmp_path, 5, 17, 60, devices=8) == expected
