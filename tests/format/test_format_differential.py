"""Thousands of damaged files, given to this package and to `safetensors`: both must agree.

The only refusals that this package may add are the documented ones: repeated keys, and a header
that does not begin with `{`. Damage is what happens to files: an end that is missing, blocks that
are zeros or another file's, bits that flip, and writers that err in a name, a size or an offset.
`OSL_FUZZ_FACTOR=100` makes the run a hundred times as long.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import safetensors
from sampling import every

from orbax_safetensors_layout.errors import FormatError
from orbax_safetensors_layout.format import DTYPES, Header, header_length, parse_header

FACTOR = int(os.environ.get("OSL_FUZZ_FACTOR", "1"))
CODES = list(DTYPES)
NAMES = ["a", "b", "model.layers.0.weight", "layer-0", "", "__metadata__", "dtype", "é", "\0", "😀"]
KEYS = ["dtype", "shape", "data_offsets", "x", "a", "b", "__metadata__", "format", ""]


class Pairs(NamedTuple):
    """A JSON object that may repeat keys."""

    items: list[tuple[Any, Any]]


LITERALS: list[Any] = [
    *(None, True, "", "x", "U8", "F4", [], [0], [0, 0], Pairs([]), Pairs([("a", "b")])),
    *(0, 1, 2, 3, 8, 127, 255, -1, 1.0, 2.5, 1 << 20),
]


def dump(value: Any, rng: random.Random) -> str:
    space = rng.choice(["", "", "", " ", "\n", "\t "])
    if isinstance(value, Pairs):
        members = (f"{dump(key, rng)}{space}:{dump(item, rng)}" for key, item in value.items)
        return "{" + f",{space}".join(members) + space + "}"
    if isinstance(value, list):
        return "[" + f"{space},".join(dump(item, rng) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def valid_document(rng: random.Random) -> tuple[Pairs, int]:
    """A valid header, and the size of its data in bytes."""
    members: list[tuple[Any, Any]] = []
    position = 0
    for name in rng.sample([name for name in NAMES if name != "__metadata__"], rng.randint(0, 4)):
        dtype = DTYPES[rng.choice(CODES)]
        shape = [rng.choice([0, 1, 1, 2, 2, 3, 4, 8]) for _ in range(rng.randint(0, 3))]
        count = 1
        for dimension in shape:
            count *= dimension
        if count * dtype.bits % 8:
            shape = [4, *shape]
            count *= 4
        stop = position + count * dtype.bits // 8
        fields = [("dtype", dtype.code), ("shape", shape), ("data_offsets", [position, stop])]
        if rng.random() < 0.1:
            rng.shuffle(fields)
        members.append((name, Pairs(fields)))
        position = stop
    if rng.random() < 0.3:
        members.append(("__metadata__", rng.choice([None, Pairs([("format", "pt")])])))
    if rng.random() < 0.3:
        rng.shuffle(members)
    return Pairs(members), position


def containers(value: Any) -> list[Any]:
    """All objects and arrays in `value`, itself first."""
    if isinstance(value, Pairs):
        return [value, *(inner for _, item in value.items for inner in containers(item))]
    if isinstance(value, list):
        return [value, *(inner for item in value for inner in containers(item))]
    return []


def mutate_structure(document: Pairs, rng: random.Random) -> None:
    """Changes one node of the document in place."""
    chosen = rng.choice(containers(document))
    items = chosen.items if isinstance(chosen, Pairs) else chosen
    action = rng.random()
    index = rng.randrange(len(items)) if items else 0
    if not items or action < 0.15:
        extra = copy.deepcopy(rng.choice(LITERALS))
        items.insert(index, (rng.choice(KEYS + NAMES), extra) if items is not chosen else extra)
    elif action < 0.25:
        del items[index]
    elif action < 0.3:
        items.insert(rng.randrange(len(items)), copy.deepcopy(items[index]))
    elif action < 0.35:
        rng.shuffle(items)
    elif items is chosen:
        items[index] = mutated_leaf(items[index], rng)
    elif action < 0.5:
        items[index] = (rng.choice([*KEYS, *NAMES]), items[index][1])
    else:
        items[index] = (items[index][0], mutated_leaf(items[index][1], rng))


def mutated_leaf(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-2, -1, 1, 2])
    if isinstance(value, str) and rng.random() < 0.5:
        return rng.choice([*CODES, "C128", "u8"])
    return copy.deepcopy(rng.choice(LITERALS))


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cuts the file, or changes a few bytes of its header or its length."""
    text = bytearray(data)
    end = min(len(text), 8 + int.from_bytes(data[:8], "little"))
    start = rng.randrange(0 if rng.random() < 0.2 else 8, end)
    stop = rng.randint(start, min(end, start + rng.choice([1, 8, 64])))
    action = rng.randrange(5)
    if action == 0:
        del text[start if rng.random() < 0.5 else rng.randrange(len(text)) :]
    elif action == 1:
        text[start:stop] = bytes(stop - start)
    elif action == 2:
        text[start:stop] = text[8 : 8 + stop - start]
    elif action == 3:
        del text[start:stop]
    else:
        text[start] ^= 1 << rng.randrange(8)
    return bytes(text)


def with_length(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def structural_case(rng: random.Random) -> bytes:
    document, size = valid_document(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
        mutate_structure(document, rng)
    text = dump(document, rng)
    text += rng.choice([""] * 12 + [" ", "   \n", "\0", "x"])
    size = max(0, size + rng.choice([0] * 30 + [-1, 1, 8]))
    return with_length(text.encode(), rng.randbytes(size))


def damaged_case(rng: random.Random) -> bytes:
    document, size = valid_document(rng)
    data = with_length(dump(document, rng).encode(), rng.randbytes(size))
    return damage(data, rng) if rng.random() < 0.9 else data


def ours(data: bytes) -> Header | FormatError:
    try:
        length = header_length(data[:8], file="f", file_size=len(data))
        return parse_header(data[8 : 8 + length], file="f", file_size=len(data))
    except FormatError as error:
        return error


def theirs(data: bytes) -> list[tuple[str, dict[str, Any]]] | safetensors.SafetensorError:
    try:
        return safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        return error


def is_documented_refusal(data: bytes) -> bool:
    """Whether the header repeats a key, or begins with something else than `{`."""
    repeated = False

    def hook(pairs: list[tuple[str, Any]]) -> None:
        nonlocal repeated
        repeated |= len({key for key, _ in pairs}) < len(pairs)

    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    json.loads(text.decode(), object_pairs_hook=hook)
    return repeated or not text.startswith(b"{")


def check(data: bytes) -> str:
    header, reference = ours(data), theirs(data)
    if isinstance(header, FormatError):
        assert header.file == "f"
        if isinstance(reference, Exception):
            return "refused"
        assert is_documented_refusal(data), (data, header, reference)
        return "documented refusal"
    assert not isinstance(reference, Exception), (data, header, reference)
    assert set(header.tensors) == {name for name, _ in reference}, data
    for name, tensor in reference:
        entry = header.tensors[name]
        assert entry.name == name
        assert (entry.dtype.code, list(entry.shape)) == (tensor["dtype"], tensor["shape"]), data
        assert data[entry.start : entry.stop] == bytes(tensor["data"]), data
        assert entry.nbytes == len(tensor["data"]), data
    return "accepted"


@pytest.mark.parametrize("case", [structural_case, damaged_case])
@pytest.mark.parametrize("seed", every(1, range(2)))
def test_agrees_with_the_rust_library(case: Callable[[random.Random], bytes], seed: int) -> None:
    rng = random.Random(f"{case.__name__} {seed}")
    count = 3_000 * FACTOR
    outcomes = Counter(check(case(rng)) for _ in range(count))
    assert {"accepted", "refused"} <= set(outcomes)
    assert outcomes["accepted"] > count / 20
    assert outcomes["refused"] > count / 4


def test_agrees_with_safe_open(tmp_path: pathlib.Path) -> None:
    """`safe_open` maps a real file and reports the metadata, too."""
    rng = random.Random("safe_open")
    outcomes: Counter[str] = Counter()
    for number in range(400 * FACTOR):
        data = structural_case(rng)
        path = tmp_path / f"{number % 8}.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        header = ours(data)
        try:
            with safetensors.safe_open(path, "np") as file:
                if isinstance(header, FormatError):
                    assert is_documented_refusal(data), (data, header)
                    continue
                assert header.metadata == (file.metadata() or {}), data
                assert set(header.tensors) == set(file.keys()), data
                # Tensors of no bytes may share an offset, where the order is arbitrary.
                starts = [header.tensors[name].start for name in file.offset_keys()]
                assert starts == [tensor.start for tensor in header.tensors.values()], data
                outcomes["accepted"] += 1
        except safetensors.SafetensorError:
            assert isinstance(header, FormatError), (data, header)
            outcomes["refused"] += 1
    assert min(outcomes["accepted"], outcomes["refused"]) > 60
