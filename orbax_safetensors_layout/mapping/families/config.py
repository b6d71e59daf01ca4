"""Reads a Hugging Face `config.json`; each value comes out typed and within bounds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError, MappingError
from orbax_safetensors_layout.format import short_repr
from orbax_safetensors_layout.storage import Storage, join, open_storage, read_file

Config = Mapping[str, Any] | str | os.PathLike[str]
"""A `config.json` as a dict, or the folder it is in, or its path."""

CONFIG_FILE = "config.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
SIZES = (1, (1 << 31) - 1)
"""The bounds of an extent: the dimension of a tensor."""

_MAX_FILE_BYTES = 8 << 20  # the largest published ones, with names of 20,000 classes, have 2 MB


def read_config(path: str | os.PathLike[str], *, storage: Storage | None = None) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint's folder or file, or the JSON object at a path."""
    if storage is None:
        opened, path = open_storage(path)
        with opened:
            return read_config(path, storage=opened)
    text = os.fspath(path)
    file = text if text.endswith(".json") else join(folder_of(text), CONFIG_FILE)
    return parse_config(
        read_file(storage, file, "a configuration", most_bytes=_MAX_FILE_BYTES), file
    )


def parse_config(data: bytes, file: str) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot read a configuration: {error}", file=file) from error
    if not isinstance(config, dict):
        raise FormatError("a configuration is not a JSON object", file=file)
    return config


def folder_of(path: str) -> str:
    """Return the folder of a checkpoint, which may be a safetensors file in it."""
    return (os.path.dirname(path) or ".") if path.endswith(".safetensors") else path


def stored_names(config: Config) -> Sequence[str]:
    """Return the names of the tensors beside a configuration; none where there are no tensors."""
    if not isinstance(config, str | os.PathLike) or os.fspath(config).endswith(".json"):
        return ()
    try:
        with Catalog.open(config) as catalog:
            return catalog.listed()
    except CheckpointNotFoundError:
        return ()


def stored_shape(config: Config, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor beside a configuration."""
    with Catalog.open(os.fspath(config)) as catalog:  # type: ignore[arg-type]
        return catalog.entries([name])[name].shape


def find_prefix(names: Sequence[str], ending: str) -> str | None:
    """Return what is before `ending` in tensors' names; None where not one ends so."""
    embeddings = [name for name in names if name.endswith(ending)]
    return embeddings[0].removesuffix(ending) if len(embeddings) == 1 else None


def count_stored(names: Sequence[str], before: str) -> int:
    """Return one more than the highest number after a text in names: 0 where there is none.

    >>> count_stored(["a.0.w", "a.11.w", "b.30.w"], "a.")
    12
    """
    number = re.compile(re.escape(before) + r"([0-9]{1,9})\.")
    return max((int(match[1]) for name in names if (match := number.search(name))), default=-1) + 1


class Section:
    """An object of a configuration; null counts as left out, as in transformers.

    A value that is left out is the default, None or empty. Methods refuse a value of another kind
    than they return with a `MappingError`. `path` has the keys that lead here, each with its dot.
    """

    def __init__(self, values: object, model: str, path: str = "") -> None:
        self.model = model
        self._path = path
        if not isinstance(values, Mapping):
            where = f"has a {path.rstrip('.')!r} that is" if path else "is"
            raise MappingError(
                f"the configuration of a {model} model {where} not an object",
                expected="a JSON object, as a dict",
                found=short_repr(values),
            )
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, name: str) -> Any:
        """Return a value as it is."""
        return self._values.get(name)

    def raise_error(self, name: str, expected: str, found: object) -> NoReturn:
        raise MappingError(
            f"{self._path + name!r} of the configuration is {short_repr(found)}", expected=expected
        )

    def need(self, *names: str) -> str:
        """Return the first of several names that has a value."""
        for name in names:
            if self.get(name) is not None:
                return name
        listed = " or ".join(repr(self._path + name) for name in names)
        raise MappingError(
            f"the configuration of a {self.model} model lacks {listed}",
            hint=f"Give the whole {CONFIG_FILE}, or the folder that it is in.",
        )

    def integer(
        self, name: str, default: int | None = None, *, bounds: tuple[int, int] = SIZES
    ) -> int:
        """Return an integer within bounds, both included; without a default it is required."""
        if default is not None and self.get(name) is None:
            return default
        return self._integer(name, self.get(self.need(name)), bounds)

    def number(self, name: str, default: float) -> float:
        """Return a number above zero that float32 can hold."""
        value = self._checked(name, (int, float), "a finite number above zero", default)
        if not 0 < value < 2.0**128:
            self.raise_error(name, "a finite number above zero", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._checked(name, (bool,), "true or false", default))

    def text(self, name: str) -> str | None:
        value: str | None = self._checked(name, (str,), "a string", None)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        expected = "an array of strings"
        items = self._checked(name, (list, tuple), expected, ())
        if not all(isinstance(item, str) for item in items):
            self.raise_error(name, expected, items)
        return tuple(items)

    def integers(self, name: str, *, bounds: tuple[int, int]) -> tuple[int, ...]:
        """Return an array of integers within bounds, both included."""
        items = self._checked(name, (list, tuple), "an array of integers", ())
        return tuple(self._integer(name, item, bounds) for item in items)

    def names(self) -> list[str]:
        return [str(name) for name in self._values]

    def section(self, name: str) -> Section | None:
        value = self.get(name)
        return None if value is None else Section(value, self.model, f"{self._path}{name}.")

    def sections(self, name: str) -> list[Section]:
        """Return the objects that are the members of an object."""
        outer = self.section(name)
        members = {} if outer is None else outer._values
        return [Section(v, self.model, f"{self._path}{name}.{k}.") for k, v in members.items()]

    def _checked(self, name: str, types: tuple[type, ...], expected: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            self.raise_error(name, expected, value)
        return value

    def _integer(self, name: str, value: object, bounds: tuple[int, int]) -> int:
        least, most = bounds
        if type(value) is not int or not least <= value <= most:
            self.raise_error(name, f"an integer in {least:,}..{most:,}", value)
        return value
