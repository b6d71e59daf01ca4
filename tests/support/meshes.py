"""Meshes of the test devices, shardings on them, and abstract leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def mesh_of(
    devices: Sequence[jax.Device] | None = None, /, *, axis_types: Any = None, **axes: int
) -> Mesh:
    """Return a mesh with axes of these sizes, over the first of `devices` (by default of all).

    One size may be -1: the mesh then takes all devices.
    """
    sizes = tuple(axes.values())
    chosen = np.array(jax.devices() if devices is None else devices)
    if -1 not in sizes:
        chosen = chosen[: math.prod(sizes)]
    return Mesh(chosen.reshape(sizes), tuple(axes), axis_types=axis_types)


def abstract_of(tree: Any, sharding: Sharding | Callable[[Any], Sharding] | None = None) -> Any:
    """Return `tree` with a `jax.ShapeDtypeStruct` in place of each leaf.

    Args:
        tree: Leaves with a shape and a dtype.
        sharding: That of all leaves, or a function of a leaf; without it each `jax.Array` keeps
            its own, and other leaves stay as they are.
    """

    def abstract(leaf: Any) -> Any:
        if sharding is None and not isinstance(leaf, jax.Array):
            return leaf
        of = sharding or leaf.sharding
        of = of if isinstance(of, Sharding) else of(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of)

    return jax.tree.map(abstract, tree)


def place(value: Any, spec: PartitionSpec, mesh: Mesh | None = None) -> jax.Array:
    """Return `value` as an array with this sharding, by default over a mesh `x=4, y=2`."""
    return jax.device_put(value, NamedSharding(mesh or mesh_of(x=4, y=2), spec))


def any_sharding(data: st.DataObject, shape: Sequence[int]) -> NamedSharding:
    """Draw any mesh axes over any dimensions that they divide."""
    mesh = mesh_of(x=2, y=4)
    spec, left = [], ["x", "y"]
    for extent in shape:
        fitting = [axis for axis in left if extent and extent % mesh.shape[axis] == 0]
        chosen = data.draw(st.sampled_from([None, *fitting]))
        spec.append(chosen)
        left = [axis for axis in left if axis != chosen]
    return NamedSharding(mesh, PartitionSpec(*spec))


def over_matrices(spec: PartitionSpec) -> Callable[[Any], Sharding]:
    """Return a function for `abstract_of`: `spec` for matrices, over a mesh `x=4, y=2`."""
    mesh = mesh_of(x=4, y=2)
    return lambda leaf: NamedSharding(mesh, spec if leaf.ndim == 2 else PartitionSpec())
