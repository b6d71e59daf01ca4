"""What stands beside the package for those who change, release, cite or report."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import orbax_safetensors_layout as osl

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = set(re.findall(r'"\$python" (\.ci/do\.py [\w-]+)', (ROOT / ".ci/run").read_text()))
RELEASE = ".ci/do.py release"  # not a part of .ci/run: it runs the tests once more
PYTHONS = {text.rpartition(" :: ")[2] for text in PROJECT["classifiers"] if ":: 3." in text}


def test_one_version_and_one_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == osl.__version__
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("path", [*(ROOT / ".github").rglob("*.yml")], ids=lambda path: path.name)
def test_github_reads_them(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_workflows_run_what_changes_must_pass():
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    steps = [step.get("run", "") for job in tests.values() for step in job["steps"]]
    asked = tests["test"]["strategy"]["matrix"]["command"]
    run = {
        line.removeprefix("python3 ").replace("${{ matrix.command }}", command)
        for line in steps
        for command in asked
        if line
    }
    assert run == COMMANDS
    assert set(tests["test"]["strategy"]["matrix"]["python"]) == PYTHONS


def test_a_version_is_tried_as_users_get_it_before_it_is_published():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [(name, job.get("needs")) for name, job in jobs.items()] == [
        ("tag", None),
        ("build", "tag"),
        ("publish", "build"),
    ]
    steps = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert steps == [f"python3 {RELEASE}"]
    assert set(jobs["build"]["strategy"]["matrix"]["python"]) == PYTHONS


def test_the_sdist_has_all_that_tests_read():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    asked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = {file.partition("/")[0] for file in asked.stdout.split("\n") if file}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = {path.removeprefix("/") for path in build["targets"]["sdist"]["include"]}
    always = {".gitignore", "LICENSE", "README.md", "pyproject.toml"}  # by hatchling
    assert tracked == included | always


def test_commands_and_links_of_contributors():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {f".ci/do.py {name}" for name in ("lint", "test", "test-oldest")} <= COMMANDS
    assert set(re.findall(r"\.ci/do\.py [\w-]+", text)) <= {*COMMANDS, RELEASE}
    for page in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        body = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)]+)\)|`(tests/[\w/.]+)`", body):
            file = target[0] or target[1]
            assert "://" in file or (ROOT / file).exists(), file
