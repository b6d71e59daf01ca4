"""Servers that drip, lie and repeat what they are told: right bytes or one clean error, in time."""

from __future__ import annotations

import itertools
import threading
import time
import urllib.parse
from collections import Counter

import checkpoints
import numpy as np
import pytest
from lying_server import Lies, LyingServer
from remote_checks import (
    TOKEN,
    assert_no_secret,
    assert_same,
    descriptors,
    ended,
    hub_in_use,
    shown,
    threads,
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


def check_lies(server, first_seed: int, least: int) -> None:
    """Loads until so many mutated answers were sent; all end as they may, and leave no thread."""
    ends: Counter[str] = Counter()
    told: Counter[str] = Counter()
    before = threads(), descriptors()
    for seed in itertools.count(first_seed):
        if sum(told.values()) >= least:
            break
        server.lies = Lies(seed, rate=0.3 if seed % 2 else 0.05)
        end = ended(lambda: osl.load(path_of(server), options=OPTIONS), MOST_SECONDS)
        assert threads() == before[0], f"seed {seed}"
        ends[check(end)] += 1
        told.update(server.lies.told)
    print(dict(ends), sum(told.values()), "mutated answers", dict(told))
    assert ends["equal"]
    assert ends["StorageError"]
    assert descriptors() < before[1] + 20  # of the server, too, which closes its own a little later


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


@pytest.mark.parametrize("needle", [b"00002", b"bytes=1"])
@pytest.mark.parametrize("status", [b"HTTP/1.1 403", b"HTTP/1.1 500", b"HTTP/1.1 206", b"FTP", b""])
def test_what_a_server_repeats_is_not_shown(server, status, needle):
    def parts(asked, head, body):
        sent = [line for line in asked.split(b"\r\n") if b"uthorization" in line or b"GET" in line]
        words = b" ".join([*sent, *(urllib.parse.unquote_to_bytes(line) for line in sent)])
        told = words + b" me:pass word, pass%20word"
        lines = [b"X-Error-Message", b"ETag", b"Content-Range", b"Content-Encoding", b"Retry-After"]
        yield b"\r\n".join([status + b" " + told, *(n + b": " + told for n in lines), b"", b""])

    server.lies = Script(parts, needle=needle)
    assert check(ended(lambda: osl.load(path_of(server), options=OPTIONS), MOST_SECONDS)) != "equal"


@pytest.mark.parametrize(
    "location",
    ["http://" + "a" * 70 + "/", "http://a..b/", "http://h:99999/", "http://[::1/", "http://\xad/",
     "http://h:" + "9" * 5_000 + "/", "http://me:pw@./", "\x00", "http://a\x00b/", "//%00/"],
)  # fmt: skip
def test_a_redirect_to_a_host_that_can_be_none(server, location):
    line = b"Location: " + location.encode("utf-8")
    server.lies = Script(
        lambda *_: [b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n" + line + b"\r\n\r\n"]
    )
    assert check(ended(lambda: osl.load(path_of(server), options=OPTIONS), MOST_SECONDS)) != "equal"


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Range: bytes 0-%b/%b" % (b"9" * 5_000, b"9" * 5_000),
        b"Content-Length: " + b"9" * 5_000,
        b"Retry-After: " + b"9" * 5_000,
        b"Retry-After: Fri, 31 Dec 9999 23:59:59 -2359",
        b"Last-Modified: Mon, 99 Foo 99999999999999999999 99:99:99",
        b"Last-Modified: " + b"0 " * 5_000,
    ],
)
@pytest.mark.parametrize("status", [b"206 OK", b"503 Busy", b"416 Range"])
def test_a_header_with_an_absurd_value(server, header, status):
    name = header.partition(b":")[0]

    def parts(asked, head, body):
        kept = [line for line in head[1:] if not line.startswith(name)]
        yield b"\r\n".join([b"HTTP/1.1 " + status, *kept, header, b"", b""]) + body

    server.lies = Script(parts, needle=b"00002")
    check(ended(lambda: osl.load(path_of(server), options=OPTIONS), MOST_SECONDS))


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


def test_a_hub_that_drips_and_repeats_its_token(tmp_path, monkeypatch):
    with hub_in_use(monkeypatch, tmp_path), LyingServer(tmp_path) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        echo = f"HTTP/1.1 2 {TOKEN} Bearer {TOKEN}\r\n\r\n".encode()
        for parts in (
            endless(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{", b" "),
            lambda *_: [echo],
        ):
            server.lies = Script(parts, 0.1)
            end = ended(lambda: osl.load("hf://org/model", options=OPTIONS), MOST_SECONDS)
            assert isinstance(end, osl.StorageError), end
            assert_no_secret(shown(end))


@pytest.mark.slow
def test_mutated_answers(server):
    check_lies(server, 0, least=60)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_thousand_mutated_answers(server):
    check_lies(server, 1_000, least=2_000)
