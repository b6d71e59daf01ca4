"""The interface of a command, and what commands share."""

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
    """Return a `type` of argparse that reports the text of a `ValueError` of `parse`."""

    def parsed(text: str) -> Argument:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Modules of commands import the operation only in `run`, so that help is quick and `inspect` and
    `plan` need no JAX.

    Attributes:
        name: Its name.
        help: Its purpose, one line.
        description: Its purpose, a paragraph.
        examples: Command lines without the program's name.
        add_arguments: Adds its arguments to a parser, but for `--quiet` and `--debug`.
        run: Runs it; returns the exit code.
        resume: Returns the message of an interrupt: the state left, and how to continue.
    """

    name: str
    help: str
    description: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]
    resume: Callable[[argparse.Namespace], str] = lambda _: "Nothing was changed; run it again."


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
