"""Runs a command: the arguments of the process in, an exit code out."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence

from orbax_safetensors_layout.errors import InvalidArgumentError, SafetensorsLayoutError

from . import families, inspect, plan, verify
from .command import MISUSE, Command, CommandParser
from .convert import CONSOLIDATE, CONVERT
from .output import PROGRAM, Output
from .sigint import INTERRUPTED, clean_interrupts

COMMANDS = (inspect.COMMAND, plan.COMMAND, verify.COMMAND, CONVERT, CONSOLIDATE, families.COMMAND)
_EXPECTED = (SafetensorsLayoutError, OSError, ValueError, ImportError)
_COLUMNS = 76
# A word of a command, quoted or not, with the option that it belongs to.
_WORD = re.compile(r"""(?:--[\w-]+ (?!-))?(?:[^\s"']|"[^"]*"|'[^']*')+""")
_FINDING, _NO_READER = 1, 141  # the last where the reader of stdout is gone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, with the process's arguments by default; return its exit code."""
    root = parser()
    parsed = root.parse_args(arguments)
    if parsed.command is None:
        root.print_help()
        return MISUSE
    command: Command = parsed.command
    output = Output(quiet=parsed.quiet)
    if isinstance(sys.stdout, io.TextIOWrapper):  # bytes of paths that are not text are kept
        sys.stdout.reconfigure(errors="surrogateescape")

    def interrupted() -> str:
        return f"interrupted. {command.resume(parsed)}"

    try:
        with clean_interrupts(lambda: f"{PROGRAM}: {interrupted()}"):
            code = command.run(parsed, output)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        output.error(interrupted())
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except Exception as error:
        if parsed.debug:
            raise
        text = str(error).strip()
        if not (text and isinstance(error, _EXPECTED)):
            text = f"{type(error).__name__}: {text} (--debug shows where)"
        output.error(text)
        if isinstance(error, SafetensorsLayoutError):
            return MISUSE if isinstance(error, InvalidArgumentError) else _FINDING
        return MISUSE if isinstance(error, ValueError | ImportError) else _FINDING


def _version() -> str:
    try:
        return importlib.metadata.version("orbax-safetensors-layout")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "(not installed)"


def _as_typed(example: str) -> str:
    """Return a command in lines of a narrow terminal, which a shell takes as one."""
    lines = [f"  {PROGRAM}"]
    for word in _WORD.findall(example):
        if len(lines[-1]) + len(word) > _COLUMNS:
            lines.append("     ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    root = CommandParser(
        prog=PROGRAM,
        description="Hugging Face safetensors checkpoints for Orbax and JAX.",
        epilog=f"{PROGRAM} COMMAND --help says more. Exit codes: 0, 1 where something is wrong"
        " with a checkpoint, 2 for misuse.",
    )
    root.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    subparsers = root.add_subparsers(metavar="COMMAND")
    root.set_defaults(command=None)
    for command in COMMANDS:
        lines = "".join(f"\n{_as_typed(example)}" for example in command.examples)
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=textwrap.fill(command.description, 79),
            epilog=f"example{'s' if len(command.examples) > 1 else ''}:{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument(
            "--quiet", "-q", action="store_true", help="no progress and no messages"
        )
        subparser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        subparser.set_defaults(command=command)
    return root
