"""JSON as strictly as `serde_json` reads it, and without duplicate keys.

Python's `json` is more lenient than the Rust library's parser: it takes `NaN`, lone surrogates,
numbers beyond a double, integral `-0`, any depth and repeated keys.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

UNBOUNDED = sys.maxsize
_LONGEST_VALUE = 1 << 16  # characters
_OPENED = object()
_MAX_DEPTH = 127  # serde_json: 128 levels "exceed the recursion limit"
_LARGEST = sys.float_info.max

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


def members(
    text: str,
    opened: Collection[str] = (),
    longest: int = _LONGEST_VALUE,
    *,
    may_repeat: bool = False,
) -> Iterator[tuple[str | None, str, object]]:
    """Yields the members of the object `text`, which no white space precedes, one by one.

    A member is None, its key and its raw value, whose objects are tuples of pairs, with repeated
    keys. Objects of the keys `opened` are yielded as `()`, and then their members, each with the
    opened key in place of None. No other value but strings may be longer than `longest` characters.
    Keys of the object itself, not of opened ones, `may_repeat`.

    A hostile text of 100 MB can be 33 million lists: 5 GB, and a minute. So at most `longest`
    characters of members are decoded at once: 60,000 tensors take 0.04 s, 0.11 s with one
    `json.loads`, since the collector then sees all of their containers.
    """
    # A Python call per integer is only paid where it can matter.
    scan = (_MINUS_ZERO_DECODER if "-0" in text else _DECODER).raw_decode
    if not text.startswith("{"):
        raise JsonError(f"the text begins with {text[:1]!r}, not with '{{'")
    position = stop = _end(_skip_space(text, 1))
    outer: str | None = None
    to_open = {*opened}  # none within an object that is open
    outer_keys: set[str] | None = None if may_repeat else set()
    keys = outer_keys
    # The scanner is shown a window of the text, so that it builds no large value.
    size = max(longest, _LONGEST_VALUE)
    begin, window = 0, text if len(text) <= size else text[:size]
    is_empty = text.startswith("}", position)
    slow_until = 0  # where members are read one by one
    while not is_empty:
        chunk = "" if position < slow_until else _chunk(text, position, min(size, longest))
        if chunk and not any(f'"{key}"' in chunk for key in to_open):
            pairs = _pairs(scan, chunk)
            if pairs and to_open.isdisjoint(key for key, _ in pairs):
                for key, value in pairs:
                    if keys is not None:
                        if key in keys:
                            raise JsonError(f"key {key!r} is repeated")
                        keys.add(key)
                    yield outer, key, value
                position = _end(_skip_comma(text, position + len(chunk)))
                begin, window = position, text[position : position + size]
                continue
            slow_until = position + len(chunk)
        at, is_read = position - begin, False
        try:
            if window.startswith('"', at):
                key, stop = scan(window, at)
                colon = _skip_colon(window, stop)
                if colon is not None and key not in to_open:
                    value, stop = scan(window, colon.end())
                    is_read = stop < len(window) or window is text
                    if stop - colon.end() > longest and type(value) is not str:
                        is_read = False
        except (ValueError, RecursionError):
            pass  # `_member` says what is wrong, unless it is the window that ends too soon
        if not is_read:
            if window is not text and position > begin:
                begin, window = position, text[position : position + size]
                continue
            key, value, stop = _member(scan, text, position, to_open, longest)
            stop -= begin
        if keys is not None:
            if key in keys:
                raise JsonError(f"key {key!r} is repeated")
            keys.add(key)
        yield outer, key, () if value is _OPENED else value
        stop += begin
        if value is _OPENED:
            outer, keys, to_open = key, set(), set()
            position = _end(_skip_space(text, stop))
            if not text.startswith("}", position):
                continue
            stop = position
        comma = _skip_comma(text, stop)
        if comma is None and outer is not None:
            stop = _end(_skip_close(text, stop), "',' or '}' expected", stop)
            outer, keys, to_open = None, outer_keys, {*opened}
            comma = _skip_comma(text, stop)
        if comma is None:
            break
        position = comma.end()
    position = _end(_skip_close(text, stop), "',' or '}' expected", stop)
    if position != len(text):
        raise JsonError(f"trailing characters, at character {position}")


def _chunk(text: str, position: int, most: int) -> str:
    """Return what are probably whole members from a position on, before a comma."""
    stop = position + most
    end = text.rfind("},", position, stop)
    end = text.rfind('",', position, stop) if end < 0 else end
    return text[position : end + 1] if end >= 0 else ""


def _pairs(
    scan: Callable[[str, int], tuple[Any, int]], chunk: str
) -> tuple[tuple[str, object], ...]:
    """Return the members that a text is; none if it is anything else than whole members."""
    try:
        pairs: tuple[tuple[str, object], ...]
        pairs, stop = scan(f"{{{chunk}}}", 0)
    except (ValueError, RecursionError):
        return ()
    return pairs if stop == len(chunk) + 2 else ()


def _member(
    scan: Callable[[str, int], tuple[Any, int]],
    text: str,
    position: int,
    opened: Collection[str],
    limit: int,
) -> tuple[str, object, int]:
    """Return a key, its raw value, and where that ends; of an opened object only its begin."""
    try:
        if not text.startswith('"', position):
            raise JsonError(f"a key must be a string, at character {position}")
        key, position = scan(text, position)
        position = _end(_skip_colon(text, position), "':' expected", position)
        if key in opened and text.startswith("{", position):
            return key, _OPENED, position + 1
        if len(text) <= limit or text.startswith('"', position):
            value, position = scan(text, position)
            return key, value, position
        part = text[position : position + limit]
        try:
            value, length = scan(part, 0)
        except json.JSONDecodeError as error:
            problem = f"{error.msg}, at character {position + error.pos}"
            raise JsonError(f"{problem}, or a value of more than {limit} characters") from None
        return key, value, position + length
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg}, at character {error.pos}") from None
    except RecursionError as error:
        raise JsonError(f"nested deeper than {_MAX_DEPTH} levels") from error
    except JsonError:
        raise
    except ValueError as error:  # Python's own limit on the digits of an integer
        raise JsonError(f"number out of range: {error}") from error


def _end(match: re.Match[str] | None, problem: str = "", position: int = 0) -> int:
    if match is None:
        raise JsonError(f"{problem}, at character {position}")
    return match.end()


def plain(value: Any, depth: int = 2) -> object:
    """Return a raw value, at this depth, with objects as dicts, if `serde_json` would read it."""
    kind = type(value)
    if kind is list or kind is tuple:
        if depth > _MAX_DEPTH:
            raise JsonError(f"nested deeper than {_MAX_DEPTH} levels")
        if kind is list:
            return [plain(item, depth + 1) for item in value]
        fields: dict[str, object] = {}
        for key, item in value:
            if key in fields:
                raise JsonError(f"key {key!r} is repeated")
            refuse_lone_surrogate(key)
            fields[key] = plain(item, depth + 1)
        return fields
    if kind is str:
        refuse_lone_surrogate(value)
    elif (kind is int or kind is float) and not -_LARGEST <= value <= _LARGEST:
        raise JsonError("number out of range")
    return value


def refuse_lone_surrogate(text: str) -> None:
    """Refuses a string with an escape for one half of a surrogate pair without the other."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonError(f"lone surrogate in the string {text!r}") from error


def has_surrogate_escape(text: str) -> bool:
    """Return whether strings of this JSON text may hold lone surrogates."""
    return "\\ud" in text or "\\uD" in text
