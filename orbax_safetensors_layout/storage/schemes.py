"""From a path to the storage that serves it."""

from __future__ import annotations

import os
import urllib.parse

from orbax_safetensors_layout.errors import StorageError, redact_urls
from orbax_safetensors_layout.options import RetryPolicy

from .base import Storage
from .local import LocalStorage

CLOUDS = ("gs", "s3", "az")
"""Schemes of object stores."""

_SCHEMES = ("file", *CLOUDS, "hf", "https")


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
    if not text or "\0" in text:  # an empty one would be the working folder
        raise StorageError("no path", file=repr(text), expected="a local path or a URL")
    scheme, separator, rest = text.partition("://")
    if scheme in CLOUDS and separator:
        return _open_cloud(scheme, rest, retries)
    if not separator:
        _check_no_lost_slash(text)
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    if scheme == "file":
        return LocalStorage(), os.path.abspath(urllib.parse.unquote(rest))
    if scheme == "hf":
        return _open_hub(text, retries), text
    if scheme in ("http", "https"):
        from .web import WebStorage  # its HTTP client takes time to import

        web = WebStorage(text, retries)
        return web, web.path
    raise StorageError(
        f"can not open a {scheme}:// path",
        file=text,
        expected=f"a local path, or a URL of {', '.join(f'{known}://' for known in _SCHEMES)}",
        found=f"{scheme}://",
        hint="Copy the checkpoint to a local disk first, or mount the bucket.",
    )


def _check_no_lost_slash(text: str) -> None:
    """Refuses what `pathlib` makes of a URL, which would be a local path that does not exist."""
    scheme, _, rest = text.partition(":/")
    if scheme in (*_SCHEMES, "http") and rest and not os.path.lexists(text):
        meant = redact_urls(f"{scheme}://{rest}")
        raise StorageError(
            "the path lacks a slash, which `pathlib.Path` takes away from URLs",
            file=meant.replace("://", ":/", 1),
            expected=meant,
            hint="Give it as a string, or as an `epath.Path`.",
        )


def _open_cloud(scheme: str, rest: str, retries: RetryPolicy | None) -> tuple[Storage, str]:
    try:
        from .cloud import CloudStorage  # needs an extra
    except ImportError as error:
        raise StorageError(
            f"{scheme}:// paths need the package `obstore`",
            file=f"{scheme}://{rest}",
            found=error,
            hint="pip install 'orbax-safetensors-layout[cloud]'",
        ) from error
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError("the path names no bucket", file=f"{scheme}://{rest}")
    if "@" in bucket:
        raise StorageError(
            "a bucket's path takes no credentials",
            file=f"{scheme}://{rest}",
            hint="They come from the environment; docs/storage.md lists the variables and files.",
        )
    path = "/".join(part for part in key.split("/") if part)
    return CloudStorage(scheme, bucket, retries=retries), f"{scheme}://{bucket}/{path}"


def _open_hub(path: str, retries: RetryPolicy | None) -> Storage:
    try:
        from .hub import HubStorage  # needs an extra
    except ImportError as error:
        raise StorageError(
            "hf:// paths need the package `huggingface_hub`",
            file=path,
            found=error,
            hint="pip install 'orbax-safetensors-layout[hf]'",
        ) from error
    return HubStorage(path, retries)
