"""Sources of an array's values: a stored tensor, or an expression over several."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping as Dict, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import ONE_A_BYTE, SUB_BYTE, TensorEntry
from orbax_safetensors_layout.geometry import (
    AffineView,
    Box,
    Tile,
    row_major_strides,
    tile,
)
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    BoundExpr,
    DecodedPiece,
    FillPiece,
    LeafExpr,
    Mapping,
    Piece,
    ValueOp,
    WholeTensor,
    affine_pieces,
    bytes_by_rows,
    check_mapping,
    is_opaque,
)
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.sharding import AddressableShards

from .leaf_reads import LeafRead, TensorPiece
from .stored_tensors import LocatedPieces, StoredTensors

T = TypeVar("T")
_MOST_SPLIT = 8  # a read straight into place is worth this many times as many pieces


class ComposedBlock(NamedTuple):
    """A part of some boxes that is composed of several arrays, after they have been read."""

    tile: Tile  # its members are numbers of boxes of the region, of which it has a part
    pieces: tuple[Piece, ...]
    inputs: tuple[LeafRead, ...]  # the reads of its affine pieces, in their order


class LeafPlan(NamedTuple):
    """The read of boxes of an array, or the blocks that are composed of several arrays."""

    read: LeafRead | None
    ops: tuple[ValueOp, ...] = ()  # on the values of `read`
    blocks: tuple[ComposedBlock, ...] = ()

    def reads(self) -> Iterator[LeafRead]:
        if self.read is not None:
            yield self.read
        for block in self.blocks:
            yield from block.inputs

    def with_reads(self, change: Callable[[LeafRead], LeafRead]) -> LeafPlan:
        """Return the plan with each of its reads changed."""
        read = None if self.read is None else change(self.read)
        blocks = [b._replace(inputs=tuple(map(change, b.inputs))) for b in self.blocks]
        return self._replace(read=read, blocks=tuple(blocks))


class FileOrder(NamedTuple):
    """The order of a box's values in the files, for those who may read parts of it."""

    strides: tuple[int, ...]  # bytes from one element to the next along each dimension
    joint_axes: tuple[int, ...] = ()  # dimensions that are read as a whole, whatever is needed
    is_decoded: bool = False  # whether values are composed of several reads


class StoredSource(NamedTuple):
    """A tensor as it is stored; `catalog` locates its pieces, if it is stored in pieces."""

    entry: TensorEntry
    catalog: Catalog | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> np.dtype:
        return self.entry.dtype.numpy

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its file."""
        return self.entry.nbytes

    @property
    def stored_bytes(self) -> int:
        return self.entry.nbytes

    @property
    def file(self) -> str | None:
        return self.entry.file

    def tensor_names(self) -> list[str]:
        return [self.entry.name]

    @property
    def place(self) -> tuple[str, int]:
        return self.entry.file, self.entry.start

    def strides(self, box: Box) -> tuple[int, ...]:
        """Return bytes from one element to the next along each dimension of a box."""
        return _byte_strides(self.shape, self.entry.dtype.bits)

    def file_order(self, box: Box) -> FileOrder:
        return FileOrder(self.strides(box))

    def plan(
        self, name: str, local: AddressableShards, dtype: np.dtype, block_bytes: int
    ) -> LeafPlan:
        """Plan the read of boxes, as if the tensor were stored in one piece."""
        return LeafPlan(LeafRead.plain(self.entry.name, self.entry, local, dtype))

    def needs(self, plan: LeafPlan) -> Iterator[tuple[str, Box]]:
        """Yields the regions of tensors, by name, that a plan reads."""
        assert plan.read is not None
        for box in plan.read.local.boxes:
            yield plan.read.name, box

    def resolve_pieces(self, plan: LeafPlan, pieces: LocatedPieces) -> LeafPlan:
        """Return a plan with the pieces that its regions are made of."""
        assert plan.read is not None
        sources, pattern = pieces.of_boxes(plan.read.name, plan.read.local.boxes)
        return LeafPlan(plan.read._replace(sources=sources, pattern=pattern))


def _once_for_similar(method: Callable[..., T]) -> Callable[..., T]:
    """Computes what does not depend on names once for all similar expressions."""

    @functools.wraps(method)
    def cached(self: MappedSource, *args: object) -> T:
        model, call = self.leaf.model, (method, *args)
        if model.cached is None:
            return method(self, *args)
        try:
            result: T = model.cached[call]
        except KeyError:
            first = MappedSource(LeafExpr.of_model(model), self.tensors)
            result = model.cached[call] = method(first, *args)
        return result

    return cached


class MappedSource(NamedTuple):
    """An expression over tensors."""

    leaf: LeafExpr
    tensors: StoredTensors

    @property
    def bound(self) -> BoundExpr:
        return self.leaf.bound

    @property
    def catalog(self) -> Catalog | None:
        """Locates the pieces of the tensors, if some are stored in pieces."""
        return self.tensors.catalog

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def dtype(self) -> np.dtype:
        return self.leaf.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    @_once_for_similar
    def stored_bytes(self) -> int:
        """Bytes that it takes in the files: at most all of its tensors, and their elements."""
        entries = [self.tensors[name] for name in self.bound.sources()]
        if not entries:
            return 0
        elements = math.prod(self.shape) * entries[0].dtype.bits // 8
        return min(elements, sum(entry.nbytes for entry in entries))

    def tensor_names(self) -> list[str]:
        """Return the names of the tensors that it takes."""
        return self.leaf.sources()

    @property
    def file(self) -> str | None:
        """The file of the first tensor that it takes."""
        sources = self.leaf.sources()
        return self.tensors[sources[0]].file if sources else None

    @property
    def place(self) -> tuple[str, int]:
        """The file and offset where the first tensor that it takes begins."""
        sources = self.leaf.sources()
        return min((self.tensors[name].file, self.tensors[name].start) for name in sources)

    @_once_for_similar
    def strides(self, box: Box) -> tuple[int, ...] | None:
        """Return strides, as far apart as the ends of a box are in the files, a step of each axis.

        They are infinite between tensors; None where nothing is read, or always all.
        """
        pieces = self._first(box)
        if is_opaque(pieces):
            return None
        first = next(affine_pieces(pieces), None)
        if first is None:  # it begins with a fill
            itemsize, strides = self.dtype.itemsize, row_major_strides(self.shape)
            return tuple(n * itemsize for n in strides) if self.bound.sources() else None
        bits = self.tensors[first.source].dtype.bits
        apart = []
        for axis, (low, high, length) in enumerate(zip(*box, self.shape, strict=True)):
            steps = max(high - low - 1, min(1, length - 1))  # to its end, or its neighbour
            while True:
                start = min(low, length - 1 - steps)
                distance = self._distance(box.along(axis, start, start + steps + 1), axis)
                if distance or steps == length - 1:
                    break
                steps = min(2 * steps, length - 1)  # all of these share a word
            far = math.isinf(distance)
            apart.append(sys.maxsize if far else -(-int(distance) * bits // (8 * max(1, steps))))
        return tuple(apart)

    @_once_for_similar
    def file_order(self, box: Box) -> FileOrder | None:
        """Return the order of a box's values; None where nothing is read, or always all."""
        strides = self.strides(box)
        if strides is None:
            return None
        return FileOrder(strides, self._joint_axes(box, strides), self.is_decoded(box))

    def _joint_axes(self, box: Box, strides: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of a box that are read as a whole, whatever part is needed.

        Of heads that are decoded, one element of each takes the rows of all elements.
        """
        for axis, stride in enumerate(strides):
            if stride == sys.maxsize:
                box = box.along(axis, box.start[axis], box.start[axis] + 1)
        whole = self._taken_bytes(box)
        single = (box.along(axis, n, n + 1) for axis, n in enumerate(box.start))
        return tuple(
            axis
            for axis, slab in enumerate(single)
            if box.shape[axis] > 1 and 4 * self._taken_bytes(slab) > 3 * whole
        )

    @_once_for_similar
    def is_decoded(self, box: Box) -> bool:
        """Whether values of a box are composed of several reads."""
        return any(isinstance(piece, DecodedPiece) for piece in self._first(box))

    def plan(
        self, name: str, local: AddressableShards, dtype: np.dtype, block_bytes: int
    ) -> LeafPlan:
        """Plan a read straight into place where possible, else composed parts of `block_bytes`."""
        plan = self._plan(local, dtype, block_bytes)
        entries, model = self.tensors.entries, self.leaf.model
        if model.cached is None:
            return plan.with_reads(lambda read: read._replace(name=name))
        names = dict(zip(model.names, self.leaf.names, strict=True))

        def of(read: LeafRead) -> LeafRead:
            of_leaf = [entries[names[source.entry.name]] for source in read.sources]
            pieces = zip(of_leaf, read.sources, strict=True)
            sources = tuple(TensorPiece(entry, *source[1:]) for entry, source in pieces)
            return read._replace(name=name, sources=sources)

        return plan.with_reads(of)

    @_once_for_similar
    def _plan(self, local: AddressableShards, dtype: np.dtype, block_bytes: int) -> LeafPlan:
        tiles = tile(local.boxes)
        is_decoded = any(self.is_decoded(joined.box) for joined in tiles)
        pieces = [] if is_decoded else self._pieces([joined.box for joined in tiles])
        affine = [piece for piece in pieces if isinstance(piece, AffinePiece)]
        fills = [piece for piece in pieces if isinstance(piece, FillPiece)]
        formats = {(self.tensors[piece.source].dtype, piece.ops) for piece in affine}
        is_whole = len(affine) + len(fills) == len(pieces) and not _is_factored(affine)
        if is_whole and len(formats) == 1:  # none where pieces are decoded
            ((stored, ops),) = formats
            # Elements that share bytes are read where they are; beside fills there is no cast.
            if not stored.packed and (not fills or dtype == self.dtype):
                read = self._read(self.shape, affine, local, dtype)
                return LeafPlan(read._replace(is_computed=bool(ops), fills=tuple(fills)), ops)
        blocks = [self._parts(joined, block_bytes) for joined in tiles]
        # The first of all tiles, then the second of all: neighbours in the file come together.
        in_turn = [block for row in itertools.zip_longest(*blocks) for block in row if block]
        return LeafPlan(None, blocks=tuple(self._compose(block) for block in in_turn))

    def needs(self, plan: LeafPlan) -> Iterator[tuple[str, Box]]:
        """Yields the pieces of tensors, by the tensor's name, that a plan reads."""
        for read in plan.reads():
            for source in read.sources:
                if source.entry.name in self.tensors.places:
                    yield self.tensors.places[source.entry.name]

    def resolve_pieces(self, plan: LeafPlan, pieces: LocatedPieces) -> LeafPlan:
        """Return a plan with the places of its pieces."""

        def entry(of: TensorEntry) -> TensorEntry:
            place = self.tensors.places.get(of.name)
            return of if place is None else pieces.entry(*place)._replace(dtype=of.dtype)

        def resolve(read: LeafRead) -> LeafRead:
            sources = tuple(source._replace(entry=entry(source.entry)) for source in read.sources)
            return read._replace(sources=sources)

        return plan.with_reads(resolve)

    def _parts(self, joined: Tile, most_bytes: int) -> Iterator[Tile]:
        """Yields a tile in parts, near together in the files, of bounded values and inputs."""
        box = joined.box
        is_small = box.size * self.dtype.itemsize <= most_bytes // 4
        if is_opaque(self.bound.nodes()) or (is_small and not bytes_by_rows(self.bound.nodes())):
            yield joined
            return
        distances = [self._distance(box, axis) for axis in range(len(box.start))]
        ends = [box, box]  # of axes along which each index is in other tensors
        for axis, distance in enumerate(distances):
            if math.isinf(distance):
                low, high = box.start[axis], box.stop[axis]
                ends = [ends[0].along(axis, low, low + 1), ends[1].along(axis, high - 1, high)]
        taken = max(map(self._taken_bytes, ends)) * box.size // ends[0].size
        nbytes = max(taken, box.size * self.dtype.itemsize)
        most = box.size * most_bytes // nbytes
        axes = sorted(range(len(distances)), key=distances.__getitem__, reverse=True)
        yield from joined.slabs(max(1, most), axes=axes)

    def _first(self, box: Box) -> tuple[Piece, ...]:
        """Return the pieces of the first element of a box, if it has any."""
        stop = tuple(min(a + 1, b) for a, b in zip(*box, strict=True))
        return self.bound.pull_back(Box(box.start, stop), factored=True)

    def _taken_bytes(self, box: Box) -> int:
        pieces = affine_pieces(self.bound.pull_back(box, factored=True))
        bits = sum(math.prod(p.view.shape) * self.tensors[p.source].dtype.bits for p in pieces)
        return bits // 8

    def _distance(self, box: Box, axis: int) -> float:
        """Return how far apart in the files the ends of an axis of a box are."""
        ends = []
        for end in (box, box.along(axis, box.stop[axis] - 1, box.stop[axis])):
            pieces = affine_pieces(self._first(end))
            ends.append(next(((p.source, p.view.offset) for p in pieces), None))
        near, far = ends
        if near is None or far is None or near[0] != far[0]:
            return math.inf if near != far else 0
        return abs(near[1] - far[1])

    def _pieces(self, boxes: Sequence[Box]) -> list[Piece]:
        """Return the pieces of boxes; factored ones where the others would be many times more."""
        pull = functools.partial(self.bound.pull_back, gathers=True)
        # Interleaved rows, as of rotary embeddings, are a piece each, or one factored piece.
        factored = [piece for box in boxes for piece in pull(box, factored=True)]
        if not _is_factored(factored):
            return factored
        pieces = [piece for box in boxes for piece in pull(box)]
        return pieces if len(pieces) <= _MOST_SPLIT * len(factored) else factored

    def _read(
        self,
        shape: tuple[int, ...],
        pieces: list[AffinePiece],
        local: AddressableShards,
        dtype: np.dtype,
    ) -> LeafRead:
        nested = [part for piece in pieces for part in _nested(piece)]
        sources = tuple(
            TensorPiece(self.tensors[p.source], p.box, p.view, p.gather) for p in nested
        )
        return LeafRead("", shape, sources[0].entry.dtype, sources, local, dtype)

    def _compose(self, block: Tile) -> ComposedBlock:
        pieces = self.bound.pull_back(block.box, factored=True)
        inputs = []
        for piece in affine_pieces(pieces):
            entry = self.tensors[piece.source]
            if entry.dtype.packed:
                local = AddressableShards.private((_packed_region(piece.view, entry.shape),))
                inputs.append(LeafRead.plain(entry.name, entry, local, entry.dtype.numpy))
                continue
            # The piece by itself: its region is an array that begins at index 0.
            region = Box.whole(piece.view.shape)
            moved = piece._replace(box=region)
            local = AddressableShards.private((region,))
            inputs.append(self._read(region.shape, [moved], local, entry.dtype.numpy))
        return ComposedBlock(block, pieces, tuple(inputs))


def _packed_region(view: AffineView, shape: tuple[int, ...]) -> Box:
    """Return the region that a view is, or the rows that hold all of it."""
    region = view.box_in(shape)
    if region is None:
        (low, high), row = view.bounds, math.prod(shape[1:])
        region = Box.whole(shape).along(0, low // row, -(-high // row))
    return region


@functools.lru_cache(1024)
def _byte_strides(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    return tuple(-(-stride * bits // 8) for stride in row_major_strides(shape))


def _is_factored(pieces: Sequence[Piece]) -> bool:
    return any(
        isinstance(p, AffinePiece) and p.gather is None and p.view.shape != p.box.shape
        for p in pieces
    )


def _nested(piece: AffinePiece) -> Iterator[AffinePiece]:
    """Yields a piece in runs of bytes; `x.take(0, [2, 1, 1, 0]).reshape(2, 2)` has several."""
    box, view = piece.box, piece.view
    if view.is_nested:
        yield piece
        return
    axis = min((n, a) for a, n in enumerate(view.shape) if n > 1 and view.strides[a])[1]
    for index in range(view.shape[axis]):
        part = Box.whole(view.shape).along(axis, index, index + 1)
        place = box.start[axis] + index
        moved = box.along(axis, place, place + 1)
        yield from _nested(piece._replace(box=moved, view=view.restrict(part)))


ArraySource = StoredSource | MappedSource


def array_sources(
    catalog: Catalog,
    mapping: Mapping | None,
    names: Dict[str, tuple[int, ...] | None] | None = None,  # with their shapes, if known
) -> dict[str, ArraySource]:
    """Return arrays, those of `names` or all, by name; only headers that are needed are fetched."""
    is_known = names is not None and None not in names.values()
    if mapping is None:
        asked = catalog.names if names is None else names
        entries = catalog.entries(asked, compares_shapes=is_known)
        in_pieces = catalog if catalog.layout == "sharded" else None
        return {name: StoredSource(entry, in_pieces) for name, entry in entries.items()}
    check_mapping(mapping)
    matched, entries = mapping.matched_entries(catalog, names, compares_shapes=is_known)
    tensors = StoredTensors(entries, catalog)
    try:
        with frozen_heap():  # the headers' entries, too
            bound = matched.bind(tensors.entries, tensors.pieces)
    except MappingError as error:
        raise catalog.explained(error) from None
    return {name: MappedSource(leaf, tensors) for name, leaf in bound.leaves.items()}


def leaf_sources(catalog: Catalog, expressions: Dict[str, BoundExpr]) -> dict[str, ArraySource]:
    """Return tensors made of leaves, which the catalog has in pieces, sub-byte ones one a byte."""
    nodes = (node for expr in expressions.values() for node in expr.nodes())
    dtypes = {node.name: node.dtype for node in nodes if isinstance(node, WholeTensor)}
    entries = catalog.entries(dtypes)
    for name, dtype in dtypes.items():
        if dtype in SUB_BYTE:
            entries[name] = entries[name]._replace(dtype=ONE_A_BYTE[dtype.name])
    tensors = StoredTensors(entries, catalog)
    return {name: MappedSource(LeafExpr.alone(expr), tensors) for name, expr in expressions.items()}
