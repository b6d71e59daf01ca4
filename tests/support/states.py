"""Trees of everything that a training loop holds, and whether what comes back is the same."""

from __future__ import annotations

import collections

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from checkpoints import assert_same_bits, random_tensor
from jax.sharding import PartitionSpec as P
from meshes import place

Point = collections.namedtuple("Point", ["x", "y"])


def same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert type(leaf) is type(other)
        if isinstance(other, jax.Array):
            assert leaf.sharding.is_equivalent_to(other.sharding, other.ndim)
            assert leaf.dtype == other.dtype
            if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
                assert jax.random.key_impl(leaf) == jax.random.key_impl(other)
                leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        if isinstance(other, jax.Array | np.ndarray | np.generic):
            assert_same_bits(np.asarray(leaf), np.asarray(other))
        else:
            assert leaf == other


def everything():
    values = {
        str(dtype): place(random_tensor((8, 4), np.dtype(dtype), number), P("x", "y"))
        for number, dtype in enumerate(
            [
                np.float32,
                ml_dtypes.bfloat16,
                ml_dtypes.float8_e4m3fn,
                np.int8,
                np.bool_,
                np.complex64,
            ]
        )
    }
    return {
        "arrays": values,
        "int4": place(np.arange(-8, 8).reshape(8, 2).astype(ml_dtypes.int4), P("x")),
        "float4": place(
            np.arange(12, dtype=np.uint8).reshape(4, 3).view(ml_dtypes.float4_e2m1fn), P("x")
        ),
        "scalars": {"int": 3, "big": 1 << 80, "float": 0.1, "bool": True, "text": "hällo"},
        "host": [np.arange(3.0), np.float32(2.5), np.int64(7)],
        "zero": place(np.zeros((0, 4), np.float32), P()),
        "point": Point(x=place(np.float32(1.5), P()), y=None),
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None, "state": optax.EmptyState()},
        "keys": place(jax.random.split(jax.random.key(1), 8), P("x")),
        "key": jax.random.key(0, impl="rbg"),
        "numbers": {5: (1, [2, (3,)]), 10: 4},
    }


def train_state():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = flax.training.train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=transform
    )
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
