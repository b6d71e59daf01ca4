#!/usr/bin/env python3
"""Compares ways to load safetensors checkpoints into arrays sharded over eight CPU devices.

    python benchmarks/load.py --json load.json > load.md    everything; an hour, 12 GB of disk
    python benchmarks/load.py --quick                       the same with small sizes, once each
    python benchmarks/load.py --only llama:dim1 --only small --contenders ours,builtin

Every timed run is a process of its own. The contenders of a row take turns; the page cache is read
through (warm) or emptied (cold) before each run, and more memory than any of them needs is
touched and freed just before the clock starts. The rows "first" are what a new program sees: its
files are in the page cache, but no memory was touched and nothing was loaded before. What is timed
begins with all modules imported, the devices and the contender's code warm, and the tree of
`jax.ShapeDtypeStruct` made; it ends when every array is ready. Afterwards the arrays are compared
with the files, shard by shard.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import harness
from cases import CASES, data_files
from child import Job
from results import Cell, Row
from tables import render

CONTENDERS = ("ours", "ours-mmap", "builtin", "load_file", "idiom", "ocdbt", "odirect")
DEVICES = 8
_READ_BUDGET_BYTES = 2 << 30


def default_rows() -> Iterator[Row]:
    """The rows of a full run."""
    for case in ("llama", "mini", "moe", "small", "tiny", "aligned"):
        for split in ("replicated", "dim0", "dim1", "2d"):
            if (case != "mini" or split == "replicated") and (case, split) != ("tiny", "2d"):
                yield Row(case, split, "warm")
        if case in ("llama", "aligned"):
            yield Row(case, "dim0", "cold")
    for split in ("replicated", "dim0", "2d"):
        yield Row("llama", split, "first")


def default_contenders(row: Row) -> Iterator[str]:
    """Who takes part in a row: an O_DIRECT read only means something against cold loads."""
    if row.page_state == "first":
        yield from ("ours", "load_file", "idiom")
        return
    for who in CONTENDERS:
        wanted = {
            "ours-mmap": row.case in ("llama", "aligned"),
            "idiom": row.case == "llama",
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


@dataclasses.dataclass(slots=True, kw_only=True)
class Bench(harness.Bench):
    """Runs rows; `keep` leaves the Orbax checkpoints for the next time."""

    keep: bool

    def run(self, row: Row, whos: Sequence[str]) -> dict[str, Cell]:
        """All runs of a row, contenders taking turns."""
        source, warmup = harness.prepare(self.folder, row.case, self.scale)
        job = Job(
            contender="",
            split=row.split,
            page_state=row.page_state,
            folder=str(source),
            ocdbt=f"{source}-ocdbt-{row.split}",
            warmup=str(warmup),
            warmup_ocdbt=f"{warmup}-ocdbt-{row.split}",
            touch_bytes=0,
            verify="all" if self.verify else "some",
        )
        cells = {who: Cell() for who in whos}
        tensor_bytes = sum(tensor.nbytes for tensor in CASES[row.case].tensors(self.scale))
        needs = {who: first_guess_bytes(who, row, tensor_bytes) for who in whos}
        for who, cell in cells.items():
            cell.problem = harness.too_large(needs[who], source)
        if "ocdbt" in cells and not cells["ocdbt"].problem:
            _, cells["ocdbt"].problem = harness.run_child(
                "child.py",
                dataclasses.replace(job, task="save-ocdbt"),
                timeout_seconds=self.timeout_seconds,
            )
        harness.take_turns(
            cells, self.repeat, lambda who: self._one(row, who, job, cells[who], needs)
        )
        if not self.keep:
            shutil.rmtree(job.ocdbt, ignore_errors=True)
        return cells

    def _one(self, row: Row, who: str, job: Job, cell: Cell, needs: dict[str, int]) -> None:
        """One run of one contender; `needs` learns how much memory it took."""
        touch = 0 if row.page_state == "first" else harness.touch_bytes(needs.values())
        job = dataclasses.replace(job, contender=who, touch_bytes=touch)
        result = self.run_once("child.py", job, row, cell)
        if result is None:
            return
        result["files"] = len(data_files(Path(job.folder)))
        grown = result["peak_bytes"] - result["baseline_bytes"]
        needs[who] = max(64 << 20, int(1.05 * grown))
        print(
            f"{row} {who}: {result['wall_seconds']:.3f} s, {grown / 1e6:,.0f} MB,"
            f" pages {result['page_state']} ({result['resident_fraction']:.0%} in the cache)",
            file=sys.stderr,
        )


def main() -> None:
    """Runs what the command line asks for and prints the report."""
    parser = harness.parser(__doc__, CONTENDERS, "CASE[:SHARDING[:PAGES]]")
    parser.add_argument("--keep", action="store_true", help="keep the OCDBT checkpoints too")
    options = harness.parse(parser, CONTENDERS)
    bench = Bench.of(options, keep=options.keep)
    harness.measure(
        options,
        list(default_rows()),
        lambda row: bench.run(row, options.contenders or list(default_contenders(row))),
        render,
    )


if __name__ == "__main__":
    main()
