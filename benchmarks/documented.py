#!/usr/bin/env python3
"""Runs the comparisons whose figures the README and docs show, all from one commit.

    python benchmarks/documented.py FOLDER            three hours on an idle machine; 50 GB of disk
    python benchmarks/documented.py FOLDER --quick    the same with small sizes, once each

Each program's report is put into FOLDER when it ends, and all into `all.md`, with the commit.
Programs whose report is there are not run again, so that a run that was broken off goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness import BENCHMARKS


class Part(NamedTuple):
    """One program of a run.

    Attributes:
        name: Of its report.
        command: The program and what it is given.
        sizes: What it is given besides, where not the folder of files and repetitions.
        quick: That of a quick run, where not the folder and `--quick`.
    """

    name: str
    command: tuple[str, ...]
    sizes: tuple[str, ...] = ("--dir", "FILES", "--repeat", "REPEAT")
    quick: tuple[str, ...] = ("--dir", "FILES", "--quick")


def _only(*rows: str) -> tuple[str, ...]:
    return tuple(part for row in rows for part in ("--only", row))


_FOUR = ("dim0", "dim1", "2d", "replicated")
_LARGE = ("ours", "builtin", "load_file", "ocdbt")

_CLUSTER = ("--dir", "FILES/cluster")
_SMALL_CLUSTER = (*_CLUSTER, "--only", "llama", "--layers", "2", "--meshes", "4 x 2")
_EXCHANGES = ("--dir", "FILES/exchange")
_SMALL_EXCHANGES = (*_EXCHANGES, "--megabytes", "2", "--repeat", "1")

PARTS = (
    Part(
        "load",
        (
            "load.py",
            *_only(*(f"llama:{split}:warm" for split in _FOUR)),
            *_only("moe:dim0:warm", "moe:dim1:warm", "moe:2d:warm", "mini:replicated:warm"),
            *("--contenders", ",".join(_LARGE)),
        ),
    ),
    Part(
        "load-small",
        ("load.py", *_only("small:dim0:warm", "small:dim1:warm"), "--contenders", ",".join(_LARGE)),
    ),
    Part(
        "load-tiny",
        (
            "load.py",
            *_only("tiny:replicated:warm", "tiny:dim0:warm"),
            *("--contenders", "ours,builtin,load_file"),
        ),
    ),
    Part(
        "load-cold",
        ("load.py", *_only("llama:dim0:cold"), "--contenders", ",".join((*_LARGE, "odirect"))),
    ),
    Part(
        "load-first",
        (
            "load.py",
            *_only("llama:dim0:first", "llama:2d:first", "llama:replicated:first"),
            *("--contenders", "ours,idiom"),
        ),
    ),
    Part(
        "load-mmap",
        ("load.py", *_only("aligned:dim0:warm"), "--contenders", "ours-mmap,ours"),
    ),
    Part("mapping", ("mapping.py",)),
    Part(
        "save",
        (
            "save.py",
            *_only("llama:dim0:loaded", "small:dim0:loaded"),
            *("--contenders", "ours,ours-fsync,flax,flax-fsync,ocdbt,ocdbt-fsync,dcp,dcp-fsync"),
        ),
    ),
    Part(
        "remote",
        ("remote.py", "--scale", "0.25", "--bandwidth", "2e6", "--repeat", "1"),
    ),
    Part("plan", ("plan.py",), (), ()),
    Part("plan-deepseek", ("plan.py", "--model", "deepseek-dequantized"), (), ("--repeat", "1")),
    Part("plan-kimi", ("plan.py", "--model", "kimi-dequantized"), (), ("--repeat", "1")),
    Part("cluster-reads", ("cluster_reads.py", "--hosts", "4"), _CLUSTER, _SMALL_CLUSTER),
    Part("convert", ("convert.py",), ("FILES/convert",), ("FILES/convert", "--gigabytes", "0.5")),
    Part("apply", ("apply.py",), (), ("--scale", "0.1")),
    Part("export", ("export.py",), (), ("--scale", "0.1")),
    *(
        Part(
            f"exchange-{storage}-{processes}",
            ("exchange.py", "--only", storage, "--processes", str(processes)),
            _EXCHANGES,
            _SMALL_EXCHANGES,
        )
        for storage in ("far", "local")
        for processes in (2, 4, 8)
    ),
)


def report(part: Part, folder: Path, *, quick: bool, repeat: int) -> str:
    """Run a program, and return what it printed, with its command and what it took."""
    sizes = part.quick if quick else part.sizes
    command = [
        word.replace("FILES", str(folder / "files")).replace("REPEAT", str(repeat))
        for word in (part.command[0], *sizes, *part.command[1:])
    ]
    began = time.monotonic()
    print("...", *command, file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / command[0], *command[1:]],
        stdout=subprocess.PIPE,
        text=True,
    )
    took = time.monotonic() - began
    outcome = "" if done.returncode == 0 else f", exit status {done.returncode}"
    shown = " ".join(command).replace(str(folder), "FOLDER")
    return f"## {part.name}\n\n`{shown}`: {took:.0f} s{outcome}\n\n{done.stdout}\n"


def commit() -> str:
    """The commit that is measured; "+" if the files differ from it."""
    git = ("git", "-C", str(BENCHMARKS.parent))
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run([*git, "status", "--short"], capture_output=True, text=True)
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def main() -> None:
    """Run what is not there yet, and put all reports together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        file = folder / f"{part.name}.md"
        if not file.exists():
            text = report(part, folder, quick=arguments.quick, repeat=arguments.repeat)
            file.write_text(f"{text}commit {commit()}\n")
    reports = "\n".join((folder / f"{part.name}.md").read_text() for part in PARTS)
    (folder / "all.md").write_text(reports)
    print(reports)


if __name__ == "__main__":
    main()
