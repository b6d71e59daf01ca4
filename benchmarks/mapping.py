#!/usr/bin/env python3
"""Compares loads and saves through a mapping with plain ones of the same bytes, and with numpy.

    python benchmarks/mapping.py --json mapping.json > mapping.md    everything; 5 GB of disk
    python benchmarks/mapping.py --quick                  the same with small sizes, once each
    python benchmarks/mapping.py --only llama:fsdp --contenders plain,mapped

The model's layers are stacked, its kernels transposed, its heads split out, and its experts
stacked. The contenders:

    mapped    `osl.load` with a mapping, and a memory budget of 64 MB
    plain     `osl.load` of the tensors as they stand; every device gets the same elements of them
    numpy     as Tunix loads: mapped files, transposed and stacked whole by numpy, `device_put`
    mapped-save, plain-save   `osl.save` of what the first two load, not flushed

Every timed run is a process of its own; contenders take turns, files are in the page cache, and
more memory than any of them needs is touched and freed just before the clock starts. What is timed
begins with all modules imported and the contender's code warm, and ends when every array is ready.
Afterwards leaves are compared with numpy's, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import harness
from cases import CASES
from floors import Verdict
from mapping_child import Job
from results import Cell, Cells, MappingRow, Report, ratio
from tables import heading, promises, ratio_text, seconds_text, share_text, table

LOADS = ("mapped", "plain", "numpy")
SAVES = ("mapped-save", "plain-save")
ORDER = LOADS + SAVES
_MOST_OF_PLAIN = 1.5
_LEAST_OF_NUMPY = 3.0
_SLACK_BYTES = 64e6
_WARMUP_SCALE = 0.001


def default_rows() -> list[MappingRow]:
    """The rows of a full run."""
    splits = ("fsdp", "tensor", "2d", "replicated")
    return [MappingRow(case, split) for case in ("llama", "experts") for split in splits]


class Bench(harness.Bench):
    """Runs rows."""

    def run(self, row: MappingRow, whos: Sequence[str]) -> Cells:
        """All runs of a row, contenders taking turns."""
        source, _ = harness.prepare(self.folder, row.case, self.scale)
        warmup, _ = harness.prepare(self.folder, row.case, _WARMUP_SCALE)
        tensor_bytes = sum(tensor.nbytes for tensor in CASES[row.case].tensors(self.scale))
        cells = {who: Cell() for who in whos}
        needs = {who: (2 if who == "numpy" else 1.05) * tensor_bytes for who in whos}
        for who, cell in cells.items():
            cell.problem = harness.too_large(int(needs[who]), source)

        def one(who: str) -> None:
            job = Job(
                contender=who,
                case=row.case,
                split=row.split,
                folder=str(source),
                warmup=str(warmup),
                target=str(self.folder / "saved"),
                touch_bytes=harness.touch_bytes(needs.values()),
                verify=self.verify,
            )
            result = self.run_once("mapping_child.py", job, row, cells[who])
            if result is None:
                return
            grown = result["peak_bytes"] - result["baseline_bytes"]
            needs[who] = max(64 << 20, 1.05 * grown)
            print(
                f"{row} {who}: {result['wall_seconds']:.3f} s, {result['cpu_seconds']:.2f} s of"
                f" CPU, {grown / 1e6:,.0f} MB",
                file=sys.stderr,
            )

        harness.take_turns(cells, self.repeat, one)
        return cells


def render(report: Report) -> str:
    """All tables and the promises."""
    lines = heading(report)
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = {row: cells for row, cells in report.rows.items() if row.case == case}
        lines += [f"### {case}: {CASES[case].about}", "", *_table(rows), ""]
    lines += ["### Promises", "", *promises(_verdicts(report), report.scale)]
    return "\n".join(lines) + "\n"


def _table(rows: dict[MappingRow, Cells]) -> Iterator[str]:
    head = ["sharding"]
    for title in ("s", "CPU s", "memory / tensors"):
        head += [f"{who} {title}" for who in LOADS]
    head += ["mapped / plain", "the same of CPU", "numpy / mapped"]
    body = []
    for row, cells in rows.items():
        some = [cells.get(who, Cell()) for who in LOADS]
        line = [row.split, *map(seconds_text, some)]
        line += ["" if (s := cell.median("cpu_seconds")) is None else f"{s:.3g}" for cell in some]
        line += [
            share_text(cell.growth_bytes, cell.runs[0]["tensor_bytes"]) if cell.runs else ""
            for cell in some
        ]
        line += [
            ratio_text(ratio(cells, "mapped", "plain")),
            ratio_text(ratio(cells, "mapped", "plain", "cpu_seconds")),
            ratio_text(ratio(cells, "numpy", "mapped")),
        ]
        body.append(line)
    yield from table(head, body)
    head = ["sharding", *(f"{who} s" for who in SAVES), "mapped / plain", "the same of CPU"]
    body = [
        [
            row.split,
            *(seconds_text(cells.get(who, Cell())) for who in SAVES),
            ratio_text(ratio(cells, *SAVES)),
            ratio_text(ratio(cells, *SAVES, "cpu_seconds")),
        ]
        for row, cells in rows.items()
    ]
    yield from ("", *table(head, body))


def _verdicts(report: Report) -> Iterator[Verdict]:
    for row, cells in report.rows.items():
        for promise, slow, fast, most, least in (
            (f"at most {_MOST_OF_PLAIN}x the plain load", "mapped", "plain", _MOST_OF_PLAIN, 0.0),
            (f"{_LEAST_OF_NUMPY:g}x faster than numpy", "numpy", "mapped", 1e9, _LEAST_OF_NUMPY),
        ):
            value = ratio(cells, slow, fast)
            passed = None if value is None else least <= value <= most
            yield Verdict(f"{row}: {promise}", ratio_text(value), passed)
        mapped = cells.get("mapped", Cell())
        if (grown := mapped.growth_bytes) is not None:
            extra = grown - mapped.runs[0]["tensor_bytes"]
            promise = f"{row}: at most {_SLACK_BYTES / 1e6:g} MB and the budget beyond the arrays"
            yield Verdict(promise, f"{extra / 1e6:,.0f} MB", extra <= 2 * _SLACK_BYTES)


def main() -> None:
    """Runs what the command line asks for and prints the report."""
    parser = harness.parser(__doc__, ORDER, "CASE[:SHARDING]")
    options = harness.parse(parser, ORDER)
    bench = Bench.of(options)
    harness.measure(
        options, default_rows(), lambda row: bench.run(row, options.contenders or ORDER), render
    )


if __name__ == "__main__":
    main()
