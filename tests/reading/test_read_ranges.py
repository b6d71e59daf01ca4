"""Recorded ranges of reads against the bytes that numpy says are needed."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits, random_tensor, save
from hypothesis import HealthCheck, given, settings
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of
from random_trees import sharded_tensors
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog import Catalog

NO_GAPS = osl.ReadOptions(latency_seconds={"local": 0.0})


def needed_bytes(entry, dtype, array) -> set[int]:
    """Offsets in the file of the bytes of all addressable shards, by brute force."""
    offsets = np.arange(entry.nbytes, dtype=np.int64).reshape(*entry.shape, dtype.itemsize)
    start = entry.start
    return {
        start + int(o) for shard in array.addressable_shards for o in offsets[shard.index].ravel()
    }


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(sharded_tensors())
def test_recorded_ranges_are_the_needed_bytes(case):
    tensors, abstract, files, _ = case
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), tensors, files=min(files, len(tensors)))
        with recording() as storage:
            loaded = osl.load(path, abstract, options=NO_GAPS)
        planned = osl.plan_load(path, abstract, options=NO_GAPS)
        with Catalog.open(path) as catalog:
            entries = catalog.all_entries()
    read = [(f, b) for f, start, stop in storage.tensor_ranges() for b in range(start, stop)]
    expected = {
        (entries[name].file, byte)
        for name, array in loaded.items()
        for byte in needed_bytes(entries[name], tensors[name].dtype, array)
    }
    assert set(read) == expected
    assert len(read) == len(expected), "no byte is read twice"
    assert planned.cost().read_bytes == planned.cost().needed_bytes == len(expected)
    assert {(f, b) for f, a, z in planned.ranges() for b in range(a, z)} == expected


@pytest.mark.parametrize("spec", [(None, "x"), ("x", None), (None, ("x", "y")), ()])
def test_local_shards_of_one_tensor_are_one_read(tmp_path, spec):
    tensor = random_tensor((64, 64), np.float32)
    path = save(tmp_path, {"t": tensor})
    mesh = mesh_of(x=4, y=2)
    leaf = jax.ShapeDtypeStruct(
        (64, 64), np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    plan = osl.plan_load(path, {"t": leaf}, options=NO_GAPS)
    assert plan.cost() == osl.Cost(
        tensors=1,
        needed_bytes=tensor.nbytes,
        read_bytes=tensor.nbytes,
        requests=1,
        files=1,
        peak_host_bytes=plan.cost().peak_host_bytes,
    )


def test_gaps_are_read_through_by_the_cost_model(tmp_path):
    tensor = random_tensor((16, 1024), np.uint8)
    path = save(tmp_path, {"t": tensor})
    # One device of a mesh of four holds a quarter of each row: the gaps are 768 bytes.
    abstract_mesh = jax.sharding.AbstractMesh((4,), ("x",))
    leaf = jax.ShapeDtypeStruct(
        tensor.shape, tensor.dtype, sharding=NamedSharding(abstract_mesh, PartitionSpec(None, "x"))
    )

    def cost(latency_bytes, concurrency=1):
        options = osl.ReadOptions(
            replicated="each",
            latency_seconds={"local": latency_bytes},
            bandwidth_bytes_per_second={"local": 1.0},
            concurrency=concurrency,
        )
        plan = osl.plan_load(path, {"t": leaf}, options=options, process_index=1, process_count=4)
        return plan.cost()

    skipping = cost(767)
    assert (skipping.needed_bytes, skipping.read_bytes, skipping.requests) == (4096, 4096, 16)
    through = cost(768)
    assert (through.needed_bytes, through.read_bytes, through.requests) == (
        4096,
        15 * 1024 + 256,
        1,
    )
    # Requests that wait together, for a disk that they share, cost a share of the time each.
    assert cost(8 * 767, 8).requests == 16
    assert cost(8 * 769, 8).requests == 1


def test_small_tensors_share_a_request(tmp_path):
    tensors = {f"t{i}": random_tensor((3, 5), np.float32, i) for i in range(50)}
    path = save(tmp_path, tensors)
    with recording() as storage:
        for name, value in osl.load(path).items():
            assert_same_bits(value, tensors[name])
    assert len(storage.tensor_ranges()) == 1


def test_only_needed_files_are_opened(tmp_path):
    tensors = {f"t{i}": random_tensor((4,), np.float32, i) for i in range(6)}
    path = save(tmp_path, tensors, files=3)
    with recording() as storage:
        osl.load(path, only=["t0", "t3"])
    opened = {Path(file).name for file, _, _ in storage.ranges}
    assert opened == {"model.safetensors.index.json", "model-00001-of-00003.safetensors"}


class Disk(Exception):
    pass


def test_the_first_failure_stops_the_rest(tmp_path):
    tensors = {f"t{i}": random_tensor((5 << 20,), np.uint8, i) for i in range(12)}
    path = save(tmp_path, tensors)
    failed = threading.Event()

    def before_read(file, start, stop):
        if start > 0 and not failed.is_set():
            failed.set()
            raise osl.StorageError("the disk broke", file=file)

    with recording() as storage:
        storage.before_read = before_read
        with pytest.raises(osl.StorageError, match="the disk broke") as caught:
            osl.load(path, options=osl.ReadOptions(concurrency=2))
        assert storage.active == 0
    assert caught.value.tensor in tensors
    assert len(storage.tensor_ranges()) < len(tensors)
    assert not [t for t in threading.enumerate() if t.name.startswith("safetensors-read")]


def test_a_foreign_exception_passes_through(tmp_path):
    path = save(tmp_path, {"t": np.ones(4, np.float32)})

    def before_read(file, start, stop):
        if start > 0:
            raise Disk

    with recording() as storage:
        storage.before_read = before_read
        with pytest.raises(Disk):
            osl.load(path)


def test_a_failing_progress_callback_stops_the_load(tmp_path):
    path = save(tmp_path, {"t": np.ones(4, np.float32)})

    def progress(state):
        raise Disk

    with pytest.raises(Disk):
        osl.load(path, options=osl.ReadOptions(progress=progress))


def test_truncation_during_the_load_names_the_tensor(tmp_path):
    tensors = {"t": random_tensor((1000,), np.float32)}
    path = save(tmp_path, tensors)
    file = path / "model.safetensors"

    with recording() as storage:

        def before_read(name, start, stop):
            if start > 0:
                with open(file, "r+b") as handle:
                    handle.truncate(2000)

        storage.before_read = before_read
        with pytest.raises(osl.TruncatedFileError) as caught:
            osl.load(path)
    assert caught.value.tensor == "t"
    assert "bytes [" in str(caught.value)


def test_the_plan_prints(tmp_path):
    path = save(tmp_path, {"weight": np.ones((4, 4), np.float32)})
    text = str(osl.plan_load(path))
    assert "weight" in text
    assert "64 bytes needed, 64 bytes read (1.00x) in 1 requests from 1 files" in text


def test_what_is_read_is_reported_to_jax_monitoring(tmp_path):
    """The scalars of Orbax's own reader: bytes, planned ranges, and requests made."""
    path = save(tmp_path, {"t": random_tensor((100_000,), np.uint8)})
    seen: dict[str, float] = {}
    active = True

    def listen(event, value, **_):
        if active and event.startswith("/jax/orbax/read/safetensors/"):
            seen[event.rpartition("/")[2]] = value

    jax.monitoring.register_scalar_listener(listen)
    osl.load(path, options=osl.ReadOptions(request_bytes=30_000))
    active = False
    assert seen == {"bytes_read": 100_000, "num_reads": 1, "storage_reads": 4}
