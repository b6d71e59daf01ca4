"""A quantised model that is larger than memory becomes bfloat16 in Orbax's format."""

import pytest
from programs import run_alone

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gigabytes", "budget"),
    [
        pytest.param(0.2, GIB // 4, marks=pytest.mark.slow),
        pytest.param(24, 2 * GIB, marks=pytest.mark.soak),
    ],
)
def test_nvfp4_in_bounded_memory(tmp_path, gigabytes, budget):
    peak = int(run_alone("convert_nvfp4_peak.py", tmp_path, gigabytes, budget, timeout=3000))
    assert peak < budget + GIB // 2  # of which the interpreter and the libraries have 0.3 GiB
