"""Processes that save together, as threads that share a key-value store in memory."""

from __future__ import annotations

import contextvars
import copy
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.reading import replica_exchange
from orbax_safetensors_layout.runtime import (
    Cancellation,
    Fingerprint,
    ProcessGroup,
    heartbeat,
    process_group,
)

PROMPT_SECONDS = 50  # below any time-out here, far above what a busy machine needs


class MemoryStore:
    """Offers what `jax.distributed` does: set-once keys, listing, waiting and deleting.

    Args:
        patience: What a waiting time-out is multiplied by.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.values: dict[str, str] = {}
        self.deleted: list[str] = []
        self._patience = patience
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        key.encode()  # the real one takes text alone
        with self._changed:
            assert key not in self.values, "ALREADY_EXISTS"
            self.values[key] = value
            self._changed.notify_all()

    def renew(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def list(self, prefix: str) -> dict[str, str]:
        assert prefix.endswith("/")
        with self._changed:
            return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def get(self, key: str, timeout_seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self.values, timeout_seconds * self._patience
            ):
                raise TimeoutError(key)
            return self.values[key]

    def peek(self, key: str) -> str | None:
        with self._changed:
            return self.values.get(key)

    def delete(self, prefix: str) -> None:
        with self._changed:
            self.deleted.append(prefix)
            for key in [key for key in self.values if key == prefix or key.startswith(prefix)]:
                del self.values[key]


def together(
    store: MemoryStore,
    count: int,
    work: Callable[[ProcessGroup], object],
    *,
    name: str,
    timeout_seconds: float = 60,
) -> list[object]:
    """Return what `work` returns, or raises, in each process."""
    groups = make_groups(store, count, name, timeout_seconds)

    def run(group: ProcessGroup) -> object:
        try:
            with group:
                return work(group)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, groups))


def make_groups(
    store: MemoryStore, count: int, name: str, timeout_seconds: float = 60
) -> list[ProcessGroup]:
    """One group a process. Each process counts its operations; threads share the counter."""
    groups = []
    before = process_group._counts.copy()
    for process in range(count):
        process_group._counts.clear()
        process_group._counts.update(before)
        groups.append(ProcessGroup(name, process, count, store, timeout_seconds))
    return groups


def _silence(group: ProcessGroup) -> None:
    """Ends the heartbeat of a process as if it was killed."""
    group._heartbeat._beat = lambda *_: None
    group._heartbeat.stop()


@pytest.fixture
def store():
    return MemoryStore()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_constants_of_all_are_asked_for_once(store, count):
    def work(group):
        return [group.constants("naming", "host", f"host {group.process_index}") for _ in range(3)]

    expected = [f"host {process}" for process in range(count)]
    assert together(store, count, work, name="hosts") == [[expected] * 3] * count
    store.values.clear()  # what is known is known
    assert together(store, count, work, name="hosts") == [[expected] * 3] * count
    assert not [key for key in store.values if "constant" in key]


def test_a_process_without_its_constant_is_missing(store, monkeypatch):
    monkeypatch.setattr(process_group, "_WAIT_SECONDS", 0.1)

    def work(group):
        return group.process_index == 1 or group.constants("naming", "host", "here")

    first, second, third = together(store, 3, work, name="missing", timeout_seconds=0.5)
    assert second is True
    for error in (first, third):
        assert isinstance(error, osl.PeerError)
        assert "[1] did not finish naming within 0.5 s" in str(error)


def _fingerprint(text, parts=()):
    return Fingerprint(text, f"a tree of {text}", "All must have the same.", parts=lambda: parts)


@pytest.mark.parametrize(("one", "two"), [(["a", "b"], ["a", "c"]), (["a", "b"], ["a"]), ([], [])])
@pytest.mark.parametrize("waits", [True, False])
def test_the_first_part_that_differs_is_in_the_errors_of_all(store, one, two, waits):
    def work(group):
        is_other = group.process_index == 2
        fingerprint = _fingerprint("two" if is_other else "one", two if is_other else one)
        if waits:
            group.barrier("planning", agree=fingerprint)
        group.arrive("planning", fingerprint)
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            group.check("loading")
            time.sleep(0.05)

    its = two[1] if two[1:] else "no more"
    expected = (
        f" All must have the same. The first difference: process 0 has b; process 2 has {its}"
    )
    for error in together(store, 3, work, name="parts"):
        assert isinstance(error, osl.PeerError)
        assert "process 0 has a tree of one; process 2 has a tree of two." in str(error)
        assert (expected in str(error)) == bool(one)


@pytest.mark.parametrize("contents", ["aaa", "aab"])
def test_processes_of_other_places_go_apart_but_not_with_other_content(store, contents):
    def work(group):
        number = group.process_index
        fingerprint = _fingerprint("one")._replace(content=contents[number], place=f"/{number}")
        group.barrier("planning", agree=fingerprint)
        group.barrier("loading")  # of processes that have gone apart waits for nobody
        return group.apart

    outcomes = together(store, 3, work, name="places")
    if contents == "aaa":
        assert outcomes == ["process 0 has /0, process 1 has /1"] * 3
    else:
        for error in outcomes:
            assert isinstance(error, osl.PeerError)
            assert "process 2 failed while planning: its files are others: " in str(error)
            assert (
                "process 0 has /0 (content a); process 2 has /2 (content b). All must have the same"
                in str(error)
            )


def test_who_has_arrived_waits_for_no_end_of_another(store):
    """Process 1 ends, though process 2 works until it has."""
    ended = threading.Event()

    def work(group):
        group.arrive("planning", _fingerprint("one"))
        if group.process_index == 2:
            assert ended.wait(PROMPT_SECONDS)
        group.barrier("loading")
        if group.process_index == 1:
            ended.set()
        return "done"

    assert together(store, 3, work, name="apart") == ["done"] * 3


def test_the_first_tells_all_that_all_have_arrived_while_it_works(store):
    ended = threading.Event()

    def work(group):
        group.arrive("planning", _fingerprint("one"))
        while group.is_leader and not ended.wait(0.1):
            group.check("loading")
        group.barrier("loading")
        ended.set()
        return "done"

    assert together(store, 3, work, name="early") == ["done"] * 3


def test_arrived_with_something_else_is_an_error_of_all_that_work(store):
    def work(group):
        group.arrive("planning", _fingerprint("two" if group.process_index == 1 else "one"))
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            group.check("loading")
            time.sleep(0.05)

    for error in together(store, 3, work, name="others"):
        assert isinstance(error, osl.PeerError)
        assert "process 0 has a tree of one; process 1 has a tree of two" in str(error)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_after_the_arrival_reaches_all_that_work(store, failing):
    def work(group):
        group.arrive("planning", _fingerprint("one"))
        if group.process_index == failing:
            raise OSError("the disk is gone")
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            group.check("loading")
            time.sleep(0.05)

    errors = together(store, 3, work, name="late failure")
    assert isinstance(errors.pop(failing), OSError)
    for error in errors:
        assert f"process {failing} failed" in str(error)
        assert "the disk is gone" in str(error)


def test_few_waits_are_left_in_the_store_for_a_process_that_is_late(store, monkeypatch):
    monkeypatch.setattr(process_group, "_PROMPT_SECONDS", 0.2)
    waits: list[str] = []
    get = store.get

    def counted(key, timeout_seconds):
        if "/said/" in key:
            waits.append(key)
        return get(key, timeout_seconds)

    monkeypatch.setattr(store, "get", counted)

    def work(group):
        if group.process_index == 1:
            time.sleep(1.5)
        group.barrier("naming")
        return "done"

    assert together(store, 2, work, name="late") == ["done"] * 2
    assert 1 <= len(waits) <= 2


def test_a_process_that_fails_before_its_constant_is_known_fails_all(store):
    def work(group):
        if group.process_index == 1:
            raise OSError("no such folder")
        return group.constants("naming", "host", "x")

    first, second, third = together(store, 3, work, name="gathered")
    assert isinstance(second, OSError)
    assert "process 1 failed while naming: OSError: no such folder" in str(first)
    assert [type(first), type(third)] == [osl.PeerError] * 2


@pytest.mark.parametrize("count", [1, 2, 7])
def test_nobody_goes_on_before_all_are_there(store, count):
    """The last to come is late; nobody leaves a step before everyone has come to it."""
    came: list[tuple[int, int]] = []
    lock = threading.Lock()

    def work(group):
        for step in range(4):
            time.sleep(0.02 * ((group.process_index + step) % count))
            with lock:
                came.append((step, group.process_index))
            group.barrier(f"step {step}")
            with lock:
                assert sum(1 for number, _ in came if number == step) == count
        return "done"

    assert together(store, count, work, name="all meet") == ["done"] * count


def test_one_process_needs_no_store():
    group = ProcessGroup("alone", 0, 1, None, 1.0)
    assert group.is_leader
    group.barrier("a step")
    with pytest.raises(KeyError, match="mine"):
        group.barrier("a step", KeyError("mine"))


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_an_error_reaches_all_at_once_with_its_text(store, bad):
    """Also those that come later than the error, and those that are there already."""

    def work(group):
        group.barrier("a first step")
        error = ValueError("the disk\nis full") if group.process_index == bad else None
        if group.process_index == 2:
            time.sleep(0.3)
        group.barrier("writing shards", error)

    started = time.monotonic()
    errors = together(store, 4, work, name=f"error {bad}")
    assert time.monotonic() - started < PROMPT_SECONDS
    for process, error in enumerate(errors):
        if process == bad:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, osl.PeerError)
            assert f"process {bad} failed while writing shards" in str(error)
            assert "ValueError: the disk\nis full" in str(error)
            assert error.file == f"error {bad}"


def test_with_several_errors_all_have_the_first(store):
    """An error elsewhere may follow from the first; it is chained."""

    def work(group):
        process = group.process_index
        time.sleep(0.3 if process == 0 else 0.0)
        group.barrier("a step", OSError(f"of {process}") if process in (1, 3) else None)

    errors = together(store, 4, work, name="several errors")
    first = 1 if isinstance(errors[1], OSError) and "of 1" in str(errors[0]) else 3
    second = 4 - first
    assert str(errors[first]) == f"of {first}"
    for process in (0, 2, second):
        assert isinstance(errors[process], osl.PeerError)
        assert f"process {first} failed while a step: OSError: of {first}" in str(errors[process])
    assert str(errors[second].__cause__) == f"of {second}"


def test_a_process_at_work_learns_of_an_error_before_its_next_step(store):
    def work(group):
        if group.process_index == 2:
            group.barrier("a step", OSError("of 2"))
        try:
            for _ in range(1000):
                group.check("a step")
                time.sleep(0.05)
        except osl.PeerError as error:
            group.barrier("a step", error)

    errors = together(store, 3, work, name="at work")
    assert isinstance(errors[2], OSError)
    for error in errors[:2]:
        assert isinstance(error, osl.PeerError)
        assert "process 2 failed while a step: OSError: of 2" in str(error)


def test_what_is_worked_on_is_removed_when_all_have_stopped(store):
    stopped: list[int] = []

    def work(group):
        if group.is_leader:
            group.abandon()
            group.await_others()
            assert sorted(stopped) == [1, 2]
        else:
            time.sleep(0.2 * group.process_index)
            stopped.append(group.process_index)
            group.abandon()

    assert together(store, 3, work, name="left") == [None] * 3


def test_others_do_not_wait_for_one_that_is_still_busy(store):
    """A slow process learns of the error when it comes; the others long before."""
    left = {process: threading.Event() for process in range(2)}

    def work(group):
        process = group.process_index
        if process == 2:
            assert all(event.wait(20) for event in left.values())
        try:
            group.barrier("a step", RuntimeError("no") if process == 1 else None)
        finally:
            if process in left:
                left[process].set()

    errors = together(store, 3, work, name="busy")
    assert [type(error) for error in errors] == [osl.PeerError, RuntimeError, osl.PeerError]


def test_a_base_exception_is_an_error_like_any_other(store):
    def work(group):
        group.barrier("a step", KeyboardInterrupt() if group.process_index == 1 else None)

    errors = together(store, 2, work, name="interrupt")
    assert isinstance(errors[1], KeyboardInterrupt)
    assert isinstance(errors[0], osl.PeerError)
    assert "KeyboardInterrupt" in str(errors[0])


def test_after_an_error_no_step_waits(store):
    """`barrier` is called again on the way out; it neither waits nor writes."""

    def work(group):
        try:
            group.barrier("a step", ValueError("first") if group.process_index == 0 else None)
        except Exception as error:
            written = len(store.values)
            group.barrier("on the way out")
            with pytest.raises(type(error)):
                group.barrier("on the way out", error)
            return written == len(store.values)

    started = time.monotonic()
    together(store, 3, work, name="on the way out")
    assert time.monotonic() - started < PROMPT_SECONDS


@pytest.mark.parametrize("missing", [[2], [1, 3]])
def test_a_missing_process_is_named(store, missing):
    def work(group):
        group.barrier("a first step")
        if group.process_index not in missing:
            group.barrier("writing shards")

    started = time.monotonic()
    errors = together(store, 4, work, name=f"missing {missing}", timeout_seconds=0.4)
    assert time.monotonic() - started < PROMPT_SECONDS
    for process, error in enumerate(errors):
        if process in missing:
            assert error is None
        else:
            assert isinstance(error, osl.PeerError)
            assert f"processes {missing} did not finish writing shards" in str(error)
            assert "0.4 s" in str(error)
    assert "timeout_seconds" in str(errors[0])


def test_a_missing_leader_is_named(monkeypatch):
    monkeypatch.setattr(process_group, "_GRACE_SECONDS", 0.1)
    store = MemoryStore(patience=0.01)
    given_up = threading.Semaphore(0)

    def work(group):
        if group.is_leader:
            assert all(given_up.acquire(timeout=PROMPT_SECONDS) for _ in range(2))
            return
        try:
            group.barrier("writing shards")
        finally:
            given_up.release()

    errors = together(store, 3, work, name="no leader", timeout_seconds=1.0)
    for error in errors[1:]:
        assert isinstance(error, osl.PeerError)
        assert "processes [0] did not finish writing shards" in str(error)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_while_waiting_reaches_the_others(store, interrupted):
    """As by Ctrl-C: the process has said already that its step went well."""
    waiting = threading.Event()

    def work(group):
        if group.process_index == interrupted:
            name = "list" if group.is_leader else "get"
            group._store = copy.copy(store)
            setattr(group._store, name, interrupt)
        else:
            assert waiting.wait(PROMPT_SECONDS)
        group.barrier("a step")
        group.barrier("the next step")

    def interrupt(*_):
        waiting.set()
        raise KeyboardInterrupt("enough")

    started = time.monotonic()
    errors = together(store, 3, work, name=f"interrupt {interrupted}")
    assert time.monotonic() - started < PROMPT_SECONDS
    for process, error in enumerate(errors):
        if process == interrupted:
            assert isinstance(error, KeyboardInterrupt)
        else:
            assert isinstance(error, osl.PeerError)
            assert "enough" in str(error)


def test_processes_match_by_what_may_be_shown_of_a_path(store, monkeypatch):
    monkeypatch.setattr(replica_exchange.DistributedStore, "connect", lambda: store)
    options = osl.ReadOptions(replicated="read_once", timeout_seconds=0.1)
    with (
        pytest.raises(osl.PeerError) as caught,
        replica_exchange.load_group(
            "https://me:hunter2@host/model?sig=hunter2", (0, 1), options
        ) as group,
    ):
        group.barrier("a step")
    assert caught.value.file == "https://host/model"
    assert "hunter2" not in str(caught.value) + str(store.values)


def test_a_lost_store_is_an_error_and_hides_no_other(store):
    def broken(key, value):
        raise ConnectionError("the coordinator is gone")

    store.set = store.renew = broken
    leader, other = make_groups(store, 2, "lost store")
    with (
        pytest.raises(osl.PeerError, match="does not answer while a step") as raised,
        leader,
        other,
    ):
        leader.barrier("a step")
    assert isinstance(raised.value.__cause__, ConnectionError)
    leader, other = make_groups(store, 2, "lost store")
    with pytest.raises(ValueError, match="mine"), leader, other:
        leader.barrier("a step", ValueError("mine"))


def test_whoever_gives_no_sign_of_life_is_named_by_all(store, monkeypatch):
    """Also where others have failed already because they need it; not the others' failure."""
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.05)

    def work(group):
        group.barrier("a first step")
        if group.process_index == 2:  # killed: says nothing more
            _silence(group)
            group.fail = group.close = lambda *_: None
            return "killed"
        with group.together("a step"):
            if group.process_index == 1:
                raise osl.PeerError("the connection was closed")
        return None

    errors = together(store, 4, work, name="silent")
    assert errors[2] == "killed"
    for error in (errors[0], errors[1], errors[3]):
        assert isinstance(error, osl.PeerError)
        assert "process 2 failed while a step: no sign of life for 0.5 s" in str(error)
    assert str(errors[1].__cause__) == "the connection was closed."


def test_nobody_waits_for_one_that_was_killed_to_leave(store, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.05)

    def work(group):
        group.barrier("a first step")
        if group.process_index == 1:
            _silence(group)
            group.fail = group.close = lambda *_: None
            return None
        group.abandon()
        begun = time.monotonic()
        group.await_others(2 * PROMPT_SECONDS)
        return time.monotonic() - begun

    waited, _ = together(store, 2, work, name="left")
    assert waited < PROMPT_SECONDS


def test_whoever_is_slow_but_lives_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.05)

    def work(group):
        if group.process_index == 1:
            for _ in range(60):  # twice as long as a dead one would be waited for
                time.sleep(0.05)
                group.check("a step")
        group.barrier("a step")
        return "done"

    assert together(store, 3, work, name="slow") == ["done"] * 3
    assert "safetensors-heartbeat" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("guilty", [0, 1])
def test_what_is_overdue_for_one_fails_those_that_work(store, guilty):
    """Though they wait for nobody, and the first process has not said that it failed."""

    def work(group):
        if group.process_index == guilty:
            with group.together("a step"):
                raise group.overdue("what others read did not come")
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            group.check("a step")
            time.sleep(0.05)

    for process, error in enumerate(together(store, 3, work, name="overdue")):
        assert isinstance(error, osl.PeerError)
        assert "what others read did not come within 60 s" in str(error)
        assert process == guilty or f"process {guilty} failed while a step" in str(error)


def test_a_consequence_without_a_cause_is_the_error_of_all(store):
    def work(group):
        error = osl.PeerError("the connection was closed") if group.process_index == 1 else None
        group.barrier("a step", error)

    errors = together(store, 3, work, name="consequence")
    for error in errors:
        assert isinstance(error, osl.PeerError)
        assert "the connection was closed" in str(error)


def test_keys_are_cleaned_up(store):
    """While an operation runs there are keys of its last steps; of operations, of the last few."""
    most = 0

    def work(group):
        nonlocal most
        for step in range(30):
            group.barrier(f"step {step}")
            most = max(most, len(store.values))

    count = 3
    for number in range(100):
        task = work if number == 0 else lambda g: [g.barrier(str(i)) for i in (0, 1)]
        together(store, count, task, name=f"operation {number}")
    assert most <= 3 * (count + 1) + count
    assert len(store.values) <= 66 * 2 * (count + 1)
    assert not [key for key in store.values if "operation 0" in key]


def test_a_first_process_that_cannot_send_is_named_at_once():
    class Refusing(MemoryStore):
        def set(self, key: str, value: str) -> None:
            if value == "refused":
                raise RuntimeError("the store refuses it")
            super().set(key, value)

    started = time.monotonic()
    first, *others = together(
        Refusing(), 3, lambda group: group.barrier("a step", broadcast="refused"), name="/refused"
    )
    assert isinstance(first, RuntimeError)
    for error in others:
        assert isinstance(error, osl.PeerError)
        assert "the store refuses it" in str(error)
    assert time.monotonic() - started < PROMPT_SECONDS


def test_the_same_name_again(store):
    """A second save to the same path does not see what the first left."""
    for number in range(5):

        def work(group, number=number):
            bad = number == 2 and group.process_index == 1
            group.barrier("a step", ValueError("once") if bad else None)
            return number

        results = together(store, 2, work, name="the same path")
        assert (results == [number] * 2) != (number == 2)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("times", [1, 3])
def test_all_meet_in_the_operation_after_those_that_one_of_them_missed(store, missing, times):
    """Of a name; each process has a counter of its own. Their other operations do not change."""
    counts: list[dict[tuple[str, str, str], int]] = [{}, {}]

    def make(process, name):
        process_group._counts.clear()
        process_group._counts.update(counts[process])
        group = ProcessGroup(name, process, 2, store, 0.1)
        counts[process] = dict(process_group._counts)
        return group

    for _ in range(times):
        with (
            pytest.raises(osl.PeerError, match=rf"processes \[{missing}\] did not finish"),
            make(1 - missing, "again") as group,
        ):
            group.barrier("a step")
    for _ in range(3):
        groups = [make(process, "again") for process in range(2)]
        assert groups[0].number == groups[1].number
        assert make(missing, "other").number == make(1 - missing, "other").number
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(lambda group: group.barrier("a step"), groups)] == ["", ""]


def test_groups_of_different_names_at_once(store):
    """Two saves in the background; one fails, and the other does not notice."""

    def run(name):
        def work(group):
            for step in range(6):
                time.sleep(0.003 * group.process_index)
                bad = name == "b/c" and step == 3 and group.process_index == 1
                group.barrier(f"step {step}", ValueError("of b") if bad else None)
            return name

        return together(store, 3, work, name=name)

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(run, ["a/c", "b/c"])
    assert first == ["a/c"] * 3
    assert [type(error) for error in other] == [osl.PeerError, ValueError, osl.PeerError]


def test_more_groups_at_once_than_are_kept(store):
    """As a `CheckpointManager` with ten items in the background."""
    names = [f"item {number}" for number in range(10)]
    # The follower of the oldest operation is at its second step while ten others pass their first;
    # what it said must not be gone when its leader comes.
    oldest = make_groups(store, 2, "oldest", timeout_seconds=1.5)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(oldest[1].barrier, "a first step")
        oldest[0].barrier("a first step")
        begun.result()
        waits = pool.submit(oldest[1].barrier, "writing shards")
        for name in names:
            together(store, 2, lambda group: group.barrier("a first step"), name=name)
        outcome = "done"
        try:
            oldest[0].barrier("writing shards")
            waits.result()
        except osl.PeerError as error:
            outcome = str(error)
    assert outcome == "done"


def test_an_error_before_the_first_step_reaches_those_who_come_to_it(store):
    """As of a tree that cannot be saved: nobody waits for a process that will not come."""

    def work(group):
        if group.process_index == bad:
            raise ValueError("a leaf that cannot be saved")
        group.barrier("a step")

    for bad in (0, 2):
        errors = together(store, 3, work, name=f"begin {bad}")
        for process, error in enumerate(errors):
            assert isinstance(error, ValueError if process == bad else osl.PeerError)
            assert "a leaf that cannot be saved" in str(error)


def test_names_are_part_of_keys_whatever_they_hold(store):
    """Paths with slashes, spaces and more; one name that begins as the other does."""

    def run(name):
        return together(
            store, 2, lambda group: [group.barrier(str(i)) for i in range(4)], name=name
        )

    names = ["/a", "/a/b", "/a/b/c", "/a|b", "/ü ü", "1/a", "/", os.fsdecode(b"/\xff")]
    with ThreadPoolExecutor(len(names)) as pool:
        for result in pool.map(run, names):
            assert result == [[""] * 4] * 2


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("waiting", ["constants", "barrier"])
def test_a_wait_for_others_can_be_cancelled(store, process, waiting):
    def wait(group):
        with group:
            if waiting == "constants":
                return group.constants("naming", f"cancelled {process}", "here")
            return group.barrier("a step")

    groups = make_groups(store, 2, "cancelled")
    group, other = groups[process], groups[1 - process]
    with other, Cancellation() as cancellation, ThreadPoolExecutor(1) as pool:  # it does not come
        waits = pool.submit(contextvars.copy_context().run, wait, group)
        time.sleep(0.5)
        assert not waits.done()
        cancellation.cancel()
        began = time.monotonic()
        with pytest.raises(CancelledError):
            waits.result()
    assert time.monotonic() - began < 1


def test_what_the_first_process_tells_reaches_all(store):
    def tell(group):
        text = f"said by {group.process_index}"
        return [
            group.barrier("one", broadcast=text),
            group.barrier("two"),
            group.barrier("three", broadcast=text),
        ]

    assert together(store, 3, tell, name="/a") == [["said by 0", "", "said by 0"]] * 3
    assert together(store, 1, tell, name="/b") == [["said by 0", "", "said by 0"]]


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("how", ["ended", "dropped"])
def test_who_goes_one_step_further_than_another_is_told_so(store, leaver, how):
    """Long before the time limit, whether the other one ended normally or was never used."""
    groups = make_groups(store, 2, f"{how} {leaver}")

    def run(group):
        with group:
            group.barrier("loading")
            if group.process_index != leaver:
                group.barrier("verifying")

    if how == "dropped":
        groups[leaver] = None
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(run, group) for group in groups if group is not None]
        error = next(filter(None, (d.exception(PROMPT_SECONDS) for d in done)))
    assert isinstance(error, osl.PeerError)
    at = "loading" if how == "dropped" else "verifying"
    assert f"process {leaver} failed while {at}: its save ended before that" in str(error)


def test_processes_at_different_steps_are_an_error_of_all(store):
    def work(group):
        group.barrier("preparing the folder" if group.is_leader else "removing what is left")

    for error in together(store, 2, work, name="steps"):
        assert "process 0 is preparing the folder and process 1 is removing what is left" in str(
            error
        )


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_reaches_those_that_work_after_all_have_arrived(store, failing):
    """The first process has told already that all went well."""
    told = threading.Event()

    def work(group):
        group.arrive("planning", _fingerprint("one"))
        if group.is_leader:
            while f"{group._key}/0/verdict" not in store.values:
                group.check("loading")
                time.sleep(0.05)
            told.set()
        if group.process_index == failing:
            assert told.wait(PROMPT_SECONDS)
            raise OSError("the disk is gone")
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            group.check("loading")
            time.sleep(0.05)

    errors = together(store, 3, work, name=f"told {failing}")
    assert isinstance(errors.pop(failing), OSError)
    for error in errors:
        assert f"process {failing} failed while loading: OSError: the disk is gone" in str(error)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_who_is_interrupted_while_all_wait_for_a_slow_one_fails_all(store, interrupted):
    """Before the slow one comes."""
    ended = threading.Semaphore(0)

    def work(group):
        if group.process_index == 2:
            assert all(ended.acquire(timeout=PROMPT_SECONDS) for _ in range(2))
            group.barrier("a step")
        try:
            if group.process_index == interrupted:
                name = "list" if group.is_leader else "get"
                group._store = copy.copy(store)
                setattr(group._store, name, interrupt)
            group.barrier("a step")
        finally:
            ended.release()

    def interrupt(*_):
        time.sleep(1)
        raise KeyboardInterrupt("enough")

    errors = together(store, 3, work, name=f"slow {interrupted}")
    for process, error in enumerate(errors):
        if process == interrupted:
            assert isinstance(error, KeyboardInterrupt)
        else:
            assert isinstance(error, osl.PeerError)
            assert "KeyboardInterrupt: enough" in str(error)


@pytest.mark.parametrize("waiting", ["barrier", "check"])
def test_a_first_process_that_was_killed_is_noticed(store, monkeypatch, waiting):
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(process_group, "_WAIT_SECONDS", 0.2)

    def work(group):
        group.barrier("a first step")
        if group.is_leader:
            _silence(group)
            group.fail = group.close = lambda *_: None
            return
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            if waiting == "barrier":
                group.barrier("a step")
            group.check("a step")
            time.sleep(0.05)

    for error in together(store, 3, work, name=f"killed {waiting}")[1:]:
        assert isinstance(error, osl.PeerError)
        assert "process 0 failed while a step: no sign of life for 0.5 s" in str(error)
