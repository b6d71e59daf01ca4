"""Leaves made by a mapping, loaded sharded: what numpy makes of the full tensors."""

import itertools
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, random_tensor, save
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mapped_llama import BF16, HEAD_DIM, HEADS, LAYERS, RULES, SPECS, WIDTH, path, tensors
from mapping_expressions import ALL_OPS, cases
from meshes import any_sharding, mesh_of
from programs import run_processes
from recording import recording

import orbax_safetensors_layout as osl

__all__ = ["path", "tensors"]  # fixtures


def any_values(data, case):
    """Operations on the values of a case, some of which change its dtype, and the dtype wanted."""
    expr, array = case.expr, np.asarray(case.array)
    for kind in data.draw(
        st.lists(st.sampled_from(["half", "float64", "scale", "add"]), max_size=2)
    ):
        dtype = {"half": BF16, "float64": np.float64}.get(kind)
        if dtype is not None:
            expr, array = expr.cast(dtype), array.astype(dtype)
        elif kind == "scale":
            expr, array = expr.scale(0.3), array * np.asarray(0.3).astype(array.dtype)
        else:
            expr, array = expr.add(3), array + np.asarray(3).astype(array.dtype)
    asked = data.draw(st.sampled_from([array.dtype, array.dtype, np.dtype(np.float16)]))
    return expr, array, asked


def check_any_load(data, folder):
    """Loads on the host and sharded, in slabs and blocks of any size: what numpy makes of it."""
    case = data.draw(cases(ALL_OPS, depth=4))
    tensors = {name: np.asarray(array) for name, array in case.tensors.items()}
    save(folder, tensors, files=data.draw(st.integers(1, 2)) if len(tensors) > 1 else 1)
    expr, value, asked = any_values(data, case)
    mapping = osl.Mapping([osl.rule("leaf", expr)], strict=False)
    options = osl.ReadOptions(
        request_bytes=data.draw(st.sampled_from([None, 4, 40, 1000])),
        memory_budget_bytes=data.draw(st.sampled_from([1, 5000, 1 << 26])),
        mmap=data.draw(st.booleans()),
    )
    loaded = osl.load(folder, mapping=mapping, options=options)["leaf"]
    assert_same_bits(loaded, value)
    loaded = osl.load(folder, {"leaf": np.empty(value.shape, asked)}, mapping=mapping)["leaf"]
    assert_same_bits(loaded, value.astype(asked))
    if asked.itemsize > 4:
        asked = np.dtype(
            np.float32
        )  # what JAX has without x64; 64 bits that do not fit are refused
    leaf = jax.ShapeDtypeStruct(value.shape, asked, sharding=any_sharding(data, value.shape))
    loaded = osl.load(folder, {"leaf": leaf}, mapping=mapping, options=options)["leaf"]
    assert loaded.sharding == leaf.sharding
    assert_same_bits(np.asarray(loaded), value.astype(asked))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_expression_under_any_sharding(tmp_path_factory, data):
    check_any_load(data, tmp_path_factory.mktemp("mapped"))


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(data=st.data())
def test_many_expressions_under_any_sharding(data):
    with tempfile.TemporaryDirectory() as folder:
        check_any_load(data, Path(folder))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_expression_of_tensors_that_are_stored_in_pieces(tmp_path_factory, data):
    case = data.draw(cases(ALL_OPS, depth=3))
    folder = tmp_path_factory.mktemp("pieces") / "saved"
    tensors = {name: np.asarray(array) for name, array in case.tensors.items()}
    arrays = {name: jax.device_put(t, any_sharding(data, t.shape)) for name, t in tensors.items()}
    osl.save(folder, arrays or {"other": np.ones(1)}, options=osl.WriteOptions(layout="sharded"))
    mapping = osl.Mapping([osl.rule("leaf", case.expr)], strict=False)
    value = np.asarray(case.array)
    leaf = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=any_sharding(data, value.shape))
    loaded = osl.load(folder, {"leaf": leaf}, mapping=mapping)["leaf"]
    assert_same_bits(np.asarray(loaded), value)


def test_processes_read_their_own_pieces_through_a_mapping(tmp_path):
    files = run_processes(
        "load_mapped_pieces.py", processes=2, devices=2, path=str(tmp_path / "saved")
    )
    assert files == [1, 1]


def mapping():
    norm = osl.tensor("model.layers.{i}.norm.weight").add(1)
    return osl.Mapping(
        [
            *RULES,
            osl.rule("layers.{i}.norm", norm),
            osl.rule("norm", osl.tensor("model.norm.weight").cast("float32").scale(2.0)),
        ]
    )


def reference(tensors):
    def of(name):
        return [tensors[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)]

    q = [t.reshape(HEADS, HEAD_DIM, WIDTH).transpose(2, 0, 1) for t in of("q_proj")]
    experts = [[of(f"experts.{e}.down")[i].T for e in range(3)] for i in range(LAYERS)]
    expected_leaves = {
        "layers.q": np.stack(q, 1),
        "layers.experts": np.stack(list(map(np.stack, experts))),
    }
    for i in range(LAYERS):
        expected_leaves[f"layers.{i}.gate"] = of("gate_up")[i][:, ::2]
        expected_leaves[f"layers.{i}.up"] = of("gate_up")[i][:, 1::2]
        expected_leaves[f"layers.{i}.norm"] = of("norm")[i] + BF16.type(1)
    expected_leaves["norm"] = tensors["model.norm.weight"].astype(np.float32) * np.float32(2)
    return expected_leaves


@pytest.mark.parametrize("split", SPECS)
def test_a_model_under_a_sharding(path, tensors, split):
    mesh = mesh_of(x=2, y=2)
    expected = reference(tensors)
    abstract = {
        name: jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(mesh, SPECS[split](value.ndim))
        )
        for name, value in expected.items()
    }
    loaded = osl.load(path, abstract, mapping=mapping())
    for name, value in expected.items():
        assert_same_bits(np.asarray(loaded[name]), value)


def test_a_shard_reads_its_own_bytes(path, tensors):
    device = jax.devices()[0]
    mesh = mesh_of(x=8)
    local = NamedSharding(mesh, P(None, None, "x"))
    assert device in local.addressable_devices
    struct = jax.ShapeDtypeStruct((WIDTH, LAYERS, HEADS, HEAD_DIM), BF16, sharding=local)
    options = osl.ReadOptions(latency_seconds={"local": 0.0})
    whole = osl.plan_load(path, {"layers.q": struct}, mapping=mapping_of_q(), options=options)
    assert whole.cost().read_bytes == whole.cost().needed_bytes == struct.size * 2
    cluster = jax.sharding.AbstractMesh((8,), ("x",))
    for process in range(8):
        sharding = NamedSharding(cluster, P(None, None, "x"))
        half = jax.ShapeDtypeStruct(struct.shape, BF16, sharding=sharding)
        cost = osl.plan_load(
            path,
            {"layers.q": half},
            mapping=mapping_of_q(),
            options=options,
            process_index=process,
            process_count=8,
        ).cost()
        assert cost.read_bytes == cost.needed_bytes == struct.size * 2 // 8


def mapping_of_q():
    return osl.Mapping([mapping().rules[0]], strict=False)


def test_nested_trees_and_placeholders(path, tensors):
    expected = reference(tensors)
    tree = {
        "layers": {
            "q": ...,
            "experts": jax.ShapeDtypeStruct(expected["layers.experts"].shape, BF16),
            **{
                str(i): {"gate": ..., "up": ..., "norm": np.zeros(WIDTH, BF16)}
                for i in range(LAYERS)
            },
        },
        "norm": ...,
    }
    loaded = osl.load(path, tree, mapping=mapping())
    assert loaded["norm"] is ...
    assert_same_bits(loaded["layers"]["1"]["norm"], expected["layers.1.norm"])
    assert_same_bits(np.asarray(loaded["layers"]["experts"]), expected["layers.experts"])


def test_a_placeholder_stands_for_all_below_it(path, tensors):
    shape = reference(tensors)["norm"].shape
    for skipped in (..., {"q": ..., "experts": ..., **{str(i): ... for i in range(LAYERS)}}):
        tree = {"layers": skipped, "norm": np.zeros(shape, np.float32)}
        with recording() as storage:
            loaded = osl.load(path, tree, mapping=mapping())
        assert loaded["layers"] == skipped
        assert_same_bits(loaded["norm"], reference(tensors)["norm"])
        assert sum(b - a for _, a, b in storage.tensor_ranges()) == 2 * WIDTH
    boxed = {"layers": ..., "norm": nnx.Param(...)}
    assert osl.load(path, boxed, mapping=mapping())["layers"] is ...


def test_many_placeholders(tmp_path):
    """Each leaf against each placeholder would take long."""
    weights = {f"w.{number}": np.empty((0, 1), np.uint8) for number in range(10_000)}
    path = save(tmp_path, weights | {"step": np.ones(1)})
    rules = [osl.rule("layers.{i}.w", osl.tensor("w.{i}")), osl.rule("step", osl.tensor("step"))]
    of_layers = {str(number): ... for number in range(250_000)}
    tree = {"layers": {"7": of_layers["7"]}, "others": of_layers, "step": np.empty(1)}
    began = time.process_time()
    loaded = osl.load(path, tree, mapping=osl.Mapping(rules, strict=False))
    assert time.process_time() - began < 5  # 1 s; 10 s and more with each against each
    assert loaded["layers"]["7"] is ...
    assert_same_bits(loaded["step"], np.ones(1))
    with pytest.raises(osl.MappingError, match=r"no leaf takes tensor 'w\.0', nor 9998 more"):
        osl.load(path, tree, mapping=osl.Mapping(rules))  # 77 is not below 7


def test_a_mapping_says_itself_which_tensors_may_be_left(path):
    """Whatever `ReadOptions.strict` is."""
    rules = mapping().rules[:1]
    options = osl.ReadOptions(strict=True)
    with pytest.raises(osl.MappingError, match="no rule uses tensor"):
        osl.load(path, mapping=osl.Mapping(rules), options=osl.ReadOptions(strict=False))
    for left in ({"strict": False}, {"ignore": ["*"]}):
        assert [*osl.load(path, mapping=osl.Mapping(rules, **left), options=options)] == [
            "layers.q"
        ]


def test_the_model_side(path, tensors):
    expected = reference(tensors)
    tree = mapping().abstract(path)
    assert set(tree) == {"layers", "norm"}
    assert tree["layers"]["0"]["gate"].shape == (WIDTH, WIDTH)
    loaded = osl.load(path, tree, mapping=mapping())
    assert_same_bits(np.asarray(loaded["layers"]["q"]), expected["layers.q"])
    described = osl.metadata(path, mapping=mapping())
    assert {name: value.shape for name, value in expected.items()} == {
        name: tensor.shape for name, tensor in described.items()
    }
    assert "layers.q" in mapping().explain(path, tree)


def test_an_error_of_a_function_names_the_leaf(path):
    def function(array):
        raise ZeroDivisionError("by the user")

    expr = osl.opaque(function, osl.tensor("model.norm.weight"), shape=(1,), dtype="float32")
    rules = osl.Mapping([osl.rule("odd.leaf", expr)], strict=False)
    with pytest.raises(ZeroDivisionError, match="by the user") as caught:
        osl.load(path, mapping=rules)
    assert caught.value.__notes__ == ["In a function that makes leaf 'odd.leaf'."]


def test_inputs_of_one_shape_of_which_one_is_converted(tmp_path):
    """It is cut into slabs, the other is not."""
    a = random_tensor((256, 64), np.uint8, 0) % 16
    tensors = {"a": a.astype(ml_dtypes.uint4), "b": random_tensor((256, 64), np.uint8, 1)}
    osl.save(tmp_path / "saved", tensors)
    for order in ("ab", "ba"):
        expr = osl.opaque(
            lambda x, y: x.astype(np.uint8) * 2 + y.astype(np.uint8),
            *(osl.tensor(name) for name in order),
            shape=(256, 64),
            dtype="uint8",
        )
        mapping = osl.Mapping([osl.rule("leaf", expr)])
        options = osl.ReadOptions(request_bytes=1024)
        loaded = osl.load(tmp_path / "saved", mapping=mapping, options=options)["leaf"]
        x, y = (tensors[name].astype(np.uint8) for name in order)
        assert_same_bits(loaded, x * 2 + y)


def test_a_name_is_no_mapping(tmp_path, path):
    with pytest.raises(TypeError, match=r"mapping='llama:plain' is not an osl.Mapping"):
        osl.load(path, mapping="llama:plain")
    with pytest.raises(TypeError, match=r"is not an osl\.Mapping"):
        osl.save(tmp_path / "out", {"a": np.ones(2)}, mapping="llama:plain")


def test_everything_wrong_in_one_error(path, tensors):
    shapes = {name: value.shape for name, value in reference(tensors).items()}
    tree = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}
    tree["layers.q"] = jax.ShapeDtypeStruct((WIDTH, LAYERS, HEADS + 1, HEAD_DIM), BF16)
    tree["layers.nrom"] = tree.pop("norm")
    with pytest.raises(osl.MappingError) as caught:
        osl.load(path, tree, mapping=mapping())
    text = str(caught.value)
    assert "layers.q" in text
    assert f"{HEADS + 1}" in text
    assert "layers.nrom" in text
    assert "model.norm.weight" in text


@pytest.mark.parametrize("kinds", list(itertools.product(["host", "device"], repeat=3)))
@pytest.mark.parametrize("name", ["cast", "plain"])
def test_tied_leaves_share_no_memory_that_can_be_written(tmp_path, kinds, name):
    value = random_tensor((64, 16), np.dtype(np.float32)) if name == "plain" else np.ones((64, 16))
    path = save(tmp_path, {"w": value.astype(np.float32)})
    expr = osl.tensor("w") if name == "plain" else osl.tensor("w").cast("bfloat16")
    others = [osl.rule(f"l{number}", None, tied_to="l0") for number in (1, 2)]
    mapping = osl.Mapping([osl.rule("l0", expr), *others])
    dtype = mapping.abstract(path)["l0"].dtype
    struct = jax.ShapeDtypeStruct((64, 16), dtype, sharding=SingleDeviceSharding(jax.devices()[0]))
    abstract = {"host": np.zeros((64, 16), dtype), "device": struct}
    loaded = osl.load(path, {f"l{n}": abstract[k] for n, k in enumerate(kinds)}, mapping=mapping)
    expected = value.astype(np.float32).astype(dtype)
    for number, kind in enumerate(kinds):
        if kind == "host":
            loaded[f"l{number}"][:] = number + 2
    for number, kind in enumerate(kinds):
        held = np.asarray(loaded[f"l{number}"])
        assert_same_bits(held, expected if kind == "device" else np.full_like(held, number + 2))
    for number, kind in enumerate(kinds):  # memory that is given away is not the others'
        if kind == "device":
            jax.jit(lambda x: x + 1, donate_argnums=0)(loaded.pop(f"l{number}")).block_until_ready()
            for left in loaded.values():
                if isinstance(left, jax.Array):
                    assert_same_bits(np.asarray(left), expected)


@pytest.mark.parametrize("kind", ["plain", "stacked", "decoded"])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x"), None], ids=str)
def test_tied_leaves_are_read_once(tmp_path, kind, spec):
    tensors = {f"t.{i}": random_tensor((16, 64), np.float32, i) for i in range(8)}
    path = save(tmp_path, tensors)
    expr, value = osl.tensor("t.0").transpose(), tensors["t.0"].T
    if kind != "plain":
        expr, value = osl.stack(osl.tensor("t.{i}"), "i"), np.stack([*tensors.values()])
    if kind == "decoded":
        expr = osl.opaque(np.flip, expr, shape=(8, 16, 64), dtype="float32")
        value = np.flip(value)
    rules = [
        osl.rule("head", expr, tied_to="embed"),
        osl.rule("embed", expr),
        osl.rule("again", None, tied_to="embed"),
    ]
    mapping = osl.Mapping(rules, strict=False)
    mesh = mesh_of(x=8)
    leaf = np.zeros(value.shape, value.dtype)
    if spec is not None:
        sharding = NamedSharding(mesh, spec)
        leaf = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    tree = dict.fromkeys(("head", "embed", "again"), leaf)
    plan = osl.plan_load(path, tree, mapping=mapping)
    with recording() as storage:
        loaded = osl.load(path, tree, mapping=mapping)
    for array in loaded.values():
        assert_same_bits(np.asarray(array), value)
    once = osl.plan_load(path, {"embed": leaf}, mapping=mapping)
    assert sum(b - a for _, a, b in storage.tensor_ranges()) == plan.cost().read_bytes
    assert plan.cost().read_bytes == once.cost().read_bytes
    if spec is None:
        loaded["head"][...] = 0
        assert_same_bits(loaded["embed"], value)


@pytest.mark.parametrize("step", [1, -1])
def test_pieces_that_cross_one_another(tmp_path, step):
    """Both axes of the leaf walk along one of the tensor: a Hankel, or a Toeplitz matrix."""
    tensor = np.arange(4, dtype=np.float32)
    path = save(tmp_path, {"t": tensor})
    rows = [0, 1, 1, 2, 2, 3] if step > 0 else [1, 0, 2, 1, 3, 2]
    mapping = osl.Mapping([osl.rule("leaf", osl.tensor("t").take(0, rows).reshape(3, 2))])
    assert_same_bits(osl.load(path, mapping=mapping)["leaf"], tensor[rows].reshape(3, 2))


@pytest.mark.parametrize(("shape", "axis"), [((2000, 64), 0), ((512, 512), 1)])
def test_a_permutation_is_read_with_its_neighbours_in_the_file(tmp_path, shape, axis):
    """Any two indices are equally spaced: that is no reason to read them as one strided piece."""
    value = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    save(tmp_path, {"w": value})
    order = np.random.default_rng(0).permutation(shape[axis])
    mapping = osl.Mapping([osl.rule("leaf", osl.tensor("w").take(axis, order.tolist()))])
    leaf = np.empty_like(value)
    cost = osl.plan_load(tmp_path, {"leaf": leaf}, mapping=mapping).cost()
    assert cost.read_bytes == cost.needed_bytes == value.nbytes
    assert cost.requests <= 16
    loaded = osl.load(tmp_path, {"leaf": leaf}, mapping=mapping)["leaf"]
    assert_same_bits(loaded, np.take(value, order, axis))
