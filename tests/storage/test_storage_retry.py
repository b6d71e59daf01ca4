"""Retries: what is tried again, how often, with which pauses; and errors without secrets."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from unittest import mock

import pytest
from remote_checks import shown

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import redact, redact_urls
from orbax_safetensors_layout.runtime import Workers
from orbax_safetensors_layout.storage.retry import (
    Failure,
    Retrier,
    is_transient_status,
    retry_after_seconds,
)

URL = "https://me:hunter2@host/bucket/model.safetensors?X-Amz-Signature=abcdef&Expires=5#part"


class Clock:
    """Time that passes only in pauses, and with each attempt."""

    def __init__(self, attempt_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.attempts = 0
        self._attempt_seconds = attempt_seconds

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now += seconds
        return False

    def fail_times(self, count: int):
        """A call that fails so many times and then returns "done"."""

        def call() -> str:
            self.attempts += 1
            self.now += self._attempt_seconds
            if self.attempts <= count:
                raise ConnectionResetError("connection reset")
            return "done"

        return call


def passing(error: Exception) -> Failure:
    return Failure(str(error), transient=True)


def lasting(error: Exception) -> Failure:
    return Failure(str(error), transient=False)


def run(clock, call, classify=passing, *, jitter=0.0, **policy):
    retrier = Retrier(osl.RetryPolicy(**policy), classify, clock=clock.read, wait=clock.wait)
    with mock.patch("random.random", return_value=jitter):
        return retrier.run(call, "reading bytes [3, 9)", URL)


def test_pauses_double_up_to_the_longest():
    clock = Clock()
    assert run(clock, clock.fail_times(5), base_seconds=1, max_seconds=5) == "done"
    assert clock.pauses == [1, 2, 4, 5, 5]


def test_jitter_takes_its_share_of_a_pause():
    clock = Clock()
    run(clock, clock.fail_times(2), base_seconds=1, jitter=0.75)
    assert clock.pauses == [0.25, 0.5]


def test_the_error_names_url_range_attempts_and_last_cause():
    clock = Clock()
    with pytest.raises(osl.StorageError) as caught:
        run(clock, clock.fail_times(99), attempts=3)
    text = str(caught.value)
    assert "reading bytes [3, 9) failed after 3 attempts" in text
    assert "connection reset" in text
    assert caught.value.file == "https://host/bucket/model.safetensors"
    assert "RetryPolicy" in caught.value.hint
    assert "connection reset" in str(caught.value.__cause__)


def test_permanent_failures_are_not_tried_again():
    clock = Clock()
    with pytest.raises(osl.StorageError, match="failed after 1 attempt in"):
        run(clock, clock.fail_times(99), lasting)
    assert clock.attempts == 1


def test_no_attempt_begins_after_the_total_time():
    clock = Clock(attempt_seconds=4)
    with pytest.raises(osl.StorageError, match="after 3 attempts in 12"):
        run(clock, clock.fail_times(99), attempts=100, total_seconds=10, base_seconds=0)


def test_a_server_that_asks_for_time_gets_it():
    clock = Clock()

    def classify(error):
        return Failure("503", transient=True, after_seconds=7)

    assert run(clock, clock.fail_times(1), classify) == "done"
    assert clock.pauses == [7]


def test_a_server_that_asks_for_too_much_time_is_given_up():
    clock = Clock()

    def classify(error):
        return Failure("503", transient=True, after_seconds=700)

    with pytest.raises(osl.StorageError, match="after 1 attempt"):
        run(clock, clock.fail_times(1), classify)


def test_errors_of_this_package_and_foreign_ones_pass():
    def missing():
        raise osl.CheckpointNotFoundError("no such file", file="f")

    with pytest.raises(osl.CheckpointNotFoundError):
        run(Clock(), missing)

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(Clock(), broken, lambda error: None)


def test_a_failure_elsewhere_ends_pauses():
    """A worker that waits an hour between attempts does not hold up an error of another."""
    policy = osl.RetryPolicy(base_seconds=3600, max_seconds=3600, total_seconds=7200)
    retrier = Retrier(policy, passing)
    failed_once = threading.Event()

    def unreachable():
        failed_once.set()
        raise ConnectionResetError("connection reset")

    def retried():
        retrier.run(unreachable, "reading", URL)

    def broken():
        assert failed_once.wait(60)
        raise ValueError("broken")

    def run_both():
        with Workers(2, "test", retrier.interrupt) as workers:
            workers.submit(retried)
            workers.submit(broken)
            workers.join()

    with pytest.raises(ValueError, match="broken"):
        run_both()


def test_interrupted_requests_are_not_tried_again():
    retrier = Retrier(osl.RetryPolicy(), passing)
    retrier.interrupt()
    clock = Clock()
    with pytest.raises(osl.StorageError, match="after 1 attempt"):
        retrier.run(clock.fail_times(1), "reading", URL)


@pytest.mark.parametrize(
    ("status", "transient"),
    [(408, True), (429, True), (500, True), (502, True), (503, True), (504, True), (501, False)]
    + [(status, False) for status in (400, 401, 403, 404, 412, 416)],
)
def test_statuses(status, transient):
    assert is_transient_status(status) is transient


def test_retry_after():
    assert retry_after_seconds(None) is None
    assert retry_after_seconds("120") == 120
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 -0000") == 0
    later = retry_after_seconds("Fri, 31 Dec 2100 23:59:59 GMT")
    assert later is not None
    assert later > 1e9
    assert retry_after_seconds("soon") is None


SECRETS = [
    "https://host/file?X-Amz-Signature=hunter2hunter2",
    "https://user:hunter2hunter2@host/file",
    "https://hunter2hunter2@host/file",
    "https://host/file?hunter2hunter2",
    "https://user:p@hunter2hunter2@host/file",
    "HTTPSConnectionPool(host='h', port=443): Max retries exceeded with url: /f?sig=hunter2hunter2",
    "Authorization: Bearer hunter2hunter2",
    "{'authorization': 'Bearer hunter2hunter2'}",
    "X-Amz-Security-Token: hunter2hunter2",
    "AWS_SECRET_ACCESS_KEY=hunter2hunter2",
    "secret_access_key: 'hunter2hunter2'",
    "(https://account.blob.core.windows.net/c/f?sv=2024&sig=hunter2hunter2)",
    'url="s3://bucket/f?versionId=3&token=hunter2hunter2"',
    "https://host/f#access_token=hunter2hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_taken_out(text):
    assert "hunter2" not in redact(text)


@pytest.mark.parametrize("text", SECRETS)
def test_no_secret_in_an_error_or_what_it_chains(text):
    def call():
        raise ConnectionError(text)

    with pytest.raises(osl.StorageError) as caught:
        Retrier(osl.RetryPolicy(attempts=1), passing).run(call, "reading", URL)
    error = caught.value
    shown = "".join(traceback.format_exception(error))
    assert "hunter2" not in shown + repr(error) + repr(error.__cause__)


def test_what_an_error_of_this_package_was_made_of_is_not_part_of_it():
    def call():
        try:
            raise ConnectionError(SECRETS[0])
        except ConnectionError:
            raise osl.StorageError("the object was replaced") from None

    with pytest.raises(osl.StorageError) as caught:
        run(Clock(), call)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("text", SECRETS[:4])
def test_an_error_shows_of_a_path_what_may_be_shown(text):
    error = osl.StorageError("cannot open", file=text)
    assert "hunter2" not in f"{error!r} {error.file}"


@pytest.mark.parametrize("text", SECRETS[:5])
def test_no_text_of_an_error_has_the_secrets_of_a_url(text):
    for field in ("message", "expected", "found", "hint"):
        error = osl.MappingError(**{"message": "it fails", field: f"no {text!r}, or {text}: it"})
        problems = [error, osl.FormatError("another", found=f"{text} ")]
        for problem in (error, osl.SafetensorsLayoutError.collect(problems)):
            assert "hunter2" not in shown(problem)
            assert "host/file', or https://host/file" in str(problem)
    for found in (ConnectionError(text), [text]):
        assert "hunter2" not in f"{osl.StorageError('it fails', found=found)!r}"
    error = osl.MappingError("it fails", found=3)
    error.hint = text
    assert error.found == 3
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    "path",
    [
        "ftp://me:hunter2@host/x?sig=hunter2",
        "s3://AKIA:hunter2@bucket/x",
        Path("https://me:hunter2@host/x?sig=hunter2"),
        "https://me:hunter/2@host/x",
        "https://[bad?sig=hunter2",
    ],
)
def test_a_path_that_cannot_be_opened_is_an_error_that_shows_no_secret(path):
    with pytest.raises(osl.StorageError) as caught:
        osl.load(path)
    assert "hunter" not in shown(caught.value)
    assert not osl.is_safetensors_checkpoint(path)


def test_harmless_text_stays():
    text = "error decoding response body: end of file before message length reached"
    assert redact(text) == text
    text = "Error performing token request: Error performing GET"
    assert redact(text) == text
    for path in ("gs://bucket/folder/model.safetensors", "hf://gpt2@main/file", "hf://org/m@main"):
        assert redact(path) == path
    assert redact("hf://me:hunter2@gpt2") == "hf://gpt2"


@pytest.mark.timeout(60)
def test_names_without_a_url_stay_however_long_they_are():
    names = ["a.?b#c@d:e/", ".a" * 1_000_000, "layers.0.w@me:pw?x=1", "http:/a@b?c", "a-" * 100_000]
    for text in (*names, ", ".join([*names, "https://host/folder", *names])):
        assert redact_urls(text) == text
        error = osl.MappingError(text, expected=text, found=text, hint=text)
        assert (error.message, error.expected, error.found, error.hint) == (text,) * 4
        assert str(error) == f"{text} (expected: {text}, found: {text}). {text}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempts", 0),
        ("attempts", None),
        ("attempts", 1.5),
        ("total_seconds", -1),
        ("max_seconds", float("nan")),
        ("attempt_seconds", 0),
        ("base_seconds", "1"),
        ("jitter", 2),
        ("jitter", -0.1),
    ],
)
def test_a_policy_must_make_sense(name, value):
    with pytest.raises(ValueError, match=f"RetryPolicy.{name}"):
        osl.RetryPolicy(**{name: value})


@pytest.mark.parametrize("kind", [osl.ReadOptions, osl.WriteOptions])
@pytest.mark.parametrize("wrong", [{"retries": 5}, {"retries": None}, {"progress": "yes"}])
def test_options_take_a_policy_and_a_function(kind, wrong):
    with pytest.raises(ValueError, match=rf"{kind.__name__}.{next(iter(wrong))} must be "):
        kind(**wrong)
