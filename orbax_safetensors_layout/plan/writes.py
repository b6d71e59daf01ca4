"""Plans writes: the files of each process, and the shards that their bytes come from.

In layout `hf` a file has one owner. What it does not hold completely is first written in pieces,
each by one of its holders; the owner assembles them. In layout `sharded` the pieces are the files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import (
    DTYPES,
    INDEX_SUFFIX,
    NO_SAVE_ID,
    SAVE_ID,
    SUFFIX,
    DType,
    FileLayout,
    NewTensor,
    StoredBox,
    StoredPieces,
    StoredTensor,
    index_bytes,
    lay_out,
    piece_file_prefix,
    piece_name,
    split,
    storage_dtype,
)
from orbax_safetensors_layout.geometry import Tile, tile
from orbax_safetensors_layout.mapping import (
    AskedCast,
    BoundExpr,
    Cast,
    Mapping as LeafMapping,
    TensorSpecs,
    Valued,
    hint_to_cast_before,
    refuse_casts_of_codes,
    row_major,
    saved_tensors,
)
from orbax_safetensors_layout.options import Quantizes, WriteOptions, is_floating
from orbax_safetensors_layout.sharding import GlobalShards

from .cost import Cost
from .ownership import PieceWriters, StoredTile, file_owners
from .stored_tensors import named_pieces

PIECES_FOLDER = "orbax_safetensors_layout.pieces"
"""The folder of pieces for the owners of files, removed when a save is complete; no program has
another of this name: a save into a bucket removes the rest of a crash."""


class LeafWrite(NamedTuple):
    """One tensor of the tree that is saved."""

    tensor: NewTensor  # its name, shape, and dtype in the file
    values: np.dtype  # dtype of the values in memory, which are cast to the file's
    held: GlobalShards  # its boxes and the processes that hold them


class FilePart(NamedTuple):
    """A contiguous range of a file that comes from shards of this process."""

    leaf: int  # number of the leaf
    tile: Tile  # the region of the tensor, of which members are boxes of the leaf, by number
    dtype: DType  # dtype in this file
    start: int  # first byte in the file
    stop: int  # one past the last byte


class FileWrite(NamedTuple):
    """One file that this process writes."""

    name: str  # its name, relative to the checkpoint's folder
    layout: FileLayout  # header, tensors and size
    parts: tuple[FilePart, ...]  # the ranges that come from this process's own shards, by offset
    gathered: tuple[int, ...]  # numbers of leaves that come from pieces, in the file's order

    @property
    def is_temporary(self) -> bool:
        return self.name.startswith(f"{PIECES_FOLDER}/")

    def stamped(self, save_id: str) -> FileWrite:
        return self._replace(layout=self.layout.stamped(save_id))


@dataclasses.dataclass(frozen=True, slots=True)
class WritePlan:
    """The writes of process `process_index` of `process_count`."""

    leaves: tuple[LeafWrite, ...]  # all tensors of the tree
    files: tuple[tuple[str, int, tuple[NewTensor, ...]], ...]  # names, owners and tensors
    own: tuple[FileWrite, ...]  # the files that this process owns
    pieces: FileWrite | None  # this process's file of pieces, if it has one
    stored: StoredPieces | None  # the places of all processes' pieces; None where there are none
    process_index: int
    process_count: int
    index_metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def exchanges(self) -> bool:
        """Whether some process assembles files from pieces."""
        return self.stored is not None and bool(self.files)

    @property
    def names(self) -> tuple[str, ...]:
        """The files of tensors that stay, of all processes."""
        if self.stored is not None and not self.files:
            return self.stored.files
        return tuple(name for name, _, _ in self.files)

    def stamped(self, save_id: str) -> WritePlan:
        """Return the plan of one save, whose id is in files of pieces that stay."""
        if self.stored is None or self.files:
            return self
        own = tuple(file.stamped(save_id) for file in self.own)
        pieces = self.pieces and self.pieces.stamped(save_id)
        stored = dataclasses.replace(self.stored, save_id=save_id)
        return dataclasses.replace(self, own=own, pieces=pieces, stored=stored)

    def index(self) -> dict[str, bytes]:
        """Return the index of whole tensors, by name, if several files or metadata ask for one."""
        if len(self.files) < 2 and not (self.files and self.index_metadata):
            return {}
        files = [(name, tensors) for name, _, tensors in self.files]
        first = files[0][0]
        stem = first.rpartition("-of-")[0].rpartition("-")[0] or first.removesuffix(SUFFIX)
        return {stem + INDEX_SUFFIX: index_bytes(files, self.index_metadata)}

    def writes(self) -> Iterator[FileWrite]:
        yield from self.own
        if self.pieces is not None:
            yield self.pieces

    def cost(self) -> Cost:
        """Return the cost of the plan for this process."""
        files = [*self.writes()]
        parts = [part for file in files for part in file.parts]
        gathered = [leaf for file in files for leaf in file.gathered]
        read_back = gathered if self.stored is not None else ()  # else they are made of leaves
        return Cost(
            tensors=len({part.leaf for part in parts}.union(gathered)),
            needed_bytes=sum(part.stop - part.start for part in parts),
            read_bytes=sum(self.leaves[leaf].tensor.nbytes for leaf in read_back),
            written_bytes=sum(file.layout.size for file in files),
            files=len(files),
        )

    def __str__(self) -> str:
        lines = [
            f"{name}  process {owner}  {len(tensors):,} tensors  "
            f"{sum(t.nbytes for t in tensors):,} bytes"
            for name, owner, tensors in self.files
        ]
        return "\n".join([*lines, str(self.cost())])


class MappedTensors(NamedTuple):
    """The tensors of the files, by name."""

    expressions: dict[str, BoundExpr]  # row-major elements, over boxes that are held or stored
    held: dict[str, tuple[int, int]]  # of one process: numbers of leaf and box, by the box's name
    plain: dict[str, BoundExpr]  # the same, before weights were quantised


def plan_writes(
    leaves: Sequence[LeafWrite],
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> WritePlan:
    """Plan the writes of one process; `leaves` are equal on every process, in order, too."""
    planner = WritePlanner(leaves, options, process_index, process_count)
    if options.layout == "hf":
        return planner.hf()
    stored, pieces = planner.own_pieces(folder="")
    return WritePlan(tuple(leaves), (), (), pieces, stored, process_index, process_count)


def plan_all_writes(
    leaves: Sequence[LeafWrite], *, options: WriteOptions, process_count: int
) -> WritePlan:
    """Plan the files of all processes, as `own` of the plan; layout `hf` has one process."""
    if options.layout == "hf":
        return plan_writes(leaves, options=options)
    planner = WritePlanner(leaves, options, 0, process_count)
    stored, files = planner.pieces(None, "", range(process_count))
    return WritePlan(tuple(leaves), (), tuple(files), None, stored, 0, process_count)


def plan_consolidation(
    tensors: Sequence[NewTensor],
    stored: StoredPieces,
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> WritePlan:
    """Plan the assembly of tensors that are stored in pieces into files of layout `hf`."""
    nobody = GlobalShards((), ())
    leaves = [LeafWrite(tensor, tensor.dtype.numpy, nobody) for tensor in tensors]
    return WritePlanner(leaves, options, process_index, process_count).hf(stored)


def plan_mapped_writes(
    leaves: Sequence[LeafWrite],
    values: Iterable[str],
    mapping: LeafMapping | None,
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> tuple[WritePlan, MappedTensors]:
    """Plans a save of computed tensors: through a mapping for loading, or quantised, or both.

    Several processes leave the leaves in pieces. `values` are leaves that are not arrays.
    """
    of_process = {"process_index": process_index, "process_count": process_count}
    planner = WritePlanner(leaves, options, process_index, process_count)
    stored, pieces = planner.own_pieces() if process_count > 1 else (None, None)
    boxes = {leaf.tensor.name: leaf.held.boxes for leaf in leaves}
    if stored is not None:
        boxes = {name: tuple(piece.box for piece in stored.boxes(name)) for name in boxes}
    specs = TensorSpecs(
        {leaf.tensor.name: (leaf.tensor.shape, leaf.values.newbyteorder("=")) for leaf in leaves},
        pieces=named_pieces(boxes),
    )
    tensors: list[NewTensor] = []
    expressions: dict[str, BoundExpr] = {}
    plain = saved_tensors(mapping, specs, values)
    for name, expr in tensors_to_write(plain, options.dtype, options.quantize).items():
        shape, expr = expr.shape, row_major(expr)
        expressions[name] = expr
        size = math.prod(shape)
        dtype = storage_dtype(expr.dtype, size, is_recorded=False, tensor=name)
        tensors.append(NewTensor(name, dtype, shape))
    files = plan_consolidation(tensors, StoredPieces((), (), {}), options=options, **of_process)
    own = tuple(
        file._replace(gathered=tuple(len(leaves) + number for number in file.gathered))
        for file in files.own
    )
    plan = dataclasses.replace(
        files, leaves=(*leaves, *files.leaves), own=own, pieces=pieces, stored=stored
    )
    held = {
        place: (number, at)
        for number, of_leaf in enumerate(specs.pieces.values() if stored is None else ())
        for at, (_, place) in enumerate(of_leaf)
    }
    return plan, MappedTensors(expressions, held, plain)


def tensors_to_write(
    plain: Mapping[str, BoundExpr], dtype: np.dtype | None, quantize: Quantizes | None
) -> dict[str, BoundExpr]:
    """Return the tensors of the files, quantised or in another dtype where these say so."""
    tensors = dict(plain) if quantize is None else quantize.apply(plain, dtype)
    if dtype is None:
        return tensors
    cast = {name for name, expr in plain.items() if is_floating(expr.dtype)}
    refuse_casts_of_codes(
        (AskedCast(name, plain[name].shape, plain[name].dtype, dtype) for name in cast),
        plain,
        lambda name: plain[name].dtype,
        hint_to_cast_before,
    )
    return {
        name: Valued.of(expr, Cast(dtype)) if name in cast and expr is plain[name] else expr
        for name, expr in tensors.items()
    }


_Member = tuple[NewTensor, int, Tile | None]
"""A tensor of a file, the number of its leaf, and what of the leaf it is; None if gathered."""


class WritePlanner:
    """Plans the writes of process `index` of `count`."""

    def __init__(
        self, leaves: Sequence[LeafWrite], options: WriteOptions, index: int, count: int
    ) -> None:
        self._leaves = tuple(leaves)
        self._metadata: Mapping[str, str] = {"format": "pt", **options.metadata}
        self._max_file_bytes, self._stem = options.max_file_bytes, options.file_stem
        self._index, self._count = index, count
        least = options.replicate_below_bytes if options.layout == "sharded" else 0
        self._writers = PieceWriters(count, replicate_below_bytes=least)
        self._whole: dict[tuple[int, int], Tile | None] = {}

    def hf(self, stored: StoredPieces | None = None) -> WritePlan:
        """Return files of whole tensors; `stored` are their pieces, if they are written already."""
        numbers = {leaf.tensor.name: number for number, leaf in enumerate(self._leaves)}
        files = split((leaf.tensor for leaf in self._leaves), self._max_file_bytes, self._stem)
        owners = self._file_owners([[numbers[t.name] for t in tensors] for _, tensors in files])
        exchanged: list[int] = []
        described: list[tuple[str, int, tuple[NewTensor, ...]]] = []
        own: list[FileWrite] = []
        for (name, tensors), owner in zip(files, owners, strict=True):
            members: list[_Member] = []
            for tensor in tensors:
                number = numbers[tensor.name]
                whole = None if stored is not None else self._whole_tile(number, owner)
                members.append((tensor, number, whole))
                if whole is not None:
                    self._writers.load[owner] += tensor.nbytes
                elif tensor.nbytes:
                    exchanged.append(number)
            if owner == self._index:
                own.append(_file(name, members, self._metadata))
            described.append((name, owner, tuple(tensors)))
        pieces = None
        if stored is None and exchanged:
            stored, pieces = self.own_pieces(sorted(exchanged))
        place = self._index, self._count
        return WritePlan(self._leaves, tuple(described), tuple(own), pieces, stored, *place)

    def _whole_tile(self, number: int, process: int) -> Tile | None:
        """Return all of a leaf as one tile, if a process holds it so."""
        held = self._leaves[number].held
        key = (id(held), process)
        if key not in self._whole:
            tiles = tile(held.boxes) if held.held_by(process) else []
            self._whole[key] = tiles[0] if len(tiles) == 1 else None
        return self._whole[key]

    def _file_owners(self, members: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the owner of each file, of which `members` are the leaves."""
        if self._count == 1:
            return (0,) * len(members)
        held = np.zeros((len(members), self._count), np.int64)
        share: dict[int, np.ndarray] = {}  # elements that each process holds, by sharding
        for file, leaves in enumerate(members):
            for leaf in (self._leaves[number] for number in leaves):
                key = id(leaf.held)
                if key not in share:
                    share[key] = np.zeros(self._count, np.int64)
                    for box, holders in zip(*leaf.held, strict=True):
                        share[key][list(holders)] += box.size
                held[file] += share[key] * leaf.tensor.dtype.bits // 8
        sizes = [sum(self._leaves[n].tensor.nbytes for n in leaves) for leaves in members]
        return file_owners(sizes, held, self._count)

    def own_pieces(
        self, numbers: Sequence[int] | None = None, folder: str = PIECES_FOLDER
    ) -> tuple[StoredPieces, FileWrite | None]:
        """Return the pieces of leaves, by default all, and this process's file of them, if any."""
        stored, files = self.pieces(numbers, folder, (self._index,))
        return stored, files[0] if files else None

    def pieces(
        self, numbers: Sequence[int] | None, folder: str, processes: Collection[int]
    ) -> tuple[StoredPieces, list[FileWrite]]:
        """Return the pieces of some leaves, and the files that some processes write of them."""
        prefix = f"{folder}/" if folder else ""
        names = [
            f"{prefix}{piece_file_prefix(process)}{self._count:05}.safetensors"
            for process in range(self._count)
        ]
        numbers_of: dict[int, int] = {}
        classes: list[tuple[StoredTile, ...]] = []
        written: list[list[StoredTile]] = []  # of each class, by `processes`
        tensors: dict[str, StoredTensor] = {}
        members: dict[int, list[_Member]] = {process: [] for process in processes}
        for number in range(len(self._leaves)) if numbers is None else numbers:
            leaf = self._leaves[number]
            name, dtype, shape = leaf.tensor
            dtype = DTYPES["U8"] if dtype.packed else dtype
            tiles = self._writers.choose(leaf.held, dtype.bits // 8)
            class_number = numbers_of.setdefault(id(tiles), len(classes))
            if class_number == len(classes):
                classes.append(tiles)
                written.append([stored for stored in tiles if stored.process in members])
            tensors[name] = StoredTensor(dtype.code, shape, class_number)
            for process, part in written[class_number]:
                piece = NewTensor(piece_name(name, shape, part.box), dtype, part.box.shape)
                members[process].append((piece, number, part))
        # A tree without tensors has a file, too, so that it is a checkpoint.
        used = sorted({process for tiles in classes for process, _ in tiles}) or [0]
        file_number = {process: place for place, process in enumerate(used)}
        pieces = StoredPieces(
            files=tuple(names[process] for process in used),
            classes=tuple(
                tuple(StoredBox(*part.box, file_number[process]) for process, part in tiles)
                for tiles in classes
            ),
            tensors=tensors,
        )
        metadata = {} if folder else {**self._metadata, SAVE_ID: NO_SAVE_ID}
        owned = [process for process in used if process in members]
        return pieces, [_file(names[p], members[p], metadata) for p in owned]


def _file(name: str, members: Sequence[_Member], metadata: Mapping[str, str]) -> FileWrite:
    sources = {tensor.name: (number, part) for tensor, number, part in members}
    layout = lay_out(name, [tensor for tensor, _, _ in members], metadata)
    parts: list[FilePart] = []
    gathered: list[int] = []
    for entry in layout.tensors:
        number, part = sources[entry.name]
        if part is None and entry.nbytes:
            gathered.append(number)
        elif part is not None and entry.nbytes:
            parts.append(FilePart(number, part, entry.dtype, entry.start, entry.stop))
    return FileWrite(name, layout, tuple(parts), tuple(gathered))
