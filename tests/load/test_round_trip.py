"""Saved trees come back: with an abstract tree and without, on the same devices and on others."""

import dataclasses
import tempfile

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, random_tensor
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of, place
from random_trees import trees
from states import everything, same, train_state

import orbax_safetensors_layout as osl

LAYOUTS = ["hf", "sharded"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_comes_back_as_it_was(tmp_path, layout):
    tree = everything()
    osl.save(tmp_path, tree, options=osl.WriteOptions(layout=layout))
    same(osl.load(tmp_path), tree)
    same(osl.load(tmp_path, tree), tree)
    abstract = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )
    same(osl.load(tmp_path, abstract), tree)
    unplaced = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
        ),
        tree,
    )
    same(osl.load(tmp_path, unplaced), tree)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_train_state(tmp_path, layout):
    state = train_state()
    osl.save(tmp_path, state, options=osl.WriteOptions(layout=layout))
    same(osl.load(tmp_path, state), state)
    loaded = osl.load(tmp_path, jax.eval_shape(lambda: state))
    assert isinstance(loaded.step, jax.Array)
    same(loaded.replace(step=int(loaded.step)), state)
    loaded = osl.load(tmp_path)
    assert set(loaded) == {"step", "params", "opt_state"}
    same(loaded["opt_state"], state.opt_state)


def test_an_nnx_state(tmp_path):
    state = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    osl.save(tmp_path, state)
    assert set(osl.metadata(tmp_path)) == {"bias", "kernel"}
    same(osl.load(tmp_path, jax.eval_shape(lambda: state)), state)
    assert_same_bits(osl.load(tmp_path)["kernel"]["value"], np.asarray(state["kernel"][...]))


def test_partitioned_boxes(tmp_path):
    box = nn.Partitioned(place(np.ones((8, 4), np.float32), P("x", "y")), names=("x", "y"))
    osl.save(tmp_path, {"kernel": box})
    same(osl.load(tmp_path, {"kernel": box}), {"kernel": box})


@dataclasses.dataclass
class Config:
    value: object
    other: object


jax.tree_util.register_dataclass(Config, data_fields=["value", "other"], meta_fields=[])


def test_an_attribute_called_value(tmp_path):
    tree = {"a": Config(np.arange(2), np.arange(3))}
    osl.save(tmp_path, tree)
    same(osl.load(tmp_path, tree), tree)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_devices_than_were_saved_from_give_host_arrays(tmp_path, layout, monkeypatch):
    value = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    osl.save(tmp_path, {"a": place(value, P("x", "y"))}, options=osl.WriteOptions(layout=layout))
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    loaded = osl.load(tmp_path)["a"]
    assert isinstance(loaded, np.ndarray)
    assert_same_bits(loaded, value)


def test_values_become_what_is_wanted(tmp_path):
    osl.save(tmp_path, {"step": 7, "rate": 0.5, "name": "run"})
    sharding = NamedSharding(mesh_of(x=8), P())
    loaded = osl.load(
        tmp_path,
        {
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
            "rate": np.zeros((), np.float32),
        },
    )
    assert isinstance(loaded["step"], jax.Array)
    assert loaded["step"].sharding == sharding
    assert int(loaded["step"]) == 7
    assert loaded["rate"].dtype == np.float32
    assert osl.load(tmp_path, {"step": int, "name": str}) == {"step": 7, "name": "run"}
    with pytest.raises(
        osl.DtypeMismatchError, match=r"'rate'.*expected: int, found: 0\.5 \(float\)"
    ):
        osl.load(tmp_path, {"rate": 0})
    with pytest.raises(osl.DtypeMismatchError, match="expected: a number"):
        osl.load(tmp_path, {"name": jax.ShapeDtypeStruct((), jnp.int32)})
    with pytest.raises(osl.ShapeMismatchError, match="a single value"):
        osl.load(tmp_path, {"step": jax.ShapeDtypeStruct((2,), jnp.int32)})


def test_a_number_becomes_a_numpy_scalar(tmp_path):
    osl.save(tmp_path, {"step": 7, "rate": 0.5})
    abstract = {"step": np.int64(0), "rate": np.float32(0)}
    same(osl.load(tmp_path, abstract), {"step": np.int64(7), "rate": np.float32(0.5)})


def test_keys_of_another_implementation_are_an_error(tmp_path):
    """Their data may have the same shape, and would make other numbers."""
    osl.save(tmp_path, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(osl.DtypeMismatchError, match=r"'key', expected: unsafe_rbg .* found: rbg"):
        osl.load(tmp_path, {"key": jax.random.key(0, impl="unsafe_rbg")})


def test_a_manifest_of_other_tensors_is_an_error(tmp_path):
    osl.save(tmp_path, {"a": np.arange(3), "b": np.arange(3)})
    for names, message in (("b", "'a' not found"), ("abc", "does not name.*tensor: 'c'")):
        tensors = {name: np.arange(3) for name in names}
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(osl.SafetensorsLayoutError, match=message):
            osl.load(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(), st.sampled_from(LAYOUTS), st.sampled_from([1, 100, 5 * 10**9]))
def test_every_tree_comes_back_bit_by_bit(case, layout, max_file_bytes):
    """With an abstract tree and without; NaN payloads and -0.0 too, of every dtype."""
    tree, expected = case
    options = osl.WriteOptions(layout=layout, max_file_bytes=max_file_bytes, fsync=False)
    native = jax.tree.map(_native, tree)
    with tempfile.TemporaryDirectory() as folder:
        osl.save(folder, tree, options=options)
        for loaded in (osl.load(folder), osl.load(folder, native)):
            same(loaded, native)
        assert osl.load(folder, only="*").keys() == expected.keys()


def _native(leaf):
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf


SPECS = [
    P(),
    P("x"),
    P(None, "x"),
    P("y", "x"),
    P(("x", "y")),
    P(None, ("x", "y")),
    P("x", None, "y"),
]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sharding_loads_under_any_other(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    meshes = [mesh_of(x=4, y=2), mesh_of(x=2, y=4), mesh_of(x=2, y=2), mesh_of(x=8, y=1)]
    dtypes = [np.float32, ml_dtypes.bfloat16, np.uint8, ml_dtypes.float4_e2m1fn, ml_dtypes.int4]
    saved, abstract, values = {}, {}, {}
    for number in range(data.draw(st.integers(1, 5))):
        rank = data.draw(st.integers(0, 3))
        shape = tuple(data.draw(st.sampled_from([8, 16, 24])) for _ in range(rank))
        dtype = np.dtype(data.draw(st.sampled_from(dtypes)))
        value = random_tensor(shape, np.dtype(np.uint8), number)
        value = value.view(dtype) if dtype.itemsize == 1 and dtype.kind == "u" else value % 8
        value = (
            value.astype(dtype)
            if dtype.name != "float4_e2m1fn"
            else value.astype(np.uint8).view(dtype)
        )
        values[f"t{number}"] = value
        on, spec = (
            data.draw(st.sampled_from(meshes)),
            data.draw(st.sampled_from([s for s in SPECS if len(s) <= rank])),
        )
        to, target = (
            data.draw(st.sampled_from(meshes)),
            data.draw(st.sampled_from([s for s in SPECS if len(s) <= rank])),
        )
        saved[f"t{number}"] = place(value, spec, on)
        abstract[f"t{number}"] = jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(to, target)
        )
    options = osl.WriteOptions(
        layout=data.draw(st.sampled_from(LAYOUTS)),
        max_file_bytes=data.draw(st.sampled_from([100, 5000, 5 * 10**9])),
        fsync=False,
    )
    osl.save(folder, saved, options=options)
    loaded = osl.load(folder, abstract)
    for name, value in values.items():
        assert loaded[name].sharding == abstract[name].sharding
        assert_same_bits(np.asarray(loaded[name]), value)
    if options.layout == "sharded":
        osl.consolidate(folder, options=dataclasses.replace(options, layout="hf"))
        again = folder / "again"
        osl.save(again, saved, options=dataclasses.replace(options, layout="hf"))
        names = sorted(p.name for p in again.iterdir())
        assert names == sorted(p.name for p in folder.iterdir() if p.is_file())
        for name in names:
            assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tree_without_tensors(tmp_path, layout):
    tree = {"name": "run", "steps": [1, 2], "rest": {}}
    osl.save(tmp_path, tree, options=osl.WriteOptions(layout=layout))
    assert osl.is_safetensors_checkpoint(tmp_path)
    assert osl.load(tmp_path) == tree


def test_whole_files_beside_pieces_are_no_checkpoint(tmp_path):
    tree = {"a": np.arange(4)}
    osl.save(tmp_path, tree, options=osl.WriteOptions(layout="sharded"))
    safetensors.numpy.save_file({"a": np.arange(4) + 1}, tmp_path / "model.safetensors")
    with pytest.raises(osl.InvalidManifestError, match=r"found: model\.safetensors"):
        osl.load(tmp_path)
