"""`Mapping.apply` and `unapply` on arrays in memory, against loads and saves of their values."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, nested, random_tensor, save
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_versions import enable_x64
from mapped_llama import SPECS, abstract_llama, path, saved_mapping, tensors
from mapping_expressions import ALL_OPS, INDEX_OPS, cases
from meshes import any_sharding, mesh_of
from sampling import every

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import DtypeMismatchError, MappingError
from orbax_safetensors_layout.mapping import Mapping, concat, fill, opaque, rounded, rule, tensor

__all__ = ["path", "tensors"]  # fixtures
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float32", "float16", "bfloat16", *(n for n in dir(ml_dtypes) if n.startswith("float8")))
INTEGERS = ("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32")
MAPPED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def every_value(dtype):
    """All values of a dtype of up to 16 bits, of wider ones the bits of many."""
    rng = np.random.default_rng(0)
    if dtype.name in ("int4", "uint4"):
        return np.arange(-8 if dtype.name == "int4" else 0, 8, dtype=np.int8).astype(dtype)
    if dtype == np.bool_:
        return np.array([False, True])
    if dtype.itemsize < 4:
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    values = rng.integers(0, 1 << 32, 1 << 18, np.uint32)
    if dtype.kind == "f":  # those at which rounding begins, of each exponent
        tops = np.arange(1 << 16, dtype=np.uint32) << 16
        near = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        values = np.concatenate([values, (tops[:, None] | near).reshape(-1)])
    return values.view(dtype)


def applied(expr, values):
    """What a rule makes of an array in memory."""
    return np.asarray(Mapping([rule("x", expr)]).apply({"x": jnp.asarray(values)})["x"])


def assert_same_values(array, expected, where=True):
    """Equal bits, but for those of NaN, and where numbers are normal ones of float32."""
    array, expected = np.asarray(array), np.asarray(expected)
    assert array.dtype == expected.dtype
    bits = f"u{array.dtype.itemsize}"
    is_nan = [np.isnan(x.astype(np.float32)) for x in (array, expected)]
    np.testing.assert_array_equal(is_nan[0] & where, is_nan[1] & where)
    assert not ((array.view(bits) != expected.view(bits)) & ~is_nan[1] & where).any()


@pytest.mark.parametrize("source", every(2, [*FLOATS, *INTEGERS]))
def test_casts_to_floats_have_the_values_of_numpy(source):
    values = every_value(dtype_of(source))
    for name in FLOATS:
        if name == source:
            continue
        expected = rounded(values, dtype_of(name))
        if jax.__version_info__ < (0, 8):  # which may refuse them
            with contextlib.suppress(MappingError):
                assert_same_values(applied(tensor("x").cast(name), values), expected)
        else:
            assert_same_values(applied(tensor("x").cast(name), values), expected)


@pytest.mark.parametrize("source", every(2, [*FLOATS, *INTEGERS]))
def test_integers_hold_the_values_that_they_hold_in_numpy(source):
    values = every_value(dtype_of(source))
    for target in INTEGERS:
        if target == source:
            continue
        expected, holds = osl.mapping.to_whole(values, dtype_of(target))
        result = applied(tensor("x").cast(target), values[holds])
        assert_same_bits(result, expected[holds])
        if not holds.all():
            with pytest.raises(DtypeMismatchError, match="do not fit"):
                applied(tensor("x").cast(target), values[~holds][-1:])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "uint16", "int32"])
@pytest.mark.parametrize("op", [("scale", 3.0), ("scale", 0.1), ("add", 1.0), ("scale", 0.25)])
def test_arithmetic_has_the_values_of_numpy_or_is_refused(name, op):
    kind, constant = op
    dtype = dtype_of(name)
    if "int" in name and constant % 1:
        return
    values = every_value(dtype)
    with np.errstate(all="ignore"):
        held = np.asarray(constant, dtype)
        expected = values * held if kind == "scale" else values + held
    if "int" not in name:  # XLA takes numbers below the normal ones of float32 for zero
        least = np.finfo(np.float32).tiny
        near = [np.abs(x.astype(np.float32)) <= least for x in (values, expected)]
        assert_same_values(
            applied(getattr(tensor("x"), kind)(constant), values), expected, ~near[0] & ~near[1]
        )
        return
    numbers = values.astype(object)
    exact = numbers * int(constant) if kind == "scale" else numbers + int(constant)
    fits = np.array(exact == expected.astype(object), bool)
    assert_same_bits(applied(getattr(tensor("x"), kind)(constant), values[fits]), expected[fits])
    if not fits.all():
        with pytest.raises(DtypeMismatchError, match="do not fit"):
            applied(getattr(tensor("x"), kind)(constant), values)


def test_a_product_and_a_sum_are_rounded_each():
    values = np.random.default_rng(0).standard_normal(1 << 14).astype(np.float32)
    mapping = Mapping([rule("x", tensor("x").scale(1.1).add(0.3))])
    result = mapping.apply({"x": jnp.asarray(values)})["x"]
    assert_same_bits(np.asarray(result), values * np.float32(1.1) + np.float32(0.3))


def test_a_rounding_in_between_is_kept():
    values = np.random.default_rng(0).standard_normal(1 << 10).astype(np.float32)
    mapping = Mapping([rule("x", tensor("x").cast("bfloat16").cast("float32"))])
    result = mapping.apply({"x": jnp.asarray(values)})["x"]
    assert_same_bits(np.asarray(result), values.astype(BF16).astype(np.float32))


def place(value, sharding):
    return jax.device_put(jnp.asarray(value), sharding)


@st.composite
def mappings(draw):
    """A mapping of one to three rules, with the tensors that it takes."""
    rules, tensors = [], {}
    for number in range(draw(st.integers(1, 3))):
        case = draw(cases(draw(st.sampled_from([ALL_OPS, INDEX_OPS])), depth=4))
        names = {name: f"m{number}.{name}" for name in case.tensors}
        expr = renamed(case.expr, names)
        dtype = draw(st.sampled_from([None, "float32", *MAPPED]))
        if dtype is not None:
            expr = expr.cast(dtype, lossy_inverse=True)
        rules.append(rule(f"block.leaf{number}", expr))
        tensors |= {names[name]: np.asarray(array) for name, array in case.tensors.items()}
    return Mapping(rules), tensors


def renamed(expr, names):
    import dataclasses

    if isinstance(expr, tuple):
        return tuple(renamed(part, names) for part in expr)
    if not dataclasses.is_dataclass(expr) or not hasattr(expr, "patterns"):
        return expr
    if hasattr(expr, "name"):
        first, dot, rest = expr.name.partition(".")
        whole = next(iter(names.values())).partition(".")[0]
        return dataclasses.replace(expr, name=f"{whole}.{first}{dot}{rest}")
    fields = {field.name: getattr(expr, field.name) for field in dataclasses.fields(expr)}
    return dataclasses.replace(expr, **{k: renamed(v, names) for k, v in fields.items()})


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_mappings_against_loads_and_saves(data, tmp_path_factory):
    compare_with_files(data, tmp_path_factory)


@pytest.mark.soak
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_many_random_mappings_against_loads_and_saves(data, tmp_path_factory):
    compare_with_files(data, tmp_path_factory)


def compare_with_files(data, tmp_path_factory):
    """Compares what a random mapping makes of arrays in memory with a load and a save of files."""
    mapping, tensors = data.draw(mappings())
    folder = save(tmp_path_factory.mktemp("random"), tensors)
    facts = mapping.leaf_facts(folder)
    abstract = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=any_sharding(data, shape))
        for name, (shape, dtype) in facts.items()
    }
    expected = osl.load(folder, nested(abstract), mapping=mapping)
    arrays = {n: place(x, any_sharding(data, x.shape)) for n, x in tensors.items()}
    donate = data.draw(st.booleans())
    chosen = nested({name: leaf.sharding for name, leaf in abstract.items()})
    kept = {name: place(x, arrays[name].sharding) for name, x in tensors.items()}
    made = mapping.apply(
        arrays, data.draw(st.sampled_from([chosen, nested(abstract)])), donate=donate
    )
    jax.tree.map(assert_same_array, made, expected)
    jax.tree.map(lambda a, b: assert_same_bits(*map(np.asarray, (a, b))), mapping.apply(kept), made)
    target = folder / "saved"
    saving = mapping.like(folder)
    try:
        saving.inverse().bind({name: (x.shape, x.dtype) for name, x in abstract.items()})
    except MappingError:
        with pytest.raises(MappingError):
            saving.unapply(made)
        return
    osl.save(target, made, mapping=saving)
    written = safetensors.numpy.load_file(target / "model.safetensors")
    shardings = {name: any_sharding(data, x.shape) for name, x in written.items()}
    back = saving.unapply(made, data.draw(st.sampled_from([None, shardings])), donate=donate)
    assert set(back) == set(written)
    for name, array in back.items():
        assert_same_bits(np.asarray(array), written[name])


def assert_same_array(array, other):
    assert_same_bits(np.asarray(array), np.asarray(other))
    assert array.sharding.is_equivalent_to(other.sharding, array.ndim)


@pytest.mark.parametrize("split", SPECS)
def test_a_model_there_and_back(tmp_path, path, tensors, split):
    mapping, mesh = saved_mapping(), mesh_of(x=2, y=2)
    sharding = {n: NamedSharding(mesh, SPECS[split](x.ndim)) for n, x in tensors.items()}
    arrays = {name: place(x, sharding[name]) for name, x in tensors.items()}
    abstract = abstract_llama(path, split)
    tree = mapping.apply(arrays, abstract)
    jax.tree.map(assert_same_array, tree, osl.load(path, abstract, mapping=mapping))
    osl.save(tmp_path / "saved", tree, mapping=mapping)
    written = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    back = mapping.unapply(tree, sharding)
    assert set(back) == set(written)
    for name, array in back.items():
        assert_same_bits(np.asarray(array), written[name])
        assert array.sharding == sharding[name]


@pytest.mark.parametrize("split", SPECS)
def test_under_a_transfer_guard(path, tensors, split):
    """Where JAX refuses copies between host and devices that nobody asked for."""
    mapping, mesh = saved_mapping(), mesh_of(x=2, y=2)
    sharding = {n: NamedSharding(mesh, SPECS[split](x.ndim)) for n, x in tensors.items()}
    arrays = {name: place(x, sharding[name]) for name, x in tensors.items()}

    def there_and_back():
        return mapping.unapply(mapping.apply(arrays, abstract_llama(path, split)), sharding)

    with jax.transfer_guard("disallow"):
        guarded = there_and_back()
    jax.tree.map(assert_same_array, guarded, there_and_back())


def counted(call):
    """The result of a call, and how many programs JAX compiles for it."""
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        result = call()
    finally:
        jax.monitoring.clear_event_listeners()
    return result, sum("backend_compile" in event for event in compiled)


def test_layers_share_what_is_compiled_and_a_second_call_compiles_nothing(tensors):
    rules = [rule("layers.{i}.up", tensor("model.layers.{i}.gate_up.weight").transpose())]
    mapping = Mapping(rules, strict=False)
    arrays = {name: jnp.asarray(x) for name, x in tensors.items()}
    first, compiled = counted(lambda: mapping.apply(arrays))
    assert compiled <= 2  # one program, for all layers
    tree = mapping.unapply(first)
    again, compiled = counted(lambda: (mapping.apply(arrays), mapping.unapply(first)))
    assert compiled == 0
    jax.tree.map(lambda a, b: assert_same_bits(np.asarray(a), np.asarray(b)), again, (first, tree))


def test_donated_arrays_are_given_up_but_not_those_with_two_names():
    mapping = Mapping([rule("{i}.up", tensor("{i}.weight").transpose())])
    arrays = {f"{i}.weight": jnp.full((4, 8), i, jnp.float32) for i in range(3)}
    arrays["3.weight"] = arrays["2.weight"]
    tree = mapping.apply(arrays, donate=True)
    assert [x.is_deleted() for x in arrays.values()] == [True, True, False, False]
    back = mapping.unapply(tree, donate=True)
    assert [float(x[0, 0]) for x in back.values()] == [0, 1, 2, 2]
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_arrays_that_share_memory_are_not_given_up(spec):
    """Two arrays may be of the same buffers, as `device_put` to where an array is may make them."""
    mapping = Mapping([rule("{i}.up", tensor("{i}.weight").transpose())])
    sharding = NamedSharding(mesh_of(x=8), spec)
    first, third = (jax.device_put(jnp.full((8, 64), n, jnp.float32), sharding) for n in (1, 3))
    shards = [shard.data for shard in first.addressable_shards]
    second = jax.make_array_from_single_device_arrays(first.shape, sharding, shards)
    arrays = {"1.weight": first, "2.weight": second, "3.weight": third}
    tree = mapping.apply(arrays, donate=True)
    assert [float(tree[n]["up"][0, 0]) for n in "123"] == [1, 1, 3]
    assert [x.is_deleted() for x in arrays.values()] == [False, False, True]


def test_nothing_is_given_up_where_values_are_refused():
    kv = rule("kv", tensor("kv").repeat(0, 2))
    ids = rule("ids", tensor("ids").cast("float32"))
    mapping = Mapping([rule("up", tensor("up").transpose()), kv, ids])
    leaves = {
        "up": jnp.ones((2, 3)),
        "kv": jnp.asarray([1.0, 2.0]),
        "ids": jnp.asarray([1.5]),
    }
    shapes = {"up": ((3, 2), "float32"), "kv": ((1,), "float32"), "ids": ((1,), "int8")}
    like = mapping.like({name: (shape, np.dtype(dtype)) for name, (shape, dtype) in shapes.items()})
    with pytest.raises(osl.SafetensorsLayoutError, match="2 leaves cannot be computed"):
        like.unapply(leaves, donate=True)
    assert not any(array.is_deleted() for array in leaves.values())
    held = {**leaves, "kv": jnp.ones(2), "ids": jnp.ones(1)}
    tensors = like.unapply(held, donate=True)
    assert all(array.is_deleted() for array in held.values())
    assert_same_bits(np.asarray(tensors["ids"]), np.int8([1]))


@pytest.mark.parametrize("dtype", ["complex64", "float4_e2m1fn", "bfloat16", "float32"])
def test_copies_are_compared_by_their_bits(dtype):
    mapping = Mapping([rule("a", tensor("t").repeat(0, 2))])
    dtype = jnp.dtype(dtype)

    def leaf(*numbers):
        return {"a": jnp.asarray(np.array(numbers, np.float32).astype(dtype))}

    assert mapping.unapply(leaf(-0.0, -0.0))["t"].shape == (1,)
    with pytest.raises(MappingError, match="copies that repeat"):
        mapping.unapply(leaf(-0.0, 0.0))
    if dtype.name != "float4_e2m1fn":  # which has no NaN
        assert mapping.unapply(leaf(np.nan, np.nan))["t"].shape == (1,)


def test_to_other_devices_and_a_single_one():
    mapping = Mapping([rule("up", tensor("weight").transpose())])
    value = np.arange(32, dtype=np.float32).reshape(4, 8)
    arrays = {"weight": jax.device_put(value, jax.devices()[0])}
    sharding = NamedSharding(mesh_of(jax.devices()[4:], x=4), P("x"))
    up = mapping.apply(arrays, sharding)["up"]
    assert up.sharding == sharding
    assert_same_bits(np.asarray(up), value.T)
    back = mapping.unapply({"up": up}, {"weight": arrays["weight"].sharding})["weight"]
    assert back.devices() == {jax.devices()[0]}


def test_over_a_mesh_of_explicit_axes():
    mesh = mesh_of(x=2, y=2, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    expr = tensor("w").rearrange("(h d) e -> e h d", d=2)
    mapping = Mapping([rule("q", expr), rule("k", concat([tensor("a"), tensor("b")], 0))])
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    arrays = {
        "w": place(value, NamedSharding(mesh, P("x", "y"))),
        "a": place(value, NamedSharding(mesh, P("x"))),
        "b": place(value, NamedSharding(mesh, P(None, "y"))),
    }
    target = NamedSharding(mesh, P(None, "x"))
    for shardings in (None, target):
        tree = mapping.apply(arrays, shardings)
        assert_same_bits(np.asarray(tree["q"]), value.reshape(4, 2, 8).transpose(2, 0, 1))
        back = mapping.like({n: (x.shape, x.dtype) for n, x in arrays.items()}).unapply(tree)
        for array in back.values():
            assert_same_bits(np.asarray(array), value)
    assert tree["q"].sharding.is_equivalent_to(target, 3)


def test_axes_are_of_the_mesh_that_names_them():
    """Of two meshes with the same devices and other names, one of explicit axes."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    plain = mesh_of(y=2, x=2)
    typed = jax.sharding.Mesh(plain.devices, ("x", "y"), axis_types=explicit)
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    arrays = {
        "a": place(value, NamedSharding(plain, P("x"))),
        "b": place(value, NamedSharding(typed, P("y"))),
    }
    mapping = Mapping([rule("c", concat([tensor("a"), tensor("b")], 1))])
    assert_same_bits(np.asarray(mapping.apply(arrays)["c"]), np.concatenate([value, value], 1))


def test_64_bits_are_refused_where_they_were_not_before():
    mapping = Mapping([rule("p", fill((2,), 2**40, "int64")), rule("q", tensor("w"))])
    arrays = {"w": jnp.ones(2)}
    for _ in range(2):
        with enable_x64(True):
            assert mapping.apply(arrays)["p"].tolist() == [2**40] * 2
        with pytest.raises(MappingError, match="jax_enable_x64"):
            mapping.apply(arrays)


def test_two_leaves_of_one_name_are_refused():
    tree = {"a": {"b": jnp.zeros(2)}, "a.b": jnp.ones(2)}
    with pytest.raises(MappingError, match="two leaves have one name"):
        Mapping([rule("a.b", tensor("w"))]).unapply(tree)


def test_within_a_traced_function_and_of_abstract_arrays():
    mapping = Mapping([rule("up", tensor("weight").transpose().cast("bfloat16"))])
    weight = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)
    up = jax.jit(lambda w: mapping.apply({"weight": w})["up"])(weight)
    assert_same_bits(np.asarray(up), np.asarray(weight).T.astype(BF16))
    sharding = NamedSharding(mesh_of(x=2), P("x"))
    abstract = mapping.apply({"weight": jax.ShapeDtypeStruct((4, 8), jnp.float32)}, sharding)
    assert abstract == {"up": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=sharding)}


def test_integers_that_do_not_fit_are_refused_by_leaf():
    mapping = Mapping([rule("ids.{i}", tensor("t{i}").cast("int8"))])
    arrays = {"t0": jnp.arange(4), "t1": jnp.arange(200, 204)}
    with pytest.raises(DtypeMismatchError, match=r"cast\('int8'\).*'ids.1'.*int8"):
        mapping.apply(arrays)
    with pytest.raises(MappingError, match=r"traces.*'ids.0'.*outside of jax.jit"):
        jax.jit(mapping.apply)(arrays)
    assert_same_bits(
        np.asarray(mapping.apply({"t0": arrays["t0"]})["ids"]["0"]), np.arange(4, dtype=np.int8)
    )


def test_copies_that_differ_are_refused():
    kv = tensor("kv.{i}")
    rules = [rule("kv.{i}", kv.repeat(0, 3)), rule("tied.{i}", kv.transpose(), tied_to="kv.{i}")]
    dropped = [
        rule("kv.{i}", kv.repeat(0, 3, lossy_inverse=True)),
        rule("tied.{i}", kv.transpose(), tied_to="kv.{i}", lossy_inverse=True),
    ]
    kv = {f"{i}": jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 4) + i for i in range(2)}
    leaves = {
        "kv": {i: jnp.repeat(value, 3, 0) for i, value in kv.items()},
        "tied": {i: value.T for i, value in kv.items()},
    }
    tensors = Mapping(rules).unapply(leaves)
    for i, value in kv.items():
        assert_same_bits(np.asarray(tensors[f"kv.{i}"]), np.asarray(value))
    with pytest.raises(MappingError, match=r"outside of jax.jit.*lossy_inverse=True"):
        jax.jit(Mapping(rules).unapply)(leaves)
    for name, at, problem in (
        ("kv", (4, 1), "copies that repeat"),
        ("kv", (0, 0), "copies that repeat|'tied.1' differs from 'kv.1'"),
        ("tied", (3, 1), "'tied.1' differs from 'kv.1'"),
    ):
        changed = leaves[name]["1"].at[at].add(1)
        trained = {**leaves, name: {**leaves[name], "1": changed}}
        with pytest.raises(MappingError, match=rf"({problem}).*tensor: 'kv.1'.*lossy_inverse=True"):
            Mapping(rules).unapply(trained)
        for unapply in (Mapping(dropped).unapply, jax.jit(Mapping(dropped).unapply)):
            expected = trained["kv"]["1"][::3]
            assert_same_bits(np.asarray(unapply(trained)["kv.1"]), np.asarray(expected))


def test_rules_for_files_alone_are_refused_together_by_leaf_and_rule():
    mapping = Mapping(
        [
            rule("inverse", opaque(np.linalg.inv, tensor("r"), shape=(2, 2), dtype="float32")),
            rule("wide", fill((2,), 1, "float64")),
        ]
    )
    with pytest.raises(MappingError) as raised:
        mapping.apply({"r": jnp.eye(2)})
    message = str(raised.value)
    assert "'inverse', opaque(inv, tensor('r')" in message
    assert "a function of numpy arrays" in message
    assert "'wide', fill(" in message
    assert "jax_enable_x64" in message
    assert "Save these weights and load them" in message


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ([1], "'name': array"),
        ({"w": np.zeros(3)}, r"'w'.*jax.Array.*ndarray.*device_put"),
        ({"w": jax.ShapeDtypeStruct((), jax.random.key(0).dtype)}, "key_data"),
    ],
)
def test_what_is_no_array_of_jax_is_refused(tensors, match):
    with pytest.raises(MappingError, match=match):
        Mapping([rule("w", tensor("w"))]).apply(tensors)


def test_shardings_of_what_is_not_there_are_refused():
    mapping = Mapping([rule("w", tensor("w"))])
    with pytest.raises(MappingError, match="'v'"):
        mapping.unapply({"w": jnp.ones(2)}, {"v": NamedSharding(mesh_of(x=1), P())})
    with pytest.raises(MappingError, match=r"'w'.*Sharding.*str"):
        mapping.apply({"w": jnp.ones(2)}, {"w": "x"})


DECODED = {
    "fp8": (
        osl.dequantize_block(tensor("w"), tensor("s"), (4, 8), "bfloat16"),
        {"w": ((10, 20), "float8_e4m3fn"), "s": ((3, 3), "float32")},
    ),
    "mxfp4": (
        osl.dequantize_mxfp4(tensor("w"), tensor("s"), "float32"),
        {"w": ((3, 2, 16), "uint8"), "s": ((3, 2), "uint8")},
    ),
    "int4": (
        osl.dequantize_int4(tensor("w"), tensor("s"), 8, "bfloat16"),
        {"w": ((3, 4), "int32"), "s": ((3, 4), "bfloat16")},
    ),
}


@pytest.mark.parametrize("kind", DECODED)
def test_simple_quantised_weights_are_decoded(tmp_path, kind):
    expr, specs = DECODED[kind]
    tensors = {n: random_tensor(shape, dtype_of(dtype), 1) for n, (shape, dtype) in specs.items()}
    scales = np.random.default_rng(0).uniform(0.5, 2, tensors["s"].shape)
    tensors["s"] = (scales * 120 if kind == "mxfp4" else scales).astype(tensors["s"].dtype)
    mapping = Mapping([rule("w", expr.transpose())])
    folder = save(tmp_path / "quantised", tensors)
    loaded = osl.load(folder, mapping.abstract(folder), mapping=mapping)
    made = mapping.apply({name: jnp.asarray(x) for name, x in tensors.items()})
    assert_same_bits(np.asarray(made["w"]), np.asarray(loaded["w"]))
