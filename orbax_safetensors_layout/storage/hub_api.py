"""Requests to the hub through `huggingface_hub`: `hf://` paths, commits, lists of files, tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, errors, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError, redact_urls

from .http import HttpHeaders, Origin
from .remote_file import AccessDenied, Place
from .retry import Failure, is_transient_status, retry_after_seconds

_PATH = re.compile(
    r"(?P<root>hf://((?P<type>model|dataset|space)s/)?(?P<repo>[^/@]+/[^/@]+|[^/@]+(?=@|/?$))"
    r"(@(?P<revision>refs/pr/\d+|refs/convert/[^/]+|[^/]+))?)(?P<sub>/.*)?"
)
_LIBRARY = "orbax-safetensors-layout"
_MOST_SUMMED_UP = 50_000  # of more files the summary of a repository may leave out some


class HubPath(NamedTuple):
    """A place in a repository of the hub.

    Attributes:
        root: The part of the path that names the repository and the revision.
        repo_type: `model`, `dataset` or `space`.
        repo_id: As `org/name`, or a bare `name` of the hub's early days.
        revision: A branch, a tag or a commit; None for the default branch.
        sub: The folder or file in the repository; "" for its top.
    """

    root: str
    repo_type: str
    repo_id: str
    revision: str | None
    sub: str

    @classmethod
    def parse(cls, path: str) -> HubPath:
        """Parses `hf://[models/|datasets/|spaces/]org/name[@revision][/folder]`.

        A slash in a revision is written as `%2F`, except in `refs/pr/1` and `refs/convert/x`.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise StorageError(
                "cannot open the path",
                file=path,
                expected="hf://[datasets/|spaces/]org/name[@revision][/folder]",
            )
        revision = match["revision"]
        if revision is not None:
            revision = revision.replace("%2F", "/").replace("%2f", "/")
        sub = (match["sub"] or "").strip("/")
        return cls(match["root"], match["type"] or "model", match["repo"], revision, sub)

    def __str__(self) -> str:
        at = f" at revision {self.revision!r}" if self.revision else ""
        return f"{self.repo_type} {self.repo_id}{at}"


class Snapshot(NamedTuple):
    """A repository at one commit: its files by path, and when it was last written to.

    A file has a `size`, and `lfs.sha256` where the hub keeps it apart from git.
    """

    commit: str
    modified_seconds: float
    files: dict[str, Any]


class Repository:
    """A repository of the hub at one revision."""

    def __init__(self, path: HubPath) -> None:
        self._path = path
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def sent(self) -> tuple[str, Mapping[str, str]]:
        """Return the endpoint and headers that `snapshot` sends, which no error may show."""
        return self._endpoint, build_hf_headers(library_name=_LIBRARY)

    def snapshot(self, seconds: float) -> Snapshot:
        """Makes one attempt to list the files of the commit that the revision names now.

        The server may be silent for `seconds`; the whole may last longer. Errors that are not of
        this package are for `classify`.
        """
        path = self._path
        try:
            Origin.of(self._endpoint)
        except ValueError:
            problem, found = "HF_ENDPOINT is not an http or https URL", redact_urls(self._endpoint)
            raise StorageError(problem, file=path.root, found=found) from None
        try:
            api = HfApi(endpoint=self._endpoint, library_name=_LIBRARY)
            info = api.repo_info(
                path.repo_id,
                revision=path.revision,
                repo_type=path.repo_type,
                timeout=seconds,
                files_metadata=True,
            )
            files: dict[str, Any] = {
                file.rfilename: file for file in getattr(info, "siblings", None) or ()
            }
            if len(files) >= _MOST_SUMMED_UP:
                entries = api.list_repo_tree(
                    path.repo_id, recursive=True, revision=info.sha, repo_type=path.repo_type
                )
                files = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        except errors.HfHubHTTPError as error:
            raise self._explained(error) or error from None
        except errors.OfflineModeIsEnabled:
            raise _offline(path.root) from None
        except errors.HFValidationError as error:
            raise StorageError("cannot open the path", file=path.root, found=error) from None
        modified = info.last_modified.timestamp() if info.last_modified else 0.0
        return Snapshot(info.sha or "", modified, files)

    def place(self, name: str, snapshot: Snapshot) -> Place:
        """Return where a file of a snapshot is asked for."""
        path, commit, file = self._path, snapshot.commit, snapshot.files[name]
        if constants.HF_HUB_OFFLINE:
            raise _offline(path.root)
        url = hf_hub_url(
            path.repo_id, name, repo_type=path.repo_type, revision=commit, endpoint=self._endpoint
        )
        headers = build_hf_headers(library_name=_LIBRARY)
        digest = file.lfs.sha256 if file.lfs else None
        return Place(url, headers, file.size or 0, digest, self.hint)

    def hint(self, headers: HttpHeaders) -> str:
        """Return advice for denied access, from the headers of the answer."""
        page = redact_urls(f"{self._endpoint}/{self._path.repo_id}")
        if headers.get("X-Error-Code") == "GatedRepo":
            return f"Accept its conditions at {page} and set HF_TOKEN to a token of that account."
        return "Set HF_TOKEN to a token that may read it, or log in with `hf auth login`."

    def _explained(self, error: errors.HfHubHTTPError) -> Exception | None:
        """Return this package's error for a lasting one of the hub."""
        root, found = self._path.root, f"status {error.response.status_code}"
        if isinstance(error, errors.GatedRepoError) or error.response.status_code == 403:
            hint = self.hint(error.response.headers)
            return AccessDenied("access denied", file=root, found=found, hint=hint)
        if isinstance(error, errors.RepositoryNotFoundError):
            return CheckpointNotFoundError(
                "the hub has no such repository, or does not show it",
                file=root,
                found=found,
                hint="Check the name; for a private one, set HF_TOKEN to a token that may read it.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointNotFoundError(
                f"the repository has no revision {self._path.revision!r}", file=root, found=found
            )
        return None


def classify(error: Exception) -> Failure:
    """Return the meaning of another error of `Repository.snapshot`."""
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        after = retry_after_seconds(error.response.headers.get("Retry-After"))
        return Failure(f"status {status}", is_transient_status(status), after)
    return Failure(f"{type(error).__name__}: {error}", transient=True)


def _offline(path: str) -> StorageError:
    return StorageError(
        "the hub cannot be asked: offline mode is set",
        file=path,
        hint="Unset HF_HUB_OFFLINE, or load a local copy of the repository.",
    )
