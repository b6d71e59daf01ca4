"""Consolidations and conversions that are killed: readers find a whole checkpoint, retries end."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
from checkpoints import layers_of
from saved_files import raw_tensors

import orbax_safetensors_layout as osl

PROGRAM = "crash_in_place.py"


class Place:
    """A folder, and calls that write to it.

    Args:
        fork_server: What makes the calls.
        folder: Where all is.
        exchange: Whether the system can exchange two folders.
    """

    def __init__(self, fork_server, folder, exchange):
        self._server = fork_server
        self._source = folder / "source"
        self.target = folder / "to" / "x"
        self._exchange = exchange
        self.kills = 0

    def run(self, what, version, kill=-1):
        """How a call ended, and how many system calls it made."""
        call = {
            "what": what, "source": str(self._source), "target": str(self.target),
            "version": version, "kill": kill, "exchange": self._exchange,
        }  # fmt: skip
        (ended,) = self._server.run([call])
        self.kills += ended.status == -signal.SIGKILL
        return ended.status, ended.said[0] if ended.said else ended.errors

    def source(self, version):
        osl.save(self._source, layers_of(version), overwrite=True)

    def versions(self):
        """Which version a reader finds, if any; every bit of it."""
        if not osl.verify(self.target).ok:
            return "not whole"
        loaded = osl.load(self.target)
        version = int(loaded["layers.0.w"][0, 0]) // 1000
        assert {name: np.asarray(value).tobytes() for name, value in loaded.items()} == {
            name: value.tobytes() for name, value in layers_of(version).items()
        }
        return version

    def left(self):
        return sorted(os.listdir(self.target.parent))


def kills_in_place(place, points):
    """Consolidations in place, each killed at one point and repeated; what was found wrong.

    As many programs do, the caller makes the folder where there is none.
    """
    wrong = []
    for version, point in enumerate(points, 1):
        assert place.run("save in pieces", version)[0] == 0
        (place.target / "config.json").write_text("{}")
        status, _ = place.run("consolidate", version, point)
        assert status in (-signal.SIGKILL, 0)
        place.target.mkdir(exist_ok=True)
        wrong += [f"{point}: {text}" for text in problems(place, {version})]
        status, said = place.run("consolidate", version)
        if status:
            wrong.append(f"{point}: the same call again: {said[-300:]}")
            place.run("consolidate", version)
        elif {n: r.data for n, r in raw_tensors(place.target).items()} != {
            name: value.tobytes() for name, value in layers_of(version).items()
        }:
            wrong.append(f"{point}: not consolidated")
        if place.left() != ["x"] or not (place.target / "config.json").exists():
            wrong.append(f"{point}: left {place.left()}")
    return wrong


def kills_of_conversions(place, what, points):
    """Conversions, each killed at one point and repeated; the first makes a new target."""
    wrong = []
    for version, point in enumerate(points, 2 if place.target.exists() else 1):
        place.source(version)
        status, _ = place.run(what, version, point)
        assert status in (-signal.SIGKILL, 0)
        place.target.mkdir(exist_ok=True)
        if what != "convert orbax" and (version > 1 or os.listdir(place.target)):
            wrong += [f"{point}: {text}" for text in problems(place, {version - 1, version})]
        if status == 0:
            continue
        status, said = place.run(what, version)
        if status:
            wrong.append(f"{point}: the same call again: {said[-300:]}")
            place.run(what, max(version, 2))
        if what != "convert orbax":
            wrong += [f"{point}, done: {text}" for text in problems(place, {version})]
        if place.left() != ["x"]:
            wrong.append(f"{point}: left {place.left()}")
    return wrong


def problems(place, versions):
    try:
        version = place.versions()
    except osl.SafetensorsLayoutError as error:
        return [f"{type(error).__name__}: {error}"]
    return [] if version in versions else [f"found {version}, not {versions}"]


@pytest.mark.parametrize("exchange", [True, False])
def test_consolidation_killed_in_its_last_moments(fork_server, tmp_path, exchange):
    place = Place(fork_server, tmp_path, exchange)
    assert place.run("save in pieces", 9)[0] == 0
    status, calls = place.run("consolidate", 9)
    assert status == 0
    assert kills_in_place(place, range(calls - 12, calls)) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_conversion_killed_in_its_last_moments(fork_server, tmp_path, exchange):
    place = Place(fork_server, tmp_path, exchange)
    place.source(1)
    assert place.run("convert hf", 1)[0] == 0
    place.source(2)
    calls = place.run("convert hf", 2)[1]
    place.source(1)
    place.run("convert hf", 2)
    assert kills_of_conversions(place, "convert hf", range(calls - 14, calls)) == []


def test_the_first_conversion_killed_in_its_last_moments(fork_server, tmp_path):
    """Repeated without `overwrite`, which refuses what a call that has ended made."""
    probe = Place(fork_server, tmp_path / "probe", True)
    probe.source(1)
    calls = probe.run("convert hf", 1)[1]
    for number in range(calls - 10, calls):
        place = Place(fork_server, tmp_path / f"{number}", True)
        assert kills_of_conversions(place, "convert hf", [number]) == []


@pytest.mark.soak
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("what", ["consolidate", "convert hf", "convert orbax", "convert sharded"])
def test_killed_at_every_moment(fork_server, tmp_path, what, exchange):
    place = Place(fork_server, tmp_path, exchange)
    if what == "consolidate":
        assert place.run("save in pieces", 9)[0] == 0
        calls = place.run("consolidate", 9)[1]
        wrong = kills_in_place(place, range(calls))
    else:
        place.source(2)
        place.run(what, 1)
        calls = place.run(what, 2)[1]
        place.source(1)
        place.run(what, 2)
        points = [*range(calls)]
        random.Random(0).shuffle(points)
        wrong = kills_of_conversions(place, what, points)
    print(f"{what}, exchange {exchange}: {place.kills} kills of {calls}, {len(wrong)} wrong")
    # 500 in all. Threads may make a call fewer than in the run that was counted.
    assert calls - 3 <= place.kills <= calls
    assert calls > 50
    assert wrong == []
