"""Hand-made safetensors bytes, and an in-memory storage that records its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    SafetensorsLayoutError,
    TruncatedFileError,
)
from orbax_safetensors_layout.storage import Storage

Error = TypeVar("Error", bound=SafetensorsLayoutError)


def entry(dtype: str, shape: Sequence[Any], begin: Any, end: Any) -> dict[str, Any]:
    """A tensor's entry in a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def file_bytes(header: str | bytes | Mapping[str, Any], data: bytes = b"") -> bytes:
    """A whole file: length, header and data."""
    if isinstance(header, Mapping):
        header = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + data


def model_file(
    tensors: Mapping[str, int], *, metadata: Mapping[str, str] | None = None, pad: int = 0
) -> bytes:
    """A file of U8 vectors, given as name to length, whose header ends in `pad` spaces."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, size in tensors.items():
        header[name] = entry("U8", [size], position, position + size)
        position += size
    return file_bytes(json.dumps(header) + " " * pad, bytes(position))


def refused(parse: Callable[[], object], kind: type[Error], file: str) -> Error:
    """Return the error of a call: of exactly this kind, and with the name of the file."""
    with pytest.raises(kind) as caught:
        parse()
    assert type(caught.value) is kind
    assert caught.value.file == file
    assert file in str(caught.value)
    return caught.value


def index_bytes(weight_map: Mapping[str, str]) -> bytes:
    """An index file."""
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}).encode()


class Request(NamedTuple):
    """One recorded read; `stop` is one past its last byte."""

    file: str
    start: int
    stop: int


class MemoryStorage:
    """Files of a dict of path to bytes. Records reads, size queries and listings."""

    kind = "local"
    lists = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.requests: list[Request] = []
        self.listings: list[str] = []
        self.closed = False
        self._lock = threading.Lock()

    def size(self, file: str) -> int:
        if file not in self.files:
            raise CheckpointNotFoundError("no such file", file=file)
        return len(self.files[file])

    def read_into(
        self, file: str, offset: int, buffers: Sequence[memoryview], *, shared: bool = False
    ) -> None:
        position = offset
        for buffer in buffers:
            data = self.files[file][position : position + len(buffer)]
            if len(data) < len(buffer):
                raise TruncatedFileError("the file is truncated", file=file)
            buffer[:] = data
            position += len(buffer)
        with self._lock:
            self.requests.append(Request(file, offset, position))

    def is_file(self, path: str) -> bool:
        return path in self.files

    def list(self, folder: str) -> list[str]:
        self.listings.append(folder)
        prefix = folder.rstrip("/") + "/"
        names = (path.removeprefix(prefix) for path in self.files if path.startswith(prefix))
        return sorted(name for name in names if "/" not in name)

    existing = Storage.existing

    def folders(self, folder: str) -> list[str]:
        prefix = folder.rstrip("/") + "/"
        names = (path.removeprefix(prefix) for path in self.files if path.startswith(prefix))
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def modified_seconds(self, file: str) -> float:
        return 0.0

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def read_files(self) -> list[str]:
        """The files that were read, sorted, each once."""
        return sorted({request.file for request in self.requests})
