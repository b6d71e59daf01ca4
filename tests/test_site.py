"""The site: a strict build is without warnings, and a link that leads nowhere makes it fail."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCES = ("docs", "examples", "orbax_safetensors_layout", "mkdocs.yml", "README.md", "LICENSE")
SOURCES += ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")

for module in ("mkdocs", "material", "mkdocstrings"):
    pytest.importorskip(module, reason="for the extra `docs`; `.ci/do.py docs` runs this")


def command() -> list[str]:
    """The arguments of Python by which `.ci/do.py docs` builds the site."""
    tasks = runpy.run_path(str(ROOT / ".ci" / "do.py"))["TASKS"]
    (build,) = (command for command in tasks["docs"].commands if "mkdocs" in command)
    return list(build)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of what the site is made of."""
    folder = tmp_path_factory.mktemp("repository")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def build(repository: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command()],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.fixture(scope="module")
def built(repository):
    result = build(repository)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return repository / "site"


def test_examples_are_in_the_site(built):
    linked = set(
        re.findall(r'href="(?:\.\./)*(examples/[\w.]+)"', (built / "index.html").read_text())
    )
    assert {"examples/quickstart.py", "examples/walkthrough.ipynb"} <= linked
    for name in ("quickstart.py", "train_and_resume.py"):
        assert (built / "examples" / name).read_text() == (ROOT / "examples" / name).read_text()
    assert not list(built.glob("*.py"))


def test_the_reference_has_what_users_call_and_nothing_else(built):
    shown = set(
        re.findall(r'id="[\w.]+\.(\w+\.\w+)"', (built / "reference" / "index.html").read_text())
    )
    assert {"Mapping.apply", "Mapping.explain", "Expr.transpose", "ReadPlan.ranges"} <= shown
    internal = {"bind", "bind_to", "infer", "is_generic", "patterns", "stacked_over", "chain"}
    internal |= {"match", "leaf_facts", "collect", "check_size", "composed_bytes"}
    assert not {name for name in shown if name.partition(".")[2] in internal}


def test_dead_links_fail(built, repository):
    """Of pages and of headings, as MkDocs knows them, and as only the built site shows them."""
    planted = ["[1](none1.md)", "[2](load.md#none2)", "[3](../examples/none3.py)"]
    planted += ['<a href="../none4/">4</a>', '<a href="../load/#none5">5</a>']
    page = repository / "docs" / "trees.md"
    text = page.read_text()
    for links in (planted[:1], planted[3:4], planted):
        page.write_text("\n".join((text, *links, "")))
        result = build(repository)
        assert result.returncode != 0
        for link in links:
            (name,) = re.findall(r"none\d", link)
            assert re.search(rf"^WARNING.*{name}", result.stderr, re.M), result.stderr
    page.write_text(text)
