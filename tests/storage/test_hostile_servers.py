"""Servers that drip or close connections: right bytes or one clean error, in time."""

from __future__ import annotations

import itertools
import threading
import time

import checkpoints
import numpy as np
import pytest
from lying_server import LyingServer
from remote_checks import (
    TOKEN,
    assert_no_secret,
    assert_same,
    ended,
    hub_in_use,
    shown,
)

import orbax_safetensors_layout as osl

TENSORS = {f"w{n}": checkpoints.random_tensor((50, 400), np.uint8, n) for n in range(4)}
ATTEMPT_SECONDS = 0.3
POLICY = osl.RetryPolicy(
    attempts=2, total_seconds=2, attempt_seconds=ATTEMPT_SECONDS, base_seconds=0, max_seconds=0
)
OPTIONS = osl.ReadOptions(retries=POLICY, request_bytes=16_000, concurrency=4)
MOST_SECONDS = 60  # of a load; a loaded machine is slow, a hang lasts for good
SECRETS = ("Basic bWU6", "bWU6cGFzcyB3b3Jk", "me:pass", "pass word", "pass%20word", "s3cr3t")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = checkpoints.save(tmp_path_factory.mktemp("lies") / "model", TENSORS, files=2)
    with LyingServer(folder) as server:
        yield server


def path_of(server) -> str:
    return server.url.replace("//", "//me:pass%20word@") + "/files?sig=s3cr3t"


def check(end: dict | Exception, expected=TENSORS) -> str:
    if isinstance(end, dict):
        assert_same(end, expected)
        return "equal"
    text = shown(end)
    assert isinstance(end, osl.SafetensorsLayoutError), text
    assert not [secret for secret in SECRETS if secret in text], text
    assert "None bytes" not in text
    return type(end).__name__


class Script:
    """Answers all of some requests in one way.

    Args:
        parts: What is sent, part by part.
        seconds: Between two of them.
        needle: What the requests have in them; others are answered as they should be.
    """

    def __init__(self, parts, seconds: float = 0.02, needle: bytes = b"") -> None:
        self.parts, self.seconds, self.needle = parts, seconds, needle

    def answer(self, asked: bytes, head: list[bytes], body: bytes):
        if self.needle not in asked:
            yield b"\r\n".join([*head, b"", b""]) + body
            return
        for part in self.parts(asked, head, body):
            yield part
            time.sleep(self.seconds)


def endless(first: bytes, again: bytes):
    return lambda asked, head, body: itertools.chain([first], itertools.repeat(again))


CHUNKED = (
    b"HTTP/1.1 206 Partial\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-0/9\r\n\r\n"
)
DRIPS = {
    "status line": endless(b"HTTP/1.1 206 ", b"O"),
    "header": endless(b"HTTP/1.1 206 OK\r\nX-Name: ", b"x"),
    "headers": endless(b"HTTP/1.1 206 OK\r\n", b"X: y\r\n"),
    "interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body of a redirect": endless(
        b"HTTP/1.1 302 Found\r\nLocation: /files/x\r\nContent-Length: 9999999\r\n\r\n", b"x"
    ),
    "size of a chunk": endless(CHUNKED, b"0"),
    "chunks": endless(CHUNKED, b"1\r\nx\r\n"),
    "trailers": endless(CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n"),
    "body": endless(
        b"HTTP/1.1 206 OK\r\nContent-Length: 9999999\r\n"
        b"Content-Range: bytes 0-9999998/9999999\r\n\r\n",
        b"x",
    ),
}


@pytest.mark.parametrize("pause", [0.0, 0.1])
@pytest.mark.parametrize("part", DRIPS)
def test_an_answer_that_never_ends(server, part, pause):
    """However often its bytes come, and whatever part of it they are."""
    server.lies = Script(DRIPS[part], pause)
    begun = time.monotonic()
    end = ended(lambda: osl.load(f"{path_of(server)}", options=OPTIONS), MOST_SECONDS)
    assert check(end) in ("StorageError", "CheckpointNotFoundError")
    # Both attempts of each request, one after the other; some redirects of each.
    assert time.monotonic() - begun < MOST_SECONDS / 2


def test_a_server_that_closes_kept_connections_without_a_word(server):
    """Each connection serves one request; the next one is repeated on a new one, as no attempt."""
    connection = threading.local()

    class Closes:
        def answer(self, asked: bytes, head: list[bytes], body: bytes):
            if hasattr(connection, "has_served"):
                raise ConnectionAbortedError
            connection.has_served = True
            yield b"\r\n".join([*head, b"", b""]) + body

    server.lies = Closes()
    options = osl.ReadOptions(retries=osl.RetryPolicy(attempts=1), request_bytes=16_000)
    assert check(ended(lambda: osl.load(path_of(server), options=options), MOST_SECONDS)) == "equal"


def test_a_chunked_body_with_more_bytes_than_its_range(server):
    """A size that covers the next chunk's: all bytes that were asked for come, and are wrong."""

    def parts(asked, head, body):
        kept = [line for line in head if not line.startswith(b"Content-Length")]
        half = len(body) // 2
        yield b"\r\n".join([*kept, b"Transfer-Encoding: chunked", b"", b""])
        yield b"7fffffff\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (body[:half], half, body[half:])

    server.lies = Script(parts, needle=b"00002")
    assert (
        check(ended(lambda: osl.load(path_of(server), options=OPTIONS), MOST_SECONDS))
        == "StorageError"
    )


def test_a_hub_that_drips(tmp_path, monkeypatch):
    with hub_in_use(monkeypatch, tmp_path), LyingServer(tmp_path) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        drips = endless(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{", b" ")
        server.lies = Script(drips, 0.1)
        end = ended(lambda: osl.load("hf://org/model", options=OPTIONS), MOST_SECONDS)
        assert isinstance(end, osl.StorageError), end
        assert_no_secret(shown(end))
