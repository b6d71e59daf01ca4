#!/usr/bin/env python3
"""Compares this checkout with another one, an older commit: whether anything became slower.

    git worktree add ../older OLD_COMMIT
    python benchmarks/commits.py ../older --rounds 9      half an hour; 6 GB of disk

The two take turns, each run in a process of its own, by the benchmarks of this checkout: loads and
saves, plain and through mappings, plans and conversions. For each it prints the medians of wall and
CPU seconds and their ratios, new / old; above 1.05 is marked. The machine should be quiet: one run
in five may take twice as long, so compare the least ones, too.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import environment

HERE = Path(__file__).resolve().parent
MOST = 1.05
LOADS = [f"llama:{split}:warm" for split in ("dim0", "2d", "replicated")]
RUNS = (
    ("load.py", "ours", (*LOADS, "moe:dim0:warm", "small:dim0:warm")),
    ("mapping.py", "mapped,mapped-save", ("llama:fsdp", "experts:fsdp")),
    ("save.py", "ours,ours-sharded", ("llama:dim0:loaded", "small:dim0:loaded")),
)
IMPORTS = {
    "import": "import orbax_safetensors_layout as osl; osl.load; osl.save",
    "command line": "from orbax_safetensors_layout.cli import main; main(['--help'])",
}
Seconds = tuple[float, float]
"""Wall and CPU."""


def run(checkout: Path, *command: str) -> tuple[str, Seconds]:
    """The output of this Python on a command with the package of a checkout, and what it took."""
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(checkout),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    # Benchmarks end with 1 where a promise of theirs fails, as with these sizes some do.
    if done.returncode not in (0, 1):
        raise SystemExit(f"{checkout}: {command} ended with {done.returncode}")
    return done.stdout, (time.perf_counter() - began, cpu)


def measure(checkout: Path, folder: Path) -> Iterator[tuple[str, Seconds]]:
    """One run of everything that takes turns."""
    for program, contenders, rows in RUNS:
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            only = [word for row in rows for word in ("--only", row)]
            fixed = ("--dir", str(folder), "--scale", "0.5", "--repeat", "1", "--json", report.name)
            run(checkout, str(HERE / program), *fixed, "--contenders", contenders, *only)
            data = json.loads(Path(report.name).read_text())
        for row in data["rows"]:
            keys = ("case", "split", "page_state", "arrays")
            name = ":".join(row[key] for key in keys if row.get(key))
            for who, cell in row["cells"].items():
                for timed in cell["runs"]:
                    yield f"{name} {who}", (timed["wall_seconds"], timed["cpu_seconds"])
    for name, code in IMPORTS.items():
        yield name, run(checkout, "-c", code)[1]


def measure_long(checkout: Path, folder: Path) -> Iterator[tuple[str, Seconds]]:
    """One run of what takes a minute."""
    # Older commits know no other choice.
    fixed = ("--dir", str(folder), "--repeat", "1", "--replicated", "each")
    yield "plan (all of plan.py)", run(checkout, str(HERE / "plan.py"), *fixed)[1]
    target = folder / "converted"
    target.mkdir(exist_ok=True)
    command = (str(HERE / "convert.py"), str(target), "--gigabytes", "2", "--every", "8")
    output, (_, cpu) = run(checkout, *command)
    for name, seconds in re.findall(r"^(.+?): ([\d.]+) s,", output, re.MULTILINE):
        yield f"convert {name}", (float(seconds), cpu)


def main() -> None:
    """Prints a table of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("older", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "osl-commits")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    checkouts = {"old": options.older.resolve(), "new": HERE.parent}
    times: dict[str, dict[str, list[Seconds]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for number in range(options.rounds):
        for side, checkout in checkouts.items():
            for name, seconds in measure(checkout, options.dir):
                times[name][side].append(seconds)
            if number < 3:
                for name, seconds in measure_long(checkout, options.dir):
                    times[name][side].append(seconds)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(
        "| | old s | new s | wall | least wall | CPU | least CPU |\n|---|---|---|---|---|---|---|"
    )
    for name, sides in times.items():
        cells = []
        for column in range(2):
            old, new = ([pair[column] for pair in sides[side]] for side in checkouts)
            if not column:
                cells += [f"{statistics.median(old):.3f}", f"{statistics.median(new):.3f}"]
            for figure in (statistics.median, min):
                ratio = figure(new) / max(figure(old), 1e-9)
                cells.append(f"{ratio:.2f}" if ratio <= MOST else f"**{ratio:.2f}**")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
