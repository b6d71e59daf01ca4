#!/usr/bin/env python3
"""Compares ways from files into the memory of devices, and back, on any backend of JAX.

    python benchmarks/accelerator.py --json accelerator.json > accelerator.md    everything
    python benchmarks/accelerator.py --platform cpu       on eight CPU devices: a check of itself
    python benchmarks/accelerator.py --check              a few rows of small size, once each
    python benchmarks/accelerator.py --only plain:dim0 --contenders device_put,ours

2.3 GB of bfloat16 in the shapes of a Llama; 10 GB of disk. A row is WAY:SHARDING:TASK. Ways: plain,
stacked (layers become one array), transposed (that, kernels transposed and heads split out).
Tasks: warm (files in the page cache), cold (not in it), save. The contenders:

    device_put   the limit of loads: `jax.device_put` of shards that are in memory already
    device_get   the limit of saves: the same arrays copied to the host, without a file
    ours         this package, with a memory budget of 256 MiB; saves are not flushed
    unregistered the same load with `register_memory=False`, which changes it on CUDA devices alone
    load_file    `safetensors.numpy.load_file`, numpy on whole tensors, `jax.device_put`
    builtin      Orbax's own `SafetensorsLayout`
    ocdbt        Orbax's own format; saves are not flushed

Every timed run is a process of its own, contenders take turns, and more memory than any of them
needs is touched and freed just before the clock starts. What is timed begins with all modules
imported, the devices and the contender's code warm, and the tree made; it ends when every array is
ready, or the save returns. Afterwards arrays and files are compared, bit by bit.

Host memory is the largest resident memory above what stood before; on CPU devices arrays are part
of it, and what this package reads into becomes theirs without the copy that others need, so no bar
is judged there. Device memory is the peak that the backend reports. With one device dim0 and dim1
are the same, and so are fsdp and tensor.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator, Sequence

import harness
from accelerator_child import BUDGET_BYTES, Job
from cases import CASES
from floors import Ratio, Verdict, problem_verdicts, ratio_verdicts
from results import AcceleratorRow as Row, Cell, Cells, Report, ratio
from tables import details, heading, promises, ratio_text, seconds_text, table

LOADS = ("device_put", "ours", "unregistered", "load_file", "builtin", "ocdbt")
SAVES = ("device_get", "ours", "ocdbt")
CONTENDERS = tuple(dict.fromkeys(LOADS + SAVES))
_CASE, _CHILD = "llama", "accelerator_child.py"
_WARMUP_SCALE = 0.001
_CHECK = ("plain:dim1:cold", "transposed:fsdp:warm", "plain:dim0:save", "transposed:fsdp:save")
_CHECK_SCALE = 0.002


def default_rows() -> Iterator[Row]:
    """The rows of a full run."""
    for split in ("dim0", "dim1"):
        for task in ("warm", "cold", "save"):
            yield Row("plain", split, task)
    for way in ("stacked", "transposed"):
        for split in ("fsdp", "tensor"):
            yield Row(way, split, "warm")
        for task in ("cold", "save"):
            yield Row(way, "fsdp", task)


def default_contenders(row: Row) -> list[str]:
    """Who takes part in a row: only two know how to map."""
    whos = SAVES if row.task == "save" else LOADS
    return [who for who in whos if row.way == "plain" or who not in ("builtin", "ocdbt")]


@dataclasses.dataclass(slots=True, kw_only=True)
class Bench(harness.Bench):
    """Runs rows on a `platform`, as in `Job`; `problems` say why contenders did not run."""

    platform: str
    problems: list[str] = dataclasses.field(default_factory=list)

    def run(self, row: Row, whos: Sequence[str]) -> Cells:
        """All runs of a row, contenders taking turns."""
        source, _ = harness.prepare(self.folder, _CASE, self.scale)
        warmup, _ = harness.prepare(self.folder, _CASE, _WARMUP_SCALE)
        tensor_bytes = sum(tensor.nbytes for tensor in CASES[_CASE].tensors(self.scale))
        needs = dict.fromkeys(whos, 3 * tensor_bytes)
        job = Job(
            platform=self.platform,
            task="save" if row.task == "save" else "load",
            contender="",
            way=row.way,
            split=row.split,
            page_state="cold" if row.task == "cold" else "warm",
            folder=str(source),
            ocdbt=f"{source}-ocdbt-accelerator",
            warmup=str(warmup),
            warmup_ocdbt=f"{warmup}-ocdbt-accelerator",
            target=str(self.folder / "saved"),
            touch_bytes=0,
            verify=self.verify,
        )
        cells = {who: Cell(problem=harness.too_large(needs[who], source)) for who in whos}
        if "ocdbt" in cells and job.task == "load" and not cells["ocdbt"].problem:
            make = dataclasses.replace(job, task="save-ocdbt")
            _, cells["ocdbt"].problem = harness.run_child(
                _CHILD, make, timeout_seconds=self.timeout_seconds
            )

        def one(who: str) -> None:
            touch = harness.touch_bytes(needs.values())
            turn = dataclasses.replace(job, contender=who, touch_bytes=touch)
            result = self.run_once(_CHILD, turn, row, cells[who])
            if result is not None:
                grown = result["peak_bytes"] - result["baseline_bytes"]
                needs[who] = max(64 << 20, int(1.05 * grown))
                seconds = result["wall_seconds"]
                print(f"{row} {who}: {seconds:.3f} s, {grown / 1e6:,.0f} MB", file=sys.stderr)

        harness.take_turns(cells, self.repeat, one)
        for ocdbt in (job.ocdbt, job.warmup_ocdbt):
            shutil.rmtree(ocdbt, ignore_errors=True)
        self.problems += [
            f"{row} {who}: {cell.problem}" for who, cell in cells.items() if cell.problem
        ]
        return cells


def render(report: Report) -> str:
    """All tables and the promises."""
    runs = [run for cells in report.rows.values() for cell in cells.values() for run in cell.runs]
    devices = ", ".join(dict.fromkeys(run["devices"] for run in runs))
    lines = [f"Devices: {devices or 'none'}", "", *heading(report)]
    on_cpu = "(cpu)" in devices
    if on_cpu:
        lines += ["**CPU devices: a check of this program, no figure of an accelerator.**", ""]
    for task, limit, whos in (("load", LOADS[0], LOADS), ("save", SAVES[0], SAVES)):
        rows = {r: c for r, c in report.rows.items() if (r.task == "save") == (task == "save")}
        if rows:
            lines += [*_seconds(task, limit, whos, rows), ""]
    bars = [*_verdicts(report)]
    if on_cpu:  # a bar that these reach, or miss, says nothing of others
        bars = [v if v.promise.endswith("runs") else v._replace(passed=None) for v in bars]
    lines += [*_details(report.rows), "", "### Bars", "", *promises(bars)]
    return "\n".join(lines) + "\n"


def _seconds(task: str, limit: str, whos: Sequence[str], rows: dict[Row, Cells]) -> Iterator[str]:
    """Median seconds side by side, and ratios to ours; that of the limit is our share of it."""
    others = [who for who in whos if who != "ours"]
    head = [task, *(f"{who} s" for who in whos), *(f"{who} / ours" for who in others)]
    body = []
    for row, cells in rows.items():
        seconds = [seconds_text(cells.get(who)) for who in whos]
        body.append(
            [str(row), *seconds, *(ratio_text(ratio(cells, who, "ours")) for who in others)]
        )
    return table(head, body)


def _details(rows: dict[Row, Cells]) -> Iterator[str]:
    columns = ["GB/s", "CPU s", "host memory MB", "device memory MB", "arrays MB"]
    return details("row", columns, rows, str, _figures)


def _figures(cell: Cell) -> list[str]:
    device_peak = _device_peak(cell)
    return [
        f"{cell.runs[0]['tensor_bytes'] / 1e9 / (cell.seconds or 1.0):.3g}",
        f"{cell.median('cpu_seconds'):.3g}",
        f"{(cell.growth_bytes or 0.0) / 1e6:,.0f}",
        "" if device_peak is None else f"{device_peak / 1e6:,.0f}",
        f"{cell.runs[0]['array_bytes'] / 1e6:,.0f}",
    ]


def _device_peak(cell: Cell) -> float | None:
    peaks = [run["device_peak_bytes"] for run in cell.runs]
    return None if None in peaks else max(peaks)


def _bars() -> Iterator[Ratio]:
    for row in default_rows():
        if row.task == "save":
            yield Ratio(row, "device_get", "ours", 0.8)
        elif row.task == "warm":
            yield Ratio(row, "device_put", "ours", 0.8 if row[:2] == ("plain", "dim0") else 0.6)


def _verdicts(report: Report) -> Iterator[Verdict]:
    yield from ratio_verdicts(report, _bars())
    for row, cells in report.rows.items():
        ours = cells.get("ours", Cell())
        if ours.runs:
            promise = f"{row} device memory at most the arrays + {BUDGET_BYTES >> 20} MiB"
            peak, arrays = _device_peak(ours), ours.runs[0]["array_bytes"]
            if peak is None:
                yield Verdict(promise, "the backend does not report it", None)
            else:
                beyond = peak - arrays
                yield Verdict(promise, f"{beyond / 1e6:,.0f} MB more", beyond <= BUDGET_BYTES)
        yield from problem_verdicts(row, cells)


def main() -> None:
    """Runs what the command line asks for and prints the report."""
    parser = harness.parser(__doc__, CONTENDERS, "WAY[:SHARDING[:TASK]]")
    parser.add_argument("--platform", default="", help="as JAX names it; default: what it finds")
    parser.add_argument("--check", action="store_true", help="fail where a contender does not run")
    options = harness.parse(parser, CONTENDERS)
    if options.check:
        options.scale, options.repeat = _CHECK_SCALE, 1
        options.only, options.verify = options.only or [*_CHECK], True
    bench = Bench.of(options, platform=options.platform)

    def run(row: Row) -> Cells:
        chosen = options.contenders or CONTENDERS
        return bench.run(row, [who for who in default_contenders(row) if who in chosen])

    harness.measure(options, list(default_rows()), run, render)
    if options.check and bench.problems:
        raise SystemExit("\n".join(bench.problems))


if __name__ == "__main__":
    main()
