"""The synthetic checkpoints of the benchmark: what is in them, and how they are written."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np

INDEX_NAME = "model.safetensors.index.json"
ITEMSIZE = MappingProxyType({"BF16": 2, "F32": 4})

# A prime, so that the repeated random bytes never line up with a shard, a row or a page.
_POOL_BYTES = 16_777_259
_MAX_FILE_BYTES = 500_000_000
_ALIGNED_START_BYTES = 4096


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its shape.
        dtype: Its dtype's code in the header.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A kind of checkpoint.

    Attributes:
        about: One line for the report.
        tensors: From a scale (1.0 for the real size) to the tensors, in file order.
        aligned: Pad headers so that the data starts at a multiple of 4096 bytes. Otherwise data
            starts at a multiple of 8 that is none of 64, as in most published files.
    """

    about: str
    tensors: Callable[[float], Iterable[Tensor]]
    aligned: bool = False


class Stored(NamedTuple):
    """Where a tensor stands.

    Attributes:
        file: The file it is in.
        start: Its first byte in that file.
        shape: Its shape.
        dtype: Its dtype's code.
    """

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: str


def _scaled(dim: int, scale: float) -> int:
    """A matrix dimension such that two of them scale a tensor's bytes by `scale`."""
    return max(64, round(dim * math.sqrt(scale) / 64) * 64)


def _llama(layers: int, vocabulary: int, scale: float) -> Iterator[Tensor]:
    hidden, inter, kv = (_scaled(dim, scale) for dim in (4096, 14336, 1024))
    vocabulary = _scaled(vocabulary, scale)
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden), "BF16")
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "input_layernorm.weight": (hidden,),
            "mlp.down_proj.weight": (hidden, inter),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
        }.items():
            yield Tensor(prefix + name, shape, "BF16")
    yield Tensor("model.norm.weight", (hidden,), "BF16")
    yield Tensor("lm_head.weight", (vocabulary, hidden), "BF16")


def _moe(scale: float) -> Iterator[Tensor]:
    """One layer with a tensor per expert, one with the experts stacked to `[E, D, F]`."""
    experts, hidden, inter = 64, _scaled(2048, scale), _scaled(1280, scale)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            yield Tensor(f"{prefix}self_attn.{name}_proj.weight", (hidden, hidden), "BF16")
        yield Tensor(prefix + "mlp.gate.weight", (experts, hidden), "BF16")
        if layer == 1:
            yield Tensor(prefix + "mlp.experts.gate_up_proj", (experts, hidden, 2 * inter), "BF16")
            yield Tensor(prefix + "mlp.experts.down_proj", (experts, inter, hidden), "BF16")
            continue
        for expert in range(experts):
            one = f"{prefix}mlp.experts.{expert}."
            yield Tensor(one + "down_proj.weight", (hidden, inter), "BF16")
            yield Tensor(one + "gate_proj.weight", (inter, hidden), "BF16")
            yield Tensor(one + "up_proj.weight", (inter, hidden), "BF16")


def _experts(scale: float) -> Iterator[Tensor]:
    """Layers with a tensor per expert, as Mixtral and Qwen 3 have them."""
    hidden, inter = _scaled(2048, scale), _scaled(1408, scale)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            yield Tensor(f"{prefix}self_attn.{name}_proj.weight", (hidden, hidden), "BF16")
        yield Tensor(prefix + "mlp.gate.weight", (64, hidden), "BF16")
        for expert in range(64):
            one = f"{prefix}mlp.experts.{expert}."
            yield Tensor(one + "down_proj.weight", (hidden, inter), "BF16")
            yield Tensor(one + "gate_proj.weight", (inter, hidden), "BF16")
            yield Tensor(one + "up_proj.weight", (inter, hidden), "BF16")


def _many(count: int, shape: tuple[int, ...], scale: float) -> Iterator[Tensor]:
    for number in range(max(8, round(count * scale))):
        yield Tensor(f"blocks.{number // 10}.part_{number % 10}.weight", shape, "F32")


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "llama": Case("4 layers of Llama/Mistral-7B shapes", lambda s: _llama(4, 32768, s)),
        "mini": Case("the same with 1 layer, for replication", lambda s: _llama(1, 11264, s)),
        "moe": Case("64 experts, per expert and stacked", _moe),
        "experts": Case("2 layers of 64 experts, a tensor each", _experts),
        "small": Case("5,000 tensors of 64 KiB", lambda s: _many(5_000, (128, 128), s)),
        "tiny": Case("60,000 tensors of 512 bytes", lambda s: _many(60_000, (8, 16), s)),
        "aligned": Case(
            "the llama tensors, data 4096-aligned", lambda s: _llama(4, 32768, s), aligned=True
        ),
    }
)
WARMUP = Case("a few tensors", lambda _: [Tensor(f"w{i}", (64, 64), "BF16") for i in range(4)])


def folder_name(case: str, scale: float) -> str:
    """A folder's name for a case; it changes with the tensors, so no stale checkpoint is used."""
    tensors = list(CASES[case].tensors(scale))
    return f"{case}-{scale:g}-{zlib.crc32(repr(tensors).encode()):08x}"


def make(case: Case, folder: Path, *, scale: float) -> None:
    """Writes a case's checkpoint with its index, unless the folder stands already."""
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pool = np.random.default_rng(0).integers(0, 256, _POOL_BYTES, dtype=np.uint8)
    files = list(_split(case.tensors(scale), max_bytes=int(_MAX_FILE_BYTES * scale)))
    weight_map: dict[str, str] = {}
    offset = 0
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), name)
        with open(partial / name, "wb") as file:
            file.write(encode_header(tensors, aligned=case.aligned))
            offset = _write_random(file, sum(tensor.nbytes for tensor in tensors), pool, offset)
    total = sum(tensor.nbytes for tensors in files for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / INDEX_NAME).write_text(json.dumps(index, indent=1))
    partial.rename(folder)


def _split(tensors: Iterable[Tensor], *, max_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors of each file, in order."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    yield group


def encode_header(tensors: Iterable[Tensor], *, aligned: bool) -> bytes:
    """The length and the JSON header of a file that holds the tensors one after the other."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % (_ALIGNED_START_BYTES if aligned else 8))
    if not aligned and (len(text) + 8) % 64 == 0:
        text += b" " * 8
    return len(text).to_bytes(8, "little") + text


def _write_random(file: BinaryIO, nbytes: int, pool: np.ndarray, offset: int) -> int:
    """Writes bytes of the endlessly repeated pool; returns where the next bytes begin in it."""
    while nbytes:
        piece = pool[offset : offset + nbytes]
        file.write(piece.data)
        nbytes -= piece.size
        offset = (offset + piece.size) % pool.size
    return offset


def data_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that hold tensors."""
    return sorted(folder.glob("*.safetensors"))


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint that `make` wrote, by name, in file order."""
    stored: dict[str, Stored] = {}
    for path in data_files(folder):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        del header["__metadata__"]
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            stored[name] = Stored(path, start, tuple(entry["shape"]), entry["dtype"])
    return stored
