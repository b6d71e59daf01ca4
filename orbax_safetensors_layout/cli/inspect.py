"""`inspect`: the content of a checkpoint."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orbax_safetensors_layout.analysis import (
    InspectedTensor,
    Inspection,
    Total,
    inspect,
    inspect_dequantized,
    inspect_orbax,
)
from orbax_safetensors_layout.catalog import resolve_checkpoint
from orbax_safetensors_layout.errors import listed
from orbax_safetensors_layout.runtime import count_text, number_text, size_text

from .command import Command, add_json, add_step
from .output import Output, name_families, table

_SORT_KEYS: dict[str, Callable[[InspectedTensor], Any]] = {
    "name": lambda tensor: tensor.name,
    "size": lambda tensor: -tensor.nbytes,
    "file": lambda tensor: tensor.files,
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", help="a .safetensors file, a folder of them, or what Orbax saved in its own format")
    add_step(parser)
    add(
        "--filter",
        action="append",
        metavar="GLOB",
        help="only tensors that match, as 'model.layers.{0..3}.*'; may be given several times",
    )
    add("--files", action="store_true", help="a row a file, not a row a tensor")
    add("--all", action="store_true", help="a row for every tensor, not for every pattern")
    add(
        "--dequantize",
        metavar="DTYPE",
        help="show quantised weights as they are decoded to this dtype, as bfloat16",
    )
    add("--sort", choices=[*_SORT_KEYS], help="default: the order of the files")
    add_json(parser)


def _run(parsed: argparse.Namespace, output: Output) -> int:
    ref = resolve_checkpoint(parsed.path, step=parsed.step, item=parsed.item)
    if parsed.dequantize and ref.is_orbax:
        raise ValueError("--dequantize is for safetensors, and Orbax saved this in its own format")
    if parsed.dequantize:
        report = inspect_dequantized(ref.path, parsed.dequantize, only=parsed.filter)
    else:
        list_content = inspect_orbax if ref.is_orbax else inspect
        report = list_content(ref.path, only=parsed.filter)
    if parsed.sort:
        report = report._replace(tensors=tuple(sorted(report.tensors, key=_SORT_KEYS[parsed.sort])))
    if parsed.json:
        output.json(_document(report))
        return 0
    rows = _by_file(report) if parsed.files else _by_tensor(report, every=parsed.all)
    totals = report.by_dtype() | {"all": report.total}
    sums = [[code, *_sums(total)] for code, total in totals.items()]
    footer = table(["dtype", "tensors", "parameters", "bytes"], sums)
    output.result("\n".join([*_head(report), "", rows, "", footer]))
    return 0


def _head(report: Inspection) -> list[str]:
    lines = [report.path]
    if report.model:
        lines.append(f"model        {report.model}")
    lines.append(f"layout       {report.layout}, {number_text(len(report.files), 'file')}")
    quantization = report.quantization
    if quantization is not None:
        stored = [f"{count:,} x {scheme}" for scheme, count in quantization.weights.items()]
        said = [f"the configuration says {quantization.method}"] if quantization.method else []
        lines.append(f"quantised    {'; '.join(stored + said)}")
    if report.problem:
        lines.append(f"problem      {report.problem}")
    for label, pairs in (("metadata", report.metadata), ("values", report.values)):
        if pairs:
            texts = ((key, str(value)) for key, value in pairs.items())
            shown = [f"{k}={text if len(text) <= 60 else text[:57] + '...'}" for k, text in texts]
            lines.append(f"{label:13}{listed(shown)}")
    return lines


def _by_tensor(report: Inspection, *, every: bool) -> str:
    if every:
        groups = [(t.name, [t]) for t in report.tensors]
    else:
        kinds = [(t.name, (t.dtype, t.shape)) for t in report.tensors]
        groups = [
            (family.pattern, [report.tensors[place] for place in family.members])
            for family in name_families(kinds)
        ]
    rows = []
    for name, tensors in groups:
        first = tensors[0]
        files = {file for tensor in tensors for file in tensor.files}
        if report.layout == "orbax":
            where = number_text(first.pieces, "chunk")
        else:
            pieces = f" ({first.pieces} pieces)" if first.pieces > 1 else ""
            where = (first.files[0] if len(files) == 1 else f"{len(files)} files") + pieces
        rows.append([name, first.dtype, str(list(first.shape)), where, *_sums(Total.of(tensors))])
    header = ["tensor", "dtype", "shape", "file", "tensors", "parameters", "bytes"]
    return table(header, rows, left=4, optional="file")


def _by_file(report: Inspection) -> str:
    tensors: dict[str, list[InspectedTensor]] = defaultdict(list)
    for tensor in report.tensors if report.layout == "hf" else ():
        tensors[tensor.files[0]].append(tensor)
    rows = []
    for file, size in report.files.items():
        counts = _sums(Total.of(tensors[file]))[:2] if report.layout == "hf" else ["-", "-"]
        rows.append([file, size_text(size), *counts])
    return table(["file", "size", "tensors", "parameters"], rows)


def _sums(total: Total) -> list[str]:
    return [f"{total.tensors:,}", count_text(total.parameters), size_text(total.nbytes)]


def _json(value: object) -> object:
    """Return a value that JSON has: NaN, infinity and complex numbers become text."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number or value is None or isinstance(value, str) else str(value)


def _document(report: Inspection) -> dict[str, object]:
    quantization = report.quantization
    stored = quantization and {"method": quantization.method, "weights": quantization.weights}
    return report._asdict() | {
        "quantization": stored,
        "values": {name: _json(value) for name, value in report.values.items()},
        "total": report.total._asdict(),
        "by_dtype": {code: total._asdict() for code, total in report.by_dtype().items()},
        "tensors": [tensor._asdict() for tensor in report.tensors],
    }


COMMAND = Command(
    name="inspect",
    help="what a checkpoint holds",
    description="Tells the tensors of a checkpoint with their shapes, dtypes, files and"
    " parameters, what is quantised, metadata and totals. Only headers are read, or the metadata"
    " of what Orbax saved. Tensors that differ by numbers alone share a row; its name is a pattern"
    " that --filter takes.",
    examples=(
        "inspect Llama-3.1-8B --sort size",
        "inspect run/1000/default --filter 'params.layers.0.*' --all",
        "inspect runs/a/1000",
        "inspect DeepSeek-V3 --dequantize bfloat16",
        "inspect DeepSeek-V3 --json | jq .total.parameters",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
