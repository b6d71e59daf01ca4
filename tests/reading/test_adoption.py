"""The condition under which JAX's CPU backend takes a host buffer without a copy, and our use."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import weakref
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import Accelerator
from checkpoints import assert_same_bits, random_tensor, save
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of
from recording import RecordingStorage, recording

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.reading.leaf_builder as builder_module
import orbax_safetensors_layout.reading.plan_reader as read_module
import orbax_safetensors_layout.runtime.memory as buffers_module
from orbax_safetensors_layout.options import PROFILES
from orbax_safetensors_layout.reading import tile_buffers
from orbax_safetensors_layout.reading.plan_reader import PlanReader
from orbax_safetensors_layout.runtime import SLOT_ALIGNMENT, Staging, allocate
from orbax_safetensors_layout.runtime.memory import HUGE_PAGE_BYTES, Pages
from orbax_safetensors_layout.storage import LocalStorage


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


@pytest.mark.parametrize(
    "host",
    [
        at(0, 8192).view(np.float32).reshape(32, 64)[:, ::2],
        at(0, 4096).view(np.float64),
        at(0, 4096).view(np.int64),
    ],
    ids=["strided", "float64", "int64"],
)
def test_jax_copies_what_it_cannot_take_as_it_is(host):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jax.make_array_from_callback(host.shape, sharding, lambda _: host)
    assert pointers(array) != [host.ctypes.data]


@pytest.mark.parametrize("nbytes", [1, 63, 64, 5000, 5 << 20])
@pytest.mark.parametrize("file_offset", [0, 8, 64, 4096, 4160])
def test_buffers_are_aligned(nbytes, file_offset):
    buffer = allocate(nbytes, file_offset=file_offset)
    assert buffer.size == nbytes
    assert buffer.ctypes.data % SLOT_ALIGNMENT == 0
    if nbytes > 1 << 20 and file_offset % 64 == 0:
        assert (buffer.ctypes.data - file_offset) % 4096 == 0


@pytest.mark.parametrize(
    ("nbytes", "fits"),
    [
        *((nbytes, True) for nbytes in (2 << 20, 8 << 20, 64 << 20, (33 << 20) - 4096)),
        *((nbytes, False) for nbytes in ((2 << 20) - 4096, 3 << 20, (8 << 20) + 4096)),
    ],
)
def test_buffers_begin_at_a_huge_page_unless_the_last_one_would_be_wasted(nbytes, fits):
    offsets = {allocate(nbytes).ctypes.data % HUGE_PAGE_BYTES for _ in range(4)}
    assert (offsets == {0}) == fits
    buffer = allocate(nbytes - 4096, file_offset=4096 + 640)
    assert (buffer.ctypes.data - 640) % 4096 == 0


def kernel_flags(memory: np.ndarray) -> set[str]:
    """Return what the kernel was told of the mapping that holds this memory (proc(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head:
            low, high = (int(end, 16) for end in head.split("-"))
            inside = low <= memory.ctypes.data + memory.nbytes // 2 < high
        elif inside and head == "VmFlags:":
            return set(rest.split())
    raise AssertionError("the memory is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells the flags")
def test_huge_pages_are_left_while_the_machine_has_to_fetch_them():
    seconds, slow = iter(range(10**6)), False
    pages = Pages(clock=lambda: next(seconds) * 1.0 if slow else 0.0)
    kept = pages.map(mmap.PAGESIZE)

    def are_huge(count: int) -> list[bool]:
        flags = [kernel_flags(pages.map(16 << 20)) for _ in range(count)]
        assert all(("hg" in flag) != ("nh" in flag) for flag in flags)
        return ["hg" in flag for flag in flags]

    assert are_huge(3) == [True] * 3
    slow = True  # the stretch of 32 MiB ends, then 32, 64, 128 and 128 MiB are small
    assert are_huge(1 + 2 + 4 + 8 + 7) == [True] + [False] * 21
    slow = False
    assert are_huge(1 + 2) == [False] + [True] * 2
    slow = True
    assert are_huge(2) == [False] * 2
    slow = False
    assert are_huge(2) == [True] * 2
    slow = True
    del kept  # what the process has freed, the machine keeps for it
    assert are_huge(8) == [True] * 8


def test_memory_of_small_pages_is_aligned_all_the_same(monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr(buffers_module, "_pages", Pages(clock=lambda: float(next(seconds))))
    for nbytes in (2 << 20, (3 << 20) + 64, 40 << 20):
        buffer = allocate(nbytes, file_offset=4096 + 640)
        assert (buffer.ctypes.data - 640) % 4096 == 0
        assert buffer.nbytes == nbytes
        buffer[:] = 1  # all of it can be written


def test_staging_memory_is_used_again_when_its_last_view_is_gone():
    staging, nbytes = Staging(), 2 << 20
    first = staging.take(nbytes, file_offset=640)
    address = first.ctypes.data
    assert address % 4096 == 640
    keep = [
        lambda memory: np.ndarray((4, 8), np.float32, memory.data, 64)[1:, 2],
        lambda memory: [*np.ndarray((4, 8), np.uint8, memory.data)][3].T,
        lambda memory: memory[100:200].view(np.uint16).reshape(5, 10)[None],
        lambda memory: memory.data[3:9].cast("H"),
        lambda memory: np.asarray(memoryview(memory[7:])),
        lambda memory: np.broadcast_to(memory[:1], (3, 1)),
    ]
    for make in keep:
        view = make(first)
        del first
        other = staging.take(nbytes, file_offset=640)
        assert other.ctypes.data != address
        del view
        first = staging.take(nbytes, file_offset=640)
        assert first.ctypes.data == address
        del other
    assert staging.take(nbytes // 2).size == nbytes // 2


def test_shards_are_slices_of_one_allocation(tmp_path):
    """No copy behind the read: neighbouring shards stand where the reader put them."""
    path = save(tmp_path, {"t": random_tensor((64, 128), np.float32)})
    mesh = mesh_of(x=8)
    for spec in (PartitionSpec("x"), PartitionSpec(None, "x")):
        leaf = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=NamedSharding(mesh, spec))
        loaded = pointers(osl.load(path, {"t": leaf})["t"])
        assert np.diff(loaded).tolist() == [64 * 128 * 4 // 8] * 7


def test_replicas_share_one_buffer(tmp_path):
    path = save(tmp_path, {"t": random_tensor((64, 128), np.float32)})
    leaf = jax.ShapeDtypeStruct((64, 128), np.float32)
    assert len(set(pointers(osl.load(path, {"t": leaf})["t"]))) == 1


def save_aligned(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint whose first tensor begins at a multiple of 64: the metadata is padded."""
    for pad in range(64):
        path = save(folder / str(pad), tensors, metadata={"pad": "x" * pad})
        if osl.plan_load(path).leaves[0].sources[0].entry.start % 64 == 0:
            return path
    raise AssertionError("no padding aligns the data")


def test_mapped_pages_are_adopted_where_aligned(tmp_path):
    tensor = random_tensor((256, 64), np.float32)
    path = save_aligned(tmp_path, {"t": tensor})
    mesh = mesh_of(x=8)
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


def test_memory_budget_bounds_what_is_held(tmp_path, monkeypatch):
    """As on an accelerator, where a buffer is free once its array is on the device."""
    size = 5 << 20
    tensors = {f"t{i}": np.full(size, i, np.uint8) for i in range(8)}
    path = save(tmp_path, tensors)
    Accelerator(monkeypatch)
    tree = {name: jax.ShapeDtypeStruct((size,), np.uint8) for name in tensors}
    plan = osl.plan_load(path, tree, options=osl.ReadOptions(memory_budget_bytes=11 << 20))
    assert plan.cost().peak_host_bytes == 11 << 20
    started: set[int] = set()
    released: list[int] = []
    most = []

    def before_read(file, start, stop):
        started.update(
            n for n, leaf in enumerate(plan.leaves) if leaf.sources[0].entry.start <= start
        )
        most.append(len(started) - len(released))

    def deliver(number, boxes, values):
        (value,) = values
        assert (value == number).all()
        return lambda: released.append(number)

    with RecordingStorage() as storage:
        storage.before_read = before_read
        PlanReader(plan, storage, deliver=deliver, convert=lambda n, v: v).run()
    assert sorted(released) == list(range(8))
    assert max(most) <= 2


@pytest.mark.parametrize("spec", [("x",), (None, "x")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_tensor_larger_than_the_budget_goes_shard_by_shard(tmp_path, monkeypatch, spec, dtype):
    tensor = random_tensor((1024, 1024), np.float32)
    path = save(tmp_path, {"t": tensor})
    accelerator = Accelerator(monkeypatch)
    sharding = NamedSharding(mesh_of(x=8), PartitionSpec(*spec))
    tree = {"t": jax.ShapeDtypeStruct(tensor.shape, dtype, sharding=sharding)}
    options = osl.ReadOptions(memory_budget_bytes=1 << 20)
    array = osl.load(path, tree, options=options)["t"]
    assert max(accelerator.sizes) <= 1 << 20
    assert sum(accelerator.sizes) == tensor.nbytes
    assert array.sharding == sharding
    with np.errstate(over="ignore", invalid="ignore"):
        expected = tensor.astype(dtype)
    for shard in array.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index])


def test_cast_values_are_adopted_too(tmp_path):
    path = save(tmp_path, {"t": np.arange(4096, dtype=np.float16)})
    array = osl.load(path, {"t": jax.ShapeDtypeStruct((4096,), np.float32)})["t"]
    assert len(set(pointers(array))) == 1


def test_a_failed_load_drops_its_buffers(tmp_path):
    """At once, by reference counts: memory may be what the next attempt lacks."""
    path = save(tmp_path, {f"t{i}": np.ones(5 << 20, np.uint8) for i in range(6)})
    alive: list[weakref.ref] = []

    def before_read(file, start, stop):
        if start > 15 << 20:
            raise osl.StorageError("the disk broke", file=file)

    def remember(*arguments):
        slices = tile_buffers.buffer_slices(*arguments)
        alive.extend(weakref.ref(destination.buffer.memory.base) for destination in slices)
        return slices

    gc.collect()
    gc.disable()
    try:
        with recording() as storage, mock.patch.object(read_module, "buffer_slices", remember):
            storage.before_read = before_read
            with pytest.raises(osl.StorageError, match="the disk broke"):
                osl.load(path)
        assert len(alive) > 3
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


def test_a_cold_load_reads_the_disk_once(tmp_path):
    tensors = {f"t{i}": random_tensor((16 << 20,), np.uint8, i) for i in range(4)}
    path = save(tmp_path, tensors)
    file = path / "model.safetensors"
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = disk_bytes()
    loaded = osl.load(path)
    read = disk_bytes() - before
    assert read <= 1.1 * file.stat().st_size
    for name, tensor in tensors.items():
        assert_same_bits(loaded[name], tensor)


@pytest.mark.parametrize(
    ("is_cached", "options", "threads"),
    [
        (True, {}, PROFILES["local"].cached_concurrency),
        (False, {}, PROFILES["local"].concurrency),
        (True, {"concurrency": 3}, 3),
        (False, {"concurrency": 3}, 3),
    ],
)
def test_the_page_cache_decides_how_many_read_at_once(
    tmp_path, monkeypatch, is_cached, options, threads
):
    path = save(tmp_path, {f"t{i}": random_tensor((64,), np.uint8, i) for i in range(40)})
    asked = mock.Mock(return_value=is_cached)
    monkeypatch.setattr(LocalStorage, "is_cached", asked)
    with mock.patch.object(read_module, "Workers", wraps=read_module.Workers) as workers:
        osl.load(path, options=osl.ReadOptions(**options))
    assert [call.args[0] for call in workers.call_args_list] == [threads]
    assert 1 <= asked.call_count <= 16


def disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@pytest.mark.parametrize("change", ["rewrite", "truncate"])
def test_a_file_that_changed_since_its_header_is_not_mapped(tmp_path, monkeypatch, change):
    path = save_aligned(tmp_path, {"t": np.ones(1 << 20, np.uint8)})
    file = path / "model.safetensors"
    original = LocalStorage.map

    def changed_map(storage, name):
        with open(file, "r+b") as opened:
            if change == "truncate":
                opened.truncate(5000)
            else:
                opened.seek(5000)
                opened.write(b"new")
        return original(storage, name)

    monkeypatch.setattr(LocalStorage, "map", changed_map)
    with pytest.raises((osl.StorageError, osl.TruncatedFileError)) as caught:
        osl.load(path, options=osl.ReadOptions(mmap=True))
    assert caught.value.file == str(file)


def test_arrays_are_the_same_without_the_private_way(tmp_path, monkeypatch):
    tensors = {f"t{i}": random_tensor((16, 8), np.float32, i) for i in range(3)}
    path = save(tmp_path, tensors)
    mesh = mesh_of(x=4, y=2)
    for spec in ((), ("x",), ("y", "x"), (None, ("x", "y"))):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        tree = dict.fromkeys(tensors, jax.ShapeDtypeStruct((16, 8), np.float32, sharding=sharding))
        with monkeypatch.context() as patch:
            patch.setattr(builder_module, "batched_device_put", lambda: None)
            public = osl.load(path, tree)
        assert builder_module.batched_device_put() is not None, "not checked with this JAX"
        for name, array in osl.load(path, tree).items():
            assert array.aval == public[name].aval
            assert array.committed == public[name].committed
            assert_same_bits(array, tensors[name])
            assert_same_bits(public[name], tensors[name])
            np.testing.assert_array_equal(jax.jit(jnp.negative)(array), -tensors[name])
