"""`families`: lists the model families that have a ready mapping."""

from __future__ import annotations

import argparse
import itertools

from .command import Command, add_json
from .output import Output, table


def _run(parsed: argparse.Namespace, output: Output) -> int:
    from orbax_safetensors_layout.mapping import TARGETS

    if parsed.json:
        output.json(TARGETS)
        return 0
    rows = [
        [name, *("yes" if name in families else "-" for families in TARGETS.values())]
        for name in dict.fromkeys(itertools.chain(*TARGETS.values()))
    ]
    output.result(table(["family", *TARGETS], rows, left=1 + len(TARGETS)))
    return 0


COMMAND = Command(
    name="families",
    help="the model families that have a ready mapping",
    description="Lists the families of Hugging Face models that have a ready mapping, and to which"
    " targets: MaxText's parameter tree, Tunix's models, or a plain tree. `--mapping"
    " FAMILY:TARGET` of plan, convert and verify takes them; `auto` goes by config.json.",
    examples=("families",),
    add_arguments=add_json,
    run=_run,
)
