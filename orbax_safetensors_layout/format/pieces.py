"""Tensors stored in pieces: which box is in which file.

The manifest says so in the `sharded` layout, and for files of torch's DCP their headers do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import InvalidHeaderError, InvalidIndexError, listed
from orbax_safetensors_layout.geometry import Box, cover

from .dtypes import dtype_from_code
from .header import Header, TensorEntry
from .index import check_file_name
from .schema import Schema, short_repr
from .strict_json import parse_object

_MOST_CORNERS = 1 << 21
_MIXED = "Files of two saves may be mixed in it."
_dcp_file = re.compile(r"(?:.*/)?shard-(\d{5})-(model-(\d{5})-of-(\d{5})\.safetensors)").fullmatch
_ends_like_a_piece = re.compile(r"@(\d+(,\d+)*)?\Z").search


SAVE_ID = "orbax_safetensors_layout.save"
"""Key of the save's id in the `__metadata__` of a file of pieces. The headers of two saves of equal
shapes do not differ otherwise."""

DCP_OFFSETS = "DCP_SHARDING_INFO"
"""Key of the offsets of pieces in the `__metadata__` of files that torch's DCP writes."""

DCP_KEYS = frozenset({DCP_OFFSETS, "DCP_VERSION"})
"""What torch's DCP says in a file's `__metadata__` of the file itself."""

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
    by_offsets: bool = False  # of torch's DCP: see `pieces_by_offsets`

    def boxes(self, name: str) -> tuple[StoredBox, ...]:
        return self.classes[self.tensors[name].number]

    def ranks(self) -> tuple[str, ...]:
        """Return the ranks, as their files' names have them, that wrote pieces by offsets."""
        return tuple(sorted({match[1] if match else "" for match in map(_dcp_file, self.files)}))


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


def without_rank(name: str) -> str:
    """Return the name of a file of torch's DCP without its rank."""
    match = _dcp_file(name)
    return match[2] if match else name


def absent_files(files: Iterable[str]) -> list[str]:
    """Return the names that files of torch's DCP would have of ranks that wrote to every number.

    A rank has no file where it had nothing to write.
    """
    matches = [match for match in map(_dcp_file, files) if match]
    names = {(int(match[1]), int(match[3])) for match in matches}
    if not names:
        return []
    ranks, count = range(1, max(names)[0] + 1), matches[0][4]
    every = itertools.product(ranks, range(1, int(count) + 1))
    absent = [pair for pair in every if pair not in names]
    return [f"shard-{rank:05}-model-{n:05}-of-{count}.safetensors" for rank, n in absent]


def pieces_by_offsets(headers: Mapping[str, Header], folder: str) -> StoredPieces | None:
    """Return the pieces in the files of a folder that torch's DCP wrote; None if it wrote none.

    Each rank writes its part of a tensor to files of its own, under the tensor's name, and its
    offsets to their `__metadata__` (`HuggingFaceStorageWriter`). No file has the tensor's shape: it
    is as large as its parts reach.

    Args:
        headers: Those of all files, by path.
        folder: Its path.

    Raises:
        FormatError: Offsets are malformed, or the pieces do not tile their tensors.
    """
    if not any(DCP_OFFSETS in header.metadata for header in headers.values()):
        return None
    stored: dict[str, list[tuple[TensorEntry, StoredBox]]] = {}
    for number, (file, header) in enumerate(headers.items()):
        for entry, start in _offsets(file, header):
            stop = Box.whole(entry.shape).shifted(start).stop
            stored.setdefault(entry.name, []).append((entry, StoredBox(start, stop, number)))
    classes: dict[tuple[tuple[int, ...], tuple[StoredBox, ...]], int] = {}
    problems: dict[int, str] = {}  # of a class
    tensors: dict[str, StoredTensor] = {}
    files = [*headers]
    for name, pieces in stored.items():
        if len({(entry.dtype.code, len(entry.shape)) for entry, _ in pieces}) > 1:
            raise InvalidIndexError(
                "pieces of a tensor have different dtypes, or numbers of dimensions",
                file=folder,
                tensor=name,
                found=listed(f"{e.dtype.code} {[*e.shape]} in {files[b.file]}" for e, b in pieces),
                hint=_MIXED,
            )
        shape = tuple(map(max, zip(*(box.stop for _, box in pieces), strict=True)))
        boxes = tuple(box for _, box in pieces if box.box.size) or (pieces[0][1],)
        if (shape, boxes) not in classes and (problem := _untiled(shape, boxes)):
            problems[len(classes)] = problem
        number = classes.setdefault((shape, boxes), len(classes))
        tensors[name] = StoredTensor(pieces[0][0].dtype.code, shape, number)
    broken = [name for name, tensor in tensors.items() if tensor.number in problems]
    if broken:
        of_first = tensors[broken[0]]
        held = (files[box.file].rpartition("/")[2] for _, box in stored[broken[0]])
        absent = absent_files(files)
        missing = f"Not there are {listed(absent, 3)}. " if absent else ""
        raise InvalidIndexError(
            f"pieces of {len(broken):,} of {len(tensors):,} tensors do not make up the whole",
            file=folder,
            tensor=broken[0],
            expected=f"boxes that tile the shape {[*of_first.shape]}",
            found=f"{problems[of_first.number]}; pieces are in {listed(held)}",
            hint=f"{missing}The copy of the folder may be incomplete. {_MIXED}",
        )
    return StoredPieces(
        tuple(files), tuple(boxes for _, boxes in classes), tensors, by_offsets=True
    )


def _offsets(file: str, header: Header) -> Iterator[tuple[TensorEntry, tuple[int, ...]]]:
    """Yields the tensors of a file, each with the place of its first element in the whole."""
    schema, text = Schema(file, InvalidHeaderError), header.metadata.get(DCP_OFFSETS)
    info: dict[str, object] = {}
    if text is not None:
        with schema.parsing(DCP_OFFSETS):
            info = parse_object(text)
    for name, entry in header.tensors.items():
        start = (0,) * len(entry.shape)
        if text is not None:
            fields = schema.members(info.get(name), f"offsets of '{name}' in {DCP_OFFSETS}")
            start = schema.sizes(fields.get("saved_offsets"), f"saved_offsets of '{name}'")
            if len(start) != len(entry.shape):
                expected = f"one for each dimension of {[*entry.shape]}"
                schema.raise_error("malformed saved_offsets", expected, short_repr(start), name)
        yield entry, start


def _untiled(shape: tuple[int, ...], boxes: Sequence[StoredBox]) -> str | None:
    """Return what is wrong with boxes that do not tile a shape."""
    parts = sorted(stored.box for stored in boxes)
    left = [Box.whole(shape)] if math.prod(shape) else []
    for box in parts:
        left = [part for region in left for part in region.without(box)]
    if left:
        return f"nothing for {listed(map(_region, left), 3)}"
    overlaps = sum(box.size for box in parts) > math.prod(shape)
    return f"boxes that overlap: {listed(map(_region, parts), 5)}" if overlaps else None


def _region(box: Box) -> str:
    """Return a box as numpy would index it, as `[0:4, 8:16]`."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(*box, strict=True))}]"


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
