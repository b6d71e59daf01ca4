"""Loading against `safetensors` and numpy slicing, over shapes, dtypes, meshes and specs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, llama_like, random_tensor, save
from hypothesis import HealthCheck, given, settings
from jax.sharding import SingleDeviceSharding
from programs import run_alone
from random_trees import PLAIN_DTYPES, sharded_tensors

import orbax_safetensors_layout as osl


def check_shards(array: jax.Array, expected: np.ndarray) -> None:
    """Each device holds exactly its slice."""
    assert array.shape == expected.shape
    for shard in array.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index])


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


@pytest.mark.parametrize("dtype", PLAIN_DTYPES[:13], ids=str)
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
    assert run_alone("load_on_other_backend.py", path) == "no cpu backend\n"
