"""A reader and a writer of published versions, made from the format's description alone."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import xxhash
import zstandard

DIGESTS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}
_INDEX = "model.safetensors.index.json"


def tensors_of(file: Path) -> tuple[dict[str, tuple[dict, bytes]], dict[str, str]]:
    """Return the tensors of a safetensors file, as fields and bytes, and its metadata."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, fields in header.items():
        first, last = fields["data_offsets"]
        tensors[name] = fields, data[start + first : start + last]
    return tensors, metadata


def read_version(folder: Path, number: int, model: Path | None = None) -> dict[str, bytes]:
    """Return the bytes of all tensors of a version; version 0 is the model itself."""
    if number == 0:
        assert model is not None
        found = (tensors_of(file)[0] for file in sorted(model.glob("*.safetensors")))
        return {name: data for tensors in found for name, (_, data) in tensors.items()}
    place = folder / f"weight_v{number:06d}"
    index = json.loads((place / _INDEX).read_text())
    said = index["metadata"]
    assert int(said["version"]) == number
    if "base_version" not in said:
        return read_version(folder, 0, place)
    values = read_version(folder, int(said["base_version"]), model)
    assert (said["delta_encoding"], said["compression_format"]) == ("xor", "zstd")
    for file in {*index["weight_map"].values()}:
        tensors, checksums = tensors_of(place / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == tensors.keys()
        for name, (fields, data) in tensors.items():
            assert (fields["dtype"], fields["shape"]) == ("U8", [len(data)])
            difference = zstandard.ZstdDecompressor().decompress(data)
            old = np.frombuffer(values[name], np.uint8)
            values[name] = (old ^ np.frombuffer(difference, np.uint8)).tobytes()
            assert DIGESTS[said["checksum_format"]](values[name]) == checksums[name]
    return values


def write_version(
    folder: Path,
    number: int,
    old: dict[str, bytes],
    new: dict[str, bytes],
    *,
    encoding: str = "xor",
    digest: str = "adler32",
    base: int | None = None,
    spoil=lambda name, blob: blob,
) -> Path:
    """Writes differences as another program does; `spoil` changes encoded bytes."""
    place = folder / f"weight_v{number:06d}"
    place.mkdir(parents=True)
    header: dict[str, object] = {"__metadata__": {}}
    blobs = b""
    for name in new:
        before, after = (np.frombuffer(values[name], np.uint8) for values in (old, new))
        if np.array_equal(before, after):
            continue
        difference = before ^ after
        if encoding == "overwrite":
            at = np.flatnonzero(difference).astype("<u4")
            parts = [np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), after[at]]
            difference = np.concatenate(parts)
        blob = spoil(name, zstandard.ZstdCompressor(level=1).compress(difference.tobytes()))
        offsets = [len(blobs), len(blobs) + len(blob)]
        header[name] = {"dtype": "U8", "shape": [len(blob)], "data_offsets": offsets}
        header["__metadata__"][name] = DIGESTS[digest](new[name])
        blobs += blob
    text = json.dumps(header).encode()
    file = "model-00000-of-00001.safetensors"
    (place / file).write_bytes(len(text).to_bytes(8, "little") + text + blobs)
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1 if base is None else base:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": digest,
    }
    weight_map = {name: file for name in header if name != "__metadata__"}
    (place / _INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return place
