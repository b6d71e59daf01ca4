"""What the project promises of its loads, checked against a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from results import Cell, Cells, Report, Row, SaveRow, ratio

_LARGE = ("llama", "mini", "moe")
_SLACK_BYTES = 64_000_000
# A header is fetched with a guess of its length, so reads pass a little more than the file.
_HEADER_GUESS_BYTES = 1 << 18


class Ratio(NamedTuple):
    """A contender must take at least so many times as long as ours.

    Attributes:
        row: Where.
        slow: The contender that is compared with.
        fast: Ours.
        least: The smallest ratio allowed.
    """

    row: Row | SaveRow
    slow: str
    fast: str
    least: float


class Verdict(NamedTuple):
    """One checked promise; `passed` is None where it could not be checked."""

    promise: str
    found: str
    passed: bool | None


def _ratios() -> Iterator[Ratio]:
    splits = {"dim0": 8.0, "dim1": 30.0, "2d": 18.0, "replicated": 25.0}
    for case in _LARGE:
        for split, least in splits.items():
            yield Ratio(Row(case, split, "warm"), "builtin", "ours", least)
    yield Ratio(Row("small", "dim0", "warm"), "builtin", "ours", 8.0)
    yield Ratio(Row("small", "dim1", "warm"), "builtin", "ours", 30.0)
    for split in ("replicated", "dim0", "dim1"):
        yield Ratio(Row("tiny", split, "warm"), "builtin", "ours", 5.0)
    for case in _LARGE:
        for split in splits:
            yield Ratio(Row(case, split, "warm"), "load_file", "ours", 3.0)
    for split in ("dim0", "2d", "replicated"):
        yield Ratio(Row("llama", split, "first"), "idiom", "ours", 1.0)
    yield Ratio(Row("llama", "dim0", "cold"), "builtin", "ours", 2.8)
    yield Ratio(Row("llama", "dim0", "cold"), "odirect", "ours", 0.8)
    yield Ratio(Row("aligned", "dim0", "warm"), "builtin", "ours-mmap", 40.0)


RATIOS = tuple(_ratios())


def verdicts(report: Report) -> Iterator[Verdict]:
    """Every promise about a row that was run."""
    yield from ratio_verdicts(report, RATIOS)
    for row, cells in report.rows.items():
        if "ours" in cells and cells["ours"].runs:
            yield _memory(row, cells["ours"])
            yield _bytes(row, cells["ours"])
        yield from problem_verdicts(row, cells)


def ratio_verdicts(report: Report, ratios: Iterable[Ratio]) -> Iterator[Verdict]:
    """The ratios of rows that were run."""
    for row, slow, fast, least in ratios:
        if row not in report.rows:
            continue
        found = ratio(report.rows[row], slow, fast)
        promise = f"{row} {slow} / {fast} at least {least:g}x"
        if found is None:
            yield Verdict(promise, "not measured", None)
        else:
            yield Verdict(promise, f"{found:.2f}x", found >= least)


def problem_verdicts(row: Row | SaveRow, cells: Cells) -> Iterator[Verdict]:
    """That ours run at all."""
    for who, cell in cells.items():
        if who.startswith("ours") and cell.problem:
            yield Verdict(f"{row} {who} runs", cell.problem, False)


def _memory(row: Row, cell: Cell) -> Verdict:
    """Memory above what the process held before; the adopted arrays are part of it."""
    tensors = cell.runs[0]["tensor_bytes"]
    grown = cell.growth_bytes or 0.0
    kept = max(run["after_bytes"] - run["baseline_bytes"] for run in cell.runs)
    return Verdict(
        f"{row} peak RSS at most 1.1x the tensors + 64 MB",
        f"{grown / 1e6:,.0f} MB for {tensors / 1e6:,.0f} MB of tensors"
        f" ({kept / 1e6:,.0f} MB still held when loaded)",
        grown <= 1.1 * tensors + _SLACK_BYTES,
    )


def _bytes(row: Row, cell: Cell) -> Verdict:
    """Bytes that our own counter reports, that read calls gave and, of a cold load, the disk."""
    run = cell.runs[0]
    told = cell.scalar("bytes_read")
    files = run["file_bytes"]
    seen = {"read calls": cell.median("passed_bytes") or 0.0}
    if row.page_state == "cold":
        seen["the disk"] = cell.median("device_bytes") or 0.0
    most = 1.01 * files + run["files"] * _HEADER_GUESS_BYTES
    return Verdict(
        f"{row} bytes read exactly the file once",
        f"{(told or 0) / run['tensor_bytes']:.4f} of the tensors told, of the files "
        + ", ".join(f"{count / files:.4f} from {source}" for source, count in seen.items()),
        told == run["tensor_bytes"] and max(seen.values()) <= most,
    )
