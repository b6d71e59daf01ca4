"""The notebook runs as it stands, and prints the shapes, names and vectors that stand in it."""

import json
import os
import re
import subprocess
import sys

from libraries import need
from programs import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "walkthrough.ipynb"


def test_the_notebook_runs_and_prints_what_it_shows(tmp_path):
    need("torch")
    need("transformers")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in cells))
    usual = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    run = subprocess.run(
        [sys.executable, "-W", "error", "cells.py"],
        cwd=tmp_path,
        env=usual | {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shown = [
        line
        for cell in cells
        for output in cell["outputs"]
        if output.get("name") == "stdout"
        for line in "".join(output["text"]).splitlines()
    ]
    printed = re.sub(r"/\S+/(?=all-MiniLM)", "", run.stdout).splitlines()
    machine = re.compile("largest difference|^storage|time|less|costs|^ *F32")
    assert [line for line in shown if not machine.search(line)] == [
        line for line in printed if not machine.search(line)
    ]
    pictures = [o for cell in cells for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
