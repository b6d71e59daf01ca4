"""What the benchmark measured, in memory and as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What is loaded and from where.

    Attributes:
        case: A key of `cases.CASES`.
        split: A key of `contenders.SPLITS`.
        page_state: "warm", "cold" or "first".
    """

    case: str
    split: str
    page_state: str

    def __str__(self) -> str:
        return ":".join(self)


class SaveRow(NamedTuple):
    """What is saved.

    Attributes:
        case: A key of `cases.CASES`.
        split: A key of `contenders.SPLITS`.
        arrays: Where the arrays come from: "loaded" by this package, whose buffers JAX adopted,
            or results of a "jit" in memory of XLA's own.
    """

    case: str
    split: str
    arrays: str

    def __str__(self) -> str:
        return ":".join(self)


class MappingRow(NamedTuple):
    """What is loaded through a mapping.

    Attributes:
        case: A key of `mapping_contenders.MODELS`.
        split: A key of `mapping_contenders.SPLITS`.
    """

    case: str
    split: str

    def __str__(self) -> str:
        return ":".join(self)


class AcceleratorRow(NamedTuple):
    """What is moved between files and devices.

    Attributes:
        way: A key of `accelerator_contenders.WAYS`.
        split: A sharding of that way.
        task: "warm" or "cold", a load with files in the page cache or not; or "save".
    """

    way: str
    split: str
    task: str

    def __str__(self) -> str:
        return ":".join(self)


class RemoteRow(NamedTuple):
    """What is loaded over HTTP.

    Attributes:
        case: A key of `cases.CASES`.
        split: A key of `contenders.SPLITS`, or "dim1-of-8".
    """

    case: str
    split: str

    def __str__(self) -> str:
        return ":".join(self)


@dataclasses.dataclass(slots=True)
class Cell:
    """All runs of one contender on one row.

    Attributes:
        runs: The result of each child that succeeded; the keys are `child.py`'s.
        problem: Why there are no runs, or no more of them; empty where all went well.
    """

    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    problem: str = ""

    @property
    def seconds(self) -> float | None:
        """Median wall time."""
        return self.median("wall_seconds")

    @property
    def growth_bytes(self) -> float | None:
        """Largest peak of resident memory above what was resident before."""
        if not self.runs:
            return None
        return max(float(run["peak_bytes"] - run["baseline_bytes"]) for run in self.runs)

    def median(self, key: str) -> float | None:
        """The median of a figure; None where it was not recorded."""
        values = [float(run[key]) for run in self.runs if run.get(key) is not None]
        return statistics.median(values) if values else None

    def scalar(self, key: str) -> float | None:
        """A `jax.monitoring` scalar: its largest value."""
        values = [float(run["scalars"][key]) for run in self.runs if key in run["scalars"]]
        return max(values) if values else None


Cells = dict[str, Cell]


@dataclasses.dataclass(slots=True)
class Report:
    """A whole benchmark.

    Attributes:
        machine: Names and values that describe machine and versions.
        scale: The size of the cases, 1.0 for the real one.
        rows: The contenders' cells of every `Row`, `SaveRow`, `MappingRow`, `AcceleratorRow` or
            `RemoteRow`.
    """

    machine: Mapping[str, str]
    scale: float
    rows: dict[Any, Cells] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Saves as JSON."""
        rows = [
            {
                **row._asdict(),
                "cells": {who: dataclasses.asdict(cell) for who, cell in all_.items()},
            }
            for row, all_ in self.rows.items()
        ]
        document = {"machine": dict(self.machine), "scale": self.scale, "rows": rows}
        path.write_text(json.dumps(document, indent=1))

    @classmethod
    def read(cls, path: Path, kind: Any = Row) -> Report:
        """What `write` saved, of rows of a kind."""
        document = json.loads(path.read_text())
        report = cls(document["machine"], document["scale"])
        for row in document["rows"]:
            cells = {who: Cell(**cell) for who, cell in row["cells"].items()}
            report.rows[kind(*(row[field] for field in kind._fields))] = cells
        return report


def ratio(
    cells: Mapping[str, Cell], slow: str, fast: str, key: str = "wall_seconds"
) -> float | None:
    """How many times longer one contender takes than another."""
    above = cells[slow].median(key) if slow in cells else None
    below = cells[fast].median(key) if fast in cells else None
    return above / below if above and below else None
