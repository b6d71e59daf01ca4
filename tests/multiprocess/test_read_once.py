"""Several real processes that read replicas once: each byte by one, all values everywhere."""

from __future__ import annotations

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import llama_like, random_tensor, save
from programs import run_processes
from sampling import every

import orbax_safetensors_layout as osl

PROMPT_SECONDS = 60  # far below the time-outs, far above what a busy machine needs


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("once") / "ckpt", llama_like(layers=3), files=4)


@pytest.mark.parametrize(
    ("processes", "devices", "budgets"),
    every(2, [(2, 2, [2 << 30, 1 << 16]), (4, 2, [2 << 30]), (8, 1, [2 << 30])]),
)
def test_every_byte_is_read_by_one_process(path, tmp_path, processes, devices, budgets):
    run_processes(
        "read_once_load.py",
        processes=processes,
        devices=devices,
        path=str(path),
        shape=[processes * devices // 2, 2],
        budgets=budgets,
        out=str(tmp_path),
    )
    results = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(processes)]
    for label in results[0]:
        of_label = [process[label] for process in results]
        read, total = sum(result["read"] for result in of_label), of_label[0]["total"]
        if "each" in label:
            assert [result["read"] for result in of_label] == [
                result["needed"] for result in of_label
            ], label
            continue
        assert read == total, label
        ranges = sorted(tuple(r) for result in of_label for r in result["ranges"])
        for (file, _, stop), (other, start, _) in itertools.pairwise(ranges):
            assert file != other or stop <= start, label


def test_the_same_through_orbax(path):
    results = run_processes("read_once_orbax.py", processes=2, devices=2, path=str(path))
    total = sum(tensor.nbytes for tensor in llama_like(layers=3).values())
    assert [sum(read) for read in zip(*results, strict=True)] == [total, total]


@pytest.mark.parametrize("guilty", [0, 2])
def test_an_error_of_one_reaches_all(path, guilty):
    results = run_processes(
        "read_once_fail.py", processes=3, devices=1, path=str(path), guilty=guilty, where="error"
    )
    for process, (text, seconds) in enumerate(results):
        assert "the disk is gone" in text
        assert seconds < PROMPT_SECONDS
        if process != guilty:
            assert f"PeerError: process {guilty} failed while loading tensors: " in text


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_error_of_one_breaks_off_what_others_wait_for(path, guilty):
    results = run_processes(
        "read_once_fail.py", processes=2, devices=1, path=str(path), guilty=guilty, where="slow"
    )
    for text, seconds in results:
        assert "the disk is gone" in text
        assert seconds < PROMPT_SECONDS


@pytest.mark.parametrize("where", ["tree", "no tree"])
def test_processes_that_load_differently_are_told(path, where):
    results = run_processes(
        "read_once_fail.py", processes=2, devices=1, path=str(path), guilty=1, where=where
    )
    for text, _ in results:
        assert "PeerError: process 1 failed while " in text
        assert ": it has something else" in text


@pytest.mark.parametrize("guilty", [0, 1])
def test_one_that_alone_verifies_is_told(tmp_path, guilty):
    path = str(tmp_path / "model")
    osl.save(path, llama_like(layers=3), options=osl.WriteOptions(digests=True))
    results = run_processes(
        "read_once_fail.py", processes=2, devices=1, path=path, guilty=guilty, where="verify"
    )
    for text, seconds in results:
        assert "PeerError: process 1 failed while planning the load" in text
        assert f"process {guilty} has" in text
        assert "verify=True" in text
        assert seconds < PROMPT_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("where", ["killed", "gather"])
def test_the_others_end_when_one_is_killed(path, where):
    results = run_processes(
        "read_once_fail.py", processes=3, devices=1, lost=1, path=str(path), guilty=1, where=where
    )
    for text, seconds in (results[0], results[2]):
        assert "PeerError: process 1 failed while loading tensors: no sign of life" in text
        assert seconds < PROMPT_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("opening", "processes [1] did not finish planning the load within 10 s"),
        ("agreeing", "process 1 failed while planning the load: no sign of life"),
        ("ending", "process 1 failed while loading tensors: no sign of life"),
    ],
)
def test_a_kill_in_any_phase_ends_the_others(path, where, said):
    """As the default chooses, too; the other phases are those of the test above."""
    results = run_processes(
        "read_once_fail.py", processes=3, devices=1, lost=1, path=str(path), guilty=1, where=where
    )
    for text, seconds in (results[0], results[2]):
        assert f"PeerError: {said}" in text
        assert seconds < PROMPT_SECONDS


def test_memory_is_registered_where_nothing_is_exchanged(path):
    """To end that waits for what the devices have to do, so for gathers that never end."""
    seen = run_processes("registers.py", processes=2, devices=1, path=str(path))
    assert seen == [[False, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "sizes", "budget", "every_pair"),
    [
        (2, [2, 3], None, False),
        (3, [3, 2], 1 << 17, False),
        *(
            pytest.param(*case, every_pair, marks=pytest.mark.soak)
            for case in [
                (3, [3, 2], None),
                (2, [2, 3], None),
                (4, [4, 1], None),
                (3, [3, 2], 1 << 17),
            ]
            for every_pair in (False, True)
        ),
    ],
)
def test_large_tensors_are_exchanged_and_tied_ones_keep_their_parts(
    tmp_path, processes, sizes, budget, every_pair
):
    """Regions of more than a MiB, which are not packed; rows that the processes do not divide.

    Each sharding is loaded in both orders of devices and in both dtypes, if not in every pair.
    """
    shape = (12 * 43, 24, 48)
    tensors = {
        "cube": random_tensor(shape, ml_dtypes.bfloat16, 0),
        "other": random_tensor(shape, ml_dtypes.bfloat16, 1),
        "flags": random_tensor(shape, np.bool_, 2),
    }
    if budget:  # flags pass through the host, whole, for which it is too small
        del tensors["flags"]
    path = save(tmp_path / "ckpt", tensors)
    run_processes(
        "read_once_large.py",
        processes=processes,
        devices=sizes[0] * sizes[1] // processes,
        path=str(path),
        every_pair=every_pair,
        sizes=sizes,
        budget=budget,
        out=str(tmp_path),
    )
    results = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(processes)]
    once = sum(tensor.nbytes for tensor in tensors.values())
    for label in results[0]:
        assert sum(result[label] for result in results) == once, label
