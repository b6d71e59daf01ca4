"""What the project promises of its saves, checked against a report.

Like is compared with like: what stays in the page cache with what stays there, and what is flushed
to the disk with what is flushed.
"""

from __future__ import annotations

from collections.abc import Iterator

from floors import Ratio, Verdict, problem_verdicts, ratio_verdicts
from results import Cell, Report, SaveRow

_SPLITS = ("replicated", "dim0", "dim1", "2d")
_SLACK_BYTES = 64_000_000
_BUDGET_BYTES = 256 << 20  # what a save takes whose `WriteOptions` names no memory budget


def _ratios() -> Iterator[Ratio]:
    for split in _SPLITS:
        row = SaveRow("llama", split, "loaded")
        for ours in ("ours", "ours-files"):
            yield Ratio(row, "flax", ours, 3.0)
            yield Ratio(row, "ocdbt", ours, 8.0)
        yield Ratio(row, "flax-fsync", "ours-fsync", 2.0)
        yield Ratio(row, "ocdbt-fsync", "ours-fsync", 3.0)
        yield Ratio(row, "dcp", "ours", 5.0)
        yield Ratio(row, "dcp-fsync", "ours-fsync", 5.0)
    yield Ratio(SaveRow("small", "dim0", "loaded"), "flax", "ours", 1.7)


RATIOS = tuple(_ratios())


def verdicts(report: Report) -> Iterator[Verdict]:
    """Every promise about a row that was run."""
    yield from ratio_verdicts(report, RATIOS)
    for row, cells in report.rows.items():
        for who, cell in cells.items():
            if who.startswith("ours") and cell.runs:
                yield _memory(row, who, cell)
        yield from problem_verdicts(row, cells)


def _memory(row: SaveRow, who: str, cell: Cell) -> Verdict:
    """Memory above what the process held before, the arrays included."""
    grown = cell.growth_bytes or 0.0
    return Verdict(
        f"{row} {who} extra peak RSS at most 64 MB + the budget of 256 MiB",
        f"{grown / 1e6:,.0f} MB for {cell.runs[0]['tensor_bytes'] / 1e6:,.0f} MB of tensors",
        grown <= _SLACK_BYTES + _BUDGET_BYTES,
    )
