"""`consolidate`: makes files of whole tensors from pieces."""

from __future__ import annotations

import argparse

from orbax_safetensors_layout.options import WriteOptions

from .command import Command, add_max_file_bytes, add_memory_budget
from .output import Output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", help="the checkpoint")
    add("target", nargs="?", help="the folder to write; by default the pieces are replaced")
    add("--overwrite", action="store_true", help="replace a checkpoint at TARGET")
    add_max_file_bytes(parser, "most bytes of tensors in a file")
    add_memory_budget(parser, "host memory to use", default=None)


def _run(parsed: argparse.Namespace, output: Output) -> int:
    from orbax_safetensors_layout.conversion import consolidate

    options = WriteOptions(
        max_file_bytes=parsed.max_file_bytes,
        memory_budget_bytes=parsed.memory_budget_bytes,
        progress=output.progress,
    )
    consolidate(parsed.path, parsed.target, options=options, overwrite=parsed.overwrite)
    return 0


VERB = Command(
    name="consolidate",
    help="make Hugging Face files of a checkpoint that was saved in pieces",
    description="Makes files that safetensors and transformers open from a checkpoint that was"
    " saved with WriteOptions(layout='sharded'), streaming, in bounded memory.",
    examples=("consolidate run/1000/default exported",),
    add_arguments=_add_arguments,
    run=_run,
    resume=lambda _: "The checkpoint is as it was; run the same command again.",
)
