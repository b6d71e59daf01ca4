"""The example that runs a JAX model on a Hugging Face folder, run as users run it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parent.parent
EXAMPLE = REPOSITORY / "examples" / "hf_to_jax.py"

# As where neither is installed.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = sys.modules["transformers"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments, devices=1):
    kept = {k: v for k, v in os.environ.items() if k != "JAX_NUMPY_DTYPE_PROMOTION"}
    more = {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(EXAMPLE), *map(str, arguments)],
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


def test_its_tokens_are_those_of_transformers(tmp_path):
    """Sharded over eight devices, float32, against torch."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from family_models import make

    _, config, _, model = make("qwen3", tmp_path, dtype="float32")
    assert json.loads((tmp_path / "config.json").read_text()) == config
    expected = [5, 17, 60]
    with torch.no_grad():
        for _ in range(8):
            logits = model(torch.tensor([expected])).logits[0, -1].numpy()
            best, second = np.sort(logits)[[-1, -2]]
            assert best - second > 1e-3, "a tie would be settled by rounding"
            expected.append(int(logits.argmax()))
    assert run(tmp_path, 5, 17, 60, devices=8) == expected
