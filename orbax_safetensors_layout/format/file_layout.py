"""The layout of new files; from names, dtypes and shapes alone, so equal on every process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import FormatError

from .dtypes import DType
from .header import MAX_HEADER_BYTES, PREFIX_BYTES, TensorEntry
from .pieces import NO_SAVE_ID, SAVE_ID

DATA_ALIGNMENT = 4096
"""Headers are padded with spaces so that the data begins at a multiple of this many bytes: the
page size, and what O_DIRECT asks of an offset."""

_METADATA_KEY = "__metadata__"
_ADOPTABLE_BYTES = 64
_DIGITS = re.compile(r"([0-9]+)")


class NewTensor(NamedTuple):
    """A tensor that is to be written: its dtype in the file, and its shape in logical elements."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bits // 8


class FileLayout(NamedTuple):
    """One new file of `size` bytes."""

    header: bytes  # the length, the JSON and the padding
    tensors: tuple[TensorEntry, ...]  # in the order of the file's bytes; their `file` is its name
    size: int

    def stamped(self, save_id: str) -> FileLayout:
        """Return the layout with the id of a save in the header, if it has room for one."""
        place, field = (f'"{SAVE_ID}":"{value}"'.encode() for value in (NO_SAVE_ID, save_id))
        return self._replace(header=self.header.replace(place, field, 1))


def natural_key(name: str) -> tuple[tuple[tuple[str, int, str], ...], str]:
    """Return a sort key by which `layers.2` comes before `layers.10`."""
    parts: list[tuple[str, int, str]] = []
    for number, part in enumerate(_DIGITS.split(name)):
        digits = part.lstrip("0")
        parts.append(("", len(digits), digits) if number % 2 else (part, 0, ""))
    return tuple(parts), name


def split(
    tensors: Iterable[NewTensor], max_file_bytes: int, stem: str = "model"
) -> list[tuple[str, list[NewTensor]]]:
    """Return names and tensors of files, as Hugging Face does: a new file when one is full."""
    groups: list[list[NewTensor]] = [[]]
    used = 0
    for tensor in sorted(tensors, key=lambda tensor: natural_key(tensor.name)):
        if groups[-1] and used + tensor.nbytes > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    if len(groups) == 1:
        return [(f"{stem}.safetensors", groups[0])]
    count = len(groups)
    return [
        (f"{stem}-{number:05}-of-{count:05}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def lay_out(file: str, tensors: Iterable[NewTensor], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of one file, with its `__metadata__` strings."""

    # First what begins where mapped pages can be adopted; others at multiples of their own size.
    def place(tensor: NewTensor) -> tuple[object, ...]:
        is_unpaged = tensor.nbytes % DATA_ALIGNMENT != 0
        return is_unpaged, tensor.nbytes % _ADOPTABLE_BYTES != 0, -tensor.dtype.bits

    ordered = sorted(tensors, key=place)
    if any(tensor.name == _METADATA_KEY for tensor in ordered):
        raise FormatError(
            "the format keeps this name for its own use",
            file=file,
            tensor=_METADATA_KEY,
            expected="another name",
            hint="Rename the tensor, or the rule that writes it.",
        )
    fields: dict[str, object] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    offsets = [0]
    for tensor in ordered:
        offsets.append(offsets[-1] + tensor.nbytes)
        fields[tensor.name] = {
            "dtype": tensor.dtype.code,
            "shape": tensor.shape,
            "data_offsets": offsets[-2:],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    data_start = -(-(PREFIX_BYTES + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    length = data_start - PREFIX_BYTES
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            "the header would be longer than the format allows",
            file=file,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{length} bytes for {len(ordered)} tensors",
            hint="Set a smaller WriteOptions(max_file_bytes=...).",
        )
    header = length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length)
    entries = tuple(
        TensorEntry(t.name, t.dtype, t.shape, file, data_start + start, data_start + stop)
        for t, start, stop in zip(ordered, offsets, offsets[1:], strict=False)
    )
    return FileLayout(header, entries, data_start + offsets[-1])


def index_bytes(
    files: Sequence[tuple[str, Sequence[NewTensor]]], metadata: Mapping[str, object] | None = None
) -> bytes:
    """Return the bytes of `model.safetensors.index.json`, as `transformers` writes it."""
    file_of = {tensor.name: file for file, tensors in files for tensor in tensors}
    total = sum(tensor.nbytes for _, tensors in files for tensor in tensors)
    document = {"metadata": {"total_size": total, **(metadata or {})}, "weight_map": file_of}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
