"""Raw JSON values of the manifest, checked once: each helper gives a typed value or refuses it."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from orbax_safetensors_layout.errors import InvalidManifestError

_INT64_MAX = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """What is expected of raw values of one file.

    Raw values are as `strict_json.members` yields them: objects are tuples of pairs.

    Attributes:
        file: The file's path, for errors.
    """

    file: str

    def refuse(
        self,
        problem: str,
        *,
        expected: object = None,
        found: object = None,
        tensor: str | None = None,
    ) -> NoReturn:
        """Refuses the file.

        Raises:
            InvalidManifestError: Always.
        """
        raise InvalidManifestError(
            problem, file=self.file, tensor=tensor, expected=expected, found=found
        )

    def members(self, value: object, what: str) -> dict[str, object]:
        """Return an object's members; their values are still raw.

        Raises:
            InvalidManifestError: It is no object, or repeats a key.
        """
        if type(value) is not tuple:
            self.refuse(f"malformed {what}", expected="an object", found=short_repr(value))
        fields: dict[str, object] = dict(value)
        if len(fields) != len(value):
            self.refuse(f"malformed {what}", expected="each key once", found=short_repr(value))
        return fields

    def items(self, value: object, what: str) -> list[object]:
        """Return an array's items, raw.

        Raises:
            InvalidManifestError: It is no array.
        """
        if type(value) is not list:
            self.refuse(f"malformed {what}", expected="an array", found=short_repr(value))
        return value

    def text(self, value: object, what: str) -> str:
        """Return a string.

        Raises:
            InvalidManifestError: It is none.
        """
        if type(value) is not str:
            self.refuse(f"malformed {what}", expected="a string", found=short_repr(value))
        return value

    def size(self, value: object, what: str, *, below: int = _INT64_MAX + 1) -> int:
        """Return an integer that is not negative.

        Raises:
            InvalidManifestError: It is none, or not below `below`.
        """
        if type(value) is not int or not 0 <= value < below:
            self.refuse(
                f"malformed {what}",
                expected=f"an integer in 0..{below - 1}",
                found=short_repr(value),
            )
        return value

    def texts(self, value: object, what: str) -> tuple[str, ...]:
        """Return an array of strings.

        Raises:
            InvalidManifestError: It is none.
        """
        return tuple(self.text(item, what) for item in self.items(value, what))

    def sizes(self, value: object, what: str) -> tuple[int, ...]:
        """Return an array of integers that are not negative.

        Raises:
            InvalidManifestError: It is none.
        """
        return tuple(self.size(item, what) for item in self.items(value, what))


def short_repr(value: object, limit: int = 80) -> str:
    """`repr`, cut: values of a hostile file may be of any length."""
    if isinstance(value, list | tuple | str) and len(value) > limit:
        value = value[:limit]
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."
