"""`hf://` paths: repositories of the Hugging Face hub, or of a server that speaks like it.

What is the hub's own is asked through `huggingface_hub`; ranges are read as from any server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from orbax_safetensors_layout.errors import CheckpointNotFoundError
from orbax_safetensors_layout.options import RetryPolicy

from . import hub_api
from .remote import RemoteStorage
from .remote_file import Place
from .retry import within


class HubStorage(RemoteStorage):
    """Files of a repository, all of the commit that its revision named when first asked."""

    kind = "hf"
    lists = True

    def __init__(self, path: str, retries: RetryPolicy | None = None) -> None:
        super().__init__(retries)
        self._path = hub_api.HubPath.parse(path)
        self._repository = hub_api.Repository(self._path)
        self._snapshot: hub_api.Snapshot | None = None
        self._snapshot_lock = threading.Lock()
        self.save_hint = (
            f"Save to a local folder and upload that: `hf upload {self._path.repo_id} FOLDER"
            f" --repo-type {self._path.repo_type}`."
        )

    def is_file(self, path: str) -> bool:
        return self._within(path) in self._listed().files

    def folders(self, folder: str) -> list[str]:
        names = self._inside(folder)
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def list(self, folder: str) -> list[str]:
        return sorted(name for name in self._inside(folder) if "/" not in name)

    def modified_seconds(self, file: str) -> float:
        self._file(file)
        return self._listed().modified_seconds

    def _place(self, file: str) -> Place:
        listed, name = self._listed(), self._within(file)
        if name not in listed.files:
            found = f"commit {listed.commit} of {self._path}, without it"
            raise CheckpointNotFoundError("no such file", file=file, found=found)
        return self._repository.place(name, listed)

    def _inside(self, folder: str) -> Iterator[str]:
        prefix = f"{self._within(folder)}/".lstrip("/")
        files = self._listed().files
        return (name.removeprefix(prefix) for name in files if name.startswith(prefix))

    def _within(self, path: str) -> str:
        """Return the path inside the repository."""
        return path.removeprefix(self._path.root).strip("/")

    def _listed(self) -> hub_api.Snapshot:
        with self._snapshot_lock:
            if self._snapshot is None:
                seconds = self._retrier.policy.attempt_seconds
                self._connections.sent.add(*self._repository.sent())
                self._snapshot = self._retrier.run(
                    lambda: within(seconds, lambda: self._repository.snapshot(seconds)),
                    hub_api.classify,
                    doing="listing the repository",
                    url=self._path.root,
                )
            return self._snapshot
