"""The report on saves as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

from cases import CASES
from results import Cell, Cells, Report, SaveRow, ratio
from save_floors import verdicts
from tables import details, heading, promises, ratio_text, seconds_text, share_text, table

ORDER = (
    "ours",
    "flax",
    "numpy",
    "ocdbt",
    "dcp",
    "ours-files",
    "ours-sharded",
    "ours-fsync",
    "flax-fsync",
    "ocdbt-fsync",
    "dcp-fsync",
    "ours-async",
    "ocdbt-async",
)
# Whose fastest sibling of this package each is compared with, in the table of ratios.
_RIVALS = MappingProxyType(
    {
        "flax": "ours",
        "numpy": "ours",
        "ocdbt": "ours",
        "dcp": "ours",
        "flax-fsync": "ours-fsync",
        "ocdbt-fsync": "ours-fsync",
        "dcp-fsync": "ours-fsync",
        "ocdbt-async": "ours-async",
    }
)


def render(report: Report) -> str:
    """All tables and the promises."""
    lines = heading(report)
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = {row: cells for row, cells in report.rows.items() if row.case == case}
        lines += [f"### {case}: {CASES[case].about}", "", *_seconds(rows), "", *_ratios(rows), ""]
        lines += [*_details(rows), ""]
    lines += ["### Floors", "", *promises(verdicts(report), report.scale)]
    return "\n".join(lines) + "\n"


def _present(rows: dict[SaveRow, Cells], whos: Iterable[str]) -> list[str]:
    return [who for who in whos if any(who in cells for cells in rows.values())]


def _label(row: SaveRow) -> str:
    return row.split if row.arrays == "loaded" else f"{row.split}, {row.arrays}"


def _seconds(rows: dict[SaveRow, Cells]) -> Iterator[str]:
    """Median seconds of all contenders side by side; of asynchronous saves until the end."""
    whos = _present(rows, ORDER)
    body = (
        [_label(row), *(seconds_text(cells.get(who)) for who in whos)]
        for row, cells in rows.items()
    )
    return table(["sharding", *(f"{who} s" for who in whos)], body)


def _ratios(rows: dict[SaveRow, Cells]) -> Iterator[str]:
    """How many times longer the others take."""
    whos = _present(rows, _RIVALS)
    body = (
        [_label(row), *(ratio_text(ratio(cells, who, _RIVALS[who])) for who in whos)]
        for row, cells in rows.items()
    )
    return table(["sharding", *(f"{who} / {_RIVALS[who]}" for who in whos)], body)


def _details(rows: dict[SaveRow, Cells]) -> Iterator[str]:
    columns = [
        "blocking s",
        "CPU s",
        "extra peak RSS MB",
        "files",
        "bytes in files / tensors",
        "by write calls / tensors",
        "to the disk / tensors",
    ]
    return details("sharding", columns, rows, _label, _figures, ORDER)


def _figures(cell: Cell) -> list[str]:
    tensors = cell.runs[0]["tensor_bytes"]
    blocking = cell.median("blocking_seconds")
    return [
        "" if blocking is None else f"{blocking:.3g}",
        f"{cell.median('cpu_seconds'):.3g}",
        f"{(cell.growth_bytes or 0.0) / 1e6:,.0f}",
        f"{cell.median('files'):.0f}",
        share_text(cell.median("file_bytes"), tensors),
        share_text(cell.median("written_bytes"), tensors),
        share_text(cell.median("dirtied_bytes"), tensors),
    ]
