"""The README's Python runs as it stands, in order, as a reader would run it."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import llama_like, save

import orbax_safetensors_layout as osl

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def script() -> str:
    """The Python blocks alone, each line at its number in the README, so that tracebacks fit."""
    lines, language = [], None
    for line in README.splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```") if language is None else None
            lines.append("")
        else:
            lines.append(line if language == "python" else "")
    assert language is None, "a block is not closed"
    return "\n".join(lines)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("readme")
    save(folder / "llama", llama_like(hidden=512), files=3)
    (folder / "README.py").write_text(script(), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error", "README.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_python_blocks_run(result):
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr


def test_what_they_print(result):
    total = sum(tensor.nbytes for tensor in llama_like(hidden=512).values())
    assert re.search(r"^model\.norm\.weight +\[512\] +BF16 +1,024 +1,024$", result.stdout, re.M)
    assert f"{total:,} bytes" in result.stdout.splitlines()
    assert "Tensor 'model.nrom.weight' not found" in result.stdout
    assert "100%" in result.stderr


def test_names_of_the_package_exist():
    names = set(re.findall(r"\bosl\.(\w+)", README))
    assert names <= set(osl.__all__)
    assert {"load", "install", "context", "handler_registry", "plan_load", "using"} <= names
    errors = set(re.findall(r"`(\w+Error)`", README)) - set(dir(builtins))
    assert errors <= set(osl.__all__)


def test_every_public_name_that_a_user_calls_is_in_the_readme():
    unnamed = {name for name in osl.__all__ if not name.startswith("_") and name not in README}
    # Classes that the user is given, or Orbax makes, and does not spell out.
    assert unnamed <= {"TensorMetadata", "ReadPlan", "Cost", "SafetensorsHandler", "Expr"}


def test_commands_are_those_of_the_continuous_integration():
    commands = re.findall(r"python3 (\.ci/do\.py [\w-]+)", README)
    run = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert commands
    assert all(f'"$python" {command}' in run for command in commands)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            headings = re.findall(r"^#+ (.+)$", README, re.M)
            assert target[1:] in {heading.lower().replace(" ", "-") for heading in headings}
        elif "://" not in target:
            assert (REPOSITORY / target).exists(), target
