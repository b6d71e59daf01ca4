"""When host memory is registered for transfers, and how."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

from orbax_safetensors_layout.pytree import AbstractTree
from orbax_safetensors_layout.reading import registration, resolve


class Client:
    """Stands for that of a backend."""

    def __init__(self, error=None):
        self.log = []
        self.error = error

    def dma_map(self, address, nbytes):
        self.log.append(("map", address, nbytes))
        if self.error is not None:
            raise self.error

    def dma_unmap(self, address):
        self.log.append(("unmap", address))


def parsed(*leaves):
    return AbstractTree.parse([*leaves]).parsed


def on_devices(monkeypatch, *names, memory_kind=None):
    """Devices in the place of those of every sharding, and their client."""
    client = Client()
    devices = {Device(name, client) for name in names}
    sharding = SimpleNamespace(memory_kind=memory_kind, addressable_devices=devices)
    monkeypatch.setattr(resolve, "sharding_of", lambda placement: sharding)
    return client


class Device:
    def __init__(self, name, client):
        self.name, self.client = name, client

    def __str__(self):
        return self.name


CUDA = ("cuda:0", "cuda:1")  # as JAX shows them


ARRAY = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh_of(x=8), P("x")))


@pytest.fixture(autouse=True)
def _version_that_is_checked(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


@pytest.mark.parametrize("memory_kind", [None, "device"])
def test_arrays_on_cuda_devices(monkeypatch, memory_kind):
    client = on_devices(monkeypatch, *CUDA, memory_kind=memory_kind)
    register = registration([*parsed(ARRAY, 1), None])  # a number is no array
    assert register is not None
    end = register(4096, 64)
    assert end is not None
    end()
    assert client.log == [("map", 4096, 64), ("unmap", 4096)]


def test_others(monkeypatch):
    assert registration(parsed(ARRAY)) is None  # on CPU devices
    assert registration([]) is None
    on_devices(monkeypatch, *CUDA)
    assert registration(parsed(ARRAY, np.zeros(8))) is None  # kept by a numpy array
    on_devices(monkeypatch, "rocm:0", "rocm:1")
    assert registration(parsed(ARRAY)) is None
    on_devices(monkeypatch, *CUDA, memory_kind="pinned_host")
    assert registration(parsed(ARRAY)) is None


@pytest.mark.parametrize("version", [(0, 7, 1), (0, 10, 2), (0, 12)])
def test_versions_that_were_not_checked(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert resolve.host_registration(Client()) is None


@pytest.mark.parametrize("error", [RuntimeError("no memory to lock"), TypeError("arguments")])
def test_memory_that_is_not_taken(error):
    client = Client(error)
    assert resolve.host_registration(client)(4096, 64) is None
    assert client.log == [("map", 4096, 64)]


def test_the_client_of_this_backend():
    """The CPU backend has the function, and refuses."""
    register = resolve.host_registration(jax.devices()[0].client)
    memory = np.zeros(1 << 20, np.uint8)
    assert register(memory.ctypes.data, memory.nbytes) is None


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX
def test_a_forked_child_ends_no_registration():
    client = Client()
    end = resolve.host_registration(client)(4096, 64)
    child = os.fork()
    if not child:
        end()
        os._exit(len(client.log) - 1)
    assert os.waitpid(child, 0)[1] == 0
