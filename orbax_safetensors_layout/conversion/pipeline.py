"""A conversion from its groups to the published folder, on one of several processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.options import ConvertOptions
from orbax_safetensors_layout.runtime import Fingerprint, ProgressReport, progress_callback
from orbax_safetensors_layout.runtime import ProcessGroup as Processes
from orbax_safetensors_layout.storage import (
    Claim,
    LocalStorage,
    check_replaceable,
    claimed,
    partial_folder,
)

from .checkpoint_reader import CheckpointReader, SourceArray
from .execute import (
    ConversionLimits,
    convert_groups,
    verify_groups,
)
from .groups import LeafGroup, make_groups, shares
from .journal import Journal
from .target import FINISHED, Target

_CHUNKS_IN_BUDGET = 4
_LARGER_BLOCKS = 2  # a continued run may take blocks so many times as large as its own would be
_UNFINISHED, _PUBLISHED = "unfinished", "published"


def conversion_limits(folder: str, memory_budget_bytes: int, *, restart: bool) -> ConversionLimits:
    """Returns limits with the blocks of the run that is continued, which its journal counts in.

    Args:
        folder: Where the conversion goes.
        memory_budget_bytes: What it may take.
        restart: Drop what an interrupted run has done.

    Raises:
        SafetensorsLayoutError: Its blocks are too large for the memory budget.
    """
    limits = ConversionLimits.of(memory_budget_bytes)
    workspace = partial_folder(folder, "convert")
    begun = None if restart else Journal.block_bytes(workspace)
    if begun is None:
        return limits
    if begun > _LARGER_BLOCKS * limits.block_bytes:
        needed = memory_budget_bytes * begun // (_LARGER_BLOCKS * limits.block_bytes)
        raise SafetensorsLayoutError(
            "an unfinished conversion that was given more memory stands beside the target",
            file=workspace,
            expected=f"memory_budget_bytes of at least {needed:,}",
            found=f"{memory_budget_bytes:,}",
            hint="Continue it with that much, or pass restart=True (--restart) to drop it.",
        )
    return limits._replace(block_bytes=begun)


class Conversion:
    """One conversion.

    Attributes:
        groups: What it is made of.
        nbytes: Bytes of all values.

    Args:
        source: The source.
        arrays: Its arrays by name.
        target: The target.
        folder: Where it goes.
        options: Memory, and what else counts.
        limits: How the memory is spent, from `conversion_limits`.
        restart: Drop what an interrupted run has done.
        arguments: What distinguishes this conversion from others of the same source and target, to
            be compared by `repr`.
        reopen: Opens what was written, to compare it.
        is_replaced: Whether a name in a folder that is at `folder` goes with what is replaced.

    Raises:
        SafetensorsLayoutError: A chunk of the source is too large for the memory budget.
    """

    def __init__(
        self,
        source: CheckpointReader,
        arrays: Mapping[str, SourceArray],
        target: Target,
        folder: str,
        options: ConvertOptions,
        limits: ConversionLimits,
        *,
        restart: bool,
        arguments: object,
        reopen: Callable[[str], CheckpointReader],
        is_replaced: Callable[[str], bool],
    ) -> None:
        self._source = source
        self._arrays = arrays
        self._target = target
        self._folder = folder
        self._options = options
        self._reopen = reopen
        self._is_replaced = is_replaced
        self._restart = restart
        self._workspace = partial_folder(folder, "convert")
        self._limits = limits
        self._finished = os.path.join(self._workspace, FINISHED)
        self._claim: Claim | None = None
        self._check_chunks()
        most = self._limits.block_bytes
        regions = [target.regions(leaf, most) for leaf in target.leaves]
        self.groups = make_groups(source, arrays, target.leaves, regions, most)
        self.nbytes = sum(group.nbytes for group in self.groups)
        digest = hashlib.sha256()
        for group in self.groups:
            digest.update(repr(group).encode())
        self._journal = Journal(
            self._workspace,
            source.identity(),
            hashlib.sha256(repr((arguments, target.describe())).encode()).hexdigest(),
            block_bytes=most,
            groups=digest.hexdigest(),
        )

    def _check_chunks(self) -> None:
        most = self._options.memory_budget_bytes // _CHUNKS_IN_BUDGET
        used = dict.fromkeys(name for leaf in self._target.leaves for name in leaf.sources)
        sizes = {name: self._source.largest_chunk_bytes(self._arrays[name]) for name in used}
        large = [name for name, size in sizes.items() if size > most]
        if large:
            needed = max(sizes.values()) * _CHUNKS_IN_BUDGET
            raise SafetensorsLayoutError(
                f"chunks of the source are more than a quarter of the memory budget: {large[:10]}",
                tensor=large[0],
                expected=f"at most {most:,} bytes",
                found=f"{sizes[large[0]]:,} bytes",
                hint=f"Set memory_budget_bytes to {needed:,} or more.",
            )

    def run(self, group: Processes, check: Callable[[], None]) -> int:
        """Runs it.

        Args:
            group: The processes.
            check: Refuses a target that may not be replaced.

        Returns:
            Bytes that an interrupted run had written.
        """
        with contextlib.ExitStack() as stack:
            agreed = Fingerprint(
                f"{self._journal.digest} {self._options.verify} {self._restart}",
                f"{len(self.groups)} groups",
                "All processes must convert the same checkpoint with the same arguments.",
            )
            group.barrier("agreeing on what is converted", agree=agreed)
            is_published = False
            with group.together("preparing the folder"):
                if group.is_leader:
                    claim = self._claim = stack.enter_context(claimed(self._folder))
                    if not self._restart:
                        is_published = claim.was_published(self._journal.identity)
                    if not is_published:
                        self._prepare(claim, check)
            state = _PUBLISHED if is_published else _UNFINISHED
            if group.barrier("looking at what an earlier call has done", tell=state) == _PUBLISHED:
                return self.nbytes
            done = self._journal.read()
            group.barrier("reading the journal")  # before anyone adds to it
            left = [one for one in self.groups if one.number not in done]
            with group.together("converting"):
                self._convert(left, group)
            with group.together("completing the checkpoint"):
                if group.is_leader:
                    self._target.commit(self._workspace)
            if self._options.verify:
                with group.together("verifying what was written"):
                    self._verify(group)
            with group.together("publishing the checkpoint"):
                if group.is_leader:
                    self._publish()
        return self.nbytes - sum(one.nbytes for one in left)

    def _prepare(self, claim: Claim, check: Callable[[], None]) -> None:
        claim.forget()
        check()
        check_replaceable(self._folder)
        with LocalStorage() as storage:
            if self._restart:
                storage.remove(self._workspace)
            storage.make_folder(self._workspace)
        self._journal.read()

    def _convert(self, left: list[LeafGroup], processes: Processes) -> None:
        with self._report("converting", left, processes) as report:
            convert_groups(
                self._source,
                self._arrays,
                self._target,
                left,
                self._workspace,
                self._journal,
                processes,
                self._limits,
                report,
            )

    @contextlib.contextmanager
    def _report(
        self, label: str, groups: list[LeafGroup], processes: Processes
    ) -> Iterator[ProgressReport]:
        mine = shares(groups, processes.process_count)[processes.process_index]
        with progress_callback(self._options.progress, label) as tell:
            yield ProgressReport(tell, sum(one.nbytes for one in mine))

    def _verify(self, processes: Processes) -> None:
        with (
            contextlib.closing(self._reopen(self._finished)) as written,
            self._report("verifying", self.groups, processes) as report,
        ):
            done = self._journal.read()
            verify_groups(written, self.groups, done, processes, self._limits, report)

    def _publish(self) -> None:
        assert self._claim is not None
        names = set(os.listdir(self._finished))
        self._claim.publish(
            self._finished,
            is_replaced=lambda name: name in names or self._is_replaced(name),
            made=self._journal.identity,
        )
        with LocalStorage() as storage:
            storage.remove(self._workspace)
