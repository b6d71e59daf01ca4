"""Estimates of loads of any tree: its keys, sub-byte elements and Python values."""

import jax
import ml_dtypes
import numpy as np
import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import estimate
from orbax_safetensors_layout.sharding import MeshShape, parse_rules


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_keys_sub_byte_elements_and_values(tmp_path, layout):
    """A key has two numbers of four bytes, an int4 a byte in the file."""
    tree = {
        "keys": jax.random.split(jax.random.key(0), 4),
        "small": np.zeros((8, 8), ml_dtypes.int4),
        "none": np.zeros((4, 0), np.float32),
        "step": 3,
    }
    osl.save(tmp_path, tree, options=osl.WriteOptions(layout=layout))
    arrays = {name: leaf for name, leaf in tree.items() if name != "step"}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    rules = [*parse_rules(["'.*' = x"])]
    for given in ({**abstract, "step": 0}, None):
        found = estimate(tmp_path, MeshShape({"x": 4}, 2), rules, abstract=given)
        assert [cost.needed_bytes for cost in found.costs] == [(4 * 8 + 64) // 2] * 2
        assert found.device_bytes == (4 * 8 + 64) // 4
