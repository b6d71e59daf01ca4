"""States with flax boxes between this package and Orbax: one rule for names, trees and mappings."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import safetensors.numpy
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from meshes import abstract_of, mesh_of, place
from states import same

import orbax_safetensors_layout as osl

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


class Moments(NamedTuple):
    mu: Any
    nu: Any


@flax.struct.dataclass
class QArray:
    """As qwix keeps a quantised weight, in an `nnx.Param`."""

    qvalue: Any
    scale: Any


@flax.struct.dataclass
class OnlyValue:
    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    value: Any
    other: Any


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 4, rngs=rngs)
        blocks = [nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]
        self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def array(*shape: int, start: int = 0) -> jax.Array:
    values = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    return place(values, P("x") if shape[0] % 4 == 0 else P())


def placed(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: place(leaf, P()) if isinstance(leaf, jax.Array) else leaf, tree
    )


def linen_variables() -> Any:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("x", None))
    variables = nn.Dense(4, kernel_init=init).init(jax.random.key(0), jnp.ones((2, 8)))
    return placed(variables)


def train_state(params: Any) -> TrainState:
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def model_state(*filters: Any) -> Any:
    return placed(nnx.state(Model(nnx.Rngs(0)), *filters))


def optimizer_state() -> Any:
    model = Model(nnx.Rngs(0))
    return placed(nnx.state(nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))


def params() -> dict[str, Any]:
    return {"dense": {"kernel": array(8, 4), "bias": array(4, start=9)}}


STATES = {
    "nnx_params": lambda: model_state(nnx.Param),
    "nnx_with_rngs": model_state,
    "nnx_optimizer": optimizer_state,
    "nnx_pure_dict": lambda: nnx.to_pure_dict(model_state(nnx.Param)),
    "nnx_and_step": lambda: {"model": model_state(nnx.Param), "step": 3, "rate": 0.5},
    "nnx_and_optimizer": lambda: {"m": model_state(nnx.Param), "o": optimizer_state()},
    "linen_partitioned": linen_variables,
    "linen_unboxed": lambda: nn.meta.unbox(linen_variables()),
    "train_state": lambda: train_state(params()),
    "train_state_of_boxes": lambda: train_state(linen_variables()["params"]),
    "box_of_dataclass": lambda: {"k": nnx.Param(QArray(array(4), array(4, start=9)))},
    "box_of_dict": lambda: {"k": nnx.Variable({"a": array(4), "b": array(8)})},
    "box_of_box": lambda: {"k": nnx.Param(OnlyValue(array(4)))},
    "only_value": lambda: {"k": OnlyValue(array(4))},
    "value_and_other": lambda: {"k": Pair(array(4), array(8))},
    "dict_of_value": lambda: {"k": {"value": array(4)}},
    "dict_of_tree": lambda: {"k": {"value": {"x": array(4), "y": array(8)}}},
    "named_tuple": lambda: Moments(array(4), {"z": array(8)}),
    "lists": lambda: {"l": [array(4), {"x": nnx.Param(array(8))}], "t": (array(4), None)},
    "optax_chain": lambda: placed(
        optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.ema(0.9)).init(params())
    ),
    "optax_multi": lambda: placed(
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
            {"dense": {"kernel": "a", "bias": "b"}},
        ).init(params())
    ),
    "integer_keys": lambda: {0: array(4), 1: nnx.Param(array(8))},
}


def save_orbax(path: Any, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore_orbax(path: Any, tree: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, abstract_of(tree))


def paths_of(tree: Any) -> list[str]:
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return sorted(jax.tree_util.keystr(path, simple=True, separator="/") for path in keys)


def on_two_devices(tree: Any) -> Any:
    mesh = mesh_of(jax.devices()[:2], x=2)
    return abstract_of(
        tree,
        lambda leaf: jax.sharding.NamedSharding(
            mesh, P("x") if leaf.ndim and leaf.shape[0] % 2 == 0 else P()
        ),
    )


def check_values(tree: Any, expected: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.asarray(other).dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


@pytest.fixture(scope="module", params=STATES)
def saved(request, tmp_path_factory):
    """A state, its folder, saved there by Orbax (`theirs`) and by this package (`ours`)."""
    folder, state = tmp_path_factory.mktemp(request.param), STATES[request.param]()
    save_orbax(folder / "theirs", state)
    osl.save(folder / "ours", state)
    return state, folder


def test_there_and_back_between_both_formats(saved, tmp_path):
    state, folder = saved
    osl.convert(folder / "ours", tmp_path / "orbax", format="orbax")
    same(restore_orbax(tmp_path / "orbax", state), state)
    osl.convert(folder / "theirs", tmp_path / "hf", format="hf")
    same(osl.load(tmp_path / "hf", abstract_of(state)), state)
    for first, other in (("ours", "theirs"), ("theirs", "ours")):
        assert osl.verify(folder / first, against=folder / other).ok
    two = on_two_devices(arrays_only(state))
    partly = osl.ReadOptions(strict=False)
    for path in (folder / "ours", tmp_path / "hf"):
        loaded = osl.load(path, two, options=partly)
        check_values(loaded, arrays_only(state))
        assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(loaded))


def arrays_only(tree: Any) -> Any:
    """The tree without its Python numbers, which have no sharding."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else None, tree)


def test_what_is_asked_for_without_a_tree_has_orbaxs_structure(saved):
    _, folder = saved
    with ocp.PyTreeCheckpointer() as theirs:
        expected = paths_of(theirs.restore(folder / "theirs"))
    raw = osl.load(folder / "ours")
    assert paths_of(raw) == expected
    with ocp.Checkpointer(osl.SafetensorsCheckpointHandler()) as ours:
        assert paths_of(ours.restore(folder / "ours")) == expected
        assert paths_of(ours.metadata(folder / "ours").item_metadata.tree) == expected
    same(osl.load(folder / "ours", abstract_of(raw)), raw)
    check_values(osl.load(folder / "ours", raw), raw)


FORMS = {
    "boxed": lambda state: state,
    "pure": nnx.to_pure_dict,
    "orbaxs": lambda state: jax.tree.map(lambda leaf: {"value": leaf}, nnx.to_pure_dict(state)),
}


def structs(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
@pytest.mark.parametrize("form", FORMS)
def test_an_item_is_found_with_and_without_the_level_of_a_box(tmp_path, kind, form):
    state = model_state(nnx.Param)
    ours = {"handler_registry": osl.handler_registry("default")}
    of_save = {} if kind == "orbax" else ours
    with ocp.CheckpointManager(tmp_path, **of_save) as manager:
        manager.save(0, args=ocp.args.StandardSave(FORMS[form](state)))
    for asked in FORMS.values():
        item = structs(asked(state))
        arguments = (
            ocp.args.StandardRestore(item),
            ocp.args.PyTreeRestore(
                item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
            ),
            osl.SafetensorsRestore(item),
        )
        with ocp.CheckpointManager(tmp_path, **ours) as manager:
            for args in arguments:
                same(manager.restore(0, args=args), asked(state))
        with osl.context("default"):
            restored = ocp_v1.load_checkpointables(tmp_path / "0", {"default": item})
        same(restored["default"], asked(state))


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
@pytest.mark.parametrize("leaf", ["layer.kernel", "layer.kernel.value"])
def test_one_mapping_serves_a_run_of_either_format(tmp_path, kind, leaf):
    kernel = array(8, 4)
    state = {"layer": {"kernel": nnx.Param(kernel)}}
    mapping = osl.Mapping([osl.rule(leaf, osl.tensor("model.weight").transpose())])
    save = save_orbax if kind == "orbax" else osl.save
    save(tmp_path / "step", state)
    osl.convert(tmp_path / "step", tmp_path / "hf", mapping=mapping, inverse=True, format="hf")
    exported = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    np.testing.assert_array_equal(exported["model.weight"], np.asarray(kernel).T)
    forms = (state, {"layer": {"kernel": kernel}}, {"layer": {"kernel": {"value": kernel}}})
    for tree in forms:
        same(osl.load(tmp_path / "hf", abstract_of(tree), mapping=mapping), tree)
        (written,) = mapping.unapply(tree).values()
        np.testing.assert_array_equal(np.asarray(written), np.asarray(kernel).T)
        same(mapping.apply(mapping.unapply(tree), abstract_of(tree)), tree)
        osl.save(tmp_path / "saved", tree, mapping=mapping, overwrite=True)
        same(osl.load(tmp_path / "saved", abstract_of(tree), mapping=mapping), tree)
        assert "model.weight" in mapping.explain(tmp_path / "hf", abstract_of(tree))


def test_names_in_errors_are_those_of_the_files(tmp_path):
    osl.save(tmp_path, {"head": {"bias": nnx.Param(array(4))}})
    assert list(osl.metadata(tmp_path)) == ["head.bias"]
    with pytest.raises(osl.MismatchError) as refused:
        osl.load(tmp_path, {"head": {"bias": nnx.Param(jax.ShapeDtypeStruct((8,), np.float32))}})
    assert refused.value.tensor == "head.bias"


def test_a_part_of_a_tree_is_left_out_in_any_form(tmp_path):
    state = {"k": nnx.Param(QArray(array(4), array(8))), "b": nnx.Param(array(4))}
    osl.save(tmp_path, state)
    asked = jax.ShapeDtypeStruct((8,), np.float32)
    for tree in (
        {"k": {"value": {"qvalue": ..., "scale": asked}}, "b": ...},
        {"k": {"qvalue": ..., "scale": asked}, "b": {"value": ...}},
        {"k": nnx.Param(QArray(..., asked)), "b": nnx.Param(...)},
    ):
        leaves = [leaf for leaf in jax.tree.leaves(osl.load(tmp_path, tree)) if leaf is not ...]
        np.testing.assert_array_equal(np.asarray(leaves[0]), np.arange(8.0, dtype=np.float32))


def test_another_leaf_is_not_taken_for_one_in_a_box(tmp_path):
    osl.save(tmp_path, {"self": {"weight": array(4)}})
    wrong = {"self": {"value": {"weight": jax.ShapeDtypeStruct((4,), np.float32)}}}
    with pytest.raises(osl.MismatchError, match=r"self\.value\.weight"):
        osl.load(tmp_path, wrong)
    both = {"a.value": np.ones(2, np.float32), "a": np.zeros(2, np.float32)}
    osl.save(tmp_path / "both", both)
    same(osl.load(tmp_path / "both", both), both)


LEAVES = st.one_of(
    st.integers(0, 9).map(lambda start: np.arange(start, start + 4, dtype=np.float32)),
    st.integers(-3, 3),
    st.just(0.5),
    st.none(),
)
KEYS = st.sampled_from(["a", "b", "value", "kernel", "0"])
STATEFUL = st.sampled_from(
    [
        lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        lambda: nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0))),
        lambda: optax.adamw(1e-3).init({"value": jnp.ones(3)}),
        lambda: optax.sgd(0.1, momentum=0.9).init({"w": nn.Partitioned(jnp.ones(3), ("x",))}),
    ]
).map(lambda make: make())
TREES = st.recursive(
    st.one_of(LEAVES, STATEFUL),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        inner.map(OnlyValue),
        inner.map(lambda child: nn.Partitioned(child, ())),
        st.builds(Pair, inner, inner),
        st.builds(Moments, inner, inner),
        st.builds(QArray, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_what_a_load_returns_can_be_asked_for(tmp_path_factory, tree):
    if not jax.tree.leaves(tree) or jax.tree_util.all_leaves([tree]):
        return
    path = tmp_path_factory.mktemp("any")
    osl.save(path, tree)
    check_values(osl.load(path, tree), tree)
    raw = osl.load(path)
    check_values(osl.load(path, raw), raw)
    again = osl.load(path, abstract_of(raw))
    check_values(again, raw)
