#!/usr/bin/env python3
"""Measures loads over HTTP, from a server with a set latency and a bandwidth for each stream.

    python benchmarks/remote.py --json remote.json > remote.md
    python benchmarks/remote.py --quick

What counts is which share of `bandwidth x streams` a load reaches. The server and every timed load
are processes of their own, so keep the product well below what the machine can do. "builtin" is
Orbax's own layout, reading through `far_files`: a connection for each chunk of 128 MiB, 16 at once.
It has no way to take the columns of one process of eight; that row is ours alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import harness
import pages
from cases import CASES
from floors import Verdict
from remote_child import Job
from results import Cell, Cells, RemoteRow, Report
from tables import heading, promises, seconds_text, table

CONTENDERS = ("ours", "builtin")
ROWS = tuple(RemoteRow("llama", split) for split in ("dim0", "dim1", "dim1-of-8"))
LEAST_SHARE = 0.85


@dataclasses.dataclass(slots=True, kw_only=True)
class Bench(harness.Bench):
    """Runs rows, against a server of the folder.

    Attributes:
        latency_seconds: The server's.
        bandwidth: Bytes a second of one stream.
        streams: Requests at once.
    """

    latency_seconds: float
    bandwidth: float
    streams: int

    def run(self, row: RemoteRow, whos: list[str]) -> Cells:
        """All runs of a row, contenders taking turns."""
        source, warmup = harness.prepare(self.folder, row.case, self.scale)
        tensor_bytes = sum(tensor.nbytes for tensor in CASES[row.case].tensors(self.scale))
        cells = {who: Cell() for who in whos if who == "ours" or "-of-" not in row.split}
        with self._server() as port:
            job = Job(
                contender="",
                split=row.split,
                folder=str(source),
                warmup=str(warmup),
                port=port,
                latency_seconds=self.latency_seconds,
                bandwidth=self.bandwidth,
                streams=self.streams,
                touch_bytes=min(2 * tensor_bytes, int(0.6 * pages.available_bytes())),
            )
            pages.warm(source.iterdir())
            harness.take_turns(cells, self.repeat, lambda who: self._one(row, job, who, cells[who]))
        return cells

    def _one(self, row: RemoteRow, job: Job, who: str, cell: Cell) -> None:
        job = dataclasses.replace(job, contender=who)
        result = self.run_once("remote_child.py", job, row, cell)
        if result is None:
            return
        result["share"] = result["bytes_sent"] / result["wall_seconds"] / self.limit
        print(
            f"{row} {who}: {result['wall_seconds']:.2f} s, {result['share']:.3f}", file=sys.stderr
        )

    @property
    def limit(self) -> float:
        """Bytes a second of all streams."""
        return self.bandwidth * self.streams

    @contextlib.contextmanager
    def _server(self) -> Iterator[int]:
        command = [sys.executable, str(harness.BENCHMARKS / "slow_server.py"), str(self.folder)]
        command += [str(self.latency_seconds), str(self.bandwidth)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield int(process.stdout.readline())
            finally:
                process.kill()


def render(report: Report) -> str:
    """The table and the promises."""
    head = ["sharding", "contender", "runs", "s", "of bandwidth x streams", "least-most"]
    head += ["bytes sent / tensors", "requests", "connections", "CPU s", "growth / tensors"]
    body = [
        [row.split, who, *_figures(cell)]
        for row, cells in report.rows.items()
        for who, cell in cells.items()
    ]
    lines = [*heading(report), *table(head, body), "", *promises(_verdicts(report), report.scale)]
    return "\n".join(lines) + "\n"


def _figures(cell: Cell) -> list[str]:
    if not cell.runs:
        return ["0", cell.problem]
    shares = [run["share"] for run in cell.runs]
    tensors = cell.runs[0]["tensor_bytes"]
    return [
        str(len(cell.runs)),
        seconds_text(cell),
        f"{cell.median('share'):.3f}",
        f"{min(shares):.3f}-{max(shares):.3f}",
        f"{cell.median('bytes_sent') / tensors:.3f}",
        f"{cell.median('requests_sent'):,.0f}",
        f"{cell.median('connections_sent'):,.0f}",
        f"{cell.median('cpu_seconds'):.3g}",
        f"{cell.growth_bytes / tensors:.3f}",
    ]


def _verdicts(report: Report) -> Iterator[Verdict]:
    for row, cells in report.rows.items():
        share = cells["ours"].median("share") if "ours" in cells else None
        found = "" if share is None else f"{share:.3f}"
        promise = f"{row}: {LEAST_SHARE} of bandwidth x streams"
        yield Verdict(promise, found, None if share is None else share >= LEAST_SHARE)


def main() -> None:
    """Runs what the command line asks for and prints the report."""
    parser = harness.parser(__doc__, CONTENDERS, "CASE[:SHARDING]")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds")
    parser.add_argument("--bandwidth", type=float, default=4e6, help="bytes a second of a stream")
    parser.add_argument("--streams", type=int, default=16)
    options = harness.parse(parser, CONTENDERS)
    bench = Bench.of(
        options,
        latency_seconds=options.latency,
        bandwidth=options.bandwidth,
        streams=options.streams,
    )
    whos = options.contenders or list(CONTENDERS)
    harness.measure(
        options,
        ROWS,
        lambda row: bench.run(row, whos),
        lambda report: _about(bench) + render(report),
    )


def _about(bench: Bench) -> str:
    rate = f"{bench.bandwidth / 1e6:g} MB/s x {bench.streams} streams"
    return f"Latency {1e3 * bench.latency_seconds:g} ms, {rate}.\n\n"


if __name__ == "__main__":
    main()
