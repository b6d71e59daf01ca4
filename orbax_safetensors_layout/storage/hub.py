"""`hf://` paths: repositories of the Hugging Face hub, or of a server with its API.

Commits, files and tokens come through `huggingface_hub`; ranges are read as from any server.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, errors, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    StorageError,
    redact_urls,
)
from orbax_safetensors_layout.format import Schema
from orbax_safetensors_layout.options import RetryPolicy

from .base import NewFolder, Rank
from .http import Origin
from .remote import AccessDenied, FileAddress, RemoteStorage
from .retry import Failure, is_transient_status, retry_after_seconds, within, words_of

_PATH = re.compile(
    r"(?P<root>hf://((?P<type>model|dataset|space)s/)?(?P<repo>[^/@:]+/[^/@:]+|[^/@:]+(?=@|/?$))"
    r"(@(?P<revision>refs/pr/\d+|refs/convert/[^/]+|[^/]+))?)(/.*)?"
)
_LIBRARY = "orbax-safetensors-layout"
_MOST_SUMMED_UP = 50_000  # of more files the summary of a repository may leave out some


class _Snapshot(NamedTuple):
    """A repository at one commit."""

    commit: str
    modified_seconds: float
    files: dict[str, tuple[int | None, str]]
    """By path: size if it is listed, and SHA-256 if the hub keeps the file outside git."""


class HubStorage(RemoteStorage):
    """Files of a repository, all of the commit that its revision named when first asked.

    Its path is `hf://[models/|datasets/|spaces/]org/name[@revision][/folder]`, or has a bare `name`
    of the hub's early days. A slash in a revision is written as `%2F`, except in `refs/pr/1` and
    `refs/convert/x`.
    """

    kind = "hf"
    lists = True
    uploads = True

    def __init__(self, path: str, retries: RetryPolicy | None = None) -> None:
        super().__init__(retries)
        match = _PATH.fullmatch(path)
        if match is None or match["repo"].startswith("buckets/"):
            raise StorageError(
                "cannot open the path",
                file=path,
                expected="hf://[datasets/|spaces/]org/name[@revision][/folder]",
            )
        self._root = match["root"]
        self._repo_id = match["repo"]
        self._repo_type = match["type"] or "model"
        self._revision = match["revision"] and re.sub("%2f", "/", match["revision"], flags=re.I)
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._listed: _Snapshot | None = None
        self._listing = threading.Lock()
        upload = f"hf upload {self._repo_id} FOLDER --repo-type {self._repo_type}"
        self.save_hint = f"Save to a local folder and upload that: `{upload}`."

    def new_folder(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> NewFolder:
        from .hub_upload import HubUpload, Repository

        repository = Repository(
            self._repo_id,
            self._repo_type,
            self._revision,
            self._endpoint,
            within=self._within,
            list_files=self.list,
            head=lambda: self._snapshot().commit,
            asked=self._changing,
            answer_seconds=self._retrier.policy.attempt_seconds,
        )
        return HubUpload(target.rstrip("/"), repository, rank)

    def _changing(self, call: Callable[[], Any], doing: str) -> Any:
        """Makes a call of `huggingface_hub` that writes, again where that may help."""

        def attempt() -> Any:
            try:
                return call()
            except errors.OfflineModeIsEnabled:
                raise self._offline() from None
            except Exception as error:
                cause: BaseException = error
                while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
                    cause = cause.__cause__
                if isinstance(cause, errors.HfHubHTTPError):
                    raise self._explained(cause, "write to") from _said(cause)
                is_late = isinstance(cause, TimeoutError)  # by `within`
                raise Failure(words_of(cause), transient=is_late) from Failure(str(cause))

        return self._retrier.run(attempt, doing, self._root)

    def is_file(self, path: str) -> bool:
        return self._within(path) in self._snapshot().files

    def folders(self, folder: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._inside(folder) if "/" in name})

    def list(self, folder: str) -> list[str]:
        return sorted(name for name in self._inside(folder) if "/" not in name)

    def modified_seconds(self, file: str) -> float:
        self._file(file)
        return self._snapshot().modified_seconds

    def _address(self, file: str) -> FileAddress:
        snapshot, name = self._snapshot(), self._within(file)
        if name not in snapshot.files:
            found = f"commit {snapshot.commit} of {self._root}, without it"
            raise CheckpointNotFoundError("no such file", file=file, found=found)
        if constants.HF_HUB_OFFLINE:
            raise self._offline()
        url = hf_hub_url(
            self._repo_id,
            name,
            repo_type=self._repo_type,
            revision=snapshot.commit,
            endpoint=self._endpoint,
        )
        headers = build_hf_headers(library_name=_LIBRARY)
        size, digest = snapshot.files[name]
        repository = f"{redact_urls(self._endpoint)} {self._repo_type} {self._repo_id}"
        return FileAddress(
            url,
            headers,
            self._hint,
            size,
            digest or None,
            identity=f"{repository} {name}",
            version=digest or snapshot.commit,
        )

    def _inside(self, folder: str) -> Iterator[str]:
        prefix = f"{self._within(folder)}/".lstrip("/")
        files = self._snapshot().files
        return (name.removeprefix(prefix) for name in files if name.startswith(prefix))

    def _within(self, path: str) -> str:
        """Return the path inside the repository."""
        return path.removeprefix(self._root).strip("/")

    def _snapshot(self) -> _Snapshot:
        with self._listing:
            if self._listed is None:
                seconds = self._retrier.policy.attempt_seconds
                ask = functools.partial(within, seconds, lambda: self._ask(seconds))
                self._listed = self._retrier.run(ask, "listing the repository", self._root)
            return self._listed

    def _ask(self, seconds: float) -> _Snapshot:
        """Makes one attempt to list the files of the commit that the revision names now."""
        try:
            Origin.of(self._endpoint)
        except ValueError:
            problem, found = "HF_ENDPOINT is not an http or https URL", redact_urls(self._endpoint)
            raise StorageError(problem, file=self._root, found=found) from None
        try:
            api = HfApi(endpoint=self._endpoint, library_name=_LIBRARY)
            info = api.repo_info(
                self._repo_id,
                revision=self._revision,
                repo_type=self._repo_type,
                timeout=seconds,
                files_metadata=True,
            )
            files: list[Any] = getattr(info, "siblings", None) or []
            if len(files) >= _MOST_SUMMED_UP:
                entries = api.list_repo_tree(
                    self._repo_id, recursive=True, revision=info.sha, repo_type=self._repo_type
                )
                files = [entry for entry in entries if isinstance(entry, RepoFile)]
            modified = info.last_modified.timestamp() if info.last_modified else 0.0
            return self._checked(info.sha or "", modified, files)
        except errors.HfHubHTTPError as error:
            raise self._explained(error) from _said(error)
        except errors.OfflineModeIsEnabled:
            raise self._offline() from None
        except errors.HFValidationError as error:
            raise StorageError("cannot open the path", file=self._root, found=error) from None
        except Exception as error:
            raise Failure(words_of(error)) from Failure(str(error))

    def _checked(self, commit: object, modified: float, files: Sequence[Any]) -> _Snapshot:
        """Return a listing; raises where it is malformed."""
        schema = Schema(self._root, FormatError)
        names = schema.texts([commit, *(file.rfilename for file in files)], "name")
        digests = schema.texts([getattr(file.lfs, "sha256", "") or "" for file in files], "digest")
        sizes = [None if file.size is None else schema.size(file.size, "size") for file in files]
        "".join(names).encode()  # raises for lone surrogates
        entries = dict(zip(names[1:], zip(sizes, digests, strict=True), strict=True))
        return _Snapshot(names[0], modified, entries)

    def _explained(self, error: errors.HfHubHTTPError, right: str = "read") -> Exception:
        status, headers = error.response.status_code, error.response.headers
        root, found = self._root, f"status {status}"
        is_gated = isinstance(error, errors.GatedRepoError)
        if is_gated or status == 403:
            hint = self._hint(headers.get("X-Error-Code"), right)
            if error.server_message and not is_gated:  # as of a quota
                hint = f"Do as the hub says above, or {hint[0].lower()}{hint[1:]}"
            return AccessDenied("access denied", file=root, found=found, hint=hint)
        if isinstance(error, errors.RepositoryNotFoundError):
            return CheckpointNotFoundError(
                "the hub has no such repository, or does not show it",
                file=root,
                found=found,
                hint=f"Check the name; set HF_TOKEN to a token that may {right} it.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointNotFoundError(
                f"the repository has no revision {self._revision!r}",
                file=root,
                found=found,
                hint="A slash in the name of a branch is written as %2F, as in @my%2Fbranch.",
            )
        if status == 412:
            text = "somebody else has committed to the branch meanwhile"
            return StorageError(text, file=root, found=found, hint="Save again.")
        after = retry_after_seconds(headers.get("Retry-After"))
        return Failure(found, transient=is_transient_status(status), after_seconds=after)

    def _hint(self, error_code: str | None, right: str = "read") -> str:
        page = redact_urls(f"{self._endpoint}/{self._repo_id}")
        if error_code == "GatedRepo":
            return f"Accept its conditions at {page} and set HF_TOKEN to a token of that account."
        return f"Set HF_TOKEN to a token that may {right} it, or log in with `hf auth login`."

    def _offline(self) -> StorageError:
        return StorageError(
            "the hub cannot be asked: offline mode is set",
            file=self._root,
            hint="Unset HF_HUB_OFFLINE, or load a local copy of the repository.",
        )


def _said(error: errors.HfHubHTTPError) -> Failure | None:
    """Return what the hub says, to be chained."""
    return Failure(f"the hub says: {error.server_message}") if error.server_message else None
