"""Saves to the hub: written to a local folder, uploaded by all processes, shown by one commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging as standard_logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from orbax_safetensors_layout.errors import StorageError, listed, redact_urls

from .base import NewFolder, Rank, Storage, join
from .local import LocalStorage
from .retry import within

_SENT = "orbax_safetensors_layout.uploads"  # of a process, by its number: what it has uploaded
_MESSAGE = "Save with orbax_safetensors_layout"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMMIT_FACTOR = 10  # the hub looks at all files of a commit before it answers
T = TypeVar("T")


class HubUpload(NewFolder):
    """A save to a repository, which shows all of it in one commit, or nothing.

    `folder` is in the system's temporary folder, by the target's name, so that all processes of a
    host find it; on several hosts TMPDIR has to name one that all see. Each process uploads its
    share of the files; then the first commits them, if the branch is still where it was.
    """

    def __init__(self, target: str, hub: Repository, rank: Rank) -> None:
        self.target = target
        self.storage: Storage = LocalStorage()
        name = hashlib.sha256(f"{hub.endpoint} {target}".encode()).hexdigest()[:16]
        self._parent = os.path.join(
            tempfile.gettempdir(), f"orbax_safetensors_layout-{os.getuid()}"
        )
        staged = os.path.join(self._parent, name)
        self._local = self.storage.new_folder(staged, overwrite=True, rank=rank, scratch=())
        self.folder = self._local.folder
        self._hub = hub
        self._rank = rank
        self._undo: list[Callable[[], object]] = []

    def begin(self) -> None:
        os.makedirs(self._parent, mode=0o700, exist_ok=True)
        owned = os.lstat(self._parent)
        if not stat.S_ISDIR(owned.st_mode) or owned.st_uid != os.getuid() or owned.st_mode & 0o022:
            raise StorageError(
                "the folder for files that wait to be uploaded may be changed by others",
                file=self._parent,
                expected="a folder that this user alone writes to",
                hint="Remove it, or set TMPDIR.",
            )
        self._local.begin()
        self._hub.ensure(self._undo)

    def prepare(self) -> None:
        self._local.prepare()

    def send(self, process_index: int, process_count: int) -> None:
        names = [name for name in self._names() if name.endswith(".safetensors")]
        sent = {}
        for name in names[process_index::process_count]:
            file = join(self.folder, name)
            operation = CommitOperationAdd(self._hub.within(join(self.target, name)), file)
            self._hub.upload([operation])
            if operation._is_uploaded:
                info = operation.upload_info
                sent[name] = (info.sha256.hex(), info.size)
        with open(join(self.folder, f"{_SENT}.{process_index}"), "w") as notes:
            json.dump(sent, notes)

    def commit(self) -> None:
        sent: dict[str, tuple[str, int]] = {}
        for name in self._names(notes=True):
            with open(join(self.folder, name)) as notes:
                sent |= json.load(notes)
        operations: list[Any] = []
        names = self._names()
        for name in names:
            path = self._hub.within(join(self.target, name))
            operation = CommitOperationAdd(path, b"" if name in sent else join(self.folder, name))
            if name in sent:  # the library has no public way to commit what another process sent
                digest, operation.upload_info.size = sent[name]
                operation.upload_info.sha256 = bytes.fromhex(digest)
                operation._upload_mode, operation._is_uploaded = "lfs", True
            operations.append(operation)
        self._hub.upload([operation for operation in operations if not operation._is_uploaded])
        for name in self._hub.list(self.target):
            if self._rank(name) is not None and name not in names:
                path = self._hub.within(join(self.target, name))
                operations.append(CommitOperationDelete(path))
        self._hub.commit(operations)
        self._undo.clear()

    def end(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._local.end()
        self.storage.close()

    def _names(self, *, notes: bool = False) -> list[str]:
        names = []
        for root, _, files in os.walk(self.folder):
            inside = os.path.relpath(root, self.folder)
            names += [os.path.normpath(os.path.join(inside, name)) for name in files]
        return sorted(name for name in names if name.startswith(_SENT) == notes)


class Repository:
    """A repository and a branch that are written to; errors are those of `explained`."""

    def __init__(
        self,
        repo_id: str,
        repo_type: str,
        revision: str | None,
        endpoint: str,
        *,
        within: Callable[[str], str],
        list_files: Callable[[str], list[str]],
        head: Callable[[], str],
        asked: Callable[[Callable[[], Any], str], Any],
        answer_seconds: float,
    ) -> None:
        self.endpoint = endpoint
        self.within = within
        self.list = list_files
        self._head = head
        self._asked = asked
        self._answer_seconds = answer_seconds
        self._revision = revision
        self._api = HfApi(endpoint=endpoint, library_name="orbax-safetensors-layout")
        self._of: dict[str, Any] = {"repo_id": repo_id, "repo_type": repo_type}

    def ensure(self, undo: list[Callable[[], object]]) -> None:
        """Makes the repository, private, and the branch if they do not exist; notes how to undo."""
        repo_id = self._of["repo_id"]
        if "/" not in repo_id or _COMMIT.fullmatch(self._revision or ""):
            raise StorageError(
                "cannot save there",
                file=repo_id,
                expected="hf://org/name[@branch][/folder]",
                found=f"{repo_id}@{self._revision}" if self._revision else repo_id,
            )
        api, branch = self._api, self._revision
        if not self._call(lambda: api.repo_exists(**self._of), "looking for the repository"):
            create = functools.partial(api.create_repo, **self._of, private=True)
            if self._create(create, "creating the repository"):
                undo.append(self._undoing(api.delete_repo))
        if branch and not branch.startswith("refs/"):
            exists = functools.partial(api.revision_exists, **self._of, revision=branch)
            if not self._call(exists, "looking for the branch"):
                begin = functools.partial(api.create_branch, **self._of, branch=branch)
                if self._create(begin, "creating the branch"):
                    undo.append(self._undoing(api.delete_branch, branch=branch))

    def _create(self, create: Callable[[], object], doing: str) -> bool:
        """Creates something; returns False where it exists by now, made by another."""
        is_begun = False

        def attempt() -> bool:
            nonlocal is_begun
            try:
                within(self._answer_seconds, create)
            except TimeoutError:
                is_begun = True
                raise
            except HfHubHTTPError as error:
                if error.response.status_code != 409:
                    raise
                return is_begun  # by a call that was not answered
            return True

        try:
            return self._call(attempt, doing, is_bounded=False)
        except StorageError:
            if is_begun:
                logging.warning("%s was not answered; it may be there by now", doing)
            raise

    def _undoing(self, delete: Callable[..., object], **branch: str) -> Callable[[], None]:
        """Return what deletes the new repository, or branch, if it is still as it is now."""
        refs = functools.partial(self._refs, **branch)
        created = self._call(refs, "looking at what was created")
        name = "@".join([self._of["repo_id"], *branch.values()])

        def undo() -> None:
            cause = "others have changed it"
            try:
                if within(self._answer_seconds, refs) == created:
                    remove = functools.partial(delete, **self._of, **branch)
                    within(self._answer_seconds, remove)
                    return
            except Exception as error:  # the first error is raised
                cause = type(error).__name__
            logging.warning("The save failed; %s, created for it, is left: %s", name, cause)

        return undo

    def _refs(self, branch: str | None = None) -> dict[str, str]:
        """Return the commits of a branch, or of all branches, tags and pull requests."""
        refs = self._api.list_repo_refs(**self._of, include_pull_requests=True)
        every = [*refs.branches, *refs.converts, *refs.tags, *(refs.pull_requests or ())]
        branches = [ref for ref in refs.branches if ref.name == branch]
        return {ref.ref: ref.target_commit for ref in (branches if branch else every)}

    def upload(self, operations: list[CommitOperationAdd]) -> None:
        """Uploads files by Xet or LFS, as the library chooses; those of git go with the commit."""
        names = listed([operation.path_in_repo for operation in operations])
        with _quiet():
            send = functools.partial(
                self._api.preupload_lfs_files,
                **self._of,
                additions=operations,
                revision=self._revision,
                gitignore_content="",  # a repository's own would leave files out, and say nothing
            )
            self._call(send, f"uploading {names}", is_bounded=False)
        if ignored := [o.path_in_repo for o in operations if o._should_ignore]:
            raise StorageError(
                f"the hub leaves files out of the commit: {listed(ignored)}",
                file=self._of["repo_id"],
                hint="Remove their names from the repository's .gitignore.",
            )

    def commit(self, operations: list[Any]) -> None:
        """Commits, if nobody else has since the repository was first looked at."""
        parent = self._head() or None
        create = functools.partial(
            self._api.create_commit,
            **self._of,
            operations=operations,
            commit_message=_MESSAGE,
            revision=self._revision,
            parent_commit=parent,
        )

        def attempt() -> None:
            try:
                within(_COMMIT_FACTOR * self._answer_seconds, create)
            except Exception as error:
                status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
                is_unclear = status is None or status >= 500 or status == 412
                if not (is_unclear and self._shows(operations)):
                    raise

        with _quiet():
            self._call(attempt, "committing", is_bounded=False)

    def _shows(self, operations: list[Any]) -> bool:
        """Whether the branch has what operations add, and nothing that they delete.

        So the commit was made, and only its answer was lost.
        """
        stored: dict[str, str] = {}
        list_tree = functools.partial(
            self._api.list_repo_tree, **self._of, recursive=True, revision=self._revision
        )
        with contextlib.suppress(Exception):  # that of the commit is raised
            for entry in within(self._answer_seconds, lambda: [*list_tree()]):
                if isinstance(entry, RepoFile):
                    digest = entry.blob_id if entry.lfs is None else entry.lfs.sha256
                    stored[entry.path] = digest
        return bool(stored) and all(
            stored.get(operation.path_in_repo) == getattr(operation, "_local_oid", None)
            for operation in operations  # a deletion has no digest
        )

    def _call(self, call: Callable[[], T], doing: str, *, is_bounded: bool = True) -> T:
        """Makes a call, which may take as long as an answer may unless it bounds itself."""
        bounded = functools.partial(within, self._answer_seconds, call) if is_bounded else call
        result: T = self._asked(bounded, doing)
        return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps away the library's bars, since saves have their own, and signatures from its log."""
    logger = standard_logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(_redacted)
    has_bars = not are_progress_bars_disabled()
    if has_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        if has_bars:
            enable_progress_bars()
        logger.removeFilter(_redacted)


def _redacted(record: standard_logging.LogRecord) -> bool:
    record.msg, record.args = redact_urls(record.getMessage()), ()
    return True
