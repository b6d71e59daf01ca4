"""The interface of a command, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from orbax_safetensors_layout.errors import MappingError, redact_urls
from orbax_safetensors_layout.options import KIB, ReadOptions, WriteOptions
from orbax_safetensors_layout.runtime import parse_size
from orbax_safetensors_layout.sharding import ShardingRule, parse_rules

from .output import PROGRAM, Output

MISUSE = 2  # the exit code
_USUAL_BUDGET_BYTES = ReadOptions().memory_budget_bytes
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command; `examples` lack the program's name."""

    name: str
    help: str
    description: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    # It returns the exit code, and imports the operation: help is quick, `inspect` needs no JAX.
    run: Callable[[argparse.Namespace, Output], int]
    # The state that an interrupt left, and how to continue.
    resume: Callable[[argparse.Namespace], str] = lambda _: "Nothing was changed; run it again."


class CommandParser(argparse.ArgumentParser):
    """Reports misuse as other errors are, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        where = self.prog.removeprefix(PROGRAM).strip()
        message = f"{redact_urls(message)} (see --help)"
        Output().error(f"{where}: {message}" if where else message)
        sys.exit(MISUSE)


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a `type` of argparse that reports the text of a `ValueError` of `parse`."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def add_step(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Adds `--step` and `--item`; see `resolve_checkpoint`."""
    add = parser.add_argument
    add("--step", type=int, metavar="N", help=f"a step of a CheckpointManager's directory{note}")
    add("--item", metavar="NAME", help="an item of a step, where there are several")


def add_memory_budget(
    parser: argparse.ArgumentParser,
    help: str = "default 2GiB",
    default: int | None = _USUAL_BUDGET_BYTES,
) -> None:
    """Adds `--memory-budget-bytes`."""
    parser.add_argument(
        "--memory-budget-bytes",
        type=argument(_memory_budget),
        default=default,
        metavar="SIZE",
        help=help,
    )


def _memory_budget(text: str) -> int:
    size = parse_size(text)
    if size < 64 * KIB:  # as without a unit
        raise ValueError(
            f"{text} is too little memory to work with; 2GiB is usual, 64KiB the least"
        )
    return size


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Adds `--cache` and `--cache-bytes`; see `cache_options`."""
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="keep what is read of a URL in this folder of the host, for the next time",
    )
    parser.add_argument(
        "--cache-bytes",
        type=argument(parse_size),
        default=ReadOptions().cache_bytes,
        metavar="SIZE",
        help="most bytes in it; default 100GiB",
    )


def cache_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options that `--cache` and `--cache-bytes` give."""
    return {"cache": parsed.cache, "cache_bytes": parsed.cache_bytes}


def add_max_file_bytes(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds `--max-file-bytes`."""
    parser.add_argument(
        "--max-file-bytes",
        type=argument(parse_size),
        default=WriteOptions().max_file_bytes,
        metavar="SIZE",
        help=f"{help}; default 5GB",
    )


def add_mesh(parser: argparse.ArgumentParser, help: str, spec_help: str) -> None:
    """Adds `--mesh`, `--hosts`, `--processes-per-host` and `--spec`; see `sharding_rules`."""
    parser.add_argument("--mesh", type=argument(_mesh_axes), metavar="AXES", help=help)
    parser.add_argument(
        "--hosts", type=int, default=1, metavar="N", help="hosts of that mesh; default 1"
    )
    parser.add_argument(
        "--processes-per-host",
        type=argument(_positive),
        default=1,
        metavar="N",
        help="as many as GPUs, where each has a process; default 1",
    )
    parser.add_argument(
        "--spec",
        action="append",
        metavar="RULE|FILE",
        help=f"\"'.*kernel' = fsdp,tensor\"{spec_help}. Default: '.*' = auto",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is not a positive number")
    return int(text)


def _mesh_axes(text: str) -> dict[str, int]:
    axes = {}
    for part in text.split(","):
        name, separator, size = (piece.strip() for piece in part.partition("="))
        if not (name and separator and size.isdecimal() and int(size)) or name in axes:
            raise ValueError(f"{text!r} is not a mesh; write for instance fsdp=64,tensor=4")
        axes[name] = int(size)
    return axes


def sharding_rules(texts: Sequence[str] | None) -> tuple[ShardingRule, ...]:
    """Parse rules, each given as itself or as a file of them; a malformed one is a `ValueError`."""
    rules: list[ShardingRule] = []
    for text in texts or ():
        lines = Path(text).read_text().splitlines() if os.path.isfile(text) else [text]
        rules += parse_rules(lines)
    return tuple(rules)


def add_mapping(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds `--mapping`; see `find_mapping`."""
    parser.add_argument(
        "--mapping",
        "--family",
        metavar="MAPPING",
        help=f"{help}: a ready mapping of osl.families, as 'llama:maxtext-unscanned', 'auto:tunix'"
        " to go by config.json, or an osl.Mapping as MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE",
    )


def add_drop(parser: argparse.ArgumentParser, effect: str) -> None:
    """Adds `--drop`; see `Mapping.drop`."""
    parser.add_argument(
        "--drop",
        action="append",
        metavar="GLOB",
        default=[],
        help=f"{effect}, as '*rngs.*' or 'step'; with --mapping; may be repeated",
    )


def find_mapping(text: str, path: str, drop: Sequence[str] = ()) -> Any:
    """Return the mapping that `--mapping` names; the checkpoint `path` has the configuration."""
    from orbax_safetensors_layout.mapping import find_mapping as find

    _see_working_folder()
    try:
        return find(text, path).drop(*drop)
    except MappingError as error:
        raise ValueError(str(error)) from error


def python_object(text: str) -> Any:
    """Return the object that `MODULE:ATTRIBUTE` or `FILE.py:ATTRIBUTE` names."""
    from orbax_safetensors_layout.mapping import imported

    where, _, name = text.rpartition(":")
    if not (where and name):
        raise ValueError(f"{text!r} is not a MODULE:ATTRIBUTE")
    _see_working_folder()
    try:
        return getattr(imported(where), name)
    except AttributeError as error:
        raise ValueError(f"{text!r}: {error}") from error


def _see_working_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
