"""Eight virtual CPU devices and strict dtype promotion, set before anything imports jax."""

import faulthandler
import os
import sys

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could configure it")

_FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

if not faulthandler.is_enabled():
    faulthandler.enable()
