"""Saves to one folder of a bucket, of which one is cut off for longer than its claim lives."""

from __future__ import annotations

import itertools
import re
import threading
import time
import types

import numpy as np
import obstore
import pytest
from faults import Fault
from sampling import every
from versions import NEW, OLD, trees_equal

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import cloud, cloud_commit, open_storage

OTHER = {**OLD, "a": np.arange(10.0) + 5}
OPTIONS = osl.WriteOptions(max_file_bytes=1, concurrency=1)


def save_cut_off(monkeypatch, target, calls, nth, *, jump):
    """Saves, and before one of the calls that publish, lets another program save there.

    Args:
        monkeypatch: Replaces what follows.
        target: The folder.
        calls: The function to cut off before, as an object and a name.
        nth: Which of its calls, from 0.
        jump: By how many seconds the clock of this process goes on meanwhile.

    Returns:
        The error, or None; and whether there was such a call.
    """
    publish, call = cloud_commit.StagedCopy.commit, getattr(*calls)
    modified_seconds = cloud.CloudStorage.modified_seconds
    begun, old_claims, offset, count = [], [], [0.0], itertools.count()

    def begin_publishing(new_folder):
        begun.append(new_folder)
        publish(new_folder)
        begun.remove(new_folder)

    def cut_off(*args, **kwargs):
        # In the thread that renews the claim, the others would go on meanwhile.
        renews = threading.current_thread().name == "safetensors-claim"
        if len(begun) == 1 and not renews and next(count) == nth:
            old_claims.append(begun[0]._claim._file)
            offset[0] = jump
            osl.save(target, OTHER, overwrite=True, options=OPTIONS)
            time.sleep(0.2)  # the thread that renews the claim wakes first
        return call(*args, **kwargs)

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0])
    monkeypatch.setattr(cloud_commit, "time", clock)
    monkeypatch.setattr(cloud_commit, "_RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(cloud_commit.StagedCopy, "commit", begin_publishing)
    monkeypatch.setattr(*calls, cut_off)
    monkeypatch.setattr(
        cloud.CloudStorage,
        "modified_seconds",
        lambda storage, file: modified_seconds(storage, file) - 100 * (file in old_claims),
    )
    error = None
    try:
        osl.save(target, NEW, overwrite=True, options=OPTIONS)
    except osl.StorageError as problem:
        error = problem
    monkeypatch.undo()
    return error, bool(old_claims)


def check_outcome(target, error):
    """Checks that both programs are told what is so."""
    assert trees_equal(osl.load(target), OTHER)
    assert error
    copy = re.search(r"It is complete in (\S+):", str(error))
    assert not copy or trees_equal(osl.load(copy[1]), NEW)


CHECKS = (cloud_commit._BucketClaim, "check")
CALLS = [CHECKS, (obstore, "copy"), (obstore, "list_with_delimiter")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "step"),
    [
        pytest.param(CHECKS, 3),
        *(pytest.param(calls, 1, marks=pytest.mark.soak) for calls in CALLS),
    ],
)
def test_a_save_that_was_cut_off_touches_nothing_of_another_one(place, monkeypatch, calls, step):
    for nth in itertools.count(step=step):
        target = f"{place.url}/{nth}"
        osl.save(target, OLD, options=OPTIONS)
        error, is_cut = save_cut_off(monkeypatch, target, calls, nth, jump=100.0)
        if not is_cut:
            break
        check_outcome(target, error)
    assert nth >= 3


@pytest.mark.parametrize("nth", every(3, range(3)))
def test_only_what_was_there_is_removed_when_the_clock_stood_still(place, monkeypatch, nth):
    """As that of a suspended machine; some objects of the other have the bytes of the old ones."""
    osl.save(place.url, OLD, options=OPTIONS)
    time.sleep(1.1)  # what stores tell of times has a second's precision
    calls = (cloud.CloudStorage, "remove_pinned")
    error, is_cut = save_cut_off(monkeypatch, place.url, calls, nth, jump=0.0)
    assert is_cut
    check_outcome(place.url, error)


def test_a_request_ends_before_the_claim_and_is_tried_again_only_with_it(place, monkeypatch):
    monkeypatch.setattr(cloud, "LONGEST_REQUEST_SECONDS", 0.5)
    place.put("a", b"data")
    storage, folder = open_storage(place.url)
    with storage:
        place.server.fail(Fault("delay", "PUT", key="/b", seconds=5.0, times=99))
        begun, checks = time.monotonic(), iter([None, osl.StorageError("too late")])

        def check():
            if error := next(checks):
                raise error

        with pytest.raises(osl.StorageError, match="too late"):
            storage.copy(f"{folder}/a", f"{folder}/b", check=check)
    assert time.monotonic() - begun < 4
