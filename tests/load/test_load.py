"""Loading against `safetensors` and numpy slicing, over shapes, dtypes, meshes and specs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, llama_like, random_tensor, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import orbax_safetensors_layout as osl

DTYPES = [
    *map(np.dtype, ["bool", "u1", "u2", "u4", "i1", "i2", "i4", "f2", "f4", "c8"]),
    *map(np.dtype, [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]),
]
MESHES = [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 8}]


def mesh_of(axes: dict[str, int]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(list(axes.values())), tuple(axes))


def check_shards(array: jax.Array, expected: np.ndarray) -> None:
    """Each device holds exactly its slice."""
    assert array.shape == expected.shape
    for shard in array.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index])


@st.composite
def specs(draw, axes: dict[str, int], rank: int):
    names = draw(st.permutations(list(axes)))
    parts: list[tuple[str, ...]] = [() for _ in range(rank)]
    for name in names[: draw(st.integers(0, len(names)))] if rank else ():
        dimension = draw(st.integers(0, rank - 1))
        parts[dimension] = (*parts[dimension], name)
    return PartitionSpec(*[p or None for p in parts])


@st.composite
def sharded_tensors(draw):
    axes = draw(st.sampled_from(MESHES))
    mesh = mesh_of(axes)
    tensors, abstract = {}, {}
    for number in range(draw(st.integers(1, 4))):
        rank = draw(st.integers(0, 4))
        spec = draw(specs(axes, rank))
        ways = [math.prod(axes[n] for n in (p or ())) for p in spec]
        shape = tuple(w * draw(st.integers(0 if w == 1 else 1, 5)) for w in ways)
        dtype = draw(st.sampled_from(DTYPES))
        name = f"t{number}"
        tensors[name] = random_tensor(shape, dtype, number)
        sharding = NamedSharding(mesh, spec)
        abstract[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    options = osl.ReadOptions(
        request_bytes=draw(st.sampled_from([None, 7, 64, 1000])),
        latency_seconds={"local": draw(st.sampled_from([0.0, 1e-8, 2e-6]))},
        mmap=draw(st.booleans()),
    )
    return tensors, abstract, draw(st.integers(1, 3)), options


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(sharded_tensors())
def test_every_shard_is_its_slice(case):
    tensors, abstract, files, options = case
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), tensors, files=min(files, len(tensors)))
        loaded = osl.load(path, abstract, options=options)
    assert list(loaded) == list(abstract)
    for name, array in loaded.items():
        assert array.sharding == abstract[name].sharding
        check_shards(array, tensors[name])


def test_nested_tree_and_flat_dict_name_the_same_tensors(tmp_path):
    tensors = llama_like()
    path = save(tmp_path, tensors, files=3)
    flat = osl.load(path)
    assert list(flat) == list(osl.metadata(path))
    for name, expected in tensors.items():
        assert_same_bits(flat[name], expected)
        assert isinstance(flat[name], np.ndarray)
    nested = {"model": {"norm": {"weight": jax.ShapeDtypeStruct((64,), ml_dtypes.bfloat16)}}}
    array = osl.load(path, nested)["model"]["norm"]["weight"]
    assert isinstance(array, jax.Array)
    assert array.is_fully_replicated
    assert_same_bits(array, tensors["model.norm.weight"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_device(tmp_path, dtype):
    tensor = random_tensor((6, 5), dtype)
    path = save(tmp_path, {"t": tensor})
    sharding = SingleDeviceSharding(jax.devices()[3])
    array = osl.load(path, {"t": jax.ShapeDtypeStruct((6, 5), dtype, sharding=sharding)})["t"]
    assert array.sharding == sharding
    assert_same_bits(array, tensor)


def test_without_a_cpu_backend(tmp_path):
    """As with JAX_PLATFORMS=tpu: nothing may ask for the CPU backend by name."""
    path = save(tmp_path, {"t": np.arange(8, dtype=np.float32)})
    code = f"""
import jax
from jax._src import xla_bridge
xla_bridge.register_backend_factory(
    "other", xla_bridge.make_cpu_client, priority=500, fail_quietly=False
)
jax.config.update("jax_platforms", "other")
import numpy as np, orbax_safetensors_layout as osl
loaded = osl.load({str(path)!r}, {{"t": jax.ShapeDtypeStruct((8,), np.float32)}})
assert np.asarray(loaded["t"]).sum() == 28
try:
    jax.devices("cpu")
except RuntimeError:
    print("no cpu backend")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no cpu backend" in done.stdout
