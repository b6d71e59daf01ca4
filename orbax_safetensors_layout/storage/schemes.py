"""Opens the storage that serves a path: a registry of openers by scheme."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Callable, Iterator

from orbax_safetensors_layout.errors import StorageError, redact_urls
from orbax_safetensors_layout.options import CacheFolder, RetryPolicy
from orbax_safetensors_layout.runtime import interrupt_when_cancelled

from .base import Storage
from .cache import CachedStorage
from .local import LocalStorage

Opener = Callable[[str, RetryPolicy | None], tuple[Storage, str]]
"""Takes a path with its scheme; returns what `open_storage` does."""

_MOST_FOLDERS = 500  # each is a call of a function where folders are made or removed


def open_storage(
    path: str | os.PathLike[str],
    *,
    retries: RetryPolicy | None = None,
    cache: CacheFolder | None = None,
) -> tuple[Storage, str]:
    """Return the storage that a path names, and the path in that storage's own terms.

    With a `cache` one for reading alone, which keeps there what is not local.
    """
    check_path(text := os.fsdecode(path))
    scheme, separator, _ = text.partition("://")
    opener = OPENERS.get(scheme + separator if separator else "")
    if opener is None:
        known = ", ".join(prefix for prefix in OPENERS if prefix not in ("", "http://"))
        raise StorageError(
            f"cannot open a {scheme}:// path",
            file=text,
            expected=f"a local path, or a URL of {known}",
            found=f"{scheme}://",
            hint="Copy the checkpoint to a local disk first, or mount the bucket.",
        )
    storage, place = opener(text, retries)
    if cache is not None and not isinstance(storage, LocalStorage):
        try:
            storage = CachedStorage(storage, cache)
        except BaseException:
            storage.close()
            raise
    interrupt_when_cancelled(storage)
    return storage, place


def check_path(text: str) -> None:
    """Refuses paths that no storage has; an empty one would be the working folder."""
    if not text or "\0" in text:
        problem = "the path is empty, or has a null byte"
        raise StorageError(problem, file=repr(text), expected="a local path or a URL")
    if text.count("/") > _MOST_FOLDERS:
        found = f"{text.count('/')} slashes"
        expected = f"a path of at most {_MOST_FOLDERS}"
        raise StorageError("the path is too deep", file=text[:80], expected=expected, found=found)


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Return the absolute path of a local file or folder, given as such or as `file://`, or None.

    >>> local_path("file:///models/a%20b/"), local_path("gs://bucket/model")
    ('/models/a b', None)
    """
    text = os.fsdecode(path)
    if text.startswith("file://"):
        return os.path.abspath(urllib.parse.unquote(text.removeprefix("file://")))
    return None if "://" in text else os.path.abspath(os.path.expanduser(text))


def _open_local(text: str, retries: RetryPolicy | None) -> tuple[Storage, str]:
    scheme, _, rest = text.partition(":/")
    if rest and f"{scheme}://" in OPENERS and not os.path.lexists(text):
        meant = redact_urls(f"{scheme}://{rest}")
        raise StorageError(
            "the path lacks a slash, which `pathlib.Path` takes away from URLs",
            file=meant.replace("://", ":/", 1),
            expected=meant,
            hint="Give it as a string, or as an `epath.Path`.",
        )
    return LocalStorage(), os.path.abspath(os.path.expanduser(text))


def _open_file(text: str, retries: RetryPolicy | None) -> tuple[Storage, str]:
    return LocalStorage(), local_path(text) or text


def _open_web(text: str, retries: RetryPolicy | None) -> tuple[Storage, str]:
    from .web import WebStorage  # its HTTP client takes time to import

    web = WebStorage(text, retries)
    return web, web.path


def _open_cloud(text: str, retries: RetryPolicy | None) -> tuple[Storage, str]:
    scheme, _, rest = text.partition("://")
    with _needs("obstore", text):
        from .cloud import CloudStorage
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError("the path names no bucket", file=text)
    if "@" in bucket:
        raise StorageError(
            "a bucket's path takes no credentials",
            file=text,
            hint="They come from the environment; docs/storage.md lists the variables and files.",
        )
    path = "/".join(part for part in key.split("/") if part)
    return CloudStorage(scheme, bucket, retries=retries), f"{scheme}://{bucket}/{path}"


def _open_hub(path: str, retries: RetryPolicy | None) -> tuple[Storage, str]:
    with _needs("huggingface_hub", path):
        from .hub import HubStorage
    return HubStorage(path, retries), path


@contextlib.contextmanager
def _needs(package: str, path: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise StorageError(
            f"{path.partition('://')[0]}:// paths need the package `{package}`",
            file=path,
            found=error,
            hint=f"pip install --upgrade {package}",
        ) from error


OPENERS: dict[str, Opener] = {
    "": _open_local,
    "file://": _open_file,
    **dict.fromkeys(("gs://", "s3://", "az://"), _open_cloud),
    "hf://": _open_hub,
    "https://": _open_web,
    "http://": _open_web,
}
"""Openers of paths by their beginning; "" is a local path."""
