"""`plan`: estimates a load or a save for a cluster."""

from __future__ import annotations

import argparse
import itertools
import shlex
from typing import Any

from orbax_safetensors_layout.analysis import ClusterEstimate, estimate, estimate_save
from orbax_safetensors_layout.catalog import resolve_checkpoint
from orbax_safetensors_layout.errors import redact_urls
from orbax_safetensors_layout.options import ReadOptions, WriteOptions
from orbax_safetensors_layout.runtime import parse_seconds, parse_size
from orbax_safetensors_layout.sharding import MeshShape, ShardingRule
from orbax_safetensors_layout.storage import open_storage

from .command import (
    Command,
    CommandParser,
    add_cache,
    add_json,
    add_mapping,
    add_max_file_bytes,
    add_memory_budget,
    add_mesh,
    add_step,
    argument,
    cache_options,
    find_mapping,
    python_object,
    sharding_rules,
)
from .output import Output
from .plan_text import comparison_text, estimate_document, estimate_text

_AUTO = ShardingRule(".*", None)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "path",
        nargs="?",
        help="a .safetensors file, a folder of them, or what Orbax saved in its own format, as"
        " Orbax itself reads it",
    )
    add_step(parser)
    add_mesh(
        parser,
        "axes of the mesh, outermost first: fsdp=64,tensor=4",
        ": a regular expression of names, and for each dimension the axes that split it ('-' for"
        " none, '+' between several), or 'replicated', or 'auto': the outermost dimension that the"
        " most devices divide. May be repeated; the first that matches counts. A file has one a"
        " line",
    )
    add_mapping(parser, "load through this")
    add(
        "--abstract",
        metavar="MODULE:ATTRIBUTE",
        help="load this abstract tree, or that which a function returns, of a Python module or"
        " FILE.py; its shardings count where it has some",
    )
    add("--concurrency", type=int, metavar="N", help="requests at once")
    add("--latency", type=argument(parse_seconds), metavar="TIME", help="of a request, as 20ms")
    add(
        "--bandwidth",
        type=argument(parse_size),
        metavar="RATE",
        help="of one stream, as 500MB/s, 2GiB/s; says with --latency which gaps are read through",
    )
    add(
        "--host-bandwidth",
        type=argument(parse_size),
        metavar="RATE",
        help="of a host with all its streams; default: local files one stream's, else all streams',"
        " at most 25 Gbit/s",
    )
    add(
        "--shared-bandwidth",
        type=argument(parse_size),
        metavar="RATE",
        help="of the storage, for all hosts together; default 25GB/s",
    )
    add(
        "--replicated",
        choices=["auto", "each", "read_once"],
        default="auto",
        help="who reads what several hosts need: each of them, or one, and they exchange it;"
        " auto, the default: what takes less time",
    )
    add_memory_budget(parser)
    add_cache(parser)
    add("--top", type=int, default=5, metavar="N", help="how many costly tensors to name")
    add(
        "--compare",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="another plan beside this one: the options that differ, as '--mesh fsdp=256'; a path"
        " is another layout. May be repeated",
    )
    add(
        "--save",
        nargs="?",
        const="hf",
        choices=["hf", "sharded"],
        metavar="LAYOUT",
        help="plan a save of the same tensors, in layout hf (default) or sharded",
    )
    add_max_file_bytes(parser, "of a save: most bytes of tensors in a file")
    add("--plot", metavar="PNG", help="draw which host reads what (needs matplotlib)")
    add("--plot-files", default="*", metavar="GLOB", help="draw only files of such names")
    add_json(parser)


def _run(parsed: argparse.Namespace, output: Output) -> int:
    variants = [parsed, *(_variant(parsed, text) for text in parsed.compare)]
    if parsed.plot and (parsed.mapping or parsed.abstract or parsed.save is not None):
        raise ValueError(
            "--plot draws loads of plain tensors, without --mapping, --abstract, --save"
        )
    if len({variant.save is None for variant in variants}) > 1:
        raise ValueError("a load and a save cannot be compared")
    if parsed.plot:
        from .plot import draw
    results = [_estimate(variant) for variant in variants]
    labels = ["this", *map(redact_urls, parsed.compare)]
    if parsed.json:
        documents = [estimate_document(result, parsed.top) for result in results]
        document = dict(zip(labels, documents, strict=True)) if parsed.compare else documents[0]
        output.json(document)
    elif parsed.compare:
        output.result(comparison_text(labels, results))
    else:
        output.result(estimate_text(results[0], parsed.top))
    if parsed.plot:
        draw(results[0], parsed.plot, parsed.plot_files)
        output.message(f"drew {parsed.plot}")
    for rule in dict.fromkeys(itertools.chain(*(result.unused_rules for result in results))):
        if rule is not _AUTO:
            output.message(f"the rule {rule} is used by no tensor")
    misfits = len({misfit.name for result in results for misfit in result.misfits})
    if misfits:
        output.message(f"{misfits:,} tensors do not fit their rule; a load would refuse them")
    return 1 if misfits else 0


def _variant(base: argparse.Namespace, text: str) -> argparse.Namespace:
    """Return the arguments of `--compare`, with those of the first plan as defaults."""
    parser = CommandParser(prog="--compare", argument_default=argparse.SUPPRESS)
    _add_arguments(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return argparse.Namespace(**{**vars(base), **vars(parser.parse_args(shlex.split(text)))})


def _estimate(parsed: argparse.Namespace) -> ClusterEstimate:
    if parsed.path is None:
        raise ValueError("name the checkpoint: plan PATH --mesh ...")
    if parsed.mapping and parsed.abstract:
        raise ValueError(
            "--mapping and --abstract exclude each other: through a mapping all leaves are planned"
            " that the checkpoint gives; leave out --abstract"
        )
    with open_storage(parsed.path)[0] as storage:
        kind = storage.kind

    def of_class(rate: float | None) -> dict[str, float]:
        return {} if rate is None else {kind: float(rate)}

    abstract = None if parsed.abstract is None else python_object(parsed.abstract)
    if callable(abstract):
        abstract = abstract()
    path = resolve_checkpoint(parsed.path, step=parsed.step, item=parsed.item).path
    loading = estimate(
        path,
        _mesh_shape(parsed, abstract),
        sharding_rules(parsed.spec) or (_AUTO,),
        mapping=parsed.mapping and find_mapping(parsed.mapping, path),
        abstract=abstract,
        options=ReadOptions(
            concurrency=parsed.concurrency,
            memory_budget_bytes=parsed.memory_budget_bytes,
            latency_seconds={} if parsed.latency is None else {kind: parsed.latency},
            bandwidth_bytes_per_second=of_class(parsed.bandwidth),
            host_bandwidth_bytes_per_second=of_class(parsed.host_bandwidth),
            shared_bandwidth_bytes_per_second=of_class(parsed.shared_bandwidth),
            replicated=parsed.replicated,
            **cache_options(parsed),
        ),
    )
    if parsed.save is None:
        return loading
    writing = WriteOptions(layout=parsed.save, max_file_bytes=parsed.max_file_bytes)
    return estimate_save(loading, writing)


def _mesh_shape(parsed: argparse.Namespace, abstract: Any) -> MeshShape:
    axes = parsed.mesh
    if axes is None and abstract is not None:
        from orbax_safetensors_layout.analysis import mesh_of

        axes = mesh_of(abstract)
    if axes is None:
        raise ValueError("name the mesh: --mesh fsdp=64,tensor=4")
    of_host = parsed.processes_per_host
    return MeshShape(axes, parsed.hosts * of_host, of_host)


COMMAND = Command(
    name="plan",
    help="what a load or a save will cost every host of a cluster",
    description="Works out from the headers alone what each host of a cluster reads when a"
    " checkpoint is loaded onto a mesh, or writes in a save: bytes, requests, files, memory and an"
    " estimated time; which tensors cost most, and what would mend it. It needs neither the"
    " devices nor, without a mapping or an abstract tree, JAX.",
    examples=(
        "plan DeepSeek-V3 --mesh fsdp=64,tensor=4 --hosts 64",
        "plan Llama-3.1-405B --mesh fsdp=64,tensor=4 --hosts 64"
        " --spec \"'.*(q|k|v|gate|up)_proj.weight' = tensor,fsdp\" --spec \"'.*' = auto\"",
        "plan Llama-3.1-405B --mesh fsdp=256 --hosts 64 --compare '--mesh fsdp=64,tensor=4'",
        "plan DeepSeek-V3 --mesh fsdp=1024 --hosts 256 --latency 30ms --bandwidth 1GB/s --plot"
        " reads.png",
        "plan Llama-3.1-8B --mesh fsdp=16 --hosts 4 --family llama:maxtext",
        "plan Llama-3.1-405B --mesh fsdp=256 --hosts 64 --save --compare '--save sharded'",
    ),
    add_arguments=_add_arguments,
    run=_run,
)
