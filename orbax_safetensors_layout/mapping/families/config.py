"""A Hugging Face `config.json`, read and checked: each value comes out typed and within bounds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError, MappingError
from orbax_safetensors_layout.format import short_repr
from orbax_safetensors_layout.storage import join, open_storage, read_file

Config = Mapping[str, Any] | str | os.PathLike[str]
"""A `config.json` as a dict, or the folder it is in, or its path."""

CONFIG_FILE = "config.json"
SIZES = (1, (1 << 31) - 1)
"""The bounds of an extent: the dimension of a tensor."""

_MAX_FILE_BYTES = 8 << 20  # the largest published ones, with names of 20,000 classes, have 2 MB


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `config.json` of a checkpoint's folder, or the one at a path.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It is no JSON object.
    """
    storage, text = open_storage(path)
    with storage:
        file = text if text.endswith(".json") else join(text, CONFIG_FILE)
        data = read_file(storage, file, "a model's configuration", most_bytes=_MAX_FILE_BYTES)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"can not read a model's configuration: {error}", file=file) from error
    if not isinstance(config, dict):
        raise FormatError("a model's configuration is no JSON object", file=file)
    return config


def stored_names(config: Config) -> Sequence[str]:
    """The names of the tensors beside a configuration; none where they are unknown.

    So it is of a folder with a configuration alone.
    """
    if not isinstance(config, str | os.PathLike) or os.fspath(config).endswith(".json"):
        return ()
    try:
        with Catalog.open(config) as catalog:
            return catalog.names
    except CheckpointNotFoundError:
        return ()


def find_prefix(names: Sequence[str]) -> str | None:
    """The part before `embed_tokens.weight` of tensors' names; None where it is unknown."""
    ending = "embed_tokens.weight"
    found = [name for name in names if name.endswith(ending)]
    return found[0].removesuffix(ending) if len(found) == 1 else None


def count_stored(names: Sequence[str], before: str) -> int:
    """How many of something names count: one more than the highest number after a text.

    >>> count_stored(["a.0.w", "a.11.w", "b.30.w"], "a.")
    12
    """
    number = re.compile(re.escape(before) + r"([0-9]{1,9})\.")
    found = [int(match[1]) for name in names if (match := number.search(name))]
    return max(found, default=-1) + 1


class Section:
    """An object of a configuration; null counts as left out, as in transformers.

    Args:
        values: Its members.
        model: What the configuration is of, for errors.
        path: The keys that lead to it, each with its dot.

    Attributes:
        model: The model that the configuration is of.

    Raises:
        MappingError: It is no object.
    """

    def __init__(self, values: object, model: str, path: str = "") -> None:
        self.model = model
        self._path = path
        if not isinstance(values, Mapping):
            raise MappingError(
                f"the configuration of a {model} model"
                + (f" has a {path.rstrip('.')!r} that is no object" if path else " is no object"),
                expected="a JSON object, as a dict",
                found=short_repr(values),
            )
        self._values = values

    @property
    def is_empty(self) -> bool:
        """Whether it has no members."""
        return not self._values

    def get(self, name: str) -> Any:
        """A value as it is; None where it is left out."""
        return self._values.get(name)

    def refuse(self, name: str, expected: str, found: object) -> NoReturn:
        """Refuses a value.

        Raises:
            MappingError: Always.
        """
        raise MappingError(
            f"{self._path + name!r} of the configuration is {short_repr(found)}", expected=expected
        )

    def need(self, *names: str) -> str:
        """The first of several names that is there.

        Raises:
            MappingError: None is.
        """
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
        """An integer within bounds, both included; without a default it has to be there.

        Raises:
            MappingError: It is something else, or missing.
        """
        if default is not None and self.get(name) is None:
            return default
        return self._integer(name, self.get(self.need(name)), bounds)

    def _integer(self, name: str, value: object, bounds: tuple[int, int]) -> int:
        least, most = bounds
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, f"an integer in {least:,}..{most:,}", value)
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above zero.

        Raises:
            MappingError: It is something else.
        """
        value = self.get(name)
        if value is None:
            return default
        # The largest float32: it becomes one.
        if type(value) not in (int, float) or not 0 < value < 2.0**128:
            self.refuse(name, "a finite number above zero", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean.

        Raises:
            MappingError: It is something else.
        """
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, "true or false", value)
        return value

    def text(self, name: str) -> str | None:
        """A string; None where it is left out.

        Raises:
            MappingError: It is something else.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "a string", value)
        return value

    def section(self, name: str) -> Section | None:
        """An object; None where it is left out.

        Raises:
            MappingError: It is something else.
        """
        value = self.get(name)
        return None if value is None else Section(value, self.model, f"{self._path}{name}.")

    def sections(self, name: str) -> list[Section]:
        """The objects that are the members of an object.

        Raises:
            MappingError: It is something else.
        """
        outer = self.section(name)
        if outer is None:
            return []
        path = f"{self._path}{name}."
        return [Section(v, self.model, f"{path}{k}.") for k, v in outer._values.items()]

    def texts(self, name: str) -> tuple[str, ...] | None:
        """An array of strings; None where it is left out.

        Raises:
            MappingError: It is something else.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            self.refuse(name, "an array of strings", value)
        return tuple(value)

    def integers(self, name: str, *, bounds: tuple[int, int]) -> tuple[int, ...]:
        """An array of integers within bounds, both included; empty where it is left out.

        Raises:
            MappingError: It is something else.
        """
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.refuse(name, "an array of integers", value)
        return tuple(self._integer(name, item, bounds) for item in value)
