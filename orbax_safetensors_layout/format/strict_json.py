"""JSON objects as the standard parser reads them, but with each key once and without NaN."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn


class JsonError(ValueError):
    """The text is not a JSON object, or repeats a key."""


def parse_object(text: str) -> dict[str, Any]:
    """Return the members of a JSON object.

    Raises:
        JsonError: The text is not JSON, not an object, repeats a key, or has NaN or an infinity.
        RecursionError: It is nested too deeply.
    """
    try:
        document = _DECODER.decode(text)
    except JsonError:
        raise
    except ValueError as error:  # of the syntax, or of Python's limit on the digits of an integer
        raise JsonError(str(error)) from error
    if type(document) is not dict:
        raise JsonError(f"the text is a {type(document).__name__}, not an object")
    return document


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise JsonError(f"key {repeated!r} is repeated")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse_constant)
