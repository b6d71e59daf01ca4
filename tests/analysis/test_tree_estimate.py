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
    rules = parse_rules(["'.*' = x"])
    for given in ({**abstract, "step": 0}, None):
        found = estimate(tmp_path, MeshShape({"x": 4}, 2), rules, abstract=given)
        assert [cost.needed_bytes for cost in found.costs] == [(4 * 8 + 64) // 2] * 2
        assert found.device_bytes == (4 * 8 + 64) // 4


def test_host_arrays_are_whole_on_each_process(tmp_path):
    values = np.ones((8, 8), np.float32)
    osl.save(tmp_path, {"table": values, "w": values})
    abstract = {"table": values, "w": jax.ShapeDtypeStruct(values.shape, values.dtype)}
    rules = parse_rules(["'.*' = x"])
    found = estimate(tmp_path, MeshShape({"x": 4}, 2), rules, abstract=abstract)
    assert [cost.needed_bytes for cost in found.costs] == [256 + 128] * 2
    assert found.device_bytes == 64


def test_a_mapping_is_bound_once_for_all_processes(tmp_path, monkeypatch):
    osl.save(tmp_path / "a", {"w": np.ones((8, 8), np.float32)})
    bound = []
    match = osl.Mapping.match
    monkeypatch.setattr(
        osl.Mapping, "match", lambda self, *names: bound.append(1) or match(self, *names)
    )
    counts = []
    for hosts in (1, 4):
        bound.clear()
        mapping = osl.Mapping([osl.rule("v", osl.tensor("w"))])
        mesh = MeshShape({"x": 8}, hosts)
        estimate(tmp_path / "a", mesh, parse_rules(["'.*' = auto"]), mapping=mapping)
        counts.append(len(bound))
    assert counts[0] == counts[1] > 0
