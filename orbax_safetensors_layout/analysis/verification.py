"""Whether a checkpoint is whole: its structure, its checksums, and its values against another's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError
from orbax_safetensors_layout.format import DIGESTS, join_crc32
from orbax_safetensors_layout.options import Progress, ReadOptions, given_or_default
from orbax_safetensors_layout.reading import file_ranges, read_digests
from orbax_safetensors_layout.runtime import ProgressReport, progress_callback
from orbax_safetensors_layout.storage import join, open_storage

from .inspection import resolve_checkpoint
from .report import Finding, Report
from .structure_check import StructureCheck

PathLike = str | os.PathLike[str]


def verify(
    path: PathLike,
    against: PathLike | None = None,
    *,
    mapping: Any = None,
    subtree: str | None = None,
    digests: bool = True,
    options: ReadOptions | None = None,
) -> Report:
    """Checks whether a checkpoint is whole; reports all that is wrong, not the first.

    Structure: every header; the index or the manifest against the headers; sizes, missing, stray
    and doubly held tensors; pieces. Contents: the checksums that a save with
    `WriteOptions(digests=True)` left. Values: bit by bit against another checkpoint, whose files
    may be cut otherwise. Tensors are read in blocks, in bounded memory.

    Either may be what Orbax saved in its own format, or a step with it. Of such a `path` every
    array is read: missing chunks and such that cannot be decoded are found. What TensorStore
    takes to decode a chunk comes on top of the memory budget.

    Args:
        path: The checkpoint.
        against: Another, which must have the same tensors.
        mapping: What the tensors of `path` are made of in `against`, an `osl.Mapping`.
        subtree: Dotted name of the part of the tree of `path` that is compared.
        digests: Whether to hold files against their checksums, where there are any; that reads
            all of them.
        options: How to read: `memory_budget_bytes`, `progress` and the cost model count.

    Raises:
        CheckpointNotFoundError: A path has no checkpoint.
        StorageError: A read failed.
        MappingError: The mapping does not fit, or `against` is not a safetensors checkpoint.
        MissingTensorError: The tree has no `subtree`.
        SafetensorsLayoutError: A chunk of an Orbax checkpoint is too large for the memory budget.

    Example:
        >>> import tempfile, numpy as np
        >>> import orbax_safetensors_layout as osl
        >>> folder = tempfile.mkdtemp()
        >>> osl.save(folder, {"w": np.arange(4)}, options=osl.WriteOptions(digests=True))
        >>> print(osl.verify(folder))
        /tmp/...: whole (1 file, 1 tensor, 2 checksums)
    """
    options = given_or_default(options, ReadOptions)
    if against is None and not (mapping is None and subtree is None):
        raise ValueError("mapping= and subtree= say what is compared: give against=, too.")
    location = resolve_checkpoint(path)
    with progress_callback(options.progress) as progress:
        report = Report(location.path, ())
        if not location.is_orbax:
            report = _check_files(location.path, digests, progress)
            if against is None or not report.ok:
                return report
        from . import compare

        if against is None:
            return compare.check_readable(location, options, progress)
        compared = compare.compare(
            location,
            resolve_checkpoint(against),
            mapping=mapping,
            subtree=subtree,
            options=options,
            progress=progress,
        )
    differences = (Finding("value", text) for text in compared.differences)
    return dataclasses.replace(
        report,
        findings=(*report.findings, *differences),
        compared_tensors=compared.tensors,
        compared_bytes=compared.nbytes,
    )


def _check_files(path: str, digests: bool, progress: Callable[[Progress], None] | None) -> Report:
    """Checks the structure of a safetensors checkpoint, and files against their checksums."""
    storage, place = open_storage(path)
    with storage:
        structure = StructureCheck(storage, place)
        structure.check()
        digested = _check_digests(structure, progress) if digests else 0
    return Report(
        place,
        tuple(structure.findings),
        files=len(structure.headers),
        tensors=sum(len(header.tensors) for header in structure.headers.values()),
        digested_files=digested,
    )


def _check_digests(structure: StructureCheck, progress: Callable[[Progress], None] | None) -> int:
    """Compares files with their checksums; returns how many."""
    storage, folder, findings = structure.storage, structure.path, structure.findings
    if storage.is_file(folder) or DIGESTS not in storage.list(folder):
        return 0
    try:
        digests = read_digests(storage, folder) or {}
    except SafetensorsLayoutError as error:
        findings.append(Finding("digest", str(error)))
        return 0
    present = set(storage.list(folder))
    for name in sorted(digests.keys() - present):
        findings.append(Finding("digest", f"{name} is missing; it has a checksum"))
    for name in map(structure.name, structure.headers):
        if name not in digests:
            findings.append(Finding("digest", f"{name} has no checksum", is_error=False))
    names = sorted(digests.keys() & present)
    report = ProgressReport(progress, sum(storage.size(join(folder, name)) for name in names))
    for name in names:
        file, ranges = join(folder, name), []
        try:
            size = storage.size(file)
            for block in file_ranges(storage, file, 0, size):
                ranges.append(block)
                report.add(block[1], name)
        except StorageError as error:
            findings.append(Finding("digest", str(error)))
            continue
        value = join_crc32(ranges, size)
        if value != digests[name]:
            text = f"{name} has CRC-32 {value:08x}; it was written with {digests[name]:08x}"
            findings.append(Finding("digest", text))
    return len(names)
