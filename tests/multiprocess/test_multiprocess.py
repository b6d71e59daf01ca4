"""Several real processes: each reads its own shards' bytes and nothing else."""

from __future__ import annotations

import pytest
from checkpoints import llama_like, save
from programs import run_processes

EXACT = {"latency_seconds": {"local": 0.0}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("multi") / "ckpt", llama_like(), files=2)


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (2, 4), (4, 1), (4, 2)])
def test_each_process_reads_its_own_bytes(path, processes, devices):
    results = run_processes(
        "multiprocess_load.py",
        processes=processes,
        devices=devices,
        path=str(path),
        api="osl",
        options=EXACT,
    )
    check(results)


@pytest.mark.parametrize("api", ["v0", "v1"])
def test_the_same_through_orbax(path, api):
    check(
        run_processes(
            "multiprocess_load.py", processes=2, devices=2, path=str(path), api=api, options=EXACT
        )
    )


def check(results):
    for label in results[0]:
        for process in results:
            (read,) = process[label]["read"]
            assert read == process[label]["own"], label
        total = results[0][label]["total"]
        read = sum(process[label]["read"][0] for process in results)
        if label in ("dim0", "dim1", "2d", "stage"):
            assert read == total, label
    assert [process["stage"]["read"][0] > 0 for process in results] == [
        index == 0 for index in range(len(results))
    ]
    for process in results:
        assert process["replicated"]["read"] == [results[0]["replicated"]["total"]]
