"""Runs a conversion on one of several processes, from its groups to the committed folder.

1. The processes agree on what is converted; one prepares the conversion's own folder.
2. Groups that the journal does not have are read, written and recorded, each by one process.
3. What is there is read again, and its digests are compared with those of what was read.
4. The folder takes the place of the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import (
    FormatError,
    MismatchError,
    SafetensorsLayoutError,
    StorageError,
)
from orbax_safetensors_layout.options import ConvertOptions
from orbax_safetensors_layout.runtime import (
    Fingerprint,
    ProcessGroup as Processes,
    ProgressReport,
    Workers,
    progress_callback,
)
from orbax_safetensors_layout.storage import (
    Claim,
    LocalStorage,
    check_replaceable,
    claimed,
    partial_folder,
    storage_errors,
)

from .checkpoint_reader import CheckpointReader, SourceArray, arrays_of, check_chunks
from .groups import LeafGroup, make_groups, shares
from .journal import Journal, WrittenGroup
from .spool import Blocks, group_blocks
from .target import FINISHED, LeafRegion, Target, region_batches

_LARGER_BLOCKS = 2  # a continued run may take blocks so many times as large as its own would be
_IN_FLIGHT = 2  # blocks that are written while the next one is read
_UNFINISHED, _COMMITTED = "unfinished", "committed"


def conversion_block_bytes(folder: str, memory_budget_bytes: int, *, restart: bool) -> int:
    """Return the bytes of a block, read and written at once: those of a run that is continued.

    Up to three are in memory, each with the copies that a codec makes of it.
    """
    block_bytes = max(1, memory_budget_bytes // 16)
    workspace = partial_folder(folder, "convert")
    begun = None if restart else Journal.block_bytes(workspace)
    if begun is not None and begun > _LARGER_BLOCKS * block_bytes:
        needed = memory_budget_bytes * begun // (_LARGER_BLOCKS * block_bytes)
        raise SafetensorsLayoutError(
            "an unfinished conversion that was given more memory is beside the target",
            file=workspace,
            expected=f"memory_budget_bytes of at least {needed:,}",
            found=f"{memory_budget_bytes:,}",
            hint="Continue it with that much, or pass restart=True (--restart) to drop it.",
        )
    return begun or block_bytes


@dataclasses.dataclass
class Conversion:
    """One conversion, of `nbytes` of values."""

    source: CheckpointReader
    arrays: Mapping[str, SourceArray]
    target: Target
    folder: str
    options: ConvertOptions
    block_bytes: int
    _: dataclasses.KW_ONLY
    restart: bool  # drops what an interrupted run has done
    is_continued: bool  # by another call, if it is interrupted
    arguments: object  # distinguishes this from others of the same source and target, by `repr`
    reopen: Callable[[str], CheckpointReader]  # opens what was written, to compare it
    is_replaced: Callable[[str], bool]  # whether a name in `folder` goes with what is replaced

    def __post_init__(self) -> None:
        self._workspace = partial_folder(self.folder, "convert")
        self._finished = os.path.join(self._workspace, FINISHED)
        most, target = self.block_bytes, self.target
        used = dict.fromkeys(name for leaf in target.leaves for name in leaf.sources)
        arrays = (self.arrays[name] for name in used)
        check_chunks(self.source, arrays, self.options.memory_budget_bytes)
        regions = [target.regions(leaf, most) for leaf in target.leaves]
        self._groups = make_groups(self.source, self.arrays, target.leaves, regions, most)
        self.nbytes = sum(group.nbytes for group in self._groups)
        groups = hashlib.sha256()
        for leaf in target.leaves:
            groups.update(repr(leaf).encode())
        for group in self._groups:
            boxes = [(leaf.name, *box) for leaf, box in group.regions]
            groups.update(repr((boxes, *group[1:])).encode())
        arguments = repr((self.arguments, target.describe()))
        self._journal = Journal(
            self._workspace,
            self.source.identity(),
            hashlib.sha256(arguments.encode()).hexdigest(),
            block_bytes=most,
            groups=groups.hexdigest(),
        )

    @property
    def identity(self) -> str:
        """Equal for conversions of the same source with the same arguments."""
        return self._journal.identity

    @property
    def arrays_written(self) -> int:
        return len(self.target.leaves)

    def run(self, processes: Processes, check: Callable[[], None]) -> int:
        """Returns the bytes that an interrupted run had written.

        `check` may refuse the target, before anything is written there and in the end.
        """
        try:
            return self._run(processes, check)
        except BaseException as error:
            processes.fail(error)
            processes.abandon()
            # What was made of damaged files is not continued either.
            if isinstance(error, FormatError) or not self.is_continued:
                processes.await_others()  # who may be reading the journal
                # Not from another program that has begun the same since.
                with contextlib.suppress(StorageError), claimed(self.folder):
                    self._drop()
            raise

    def _run(self, processes: Processes, check: Callable[[], None]) -> int:
        with contextlib.ExitStack() as stack:
            agreed = Fingerprint(
                f"{self._journal.digest} {self.options.verify} {self.restart}",
                f"{len(self._groups)} groups",
                "All processes must convert the same checkpoint with the same arguments.",
            )
            processes.barrier("agreeing on what is converted", agree=agreed)
            state = _UNFINISHED
            with processes.together("preparing the folder"):
                if processes.is_leader:
                    claim = stack.enter_context(claimed(self.folder))
                    if not self.restart and claim.was_committed(self._journal.identity):
                        state = _COMMITTED
                    else:
                        self._prepare(claim, check)
            looking = "looking at what an earlier call has done"
            if processes.barrier(looking, broadcast=state) == _COMMITTED:
                return self.nbytes
            done = self._journal.read()
            processes.barrier("reading the journal")  # before anyone adds to it
            left = [group for group in self._groups if group.number not in done]
            with processes.together("converting"):
                self._convert(left, processes)
            done = self._journal.read()
            if self.source.verifying is not None:
                with processes.together("checking what was read"):
                    self.source.verifying.check(
                        [part for group in done.values() for part in group.read],
                        share=slice(processes.process_index, None, processes.process_count),
                    )
            with processes.together("completing the checkpoint"):
                if processes.is_leader:
                    written = [part for group in done.values() for part in group.written]
                    self.target.commit(self._workspace, written)
            if self.options.verify:
                with processes.together("verifying what was written"):
                    self._verify(processes)
            with processes.together("committing the checkpoint"):
                if processes.is_leader:
                    check()
                    self._check_source()
                    self._commit(claim)
        return self.nbytes - sum(group.nbytes for group in left)

    def _prepare(self, claim: Claim, check: Callable[[], None]) -> None:
        claim.forget()
        check()
        check_replaceable(self.folder)
        # Files without a journal are of a run that was killed while it dropped what it had.
        if self.restart or Journal.block_bytes(self._workspace) is None:
            self._drop()
        with LocalStorage() as storage:
            storage.make_folder(self._workspace)
        self._journal.read()

    def _drop(self) -> None:
        if not os.path.isdir(self._workspace):
            return
        self._journal.drop()  # first: what it has recorded counts as written
        with LocalStorage() as storage:
            storage.remove(self._workspace)

    def _convert(self, left: Sequence[LeafGroup], processes: Processes) -> None:
        """Converts this process's share of the groups that are left."""
        number, verifying = processes.process_index, self.source.verifying
        with contextlib.ExitStack() as stack:
            stack.callback(self.target.close)
            self.target.open(self._workspace, number)
            stack.enter_context(self._journal.opened(number))
            groups, report = stack.enter_context(self._share(left, processes, "converting"))
            for group in groups:
                processes.check("converting")
                with group_blocks(
                    self.source,
                    self.arrays,
                    group,
                    os.path.join(self._workspace, f"spool-{number}"),
                    most_bytes=self.options.memory_budget_bytes // 2,
                    block_bytes=self.block_bytes,
                ) as blocks:
                    digests = _digests(blocks, report, self.target.write)
                self.target.flush()
                read = [] if verifying is None else verifying.checksums.take()
                written = [] if self.target.written is None else self.target.written.take()
                self._journal.add(group.number, WrittenGroup(digests, read, written))

    def _verify(self, processes: Processes) -> None:
        """Reads this process's share of what was written, and compares every bit."""
        done = self._journal.read()
        differing: list[str] = []
        with (
            contextlib.closing(self.reopen(self._finished)) as written,
            self._share(self._groups, processes, "verifying") as (groups, report),
        ):
            arrays = {array.stored: array for array in arrays_of(written.tree).values()}
            place = self.target.stored_name
            for group in groups:
                processes.check("verifying what was written")
                blocks = (
                    (batch, written.read([(arrays[place(leaf)], box) for leaf, box in batch]))
                    for batch in region_batches(group.regions, self.block_bytes)
                )
                digests = _digests(blocks, report)
                known = done[group.number].digests
                compared = zip(group.regions, digests, known, strict=True)
                differing += [region.leaf.name for region, new, old in compared if new != old]
        problem = "what was written differs from the source"
        errors = [MismatchError(problem, tensor=name) for name in dict.fromkeys(differing)]
        if errors:
            raise MismatchError.collect(
                errors,
                hint="The disk or the memory of this machine may be failing; convert again with"
                " restart=True (--restart).",
            )

    @contextlib.contextmanager
    def _share(
        self, groups: Sequence[LeafGroup], processes: Processes, label: str
    ) -> Iterator[tuple[list[LeafGroup], ProgressReport]]:
        """Yields this process's share of some groups, and a report of its progress."""
        share = shares(groups, processes.process_count)[processes.process_index]
        with progress_callback(self.options.progress, label) as progress:
            yield share, ProgressReport(progress, sum(group.nbytes for group in share))

    def _check_source(self) -> None:
        """Raises if the source was written to: what was read may be of two checkpoints."""
        with storage_errors("cannot look at the source again", self.source.path):
            identity = self.source.identity()
        if identity != self._journal.source:
            raise StorageError(
                "the source was changed or replaced while it was converted",
                file=self.source.path,
                hint="Convert a checkpoint that nothing writes to, with restart=True (--restart).",
            )

    def _commit(self, claim: Claim) -> None:
        claim.commit(self._finished, is_replaced=self.is_replaced, identity=self._journal.identity)
        self._drop()


TakeBlock = Callable[[Sequence[LeafRegion], Sequence[np.ndarray]], None]


def _digests(
    blocks: Blocks, report: ProgressReport, write: TakeBlock = lambda regions, values: None
) -> list[str]:
    """Writes blocks while the next ones are read; returns digests of the regions, in order."""
    digests: dict[int, list[str]] = {}

    def take(number: int, regions: list[LeafRegion], values: list[np.ndarray]) -> None:
        write(regions, values)
        digests[number] = [_digest(value) for value in values]

    with Workers(_IN_FLIGHT, "convert-write") as workers:
        for number, (regions, values) in enumerate(blocks):
            if number >= _IN_FLIGHT:
                workers.progress()
            workers.submit(take, number, regions, values)
            report.add(sum(region.nbytes for region in regions), regions[-1].leaf.name)
        workers.join()
    return [digest for number in range(len(digests)) for digest in digests[number]]


def _digest(values: np.ndarray) -> str:
    """Return a digest of an array's bytes, in row-major order."""
    data: Any = values.reshape(-1).view(np.uint8)  # its buffer is untyped in some versions
    return hashlib.sha256(data).hexdigest()[:32]
