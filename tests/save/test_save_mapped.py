"""Saves through a mapping: Hugging Face to JAX and back is bit-exact, from any sharding."""

import contextlib
import dataclasses
import math
import os
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, save
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from limits import few_descriptors
from mapped_llama import BF16, SPECS, abstract_llama, path, saved_mapping as mapping, tensors
from mapping_expressions import ALL_OPS, INDEX_OPS, cases, evaluate, reshape, specs_of
from meshes import any_sharding, mesh_of
from programs import run_processes
from saved_files import CODES, PACKED_BITS, write_packed
from saving import opened

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import NARROW_INTEGERS, ONE_A_BYTE
from orbax_safetensors_layout.runtime import ProcessGroup

__all__ = ["path", "tensors"]  # fixtures

_LEAST = 100  # above what a pad and a fill make


@pytest.mark.parametrize("how", ["mapped", "quantised", "consolidated"])
def test_more_files_than_may_be_open(tmp_path, how):
    """All have their room on the disk before the first tensor is written."""
    values, files = np.arange(300 * 64, dtype=np.float32).reshape(300, 64), tmp_path / "out"
    tree = {f"l.{n}.q_proj.weight": value[None] for n, value in enumerate(values)}
    options = osl.WriteOptions(max_file_bytes=1)
    if how == "consolidated":
        osl.save(tmp_path / "pieces", tree, options=osl.WriteOptions(layout="sharded"))
    with few_descriptors(max(map(int, os.listdir("/proc/self/fd"))) + 150):
        if how == "mapped":
            rule = osl.rule("w", osl.stack(osl.tensor("l.{n}.q_proj.weight"), over="n", axis=0))
            osl.save(files, {"w": values}, mapping=osl.Mapping([rule]), options=options)
        elif how == "quantised":
            quantize = osl.Quantization("nvfp4")
            osl.save(files, tree, options=dataclasses.replace(options, quantize=quantize))
        else:
            osl.consolidate(tmp_path / "pieces", files, options=options)
    assert len([*files.glob("*.safetensors")]) >= 300
    if how != "quantised":
        stored = opened(files)
        for name, value in tree.items():
            assert_same_bits(stored[name].reshape(1, 64), value)


@pytest.mark.parametrize("split", SPECS)
def test_there_and_back(tmp_path, path, tensors, split):
    tree = osl.load(path, abstract_llama(path, split), mapping=mapping())
    osl.save(
        tmp_path / "out", tree, mapping=mapping(), options=osl.WriteOptions(max_file_bytes=40_000)
    )
    stored = opened(tmp_path / "out")
    assert set(stored) == set(tensors)
    for name, value in tensors.items():
        if "layers" in name and name.endswith(".norm.weight"):
            value = value.astype(np.float32)  # nothing says that it was bfloat16
        if name == "model.norm.weight":
            value = value * value.dtype.type(4) / value.dtype.type(4)
        assert_same_bits(stored[name], value)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "orbax_safetensors_layout.json" not in names
    again = osl.load(tmp_path / "out", tree, mapping=mapping())
    for name, value in tree.items():
        assert_same_bits(np.asarray(again[name]), np.asarray(value))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_invertible_expression(tmp_path_factory, data):
    operations = [operation for operation in INDEX_OPS if operation is not reshape]
    case = data.draw(cases(operations, depth=4))
    mapping = osl.Mapping([osl.rule("leaf", case.expr)], strict=False)
    folder = tmp_path_factory.mktemp("mapped")
    value = np.asarray(case.array)
    leaf = jax.device_put(value, any_sharding(data, value.shape)) if value.size else value
    options = osl.WriteOptions(memory_budget_bytes=data.draw(st.sampled_from([None, 64])))
    try:
        with _any_memory(data):
            osl.save(folder / "out", {"leaf": leaf}, mapping=mapping, options=options)
    except osl.MappingError:
        return  # a part of a tensor only, or shapes that the leaf does not tell
    loaded = osl.load(folder / "out", mapping=mapping)["leaf"]
    assert_same_bits(loaded, value)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_other_values_than_were_loaded(tmp_path_factory, data):
    """After training, what a pad made is left out, and copies that a repeat made are refused."""
    case = data.draw(cases([operation for operation in ALL_OPS if operation is not reshape]))
    mapping = osl.Mapping([osl.rule("leaf", case.expr)], strict=False)
    numbers = _numbered(case.tensors)
    places = evaluate(mapping.bind(specs_of(numbers)).expressions["leaf"], numbers).astype(int)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    value = rng.random(places.shape, np.float32)
    if data.draw(st.booleans()):  # each copy the same
        chosen = rng.random(max(places.max(), _LEAST) + 1, np.float32)
        value = np.where(places >= _LEAST, chosen[places], value)
    elements: dict[int, set[float]] = {}
    for place, element in zip(places.flat, value.flat, strict=True):
        elements.setdefault(place, set()).add(float(element))
    try:
        names = mapping.inverse().bind({"leaf": (value.shape, value.dtype)}).expressions
    except osl.MappingError:
        return  # a part of a tensor only, or shapes that the leaf does not tell
    folder = tmp_path_factory.mktemp("trained") / "out"
    tree = {"leaf": jax.device_put(value, any_sharding(data, value.shape))}
    if any(len(of_place) > 1 for place, of_place in elements.items() if place >= _LEAST):
        expected_error = r"copies that repeat.*expected: the same bits"
        with _any_memory(data), pytest.raises(osl.MappingError, match=expected_error):
            osl.save(folder, tree, mapping=mapping)
        assert not folder.exists()
        return
    with _any_memory(data):
        osl.save(folder, tree, mapping=mapping)
    stored = opened(folder)
    for name in names:
        known = numbers[name][tuple(map(slice, stored[name].shape))]
        expected = [elements[int(place)] for place in known.flat]
        assert [{float(element)} for element in stored[name].flat] == expected


def _any_memory(data):
    """The host's, or, as the package sees it then, that of devices with memory of their own."""
    if data.draw(st.booleans()):
        return mock.patch("orbax_safetensors_layout.writing.host._on_host", return_value=False)
    return contextlib.nullcontext()


def _numbered(tensors):
    """Tensors of which each element has its own number, from `_LEAST` on."""
    starts = np.cumsum([_LEAST, *(value.size for value in tensors.values())])
    return {
        name: np.arange(start, start + value.size).astype(np.float32).reshape(value.shape)
        for (name, value), start in zip(tensors.items(), starts, strict=False)
    }


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_copies_that_repeat_makes_are_saved_if_they_are_equal(tmp_path, spec):
    """Copies of key and value heads drift apart; a shard may hold none of the first ones."""
    sharding = NamedSharding(mesh_of(x=8), spec)
    value = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    kv = osl.tensor("kv")
    mapping = osl.Mapping([osl.rule("kv", kv.repeat(0, 4).repeat(1, 2))])
    with pytest.raises(osl.MappingError, match=r"'kv'.*the same bits.*lossy_inverse=True"):
        osl.save(tmp_path / "out", {"kv": jax.device_put(value, sharding)}, mapping=mapping)
    assert not (tmp_path / "out").exists()
    equal = jax.device_put(value[::4, ::2].repeat(4, 0).repeat(2, 1), sharding)
    osl.save(tmp_path / "out", {"kv": equal}, mapping=mapping)
    assert_same_bits(opened(tmp_path / "out")["kv"], value[::4, ::2])
    for at in ((7, 14), (6, 15), (3, 1)):  # one other element, of each repeat and of both
        other = np.array(equal)
        other[at] += 1
        with pytest.raises(osl.MappingError, match="the same bits"):
            osl.save(tmp_path / "other", {"kv": jax.device_put(other, sharding)}, mapping=mapping)
    drops = kv.repeat(0, 4, lossy_inverse=True).repeat(1, 2, lossy_inverse=True)
    leaf, mapping = jax.device_put(value, sharding), osl.Mapping([osl.rule("kv", drops)])
    osl.save(tmp_path / "first", {"kv": leaf}, mapping=mapping)
    assert_same_bits(opened(tmp_path / "first")["kv"], value[::4, ::2])


def test_copies_within_a_tensor_of_several_leaves(tmp_path):
    """Key heads are repeated, query heads beside them are not."""
    qkv = osl.tensor("qkv")
    rules = [
        osl.rule("q", qkv.slice(0, 0, 4)),
        osl.rule("k", qkv.slice(0, 4, 6).repeat(0, 2)),
        osl.rule("v", qkv.slice(0, 6, 7).repeat(0, 4).transpose()),
    ]
    stored = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)
    save(tmp_path / "in", {"qkv": stored})
    tree = osl.load(tmp_path / "in", mapping=osl.Mapping(rules))
    mapping = osl.Mapping(rules).like(tmp_path / "in")
    osl.save(tmp_path / "out", tree, mapping=mapping)
    assert_same_bits(opened(tmp_path / "out")["qkv"], stored)
    for leaf, at in (("k", (3, 0)), ("v", (2, 3))):
        trained = {**tree, leaf: np.array(tree[leaf])}
        trained[leaf][at] += 1
        with pytest.raises(osl.MappingError, match=r"copies that repeat.*expected: the same bits"):
            osl.save(tmp_path / leaf, trained, mapping=mapping)


@pytest.mark.parametrize("expr", [None, osl.tensor("e").transpose()], ids=str)
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_tied_leaves_are_saved_if_they_are_equal(tmp_path, expr, spec):
    """Training changes both, if they are leaves of their own."""
    embed, name = osl.rule("embed", osl.tensor("e")), "head"
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    tied = value if expr is None else value.T
    mapping = osl.Mapping([embed, osl.rule(name, expr, tied_to="embed")])
    mesh = mesh_of(x=8)

    def tree(head):
        return {
            "embed": jax.device_put(value, NamedSharding(mesh, P("x"))),
            name: jax.device_put(head, NamedSharding(mesh, spec)),
        }

    osl.save(tmp_path / "out", tree(tied), mapping=mapping)
    assert_same_bits(opened(tmp_path / "out")["e"], value)
    other = np.array(tied)
    other[5, 6] += 1
    with pytest.raises(osl.MappingError, match=r"leaf 'head' differs from 'embed'.*the same bits"):
        osl.save(tmp_path / "other", tree(other), mapping=mapping)
    assert not (tmp_path / "other").exists()
    with pytest.raises(osl.MappingError, match="tied: it is bfloat16, not float32"):
        osl.save(tmp_path / "other", tree(tied.astype(BF16)), mapping=mapping)
    drops = osl.Mapping([embed, osl.rule(name, expr, tied_to="embed", lossy_inverse=True)])
    osl.save(tmp_path / "first", tree(other), mapping=drops)
    assert_same_bits(opened(tmp_path / "first")["e"], value)
    assert_same_bits(osl.load(tmp_path / "first", mapping=mapping)[name], tied)


@pytest.mark.parametrize("factor", [128**-0.5, 50.5])
def test_arithmetic_is_undone_in_the_dtype_that_it_is_done_in(tmp_path, factor):
    """Not in that of the leaves: the constant would be rounded, and all values be shifted alike."""
    factor = float(np.float32(factor))
    expr = osl.tensor("q").cast("float32").scale(factor, lossy_inverse=True)
    rules = osl.Mapping([osl.rule("q", expr)])
    leaf = np.random.default_rng(0).standard_normal((64, 64)).astype(BF16)
    expected = (leaf.astype(np.float32) * np.float32(1 / factor)).astype(BF16)
    osl.save(tmp_path / "out", {"q": leaf}, mapping=rules)
    assert_same_bits(osl.load(tmp_path / "out")["q"], expected)
    inverse = rules.inverse().bind({"q": (leaf.shape, BF16)}).expressions["q"]
    assert_same_bits(evaluate(inverse, {"q": leaf}), expected)


def test_like_a_checkpoint(tmp_path):
    """Shapes that leaves do not tell, and dtypes that were cast away."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape, dtype in (
            ("q", (4, 6), BF16),
            ("k", (2, 6), BF16),
            ("w", (3, 8), np.float32),
            ("n", (5,), BF16),
        )
    }
    folder = tmp_path / "published"
    osl.save(folder, tensors)
    rules = osl.Mapping(
        [
            osl.rule("qk", osl.concat([osl.tensor("q"), osl.tensor("k")], 0).cast("float32")),
            osl.rule("w", osl.tensor("w").reshape(6, 4)),
            osl.rule("n", osl.tensor("n").cast("float32").pad(0, 1, 2)),
        ]
    )
    model = osl.load(folder, mapping=rules)
    with pytest.raises(osl.MappingError, match=r"mapping.like\(path\)") as caught:
        osl.save(tmp_path / "out", model, mapping=rules)
    assert "2 problems" in str(caught.value)
    for number, known in enumerate((folder, {n: (t.shape, t.dtype) for n, t in tensors.items()})):
        osl.save(tmp_path / f"{number}", model, mapping=rules.like(known))
        stored = opened(tmp_path / f"{number}")
        assert set(stored) == set(tensors)
        for name, value in tensors.items():
            assert_same_bits(stored[name], value)
    model["w"] = model["w"][:3]
    with pytest.raises(osl.MappingError, match=r"leaf 'w' has shape \[3, 4\]"):
        osl.save(tmp_path / "out", model, mapping=rules.like(folder))


STORED = [
    np.dtype(getattr(ml_dtypes, n, None) or n)
    for n in CODES
    if n not in ("int4", "uint4", "complex64")
]


def any_values(rng, dtype, shape):
    """Any bit patterns: NaN, infinities and subnormals too."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    bits = PACKED_BITS.get(dtype, 8)
    data = rng.integers(0, 1 << bits, (*shape, dtype.itemsize), np.uint8)
    if rng.random() < 0.5 and dtype.itemsize > 1:
        data = rng.integers(-4, 4, shape).astype(dtype)  # that integers hold
    return data.view(dtype).reshape(shape)


def any_operation(rng, expr):
    kind = rng.integers(3)
    if kind == 0:
        wide = [np.float32, np.float64, STORED[rng.integers(len(STORED))]]
        return expr.cast(wide[rng.integers(3)])
    if kind == 1:
        return expr.scale(float(rng.choice([0.0625, 0.5, 2.0, 16.0, -1.0, -4.0])))
    return expr.add(int(rng.choice([0, 1, 3])))


def any_leaf(rng, dtype):
    """A dtype for a leaf, as wide as a result's or wider."""
    wide = [leaf for leaf in map(np.dtype, STORED) if leaf.itemsize >= dtype.itemsize]
    return [dtype, wide[rng.integers(len(wide))]][rng.integers(2)]


def same_numbers(stored, value):
    """Whether arrays of two dtypes hold equal numbers: Python compares integers and floats so."""
    kinds = [int if "int" in array.dtype.name else float for array in (stored, value)]
    for number, other in zip(stored.flat, value.flat, strict=True):
        pair = kinds[0](number), kinds[1](other)
        signed = kinds == [int, int] or math.copysign(1, pair[0]) == math.copysign(1, pair[1])
        if not ((pair[0] == pair[1] and signed) or (pair[0] != pair[0] and pair[1] != pair[1])):
            return False
    return True


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.soak)])
def test_what_is_loaded_is_saved_with_the_same_bits_or_refused(tmp_path, count):
    """Without a cast, a file gets the dtype of its leaf: then the numbers are the same."""
    rng = np.random.default_rng(count)
    told = dict.fromkeys(["saved", "refused", "not loaded"], 0)
    for number in range(count):
        dtype = STORED[rng.integers(len(STORED))]
        value = any_values(rng, dtype, (2, 8))
        expr = osl.tensor("t")
        for _ in range(rng.integers(1, 4)):
            expr = any_operation(rng, expr)
        write_packed(tmp_path / f"{number}", {"t": value})
        try:
            rules = osl.Mapping([osl.rule("leaf", expr)]).like(tmp_path / f"{number}")
            metadata = osl.metadata(tmp_path / f"{number}", mapping=rules)["leaf"]
            is_plain = repr(expr).replace(f".cast({dtype.name!r})", "") == repr(osl.tensor("t"))
            kind = metadata.dtype if is_plain else any_leaf(rng, np.dtype(metadata.dtype))
            leaf = np.zeros(metadata.shape, kind)  # rounding of a plain tensor is the leaf's
            tree = osl.load(tmp_path / f"{number}", {"leaf": leaf}, mapping=rules)
        except (osl.MappingError, osl.DtypeMismatchError):
            told["not loaded"] += 1  # no numeric meaning, or a value that an integer cannot hold
            continue
        target = tmp_path / f"{number}-out"
        try:
            osl.save(target, tree, mapping=rules, options=osl.WriteOptions(fsync=False))
        except osl.MappingError:
            assert not target.exists()
            told["refused"] += 1
            continue
        loaded = osl.load(target)["t"]
        if loaded.dtype != value.dtype:
            assert same_numbers(loaded, value), (expr, leaf.dtype)
        else:
            nan = (loaded != loaded) & (value != value)  # of which there may be several
            assert_same_bits(np.where(nan, value, loaded), value)
        told["saved"] += 1
    print(told)
    assert all(told.values())


def test_arithmetic_is_undone_in_a_wider_leaf(tmp_path):
    """As weights in bfloat16 that are trained in float32."""
    value = (np.arange(-32, 32).reshape(8, 8) / 8).astype(BF16)
    save(tmp_path / "files", {"t": value})
    for number, (expr, kept) in enumerate(
        [(osl.tensor("t").scale(-1.0), True), (osl.tensor("t").scale(2.0), False)]
    ):
        rules = osl.Mapping([osl.rule("leaf", expr)]).like(tmp_path / "files")
        abstract = {"leaf": np.zeros((8, 8), np.float32)}
        tree = osl.load(tmp_path / "files", abstract, mapping=rules)
        if not kept:  # the largest bfloat16 would be infinite
            with pytest.raises(osl.MappingError, match="does not keep every value"):
                osl.save(tmp_path / f"{number}", tree, mapping=rules)
            continue
        osl.save(tmp_path / f"{number}", tree, mapping=rules)
        assert_same_bits(osl.load(tmp_path / f"{number}")["t"], value.astype(np.float32))


def test_what_is_lost_is_told(tmp_path):
    value = np.array([2**-9, 1.0], ml_dtypes.float8_e4m3fn)
    save(tmp_path / "files", {"t": value})
    rules = osl.Mapping([osl.rule("leaf", osl.tensor("t").scale(0.0625))]).like(tmp_path / "files")
    tree = osl.load(tmp_path / "files", mapping=rules)
    with pytest.raises(osl.MappingError, match="does not keep every value") as caught:
        osl.save(tmp_path / "out", tree, mapping=rules)
    assert "leaf 'leaf'" in str(caught.value)
    assert "is loaded as" in str(caught.value)
    assert not (tmp_path / "out").exists()
    exact = osl.tensor("t").cast("float32").scale(0.0625)
    for number, expr in enumerate((exact, osl.tensor("t").cast("bfloat16"))):
        rules = osl.Mapping([osl.rule("leaf", expr)]).like(tmp_path / "files")
        tree = osl.load(tmp_path / "files", mapping=rules)
        osl.save(tmp_path / f"{number}", tree, mapping=rules)
        assert_same_bits(osl.load(tmp_path / f"{number}")["t"], value)


def test_a_cast_that_narrows_is_saved_where_that_is_accepted(tmp_path):
    value = np.array([0.1, 1.0], np.float32)
    save(tmp_path / "files", {"t": value})
    for accepted in (False, True):
        expr = osl.tensor("t").cast("bfloat16", lossy_inverse=accepted)
        rules = osl.Mapping([osl.rule("leaf", expr)]).like(tmp_path / "files")
        tree = osl.load(tmp_path / "files", mapping=rules)
        if accepted:
            osl.save(tmp_path / "out", tree, mapping=rules)
            expected = value.astype(BF16).astype(np.float32)
            assert_same_bits(osl.load(tmp_path / "out")["t"], expected)
            continue
        with pytest.raises(osl.MappingError, match="lossy_inverse=True"):
            osl.save(tmp_path / "out", tree, mapping=rules)
        assert not (tmp_path / "out").exists()


def test_in_another_dtype(tmp_path, path, tensors):
    """Leaves that were computed in float32 go back to the dtype of their checkpoint."""
    tree = osl.load(path, abstract_llama(path, "both"), mapping=mapping())
    options = osl.WriteOptions(dtype="bfloat16")
    plan = osl.plan_save(tree, mapping=mapping(), options=options)
    assert {
        tensor.dtype.code for *_, tensors_of_file in plan.files for tensor in tensors_of_file
    } == {"BF16"}
    osl.save(tmp_path / "one", tree, mapping=mapping(), options=options)
    run_processes(
        "save_mapped_dtyped.py",
        processes=2,
        devices=2,
        path=str(path),
        target=str(tmp_path / "two"),
    )
    for name in ("one", "two"):
        stored = opened(tmp_path / name)
        assert set(stored) == set(tensors)
        for tensor, value in tensors.items():
            if tensor != "model.norm.weight":
                assert_same_bits(stored[tensor], value.astype(BF16))


def test_what_is_no_array_is_refused(tmp_path, path):
    with pytest.raises(osl.MappingError, match="step"):
        osl.save(tmp_path / "out", {"step": 3}, mapping=mapping())
    assert not (tmp_path / "out").exists()


def test_what_does_not_invert_is_refused(tmp_path):
    rules = osl.Mapping([osl.rule("leaf", osl.tensor("a").scale(3.0))])
    with pytest.raises(osl.MappingError, match=r"scale\(3\.0\)"):
        osl.save(tmp_path / "out", {"leaf": np.ones(3, np.float32)}, mapping=rules)
    assert not (tmp_path / "out").exists()


def test_progress_reaches_the_whole(tmp_path, path):
    tree = osl.load(path, abstract_llama(path, "both"), mapping=mapping())
    seen = []
    options = osl.WriteOptions(progress=seen.append, concurrency=1)
    osl.save(tmp_path / "out", tree, mapping=mapping(), options=options)
    sizes = {name: value.nbytes for name, value in opened(tmp_path / "out").items()}
    assert {told.tensor for told in seen} == set(sizes)
    done = np.cumsum([sizes[told.tensor] for told in seen])
    assert [told.done_bytes for told in seen] == done.tolist()
    assert {told.total_bytes for told in seen} == {sum(sizes.values())}


def test_a_peer_that_fails_ends_the_save(tmp_path, path, monkeypatch):
    tree = osl.load(path, abstract_llama(path, "both"), mapping=mapping())

    def check(group, doing):
        raise osl.PeerError("process 1 failed")

    monkeypatch.setattr(ProcessGroup, "check", check)
    with pytest.raises(osl.PeerError, match="process 1"):
        osl.save(tmp_path / "out", tree, mapping=mapping())
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("split", SPECS)
def test_two_processes_write_the_bytes_of_one(tmp_path, path, split):
    tree = osl.load(path, abstract_llama(path, split), mapping=mapping())
    options = osl.WriteOptions(max_file_bytes=40_000)
    osl.save(tmp_path / "one", tree, mapping=mapping(), options=options)
    run_processes(
        "save_mapped.py",
        processes=2,
        devices=2,
        path=str(path),
        target=str(tmp_path / "two"),
        split=split,
    )
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert first == second


def test_two_processes_compare_copies_that_neither_holds_both_of(tmp_path):
    outcomes = run_processes("save_mapped_copies.py", processes=2, devices=2, target=str(tmp_path))
    assert [texts[0] for texts in outcomes] == ["saved"] * 2
    for number, problem in ((1, "leaf 'head' differs from 'embed'"), (2, "copies that repeat")):
        assert any(problem in texts[number] for texts in outcomes)
        assert all(texts[number] != "saved" for texts in outcomes)
        assert not (tmp_path / f"{number}").exists()
    stored = opened(tmp_path / "0")
    assert_same_bits(stored["e"], np.arange(32, dtype=np.float32).reshape(8, 4))
    assert_same_bits(stored["kv"], np.arange(6, dtype=np.float32).reshape(2, 3))


def test_two_processes_save_integers_narrower_than_a_byte(tmp_path):
    run_processes("save_mapped_narrow.py", processes=2, devices=2, target=str(tmp_path))
    values = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    for dtype, expected in (("int4", values), ("int2", values.clip(-2, 1))):
        assert_same_bits(opened(tmp_path / dtype)["t"], expected.T)
        assert_same_bits(osl.load(tmp_path / dtype)["t"], expected.T)


@pytest.mark.parametrize("dtype", sorted(NARROW_INTEGERS & ONE_A_BYTE.keys()))
def test_integers_narrower_than_a_byte_are_saved_one_a_byte(tmp_path, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype))
    value = np.arange(16).reshape(2, 8).astype(np.int8).astype(dtype)
    osl.save(tmp_path / "files", {"t": value})
    rules = osl.Mapping([osl.rule("leaf", osl.tensor("t").transpose())])
    leaf = osl.load(tmp_path / "files", mapping=rules)["leaf"]
    assert leaf.dtype == dtype
    for number, rules_used in enumerate((rules, rules.like(tmp_path / "files"))):
        osl.save(tmp_path / f"{number}", {"leaf": leaf}, mapping=rules_used)
        loaded = osl.load(tmp_path / f"{number}")["t"]
        assert_same_bits(loaded, value.astype("u1" if dtype.name.startswith("u") else "i1"))
        again = osl.load(tmp_path / f"{number}", {"leaf": leaf}, mapping=rules_used)["leaf"]
        assert_same_bits(again, leaf)


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 4)])
def test_a_part_of_a_tensor_is_saved_alone_if_it_is_the_first(tmp_path, start, stop):
    """As docs/mapping.md says; `like` holds it against the shape of the whole."""
    whole = {"w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    osl.save(tmp_path / "whole", whole)
    mapping = osl.Mapping([osl.rule("a", osl.tensor("w").slice(0, start, stop))])
    part = osl.load(tmp_path / "whole", mapping=mapping)
    with pytest.raises(osl.MappingError):
        osl.save(tmp_path / "like", part, mapping=mapping.like(tmp_path / "whole"))
    if start:
        with pytest.raises(osl.MappingError):
            osl.save(tmp_path / "part", part, mapping=mapping)
    else:
        osl.save(tmp_path / "part", part, mapping=mapping)
        assert np.array_equal(osl.load(tmp_path / "part")["w"], whole["w"][:stop])
