"""The cost model's numbers: defaults, overrides, and the length of requests."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from http_server import file_server

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.options import PROFILES, StorageProfile

MIB = 1 << 20


def seconds(profile: StorageProfile, request_bytes: float, total_bytes: float) -> float:
    """Time of a load that its streams limit: all requests in turn, and half of one at the end."""
    each = profile.latency_seconds + request_bytes / profile.bandwidth_bytes_per_second
    requests = total_bytes / request_bytes / profile.concurrency
    return requests * each + request_bytes / profile.bandwidth_bytes_per_second / 2


@pytest.mark.parametrize("kind", sorted(set(PROFILES) - {"local"}))
@pytest.mark.parametrize("total_bytes", [10**8, 10**9, 10**11])
def test_requests_have_the_length_that_takes_least_time(kind, total_bytes):
    profile = PROFILES[kind]
    lengths = np.geomspace(MIB, 1000 * MIB, 2000)
    best = lengths[np.argmin([seconds(profile, length, total_bytes) for length in lengths])]
    assert profile.balanced_request_bytes(total_bytes) == pytest.approx(best, rel=0.01)


def test_requests_of_a_load_lie_between_a_least_and_the_classes_largest():
    options = osl.ReadOptions()
    largest = PROFILES["https"].request_bytes
    lengths = [options.profile("https", 10**n).request_bytes for n in range(5, 13)]
    assert lengths == sorted(lengths)
    assert lengths[0] == MIB
    assert lengths[-1] == largest == options.profile("https").request_bytes
    assert options.profile("https", 10**9).staging_bytes <= lengths[4]


def test_a_length_that_is_asked_for_holds():
    options = osl.ReadOptions(request_bytes=12345)
    assert options.profile("hf", 10**12).request_bytes == 12345
    assert options.profile("hf").staging_bytes == 12345


def test_a_plan_has_requests_that_suit_what_it_reads(tmp_path):
    tensors = {"w": np.zeros(64 * MIB, np.uint8)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert osl.plan_load(tmp_path).cost().requests == 8
    near = osl.ReadOptions(latency_seconds={"https": 0.001}, concurrency=16)
    far = osl.ReadOptions(latency_seconds={"https": 0.1}, concurrency=16)
    with file_server(tmp_path) as server:
        path = f"{server.url}/files"
        assert osl.plan_load(path, options=near).cost().requests == 64
        assert osl.plan_load(path, options=far).cost().requests == 11
