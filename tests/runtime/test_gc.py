"""The heap is frozen during loads and saves, and thawed by the one that froze it."""

from __future__ import annotations

import gc
import weakref

import pytest

from orbax_safetensors_layout.runtime import frozen_heap

FEW = 2_000  # Python 3.12 begins with some hundred


@pytest.fixture(autouse=True)
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_load_freezes_what_exists():
    with frozen_heap():
        assert gc.get_freeze_count() > FEW
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > FEW, "the outer load goes on"
    assert gc.get_freeze_count() < FEW


def test_a_failed_load_thaws():
    with pytest.raises(KeyError), frozen_heap():
        raise KeyError
    assert gc.get_freeze_count() < FEW


def test_a_heap_that_the_program_froze_stays_frozen():
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > FEW


def test_full_collections_walk_a_new_object_once():
    with frozen_heap():
        new = [[number] for number in range(FEW)]
        assert len(gc.get_objects()) >= FEW
        gc.collect()
        assert len(gc.get_objects()) < FEW, "the lists are frozen"
    assert len(new) == FEW
    assert gc.get_freeze_count() < FEW


def test_garbage_is_collected_before_it_is_frozen():
    class Node:
        pass

    with frozen_heap():
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None


def test_collections_after_a_load_freeze_nothing():
    with frozen_heap():
        pass
    gc.collect()
    assert gc.get_freeze_count() < FEW
