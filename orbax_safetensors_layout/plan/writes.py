"""Plans writes: the files of each process, and the shards that their bytes come from.

In layout `hf` a file has one owner. Tensors that the owner holds completely go straight into the
file; the shards of the others are first written as pieces, each by one of its holders, and the
owner assembles them after all have been written. In layout `sharded` the pieces are the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import (
    DTYPES,
    MAIN_INDEX,
    NO_SAVE_ID,
    SAVE_ID,
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
)
from orbax_safetensors_layout.geometry import Tile, tile
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.sharding import GlobalShards

from .cost import Cost
from .ownership import PieceWriters, StoredTile, file_owners

PIECES_FOLDER = "orbax_safetensors_layout.pieces"
"""The folder of pieces for the owners of files; it is removed when a save is complete.

No other program has a folder of this name: a save into a bucket removes the rest of a crash."""


class LeafWrite(NamedTuple):
    """One tensor of the tree that is saved.

    Attributes:
        tensor: Its name, shape, and dtype in the file.
        values: Dtype of the values in memory, which are cast to the file's.
        held: Its boxes and the processes that hold them.
    """

    tensor: NewTensor
    values: np.dtype
    held: GlobalShards


class FilePart(NamedTuple):
    """A contiguous range of a file that comes from shards of this process.

    Attributes:
        leaf: Number of the leaf.
        tile: The region of the tensor, of which members are boxes of the leaf, by number.
        dtype: Dtype in this file.
        start: First byte in the file.
        stop: One past the last byte.
    """

    leaf: int
    tile: Tile
    dtype: DType
    start: int
    stop: int


class FileWrite(NamedTuple):
    """One file that this process writes.

    Attributes:
        name: Its name, relative to the checkpoint's folder.
        layout: Header, tensors and size.
        parts: The ranges that come from this process's own shards, by offset.
        gathered: Numbers of the leaves that come from pieces, in the order of the file.
    """

    name: str
    layout: FileLayout
    parts: tuple[FilePart, ...]
    gathered: tuple[int, ...]

    @property
    def is_temporary(self) -> bool:
        """Whether it is gone when the save is complete."""
        return self.name.startswith(f"{PIECES_FOLDER}/")

    def stamped(self, save_id: str) -> FileWrite:
        """Return the file with the id of a save in its header."""
        return self._replace(layout=self.layout.stamped(save_id))


@dataclasses.dataclass(frozen=True, slots=True)
class WritePlan:
    """The writes of process `process_index`.

    Attributes:
        leaves: All tensors of the tree.
        files: Names of the checkpoint's files, each with its owner and its tensors.
        own: The files that this process owns.
        pieces: This process's file of pieces, if it has one.
        stored: The places of all processes' pieces; None where there are none.
        process_index: The process.
        process_count: Number of processes.
    """

    leaves: tuple[LeafWrite, ...]
    files: tuple[tuple[str, int, tuple[NewTensor, ...]], ...]
    own: tuple[FileWrite, ...]
    pieces: FileWrite | None
    stored: StoredPieces | None
    process_index: int
    process_count: int

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
        own, pieces = tuple(file.stamped(save_id) for file in self.own), self.pieces
        if pieces is not None:
            pieces = pieces.stamped(save_id)
        stored = dataclasses.replace(self.stored, save_id=save_id)
        return dataclasses.replace(self, own=own, pieces=pieces, stored=stored)

    def index(self) -> dict[str, bytes]:
        """Return the index of several files of whole tensors, by name; empty without one."""
        if len(self.files) < 2:
            return {}
        return {MAIN_INDEX: index_bytes([(name, tensors) for name, _, tensors in self.files])}

    def writes(self) -> Iterator[FileWrite]:
        """Yields every file that this process writes."""
        yield from self.own
        if self.pieces is not None:
            yield self.pieces

    def cost(self) -> Cost:
        """Return the cost of the plan for this process."""
        written = files = needed = read = 0
        touched: set[int] = set()
        for file in self.writes():
            files += 1
            written += file.layout.size
            touched.update(part.leaf for part in file.parts)
            touched.update(file.gathered)
            needed += sum(part.stop - part.start for part in file.parts)
            read += sum(self.leaves[leaf].tensor.nbytes for leaf in file.gathered)
        return Cost(
            tensors=len(touched),
            needed_bytes=needed,
            read_bytes=read,
            written_bytes=written,
            files=files,
        )

    def __str__(self) -> str:
        lines = [
            f"{name}  process {owner}  {len(tensors):,} tensors  "
            f"{sum(t.nbytes for t in tensors):,} bytes"
            for name, owner, tensors in self.files
        ]
        return "\n".join([*lines, str(self.cost())])


def plan_writes(
    leaves: Sequence[LeafWrite],
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> WritePlan:
    """Plan the writes of one process; `leaves` are equal on every process, in order, too."""
    planner = _Planner(leaves, options, process_index, process_count)
    return planner.hf() if options.layout == "hf" else planner.sharded()


def plan_all_writes(
    leaves: Sequence[LeafWrite], *, options: WriteOptions, process_count: int
) -> WritePlan:
    """Plans the files of all processes of a save, which are `own` of the plan.

    Args:
        leaves: The tensors; layout `hf` takes each from the first process.
        options: How to write.
        process_count: How many processes layout `sharded` has files of.
    """
    if options.layout == "hf":
        return plan_writes(leaves, options=options)
    planner = _Planner(leaves, options, 0, process_count)
    stored, files = planner.pieces(range(len(leaves)), "", range(process_count))
    return WritePlan(tuple(leaves), (), tuple(files), None, stored, 0, process_count)


def plan_consolidation(
    tensors: Sequence[NewTensor],
    stored: StoredPieces,
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> WritePlan:
    """Plan the assembly of tensors that are stored in pieces into files of layout `hf`.

    Args:
        tensors: The tensors.
        stored: Their pieces.
        options: The options.
        process_index: The process.
        process_count: Number of processes, each of which owns some files.
    """
    nobody = GlobalShards((), ())
    leaves = [LeafWrite(tensor, tensor.dtype.numpy, nobody) for tensor in tensors]
    return _Planner(leaves, options, process_index, process_count).hf(stored)


def plan_mapped_writes(
    leaves: Sequence[LeafWrite],
    tensors: Sequence[NewTensor],
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> WritePlan:
    """Plan the writes of `tensors` that a mapping makes of `leaves`.

    Several processes leave the leaves in pieces, of which the files' owners make the tensors.
    """
    pieces: FileWrite | None = None
    stored: StoredPieces | None = None
    if process_count > 1:
        planner = _Planner(leaves, options, process_index, process_count)
        stored, pieces = planner.own_pieces(range(len(leaves)), PIECES_FOLDER)
    empty = StoredPieces((), (), {})
    files = plan_consolidation(
        tensors, empty, options=options, process_index=process_index, process_count=process_count
    )
    first = len(leaves)
    own = tuple(
        file._replace(gathered=tuple(first + number for number in file.gathered))
        for file in files.own
    )
    return dataclasses.replace(
        files, leaves=(*leaves, *files.leaves), own=own, pieces=pieces, stored=stored
    )


class _Planner:
    def __init__(
        self, leaves: Sequence[LeafWrite], options: WriteOptions, index: int, count: int
    ) -> None:
        self._leaves = tuple(leaves)
        self._metadata: Mapping[str, str] = {"format": "pt", **options.metadata}
        self._max_file_bytes = options.max_file_bytes
        self._index = index
        self._count = count
        below = options.replicate_below_bytes if options.layout == "sharded" else 0
        self._writers = PieceWriters(count, replicate_below_bytes=below)

    def sharded(self) -> WritePlan:
        stored, pieces = self.own_pieces(range(len(self._leaves)), "")
        return WritePlan(self._leaves, (), (), pieces, stored, self._index, self._count)

    def hf(self, stored: StoredPieces | None = None) -> WritePlan:
        """Plans files of whole tensors; `stored` are their pieces, if they are written already."""
        numbers = {leaf.tensor.name: number for number, leaf in enumerate(self._leaves)}
        files = split((leaf.tensor for leaf in self._leaves), self._max_file_bytes)
        members = [[numbers[tensor.name] for tensor in tensors] for _, tensors in files]
        owners = self._file_owners(members)
        exchanged: list[int] = []
        own: list[FileWrite] = []
        whole = _WholeTiles()
        for (name, tensors), leaves, owner in zip(files, members, owners, strict=True):
            pieced = [leaf for leaf in leaves if self._is_pieced(leaf, owner, whole, stored)]
            exchanged += pieced
            apart = set(pieced)
            direct = (self._leaves[n].tensor.nbytes for n in leaves if n not in apart)
            self._writers.load[owner] += sum(direct)
            if owner == self._index:
                layout = lay_out(name, tensors, self._metadata)
                own.append(self._file(name, layout, numbers, apart, whole))
        described = tuple(
            (name, owner, tuple(tensors))
            for (name, tensors), owner in zip(files, owners, strict=True)
        )
        pieces = None
        if stored is None and exchanged:
            stored, pieces = self.own_pieces(sorted(exchanged), PIECES_FOLDER)
        place = self._index, self._count
        return WritePlan(self._leaves, described, tuple(own), pieces, stored, *place)

    def _is_pieced(
        self, leaf: int, owner: int, whole: _WholeTiles, stored: StoredPieces | None
    ) -> bool:
        tensor, _, held = self._leaves[leaf]
        return bool(tensor.nbytes) and (stored is not None or not whole.at(held, owner))

    def _file_owners(self, members: Sequence[Sequence[int]]) -> tuple[int, ...]:
        if self._count == 1:
            return (0,) * len(members)
        held = np.zeros((len(members), self._count), np.int64)
        share: dict[int, np.ndarray] = {}  # elements that each process holds, by sharding
        for file, leaves in enumerate(members):
            for number in leaves:
                leaf = self._leaves[number]
                elements = share.get(id(leaf.held))
                if elements is None:
                    elements = share[id(leaf.held)] = np.zeros(self._count, np.int64)
                    for box, holders in zip(*leaf.held, strict=True):
                        elements[list(holders)] += box.size
                held[file] += elements * leaf.tensor.dtype.bits // 8
        sizes = [sum(self._leaves[n].tensor.nbytes for n in leaves) for leaves in members]
        return file_owners(sizes, held, self._count)

    def _file(
        self,
        name: str,
        layout: FileLayout,
        numbers: Mapping[str, int],
        pieced: set[int],
        whole: _WholeTiles,
    ) -> FileWrite:
        parts: list[FilePart] = []
        gathered: list[int] = []
        for entry in layout.tensors:
            number = numbers[entry.name]
            if number in pieced:
                gathered.append(number)
            elif entry.nbytes:
                found = whole.at(self._leaves[number].held, self._index)
                assert found is not None
                parts.append(FilePart(number, found, entry.dtype, entry.start, entry.stop))
        return FileWrite(name, layout, tuple(parts), tuple(gathered))

    def own_pieces(
        self, numbers: Sequence[int], folder: str
    ) -> tuple[StoredPieces, FileWrite | None]:
        """Returns the pieces of some leaves, and this process's file of them, if it has one."""
        stored, files = self.pieces(numbers, folder, (self._index,))
        return stored, files[0] if files else None

    def pieces(
        self, numbers: Sequence[int], folder: str, processes: Collection[int]
    ) -> tuple[StoredPieces, list[FileWrite]]:
        """Returns the pieces of some leaves, and the files that some processes write of them."""
        prefix = f"{folder}/" if folder else ""
        names = [
            f"{prefix}{piece_file_prefix(process)}{self._count:05}.safetensors"
            for process in range(self._count)
        ]
        kinds: dict[int, int] = {}
        classes: list[tuple[StoredTile, ...]] = []
        written: list[list[StoredTile]] = []  # of each class, by `processes`
        tensors: dict[str, StoredTensor] = {}
        members: dict[int, dict[str, tuple[NewTensor, int, Tile]]] = {n: {} for n in processes}
        for number in numbers:
            leaf = self._leaves[number]
            name, dtype, shape = leaf.tensor
            dtype = DTYPES["U8"] if dtype.packed else dtype
            tiles = self._writers.choose(leaf.held, dtype.bits // 8)
            kind = kinds.setdefault(id(tiles), len(classes))
            if kind == len(classes):
                classes.append(tiles)
                written.append([found for found in tiles if found.process in members])
            tensors[name] = StoredTensor(dtype.code, shape, kind)
            for found in written[kind]:
                box = found.tile.box
                piece = NewTensor(piece_name(name, shape, box), dtype, box.shape)
                members[found.process][piece.name] = (piece, number, found.tile)
        # A tree without tensors has a file, too, so that it is a checkpoint.
        used = sorted({found.process for tiles in classes for found in tiles}) or [0]
        file_number = {process: place for place, process in enumerate(used)}
        stored = StoredPieces(
            files=tuple(names[process] for process in used),
            classes=tuple(
                tuple(
                    StoredBox(found.tile.box.start, found.tile.box.stop, file_number[found.process])
                    for found in tiles
                )
                for tiles in classes
            ),
            tensors=tensors,
        )
        metadata = {} if folder else {**self._metadata, SAVE_ID: NO_SAVE_ID}
        owned = [process for process in used if process in members]
        return stored, [_piece_file(names[p], members[p], metadata) for p in owned]


def _piece_file(
    name: str, members: Mapping[str, tuple[NewTensor, int, Tile]], metadata: Mapping[str, str]
) -> FileWrite:
    layout = lay_out(name, [piece for piece, _, _ in members.values()], metadata)
    parts = []
    for entry in layout.tensors:
        if entry.nbytes:
            _, number, found = members[entry.name]
            parts.append(FilePart(number, found, entry.dtype, entry.start, entry.stop))
    return FileWrite(name, layout, tuple(parts), ())


class _WholeTiles:
    """Arrays that a process holds completely, as one tile; computed once for each sharding."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[GlobalShards, Tile | None]] = {}

    def at(self, held: GlobalShards, process: int) -> Tile | None:
        key = (id(held), process)
        found = self._found.get(key)
        if found is None:
            alone = None
            if held.held_by(process):
                tiles = tile(held.boxes)
                alone = tiles[0] if len(tiles) == 1 else None
            found = self._found[key] = held, alone
        return found[1]
