"""The command line: `orbax-safetensors VERB ...`, also `python -m orbax_safetensors_layout`.

Exit codes: 0, 1 where something is wrong with a checkpoint, 2 for misuse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.options import WriteOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Args:
        arguments: What stands after the program's name; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        _consolidate(parsed)
    except (SafetensorsLayoutError, ValueError, OSError) as error:
        if parsed.debug:
            raise
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orbax-safetensors")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser(
        "consolidate",
        help="make Hugging Face files of a checkpoint that was saved in pieces",
        description="Makes files that safetensors and transformers open from a checkpoint that was"
        " saved with WriteOptions(layout='sharded'), streaming, in bounded memory.",
        epilog="example: orbax-safetensors consolidate run/1000/default exported --progress",
    )
    verb.add_argument("path", help="the checkpoint")
    verb.add_argument(
        "target", nargs="?", help="the folder to write; by default the pieces are replaced"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace a checkpoint at TARGET")
    verb.add_argument("--max-file-bytes", type=int, default=WriteOptions().max_file_bytes)
    verb.add_argument("--memory-budget-bytes", type=int)
    verb.add_argument("--progress", action="store_true", help="draw a bar on stderr")
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _consolidate(parsed: argparse.Namespace) -> None:
    from orbax_safetensors_layout.consolidate import consolidate

    options = WriteOptions(
        max_file_bytes=parsed.max_file_bytes,
        memory_budget_bytes=parsed.memory_budget_bytes,
        progress=parsed.progress,
    )
    consolidate(parsed.path, parsed.target, options=options, overwrite=parsed.overwrite)
