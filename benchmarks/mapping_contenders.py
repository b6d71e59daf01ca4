"""Ways to load a checkpoint into a model of other names and shapes, and to save it from there:
layers stacked, kernels transposed, heads split out, experts stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import jax
import numpy as np
from cases import ITEMSIZE, Stored, stored_tensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl

Tree = dict[str, jax.Array]
Abstract = dict[str, jax.ShapeDtypeStruct]

HEAD_DIM = 64
_BF16 = jax.numpy.bfloat16.dtype
_OPTIONS = osl.ReadOptions(memory_budget_bytes=64 << 20)
_NOT_FLUSHED = osl.WriteOptions(memory_budget_bytes=64 << 20, fsync=False)

# Which dimensions are divided among the devices: e(mbed), h(eads), f (MLP), v(ocabulary).
SPLITS: Mapping[str, tuple[tuple[int, ...], Mapping[str, str]]] = MappingProxyType(
    {
        "replicated": ((-1,), {}),
        "fsdp": ((-1,), {"e": "x"}),
        "tensor": ((-1,), {"h": "x", "f": "x", "v": "x"}),
        "2d": ((-1, 2), {"e": "x", "h": "y", "f": "y", "v": "y"}),
    }
)


class Kind(NamedTuple):
    """A leaf of the model.

    Attributes:
        source: Its tensors' names; `{i}` is a layer, `{n}` an expert.
        pattern: What becomes of a tensor's axes, in the notation of einops.
    """

    source: str
    pattern: str

    @property
    def axes(self) -> list[str]:
        """A letter for each of a tensor's axes; of heads and their elements that of the heads."""
        return self._side(0).replace("(h d)", "h").split()

    @property
    def leaf_axes(self) -> list[str]:
        """The same for the leaf's, layers and experts first."""
        return [axis for axis in "in" if f"{{{axis}}}" in self.source] + self._side(1).split()

    def _side(self, number: int) -> str:
        return self.pattern.split(" -> ")[number]

    def transform(self, tensor: np.ndarray) -> np.ndarray:
        """The axes put right by numpy, in a view."""
        if "(" in self.pattern:
            at = self.axes.index("h")
            shape = tensor.shape
            tensor = tensor.reshape(*shape[:at], -1, HEAD_DIM, *shape[at + 1 :])
        before = self._side(0).replace("(", "").replace(")", "").split()
        return tensor.transpose([before.index(axis) for axis in self._side(1).split()])


_ATTENTION = {
    "layers.q": Kind("model.layers.{i}.self_attn.q_proj.weight", "(h d) e -> e h d"),
    "layers.k": Kind("model.layers.{i}.self_attn.k_proj.weight", "(h d) e -> e h d"),
    "layers.v": Kind("model.layers.{i}.self_attn.v_proj.weight", "(h d) e -> e h d"),
    "layers.o": Kind("model.layers.{i}.self_attn.o_proj.weight", "e (h d) -> h d e"),
}
_EXPERT = "model.layers.{i}.mlp.experts.{n}."

MODELS: Mapping[str, Mapping[str, Kind]] = MappingProxyType(
    {
        "llama": {
            "embed": Kind("model.embed_tokens.weight", "v e -> v e"),
            "head": Kind("lm_head.weight", "v e -> e v"),
            "norm": Kind("model.norm.weight", "e -> e"),
            "layers.norm_1": Kind("model.layers.{i}.input_layernorm.weight", "e -> e"),
            "layers.norm_2": Kind("model.layers.{i}.post_attention_layernorm.weight", "e -> e"),
            **_ATTENTION,
            "layers.gate": Kind("model.layers.{i}.mlp.gate_proj.weight", "f e -> e f"),
            "layers.up": Kind("model.layers.{i}.mlp.up_proj.weight", "f e -> e f"),
            "layers.down": Kind("model.layers.{i}.mlp.down_proj.weight", "e f -> f e"),
        },
        "experts": {
            **_ATTENTION,
            "layers.router": Kind("model.layers.{i}.mlp.gate.weight", "n e -> e n"),
            "layers.gate": Kind(_EXPERT + "gate_proj.weight", "f e -> e f"),
            "layers.up": Kind(_EXPERT + "up_proj.weight", "f e -> e f"),
            "layers.down": Kind(_EXPERT + "down_proj.weight", "e f -> f e"),
        },
    }
)


def mapping_of(model: Mapping[str, Kind]) -> osl.Mapping:
    """The mapping of a model."""
    rules = []
    for leaf, kind in model.items():
        expr = osl.tensor(kind.source)
        left, _, right = kind.pattern.partition(" -> ")
        if left != right:
            sizes = {"d": HEAD_DIM} if "(" in kind.pattern else {}
            expr = expr.rearrange(kind.pattern, **sizes)
        for axis in "ni":
            if f"{{{axis}}}" in kind.source:
                expr = osl.stack(expr, over=axis)
        rules.append(osl.rule(leaf, expr))
    return osl.Mapping(rules)


class Grid(NamedTuple):
    """The tensors that one leaf is made of.

    Attributes:
        shape: Layers, and experts.
        tensors: The tensors in that order, by name.
    """

    shape: tuple[int, ...]
    tensors: dict[str, Stored]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each."""
        return next(iter(self.tensors.values())).shape


def grids(model: Mapping[str, Kind], stored: Mapping[str, Stored]) -> dict[str, Grid]:
    """Of each leaf its tensors."""
    found = {}
    for leaf, kind in model.items():
        pattern = re.compile(re.sub(r"\\{\w\\}", r"(\\d+)", re.escape(kind.source)))
        matches = (match for name in stored if (match := pattern.fullmatch(name)))
        some = sorted((tuple(map(int, m.groups())), m.string) for m in matches)
        shape = tuple(n + 1 for n in some[-1][0])
        found[leaf] = Grid(shape, {name: stored[name] for _, name in some})
    return found


def _sharding(split: str) -> Callable[[tuple[int, ...], Iterable[str]], NamedSharding]:
    """From shape and letters of axes to a sharding."""
    lengths, places = SPLITS[split]
    devices = np.asarray(jax.devices()).reshape(lengths)
    mesh = Mesh(devices, ("x", "y")[: devices.ndim])

    def sharding(shape: tuple[int, ...], axes: Iterable[str]) -> NamedSharding:
        names = [
            name if (name := places.get(axis)) and extent % mesh.shape[name] == 0 else None
            for extent, axis in zip(shape, axes, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*names))

    return sharding


def plain_tree(model: Mapping[str, Kind], found: Mapping[str, Grid], split: str) -> Abstract:
    """The tensors as they stand, each device with the elements that it has of the model's."""
    sharding, names = _sharding(split), {}
    for leaf, kind in model.items():
        for name, tensor in found[leaf].tensors.items():
            place = sharding(tensor.shape, kind.axes)
            names[name] = jax.ShapeDtypeStruct(tensor.shape, _BF16, sharding=place)
    return names


def model_tree(model: Mapping[str, Kind], found: Mapping[str, Grid], split: str) -> Abstract:
    """The model's leaves."""
    sharding, leaves = _sharding(split), {}
    for leaf, kind in model.items():
        grid = found[leaf]
        one = kind.transform(np.broadcast_to(np.uint8(0), grid.tensor_shape))
        shape = (*grid.shape, *one.shape)
        place = sharding(shape, kind.leaf_axes)
        leaves[leaf] = jax.ShapeDtypeStruct(shape, _BF16, sharding=place)
    return leaves


def expected(kind: Kind, grid: Grid) -> np.ndarray:
    """A leaf by numpy on whole tensors, as unsigned integers."""
    parts = [
        kind.transform(np.memmap(t.file, f"u{ITEMSIZE[t.dtype]}", "r", t.start, t.shape))
        for t in grid.tensors.values()
    ]
    return np.stack(parts).reshape(*grid.shape, *parts[0].shape)


def load_plain(folder: Path, model: Mapping[str, Kind], abstract: Abstract) -> Tree:
    """The same bytes without a mapping."""
    return cast(Tree, osl.load(folder, abstract, options=_OPTIONS))


def load_mapped(folder: Path, model: Mapping[str, Kind], abstract: Abstract) -> Tree:
    """Through a mapping."""
    return cast(Tree, osl.load(folder, abstract, mapping=mapping_of(model), options=_OPTIONS))


def load_numpy(folder: Path, model: Mapping[str, Kind], abstract: Abstract) -> Tree:
    """As Tunix does: mapped files, numpy on whole tensors, then `device_put`."""
    found = grids(model, stored_tensors(folder))
    tree = {}
    for leaf, kind in model.items():
        value = expected(kind, found[leaf]).view(_BF16)
        tree[leaf] = jax.device_put(value, abstract[leaf].sharding)
    return tree


def save_plain(target: Path, model: Mapping[str, Kind], tree: Tree) -> None:
    """The tensors as they were loaded."""
    osl.save(target, tree, options=_NOT_FLUSHED)


def save_mapped(target: Path, model: Mapping[str, Kind], tree: Tree) -> None:
    """The model's leaves, as the tensors that the mapping makes them of."""
    osl.save(target, tree, mapping=mapping_of(model), options=_NOT_FLUSHED)


CONTENDERS = MappingProxyType({"plain": load_plain, "mapped": load_mapped, "numpy": load_numpy})
SAVES = MappingProxyType({"plain-save": save_plain, "mapped-save": save_mapped})
