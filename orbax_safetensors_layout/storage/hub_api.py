"""What is asked of the hub through `huggingface_hub`: commits, lists of files, tokens, URLs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from huggingface_hub import HfApi, constants, errors, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError, redact_urls

from .http import HttpHeaders, Origin
from .hub_path import HubPath
from .remote_file import AccessDenied, Place
from .retry import Failure, is_transient_status, retry_after_seconds

_LIBRARY = "orbax-safetensors-layout"
_MOST_SUMMED_UP = 50_000  # of more files the summary of a repository may leave out some


class Entry(NamedTuple):
    """A file of a repository.

    Attributes:
        size: Its bytes.
        sha256: Their digest, where the hub keeps the file apart from git.
    """

    size: int
    sha256: str | None


class Snapshot(NamedTuple):
    """A repository at one commit.

    Attributes:
        commit: Its hash.
        modified_seconds: When the repository was last written to, in seconds since the epoch.
        files: Its files by their paths.
    """

    commit: str
    modified_seconds: float
    files: dict[str, Entry]


class Repository:
    """A repository of the hub at one revision.

    Args:
        path: A path in it.
    """

    def __init__(self, path: HubPath) -> None:
        self._path = path
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def sent(self) -> tuple[str, Mapping[str, str]]:
        """What `snapshot` sends that no error may show: the endpoint, and headers."""
        return self._endpoint, build_hf_headers(library_name=_LIBRARY)

    def snapshot(self, seconds: float) -> Snapshot:
        """One attempt to list the files of the commit that the revision names now.

        Args:
            seconds: How long the server may keep silent; the whole may last longer.

        Raises:
            CheckpointNotFoundError: There is no such repository or revision.
            AccessDenied: It is gated.
            StorageError: The hub may not be asked.
            Exception: The attempt failed; see `classify`.
        """
        path = self._path
        self._check_endpoint()
        try:
            api = HfApi(endpoint=self._endpoint, library_name=_LIBRARY)
            info = api.repo_info(
                path.repo_id,
                revision=path.revision,
                repo_type=path.repo_type,
                timeout=seconds,
                files_metadata=True,
            )
            files = {
                file.rfilename: Entry(file.size or 0, file.lfs.sha256 if file.lfs else None)
                for file in getattr(info, "siblings", None) or ()
            }
            if len(files) >= _MOST_SUMMED_UP:
                files = {
                    file.path: Entry(file.size, file.lfs.sha256 if file.lfs else None)
                    for file in api.list_repo_tree(
                        path.repo_id, recursive=True, revision=info.sha, repo_type=path.repo_type
                    )
                    if isinstance(file, RepoFile)
                }
        except errors.HfHubHTTPError as error:
            raise self._explained(error) or error from None
        except errors.OfflineModeIsEnabled:
            raise _offline(path.root) from None
        except errors.HFValidationError as error:
            raise StorageError("can not open the path", file=path.root, found=error) from None
        modified = info.last_modified.timestamp() if info.last_modified else 0.0
        return Snapshot(info.sha or "", modified, files)

    def place(self, name: str, commit: str, entry: Entry) -> Place:
        """Where a file is asked for.

        Args:
            name: Its path in the repository.
            commit: The commit.
            entry: What is known of it.

        Raises:
            StorageError: The hub may not be asked.
        """
        path = self._path
        if constants.HF_HUB_OFFLINE:
            raise _offline(path.root)
        url = hf_hub_url(
            path.repo_id, name, repo_type=path.repo_type, revision=commit, endpoint=self._endpoint
        )
        headers = build_hf_headers(library_name=_LIBRARY)
        return Place(url, headers, entry.size, entry.sha256, self.hint)

    def hint(self, headers: HttpHeaders) -> str:
        """What to do when access is denied.

        Args:
            headers: Those of the answer.
        """
        page = redact_urls(f"{self._endpoint}/{self._path.repo_id}")
        if headers.get("X-Error-Code") == "GatedRepo":
            return f"Accept its conditions at {page} and set HF_TOKEN to a token of that account."
        return "Set HF_TOKEN to a token that may read it, or log in with `hf auth login`."

    def _check_endpoint(self) -> None:
        try:
            Origin.of(self._endpoint)
        except ValueError:
            found = redact_urls(self._endpoint)
            raise StorageError(
                "HF_ENDPOINT is no http or https URL", file=self._path.root, found=found
            ) from None

    def _explained(self, error: errors.HfHubHTTPError) -> Exception | None:
        """The error of this package for a lasting one of the hub."""
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
    """What another error of `Repository.snapshot` means."""
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        after = retry_after_seconds(error.response.headers.get("Retry-After"))
        return Failure(f"status {status}", is_transient_status(status), after)
    return Failure(f"{type(error).__name__}: {error}", transient=True)


def _offline(path: str) -> StorageError:
    return StorageError(
        "the hub can not be asked: offline mode is set",
        file=path,
        hint="Unset HF_HUB_OFFLINE, or load a local copy of the repository.",
    )
