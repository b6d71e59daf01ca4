"""A small model that changes, and its versions as `osl.publish` writes them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import orbax_safetensors_layout as osl

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int8, np.bool_]


def model(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(64, 48), (300,), (), (0, 3), (7, 5, 3)]
    return {
        f"layer.{number}.weight": jnp.asarray((rng.normal(size=shape) * 3).astype(dtype))
        for number, (shape, dtype) in enumerate(zip(shapes * 2, DTYPES * 2, strict=False))
    }


def changed(tree, seed, few=0.3):
    """Flip the lowest bit of some elements of some tensors."""
    rng = np.random.default_rng(seed)
    new = dict(tree)
    for name, value in tree.items():
        if rng.random() < 0.7 and value.size:
            host = np.array(value)
            bits = host.reshape(-1).view(np.uint8).reshape(-1, host.itemsize)
            bits[rng.random(len(bits)) < few, 0] ^= 1
            new[name] = jnp.asarray(host)
    return new


def as_bytes(tree):
    return {name: np.asarray(value).tobytes() for name, value in tree.items()}


def history(folder, count, **options):
    """Publish versions; return the bytes of each by its number."""
    tree, seen = model(), {}
    for number in range(1, count + 1):
        assert osl.publish(folder, tree, **options) == number
        seen[number] = as_bytes(tree)
        tree = changed(tree, number)
    return seen
