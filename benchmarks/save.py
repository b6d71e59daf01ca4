#!/usr/bin/env python3
"""Compares ways to save arrays that are sharded over eight CPU devices.

    python benchmarks/save.py --json save.json > save.md    everything; two hours, 10 GB of disk
    python benchmarks/save.py --quick                       the same with small sizes, once each
    python benchmarks/save.py --only llama:dim0 --contenders ours,flax,ocdbt
    python benchmarks/save.py --only mini:replicated:jit    arrays that a jit computed
    python benchmarks/save.py --render save.json            the report of saved figures again

    --dir DIR         where checkpoints are made and kept, and saved to; one file system
    --only ROW        CASE[:SHARDING[:ARRAYS]], repeatable. Cases: llama (2.3 GB), mini (0.6 GB),
                      small (5,000 tensors); and moe, tiny and aligned of load.py if all parts are
                      named. Shardings: replicated, dim0, dim1, 2d. Arrays: loaded, jit
    --contenders A,B  of those of save_contenders.py; "-fsync" means flushed to the disk
    --repeat N        runs of each contender, 5
    --scale X         of the checkpoints' bytes; --quick is --scale 0.02 --repeat 1
    --verify          compare all tensors after every run, not only after each one's first
    --timeout S       of one child
    --json FILE       save the figures after each row

Every timed run is a process of its own, since an array keeps the copy that a save gathered on the
host. The contenders of a row take turns. What is timed begins with all modules imported, the
contender warm and the arrays ready; the target's folder is removed, dirty pages are written back,
and the memory the run will need, for its pages in the cache too, is touched and freed. It ends when
the save returns; of an asynchronous one, when it has been waited for, and the time until the
caller got control back is told apart. Afterwards the files are compared with the arrays.

CPU is of the process, without what the kernel spends later on writing pages back. "Extra peak RSS"
is the largest resident memory above what stood before the save, arrays included. "By write calls"
counts what the calls were given, "to the disk" what they leave to be written in whole pages.

Whether JAX adopted the arrays' memory from a load or XLA made it for a jit's result ("jit") has
made no difference to the CPU time of any save that was tried.

The torch DCP writer has no part in the sharding: it is given unsharded tensors of the same bytes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence

import harness
from cases import CASES
from results import Cell, Cells, SaveRow
from save_child import Job
from save_tables import ORDER, render

DEVICES = 8
_LEAST_TOUCH_BYTES = 64 << 20
# Other free memory may be handed out first: with 1.0 one run in four took twice the CPU time.
_TOUCH_FACTOR = 1.5


def default_rows() -> Iterator[SaveRow]:
    """The rows of a full run."""
    for case in ("llama", "mini", "small"):
        for split in ("replicated", "dim0", "dim1", "2d"):
            yield SaveRow(case, split, "loaded")


def default_contenders(row: SaveRow) -> Iterator[str]:
    """Who takes part in a row: the case `mini` is short, and DCP is the same in all shardings."""
    for who in ORDER:
        if who.startswith("dcp"):
            wanted = row.case == "llama" or row.split == "dim0"
        else:
            short = who == "numpy" or who.endswith(("-async", "-sharded"))
            wanted = row.case != "mini" or not short
        if wanted:
            yield who


def first_guess_bytes(who: str, row: SaveRow, tensor_bytes: int) -> int:
    """Memory that a contender's first run will need; later runs go by the measured need."""
    if who.startswith("ours"):
        return _LEAST_TOUCH_BYTES
    if who.startswith(("flax", "numpy")):
        return _LEAST_TOUCH_BYTES if row.split == "replicated" else tensor_bytes
    return 2 * tensor_bytes


class Bench(harness.Bench):
    """Runs rows."""

    def run(self, row: SaveRow, whos: Sequence[str]) -> Cells:
        """All runs of a row, contenders taking turns."""
        source, warmup = harness.prepare(self.folder, row.case, self.scale)
        job = Job(
            contender="",
            split=row.split,
            arrays=row.arrays,
            folder=str(source),
            warmup=str(warmup),
            target=str(self.folder / "saved"),
            touch_bytes=0,
            verify="all",
        )
        cells = {who: Cell() for who in whos}
        tensor_bytes = sum(tensor.nbytes for tensor in CASES[row.case].tensors(self.scale))
        needs = {who: first_guess_bytes(who, row, tensor_bytes) for who in whos}
        copies = DEVICES if (row.split, row.arrays) == ("replicated", "jit") else 1
        for who, cell in cells.items():
            # The arrays, the files that they become, and what a save needs in between.
            all_bytes = (copies + 1) * tensor_bytes + needs[who]
            cell.problem = _torch_problem(who) or harness.too_large(all_bytes, source)
        harness.take_turns(
            cells,
            self.repeat,
            lambda who: self._one(row, who, job, cells[who], needs, tensor_bytes),
        )
        shutil.rmtree(job.target, ignore_errors=True)
        return cells

    def _one(
        self,
        row: SaveRow,
        who: str,
        job: Job,
        cell: Cell,
        needs: dict[str, int],
        tensor_bytes: int,
    ) -> None:
        """One run of one contender; `needs` learns how much memory it took."""
        job = dataclasses.replace(
            job,
            contender=who,
            touch_bytes=int(_TOUCH_FACTOR * (needs[who] + tensor_bytes)),
            verify="all" if self.verify or not cell.runs else "some",
        )
        result = self.run_once("save_child.py", job, row, cell)
        if result is None:
            return
        grown = result["peak_bytes"] - result["baseline_bytes"]
        needs[who] = max(_LEAST_TOUCH_BYTES, int(1.05 * grown))
        blocking = result["blocking_seconds"]
        print(
            f"{row} {who}: {result['wall_seconds']:.3f} s, {grown / 1e6:,.0f} MB extra"
            + (f", blocking {blocking:.3f} s" if blocking is not None else ""),
            file=sys.stderr,
        )


def _torch_problem(who: str) -> str:
    missing = who.startswith("dcp") and importlib.util.find_spec("torch") is None
    return "left out: torch is not installed" if missing else ""


def main() -> None:
    """Runs what the command line asks for and prints the report."""
    parser = harness.parser(__doc__, ORDER, "CASE[:SHARDING[:ARRAYS]]")
    options = harness.parse(parser, ORDER)
    bench = Bench.of(options)
    harness.measure(
        options,
        list(default_rows()),
        lambda row: bench.run(row, options.contenders or list(default_contenders(row))),
        render,
    )


if __name__ == "__main__":
    main()
