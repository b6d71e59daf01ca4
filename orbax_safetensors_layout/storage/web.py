"""`https://` paths: a file, or a folder with an index or a single file; there is no listing."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Collection

from absl import logging

from orbax_safetensors_layout.errors import StorageError, redact_urls
from orbax_safetensors_layout.options import RetryPolicy
from orbax_safetensors_layout.runtime import Workers

from .base import join
from .http import ALLOW_HTTP, Origin, basic_login
from .remote import AccessDenied, FileAddress, RemoteStorage

"""Environment variable: 1 to read `http://` paths of other machines, too."""

_SIGNING = re.compile(
    r"(x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|expires|signature|key-pair-id|policy"
    r"|s(e|t|p|v|r|ig|ip|pr)|sk(oid|tid|t|e|s|v))=.*",
    re.I,
)
"""Parts of a query that sign a URL of Amazon, Google or Azure: the content is the same for all."""

PROBED = ("model.safetensors.index.json", "orbax_safetensors_layout.json", "model.safetensors")
"""Files that are looked for in a folder, since it cannot be listed."""

_PROBES_AT_ONCE = 16


class WebStorage(RemoteStorage):
    """Files of web servers that know range requests.

    A query string, such as a signature, and a user's name and password are taken out of the `path`:
    they are sent along with every file of it, and no error shows them. The path is taken as it is
    given; names of files in it are quoted.
    """

    kind = "https"
    lists = False
    save_hint = "Save to a local folder, and upload that by the server's own means."

    def __init__(self, path: str, retries: RetryPolicy | None = None) -> None:
        super().__init__(retries)
        try:
            parts, origin = urllib.parse.urlsplit(path), Origin.of(path)
        except ValueError:
            parts, origin = None, None
        if parts is None or origin is None:
            scheme, _, rest = path.partition("://")
            raise StorageError(
                "cannot open the path: it is not a URL of a host",
                file=f"{scheme}://{rest.rpartition('@')[2]}",
                hint="Quote special characters of a user name or password: %2F for a slash.",
            )
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
        self.path = shown.geturl()
        self._query = parts.query
        unsigned = [part for part in parts.query.split("&") if not _SIGNING.fullmatch(part)]
        self._content_query = "&".join(unsigned)
        self._headers = basic_login("Authorization", parts)
        if not origin.is_allowed:
            raise StorageError(
                "unencrypted http:// paths of other machines are not read",
                file=self.path,
                hint=f"Use https://, or set {ALLOW_HTTP}=1.",
            )

    def is_file(self, path: str) -> bool:
        # Servers answer for folders, too: with a page, or with a refusal.
        return path.endswith((".safetensors", ".json")) and super().is_file(path)

    def folders(self, folder: str) -> list[str]:
        return []

    def list(self, folder: str) -> list[str]:
        """Return the names in `PROBED` that exist."""
        answers = self._probe_all(folder, PROBED)
        names = sorted(name for name, answer in answers.items() if answer is True)
        for answer in map(answers.get, PROBED):
            # A store that may not be listed denies what is not there.
            if isinstance(answer, AccessDenied) and not names:
                raise answer
        return names

    def existing(self, folder: str, names: Collection[str]) -> set[str]:
        answers = self._probe_all(folder, names)
        for name, answer in answers.items():
            if isinstance(answer, AccessDenied):
                file = redact_urls(join(folder, name))
                logging.warning("%s counts as missing: %s", file, answer.found)
        return {name for name, answer in answers.items() if answer is True}

    def _probe_all(self, folder: str, names: Collection[str]) -> dict[str, bool | AccessDenied]:
        answers: dict[str, bool | AccessDenied] = {}
        with Workers(max(1, min(len(names), _PROBES_AT_ONCE)), "safetensors-probe") as workers:
            for name in names:
                workers.submit(self._probe, folder, name, answers)
            workers.join()
        return answers

    def _probe(self, folder: str, name: str, answers: dict[str, bool | AccessDenied]) -> None:
        try:
            answers[name] = super().is_file(join(folder, name))
        except AccessDenied as error:
            answers[name] = error

    def _address(self, file: str) -> FileAddress:
        given = self.path.rstrip("/")
        if not file.startswith(given):  # beside a file
            given = given[: given.rfind("/") + 1]
        address = given + urllib.parse.quote(file.removeprefix(given))
        url = urllib.parse.urlsplit(address)._replace(query=self._query)
        hint = "Check the path, and the credentials in it if it needs any."
        identity = f"{address}?{self._content_query}"
        return FileAddress(url.geturl(), self._headers, lambda error_code: hint, identity=identity)
