"""The Python of the README and of `docs/` runs as it stands, in order, as a reader would run it."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from documents import PAGES, README, TENSORS, TEXTS, blocks, save_llama
from programs import REPOSITORY

import orbax_safetensors_layout as osl

EVERYTHING = "\n".join(TEXTS.values())


def script(text: str) -> str:
    """The Python blocks alone, each line at its number in the page, so that tracebacks fit."""
    lines = [""] * (text.count("\n") + 1)
    for block in blocks(text):
        if block.language == "python":
            inside = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(inside)] = inside
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def result(folder) -> subprocess.CompletedProcess[str]:
    """One program: the README's code, and after it that of each page."""
    save_llama(folder / "llama")
    for page, text in TEXTS.items():
        (folder / f"{page.stem}.py").write_text(script(text), encoding="utf-8")
    return run_pages(folder, PAGES)


@pytest.fixture(scope="module")
def second(result, folder) -> subprocess.CompletedProcess[str]:
    """The README's program once more, where the first one has left its folders."""
    return run_pages(folder, (README,), "assert 'step' not in globals()")  # of the loop's body


def run_pages(
    folder: Path, pages: Sequence[Path], after: str = ""
) -> subprocess.CompletedProcess[str]:
    """The code of pages as one program."""
    files = [f"{page.stem}.py" for page in pages]
    program = f"for file in {files}: exec(compile(open(file).read(), file, 'exec'))\n{after}"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
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
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert re.search(r"^model\.norm\.weight +\[512\] +BF16 +1,024 +1,024$", result.stdout, re.M)
    assert f"{total:,} bytes" in result.stdout.splitlines()
    assert "Tensor 'model.nrom.weight' not found" in result.stdout
    assert "100%" in result.stderr


def test_the_readme_goes_from_hugging_face_to_a_run_and_back(result, folder):
    assert sorted(step.name for step in (folder / "run").iterdir()) == ["10", "5"]
    exported = osl.load(folder / "trained")
    assert exported.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():  # but for the payloads of NaN, by way of float32
        assert exported[name].dtype == tensor.dtype
        np.testing.assert_array_equal(exported[name].astype("f4"), tensor.astype("f4"), name)


def test_the_readme_runs_again_and_goes_on_with_its_run(second, folder):
    assert second.returncode == 0, second.stderr
    test_the_readme_goes_from_hugging_face_to_a_run_and_back(second, folder)


def test_a_run_of_nnx_goes_there_and_back(result, folder):
    assert (folder / "nnx" / "2" / "default" / "model.safetensors").exists()
    weights = [osl.load(folder / name) for name in ("nnx-1", "nnx-2")]
    assert weights[0].keys() == weights[1].keys() == {"layers.0.weight", "layers.0.bias"}
    for name, weight in weights[0].items():
        np.testing.assert_array_equal(weight, weights[1][name])


def test_names_of_the_package_exist():
    names = set(re.findall(r"\bosl\.(\w+)", EVERYTHING))
    assert names <= set(osl.__all__)
    readme = set(re.findall(r"\bosl\.(\w+)", TEXTS[README]))
    assert {"load", "install", "context", "handler_registry", "plan_load", "using"} <= readme
    errors = set(re.findall(r"`(\w+Error)`", EVERYTHING)) - set(dir(builtins))
    assert errors <= set(osl.__all__)


def test_every_public_name_that_a_user_calls_is_documented():
    unnamed = {name for name in osl.__all__ if not name.startswith("_") and name not in EVERYTHING}
    # Classes that the user is given, or Orbax makes, and does not spell out.
    assert unnamed <= {"TensorMetadata", "ReadPlan", "Cost", "SafetensorsHandler", "Expr"}


def test_commands_are_those_of_the_continuous_integration():
    commands = re.findall(r"python3 (\.ci/do\.py [\w-]+)", TEXTS[README])
    run = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert commands
    assert all(f'"$python" {command}' in run for command in commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if heading:
            assert heading in headings(TEXTS[linked]), target


def headings(text: str) -> set[str]:
    """Headings as links name them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[^)#]+)", TEXTS[README]))
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked
