"""Ready mappings through load and save, sharded: tiny Hugging Face models against numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from recording import recording

pytest.importorskip("torch")
pytest.importorskip("transformers")

from family_cases import CASES, family_of
from family_models import read
from family_references import REFERENCES

import orbax_safetensors_layout as osl

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

SPLITS = {
    "replicated": lambda shape: P(),
    "fsdp": lambda shape: first_and_last(shape, 4, None),
    "tensor": lambda shape: first_and_last(shape, None, 4),
    "2-D": lambda shape: first_and_last(shape, 2, 2),
}


def first_and_last(shape, first, last):
    """The first axis that `first` divides, and of the others the last that `last` does."""
    axes: list[str | None] = [None] * len(shape)
    for extent, name, order in ((first, "x", 1), (last, "y", -1)):
        for axis in list(range(len(shape)))[::order]:
            if extent and shape[axis] % extent == 0 and axes[axis] is None:
                axes[axis] = name
                break
    return P(*axes)


def meshes(split):
    lengths = {"fsdp": (4, 1), "tensor": (1, 4)}.get(split, (2, 2))
    return Mesh(np.array(jax.devices()[:4]).reshape(lengths), ("x", "y"))


def nested(flat):
    """The tree that dotted names stand for, as a model has it."""
    tree = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def with_splits(cases):
    """Every fourth case with two of the ways to shard it, and in the soak set all with all."""
    others = [split for split in SPLITS if split != "2-D"]
    for number, case in enumerate(cases):
        yield pytest.param(*case, [*SPLITS], marks=pytest.mark.soak)
        if number % 4 == 0:
            yield pytest.param(*case, [others[number // 4 % len(others)], "2-D"])


@pytest.mark.parametrize(("name", "target", "scan", "splits"), [*with_splits(CASES)])
def test_there_and_back_under_every_sharding(saved, tmp_path, name, target, scan, splits):
    folder, config, tensors, _ = saved[name]
    mapping = osl.families.mapping(folder, target=target, scan=scan)
    expected = {
        leaf: value.astype(jax.dtypes.canonicalize_dtype(value.dtype))  # int64 of DeepSeek-V4
        for leaf, value in REFERENCES[target](family_of(name), config, tensors, scan).items()
    }
    for split in splits:
        mesh, spec = meshes(split), SPLITS[split]
        abstract = {
            leaf: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=NamedSharding(mesh, spec(value.shape))
            )
            for leaf, value in expected.items()
        }
        with recording() as storage:
            model = osl.load(folder, nested(abstract), mapping=mapping)
        plan = osl.plan_load(folder, nested(abstract), mapping=mapping)
        weights = dict(zip(nested_names(model), jax.tree.leaves(model), strict=True))
        assert set(weights) == set(expected)
        for leaf, value in expected.items():
            assert weights[leaf].sharding == abstract[leaf].sharding
            assert_same_bits(np.asarray(weights[leaf]), value)
        taken = sum(tensors[n].nbytes for expression in mapping.bind(folder).expressions.values()
                    for n in expression.sources())  # fmt: skip
        loaded = sum(stop - start for _, start, stop in storage.tensor_ranges())
        assert loaded == plan.cost().read_bytes <= 1.05 * taken, split
        if split == "2-D":
            options = osl.WriteOptions(max_file_bytes=20_000)
            osl.save(tmp_path / "back", model, mapping=mapping, options=options)
    back = read(tmp_path / "back")
    assert set(back) == set(tensors)
    for tensor, value in tensors.items():
        if target != "maxtext" and value.dtype != np.int64:  # it computes some in float32
            assert_same_bits(back[tensor], value)
        else:
            assert_same_bits(back[tensor].astype(value.dtype), value)


def nested_names(tree):
    paths, _ = zip(*jax.tree_util.tree_flatten_with_path(tree)[0], strict=True)
    return [".".join(str(key.key) for key in path) for path in paths]
