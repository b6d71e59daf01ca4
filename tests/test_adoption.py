"""The condition under which JAX's CPU backend takes a host buffer without a copy, and our use."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import random_tensor, save
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recording import RecordingStorage

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.plan.reads import SLOT_ALIGNMENT
from orbax_safetensors_layout.transfer.buffers import allocate
from orbax_safetensors_layout.transfer.read import read_leaves


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def mapped(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def at(offset: int, nbytes: int) -> np.ndarray:
    """A buffer whose address is `offset` modulo the alignment."""
    raw = np.zeros(nbytes + 2 * SLOT_ALIGNMENT, np.uint8)
    return raw[(offset - raw.ctypes.data) % SLOT_ALIGNMENT :][:nbytes]


@pytest.mark.parametrize("offset", [0, 8, 16, 32])
def test_jax_adopts_exactly_the_aligned_buffers(offset):
    host = at(offset, 4096).view(np.float32)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jax.make_array_from_callback(host.shape, sharding, lambda _: host)
    assert (pointers(array) == [host.ctypes.data]) == (offset == 0)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 5000, 5 << 20])
@pytest.mark.parametrize("file_offset", [0, 8, 64, 4096, 4160])
def test_buffers_are_aligned(nbytes, file_offset):
    buffer = allocate(nbytes, file_offset=file_offset)
    assert buffer.size == nbytes
    assert buffer.ctypes.data % SLOT_ALIGNMENT == 0
    if nbytes > 1 << 20 and file_offset % 64 == 0:
        assert (buffer.ctypes.data - file_offset) % 4096 == 0


def test_shards_are_slices_of_one_allocation(tmp_path):
    """No copy behind the read: neighbouring shards stand where the reader put them."""
    path = save(tmp_path, {"t": random_tensor((64, 128), np.float32)})
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for spec in (PartitionSpec("x"), PartitionSpec(None, "x")):
        leaf = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=NamedSharding(mesh, spec))
        found = pointers(osl.load(path, {"t": leaf})["t"])
        assert np.diff(found).tolist() == [64 * 128 * 4 // 8] * 7


def test_replicas_share_one_buffer(tmp_path):
    path = save(tmp_path, {"t": random_tensor((64, 128), np.float32)})
    leaf = jax.ShapeDtypeStruct((64, 128), np.float32)
    assert len(set(pointers(osl.load(path, {"t": leaf})["t"]))) == 1


def test_mapped_pages_are_adopted_where_aligned(tmp_path):
    # safetensors writes the largest alignment first and pads the header to 8 bytes, so look where
    # the tensor came to stand and shift it to a multiple of 64 through the metadata.
    tensor = random_tensor((256, 64), np.float32)
    for pad in range(64):
        path = save(tmp_path / str(pad), {"t": tensor}, metadata={"pad": "x" * pad})
        plan = osl.plan_load(path)
        if plan.leaves[0].entry.start % 64 == 0:
            break
    mesh = Mesh(np.array(jax.devices()), ("x",))
    leaf = jax.ShapeDtypeStruct(
        tensor.shape, tensor.dtype, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
    maps_before = mapped(path)
    array = osl.load(path, {"t": leaf}, options=osl.ReadOptions(mmap=True))["t"]
    assert mapped(path) == maps_before + 1
    np.testing.assert_array_equal(np.asarray(array).view("u4"), tensor.view("u4"))
    (path / "model.safetensors").unlink()
    np.testing.assert_array_equal(np.asarray(array).view("u4"), tensor.view("u4"))
    del array
    gc.collect()
    assert mapped(path) == maps_before


def test_dropping_one_large_array_frees_its_memory(tmp_path):
    size = 4 << 20
    path = save(tmp_path, {"a": np.ones(size, np.uint8), "b": np.ones(size, np.uint8)})
    loaded = osl.load(path)
    root = loaded["a"]
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    owner = weakref.ref(getattr(root, "obj", root))
    del root, loaded["a"]
    gc.collect()
    assert owner() is None


def test_memory_budget_bounds_what_is_held(tmp_path):
    """As on an accelerator, where a buffer is free once its array is on the device."""
    size = 5 << 20
    path = save(tmp_path, {f"t{i}": np.full(size, i, np.uint8) for i in range(8)})
    plan = osl.plan_load(path, options=osl.ReadOptions(memory_budget_bytes=11 << 20))
    started: set[int] = set()
    released: list[int] = []
    most = []

    def before_read(file, start, stop):
        started.update(n for n, leaf in enumerate(plan.leaves) if leaf.entry.start <= start)
        most.append(len(started) - len(released))

    def deliver(number, values):
        (value,) = values
        assert (value == number).all()
        return lambda: released.append(number)

    with RecordingStorage() as storage:
        storage.before_read = before_read
        read_leaves(plan, storage, deliver=deliver, convert=lambda n, v: v, adopt=False)
    assert sorted(released) == list(range(8))
    assert max(most) <= 2
