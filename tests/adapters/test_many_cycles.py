"""Saves, loads, exports and versions again and again in one process leave nothing behind."""

import sys

import pytest
from programs import run_alone

MOST_GROWTH_BYTES = 40_000_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is asked of Linux")
@pytest.mark.parametrize("cycles", [20, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_memory_descriptors_and_threads_stay(tmp_path, cycles):
    every = cycles // 5
    said = run_alone(
        "many_cycles.py",
        *(tmp_path, cycles, every),
        environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        timeout=1700,
    )
    print(said)
    held = [[int(number) for number in line.split()] for line in said.splitlines()]
    assert [line[0] for line in held] == [every * n for n in range(1, 6)]
    _, resident, descriptors, threads = held[0 if cycles > 100 else 1]
    assert held[-1][1] < resident + MOST_GROWTH_BYTES
    assert held[-1][2] <= descriptors
    assert held[-1][3] <= threads
