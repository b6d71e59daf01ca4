"""The ways to load a checkpoint that are compared, and the trees they are asked for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pages
import safetensors
import safetensors.numpy
from cases import Stored, data_files, stored_tensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl

Tree = dict[str, jax.Array]
Abstract = dict[str, jax.ShapeDtypeStruct]

_DTYPES = MappingProxyType({"BF16": jax.numpy.bfloat16.dtype, "F32": np.dtype(np.float32)})
_ODIRECT_THREADS = 8
_ODIRECT_BYTES = 4 << 20


class Split(NamedTuple):
    """How tensors are laid over all devices.

    Attributes:
        mesh: The lengths of the mesh axes `x` and `y`; -1 is what the devices make it.
        matrix: The mesh axes of a tensor's first dimensions, for rank 2 and more.
        vector: The mesh axes of a rank-1 tensor.
    """

    mesh: tuple[int, ...]
    matrix: tuple[str | None, ...]
    vector: tuple[str | None, ...]


SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "replicated": Split((-1,), (), ()),
        "dim0": Split((-1,), ("x",), ("x",)),
        "dim1": Split((-1,), (None, "x"), ()),
        "2d": Split((-1, 2), ("x", "y"), ("x",)),
    }
)


def shardings(split_name: str) -> Callable[[tuple[int, ...]], NamedSharding]:
    """From a tensor's shape to its sharding; equal specs give the same object."""
    split = SPLITS[split_name]
    devices = np.asarray(jax.devices()).reshape(split.mesh)
    mesh = Mesh(devices, ("x", "y")[: devices.ndim])
    cache: dict[tuple[str | None, ...], NamedSharding] = {}

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        axes = split.matrix if len(shape) > 1 else split.vector
        spec = tuple(
            axis if axis and dim % mesh.shape[axis] == 0 else None
            for dim, axis in zip(shape, axes, strict=False)
        )
        if spec not in cache:
            cache[spec] = NamedSharding(mesh, PartitionSpec(*spec))
        return cache[spec]

    return sharding


def abstract_tree(stored: Mapping[str, Stored], split_name: str) -> Abstract:
    """The flat tree that every contender is asked for."""
    sharding = shardings(split_name)
    return {
        name: jax.ShapeDtypeStruct(
            tensor.shape, _DTYPES[tensor.dtype], sharding=sharding(tensor.shape)
        )
        for name, tensor in stored.items()
    }


def ours(folder: Path, abstract: Abstract) -> Tree:
    """This package."""
    return cast(Tree, osl.load(folder, abstract))


def ours_mmap(folder: Path, abstract: Abstract) -> Tree:
    """This package, adopting mapped pages."""
    return cast(Tree, osl.load(folder, abstract, options=osl.ReadOptions(mmap=True)))


def builtin(folder: Path, abstract: Abstract) -> Tree:
    """Orbax's own `SafetensorsLayout`; it ignores the index and reads every file of the folder."""
    with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
        return cast(Tree, ocp.load(folder, abstract))


def load_file(folder: Path, abstract: Abstract) -> Tree:
    """`safetensors.numpy.load_file` of each file, and one `device_put` of its tensors."""
    tree: Tree = {}
    for path in data_files(folder):
        tensors = safetensors.numpy.load_file(path)
        places = {name: abstract[name].sharding for name in tensors}
        tree |= jax.device_put(tensors, places)
    return tree


def idiom(folder: Path, abstract: Abstract) -> Tree:
    """The loop that model cards show: each device's slice of each tensor, by a callback."""
    tree: Tree = {}
    for path in data_files(folder):
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it cannot be iterated
                leaf, stored = abstract[name], file.get_slice(name)
                tree[name] = jax.make_array_from_callback(
                    leaf.shape, leaf.sharding, lambda index, stored=stored: stored[index]
                )
    return tree


def ocdbt(folder: Path, abstract: Abstract) -> Tree:
    """Orbax's own format, saved from arrays that are sharded as they are wanted."""
    return cast(Tree, ocp.load(folder, abstract))


def odirect(folder: Path, _: Abstract) -> Tree:
    """Not a load: the files' bytes past the page cache into scratch, the disk's limit."""
    work: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    descriptors = []
    for path in data_files(folder):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        descriptors.append(descriptor)
        for start in range(0, os.fstat(descriptor).st_size, _ODIRECT_BYTES):
            work.put((descriptor, start))
    failures: list[OSError] = []

    def drain() -> None:
        scratch = [pages.anonymous(_ODIRECT_BYTES)]  # page-aligned, as O_DIRECT asks
        while True:
            try:
                descriptor, start = work.get_nowait()
            except queue.Empty:
                return
            try:
                os.preadv(descriptor, scratch, start)
            except OSError as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=drain) for _ in range(_ODIRECT_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in descriptors:
        os.close(descriptor)
    if failures:
        raise failures[0]
    return {}


CONTENDERS: Mapping[str, Callable[[Path, Abstract], Tree]] = MappingProxyType(
    {
        "ours": ours,
        "ours-mmap": ours_mmap,
        "builtin": builtin,
        "load_file": load_file,
        "idiom": idiom,
        "ocdbt": ocdbt,
        "odirect": odirect,
    }
)


def save_ocdbt(source: Path, target: Path, split_name: str) -> None:
    """Writes the Orbax checkpoint that `ocdbt` restores, in the pieces that it will ask for."""
    stored = stored_tensors(source)
    abstract = abstract_tree(stored, split_name)
    if split_name == "replicated":  # one copy of eight is written; so only one is made
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {name: leaf.update(sharding=one) for name, leaf in abstract.items()}
    ocp.save(target, load_file(source, abstract))
