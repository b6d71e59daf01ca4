"""From a path to the storage that serves it."""

from __future__ import annotations

import os
import urllib.parse

from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.options import RetryPolicy
from orbax_safetensors_layout.storage.base import Storage
from orbax_safetensors_layout.storage.local import LocalStorage


def open_storage(
    path: str | os.PathLike[str], *, retries: RetryPolicy | None = None
) -> tuple[Storage, str]:
    """The storage that a path names, and the path in that storage's own terms.

    Args:
        path: A local path or a URL.
        retries: How long requests to a remote storage are tried; None is the default.

    Raises:
        StorageError: The path is malformed, a library that it needs is not installed, or no
            storage of this package serves its scheme.
    """
    text = os.fsdecode(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    if scheme == "file":
        return LocalStorage(), os.path.abspath(urllib.parse.unquote(rest))
    retries = retries or RetryPolicy()
    if scheme == "hf":
        from orbax_safetensors_layout.storage.hub import HubStorage

        return HubStorage(text, retries), text
    if scheme in ("http", "https"):
        from orbax_safetensors_layout.storage.web import WebStorage

        web = WebStorage(text, retries)
        return web, web.path
    raise StorageError(
        f"can not open a {scheme}:// path",
        file=text,
        expected="a local path, or a URL with file://, hf:// or https://",
        found=f"{scheme}://",
        hint="Copy the checkpoint to a local disk first, or mount the bucket.",
    )
