"""Hypothesis strategies of what to save or load: any dtype, shape, sharding; random bits."""

from __future__ import annotations

import math

import jax
import ml_dtypes
import numpy as np
from checkpoints import random_tensor
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of, place

import orbax_safetensors_layout as osl

P = PartitionSpec
F4 = np.dtype(ml_dtypes.float4_e2m1fn)

PLAIN_DTYPES = [
    *map(np.dtype, ["bool", "u1", "u2", "u4", "i1", "i2", "i4", "f2", "f4", "c8"]),
    *map(np.dtype, [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]),
    *map(np.dtype, [ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz]),
    *map(np.dtype, [ml_dtypes.float8_e8m0fnu, ml_dtypes.int4, ml_dtypes.uint4, F4]),
]
HOST_DTYPES = [
    *PLAIN_DTYPES,
    *map(np.dtype, ["f8", "i8", "u8", ">f4", ">i2", ">f8", ">c8"]),
    *map(np.dtype, [ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn]),
]
BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
MESHES = [
    {"a": 8},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
    {"a": 1, "b": 8},
]


def random_bits(shape, dtype, seed=0):
    """Every value that the dtype has, NaN payloads and -0.0 among them."""
    dtype = np.dtype(dtype)
    bits = BITS.get(dtype.name)
    if bits is None:
        return random_tensor(shape, dtype, seed)
    raw = np.asarray(random_tensor(shape, np.dtype("u1"), seed) & (1 << bits) - 1)
    return raw.view(dtype)


@st.composite
def specs(draw, axes, rank):
    names = draw(st.permutations(list(axes)))
    parts = [() for _ in range(rank)]
    for name in names[: draw(st.integers(0, len(names)))] if rank else ():
        axis = draw(st.integers(0, rank - 1))
        parts[axis] = (*parts[axis], name)
    return P(*[part or None for part in parts])


@st.composite
def sharded_leaves(draw, seed):
    axes, first = draw(st.sampled_from([*((axes, 0) for axes in MESHES), ({"a": 2, "b": 2}, 3)]))
    rank = draw(st.integers(0, 4))
    spec = draw(specs(axes, rank))
    ways = [math.prod(axes[n] for n in (part or ())) for part in spec]
    shape = tuple(w * draw(st.integers(0 if w == 1 else 1, 5)) for w in ways)
    value = random_bits(shape, draw(st.sampled_from(PLAIN_DTYPES)), seed)
    return value, place(value, spec, mesh_of(jax.devices()[first:], **axes))


@st.composite
def host_leaves(draw, seed):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    value = random_bits(tuple(shape), draw(st.sampled_from(HOST_DTYPES)), seed)
    kind = draw(st.sampled_from(["as is", "fortran", "read-only", "reversed", "scalar"]))
    if kind == "fortran":
        value = np.asfortranarray(value)
    elif kind == "read-only":
        value.flags.writeable = False
    elif kind == "reversed" and value.ndim:
        value = value[..., ::-1]
    elif kind == "scalar" and not value.ndim:
        return value, value[()]
    return value, value


@st.composite
def trees(draw):
    """Draw a tree to save, and the tensors that must arrive."""
    expected: dict[str, np.ndarray] = {}
    tree: dict[str, object] = {}
    for number in range(draw(st.integers(1, 6))):
        value, leaf = draw(st.one_of(sharded_leaves(number), host_leaves(number)))
        name = draw(st.sampled_from([f"t{number}", f"ü {number}", f"nest.t{number}"]))
        expected[name] = value
        folder, _, last = name.rpartition(".")
        into = tree.setdefault(folder, {}) if folder else tree
        into[last] = leaf
    return tree, expected


@st.composite
def sharded_tensors(draw):
    """Tensors, abstract leaves for them on any mesh, a number of files and read options."""
    axes = draw(st.sampled_from(MESHES))
    mesh = mesh_of(**axes)
    tensors, abstract = {}, {}
    for number in range(draw(st.integers(1, 4))):
        rank = draw(st.integers(0, 4))
        spec = draw(specs(axes, rank))
        ways = [math.prod(axes[n] for n in (p or ())) for p in spec]
        shape = tuple(w * draw(st.integers(0 if w == 1 else 1, 5)) for w in ways)
        dtype = draw(st.sampled_from(PLAIN_DTYPES[:13]))
        name = f"t{number}"
        tensors[name] = random_tensor(shape, dtype, number)
        sharding = NamedSharding(mesh, spec)
        abstract[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    options = osl.ReadOptions(
        request_bytes=draw(st.sampled_from([None, 7, 64, 1000])),
        latency_seconds={"local": draw(st.sampled_from([0.0, 1e-8, 2e-6]))},
        mmap=draw(st.booleans()),
    )
    return tensors, abstract, draw(st.integers(1, 3)), options
