#!/usr/bin/env python3
"""Compares ways to load safetensors checkpoints into arrays sharded over eight CPU devices.

    python benchmarks/load.py --json load.json > load.md    everything; an hour, 12 GB of disk
    python benchmarks/load.py --quick                       the same with small sizes, once each
    python benchmarks/load.py --only llama:dim1 --only small --contenders ours,builtin

Every timed run is a process of its own. The contenders of a row take turns; the page cache is read
through (warm) or emptied (cold) before each run, and the memory a run will need is touched and
freed just before the clock starts. What is timed begins with all modules imported, the devices and
the contender's code warm, and the tree of `jax.ShapeDtypeStruct` made; it ends when every array is
ready. Afterwards the arrays are compared with the files, shard by shard.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine
import pages
from cases import CASES, WARMUP, data_files, folder_name, make
from child import Job
from results import Cell, Report, Row
from tables import render

BENCHMARKS = Path(__file__).resolve().parent
CONTENDERS = ("ours", "ours-mmap", "builtin", "load_file", "ocdbt", "odirect")
DEVICES = 8
_SLOW_SECONDS = 20.0
_VERY_SLOW_SECONDS = 60.0
_READ_BUDGET_BYTES = 2 << 30


def default_rows() -> Iterator[Row]:
    """The rows of a full run."""
    for case in ("llama", "mini", "moe", "small", "tiny", "aligned"):
        for split in ("replicated", "dim0", "dim1", "2d"):
            if (case != "mini" or split == "replicated") and (case, split) != ("tiny", "2d"):
                yield Row(case, split, "warm")
        if case in ("llama", "aligned"):
            yield Row(case, "dim0", "cold")


def default_contenders(row: Row) -> Iterator[str]:
    """Who takes part in a row: an O_DIRECT read only means something against cold loads."""
    for who in CONTENDERS:
        wanted = {
            "ours-mmap": row.case in ("llama", "aligned"),
            "ocdbt": row.case != "aligned",
            "odirect": row.page_state == "cold",
        }
        if wanted.get(who, True):
            yield who


def first_guess_bytes(who: str, row: Row, tensor_bytes: int) -> int:
    """Memory that a contender's first run will need; later runs go by the measured need."""
    copies = DEVICES if row.split == "replicated" else 1
    match who:
        case "odirect":
            return 64 << 20
        case "ours" | "ours-mmap":
            return int(1.05 * tensor_bytes)
        case "builtin":
            return copies * tensor_bytes + min(_READ_BUDGET_BYTES, 2 * tensor_bytes)
        case _:
            return (copies + 1) * tensor_bytes


@dataclasses.dataclass(slots=True)
class Bench:
    """Runs rows.

    Attributes:
        folder: Where the checkpoints are made and kept.
        scale: Of the cases' sizes.
        repeat: Runs of each contender.
        timeout_seconds: Of one child.
        verify: "some" or "all".
        keep: Leave the Orbax checkpoints for the next time.
    """

    folder: Path
    scale: float
    repeat: int
    timeout_seconds: float
    verify: str
    keep: bool

    def run(self, row: Row, whos: Sequence[str]) -> dict[str, Cell]:
        """All runs of a row, contenders taking turns."""
        warmup = self.folder / "warmup"
        source = self.folder / folder_name(row.case, self.scale)
        make(WARMUP, warmup, scale=1.0)
        make(CASES[row.case], source, scale=self.scale)
        job = Job(
            contender="",
            split=row.split,
            page_state=row.page_state,
            folder=str(source),
            ocdbt=f"{source}-ocdbt-{row.split}",
            warmup=str(warmup),
            warmup_ocdbt=f"{warmup}-ocdbt-{row.split}",
            touch_bytes=0,
            verify=self.verify,
        )
        cells = {who: Cell() for who in whos}
        tensor_bytes = sum(tensor.nbytes for tensor in CASES[row.case].tensors(self.scale))
        needs = {who: first_guess_bytes(who, row, tensor_bytes) for who in whos}
        for who, cell in cells.items():
            cell.problem = _too_large(needs[who], source)
        if "ocdbt" in cells and not cells["ocdbt"].problem:
            _, cells["ocdbt"].problem = self._child(dataclasses.replace(job, task="save-ocdbt"))
        for turn in range(self.repeat):
            # Each turn begins with another contender, so that none always follows the same one.
            for who in (*whos[turn % len(whos) :], *whos[: turn % len(whos)]):
                if not cells[who].problem and turn < self._turns(cells[who]):
                    self._one(row, who, job, cells[who], needs)
        if not self.keep:
            shutil.rmtree(job.ocdbt, ignore_errors=True)
        return cells

    def _turns(self, cell: Cell) -> int:
        """Fewer runs of what takes long."""
        slowest = max((run["wall_seconds"] for run in cell.runs), default=0.0)
        if slowest > _VERY_SLOW_SECONDS:
            return 1
        return min(self.repeat, 3) if slowest > _SLOW_SECONDS else self.repeat

    def _one(self, row: Row, who: str, job: Job, cell: Cell, needs: dict[str, int]) -> None:
        """One run of one contender; `needs` learns how much memory it took."""
        most = int(0.8 * pages.available_bytes())
        job = dataclasses.replace(job, contender=who, touch_bytes=min(needs[who], most))
        result, cell.problem = self._child(job)
        if result is None:
            print(f"{row} {who}: {cell.problem}", file=sys.stderr)
            return
        result["files"] = len(data_files(Path(job.folder)))
        cell.runs.append(result)
        grown = result["peak_bytes"] - result["baseline_bytes"]
        needs[who] = max(64 << 20, int(1.05 * grown))
        print(
            f"{row} {who}: {result['wall_seconds']:.3f} s, {grown / 1e6:,.0f} MB,"
            f" pages {result['page_state']} ({result['resident_fraction']:.0%} in the cache)",
            file=sys.stderr,
        )

    def _child(self, job: Job) -> tuple[dict[str, Any] | None, str]:
        """A child's result, or what went wrong."""
        environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
        command = [
            sys.executable,
            str(BENCHMARKS / "child.py"),
            json.dumps(dataclasses.asdict(job)),
        ]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=self.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"longer than {self.timeout_seconds:g} s"
        if done.returncode < 0:
            return None, f"killed by signal {-done.returncode}"
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["failed without a word"]
            return None, lines[-1][:160].replace("|", "/")
        return json.loads(done.stdout.splitlines()[-1]), ""


def _too_large(need: int, folder: Path) -> str:
    """Why a contender has to stay out: the files must stay in the page cache beside it."""
    files = sum(path.stat().st_size for path in data_files(folder))
    if need + files <= 0.92 * pages.available_bytes():
        return ""
    return f"left out: needs {need / 1e9:.1f} GB of memory"


def selected(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows that `CASE[:SHARDING[:PAGES]]` patterns name; also such as no full run has.

    Raises:
        SystemExit: A pattern names nothing.
    """
    if not only:
        return list(rows)
    chosen: dict[Row, None] = {}
    for pattern in only:
        parts = pattern.split(":")
        found = [row for row in rows if list(row[: len(parts)]) == parts]
        if not found and len(parts) == 3 and parts[0] in CASES:
            found = [Row(*parts)]
        if not found:
            raise SystemExit(f"--only {pattern} names none of: {', '.join(map(str, rows))}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="where checkpoints are made, and kept")
    parser.add_argument("--only", action="append", default=[], metavar="CASE[:SHARDING[:PAGES]]")
    parser.add_argument("--contenders", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the checkpoints' bytes")
    parser.add_argument("--quick", action="store_true", help="--scale 0.02 --repeat 1")
    parser.add_argument("--verify", action="store_true", help="compare all tensors, not some")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one child")
    parser.add_argument("--keep", action="store_true", help="keep the OCDBT checkpoints too")
    parser.add_argument("--json", type=Path, help="save the figures here, after each row")
    parser.add_argument("--render", type=Path, metavar="JSON", help="show saved figures, run none")
    return parser.parse_args()


def main() -> None:
    """Runs what the command line asks for and prints the report."""
    options = parse()
    if options.render:
        print(render(Report.read(options.render)))
        return
    if options.quick:
        options.scale, options.repeat = 0.02, 1
    folder = options.dir or Path(tempfile.gettempdir()) / "osl-benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    whos = options.contenders.split(",") if options.contenders else None
    if whos and not set(whos) <= set(CONTENDERS):
        raise SystemExit(f"--contenders must be of {','.join(CONTENDERS)}")
    bench = Bench(
        folder=folder,
        scale=options.scale,
        repeat=options.repeat,
        timeout_seconds=options.timeout,
        verify="all" if options.verify else "some",
        keep=options.keep,
    )
    report = Report(machine.describe(folder), options.scale)
    began = time.monotonic()
    for row in selected(list(default_rows()), options.only):
        report.rows[row] = bench.run(row, whos or list(default_contenders(row)))
        if options.json:
            report.write(options.json)
    print(render(report))
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
