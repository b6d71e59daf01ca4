"""The heap is frozen during large loads only, and thawed by the one that froze it."""

from __future__ import annotations

import gc

import pytest

from orbax_safetensors_layout.transfer.garbage import frozen_heap


@pytest.fixture(autouse=True)
def thawed():
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()


def test_a_large_load_freezes_what_exists():
    with frozen_heap(100_000):
        assert gc.get_freeze_count()
        with frozen_heap(100_000):
            pass
        assert gc.get_freeze_count(), "the outer load goes on"
    assert not gc.get_freeze_count()


def test_a_failed_load_thaws():
    with pytest.raises(KeyError), frozen_heap(100_000):
        raise KeyError
    assert not gc.get_freeze_count()


def test_a_small_load_changes_nothing():
    with frozen_heap(100):
        assert not gc.get_freeze_count()


def test_a_heap_that_the_program_froze_stays_frozen():
    gc.freeze()
    with frozen_heap(100_000):
        pass
    assert gc.get_freeze_count()
