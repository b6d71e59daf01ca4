"""The conversion pipeline: open the source, plan the target, stream groups, commit. Start here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from absl import logging

from orbax_safetensors_layout.adapters import open_reader
from orbax_safetensors_layout.catalog import (
    StepItems,
    find_step,
    holds_checkpoint,
    is_orbax_checkpoint,
    is_safetensors_checkpoint,
    replaced_files,
    resolve_checkpoint,
)
from orbax_safetensors_layout.conversion import (
    CheckpointReader,
    Conversion,
    FilesTarget,
    SafetensorsReader,
    StepConversion,
    Target,
    Topology,
    arrays_in,
    arrays_of,
    conversion_block_bytes,
    mapped_tree,
    plain_tree,
    renamed,
    rerooted,
    staged_step,
    target_expressions,
    values_of,
)
from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    SafetensorsLayoutError,
    listed,
)
from orbax_safetensors_layout.mapping import (
    AskedCast,
    BoundExpr,
    Mapping as LeafMapping,
    check_mapping,
    decoding_hint,
    dequantized,
    fingerprint,
    plain_configurations,
    refuse_casts_of_codes,
)
from orbax_safetensors_layout.options import (
    ConvertOptions,
    PathLike,
    Quantizes,
    ReadOptions,
    WriteOptions,
    given_or_default,
    is_floating,
    require,
)
from orbax_safetensors_layout.plan import tensors_to_write
from orbax_safetensors_layout.runtime import ProcessGroup, frozen_heap
from orbax_safetensors_layout.save import save_group
from orbax_safetensors_layout.sharding import MeshShape, ShardingRule
from orbax_safetensors_layout.storage import LocalStorage, Storage, local_path, open_storage
from orbax_safetensors_layout.writing import (
    SavedTensor,
    appearance_rank,
    check_target,
    commit_when_complete,
    configured_files,
    described_files,
    model_files,
    read_sidecar_files,
)

Format = Literal["hf", "sharded", "orbax"]


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path: The finished checkpoint.
        tensors: Its arrays.
        nbytes: Bytes of their values.
        resumed_bytes: Bytes of these that an earlier, interrupted call had written.
    """

    path: str
    tensors: int
    nbytes: int
    resumed_bytes: int


def convert(
    source: PathLike,
    target: PathLike,
    *,
    format: Format | None = None,
    mapping: LeafMapping | None = None,
    inverse: bool | None = None,
    dequantize: str | None = None,
    quantize: Quantizes | None = None,
    mesh: Any = None,
    spec: Sequence[str | ShardingRule] = (),
    processes: int = 1,
    step: int | None = None,
    item: str | None = None,
    subtree: str | None = None,
    config: PathLike | None = None,
    options: ConvertOptions | None = None,
    overwrite: bool = False,
    restart: bool = False,
) -> Converted:
    """Makes a checkpoint of any kind into one of any other, in bounded memory.

    Source and target are Hugging Face safetensors, this package's layout `sharded`, or Orbax's own
    format. Each byte of the source is read once. Several processes of one program share the work;
    no device is needed. A call that was interrupted is continued by the same call. The target
    appears when it is complete and every bit of it has been compared with what was read. Checksums
    of a safetensors source are checked, and safetensors files of the target then get their own.

    Args:
        source: A safetensors folder or file, what Orbax saved (v0 or v1; OCDBT or not), or with
            `step` the directory of a `CheckpointManager`.
        target: The folder to write, on a file system that all processes see; or `hf://org/name`,
            to which it is uploaded in the end from a temporary folder (then nothing is continued).
        format: `"hf"`, `"sharded"` or `"orbax"`; by default `"orbax"` for a Hugging Face source
            and `"hf"` for others, and for the model's side of the mapping.
        mapping: What a model's leaves are made of, as for `load`.
        inverse: Whether the source is the model's side of the mapping; by default where the format
            is `"hf"` and the source is not, or is a tree that this package saved (a run's step) and
            has no tensor that the mapping takes.
        dequantize: In place of a mapping, the dtype that quantised weights are decoded to; see
            `dequantized`. What a `config.json` says of their quantisation is then left out.
        quantize: An `osl.Quantization`: the weights of format `"hf"` that are written quantised,
            and how; see `WriteOptions`. Each is read for its values, and again for its scales.
        mesh: The devices that the target is cut for: axis names and sizes, or a mesh of JAX, which
            may be abstract. The chunks of an Orbax checkpoint, or the pieces of layout `sharded`,
            are then the shards. It does not count for format `"hf"`.
        spec: Rules such as `"'.*kernel' = fsdp,tensor"`, of which the first that matches a name
            counts, and what none matches is replicated; by default `"'.*' = auto"`: every array but
            vectors is split along the outermost dimension that the most devices divide.
        processes: How many processes that mesh has; each has a file in layout `sharded`.
        step: A step of the source. An Orbax target is then the same step below `target`.
        item: The item of the source that is converted, into a step that is there beside its other
            items. By default a step is converted whole: all trees, and what other handlers of Orbax
            saved is copied. A mapping, `subtree` and the like take one tree, as does a target of
            Hugging Face files: the only one, `default` or `state`.
        subtree: Dotted name of the part of the source's tree that is converted.
        config: The folder whose `config.json`, tokenizer and the like are put beside safetensors
            files; by default the source, if it is of Hugging Face.
        options: Memory, dtype, format, cache.
        overwrite: Replace a checkpoint that is at the target.
        restart: Drop what an interrupted call has done.

    Raises:
        CheckpointNotFoundError: There is nothing to convert, or nothing of `config`.
        CheckpointExistsError: A checkpoint, or another `config.json` or the like, is at the
            target, without `overwrite`.
        MappingError: The mapping does not fit, or does not invert.
        MismatchError: Arrays cannot be sharded as their rules say; or what was written differs.
        SafetensorsLayoutError: The target cannot hold a leaf, a chunk of the source is too large
            for the memory budget, or an unfinished conversion of something else is in the way.
        FormatError: A file is malformed, or not what its checksum says.
        StorageError: A read or write failed.
        PeerError: Another process failed.

    Examples:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> folder = tempfile.mkdtemp()
        >>> weights = {"layer.weight": np.arange(8.0, dtype=np.float32).reshape(4, 2)}
        >>> safetensors.numpy.save_file(weights, f"{folder}/weights.safetensors")
        >>> source = f"{folder}/weights.safetensors"
        >>> convert(source, f"{folder}/orbax", mesh={"fsdp": 4}).nbytes
        32
        >>> convert(f"{folder}/orbax", f"{folder}/back").tensors
        1
        >>> safetensors.numpy.load_file(f"{folder}/back/model.safetensors")["layer.weight"][3]
        array([6., 7.], dtype=float32)
    """
    options = given_or_default(options, ConvertOptions)
    of_one_tree = mapping, inverse, dequantize, quantize, subtree, config
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(save_group(target, options, "convert"))
        stack.enter_context(frozen_heap())
        source_step = find_step(source, step=step)
        refs = [*source_step.trees.values()]
        is_whole = bool(refs) and item is None and all(part is None for part in of_one_tree)
        if not is_whole:
            refs = [resolve_checkpoint(source, step=step, item=item)]
        reading = ReadOptions(
            memory_budget_bytes=options.memory_budget_bytes,
            cache=options.cache,
            cache_bytes=options.cache_bytes,
        )
        if mapping is not None:
            check_mapping(mapping)
        reading_to_verify = dataclasses.replace(reading, verify=True)
        readers = []
        for ref in refs:
            readers.append(open_reader(ref, reading_to_verify, named_by=mapping))
            stack.callback(readers[-1].close)
        are_hf = all(reader.kind == "hf" for reader in readers)
        if are_hf and mapping is not None and inverse is None:
            arrays = arrays_of(rerooted(readers[0].tree, subtree))
            inverse = readers[0].is_recorded and mapping.names_leaves(arrays)
        kind = format or ("orbax" if are_hf and not inverse else "hf")
        folder, remote = _target_folder(target, group, stack, overwrite=overwrite)
        copied = source_step.others if is_whole else []
        is_step = len(refs) > 1 or (kind == "orbax" and (step is not None or bool(copied)))
        if step is not None:
            place = os.path.join(folder, os.path.basename(source_step.path))
            is_step = is_step or bool(find_step(place).trees)
            folder = place if is_step else folder
        _check_apart(source_step.path if is_step else refs[0].path, folder)
        trees = _TreeConversions(
            kind=kind,
            mapping=mapping,
            inverse=inverse,
            dequantize=dequantize,
            quantize=quantize,
            topology=_topology(mesh, spec, processes),
            subtree=subtree,
            config=config,
            options=options,
            restart=restart or remote is not None,
            is_continued=remote is None,
            reopen=lambda path: open_reader(resolve_checkpoint(path), reading),
        )
        replaces = overwrite or remote is not None
        conversion: Conversion | StepConversion
        sidecar_files: Mapping[str, bytes] = {}
        if is_step:
            items = {
                ref.item or "default": reader for ref, reader in zip(refs, readers, strict=True)
            }
            conversion = _step_conversion(trees, source_step, items, copied, folder)
        else:
            conversion, sidecar_files = trees.conversion(readers[0], folder)

        def check() -> None:
            if remote is not None:
                storage, path = remote
                exists = functools.partial(is_safetensors_checkpoint, storage=storage)
                check_target(storage, path, sidecar_files, overwrite, exists)
            if isinstance(conversion, StepConversion):
                conversion.check(overwrite=replaces)
            else:
                _check_folder(folder, kind, sidecar_files, overwrite=replaces, item=item)

        if trees.topology is not None and spec and kind != "hf":
            for rule in trees.topology.unused_rules:
                logging.warning("The sharding rule %s is used by no array.", rule)
        with frozen_heap():
            resumed = conversion.run(group, check)
        written = folder if remote is None else os.fsdecode(target)
        return Converted(written, conversion.arrays_written, conversion.nbytes, resumed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TreeConversions:
    """The arguments of a conversion, which hold for each tree of it."""

    kind: Format
    mapping: LeafMapping | None
    inverse: bool | None
    dequantize: str | None
    quantize: Quantizes | None
    topology: Topology | None
    subtree: str | None
    config: PathLike | None
    options: ConvertOptions
    restart: bool
    is_continued: bool
    reopen: Callable[[str], CheckpointReader]

    def conversion(
        self, reader: CheckpointReader, folder: str, files: Mapping[str, bytes] | None = None
    ) -> tuple[Conversion, Mapping[str, bytes]]:
        """Plan the conversion of one tree into a folder; return it with the files beside its own.

        `files` are put beside the tree in place of those of a model.
        """
        kind, options, quantize, topology = self.kind, self.options, self.quantize, self.topology
        tree = rerooted(reader.tree, self.subtree)
        arrays = arrays_of(tree)
        if not jax.tree.leaves(tree):
            raise CheckpointNotFoundError("the source has no leaves to convert", file=reader.path)
        if quantize is not None and kind != "hf":
            raise InvalidArgumentError(
                f"quantize is for format 'hf', not for {kind!r}", file=reader.path
            )
        mapping, inverts = _mapping(
            reader.path, reader.kind, kind, self.mapping, self.inverse, self.dequantize
        )
        if mapping is not None and inverts:
            tree = renamed(tree, mapping.names_of)
            arrays = arrays_of(tree)
        expressions: dict[str, BoundExpr] = {}
        values: dict[str, Any] = {}
        if mapping is None and quantize is None:
            target_tree = plain_tree(tree)
            _refuse_casts_of_codes(target_tree, options.dtype, reader.path)
        else:
            stored = expressions = target_expressions(tree, mapping, inverse=inverts)
            plain = mapped_tree(expressions, {}, is_flat=True)
            _refuse_casts_of_codes(plain, options.dtype, reader.path)
            if quantize is not None:
                stored = tensors_to_write(expressions, options.dtype, quantize)
            is_flat = inverts or quantize is not None
            values = {} if mapping is None or is_flat else mapping.passed(values_of(tree))
            target_tree = mapped_tree(stored, values, is_flat=is_flat)
        if kind == "orbax" and self.config is not None:
            logging.warning(
                "Format 'orbax' has no configuration or tokenizer files: config is ignored."
            )
        if kind == "hf" and topology is not None:
            logging.warning("Format 'hf' has whole tensors: mesh, spec and processes are ignored.")
            topology = None
        block_bytes = conversion_block_bytes(
            folder, options.memory_budget_bytes, restart=self.restart
        )
        arguments = (
            mapping and fingerprint(mapping),
            inverts,
            self.subtree,
            quantize and quantize.fingerprint(),
        )
        planned: Target
        sidecar_files: Mapping[str, bytes] = {}
        if kind == "orbax":
            from orbax_safetensors_layout.adapters import OrbaxTarget  # imports Orbax

            planned = OrbaxTarget(
                target_tree, reader, arrays, topology, options, most_chunk_bytes=block_bytes
            )
        else:
            is_tree = mapping is None and quantize is None and reader.is_recorded
            sidecar_files = files or self._sidecar_files(reader, folder, target_tree, expressions)
            identity = (reader.identity(), *arguments, options.dtype)
            planned = FilesTarget(
                target_tree,
                reader,
                WriteOptions(
                    layout=kind,
                    dtype=options.dtype if quantize is None else None,
                    max_file_bytes=options.max_file_bytes,
                    metadata={**reader.metadata, **options.metadata},
                ),
                topology,
                is_tree=bool(values) or is_tree,
                identity=hashlib.sha256(repr(identity).encode()).hexdigest(),
                sidecar_files=sidecar_files,
            )
        # All of it is then replaced.
        is_whole = is_orbax_checkpoint(folder) and not is_safetensors_checkpoint(folder)
        of_checkpoint: Callable[[str], bool] = _is_of_checkpoint
        if kind != "orbax":
            with LocalStorage() as storage:
                of_checkpoint = replaced_files(storage, folder, "model")
        conversion = Conversion(
            reader,
            arrays,
            planned,
            folder,
            options,
            block_bytes,
            restart=self.restart,
            is_continued=self.is_continued,
            arguments=arguments,
            reopen=self.reopen,
            is_replaced=lambda name: is_whole or of_checkpoint(name),
        )
        return conversion, sidecar_files

    def _sidecar_files(
        self,
        reader: CheckpointReader,
        folder: str,
        target_tree: Any,
        expressions: Mapping[str, BoundExpr],
    ) -> dict[str, bytes]:
        """Return the files of the model, as they are true of what is written."""
        quantize, dtype = self.quantize, self.options.dtype
        files: dict[str, bytes] = {}
        if self.config is not None:
            files = model_files(self.config, code=self.options.code, required="config=")
        elif isinstance(reader, SafetensorsReader) and reader.kind == "hf":
            files = read_sidecar_files(reader.path, storage=reader.storage, code=self.options.code)
        of_target = {array.name: array for array in arrays_in(target_tree)}
        described: Mapping[str, Any] = of_target if quantize is None else expressions
        # The source's own configuration is of its tensors.
        is_own = self.mapping is None and self.dequantize is None and self.config is None
        saved = {
            name: SavedTensor.of(array, dtype, None if is_own else expressions.get(name, name))
            for name, array in described.items()
        }
        if self.dequantize is not None:
            files = plain_configurations(files)
        files = described_files(files, saved)
        if quantize is not None:
            configured = functools.partial(quantize.configured, weights=expressions)
            files = configured_files(files, folder, configured)
        return files


def _step_conversion(
    trees: _TreeConversions,
    source_step: StepItems,
    readers: Mapping[str, CheckpointReader],
    copied: Sequence[str],
    folder: str,
) -> StepConversion:
    """Plan the conversion of items of a step into one that is new, or has others."""
    from orbax_safetensors_layout.adapters import item_metadata, step_files  # imports Orbax

    items = {}
    for name, reader in readers.items():
        place = os.path.join(staged_step(folder), name)
        is_recorded = trees.kind == "sharded" or reader.is_recorded
        files = item_metadata(has_manifest=is_recorded)
        items[name], _ = trees.conversion(reader, place, files)
    record = functools.partial(step_files, source_step.path, folder, [*items], copied, trees.kind)
    return StepConversion(source_step.path, folder, items, copied, record, restart=trees.restart)


def _target_folder(
    target: PathLike, group: ProcessGroup, stack: contextlib.ExitStack, *, overwrite: bool
) -> tuple[str, tuple[Storage, str] | None]:
    """Return the local folder to convert into, and where it is uploaded to when `stack` ends."""
    storage, path = open_storage(target)
    stack.enter_context(storage)
    if isinstance(storage, LocalStorage):
        return os.path.realpath(path), None
    if storage.uploads:
        place = commit_when_complete(
            storage, path, group=group, overwrite=overwrite, sidecar_files={}
        )
        return os.path.realpath(stack.enter_context(place).folder), (storage, path)
    raise SafetensorsLayoutError(
        "a conversion writes to local or mounted file systems, or to the hub",
        file=os.fsdecode(target),
        hint="Convert to a local folder and copy that, or mount the bucket.",
    )


def _is_of_checkpoint(name: str) -> bool:
    return appearance_rank(name) is not None


def _check_apart(source: str, target: str) -> None:
    local = local_path(source)
    if local is None:
        return
    source = os.path.realpath(local)
    if f"{target}/".startswith(f"{source}/") or f"{source}/".startswith(f"{target}/"):
        raise SafetensorsLayoutError(
            "source and target are the same folder, or one lies in the other",
            file=target,
            found=source,
            hint="Convert to a folder of its own.",
        )


def _mapping(
    path: str,
    source_kind: str,
    kind: Format,
    mapping: LeafMapping | None,
    inverse: bool | None,
    dequantize: str | None,
) -> tuple[LeafMapping | None, bool]:
    """Return the mapping that makes the target's arrays, and whether it is inverted."""
    if inverse is not None and mapping is None:
        raise InvalidArgumentError(
            "inverse says which side of a mapping the source is, and there is no mapping",
            file=path,
            found=f"inverse={inverse!r}",
        )
    if dequantize is not None:
        if mapping is not None or source_kind != "hf":
            raise InvalidArgumentError(
                "dequantize takes safetensors of Hugging Face, and no mapping",
                file=path,
                found="a mapping" if mapping is not None else f"a source of format {source_kind!r}",
                hint="Ready mappings decode by themselves, others with"
                " mapping.over(osl.dequantized(path))."
                if mapping is not None
                else None,
            )
        mapping = dequantized(path, dtype=dequantize)
    if inverse is None:
        inverse = mapping is not None and kind == "hf" and source_kind != "hf"
    return mapping, inverse


def _refuse_casts_of_codes(tree: Any, dtype: np.dtype | None, source: str) -> None:
    """Refuses to cast codes to the dtype that all floats get."""
    arrays = {} if dtype is None else {array.name: array for array in arrays_in(tree)}

    def hint(cast: AskedCast) -> str:
        name = cast.dtype.name
        return (
            f"{decoding_hint(source, cast.name)}If these are values, say so in a mapping:"
            f" osl.Mapping([osl.rule(n, osl.tensor(n) if t.dtype.itemsize > 1 else"
            f" osl.tensor(n).cast({name!r})) for n, t in osl.metadata(SOURCE).items()]), of a"
            " checkpoint in Orbax's format convert it to safetensors first."
        )

    refuse_casts_of_codes(
        (
            AskedCast(name, array.shape, array.dtype, dtype)
            for name, array in arrays.items()
            if dtype is not None and is_floating(array.dtype)
        ),
        arrays,
        lambda name: arrays[name].dtype,
        hint,
        source,
    )


def _topology(mesh: Any, spec: Sequence[str | ShardingRule], processes: int) -> Topology | None:
    if mesh is None:
        if spec:
            raise InvalidArgumentError(
                "Sharding rules need a mesh: give mesh={'fsdp': 16} or the like."
            )
        return None if processes == 1 else Topology(MeshShape({"processes": processes}, processes))
    axes: Any = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    expected = "names and sizes of axes, as {'fsdp': 16}, or a mesh of JAX"
    require(isinstance(axes, Mapping), "mesh", expected, mesh)
    is_list = hasattr(spec, "__iter__") and not isinstance(spec, str | Mapping | ShardingRule)
    require(is_list, "spec", "a list of sharding rules, as [\"'.*kernel' = fsdp,tensor\"]", spec)
    rules = [rule if isinstance(rule, ShardingRule) else ShardingRule.parse(rule) for rule in spec]
    return Topology(MeshShape(dict(axes), processes), rules or [ShardingRule(".*", None)])


def _check_folder(
    folder: str,
    kind: Format,
    sidecar_files: Mapping[str, bytes],
    *,
    overwrite: bool,
    item: str | None,
) -> None:
    there = find_step(folder)
    if len(items := [*there.trees, *there.others]) > 1:  # all of it would go
        raise CheckpointExistsError(
            "the folder is a step of several items, and the checkpoint is a tree alone",
            file=folder,
            found=listed(items),
            hint="Give the folder of the item to replace, or another folder.",
        )
    try:
        with LocalStorage() as storage:
            check_target(storage, folder, sidecar_files, overwrite, holds_checkpoint)
    except CheckpointExistsError as error:
        if item is not None and holds_checkpoint(folder):  # perhaps another item of the step
            error.hint = (
                "Give each item a folder of its own, or leave out item (--item): the step is then"
                " converted whole. overwrite=True (--overwrite) deletes what is there."
            )
        raise
    if kind == "orbax" and is_safetensors_checkpoint(folder):
        with LocalStorage() as storage:
            goes = replaced_files(storage, folder, "model")
            others = [n for n in storage.list(folder) if _is_of_checkpoint(n) and not goes(n)]
        if others:  # Orbax does not take a folder with safetensors for its own
            raise CheckpointExistsError(
                f"weights are beside the checkpoint that is replaced: {listed(others)}",
                file=folder,
                hint="Move them away, or give another folder.",
            )
    is_filled = kind == "orbax" and os.path.isdir(folder) and bool(os.listdir(folder))
    if is_filled and not holds_checkpoint(folder):
        raise CheckpointExistsError(
            "the folder is not empty", file=folder, expected="a new or empty folder"
        )
