"""Tensors stored in pieces, in the `sharded` layout: which box is in which file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from orbax_safetensors_layout.geometry import Box, cover

from .dtypes import dtype_from_code
from .index import check_file_name
from .schema import Schema, short_repr

_MOST_CORNERS = 1 << 21
_ends_like_a_piece = re.compile(r"@(\d+(,\d+)*)?\Z").search


SAVE_ID = "orbax_safetensors_layout.save"
"""Key of the save's id in the `__metadata__` of a file of pieces. The headers of two saves of equal
shapes do not differ otherwise."""

NO_SAVE_ID = "0" * 32
"""The id in plans; each save has its own, of the same length."""


class StoredBox(NamedTuple):
    """A half-open box of a tensor, stored as one tensor in the file of this number."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: int

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


class StoredTensor(NamedTuple):
    """A tensor that is stored in pieces: its dtype's code, shape, and number of class."""

    dtype: str
    shape: tuple[int, ...]
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPieces:
    """The places of all pieces; tensors of equal shape and sharding share a class of boxes."""

    files: tuple[str, ...]  # relative to the folder
    # Distinct boxes cover the shape exactly; one that occurs several times is in several files.
    classes: tuple[tuple[StoredBox, ...], ...]
    tensors: dict[str, StoredTensor]
    save_id: str | None = None  # in the files' headers; None if the save had none

    def boxes(self, name: str) -> tuple[StoredBox, ...]:
        return self.classes[self.tensors[name].number]


def piece_name(name: str, shape: Sequence[int], box: Box | StoredBox) -> str:
    """Return the name of a tensor's piece in its file, as `kernel@4,0`; no two have the same."""
    # A whole tensor that is itself called `kernel@4,0` becomes `kernel@4,0@0,0`.
    if Box(box.start, box.stop) == Box.whole(shape) and not _ends_like_a_piece(name):
        return name
    return f"{name}@{','.join(map(str, box.start))}"


def piece_file_prefix(process: int) -> str:
    """Return the prefix of the name of a process's file of pieces."""
    return f"shard-{process + 1:05}-of-"


def is_piece_file(name: str) -> bool:
    """Whether a file's name, or path, is one that a save gives to files of pieces."""
    return re.fullmatch(r"(.*/)?shard-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def dump_pieces(pieces: StoredPieces) -> dict[str, object]:
    """Return the pieces as a JSON value."""
    document: dict[str, object] = {} if pieces.save_id is None else {"save": pieces.save_id}
    return document | {"files": pieces.files, "classes": pieces.classes, "tensors": pieces.tensors}


def parse_pieces(raw: object, schema: Schema) -> StoredPieces:
    """Parses and validates the pieces."""
    fields = schema.members(raw, "pieces")
    files = schema.texts(fields.get("files"), "files of pieces")
    for name in files:
        check_file_name(name, schema)
    classes = tuple(
        _boxes(boxes, len(files), schema)
        for boxes in schema.items(fields.get("classes"), "classes of pieces")
    )
    whole: set[tuple[tuple[int, ...], int]] = set()  # (shape, class) that fit
    tensors: dict[str, StoredTensor] = {}
    for name, item in schema.members(fields.get("tensors"), "tensors of pieces").items():
        tensor = tensors[name] = _tensor(name, item, len(classes), schema)
        if tensor[1:] not in whole:
            _check_cover(name, tensor.shape, classes[tensor.number], schema)
            whole.add(tensor[1:])
    save_id = None if "save" not in fields else schema.text(fields["save"], "save of pieces")
    return StoredPieces(files, classes, tensors, save_id)


def _tensor(name: str, item: object, classes: int, schema: Schema) -> StoredTensor:
    if type(item) is not list or len(item) != 3:
        expected = "an array of a dtype code, a shape and a class number"
        schema.raise_error("malformed tensor of pieces", expected, short_repr(item), name)
    code = schema.text(item[0], "dtype of a tensor of pieces")
    dtype_from_code(code, file=schema.file, tensor=name)
    shape = schema.sizes(item[1], "shape of a tensor of pieces")
    return StoredTensor(code, shape, schema.size(item[2], "class of pieces", limit=classes))


def _boxes(raw: object, files: int, schema: Schema) -> tuple[StoredBox, ...]:
    boxes = []
    for item in schema.items(raw, "class of pieces"):
        if type(item) is not list or len(item) != 3:
            schema.raise_error(
                "malformed box", "an array of start, stop and file", short_repr(item)
            )
        start = schema.sizes(item[0], "start of a box")
        stop = schema.sizes(item[1], "stop of a box")
        if len(start) != len(stop) or any(a > b for a, b in zip(start, stop, strict=True)):
            schema.raise_error("malformed box", "start <= stop", short_repr(item))
        boxes.append(StoredBox(start, stop, schema.size(item[2], "file of a box", limit=files)))
    if len(set(boxes)) != len(boxes):
        schema.raise_error("a box is given twice in the same file", found=short_repr(boxes))
    return tuple(boxes)


def _check_cover(
    name: str, shape: tuple[int, ...], stored: tuple[StoredBox, ...], schema: Schema
) -> None:
    """Refuses boxes that leave a part of the tensor out, or overlap, or reach beyond it."""
    boxes = list(dict.fromkeys(box.box for box in stored))
    if any(len(box.start) != len(shape) for box in boxes):
        problem = "boxes have another number of dimensions than their tensor"
    elif any(not box.size for box in boxes if 0 not in shape) or not (
        boxes and cover(boxes, Box.whole(shape), _MOST_CORNERS)
    ):
        problem = "boxes do not cover their tensor exactly"
    else:
        return
    schema.raise_error(problem, f"boxes that tile the shape {shape}", short_repr(boxes, 300), name)
