"""The benchmarks measure what they say; the one of accelerators runs on CPU devices here."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import program_path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "accelerator.py"
ROWS = ["plain:dim1:cold", "transposed:fsdp:warm", "plain:dim0:save", "transposed:fsdp:save"]


def run(*arguments):
    command = [sys.executable, str(SCRIPT), "--platform", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory and page cache are asked of Linux")
def test_accelerator_check(tmp_path):
    """Every contender runs and is verified; the table comes from the saved figures, too."""
    figures = tmp_path / "accelerator.json"
    done = run("--check", "--dir", tmp_path, "--json", figures)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [f"{row['way']}:{row['split']}:{row['task']}" for row in rows] == ROWS
    contenders = [[*row["cells"]] for row in rows]
    assert contenders == [
        ["device_put", "ours", "unregistered", "load_file", "builtin", "ocdbt"],
        ["device_put", "ours", "unregistered", "load_file"],
        ["device_get", "ours", "ocdbt"],
        ["device_get", "ours"],
    ]
    assert "Devices: 8 x cpu (cpu)" in done.stdout
    assert "no figure of an accelerator" in done.stdout
    bars = [line for line in done.stdout.splitlines() if "at least 0." in line]
    assert "PASS" not in done.stdout
    assert "FAIL" not in done.stdout
    assert len(bars) == 3  # none for what is not in the page cache
    assert run("--render", figures).stdout == done.stdout


def test_an_unknown_contender_is_refused(tmp_path):
    done = run("--dir", tmp_path, "--contenders", "ours,theirs")
    assert done.returncode == 1
    assert "--contenders must be of device_put,ours," in done.stderr


@pytest.mark.parametrize(
    ("program", "contender", "row"),
    [
        ("load.py", "ours", "llama:dim0:warm"),
        ("save.py", "ours", "llama:dim0:loaded"),
        ("mapping.py", "mapped", "llama:fsdp"),
        ("plan.py", "", ""),
    ],
)
def test_a_comparison_of_commits_measures_the_package_of_each(program, contender, row, tmp_path):
    """Also in the child processes, where a package stands that ends them."""
    package = tmp_path / "older" / "orbax_safetensors_layout"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the older one')")
    only = ["--scale", "0.01", "--contenders", contender, "--only", row] if row else []
    arguments = ["--repeat", "1", "--dir", tmp_path, *only]
    command = [program_path("compare_commits.py"), BENCHMARKS / program, package.parent, *arguments]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "the older one" in done.stdout + done.stderr


def test_one_round_of_exchanges_makes_a_table(monkeypatch, capsys):
    """A single figure is its own quartile, of unknown error."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    exchange = importlib.import_module("exchange")
    figures = {"each": [2.0], "each bytes": [3e6], "auto": [1.0], "auto bytes": [1e6]}
    monkeypatch.setattr(exchange, "measure", lambda options: iter([("far:tiny:2", figures)]))
    arguments = ["--repeat", "1", "--only", "far", "--choices", "each", "auto"]
    monkeypatch.setattr(sys, "argv", ["exchange.py", *arguments])
    with pytest.raises(SystemExit, match="0"):
        exchange.main()
    assert "| far:tiny:2 | 2.000 (3) | 1.000 (1) | 0.500 ± inf |" in capsys.readouterr().out


def test_lines_for_frameworks(monkeypatch):
    """The page's lines are read, and put below an import; a line that is not there is refused."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    frameworks = importlib.import_module("frameworks")
    lines = frameworks.lines_of(frameworks.PAGE.read_text(encoding="utf-8"))
    packages = {package for _, _, packages, _ in frameworks.RUNS.values() for package in packages}
    assert {file.split("/")[0] for file in lines} == packages
    source = (
        '"""It."""\nfrom __future__ import annotations\nimport ocp\nmade = ocp.Context(\n    1\n)\n'
    )
    changed = frameworks.with_lines(source, lines["keras/src/callbacks/orbax_checkpoint.py"])
    *_, imports, ocp, made = changed.splitlines()
    assert imports.startswith("import orbax_safetensors_layout as osl")
    assert (ocp, made) == ("import ocp", 'made = osl.context("pytree")')
    with pytest.raises(SystemExit, match=r"ocp\.Context"):
        frameworks.with_lines("import ocp\n", {"ocp.Context(...)": "osl.context('pytree')"})
