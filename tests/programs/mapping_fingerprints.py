import functools
import sys

import numpy as np

from orbax_safetensors_layout.mapping import Mapping, fingerprint, opaque, rule, tensor

FACTOR = float(sys.argv[1])
objects = [object() for _ in range(int(sys.argv[2]))]  # moves what comes after to other addresses


def times(values, factor):
    return values * factor


def scaled(values):
    return values * FACTOR


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, values):
        return values * self.factor

    def scale(self, values):
        return values * self.factor


def enclosing(factor):
    def call(values, depth=1):
        return call(values, 0) if depth else values * factor

    return call


FUNCTIONS = [
    functools.partial(times, factor=FACTOR),
    functools.partial(times, factor=np.full(3, FACTOR)),
    scaled,
    Scaled(FACTOR),
    Scaled(FACTOR).scale,
    enclosing(FACTOR),
    lambda values, factor=FACTOR: values * factor,
    functools.lru_cache(enclosing(FACTOR)),
    np.vectorize(enclosing(FACTOR)),
    eval(f"lambda values: values * {FACTOR}"),
    eval(f"lambda values: values in {{'a', 'bc', 'def', {FACTOR}}}"),
    np.add if FACTOR == 1 else np.multiply,
    len if FACTOR == 1 else abs,
]
for function in FUNCTIONS:
    expr = opaque(function, tensor("w"), shape=(3,), dtype="float32")
    print(fingerprint(Mapping([rule("z", expr)])))
