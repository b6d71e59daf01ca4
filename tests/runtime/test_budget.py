"""One budget counts what loads and saves hold: what fits goes on, what does not waits."""

import threading

import pytest

from orbax_safetensors_layout.runtime import Budget


@pytest.mark.parametrize(("held", "more", "fits"), [(0, 11, True), (4, 6, True), (4, 7, False)])
def test_what_exceeds_the_budget_fits_alone(held, more, fits):
    budget = Budget(10)
    budget.reserve(held)
    assert budget.has_room(more) is fits
    assert budget.has_room(0)


def test_oldest_transfers_are_waited_for_first():
    budget, waited = Budget(10), []
    for number in range(3):
        budget.reserve(3)
        budget.release(3, lambda number=number: waited.append(number))
    budget.reserve(7, lambda: pytest.fail("there are transfers to wait for"))
    assert waited == [0, 1]
    budget.release(7)
    budget.release_all()
    assert waited == [0, 1, 2]
    assert budget.has_room(11)


def test_progress_makes_room_until_nothing_is_in_flight():
    budget, in_flight = Budget(10), [4, 5]
    budget.reserve(9)

    def make_progress():
        if not in_flight:
            return False
        budget.release(in_flight.pop())
        return True

    budget.reserve(6, make_progress)
    assert in_flight == [4]
    budget.reserve(8, make_progress)  # 6 are held by what nobody releases, so it goes beyond
    assert in_flight == []
    assert not budget.has_room(1)


def test_threads_release_what_one_reserves():
    budget = Budget(1000)

    def release():
        for _ in range(10_000):
            budget.release(1)

    threads = [threading.Thread(target=release) for _ in range(8)]
    budget.reserve(80_001)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.has_room(999)
    assert not budget.has_room(1000)
