#!/usr/bin/env python3
"""Compares the ways to load what several processes need, with real processes.

    python benchmarks/exchange.py --json exchange.json      "auto" against both fixed choices
    python benchmarks/exchange.py --processes 4 --only far:columns

Each case is loaded from local files, which are not in the page cache, and from a server with a
latency and a bandwidth for each stream ("far"), one case after the other. All processes share this
machine, and a load counts as long as its slowest process. Programs of XLA are compiled anew for
each load, as in a program that loads once. The choices take turns in every order; after the first
turns a fixed choice that took half as long again as the best is left out. What is compared is the
lower quartile of each: a machine's other work only adds time. Turns go on until the ratio and twice
its standard error (by resampling) are within 1.05, or that error is 1.5 %, or to `--repeat`.
At the end come the number of cases, how many are above 1.05 of the better fixed choice, how many of
them by more than twice the error, and the worst; with one above, or with fewer than 20 cases unless
`--only` leaves some out, it exits with 1.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy

HERE = Path(__file__).resolve().parent
CASES = [
    "replicated",
    "partly",
    "columns",
    "partly-columns",
    "2d",
    "mapped",
    "mixed",
    "dim0",
    "tiny",
]


class Storage(NamedTuple):
    """Where files are, and what of them is loaded so that a load takes half a second or more.

    Attributes:
        rate: Latency in seconds, and bytes a second of a stream; None for local files.
        width: Of the layers: tensors of some megabytes, or of ten, as in larger models.
        times: Of `--megabytes`; for single cases another number, so that loads fit in memory.
        turns: In all, after which some choices and cases may be left out; new processes go on with
            the rest. A few turns of local files tell more of the machine than of the loads.
    """

    rate: tuple[float, float] | None
    width: int = 1024
    times: int = 1
    other_times: Mapping[str, int] = {}
    turns: tuple[int, ...] = (0, 2, 8, 20, 38)


STORAGES = {
    "local": Storage(None, 2048, 20, {"2d": 40, "dim0": 40}, (0, 2, 30)),
    "far": Storage((0.02, 4e6), other_times={"dim0": 3}),
    "slow": Storage((0.05, 1e6)),
}
MOST_TINY = 8000
STREAMS = 8
MOST = 1.05
LEAST_CASES = 20
MOST_TURNS = max(storage.turns[-1] for storage in STORAGES.values())
FIRST_TURNS, FAR_SLOWER = 2, 1.5
MOST_ERROR = 0.015  # a standard error, relative

Times = dict[str, list[float]]
"""Of each choice the seconds, and under `<choice> bytes` what all processes read."""


def make(folder: Path, megabytes: float, width: int) -> None:
    """Makes the checkpoints that are missing: one of layers, and one of tiny tensors."""
    rng = np.random.default_rng(0)
    layers = max(1, round(megabytes * 1e6 / (10 * width**2)))
    shapes = {
        f"layers.{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in {
            "up": (2 * width, width),
            "down": (width, 2 * width),
            "out": (width, width),
            "norm": (width,),
        }.items()
    }
    small = {
        f"layers.{number}.bias": (1024,) for number in range(min(MOST_TINY, round(46 * megabytes)))
    }
    for name, tensors in {"layers": shapes, "tiny": small}.items():
        file = folder / f"{name}-{megabytes:g}" / "model.safetensors"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = {key: rng.integers(0, 99, of).astype(np.int16) for key, of in tensors.items()}
            safetensors.numpy.save_file(made, file)


def run(
    processes: int, loads: list[tuple[str, str, str]], options: dict[str, object], timeout: float
) -> list[tuple[float, float]]:
    """For each load the seconds of the slowest process, and the bytes that all read."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    fixed = {"coordinator": address, "processes": processes, "devices": 2}
    children = []
    for process in range(processes):
        job = json.dumps({**fixed, "process": process, "loads": loads, "options": options})
        command = [sys.executable, str(HERE / "exchange_child.py"), job]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [child.communicate(timeout=timeout)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    # XLA's transport may print after it.
    lines = (reversed(output.splitlines()) for output in outputs)
    each = [json.loads(next(line for line in of if line.startswith("[["))) for of in lines]
    return [(max(s for s, _ in of), sum(b for _, b in of)) for of in zip(*each, strict=True)]


def measure(options: argparse.Namespace) -> Iterator[tuple[str, Times]]:
    """For each case the seconds of each choice, and the bytes read over the checkpoint's."""
    for storage, (rate, width, usual_times, other_times, most_turns) in STORAGES.items():
        cases = [case for case in CASES if _chosen(options, f"{storage}:{case}")]
        if not cases:
            continue
        sizes = {c: options.megabytes * other_times.get(c, usual_times) for c in cases}
        for megabytes in {*sizes.values()}:
            make(options.dir, megabytes, width)
        server = None
        where, reading = f"{options.dir}", {}
        if rate is not None:
            command = [str(HERE / "slow_server.py"), str(options.dir), *map(str, rate)]
            server = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            where = f"http://127.0.0.1:{int(server.stdout.readline())}"
            reading = {
                "concurrency": STREAMS,
                "latency_seconds": {"https": rate[0]},
                "bandwidth_bytes_per_second": {"https": rate[1]},
            }
        try:
            for processes in options.processes:
                times: dict[str, Times] = {case: collections.defaultdict(list) for case in cases}

                chosen = dict.fromkeys(cases, options.choices)
                bounds = sorted(min(turns, options.repeat) for turns in most_turns)
                for numbers in itertools.starmap(range, itertools.pairwise(bounds)):
                    loads = []
                    for case, choices in chosen.items():
                        orders = [*itertools.permutations(choices)]
                        name = "tiny" if case == "tiny" else "layers"
                        path = f"{where}/{name}-{sizes[case]:g}"
                        turns = [choice for n in numbers for choice in orders[n % len(orders)]]
                        loads += [(path, case, choice) for choice in (choices[0], *turns)]
                    figures = run(processes, loads, reading, options.timeout)
                    before = ""
                    for (_, case, choice), (seconds, nbytes) in zip(loads, figures, strict=True):
                        if case == before:  # the first load of each case has to get its memory
                            times[case][choice].append(seconds)
                            times[case][f"{choice} bytes"].append(nbytes)
                        before = case
                    chosen = {
                        case: near
                        for case in chosen
                        if not _is_known(times[case], near := _near(times[case], options.choices))
                    }
                    if not chosen:
                        break
                for case, of_case in times.items():
                    yield f"{storage}:{case}:{processes}", of_case
        finally:
            if server is not None:
                server.kill()


def _near(times: Times, choices: list[str]) -> list[str]:
    """Return the choices that may be the better one, and "auto"."""
    best = min(min(times[choice]) for choice in choices)
    return [c for c in choices if c == "auto" or min(times[c]) <= FAR_SLOWER * best]


def _is_known(times: Times, choices: list[str]) -> bool:
    """Whether more turns would not change what is said of a case."""
    error = _error(times, choices)
    return error <= MOST_ERROR or _ratio(times, choices) + 2 * error <= MOST


def _ratio(times: Times, choices: list[str]) -> float:
    """Return the time of "auto" in that of the better fixed choice; 0 where there is but one."""
    quartiles = {choice: _lower_quartile(times[choice]) for choice in choices}
    fixed = [seconds for choice, seconds in quartiles.items() if choice != "auto"]
    return quartiles["auto"] / min(fixed) if "auto" in quartiles and fixed else 0


def _error(times: Times, choices: list[str]) -> float:
    """Return the relative standard error of the ratio of lower quartiles."""
    if any(len(times[choice]) <= FIRST_TURNS for choice in choices):
        return math.inf
    rng = np.random.default_rng(0)
    variance = 0.0
    for choice in choices:
        values = np.array(times[choice])
        quartiles = np.quantile(rng.choice(values, (500, len(values))), 0.25, axis=1)
        variance += (quartiles.std() / quartiles.mean()) ** 2
    return math.sqrt(variance)


def _chosen(options: argparse.Namespace, name: str) -> bool:
    return not options.only or any(name.startswith(word) for word in options.only)


def _lower_quartile(values: list[float]) -> float:
    return float(np.quantile(values, 0.25))


def main() -> None:
    """Prints a table, and the worst of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "osl-exchange")
    parser.add_argument("--only", action="append", default=[], metavar="STORAGE[:CASE]")
    parser.add_argument("--choices", nargs="+", default=["each", "read_once", "auto"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--repeat", type=int, default=MOST_TURNS)
    parser.add_argument("--megabytes", type=float, default=43)
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, ratios, clear = {}, {}, 0
    print("| case | " + " | ".join(f"{c} s (MB)" for c in options.choices) + " | auto / better |")
    print("|---" * (len(options.choices) + 2) + "|")
    for name, of_case in measure(options):
        rows[name] = of_case
        quartiles = {c: _lower_quartile(of_case[c]) for c in options.choices}
        cells = [
            f"{quartiles[choice]:.3f} ({of_case[f'{choice} bytes'][0] / 1e6:,.0f})"
            for choice in options.choices
        ]
        mark = ""
        if ratio := _ratio(of_case, options.choices):
            ratios[name] = ratio
            error = _error(of_case, _near(of_case, options.choices))
            mark = f"{ratio:.3f}" if ratio <= MOST else f"**{ratio:.3f}**"
            mark += f" ± {error:.3f}"
            clear += ratio - 2 * error > MOST
        print(f"| {name} | {' | '.join(cells)} | {mark} |", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows))
    if ratios:
        worst = max(ratios, key=ratios.__getitem__)
        slower = sum(ratio > MOST for ratio in ratios.values())
        print(
            f"\n{len(ratios)} cases, {slower} above {MOST}, {clear} by more than twice the standard"
            f" error; the worst {ratios[worst]:.3f}, {worst}"
        )
        enough = len(ratios) >= LEAST_CASES or options.only
        raise SystemExit(1 if slower or not enough else 0)


if __name__ == "__main__":
    main()
