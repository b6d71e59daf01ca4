"""`verify`: checks that a checkpoint is whole, or equal to another."""

from __future__ import annotations

import argparse
import dataclasses

from orbax_safetensors_layout.catalog import resolve_checkpoint
from orbax_safetensors_layout.options import ReadOptions

from .command import (
    Command,
    add_cache,
    add_drop,
    add_json,
    add_mapping,
    add_memory_budget,
    add_step,
    cache_options,
    find_mapping,
)
from .output import Output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", help="a .safetensors file, a folder of them, or what Orbax saved in its own format")
    add_step(parser, "; of OTHER, too, where that is one")
    add("--against", metavar="OTHER", help="compare with this checkpoint, bit by bit")
    add_mapping(parser, "what the tensors of PATH are made of in OTHER")
    add_drop(parser, "leaves of PATH that are not compared")
    add("--subtree", metavar="NAME", help="compare a part of PATH's tree, as params.params")
    add("--quick", action="store_true", help="do not hold files against their checksums")
    add_memory_budget(parser)
    add_cache(parser)
    add_json(parser)


def _run(parsed: argparse.Namespace, output: Output) -> int:
    from orbax_safetensors_layout.analysis import verify

    if (parsed.mapping or parsed.subtree) and parsed.against is None:
        raise ValueError("--mapping and --subtree say what is compared: give --against OTHER, too")
    mapping = None
    if parsed.mapping:
        source = resolve_checkpoint(
            parsed.against, step=parsed.step, item=parsed.item, by_path=True
        )
        if source.is_orbax:
            raise ValueError(
                "a mapping takes the tensors of a safetensors checkpoint; exchange the two: PATH is"
                " the model, and --against what it is made of"
            )
        mapping = find_mapping(parsed.mapping, source.path, parsed.drop)
    report = verify(
        parsed.path,
        parsed.against,
        mapping=mapping,
        step=parsed.step,
        item=parsed.item,
        subtree=parsed.subtree,
        digests=not parsed.quick,
        options=ReadOptions(
            progress=not output.quiet,
            memory_budget_bytes=parsed.memory_budget_bytes,
            **cache_options(parsed),
        ),
    )
    if parsed.json:
        output.json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        output.result(str(report))
    return 0 if report.ok else 1


COMMAND = Command(
    name="verify",
    help="whether a checkpoint is whole, or equal to another",
    description="Finds all that is wrong with a checkpoint: headers, index, sizes, missing, stray"
    " and doubly held tensors, pieces, and the checksums that WriteOptions(digests=True) leaves."
    " In Orbax's own format every array is read. With --against a checkpoint is"
    " compared with another bit by bit, however the files of either are cut. Exit code 1 for a"
    " finding.",
    examples=(
        "verify Llama-3.1-8B",
        "verify exported --against run/1000/default",
        "verify runs/a/1000 --subtree params --against Llama-3.1-8B --mapping llama:maxtext",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
