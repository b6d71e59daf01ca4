"""Clients of object stores, set up from the environment, and what their errors mean."""

from __future__ import annotations

import configparser
import datetime
import os
import re
from collections.abc import Mapping
from typing import Any

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from orbax_safetensors_layout.errors import StorageError, redact
from orbax_safetensors_layout.options import RetryPolicy

from .retry import Failure, RequestFailed, is_transient_status

Client = S3Store | GCSStore | AzureStore

NOT_FOUND = (exceptions.NotFoundError, FileNotFoundError)
"""What obstore raises where there is no object: the second, as of 0.12.1."""

_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_HOST = "169.254."  # asked for credentials where there are no others
_LONGEST_CAUSE = 400
_MOST_CONNECT_SECONDS = 10.0
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_VARIABLES = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}


def open_client(scheme: str, bucket: str, policy: RetryPolicy, *, retrying: bool) -> Client:
    """A client of one bucket; makes no request.

    Credentials and endpoints are those of obstore (the environment variables of each cloud's own
    tools, the metadata services of machines in it, Google's application default credentials) and,
    besides, those of `~/.aws`, and `STORAGE_EMULATOR_HOST`.

    Args:
        scheme: `"gs"`, `"s3"` or `"az"`.
        bucket: The bucket; for Azure the container.
        policy: How long requests are tried.
        retrying: Whether the client tries again by itself; uploads in parts need that.

    Raises:
        StorageError: The environment does not say enough, or something wrong.
    """
    options: dict[str, Any] = {
        "timeout": datetime.timedelta(seconds=policy.attempt_seconds),
        "connect_timeout": datetime.timedelta(
            seconds=min(policy.attempt_seconds, _MOST_CONNECT_SECONDS)
        ),
    }
    backoff = {
        "init_backoff": datetime.timedelta(seconds=policy.base_seconds),
        "max_backoff": datetime.timedelta(seconds=max(policy.max_seconds, policy.base_seconds)),
    }
    retries: Any = {
        "max_retries": policy.attempts - 1 if retrying else 0,
        "retry_timeout": datetime.timedelta(seconds=policy.total_seconds),
        "backoff": backoff,
    }
    make = {"gs": _google, "s3": _amazon, "az": _azure}[scheme]
    try:
        return make(bucket, options, retries)
    except (exceptions.BaseError, OSError, ValueError) as error:
        cause = redact(_first_lines(error))
    # Not in the handler: what an error has seen is not part of the one that is raised.
    raise StorageError(
        "can not set up a client of the bucket",
        file=f"{scheme}://{bucket}",
        found=cause,
        hint="docs/storage.md lists the variables and files that it is set up from.",
    ) from RequestFailed(cause)


def _google(bucket: str, options: Mapping[str, Any], retries: Any) -> Client:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    config: Any = {}
    if emulator:
        url = emulator if "://" in emulator else f"http://{emulator}"
        config = {"google_base_url": url, "google_bearer_token": "emulator"}
    client: Any = {**options, "allow_http": bool(emulator)}
    return GCSStore(bucket, config=config, client_options=client, retry_config=retries)


def _amazon(bucket: str, options: Mapping[str, Any], retries: Any) -> Client:
    config: Any = _amazon_files()
    environment = os.environ
    endpoint = (
        environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or environment.get("AWS_ENDPOINT")
        or config.get("aws_endpoint_url", "")
    )
    # Options that are given replace those of the environment, so these are asked for again. An
    # endpoint without TLS is taken as said, as Amazon's own tools do.
    allowed = endpoint.startswith("http://") or _is_true(environment.get("AWS_ALLOW_HTTP"))
    client: Any = {**options, "allow_http": allowed}
    return S3Store(bucket, config=config, client_options=client, retry_config=retries)


def _azure(bucket: str, options: Mapping[str, Any], retries: Any) -> Client:
    environment = os.environ
    allowed = _is_true(environment.get("AZURE_ALLOW_HTTP")) or _is_true(
        environment.get("AZURE_STORAGE_USE_EMULATOR")
    )
    client: Any = {**options, "allow_http": allowed}
    return AzureStore(bucket, client_options=client, retry_config=retries)


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in ("1", "true", "yes", "on")


def _amazon_files() -> dict[str, str]:
    """What the profile in `~/.aws` says where the environment does not; obstore reads no files.

    Keys that are in the files are taken. Profiles that get theirs by a program, a role or single
    sign-on are not.
    """
    profile = os.environ.get("AWS_PROFILE", "default")
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    found: dict[str, str] = {}
    for file, section in (
        (config, profile if profile == "default" else f"profile {profile}"),
        (credentials, profile),
    ):
        found |= _section(os.path.expanduser(file), section)
    taken = [
        name
        for name, variables in _VARIABLES.items()
        if name in found and not any(map(os.environ.get, variables))
    ]
    if _KEYS[0] in found and not any(os.environ.get(key.upper()) for key in _KEYS):
        taken += [key for key in _KEYS if key in found]
    return {key if key in _KEYS else f"aws_{key}": found[key] for key in taken}


def _section(file: str, name: str) -> dict[str, str]:
    """What a section of an INI file says; nothing if it is not there.

    Raises:
        ValueError: The file is malformed. What is in it is not told.
    """
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(file)
    except (configparser.Error, UnicodeDecodeError) as error:
        problem = type(error).__name__
    else:
        return dict(parser.items(name)) if parser.has_section(name) else {}
    raise ValueError(f"{file} is malformed ({problem})")


def classify(error: Exception) -> Failure | None:
    """What an error of a client means; None for one that is none of theirs."""
    if not isinstance(error, exceptions.BaseError | OSError | ValueError):
        return None
    text = _first_lines(error)
    status = _STATUS.search(text)
    lasting = (
        *NOT_FOUND,
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.PreconditionError,
        exceptions.NotSupportedError,
        exceptions.InvalidPathError,
        exceptions.UnknownConfigurationKeyError,
        ValueError,  # of a path that no object can have
    )
    passing = not isinstance(error, lasting)
    if status:
        passing = passing and is_transient_status(int(status[1]))
    if _METADATA_HOST in text:
        passing = passing and status is not None
        text = f"no credentials in the environment, and {text}"
    return Failure(text, passing)


def _first_lines(error: Exception) -> str:
    """An error's text without the structures that obstore adds for debugging."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}…"
