"""Seeded runs against servers that fail in every way: equal arrays or one clean error."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable

import checkpoints
import huggingface_hub
import pytest
from http_server import FAULTS, Faults, Request, file_server
from hub_server import running_hub
from remote_checks import assert_no_secret, assert_same, descriptors, ended, shown, threads

import orbax_safetensors_layout as osl

TENSORS = checkpoints.llama_like()
POLICY = osl.RetryPolicy(
    attempts=4, total_seconds=20, attempt_seconds=0.5, base_seconds=0.001, max_seconds=0.01
)
OPTIONS = osl.ReadOptions(retries=POLICY, request_bytes=20_000, concurrency=8)
WATCHDOG_SECONDS = 100
SHORT, LONG = range(20), range(20, 320)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.save(tmp_path_factory.mktemp("faults") / "model", TENSORS, files=3)


def seeded_faults(rng: random.Random) -> Faults:
    kinds = rng.sample(sorted(FAULTS), rng.randint(1, 4))
    rate = rng.choice([0.02, 0.1, 0.3])
    lock = threading.Lock()

    def faults(request: Request) -> str | None:
        with lock:
            return rng.choice(kinds) if rng.random() < rate else None

    return faults


def outcome(load: Callable[[], dict], expected=TENSORS) -> str:
    """Loads under a watchdog: "equal", or "error"."""
    end = ended(load, WATCHDOG_SECONDS)
    if isinstance(end, dict):
        assert_same(end, expected)
        return "equal"
    clean = osl.StorageError | osl.CheckpointNotFoundError | osl.FormatError  # of a wrong size
    assert isinstance(end, clean), repr(end)
    assert_no_secret(shown(end))
    return "error"


def check_seeds(run: Callable[[random.Random], str], seeds: range) -> None:
    """Every seed ends as it may, and leaves no thread and no descriptor; some of them well."""
    outcomes = set()
    for seed in seeds:
        huggingface_hub.close_session()
        before, opened = threads(), descriptors()
        outcomes.add(run(random.Random(seed)))
        assert threads() <= before, f"seed {seed}"  # those of earlier tests may end
        assert descriptors() <= opened, f"seed {seed}"
    assert outcomes == {"equal", "error"}


def hub_run(folder, monkeypatch) -> Callable[[random.Random], str]:
    def run(rng: random.Random) -> str:
        with running_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.hub.url)
            hub.add("org/model", folder)
            hub.uses = rng.choice([1, 3, 1_000])
            hub.hub.faults = hub.cdn.faults = seeded_faults(rng)
            ending = outcome(lambda: osl.load("hf://org/model", options=OPTIONS))
            huggingface_hub.close_session()
            return ending

    return run


def web_run(folder, options=OPTIONS, loads=1, expected=TENSORS) -> Callable[[random.Random], str]:
    def run(rng: random.Random) -> str:
        with file_server(folder) as server:
            server.faults = seeded_faults(rng)
            path = f"{server.url.replace('//', '//me:pass%20word@')}/files?sig=secret"
            endings = [
                outcome(lambda: osl.load(path, options=options), expected) for _ in range(loads)
            ]
            return max(endings)  # an error, if there is one

    return run


@pytest.mark.slow
def test_hub_that_fails(folder, monkeypatch):
    check_seeds(hub_run(folder, monkeypatch), SHORT)


def test_web_server_that_fails(folder):
    check_seeds(web_run(folder), SHORT)


@pytest.mark.slow
def test_web_server_that_fails_behind_a_cache(tmp_path):
    tensors = checkpoints.llama_like(hidden=256)  # more than comes with the headers
    folder = checkpoints.save(tmp_path / "model", tensors, files=3)
    options = dataclasses.replace(OPTIONS, cache=tmp_path / "cache", request_bytes=200_000)
    check_seeds(web_run(folder, options, 3, tensors), SHORT)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_hub_that_fails_in_many_ways(folder, monkeypatch):
    check_seeds(hub_run(folder, monkeypatch), LONG)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_web_server_that_fails_in_many_ways(folder):
    check_seeds(web_run(folder), LONG)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_one_fault_of_each_kind(folder, fault):
    """Faults that pass are tried again; another file, or a server of no use, is an error."""
    lasting = {"403", "404", "other size", "other etag", "ignored range", "encoded"}
    faults = iter([fault])
    lock = threading.Lock()

    def once(request: Request) -> str | None:
        with lock:
            return next(faults, None) if request.range and request.range[0] > 0 else None

    with file_server(folder) as server:
        server.faults = once
        ending = outcome(lambda: osl.load(f"{server.url}/files", options=OPTIONS))
        assert ending == ("error" if fault in lasting else "equal")
