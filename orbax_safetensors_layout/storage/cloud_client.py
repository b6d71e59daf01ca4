"""Clients of object stores, set up from the environment, and what their errors mean."""

from __future__ import annotations

import configparser
import datetime
import os
import re
from typing import Any

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from orbax_safetensors_layout.errors import StorageError, redact, redact_urls
from orbax_safetensors_layout.options import RetryPolicy

from .retry import Failure, is_transient_status

Client = S3Store | GCSStore | AzureStore
_Settings = tuple[Any, dict[str, str], bool]  # a client's class, its options, whether http is used

NOT_FOUND = (exceptions.NotFoundError, FileNotFoundError)  # obstore 0.12.1 raises the second
_LASTING = (
    *NOT_FOUND,
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.PreconditionError,
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
    ValueError,  # of a path that no object can have
)
_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_HOST = "169.254."  # asked for credentials where there are no others
_MOST_CONNECT_SECONDS = 10.0
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_VARIABLES = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}
_SERVICES = {
    "gs": ("STORAGE_EMULATOR_HOST",),
    "s3": _VARIABLES["endpoint_url"],
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"),
}


def open_client(scheme: str, bucket: str, policy: RetryPolicy, *, retrying: bool) -> Client:
    """Return a client of a bucket; a `StorageError` where the environment is wrong.

    Credentials and endpoints are those that obstore finds (in variables, metadata services and
    Google's files), and besides those of `~/.aws` and `STORAGE_EMULATOR_HOST`. `retrying` is for
    uploads in parts, which the client must try again by itself.
    """
    seconds = policy.attempt_seconds
    retries: Any = {
        "max_retries": policy.attempts - 1 if retrying else 0,
        "retry_timeout": datetime.timedelta(seconds=policy.total_seconds),
        "backoff": {
            "init_backoff": datetime.timedelta(seconds=policy.base_seconds),
            "max_backoff": datetime.timedelta(seconds=max(policy.max_seconds, policy.base_seconds)),
        },
    }
    try:
        store, config, allow_http = {"gs": _google, "s3": _amazon, "az": _azure}[scheme]()
        options = {
            "timeout": datetime.timedelta(seconds=seconds),
            "connect_timeout": datetime.timedelta(seconds=min(seconds, _MOST_CONNECT_SECONDS)),
            "allow_http": allow_http,
        }
        client: Client = store(bucket, config=config, client_options=options, retry_config=retries)
        return client
    except (exceptions.BaseError, OSError, ValueError) as error:
        cause = describe(error)
    # Not in the handler: what an error has seen is not part of the one that is raised.
    raise StorageError(
        "cannot set up a client of the bucket",
        file=f"{scheme}://{bucket}",
        found=cause,
        hint="docs/storage.md lists the variables and files that it is set up from.",
    ) from Failure(cause)


def service_of(scheme: str) -> str:
    """Return which service the environment names, where another may have the same bucket."""
    values = [*map(os.environ.get, _SERVICES[scheme])]
    values += [_amazon_files().get("aws_endpoint_url")] if scheme == "s3" else []
    return redact_urls(" ".join(value or "-" for value in values))


def _google() -> _Settings:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return GCSStore, {}, False
    url = emulator if "://" in emulator else f"http://{emulator}"
    return GCSStore, {"google_base_url": url, "google_bearer_token": "emulator"}, True


def _amazon() -> _Settings:
    config = _amazon_files()
    endpoints = [*map(os.environ.get, _VARIABLES["endpoint_url"]), config.get("aws_endpoint_url")]
    endpoint = next(filter(None, endpoints), "")
    # Options that are given replace those of the environment, so these are asked for again. An
    # endpoint without TLS is taken as said, as Amazon's own tools do.
    return S3Store, config, endpoint.startswith("http://") or _is_true("AWS_ALLOW_HTTP")


def _azure() -> _Settings:
    return AzureStore, {}, _is_true("AZURE_ALLOW_HTTP") or _is_true("AZURE_STORAGE_USE_EMULATOR")


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


def _amazon_files() -> dict[str, str]:
    """Return keys and settings in `~/.aws`, which obstore does not read; the environment wins."""
    profile = os.environ.get("AWS_PROFILE", "default")
    section = profile if profile == "default" else f"profile {profile}"
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    options = _section(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), section)
    options |= _section(credentials, profile)
    settings = {
        f"aws_{name}": options[name]
        for name, variables in _VARIABLES.items()
        if name in options and not any(map(os.environ.get, variables))
    }
    if _KEYS[0] in options and not any(os.environ.get(key.upper()) for key in _KEYS):
        settings |= {key: options[key] for key in _KEYS if key in options}
    return settings


def _section(file: str, name: str) -> dict[str, str]:
    """Return a section of an INI file, empty if missing; errors do not show its text."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(os.path.expanduser(file))
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is malformed ({type(error).__name__})") from None
    return dict(parser.items(name)) if parser.has_section(name) else {}


def classify(error: Exception) -> Failure | None:
    """Return the meaning of a client's error; None for any other error."""
    if not isinstance(error, exceptions.BaseError | OSError | ValueError):
        return None
    text = str(error)
    status = _STATUS.search(text)
    passing = not isinstance(error, _LASTING)
    if status:
        passing = passing and is_transient_status(int(status[1]))
    words = describe(error)
    if _METADATA_HOST in text:
        passing = passing and status is not None
        words = f"no credentials in the environment, and {words}"
    failure = Failure(words, transient=passing)
    failure.__cause__ = Failure(_said(error))
    return failure


def describe(error: BaseException) -> str:
    """Return the status that a store answered with, or else the client's own words."""
    status = _STATUS.search(str(error))
    return f"status {status[1]}" if status else redact(_said(error))


def _said(error: BaseException) -> str:
    """Return an error's text without what obstore adds for debugging."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())
