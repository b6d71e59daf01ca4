"""Converts items into a step, which appears, or gets them, at once when all are done.

1. Each item is converted into its folder of a staged step beside the target; the next call skips
   those that are done.
2. What other handlers saved is copied there, and the record of the step is written.
3. The staged step takes the place of the target, with the other items that are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence

from orbax_safetensors_layout.catalog import find_step
from orbax_safetensors_layout.errors import CheckpointExistsError, listed
from orbax_safetensors_layout.runtime import ProcessGroup as Processes
from orbax_safetensors_layout.storage import (
    LocalStorage,
    check_replaceable,
    claimed,
    flush_tree,
    join,
    partial_folder,
    storage_errors,
    write_file,
)

from .pipeline import Conversion
from .target import FINISHED


def staged_step(folder: str) -> str:
    """Return where a step is put together that will be at `folder`."""
    return os.path.join(partial_folder(folder, "convert"), FINISHED)


@dataclasses.dataclass
class StepConversion:
    """The conversion of some items, with `copied` ones, of the step `source` into `folder`."""

    source: str
    folder: str
    items: Mapping[str, Conversion]  # into the folders of these names in `staged_step(folder)`
    copied: Sequence[str]
    record: Callable[[], Mapping[str, bytes]]  # returns the step's own files
    _: dataclasses.KW_ONLY
    restart: bool

    @property
    def nbytes(self) -> int:
        return sum(conversion.nbytes for conversion in self.items.values())

    @property
    def arrays_written(self) -> int:
        return sum(conversion.arrays_written for conversion in self.items.values())

    def check(self, *, overwrite: bool) -> None:
        """Refuses a target other than a step, or with such items, without `overwrite`."""
        there = find_step(self.folder)
        present = {*there.trees, *there.others}
        if not present and os.path.isdir(self.folder) and os.listdir(self.folder):
            raise CheckpointExistsError(
                "the folder is neither empty nor a step",
                file=self.folder,
                expected="a new or empty folder, or a step that gets the items",
            )
        taken = [name for name in (*self.items, *self.copied) if name in present]
        if taken and not overwrite:
            raise CheckpointExistsError(
                f"the step has {listed(map(repr, taken))} already",
                file=self.folder,
                hint="Pass overwrite=True (--overwrite) to replace what is converted; other items"
                " stay.",
            )

    def run(self, processes: Processes, check: Callable[[], None]) -> int:
        """Returns the bytes that an interrupted run had written; see `Conversion.run`."""
        staged = staged_step(self.folder)
        workspace = os.path.dirname(staged)
        resumed = 0
        with contextlib.ExitStack() as stack:
            with processes.together("preparing the step"):
                if processes.is_leader:
                    claim = stack.enter_context(claimed(self.folder))
                    claim.forget()
                    check()
                    check_replaceable(self.folder)
                    with LocalStorage() as storage:
                        if self.restart:
                            storage.remove(workspace)
                        storage.make_folder(staged)
            for name, conversion in self.items.items():
                done = os.path.join(workspace, f"{name}.done")
                is_done = os.path.isdir(conversion.folder) and _content(done) == conversion.identity
                looking = "looking at what an earlier call has done"
                if processes.barrier(looking, broadcast=str(is_done)) == str(True):
                    resumed += conversion.nbytes
                    continue
                resumed += conversion.run(processes, lambda: None)
                with processes.together("noting that an item is done"):
                    if processes.is_leader:
                        with LocalStorage() as storage:
                            write_file(storage, done, conversion.identity.encode(), durable=True)
            with processes.together("committing the step"):
                if processes.is_leader:
                    check()
                    self._complete(staged)
                    claim.commit(staged, is_replaced=self._is_replaced)
                    with LocalStorage() as storage:
                        storage.remove(workspace)
        return resumed

    def _complete(self, staged: str) -> None:
        """Adds what is not converted to the staged step, and leaves out what is not asked for."""
        with LocalStorage() as storage, storage_errors("cannot put the step together", staged):
            for name in os.listdir(staged):
                if name not in self.items:
                    storage.remove(os.path.join(staged, name))
            for name in self.copied:
                shutil.copytree(os.path.join(self.source, name), os.path.join(staged, name))
            for name, data in self.record().items():
                write_file(storage, join(staged, name), data, durable=True)
            flush_tree(staged)

    def _is_replaced(self, name: str) -> bool:
        return name.partition(os.sep)[0] in {*self.items, *self.copied}


def _content(file: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as text:
        return text.read()
    return None
