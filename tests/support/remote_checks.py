"""Shared by tests of remote storages: a hub, and checks of errors, threads and secrets."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator

import huggingface_hub.constants
import numpy as np
import pytest
from checkpoints import assert_same_bits
from hub_server import Hub, running_hub

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
SECRETS = (TOKEN, "X-Amz", "Signature", "secret", "pass%20word", "pass word", "sig=")


@contextlib.contextmanager
def hub_in_use(monkeypatch: pytest.MonkeyPatch, home: os.PathLike[str]) -> Iterator[Hub]:
    """A hub that `huggingface_hub` takes for the hub; at the end nobody may be connected to it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "token"))
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.hub.url)
        yield hub
        huggingface_hub.close_session()


def descriptors() -> int:
    """The number of open files, without those that only garbage holds."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def threads() -> set[str]:
    """Names of the threads that are not a test server's."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if "test-server" not in name and "serve_forever" not in name}


def assert_same(loaded: dict, expected: dict[str, np.ndarray]) -> None:
    """Equal names, shapes, dtypes and bits."""
    assert set(loaded) == set(expected)
    for name, values in expected.items():
        assert_same_bits(loaded[name], values)


def ended(load: Callable[[], dict], seconds: float) -> dict | Exception:
    """Return what a load ends with, if it ends in time."""
    ends: list[dict | Exception] = []

    def run() -> None:
        try:
            ends.append(load())
        except Exception as error:
            ends.append(error)

    thread = threading.Thread(target=run, name="watched", daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the load hangs"
    return ends[0]


def shown(error: BaseException) -> str:
    """All that an error and what it chains tell, also where a traceback would leave it out."""
    texts: list[str] = []
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None:
            texts += [repr(link), str(link), repr(vars(link)), *getattr(link, "__notes__", ())]
            chain += [link.__cause__, link.__context__]
    return "\n".join(texts)


def assert_no_secret(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text], text
