"""What the comparisons have in common: the command line, the children, and whose turn it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import machine
import pages
from cases import CASES, WARMUP, data_files, folder_name, make
from results import Cell, Cells, Report

BENCHMARKS = Path(__file__).resolve().parent
_SLOW_SECONDS = 20.0
_VERY_SLOW_SECONDS = 60.0


def parser(description: str | None, contenders: Sequence[str], row: str) -> argparse.ArgumentParser:
    """The options that all comparisons know; `row` says what a row's name consists of."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--dir", type=Path, help="where checkpoints are made, and kept")
    found.add_argument("--only", action="append", default=[], metavar=row)
    found.add_argument("--contenders", help=f"of {','.join(contenders)}")
    found.add_argument("--repeat", type=int, default=5)
    found.add_argument("--scale", type=float, default=1.0, help="of the checkpoints' bytes")
    found.add_argument("--quick", action="store_true", help="--scale 0.02 --repeat 1")
    found.add_argument("--verify", action="store_true", help="compare all tensors, not some")
    found.add_argument("--timeout", type=float, default=600.0, help="seconds of one child")
    found.add_argument("--json", type=Path, help="save the figures here, after each row")
    found.add_argument("--render", type=Path, metavar="JSON", help="show saved figures, run none")
    return found


def parse(parser: argparse.ArgumentParser, contenders: Sequence[str]) -> argparse.Namespace:
    """The command line; `contenders` becomes a list, or None where none are named.

    Raises:
        SystemExit: A contender is unknown.
    """
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeat = 0.02, 1
    options.dir = options.dir or Path(tempfile.gettempdir()) / "osl-benchmark"
    options.contenders = options.contenders.split(",") if options.contenders else None
    if options.contenders and not set(options.contenders) <= set(contenders):
        raise SystemExit(f"--contenders must be of {','.join(contenders)}")
    return options


def measure(
    options: argparse.Namespace,
    rows: Sequence[Any],
    run: Callable[[Any], Cells],
    render: Callable[[Report], str],
) -> None:
    """Runs the rows, or reads them for `--render`, and prints the report."""
    if options.render:
        print(render(Report.read(options.render, type(rows[0]))))
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    report = Report(machine.describe(options.dir), options.scale)
    began = time.monotonic()
    for row in selected(rows, options.only):
        report.rows[row] = run(row)
        if options.json:
            report.write(options.json)
    print(render(report))
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)


def selected(rows: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """The rows that patterns of a row's leading parts name; also such as no full run has.

    Raises:
        SystemExit: A pattern names nothing.
    """
    if not only:
        return list(rows)
    chosen: dict[Any, None] = {}
    for pattern in only:
        parts = pattern.split(":")
        found = [row for row in rows if list(row[: len(parts)]) == parts]
        if not found and len(parts) == 3 and parts[0] in CASES:
            found = [type(rows[0])(*parts)]
        if not found:
            raise SystemExit(f"--only {pattern} names none of: {', '.join(map(str, rows))}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def prepare(folder: Path, case: str, scale: float) -> tuple[Path, Path]:
    """Makes a case's checkpoint and the one to warm up on, unless they stand; where they are."""
    source, warmup = folder / folder_name(case, scale), folder / "warmup"
    make(WARMUP, warmup, scale=1.0)
    make(CASES[case], source, scale=scale)
    return source, warmup


def take_turns(cells: Cells, repeat: int, one: Callable[[str], None]) -> None:
    """Calls `one` for each contender `repeat` times, or less often for what takes long."""
    whos = list(cells)
    for turn in range(repeat):
        # Each turn begins with another contender, so that none always follows the same one.
        for who in (*whos[turn % len(whos) :], *whos[: turn % len(whos)]):
            if not cells[who].problem and turn < _turns(cells[who].runs, repeat):
                one(who)


def _turns(runs: Sequence[Mapping[str, Any]], repeat: int) -> int:
    """Fewer runs of what takes long."""
    slowest = max((run["wall_seconds"] for run in runs), default=0.0)
    if slowest > _VERY_SLOW_SECONDS:
        return 1
    return min(repeat, 3) if slowest > _SLOW_SECONDS else repeat


@dataclasses.dataclass(slots=True, kw_only=True)
class Bench:
    """The settings of a comparison that runs rows.

    Attributes:
        folder: Where the checkpoints are made and kept, and saved to.
        scale: Of the cases' sizes.
        repeat: Runs of each contender.
        timeout_seconds: Of one child.
        verify: Compare all tensors after each run.
    """

    folder: Path
    scale: float
    repeat: int
    timeout_seconds: float
    verify: bool

    @classmethod
    def of(cls, options: argparse.Namespace, **more: Any) -> Self:
        """Return what the command line asks for, and `more` fields."""
        return cls(
            folder=options.dir,
            scale=options.scale,
            repeat=options.repeat,
            timeout_seconds=options.timeout,
            verify=options.verify,
            **more,
        )

    def run_once(self, script: str, job: Any, row: Any, cell: Cell) -> dict[str, Any] | None:
        """Runs a job's contender for a row; returns the result, which its cell keeps, if any."""
        result, cell.problem = run_child(script, job, timeout_seconds=self.timeout_seconds)
        if result is None:
            print(f"{row} {job.contender}: {cell.problem}", file=sys.stderr)
        else:
            cell.runs.append(result)
        return result


def environment(checkout: Path | None = None) -> dict[str, str]:
    """That of a child: with the package of a checkout.

    By default that of the caller's PYTHONPATH, which `commits.py` sets, else of this checkout.
    """
    paths = [str(BENCHMARKS.parent)]
    if checkout is not None:
        paths = [str(checkout)]
    elif given := os.environ.get("PYTHONPATH"):
        paths = [given, *paths]
    values = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    values.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    return values


def run_child(
    script: str, job: Any, *, timeout_seconds: float
) -> tuple[dict[str, Any] | None, str]:
    """The result of a job in a process of its own, or what went wrong.

    Args:
        script: The child, a file beside this one.
        job: A dataclass, passed as JSON.
        timeout_seconds: When to give up.
    """
    command = [sys.executable, str(BENCHMARKS / script), json.dumps(dataclasses.asdict(job))]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"longer than {timeout_seconds:g} s"
    if done.returncode < 0:
        return None, f"killed by signal {-done.returncode}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["failed without a word"]
        return None, lines[-1][:160].replace("|", "/")
    return json.loads(done.stdout.splitlines()[-1]), ""


def too_large(need: int, folder: Path) -> str:
    """Why a contender has to stay out: the files must stay in the page cache beside it."""
    files = sum(path.stat().st_size for path in data_files(folder))
    if need + files <= 0.92 * pages.available_bytes():
        return ""
    return f"left out: needs {need / 1e9:.1f} GB of memory"


def touch_bytes(needs: Iterable[float]) -> int:
    """How much memory is touched and freed before each run of contenders that take turns.

    The same for all, and twice what the hungriest needs: the kernel need not hand out again the
    very pages that were touched. No more than is free, or files would leave the page cache.

    Args:
        needs: What each contender takes, in bytes.
    """
    return int(min(2 * max(needs), 0.9 * pages.free_bytes()))
