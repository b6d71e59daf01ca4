"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cases import CASES
from floors import Verdict, verdicts
from results import Cell, Cells, Report, Row, ratio

_ORDER = ("ours", "ours-mmap", "builtin", "load_file", "idiom", "ocdbt", "odirect")


def render(report: Report) -> str:
    """All tables and the promises."""
    lines = heading(report)
    lines += [f"**{warning}**\n" for warning in _page_warnings(report)]
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = {row: cells for row, cells in report.rows.items() if row.case == case}
        lines += [f"### {case}: {CASES[case].about}", "", *_seconds(rows), "", *_details(rows), ""]
    lines += ["### Floors", "", *promises(verdicts(report), report.scale)]
    return "\n".join(lines) + "\n"


def heading(report: Report) -> list[str]:
    """Machine, versions, and a word on sizes that are not the real ones."""
    lines = [", ".join(f"{name} {value}" for name, value in report.machine.items()), ""]
    if report.scale != 1.0:
        lines += [f"**Sizes scaled by {report.scale:g}: not the promised ones.**", ""]
    return lines


def _page_warnings(report: Report) -> Iterator[str]:
    """Runs whose files were not in the page cache, or not out of it, as they should have been."""
    for row, cells in report.rows.items():
        for who, cell in cells.items():
            for run in cell.runs:
                share = run["resident_fraction"]
                if (share > 0.01) if row.page_state == "cold" else (share < 0.99):
                    yield f"{row} {who}: a run began with {share:.0%} of its files in the cache."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _seconds(rows: dict[Row, Cells]) -> Iterator[str]:
    """Median seconds of all contenders side by side."""
    whos = [who for who in _ORDER if any(who in cells for cells in rows.values())]
    head = ["sharding, pages", *(f"{who} s" for who in whos), "builtin / ours", "load_file / ours"]
    body = []
    for row, cells in rows.items():
        times = [seconds_text(cells.get(who)) for who in whos]
        ratios = [ratio_text(ratio(cells, slow, "ours")) for slow in ("builtin", "load_file")]
        body.append([_label(row), *times, *ratios])
    return table(head, body)


def details(
    title: str,
    columns: Sequence[str],
    rows: Mapping[Any, Cells],
    label: Callable[[Any], str],
    figures: Callable[[Cell], Sequence[str]],
    order: Sequence[str] = (),
) -> Iterator[str]:
    """A line of figures for each row and contender."""
    body = []
    for row, cells in rows.items():
        for who in order or cells:
            if who in cells and (runs := cells[who].runs):
                walls = [run["wall_seconds"] for run in runs]
                span = f"{min(walls):.3g}-{max(walls):.3g}"
                body.append([label(row), who, str(len(walls)), span, *figures(cells[who])])
    return table([title, "contender", "runs", "wall s, least-most", *columns], body)


def _label(row: Row) -> str:
    return f"{row.split}, {row.page_state}"


def _details(rows: dict[Row, Cells]) -> Iterator[str]:
    columns = [
        "CPU s",
        "peak RSS MB",
        "growth / tensors",
        "bytes told / tensors",
        "read calls / files",
        "from disk / files",
    ]
    return details("sharding, pages", columns, rows, _label, _figures, _ORDER)


def _figures(cell: Cell) -> list[str]:
    tensors, files = cell.runs[0]["tensor_bytes"], cell.runs[0]["file_bytes"]
    return [
        f"{cell.median('cpu_seconds'):.3g}",
        f"{max(run['peak_bytes'] for run in cell.runs) / 1e6:,.0f}",
        share_text(cell.growth_bytes, tensors),
        share_text(cell.scalar("bytes_read"), tensors),
        share_text(cell.median("passed_bytes"), files),
        share_text(cell.median("device_bytes"), files),
    ]


def share_text(part: float | None, whole: float) -> str:
    return "" if part is None else f"{part / whole:.3f}"


def seconds_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.seconds is None:
        return cell.problem
    return f"{cell.seconds:.3g}" + (f" ({cell.problem})" if cell.problem else "")


def ratio_text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}x"


def promises(found: Iterable[Verdict], scale: float = 1.0) -> Iterator[str]:
    """Which promises were kept; at other sizes than the promised ones none is."""
    if scale != 1.0:
        return iter(["Of full sizes alone: without --quick and --scale.", ""])
    words = {True: "PASS", False: "**FAIL**", None: "?"}
    return table(
        ["", "promise", "found"],
        ([words[verdict.passed], verdict.promise, verdict.found] for verdict in found),
    )
