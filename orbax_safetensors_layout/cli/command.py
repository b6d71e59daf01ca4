"""What a verb of the command line is."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from .output import Output

Argument = TypeVar("Argument")


class UsageError(Exception):
    """The arguments are malformed, or make no sense together; exit code 2."""


def argument(parse: Callable[[str], Argument]) -> Callable[[str], Argument]:
    """A `type` of argparse that reports what `parse` says."""

    def parsed(text: str) -> Argument:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One verb.

    Modules of verbs import what they work with only in `run`, so that help is quick and `inspect`
    and `plan` need no JAX.

    Attributes:
        name: Its name.
        help: What it does, one line.
        description: What it does, a paragraph.
        examples: Command lines without the program's name.
        add_arguments: Adds its arguments to a parser; `--quiet` and `--debug` are there already.
        run: Does it; returns the exit code.
        resume: Tells whoever interrupts it, given its arguments, what is left and how to continue.
    """

    name: str
    help: str
    description: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]
    resume: Callable[[argparse.Namespace], str] = lambda _: "Nothing was changed; run it again."


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, of verbs that have a result."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
