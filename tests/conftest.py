"""Eight virtual CPU devices, strict dtype promotion and no hub, set before anything is imported."""

import faulthandler
import os
import signal
import sys

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could configure it")

_FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# The hub of the tests is a server of their own; nothing asks another for anything.
for _name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
    os.environ.pop(_name, None)

# A background job of a shell ignores Ctrl-C, and so does all that it starts; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not faulthandler.is_enabled():
    faulthandler.enable()
