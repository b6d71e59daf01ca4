"""Ways between files and the memory of devices that are compared, and the trees they are asked for.

A load is prepared before the clock and then called; so is a saver.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import contenders
import jax
import mapping_contenders as mapped
import numpy as np
import safetensors.numpy
import save_contenders
from accelerator_child import BUDGET_BYTES
from cases import ITEMSIZE, data_files, stored_tensors
from child import assert_same_bits, spot_checks
from contenders import Abstract, Tree
from mapping_contenders import Grid, Kind

import orbax_safetensors_layout as osl

_READ = osl.ReadOptions(memory_budget_bytes=BUDGET_BYTES)
_WRITE = osl.WriteOptions(memory_budget_bytes=BUDGET_BYTES, fsync=False)
_ALIGNMENT = 64


def _as_stored(kind: Kind) -> Kind:
    axes = " ".join(kind.axes)
    return kind._replace(pattern=f"{axes} -> {axes}")


Model = Mapping[str, Kind]

WAYS: Mapping[str, Model | None] = MappingProxyType(
    {
        "plain": None,
        "stacked": {leaf: _as_stored(kind) for leaf, kind in mapped.MODELS["llama"].items()},
        "transposed": mapped.MODELS["llama"],
    }
)
"""The model that tensors become: none; layers stacked; that, and kernels transposed."""

Load = Callable[[], Tree]
Save = Callable[[Path, str, Tree], object]


def _grids(model: Model, folder: Path) -> dict[str, Grid]:
    return mapped.grids(model, stored_tensors(folder))


def abstract_tree(way: str, folder: Path, split: str) -> Abstract:
    """The tree that every contender is asked for."""
    model = WAYS[way]
    if model is None:
        return contenders.abstract_tree(stored_tensors(folder), split)
    return mapped.model_tree(model, _grids(model, folder), split)


def _mapping(way: str) -> osl.Mapping | None:
    model = WAYS[way]
    return None if model is None else mapped.mapping_of(model)


def _ours(folder: Path, way: str, abstract: Abstract, options: osl.ReadOptions = _READ) -> Load:
    """This package."""
    mapping = _mapping(way)
    return lambda: cast(Tree, osl.load(folder, abstract, mapping=mapping, options=options))


def _device_put(_: Path, way: str, abstract: Abstract) -> Load:
    """The limit: `jax.device_put` of shards that are in memory, one call for all."""
    shards: list[np.ndarray] = []
    devices: list[Any] = []
    for leaf in abstract.values():
        boxes: dict[object, np.ndarray] = {}
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            box = tuple((part.start, part.stop) for part in index)
            if box not in boxes:
                boxes[box] = _ready(leaf.sharding.shard_shape(leaf.shape), leaf.dtype, device)
            shards.append(boxes[box])
            devices.append(device)

    def put() -> Tree:
        arrays = iter(jax.device_put(shards, devices))
        tree = {}
        for name, leaf in abstract.items():
            of_leaf = [next(arrays) for _ in leaf.sharding.addressable_devices]
            tree[name] = jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, of_leaf
            )
        return tree

    return put


def _ready(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> np.ndarray:
    """Memory whose pages are there; such as is copied on the CPU, too, where JAX adopts aligned."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.ones(nbytes + 2 * _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT + (16 if device.platform == "cpu" else 0)
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _load_file(folder: Path, way: str, abstract: Abstract) -> Load:
    """`safetensors.numpy.load_file`, numpy on whole tensors, and `device_put`."""
    model = WAYS[way]
    if model is None:
        return functools.partial(contenders.load_file, folder, abstract)
    found = _grids(model, folder)

    def load() -> Tree:
        tensors: dict[str, np.ndarray] = {}
        for path in data_files(folder):
            tensors |= safetensors.numpy.load_file(path)
        tree = {}
        for leaf, kind in model.items():
            grid = found[leaf]
            parts = [kind.transform(tensors.pop(name)) for name in grid.tensors]
            value = np.stack(parts).reshape(*grid.shape, *parts[0].shape)
            tree[leaf] = jax.device_put(value, abstract[leaf].sharding)
        return tree

    return load


def _plain(load: Callable[[Path, Abstract], Tree]) -> Callable[[Path, str, Abstract], Load]:
    return lambda folder, way, abstract: functools.partial(load, folder, abstract)


LOADS: Mapping[str, Callable[[Path, str, Abstract], Load]] = MappingProxyType(
    {
        "device_put": _device_put,
        "ours": _ours,
        "unregistered": functools.partial(
            _ours, options=dataclasses.replace(_READ, register_memory=False)
        ),
        "load_file": _load_file,
        "builtin": _plain(contenders.builtin),
        "ocdbt": _plain(contenders.ocdbt),
    }
)


def _save_ours() -> Save:
    """This package, not flushed."""
    return lambda target, way, tree: osl.save(target, tree, mapping=_mapping(way), options=_WRITE)


def _save_ocdbt() -> Save:
    """Orbax's own format, not flushed."""
    save = save_contenders.CONTENDERS["ocdbt"].open()
    return lambda target, way, tree: save(target, tree)


def _device_get(_: Path, way: str, tree: Tree) -> list[np.ndarray]:
    """The limit: each shard once to the host, all at the same time; no file."""
    shards = [s for array in tree.values() for s in array.addressable_shards if not s.replica_id]
    for shard in shards:
        shard.data.copy_to_host_async()
    # On the CPU numpy would see the arrays' own memory.
    return [
        np.array(shard.data) if shard.device.platform == "cpu" else np.asarray(shard.data)
        for shard in shards
    ]


SAVES: Mapping[str, Callable[[], Save]] = MappingProxyType(
    {"device_get": lambda: _device_get, "ours": _save_ours, "ocdbt": _save_ocdbt}
)


def device_figures(tree: Tree) -> dict[str, Any]:
    """The devices, the bytes of arrays on them, and the most that they held, if they tell."""
    devices = jax.local_devices()
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [stat.get("peak_bytes_in_use") for stat in stats]
    shards = [shard.data.nbytes for array in tree.values() for shard in array.addressable_shards]
    return {
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "array_bytes": sum(shards),
        "tensor_bytes": sum(array.nbytes for array in tree.values()),
        "device_peak_bytes": None if None in peaks else sum(peaks),
    }


def verify(way: str, folder: Path, tree: Tree, abstract: Abstract, *, all_leaves: bool) -> None:
    """Compares arrays with the files, shard by shard.

    Raises:
        AssertionError: An array is missing, or of another sharding or value.
    """
    model, stored = WAYS[way], stored_tensors(folder)
    assert set(tree) == set(abstract), f"{len(tree)} leaves were loaded of {len(abstract)}"
    some = spot_checks(stored) if model is None else ("embed", "layers.q", "layers.down")
    found = {} if model is None else _grids(model, folder)
    for name in abstract if all_leaves else some:
        array, leaf = tree[name], abstract[name]
        assert array.sharding.is_equivalent_to(leaf.sharding, array.ndim), name
        if model is None:
            at = stored[name]
            values = np.memmap(at.file, f"u{ITEMSIZE[at.dtype]}", "r", at.start, at.shape)
        else:
            values = mapped.expected(model[name], found[name])
        assert_same_bits(name, array, values)
