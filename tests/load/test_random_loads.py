"""Random trees, loaded in random ways, against numpy and ml_dtypes: the value, or an error by name.

`test_random_loads` runs a few; `-m soak` runs more than 20,000.
"""

from __future__ import annotations

import collections
import json
import math
import random
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_versions import enable_x64
from meshes import mesh_of
from saved_files import CODES, PACKED_BITS, packed

import orbax_safetensors_layout as osl

SMALL = [
    "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
    "int4", "uint4", "int2", "uint2",
]  # fmt: skip
PLAIN = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8"]
DTYPES = [*map(np.dtype, PLAIN), *(np.dtype(getattr(ml_dtypes, name)) for name in SMALL)]
WANTED = [*DTYPES, np.dtype(ml_dtypes.float8_e3m4), np.dtype("c16")]
VALUES = [
    0, 1, -1, True, 5_000_000_000, 2**40, 2**63, 2**70, 2**1100, 0.5, 0.1, 1e300, -0.0,
    math.inf, -math.inf, math.nan, "", "text",
]  # fmt: skip
SHAPES = [(), (1,), (8,), (16, 4), (7, 3), (8, 8, 2), (0, 4), (24,), (2, 3, 5)]
WHOLE = frozenset(["int4", "uint4", "int2", "uint2"])


def is_whole(dtype: np.dtype) -> bool:
    return dtype.kind in "iub" or dtype.name in WHOLE


def random_value(rng: random.Random, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Small numbers, all bits random, or extremes; never bytes that are no value."""
    size = math.prod(shape)
    kind = rng.choice(["small", "bits", "extreme"])
    if dtype == np.bool_ or (kind == "small" and not is_whole(dtype)):
        values = np.array([rng.choice([0, 1, 2, 0.5, 3]) for _ in range(size)], np.float32)
        return values.astype(dtype).reshape(shape)
    if is_whole(dtype):
        bounds = ml_dtypes.iinfo(dtype) if dtype.name in WHOLE else np.iinfo(dtype)
        low, high = int(bounds.min), int(bounds.max)
        if kind == "small":
            low, high = max(low, -3), min(high, 3)
        numbers = [rng.choice([low, high, rng.randint(low, high)]) for _ in range(size)]
        plain = np.dtype("i1" if low < 0 else "u1") if dtype.name in WHOLE else dtype
        return np.array(numbers, plain).astype(dtype).reshape(shape)
    raw = np.frombuffer(rng.randbytes(size * dtype.itemsize), np.uint8)
    if dtype in PACKED_BITS:
        raw = raw & ((1 << PACKED_BITS[dtype]) - 1)
    return raw.view(dtype).reshape(shape).copy()


# The oracle: what numpy makes of a value, or None where it must be refused.


def integers(value: np.ndarray) -> list[int] | None:
    values = []
    for item in np.asarray(value).reshape(-1):
        number = item.item() if value.dtype.kind in "iubf" else float(item)
        if number != number or math.isinf(number) or number != int(number):
            return None
        values.append(int(number))
    return values


def converted(value: np.ndarray, dtype: np.dtype, exact: bool) -> np.ndarray | None:
    if value.dtype == dtype:
        return value
    if value.dtype.kind == "c" and dtype.kind != "c":
        return None
    if is_whole(dtype):
        number = integers(value)
        bounds = ml_dtypes.iinfo(dtype) if dtype.name in WHOLE else None
        bounds = bounds or (None if dtype.kind == "b" else np.iinfo(dtype))
        low, high = (0, 1) if bounds is None else (int(bounds.min), int(bounds.max))
        if number is None or any(not low <= n <= high for n in number):
            return None
        plain = np.dtype("i1" if low < 0 else "u1") if dtype.name in WHOLE else dtype
        return np.array(number, plain).astype(dtype).reshape(value.shape)
    with np.errstate(all="ignore"):
        try:
            result = value.astype(dtype)
        except TypeError:  # ml_dtypes has no cast between some small floats
            result = value.astype(np.float32).astype(dtype)
        if exact:
            real = result if value.dtype.kind == "c" else result.real
            if is_whole(value.dtype):
                return result if integers(real) == integers(value) else None
            if not survives(value, real.astype(value.dtype)):
                return None
    return result


def may_be_codes(stored: np.dtype, wanted: np.dtype) -> bool:
    """Whether a mapping has to say that a tensor may be cast so."""
    is_small = stored.itemsize == 1 and stored.kind != "b"
    is_float = wanted.kind == "f" or (wanted.name.startswith(("float", "bfloat")))
    return is_small and stored != wanted and is_float and (wanted.itemsize > 1 or is_whole(stored))


def survives(value: np.ndarray, back: np.ndarray) -> bool:
    return bool(np.all((back == value) | ((back != back) & (value != value))))


def scalar_of(value: Any, kind: type) -> Any:
    """A value as a Python scalar; None where the type does not hold it."""
    if isinstance(value, np.ndarray):
        if value.shape != () or kind is str:
            return None
        value = value.item() if value.dtype.kind in "biufc" else float(value)
    if isinstance(value, str) is not (kind is str):
        return None
    try:
        scalar = kind(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return (
        scalar
        if scalar == value or (kind is float and scalar != scalar and value != value)
        else None
    )


def number_as_array(value: Any, dtype: np.dtype, exact: bool) -> np.ndarray | None:
    if isinstance(value, str):
        return None
    array = np.asarray(value)
    if array.dtype == object:
        try:
            array = None if is_whole(dtype) or float(value) != value else np.asarray(float(value))
        except OverflowError:
            return None
    return None if array is None else converted(array, dtype, exact)


class Case:
    """One checkpoint, and loads of it."""

    def __init__(self, seed: int, folder: Path, counts: collections.Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.counts = counts
        self.mesh = mesh_of(x=4, y=2)
        self.values: dict[str, Any] = {}
        for number in range(self.rng.randint(1, 5)):
            dtype, shape = self.rng.choice(DTYPES), self.rng.choice(SHAPES)
            self.values[f"a{number % 2}.{number}"] = random_value(self.rng, dtype, shape)
        self.by = self.rng.choice(["hf", "hf", "sharded", "sharded", "others"])
        if self.by == "others":
            self._write_by_hand()
        else:
            for number in range(self.rng.randint(0, 3)):
                self.values[f"v.{number}"] = self.rng.choice(VALUES)
            self._save()

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        specs = [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P(("x", "y"))]
        fit = [
            spec
            for spec in specs
            if len(spec) <= len(shape)
            and all(
                not axes or n % math.prod(self.mesh.shape[a] for a in np.atleast_1d(axes)) == 0
                for n, axes in zip(shape, spec, strict=False)
            )
        ]
        return NamedSharding(self.mesh, self.rng.choice(fit))

    def _save(self) -> None:
        tree: dict[str, Any] = {}
        self.on_device: dict[str, np.dtype] = {}
        with enable_x64(True):
            for name, value in self.values.items():
                *above, last = name.split(".")
                node = tree
                for part in above:
                    node = node.setdefault(part, {})
                node[last] = value
                device = isinstance(value, np.ndarray) and self.rng.random() < 0.5
                if device and holds(value.dtype):
                    node[last] = jax.device_put(value, self.sharding(value.shape))
                    self.on_device[name] = value.dtype
            options = osl.WriteOptions(
                layout=self.by, max_file_bytes=self.rng.choice([64, 1 << 20])
            )
            osl.save(self.folder, tree, options=options)

    def _write_by_hand(self) -> None:
        """A file as the format's text says, with nothing of this package."""
        header, data = {}, b""
        for name, value in list(self.values.items()):
            bits = PACKED_BITS.get(value.dtype, 8 * value.dtype.itemsize)
            code = CODES.get(value.dtype.name, "")
            if value.dtype.name in WHOLE or (bits < 8 and value.size % 8):
                value = self.values[name] = np.zeros(value.shape, np.uint8)
                bits, code = 8, "U8"
            raw = packed(value, bits) if bits < 8 else value.tobytes()
            offsets = [len(data), len(data) + len(raw)]
            header[name] = {"dtype": code, "shape": value.shape, "data_offsets": offsets}
            data += raw
        text = json.dumps(header).encode()
        self.on_device = {}
        self.folder.mkdir()
        (self.folder / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + data
        )

    # Ways of loading. Each gives what is asked and what must come back, None for a refusal.

    def load(self) -> None:
        way = self.rng.choice(["whole", "only", "tree", "tree", "tree", "tree", "mapped", "mapped"])
        x64 = self.rng.random() < 0.4
        with enable_x64(x64):
            getattr(self, f"_{way}")(x64)
        self.counts[way] += 1
        self.counts["loads"] += 1

    def _whole(self, x64: bool) -> None:
        expected: dict[str, Any] = dict(self.values)
        for name, dtype in self.on_device.items():
            expected[name] = converted(self.values[name], held(dtype), exact=True)
        self._check(lambda: flat(osl.load(self.folder)), expected)

    def _only(self, x64: bool) -> None:
        arrays = {n: v for n, v in self.values.items() if isinstance(v, np.ndarray)}
        pattern = self.rng.choice(["*", "a*", "a{0,1}.*", "a0.0"])
        expected = {n: v for n, v in arrays.items() if pattern != "a0.0" or n == "a0.0"}
        self._check(lambda: osl.load(self.folder, only=pattern), expected)
        metadata = osl.metadata(self.folder)
        assert {n: (f.shape, f.dtype) for n, f in metadata.items()} == {
            n: (v.shape, v.dtype) for n, v in arrays.items()
        }

    def _wish(self, value: Any, *, as_stored: bool = True) -> tuple[Any, Any]:
        """Something to ask for in place of a value, and what must come back."""
        rng = self.rng
        shape = value.shape if isinstance(value, np.ndarray) else ()
        own = value.dtype if isinstance(value, np.ndarray) else np.dtype("f4")
        if shape == () and rng.random() < (0.2 if isinstance(value, np.ndarray) else 0.6):
            kinds = [bool, int, float, str] if rng.random() < 0.2 else [type(value)]
            kind = rng.choice([k for k in kinds if k in (bool, int, float, str)] or [float])
            return rng.choice([kind, kind()]), scalar_of(value, kind)
        dtype = rng.choice(WANTED) if rng.random() < 0.35 else own
        if isinstance(value, np.ndarray) and as_stored and may_be_codes(own, dtype):
            return np.zeros(shape, dtype), None
        if rng.random() < 0.5:
            make = lambda v, d, e: (  # noqa: E731
                converted(v, d, e) if isinstance(v, np.ndarray) else number_as_array(v, d, e)
            )
            return np.zeros(shape, dtype), make(value, dtype, False)
        given = held(dtype)
        struct = jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(shape))
        if not holds(given):
            return struct, None
        exact = given != dtype
        if isinstance(value, np.ndarray):
            return struct, converted(value, given, exact)
        return struct, number_as_array(value, given, exact)

    def _tree(self, x64: bool) -> None:
        abstract, expected = {}, {}
        for name, value in self.values.items():
            if self.rng.random() < 0.15:
                continue
            abstract[name], expected[name] = self._wish(value)
        self._check(lambda: osl.load(self.folder, abstract), expected)

    def _mapped(self, x64: bool) -> None:
        rules, abstract, expected = [], {}, {}
        for name, value in self.values.items():
            if not isinstance(value, np.ndarray):
                continue
            expr, array = osl.tensor(name), value
            if value.ndim > 1 and value.dtype not in PACKED_BITS and self.rng.random() < 0.5:
                expr, array = expr.transpose(), np.ascontiguousarray(array.T)
            if self.rng.random() < 0.3:
                dtype = self.rng.choice(DTYPES)
                expr, array = expr.cast(dtype), converted(array, dtype, False)
            rules.append(osl.rule(f"m.{name}", expr))
            leaves = [f"m.{name}"]
            for number in range(self.rng.choice([0, 0, 1, 2])):
                leaves.append(f"t{number}.{name}")
                rules.append(osl.rule(leaves[-1], None, tied_to=f"m.{name}"))
            for leaf in leaves:
                if array is None:
                    abstract[leaf], expected[leaf] = np.zeros(value.shape[::-1], dtype), None
                else:
                    as_stored = array.dtype == value.dtype
                    abstract[leaf], expected[leaf] = self._wish(array, as_stored=as_stored)
        self._check(lambda: osl.load(self.folder, abstract, mapping=osl.Mapping(rules)), expected)

    def _check(self, load, expected: dict[str, Any]) -> None:
        refused = [name for name, value in expected.items() if value is None]
        try:
            loaded = load()
        except osl.SafetensorsLayoutError:
            self.counts["refused"] += 1
            assert refused, f"refused what fits: {expected}"
            return
        assert not refused, f"not refused: {refused} {[loaded.get(n) for n in refused]}"
        assert loaded.keys() == expected.keys()
        assert_equal(loaded, expected)
        for value in loaded.values():  # who has arrays of numpy may write to them
            if isinstance(value, np.ndarray) and value.size:
                value.reshape(-1).view(np.uint8)[:] = 0
        devices = {n: v for n, v in loaded.items() if isinstance(v, jax.Array)}
        assert_equal(devices, {n: expected[n] for n in devices})
        self.counts["leaves"] += len(loaded)


def assert_equal(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in loaded.items():
        reference = expected[name]
        if isinstance(reference, np.ndarray):
            array = np.asarray(value)
            assert (array.shape, array.dtype) == (reference.shape, reference.dtype), name
            assert array.tobytes() == reference.tobytes(), (name, array, reference)
        else:
            assert type(value) is type(reference), name
            assert value == reference or (value != value and reference != reference), name


def flat(tree: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(key.key) for key in path): leaf for path, leaf in paths}


def held(dtype: np.dtype) -> np.dtype:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def holds(dtype: np.dtype) -> bool:
    """Whether this jax has arrays of a dtype."""
    try:
        return jax.device_put(np.zeros(1, dtype)).dtype == dtype
    except (TypeError, RuntimeError):
        return False


def run(seeds: range, tmp_path: Path, loads: int) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        case = Case(seed, tmp_path / str(seed), counts)
        for number in range(loads):
            try:
                case.load()
            except BaseException as error:
                error.add_note(f"seed {seed}, load {number}, {case.by}: {case.values}")
                raise
    return counts


def test_random_loads(tmp_path):
    counts = run(range(24), tmp_path, loads=8)
    assert counts["loads"] == 192
    assert counts["leaves"] > 200
    assert counts["refused"] > 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_loads(tmp_path):
    counts = run(range(1000, 1700), tmp_path, loads=30)
    print(dict(counts))
    assert counts["loads"] == 21_000
