"""Loading into every kind of tree and leaf, and what is refused."""

from __future__ import annotations

import dataclasses

import flax.core
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same_bits, random_tensor, save
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from meshes import mesh_of
from recording import recording

import orbax_safetensors_layout as osl

F32 = np.dtype(np.float32)


@pytest.fixture
def tensors():
    return {
        "layers.0.kernel": random_tensor((8, 4), F32, 1),
        "layers.0.bias": random_tensor((4,), F32, 2),
        "layers.1.kernel": random_tensor((4, 16), F32, 3),
        "layers.1.bias": random_tensor((16,), F32, 4),
        "step": np.array(7, np.int32),
    }


@pytest.fixture
def path(tmp_path, tensors):
    return save(tmp_path / "ckpt", tensors, files=2)


def sds(shape, dtype=F32, **kwargs):
    return jax.ShapeDtypeStruct(shape, dtype, **kwargs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: object
    bias: object = None


def test_containers_come_back_as_they_were(path, tensors):
    tree = {
        "layers": [
            Dense(kernel=sds((8, 4)), bias=sds((4,))),
            Dense(kernel=sds((4, 16)), bias=...),
        ],
        "step": int,
    }
    loaded = osl.load(path, tree)
    assert isinstance(loaded["layers"], list)
    assert isinstance(loaded["layers"][0], Dense)
    assert_same_bits(loaded["layers"][0].kernel, tensors["layers.0.kernel"])
    assert loaded["layers"][1].bias is ...
    assert loaded["step"] == 7
    assert type(loaded["step"]) is int


def test_optional_leaves_stay_none(path, tensors):
    loaded = osl.load(path, {"layers": [Dense(kernel=sds((8, 4)), bias=None)]})
    assert loaded["layers"][0].bias is None


def test_placeholders_read_nothing(path):
    placeholder = {"layers.0.kernel": ..., "layers.0.bias": sds((4,))}
    assert osl.plan_load(path, placeholder).cost().needed_bytes == 16


def test_frozen_dict_and_train_state(path, tensors):
    params = flax.core.freeze({"layers": {"0": {"kernel": sds((8, 4)), "bias": sds((4,))}}})
    loaded = osl.load(path, params)
    assert isinstance(loaded, flax.core.FrozenDict)
    assert_same_bits(loaded["layers"]["0"]["kernel"], tensors["layers.0.kernel"])

    state = TrainState(
        step=..., apply_fn=None, params={"w": sds((2,))}, tx=optax.sgd(1.0), opt_state=(...,)
    )
    weights = {"params.w": np.array([1, 2], F32)}
    loaded = osl.load(save(path.parent / "state", weights), state)
    assert isinstance(loaded, TrainState)
    assert_same_bits(loaded.params["w"], weights["params.w"])


@pytest.mark.parametrize(
    "leaf", [np.zeros(3), jax.random.key(0, impl="rbg"), object()], ids=["shape", "key", "kind"]
)
def test_errors_have_the_names_of_the_metadata(tmp_path, leaf):
    osl.save(tmp_path, {"head": {"bias": nnx.Param(jax.random.key(0))}})
    (name,) = osl.metadata(tmp_path)
    with pytest.raises((osl.MismatchError, TypeError), match=f"'{name}'"):
        osl.load(tmp_path, {"head": {"bias": nnx.Param(leaf)}})


def test_nnx_state_names_have_no_box(path, tensors):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            layers = [nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 16, rngs=rngs)]
            self.layers = nnx.List(layers) if hasattr(nnx, "List") else layers

    model = Model(nnx.Rngs(0))
    state = nnx.state(model)
    loaded = osl.load(path, jax.eval_shape(lambda: state))
    assert isinstance(loaded, nnx.State)
    nnx.update(model, loaded)
    assert_same_bits(model.layers[1].kernel[...], tensors["layers.1.kernel"])


def test_a_box_name_in_the_file_wins(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        value: object

    both = {"a.value": np.ones(2, F32), "a": np.zeros(2, F32)}
    loaded = osl.load(save(tmp_path, both), {"a": Box(sds((2,)))})
    assert_same_bits(loaded["a"].value, both["a.value"])


def test_a_box_and_a_key_of_its_name(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        value: object

    tree = {"a": Box(jnp.zeros(2)), "a.value": jnp.ones(2)}
    osl.save(tmp_path / "saved", tree)
    loaded = osl.load(tmp_path / "saved", tree)
    assert_same_bits(loaded["a"].value, np.zeros(2, F32))
    assert_same_bits(loaded["a.value"], np.ones(2, F32))


def test_concrete_arrays_are_templates(path, tensors):
    sharding = NamedSharding(mesh_of(a=4, b=2), PartitionSpec("a", "b"))
    template = jax.device_put(jnp.zeros((8, 4)), sharding)
    host = np.zeros((4, 16), F32)
    tree = {"layers.0.kernel": template, "layers.1.kernel": host}
    loaded = osl.load(path, tree)
    assert loaded["layers.0.kernel"].sharding == sharding
    assert_same_bits(loaded["layers.0.kernel"], tensors["layers.0.kernel"])
    assert isinstance(loaded["layers.1.kernel"], np.ndarray)
    assert_same_bits(loaded["layers.1.kernel"], tensors["layers.1.kernel"])
    assert not host.any()


def test_orbax_restore_args(path, tensors):
    axes = PartitionSpec(None, "b")
    tree = {
        "layers.0.kernel": ocp.ArrayRestoreArgs(
            mesh=mesh_of(a=4, b=2), mesh_axes=axes, dtype=jnp.bfloat16, global_shape=(8, 4)
        ),
        "layers.0.bias": ocp.ArrayRestoreArgs(sharding=SingleDeviceSharding(jax.devices()[2])),
        "layers.1.bias": ocp.RestoreArgs(restore_type=np.ndarray),
        "step": ocp.RestoreArgs(restore_type=int),
        "layers.1.kernel": ocp.RestoreArgs(restore_type=jax.Array),
    }
    loaded = osl.load(path, tree)
    kernel = loaded["layers.0.kernel"]
    assert kernel.sharding == NamedSharding(mesh_of(a=4, b=2), axes)
    assert_same_bits(kernel, tensors["layers.0.kernel"].astype(ml_dtypes.bfloat16))
    assert loaded["layers.1.kernel"].is_fully_replicated
    assert loaded["layers.0.bias"].devices() == {jax.devices()[2]}
    assert isinstance(loaded["layers.1.bias"], np.ndarray)
    assert loaded["step"] == 7


def test_a_subset_of_the_devices(path, tensors):
    few = mesh_of(jax.devices()[2:4], x=-1)
    sharding = NamedSharding(few, PartitionSpec("x"))
    array = osl.load(path, {"layers.0.kernel": sds((8, 4), sharding=sharding)})["layers.0.kernel"]
    assert array.devices() == set(jax.devices()[2:4])
    assert_same_bits(array, tensors["layers.0.kernel"])


def test_memory_kind(path, tensors):
    sharding = NamedSharding(mesh_of(a=4, b=2), PartitionSpec("a"), memory_kind="pinned_host")
    array = osl.load(path, {"layers.0.kernel": sds((8, 4), sharding=sharding)})["layers.0.kernel"]
    assert array.sharding.memory_kind == "pinned_host"
    assert_same_bits(array, tensors["layers.0.kernel"])


def test_format(path, tensors):
    sharding = SingleDeviceSharding(jax.devices()[0])
    layout_asked = Format(Layout(major_to_minor=(1, 0)), sharding)
    array = osl.load(path, {"layers.0.kernel": sds((8, 4), sharding=layout_asked)})[
        "layers.0.kernel"
    ]
    assert array.format.layout.major_to_minor == (1, 0)
    assert_same_bits(array, tensors["layers.0.kernel"])


def test_formats_in_host_memory(path, tensors):
    name = "layers.0.kernel"
    sharding = NamedSharding(mesh_of(a=4, b=2), PartitionSpec("a"), memory_kind="pinned_host")
    in_order = sds((8, 4), sharding=Format(Layout(major_to_minor=(0, 1)), sharding))
    array = osl.load(path, {name: in_order})[name]
    assert array.sharding.memory_kind == "pinned_host"
    assert_same_bits(array, tensors[name])
    other = sds((8, 4), sharding=Format(Layout(major_to_minor=(1, 0)), sharding))
    with pytest.raises(osl.MismatchError, match=r"Leave out the layout, or the memory kind"):
        osl.load(path, {name: other})


def test_only_reads_what_the_patterns_name(path, tensors):
    loaded = osl.load(path, only="layers.{0..0}.*")
    assert sorted(loaded) == ["layers.0.bias", "layers.0.kernel"]
    plan = osl.plan_load(path, only=["step", "layers.1.bias"])
    assert plan.cost().read_bytes == 4 + 64
    with pytest.raises(osl.MissingTensorError, match="matches no tensor"):
        osl.load(path, only="nothing.*")
    with pytest.raises(ValueError, match="neither an abstract tree nor"):
        osl.load(path, {"step": int}, only="step")


@pytest.mark.parametrize("tree", ["layers.*", sds((8, 4))], ids=["pattern", "leaf"])
def test_a_leaf_without_a_name(path, tree):
    with pytest.raises(osl.MissingTensorError, match=r"or patterns by `only=`"):
        osl.load(path, tree)


def test_all_missing_names_are_reported_together(path):
    tree = {"layers.0.kernels": sds((8, 4)), "layers.0.bias": sds((4,)), "gone": sds(())}
    with pytest.raises(osl.MissingTensorError) as caught:
        osl.load(path, tree)
    text = str(caught.value)
    assert "Tensor 'layers.0.kernels' not found" in text
    assert "'layers.0.kernel'" in text
    assert "Tensor 'gone' not found" in text
    assert isinstance(caught.value, KeyError)


def test_a_prefix_too_much_or_too_little_is_named(path, tmp_path):
    leaves = {"kernel": sds((8, 4)), "bias": sds((4,))}
    with pytest.raises(osl.MissingTensorError) as caught:
        osl.load(path, {"params": {"layers": [leaves]}})
    assert caught.value.hint == (
        "The checkpoint has the names without 'params.': leave it out, as tree['params'] does."
    )
    with pytest.raises(osl.MissingTensorError) as caught:
        osl.load(path, leaves)
    assert caught.value.hint == (
        "The checkpoint has the names with 'layers.0.' or 'layers.1.' before them:"
        " give {'layers': {'0': tree}} or {'layers': {'1': tree}}."
    )


def test_all_shape_mismatches_are_reported_together(path):
    tree = {"layers.0.kernel": sds((4, 8)), "layers.0.bias": sds((5,)), "step": sds((), np.int32)}
    with pytest.raises(osl.ShapeMismatchError) as caught:
        osl.load(path, tree)
    text = str(caught.value)
    assert "Shape mismatch" in text
    assert "'layers.0.kernel', expected: (4, 8) (the abstract tree), found: (8, 4)" in text
    assert "'layers.0.bias'" in text
    assert ".safetensors" in text


def test_indivisible_sharding_is_named(path):
    sharding = NamedSharding(mesh_of(a=4, b=2), PartitionSpec(None, ("a", "b")))
    with pytest.raises(osl.MismatchError) as caught:
        osl.load(path, {"layers.0.kernel": sds((8, 4), sharding=sharding)})
    assert "'layers.0.kernel'" in str(caught.value)
    assert "divide" in str(caught.value)


def test_strict_refuses_what_the_tree_does_not_name(path):
    options = osl.ReadOptions(strict=True)
    with pytest.raises(osl.UnexpectedTensorError) as caught:
        osl.load(path, {"step": int}, options=options)
    for name in ("layers.0.bias", "layers.1.kernel"):
        assert repr(name) in str(caught.value)
    assert "Put `...` for" in str(caught.value)
    for rest in ({"layers": ...}, {"layers": [..., {"kernel": ..., "bias": ...}]}):
        assert osl.load(path, {**rest, "step": int}, options=options)["step"] == 7
    with pytest.raises(osl.MissingTensorError, match="'stop' not found"):
        osl.load(path, {"stop": int}, options=options)


def test_strict_with_many_placeholders(tmp_path):
    count = 20_000  # each tensor against each placeholder would take long
    names = [f"layers.{number}.w" for number in range(count)]
    save(tmp_path, {name: np.empty((0, 1), np.uint8) for name in names} | {"step": np.zeros(1)})
    tree = {"layers": dict.fromkeys(map(str, range(count)), ...), "step": np.empty(1)}
    options = osl.ReadOptions(strict=True)
    assert osl.load(tmp_path, tree, options=options)["layers"]["7"] is ...
    del tree["layers"]["77"]  # not below "7"
    with pytest.raises(osl.UnexpectedTensorError, match=r"'layers\.77\.w'"):
        osl.load(tmp_path, tree, options=options)


def test_a_leaf_that_says_nothing_is_refused(path):
    with pytest.raises(TypeError, match=r"'layers\.0\.bias'.*object"):
        osl.load(path, {"layers.0.bias": object()})
    with pytest.raises(TypeError, match=r"'layers\.0\.bias'.*type"):
        osl.load(path, {"layers.0.bias": np.float32})


def test_a_tensor_is_no_string(path):
    with pytest.raises(osl.DtypeMismatchError, match="the value is not of type str"):
        osl.load(path, {"step": "a string"})


def test_partial_sums_are_not_loaded(path):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = mesh_of(a=4, b=2, axis_types=explicit)
    for over in (mesh, mesh.abstract_mesh):
        sharding = NamedSharding(over, PartitionSpec("b", None, unreduced={"a"}))
        tree = {"layers": [{"kernel": sds((8, 4), sharding=sharding)}]}
        with pytest.raises(osl.MismatchError, match="partial sums") as caught:
            osl.plan_load(path, tree)
        assert caught.value.tensor == "layers.0.kernel"


def test_typed_keys_need_their_data(path):
    key = jax.eval_shape(lambda: jax.random.key(0))
    with pytest.raises(osl.ShapeMismatchError, match=r"expected: \(2,\) \(the abstract tree\)"):
        osl.load(path, {"step": key})


def test_an_abstract_mesh_can_be_planned_but_not_loaded(path):
    abstract = AbstractMesh((4,), ("x",))
    leaf = sds((8, 4), sharding=NamedSharding(abstract, PartitionSpec("x")))
    assert osl.plan_load(path, {"layers.0.kernel": leaf}).cost().needed_bytes == 128
    with recording() as storage, pytest.raises(osl.MismatchError) as caught:
        osl.load(path, {"layers.0.kernel": leaf})
    assert caught.value.tensor == "layers.0.kernel"
    assert "names no devices" in str(caught.value)
    assert "jax.set_mesh" in str(caught.value)
    assert not storage.tensor_ranges()


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_shardings_over_an_abstract_mesh_find_the_mesh_that_is_set(path, tensors, memory_kind):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = mesh_of(a=4, b=2, axis_types=explicit)
    with jax.set_mesh(mesh):
        # What jax.eval_shape gives where mesh axes are explicit.
        sharding = NamedSharding(
            mesh.abstract_mesh, PartitionSpec("a", "b"), memory_kind=memory_kind
        )
        abstract = {"layers.0.kernel": sds((8, 4), sharding=sharding)}
        if not hasattr(jax.sharding, "get_mesh"):  # jax 0.7: nobody may ask which mesh is set
            with pytest.raises(osl.MismatchError, match="names no devices"):
                osl.load(path, abstract)
            return
        array = osl.load(path, abstract)["layers.0.kernel"]
    assert array.sharding.spec == PartitionSpec("a", "b")
    assert memory_kind in (None, array.sharding.memory_kind)
    assert len(array.addressable_shards) == 8
    assert_same_bits(array, tensors["layers.0.kernel"])


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b")])
def test_a_transfer_guard_against_implicit_transfers(path, tensors, spec):
    sharding = NamedSharding(mesh_of(a=4, b=2), PartitionSpec(*spec))
    tree = {"layers.0.kernel": sds((8, 4), sharding=sharding)}
    with jax.transfer_guard("disallow"):
        array = osl.load(path, tree)["layers.0.kernel"]
    assert_same_bits(array, tensors["layers.0.kernel"])


def test_a_transfer_guard_against_implicit_transfers_of_recorded_numbers(tmp_path):
    osl.save(tmp_path / "x", {"step": 7, "w": np.arange(4.0, dtype=np.float32)})
    tree = {"step": sds((), np.int32), "w": sds((4,), np.float32)}
    with jax.transfer_guard("disallow"):
        loaded = osl.load(tmp_path / "x", tree)
        planned = osl.plan_load(tmp_path / "x", tree)
    assert_same_bits(loaded["step"], np.int32(7))
    assert planned.needed_bytes == 16
    with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="Disallowed"):
        osl.load(tmp_path / "x", tree)


def test_a_foreign_byte_order_means_the_number(path):
    loaded = osl.load(path, {"step": sds((), np.dtype(">i4"))})
    assert loaded["step"] == 7
    template = {"layers.0.bias": np.zeros(4, ">f4")}
    np.testing.assert_array_equal(
        osl.load(path, template)["layers.0.bias"],
        osl.load(path, only="layers.0.bias")["layers.0.bias"],
    )


def test_a_sharding_of_more_dimensions_than_the_tensor(path):
    sharding = NamedSharding(mesh_of(a=4, b=2), PartitionSpec("a"))
    with pytest.raises(osl.MismatchError, match="does not fit") as caught:
        osl.load(path, {"step": ocp.ArrayRestoreArgs(sharding=sharding)})
    assert caught.value.tensor == "step"


@pytest.mark.parametrize("path_of", [str, lambda p: p.as_uri(), lambda p: str(p).encode()])
def test_paths_with_spaces(tmp_path, tensors, path_of):
    path = save(tmp_path / "a model ü", tensors)
    assert osl.load(path_of(path), {"step": int}) == {"step": 7}


def test_progress_reports_every_byte(path, tensors):
    seen: list[osl.Progress] = []
    osl.load(path, options=osl.ReadOptions(progress=seen.append))
    assert {p.tensor for p in seen} == set(tensors)
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


def test_progress_bar(path, capfd):
    osl.load(path, options=osl.ReadOptions(progress=True))
    assert "100%" in capfd.readouterr().err


def test_options_are_checked():
    with pytest.raises(ValueError, match="memory_budget_bytes must be a positive integer"):
        osl.ReadOptions(memory_budget_bytes=0)
    classes = r"latency_seconds must be a dict of storage classes \(local, .*floppy"
    with pytest.raises(ValueError, match=classes):
        osl.ReadOptions(latency_seconds={"floppy": 1.0})
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="latency_seconds"):
            osl.ReadOptions(latency_seconds={"local": seconds})
    with pytest.raises(ValueError, match="bandwidth_bytes_per_second"):
        osl.ReadOptions(bandwidth_bytes_per_second={"local": 0.0})
    osl.ReadOptions(latency_seconds={"local": np.float32(0)})
    for wrong in (
        {"memory_budget_bytes": None},
        {"latency_seconds": 0.01},
        {"bandwidth_bytes_per_second": {"local": "1 GB/s"}},
        {"progress": "yes"},
    ):
        with pytest.raises(ValueError, match=rf"^ReadOptions\.{next(iter(wrong))}"):
            osl.ReadOptions(**wrong)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, np.array(7, np.int64), 7),
        (int, np.array(3.0, np.float32), 3),
        (float, np.array(2.5, np.float16), 2.5),
        (float, np.array(7, np.int8), 7.0),
        (bool, np.array(1, np.int32), True),
        (int, np.array(3.7, np.float32), None),
        (int, np.array(np.nan, np.float32), None),
        (int, np.array(np.inf, np.float32), None),
        (bool, np.array(5, np.int64), None),
        (float, np.array(2**60 + 1, np.int64), None),
        (int, np.array(1j, np.complex64), None),
    ],
)
def test_python_scalars_hold_the_value_or_refuse(tmp_path, kind, value, expected):
    path = save(tmp_path, {"t": value})
    for template in (kind, kind(0)):
        if expected is None:
            with pytest.raises(osl.DtypeMismatchError, match="the value is no") as caught:
                osl.load(path, {"t": template})
            assert (caught.value.tensor, bool(caught.value.file)) == ("t", True)
        else:
            loaded = osl.load(path, {"t": template})["t"]
            assert (loaded, type(loaded)) == (expected, kind)


def test_a_nan_is_a_float(tmp_path):
    loaded = osl.load(save(tmp_path, {"t": np.array(np.nan, np.float32)}), {"t": float})
    assert np.isnan(loaded["t"])


def test_a_file_can_be_loaded_alone(path):
    first = sorted(path.glob("*.safetensors"))[0]
    assert set(osl.load(first)) < set(osl.metadata(path))
    assert osl.is_safetensors_checkpoint(first)
    assert osl.is_safetensors_checkpoint(path)
    assert not osl.is_safetensors_checkpoint(path / "nowhere")


def test_metadata(path, tensors):
    metadata = osl.metadata(path)
    assert {k: (v.shape, v.dtype, v.nbytes) for k, v in metadata.items()} == {
        k: (v.shape, v.dtype, v.nbytes) for k, v in tensors.items()
    }
    assert metadata["step"].file.startswith(str(path))


def test_metadata_is_an_abstract_tree_of_host_arrays(path, tensors):
    for name, value in osl.load(path, osl.metadata(path)).items():
        assert isinstance(value, np.ndarray)
        assert_same_bits(value, tensors[name])


@pytest.mark.parametrize("abstract", [0.0, np.zeros(2)])
def test_an_integer_of_more_digits_than_python_prints_is_refused_by_name(tmp_path, abstract):
    osl.save(tmp_path, {"v": 10**5000})
    with pytest.raises(osl.MismatchError, match=r"'v'.*an integer of 16610 bits"):
        osl.load(tmp_path, {"v": abstract})


def test_a_tree_of_other_names_is_told_of_mappings(tmp_path):
    folder = save(tmp_path / "hf", {f"model.{n}.weight": np.ones(2, np.float32) for n in range(5)})
    leaf = jax.ShapeDtypeStruct((2,), np.float32)
    with pytest.raises(osl.MissingTensorError, match=r"'model.{i}.weight'. A mapping .*mapping="):
        osl.load(folder, {"layers": {"norm": leaf}})
    with pytest.raises(osl.MissingTensorError) as caught:
        osl.load(folder, {"model.0.weight": leaf, "norm": leaf})
    assert "mapping=" not in str(caught.value)


def test_a_slip_in_a_name_is_told_with_the_nearest(tmp_path):
    names = ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up.weight"]
    folder = save(tmp_path / "hf", {name: np.ones(2, np.float32) for name in names})
    with pytest.raises(osl.MissingTensorError, match=r"nearest names are 'model\.norm\.weight'"):
        osl.load(folder, {"model.nrom.weight": jax.ShapeDtypeStruct((2,), np.float32)})


def test_a_forgotten_mapping_is_one_sentence(tmp_path):
    layers = [f"model.layers.{i}.{n}.weight" for i in range(3) for n in ("q", "k", "v", "up")]
    names = [*layers, "model.norm.weight", "lm_head.weight"]
    folder = save(tmp_path / "hf", {name: np.ones(2, np.float32) for name in names})
    leaf = jax.ShapeDtypeStruct((2,), np.float32)
    layer = {name: {"kernel": leaf} for name in ("q", "k", "v", "up")}
    tree = {"layers": [layer] * 3, "norm": {"scale": leaf}, "head": {"kernel": leaf}}
    for known in ({}, {"lm_head.weight": leaf}):  # one name may be right
        with pytest.raises(osl.MissingTensorError) as caught:
            osl.load(folder, tree | known)
        (text,) = str(caught.value).splitlines()
        assert text.startswith(f"14 of the {14 + len(known)} leaves have names that no tensor has:")
        assert "'layers.{i}.k.kernel', 'layers.{i}.q.kernel', " in text
        assert "The checkpoint has 'lm_head.weight', 'model.layers.{i}.k.weight', " in text
        assert "osl.families.mapping(path)" in text
