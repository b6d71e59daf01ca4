"""Eight virtual CPU devices, strict dtype promotion and no hub, set before anything is imported."""

import faulthandler
import os
import signal
import sys
import threading
import time

import backends
import pytest
from hypothesis import settings
from programs import ForkServer

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could configure it")

# A run finds what the run before it found; the soak set draws examples of its own.
settings.register_profile("the same examples", derandomize=True)
settings.load_profile("the same examples")

collect_ignore = ["programs"]
_SECONDS_TO_END = 5.0
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


@pytest.fixture(scope="module", params=backends.REMOTE)
def server(request):
    """A server of each kind of object store, for the tests of a module."""
    with backends.running(request.param) as running:
        yield running


@pytest.fixture
def place(server, tmp_path):
    """A folder of its own on the server."""
    with backends.place(server, tmp_path / "on_server") as folder:
        yield folder


@pytest.fixture(scope="module")
def fork_server(request):
    """A server that forks children of the program that the module names as `PROGRAM`."""
    server = ForkServer(request.module.PROGRAM)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """No thread of the package outlives a test: one that still renews a claim keeps others out."""
    before = {*threading.enumerate()}
    yield
    deadline = time.monotonic() + _SECONDS_TO_END
    while left := [thread for thread in threading.enumerate() if _is_left(thread, before)]:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        left[0].join(0.01)


def _is_left(thread: threading.Thread, before: set[threading.Thread]) -> bool:
    return thread.name.startswith("safetensors") and thread not in before
