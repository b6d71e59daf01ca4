"""Checks of JSON values: each method returns a typed value or refuses the file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NoReturn, TypeVar

from orbax_safetensors_layout.errors import FormatError, InvalidManifestError

from .strict_json import JsonError

_INT64_MAX = (1 << 63) - 1
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """Checks of the values of one file's JSON."""

    file: str
    kind: type[FormatError] = InvalidManifestError

    def error(
        self, problem: str, expected: object = None, found: object = None, tensor: str | None = None
    ) -> FormatError:
        """Return an error of the file; all other methods raise such."""
        return self.kind(problem, file=self.file, tensor=tensor, expected=expected, found=found)

    def raise_error(
        self, problem: str, expected: object = None, found: object = None, tensor: str | None = None
    ) -> NoReturn:
        raise self.error(problem, expected, found, tensor)

    @contextlib.contextmanager
    def parsing(self, subject: str) -> Iterator[None]:
        """Turns errors of decoding and parsing JSON, called `subject`, into errors of the file."""
        try:
            yield
        except UnicodeDecodeError as error:
            found = f"{error.reason} at byte {error.start}"
            raise self.error(f"{subject} is not UTF-8", "UTF-8 text", found) from error
        except JsonError as error:
            problem = f"{subject} is not valid JSON"
            raise self.error(problem, "one JSON object", str(error)) from error
        except RecursionError as error:  # or the caller's own stack was nearly full
            raise self.error(f"{subject} is nested too deeply") from error

    def members(self, value: object, what: str) -> dict[str, object]:
        fields: dict[str, object] = self._of(dict, value, what, "an object")
        return fields

    def items(self, value: object, what: str) -> list[object]:
        return self._of(list, value, what, "an array")

    def text(self, value: object, what: str) -> str:
        return self._of(str, value, what, "a string")

    def size(self, value: object, what: str, *, limit: int = _INT64_MAX + 1) -> int:
        """Return an integer in 0..`limit` - 1."""
        if type(value) is not int or not 0 <= value < limit:
            self.raise_error(
                f"malformed {what}", f"an integer in 0..{limit - 1}", short_repr(value)
            )
        return value

    def texts(self, value: object, what: str) -> tuple[str, ...]:
        return tuple(self.text(item, what) for item in self.items(value, what))

    def sizes(self, value: object, what: str) -> tuple[int, ...]:
        return tuple(self.size(item, what) for item in self.items(value, what))

    def _of(self, kind: type[T], value: object, what: str, expected: str) -> T:
        if type(value) is not kind:
            self.raise_error(f"malformed {what}", expected, short_repr(value))
        return value


def short_repr(value: object, limit: int = 80) -> str:
    """Return `repr`, cut: values of a hostile file may be of any length."""
    if isinstance(value, list | tuple | str) and len(value) > limit:
        value = value[:limit]
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."
