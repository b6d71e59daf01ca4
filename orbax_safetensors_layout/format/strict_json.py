"""JSON as strictly as `serde_json` reads it, and without duplicate keys.

Python's `json` is more lenient than the Rust library's parser: it takes `NaN`, lone surrogates,
numbers beyond a double, integral `-0`, any depth and repeated keys.

Objects come out of `members` as tuples of pairs, which costs no Python call per object and keeps
repeated keys visible; `plain` turns them into dicts once and refuses what `serde_json` refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

_MAX_DEPTH = 127  # serde_json: 128 levels "exceed the recursion limit"
_LARGEST_DOUBLE_INTEGER = (1 << 1024) - (1 << 971)

_skip_space = re.compile(r"[ \t\n\r]*").match
_skip_colon = re.compile(r"[ \t\n\r]*:[ \t\n\r]*").match
_skip_comma = re.compile(r"[ \t\n\r]*,[ \t\n\r]*").match
_skip_close = re.compile(r"[ \t\n\r]*\}[ \t\n\r]*").match


class JsonError(ValueError):
    """The text is not JSON that `serde_json` would read, or repeats a key."""


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number")


def _integer(digits: str) -> int | float:
    # serde_json reads -0 as a float, so as no valid dimension or offset.
    return -0.0 if digits == "-0" else int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_constant=_refuse_constant)
_MINUS_ZERO_DECODER = json.JSONDecoder(
    object_pairs_hook=tuple, parse_constant=_refuse_constant, parse_int=_integer
)


def members(text: str) -> Iterator[tuple[str, object]]:
    """The members of the object that `text` consists of, one by one and in order.

    Turning 60,000 tensors into entries takes 0.17 s this way and 0.30 s after one `json.loads`
    with a hook: no more than one member's containers live at once for the garbage collector.

    Args:
        text: A JSON object; white space may follow it, but not precede it.

    Yields:
        Each key with its raw value: objects are tuples of pairs, `plain` makes dicts of them.
        Repeated keys are yielded repeatedly.

    Raises:
        JsonError: The text is malformed.
    """
    # A Python call per integer is only paid where it can matter.
    scan = (_MINUS_ZERO_DECODER if "-0" in text else _DECODER).raw_decode
    if not text.startswith("{"):
        raise JsonError(f"the text begins with {text[:1]!r}, not with '{{'")
    position = _end(_skip_space(text, 1))
    try:
        if not text.startswith("}", position):
            while True:
                if not text.startswith('"', position):
                    raise JsonError(f"a key must be a string, at character {position}")
                key, position = scan(text, position)
                position = _end(_skip_colon(text, position), "':' expected", position)
                value, position = scan(text, position)
                yield key, value
                comma = _skip_comma(text, position)
                if comma is None:
                    break
                position = comma.end()
        position = _end(_skip_close(text, position), "',' or '}' expected", position)
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg}, at character {error.pos}") from error
    except RecursionError as error:
        raise JsonError(f"nested deeper than {_MAX_DEPTH} levels") from error
    except JsonError:
        raise
    except ValueError as error:  # Python's own limit on the digits of an integer
        raise JsonError(f"number out of range: {error}") from error
    if position != len(text):
        raise JsonError(f"trailing characters, at character {position}")


def _end(match: re.Match[str] | None, problem: str = "", position: int = 0) -> int:
    if match is None:
        raise JsonError(f"{problem}, at character {position}")
    return match.end()


def plain(value: object, depth: int = 2) -> object:
    """`value` with its objects as dicts, after all that `serde_json` would refuse in it.

    Args:
        value: A raw value, as `members` yields it.
        depth: How many objects and arrays are open where a container `value` stands, itself
            included.

    Raises:
        JsonError: A key is repeated, a number does not fit a double, a string has a lone surrogate,
            or the nesting is too deep.
    """
    if isinstance(value, str):
        refuse_lone_surrogate(value)
    elif isinstance(value, float):
        if value in (float("inf"), float("-inf")):
            raise JsonError("number out of range")
    elif isinstance(value, int):
        if abs(value) > _LARGEST_DOUBLE_INTEGER:
            raise JsonError("number out of range")
    elif isinstance(value, (list, tuple)):
        if depth > _MAX_DEPTH:
            raise JsonError(f"nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, list):
            return [plain(item, depth + 1) for item in value]
        result: dict[str, object] = {}
        for key, item in value:
            refuse_lone_surrogate(key)
            if key in result:
                raise JsonError(f"key {key!r} is repeated")
            result[key] = plain(item, depth + 1)
        return result
    return value


def refuse_lone_surrogate(text: str) -> None:
    """Refuses a string that is not Unicode text.

    Raises:
        JsonError: An escape for one half of a surrogate pair stands without the other.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonError(f"lone surrogate in the string {text!r}") from error


def has_surrogate_escape(text: str) -> bool:
    """Whether strings of this JSON text may hold lone surrogates, so that `plain` must look."""
    return "\\ud" in text or "\\uD" in text
