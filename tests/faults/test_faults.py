"""Storage that fails: equal arrays or one clear error; no hang, nothing left behind.

The long forms (`soak`) are the same runs with other seeds.
"""

from __future__ import annotations

import os
import random
import threading

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits, llama_like, save
from faults import Fault
from faulty import FaultyStorage
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from recording import serving
from remote_checks import shown

import orbax_safetensors_layout as osl

TENSORS = llama_like(layers=2, hidden=64)
LIMIT_SECONDS = 120  # a guard against hangs, not a measure
RETRIES = osl.RetryPolicy(attempts=4, base_seconds=0.001, max_seconds=0.01, attempt_seconds=10)


def outcome(call):
    """Return what a call returns, or the error that it raises; fails where it hangs."""
    ends = []

    def run():
        try:
            ends.append(call())
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "it hangs"
    return ends[0]


def is_clear(error):
    """Whether an error is the package's own, says what it is about, and keeps secrets."""
    assert isinstance(error, osl.SafetensorsLayoutError), repr(error)
    assert error.file
    assert "not-a-real-secret" not in shown(error)
    return True


def wanted(seed):
    spec = [P("x", "y"), P(None, "x"), P("y"), P()][seed % 4]
    mesh = mesh_of(x=4, y=2)
    return {
        name: jax.ShapeDtypeStruct(
            value.shape,
            value.dtype,
            sharding=NamedSharding(mesh, spec if value.ndim > 1 else P()),
        )
        for name, value in TENSORS.items()
    }


def check_loaded(loaded):
    """Whether a load went well; it must have, or else have failed clearly."""
    if isinstance(loaded, BaseException):
        return not is_clear(loaded)
    for name, value in TENSORS.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    return True


def resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


OPTIONS = osl.ReadOptions(request_bytes=8_000, concurrency=6, retries=RETRIES)


def load_through(folder, seed):
    shares = random.Random(seed)
    passing = shares.choice([0.0, 0.05, 0.3, 0.6, 0.95])
    lasting = shares.choice([0.0, 0.0, 0.01, 0.2])
    storage = FaultyStorage(seed, passing=passing, lasting=lasting)
    with storage, serving(storage):
        went_well = check_loaded(outcome(lambda: osl.load(folder, wanted(seed), options=OPTIONS)))
    assert went_well or passing or lasting
    return went_well


def save_through(folder, seed):
    old, new = {"a": np.arange(100.0), "step": 1}, {**TENSORS, "step": 2}
    target = folder / str(seed)
    osl.save(target, old, overwrite=True)
    shares = random.Random(seed)
    storage = FaultyStorage(
        seed, passing=shares.choice([0.0, 0.1, 0.6]), lasting=shares.choice([0.0, 0.0, 0.02])
    )
    options = osl.WriteOptions(max_file_bytes=40_000, layout=shares.choice(["hf", "sharded"]))
    with serving(storage):
        ending = outcome(lambda: osl.save(target, new, options=options, overwrite=True))
    if ending is None:
        loaded = osl.load(target)
        assert loaded["step"] == 2
        return check_loaded({name: loaded[name] for name in TENSORS})
    loaded = osl.load(target)
    assert set(loaded) == {"a", "step"}
    np.testing.assert_array_equal(loaded["a"], old["a"])
    assert os.listdir(folder) == [str(seed)]
    return not is_clear(ending)


def run_seeds(run, seeds):
    """Runs all; both outcomes must have been seen, and nothing may be left behind."""
    outcomes = [run(next(iter(seeds)))]  # what lives as long as the process does
    before = resources()
    outcomes += [run(seed) for seed in seeds]
    threads, descriptors = resources()
    assert threads <= before[0]
    assert descriptors <= before[1]
    assert set(outcomes) == {True, False}


@pytest.mark.parametrize(
    "seeds", [range(80), pytest.param(range(1000, 2500), marks=pytest.mark.soak)]
)
def test_loads_through_a_bad_network(tmp_path, seeds):
    folder = save(tmp_path, TENSORS, files=3)
    run_seeds(lambda seed: load_through(folder, seed), seeds)


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(1000, 1500), marks=pytest.mark.soak)]
)
def test_saves_through_a_bad_network(tmp_path, seeds):
    def run(seed):
        (tmp_path / f"parent-{seed}").mkdir(exist_ok=True)
        return save_through(tmp_path / f"parent-{seed}", seed)

    run_seeds(run, seeds)


def random_faults(seed, methods):
    """Some faults; most of them pass within the attempts of one request, some do not."""
    rng = random.Random(seed)
    kinds = ["status", "reset", "delay"] + ["truncate", "range"] * (methods == ("GET",))
    return [
        Fault(
            rng.choice(kinds),
            rng.choice(methods),
            times=rng.choice([1, 2, 3, 3, 30]),
            status=rng.choice([503, 503, 500, 429, 408, 403]),
            skip=rng.choice([0, 0, 1, 2, 5]),
            seconds=0.01,
        )
        for _ in range(rng.randrange(5))
    ]


@pytest.mark.parametrize(
    "seeds", [range(14), pytest.param(range(1000, 1300), marks=pytest.mark.soak)]
)
def test_loads_from_a_failing_server(place, tmp_path, seeds):
    for path in save(tmp_path, TENSORS, files=3).iterdir():
        place.put(path.name, path.read_bytes())

    def run(seed):
        place.server.fail(*random_faults(seed, ("GET",)))
        return check_loaded(outcome(lambda: osl.load(place.url, wanted(seed), options=OPTIONS)))

    run_seeds_of_server(run, seeds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(1000, 1200), marks=pytest.mark.soak)]
)
def test_saves_to_a_failing_server(place, monkeypatch, seeds):
    monkeypatch.setattr("orbax_safetensors_layout.storage.cloud_write._PART_BYTES", 5 << 20)
    old, new = {"a": np.arange(10.0)}, {"b": np.arange(1_500_000.0), "c": np.arange(5.0)}
    options = osl.WriteOptions(retries=RETRIES, max_file_bytes=1)

    def run(seed):
        target = f"{place.url}/{seed}"
        place.server.fail()
        osl.save(target, old, overwrite=True)
        place.server.fail(*random_faults(seed, ("GET", "PUT", "POST", "DELETE", "HEAD")))
        error = outcome(lambda: osl.save(target, new, options=options, overwrite=True))
        place.server.fail()
        if error is None:
            loaded = osl.load(target)
            assert all(np.array_equal(loaded[name], new[name]) for name in new)
            return True
        try:
            loaded = osl.load(target)
            kept = old if "a" in loaded else new
            assert all(np.array_equal(loaded[name], kept[name]) for name in kept)
        except (osl.FormatError, osl.CheckpointNotFoundError):
            pass  # it failed between the deletion of the old and the end of the copying
        return not is_clear(error)

    run_seeds_of_server(run, seeds)


def run_seeds_of_server(run, seeds):
    outcomes = [run(next(iter(seeds)))]
    before = resources()
    outcomes += [run(seed) for seed in seeds]
    threads, descriptors = resources()
    assert threads <= before[0]
    assert descriptors <= before[1] + 8  # connections that are being closed
    assert set(outcomes) == {True, False}
