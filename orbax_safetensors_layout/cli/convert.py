"""`convert` and `consolidate`: write a checkpoint anew, streaming, in bounded memory."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from orbax_safetensors_layout.errors import SafetensorsLayoutError, redact_urls
from orbax_safetensors_layout.options import ConvertOptions, WriteOptions
from orbax_safetensors_layout.runtime import size_text

from .command import (
    Command,
    add_cache,
    add_drop,
    add_mapping,
    add_max_file_bytes,
    add_memory_budget,
    add_mesh,
    add_step,
    cache_options,
    find_mapping,
    sharding_rules,
)
from .output import Output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="a safetensors folder or file, or what Orbax saved")
    add("target", help="the folder to write")
    add(
        "--format",
        choices=("hf", "sharded", "orbax"),
        help="of the target; default orbax for a Hugging Face source, hf for others",
    )
    add_step(parser, "; an Orbax target is then the same step")
    add("--subtree", metavar="NAME", help="convert a part of the tree, as params.params")
    add_mapping(parser, "names and shapes")
    add(
        "--dequantize",
        metavar="DTYPE",
        help="decode quantised weights of every known format to this dtype, as bfloat16",
    )
    add(
        "--quantize",
        metavar="FORMAT",
        help="write weights quantised: fp8_block, fp8_channel, deepseek_fp8, int4, mxfp4, nvfp4 or"
        " gpt_oss_mxfp4",
    )
    for name, effect in (
        ("only", "modules that are, by default '*_proj' and '*_proj_*'"),
        ("not", "modules that are not"),
    ):
        add(f"--quantize-{name}", action="append", metavar="GLOB", help=f"{effect}; repeatable")
    add(
        "--config",
        metavar="FOLDER",
        help="of the model's config.json and tokenizer, for a ready mapping and to be put beside"
        " safetensors files; default SOURCE if it is of Hugging Face",
    )
    add(
        "--leave-out",
        action="append",
        metavar="GLOB",
        help="tensors of --config that no rule takes and that a model may be saved without, as"
        " 'vision_tower.*'; may be repeated",
    )
    add_drop(parser, "leaves that an export leaves out")
    add("--dtype", help="write floating-point arrays in this dtype")
    add_mesh(
        parser,
        "store the shards of this mesh, axes outermost first: fsdp=16,tensor=4",
        ", as for plan",
    )
    add_max_file_bytes(parser, "most bytes of tensors in a Hugging Face file")
    for name, effect in (
        ("ocdbt", "a file a chunk in place of OCDBT databases"),
        ("zarr3", "version 2 of zarr in place of 3"),
        ("compression", "chunks as they are in place of zstd"),
    ):
        add(f"--no-{name}", action="store_true", help=f"of Orbax: {effect}")
    add_memory_budget(parser, "host memory to use, whatever the checkpoint's size; default 2GiB")
    add_cache(parser)
    add("--code", action="store_true", help="take a model's own modules (*.py) along, too")
    add("--no-verify", action="store_true", help="do not read back and compare")
    add(
        "--overwrite",
        action="store_true",
        help="replace a checkpoint at TARGET; in a step the items that are converted, no others",
    )
    add("--restart", action="store_true", help="drop what an interrupted conversion has done")


def _run(parsed: argparse.Namespace, output: Output) -> int:
    from orbax_safetensors_layout.convert import convert

    options = ConvertOptions(
        memory_budget_bytes=parsed.memory_budget_bytes,
        dtype=parsed.dtype,
        max_file_bytes=parsed.max_file_bytes,
        use_ocdbt=not parsed.no_ocdbt,
        use_zarr3=not parsed.no_zarr3,
        use_compression=not parsed.no_compression,
        verify=not parsed.no_verify,
        code=parsed.code,
        progress=not output.quiet,
        **cache_options(parsed),
    )
    done = convert(
        parsed.source,
        parsed.target,
        format=parsed.format,
        mapping=_mapping(parsed),
        dequantize=parsed.dequantize,
        quantize=_quantization(parsed),
        mesh=parsed.mesh,
        spec=sharding_rules(parsed.spec),
        processes=parsed.hosts * parsed.processes_per_host,
        step=parsed.step,
        item=parsed.item,
        subtree=parsed.subtree,
        config=parsed.config,
        options=options,
        overwrite=parsed.overwrite,
        restart=parsed.restart,
    )
    if done.resumed_bytes:
        output.message(f"{size_text(done.resumed_bytes)} were there from an earlier run")
    compared = "not compared" if parsed.no_verify else "every bit compared"
    arrays = "1 array" if done.tensors == 1 else f"{done.tensors:,} arrays"
    output.message(f"{arrays}, {size_text(done.nbytes)}, {compared}")
    output.result(done.path)
    return 0


def _mapping(parsed: argparse.Namespace) -> Any:
    if parsed.leave_out and not (parsed.mapping and parsed.config):
        raise ValueError("--leave-out goes with --mapping and --config")
    if not parsed.mapping:
        if parsed.drop:
            raise ValueError("--drop goes with --mapping")
        return None
    mapping = find_mapping(parsed.mapping, parsed.config or parsed.source, parsed.drop)
    return mapping.like(parsed.config, leave_out=parsed.leave_out) if parsed.leave_out else mapping


def _quantization(parsed: argparse.Namespace) -> Any:
    only, left = parsed.quantize_only, parsed.quantize_not
    if parsed.quantize is None:
        if only or left:
            raise ValueError("--quantize-only and --quantize-not go with --quantize")
        return None
    from orbax_safetensors_layout.mapping import Quantization

    modules = {} if only is None else {"modules": only}
    return Quantization(parsed.quantize, ignore=left or (), **modules)


def _resume(parsed: argparse.Namespace) -> str:
    from orbax_safetensors_layout.catalog import find_step
    from orbax_safetensors_layout.storage import local_path, partial_folder

    target = os.path.realpath(local_path(parsed.target) or parsed.target)
    places = [target]
    if parsed.step is not None:
        with contextlib.suppress(SafetensorsLayoutError):
            step = find_step(parsed.source, step=parsed.step)
            places.append(os.path.join(target, os.path.basename(step.path)))
    for path in places:
        folder = partial_folder(path, "convert")
        if os.path.isdir(folder):
            return (
                f"The files written so far stay in {folder}; the same command continues there, with"
                " --restart it begins anew."
            )
    return "Nothing was written; run it again."


CONVERT = Command(
    name="convert",
    help="make a checkpoint of any kind into one of any other, in bounded memory",
    description="Streams Hugging Face safetensors, layout 'sharded' or an Orbax checkpoint into"
    " any of these, through a mapping, in another dtype, cut into the shards of a mesh. Memory is"
    " bounded, each byte is read once, and what was interrupted is continued.",
    examples=(
        "convert Llama-3.1-405B llama-orbax --mesh fsdp=16",
        "convert Llama-3.1-8B maxtext --mapping llama:maxtext --mesh fsdp=64 --dtype bfloat16",
        "convert runs/a exported --step 1000 --subtree params --mapping llama:maxtext"
        " --config Llama-3.1-8B",
        "convert DeepSeek-V3 plain --format hf --dequantize bfloat16",
        "convert llama-orbax llama-pieces --format sharded --mesh fsdp=64,tensor=4 --hosts 64",
    ),
    add_arguments=_add_arguments,
    run=_run,
    resume=_resume,
)


def _add_consolidate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", help="the checkpoint")
    add("target", nargs="?", help="the folder to write; by default the pieces are replaced")
    add("--overwrite", action="store_true", help="replace a checkpoint at TARGET")
    add_max_file_bytes(parser, "most bytes of tensors in a file")
    add_memory_budget(parser, "host memory to use", default=None)


def _run_consolidate(parsed: argparse.Namespace, output: Output) -> int:
    from orbax_safetensors_layout.conversion import consolidate

    options = WriteOptions(
        max_file_bytes=parsed.max_file_bytes,
        memory_budget_bytes=parsed.memory_budget_bytes,
        progress=not output.quiet,
    )
    consolidate(parsed.path, parsed.target, options=options, overwrite=parsed.overwrite)
    return 0


def _resume_consolidate(parsed: argparse.Namespace) -> str:
    from orbax_safetensors_layout.storage import local_path, partial_folder

    target = parsed.target or parsed.path
    if local_path(target) is not None:
        return "The checkpoint is as it was; run the same command again."
    place = redact_urls(partial_folder(target))
    return f"The checkpoint is as it was; if files of it are gone, all of it is in {place}."


CONSOLIDATE = Command(
    name="consolidate",
    help="make Hugging Face files of a checkpoint that was saved in pieces",
    description="Makes files that safetensors and transformers open from a checkpoint that was"
    " saved with WriteOptions(layout='sharded'), streaming, in bounded memory.",
    examples=("consolidate run/1000/default exported",),
    add_arguments=_add_consolidate_arguments,
    run=_run_consolidate,
    resume=_resume_consolidate,
)
