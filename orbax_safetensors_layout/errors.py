"""Every error the package raises on purpose.

    SafetensorsLayoutError(Exception)
    ├── FormatError(ValueError)            the bytes are not what the format asks for
    │   ├── InvalidHeaderError             a `.safetensors` header
    │   ├── InvalidIndexError              an index file, or a folder without one
    │   ├── InvalidManifestError           the side file that this package writes
    │   ├── UnsupportedDtypeError          a dtype that the format does not know
    │   └── TruncatedFileError             a file is shorter than its header says
    ├── MismatchError(ValueError)          the checkpoint and the requested tree disagree
    │   ├── ShapeMismatchError
    │   ├── DtypeMismatchError             a cast that would change values
    │   ├── MissingTensorError(KeyError)   the checkpoint lacks a tensor of the tree
    │   └── UnexpectedTensorError          the tree lacks a tensor of the checkpoint
    ├── MappingError(ValueError)           a mapping is malformed, or does not fit
    ├── InvalidArgumentError(ValueError)   a pattern is malformed, a tree to save is empty
    ├── StorageError(OSError)              a read or write failed
    ├── PeerError(RuntimeError)            another process of the same save or load failed
    ├── CheckpointExistsError(FileExistsError)
    └── CheckpointNotFoundError(FileNotFoundError)

Each has `file`, `tensor`, `expected` and `found` where they apply, as attributes and in its text.
Problems of one kind are reported together: `collect` makes one error of many. Below the exceptions:
texts without secrets, and long lists shortened.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class SafetensorsLayoutError(Exception):
    """Base of all errors raised by this package; shows of URLs what `redact_urls` leaves.

    Args:
        message: What was being done and what is wrong, one sentence, no final period needed.
        file: The file or folder concerned.
        tensor: The tensor concerned, by its name in the file, or the leaf by its dotted key path.
        expected: What was expected.
        found: What was found instead.
        hint: What the user can do.
    """

    _is_list = False

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.message = redact_urls(message)
        self.file = None if file is None else redact_urls(os.fsdecode(file))
        self.tensor = tensor
        self.expected = redact_urls(expected) if isinstance(expected, str) else expected
        self.found = redact_urls(found) if isinstance(found, str) else found
        self.hint = None if hint is None else redact_urls(hint)
        super().__init__(str(self))

    @classmethod
    def collect(
        cls, problems: Sequence[Self], what: str = "problems", *, hint: str | None = None
    ) -> Self:
        """Return one error for at least one problem, with the fields of the first.

        It has the class that all have, else this one; its text counts `what`, a noun in the plural,
        and has a line for each, shortened by `group_lines`. What all have stands once: a file in
        the first line, a hint in the last.
        """
        first = problems[0]
        if len(problems) == 1:
            first.hint = hint or first.hint
            return first
        hints = {problem.hint for problem in problems}
        shared = hints.pop() if len(hints) == 1 else None
        files = {problem.file for problem in problems}
        file = files.pop() if len(files) == 1 else None
        texts = (p._text(with_hint=shared is None, with_file=file is None) for p in problems)
        patterns = (problem._pattern() for problem in problems)
        lines = group_lines(zip(patterns, texts, strict=True))
        kinds = {type(problem) for problem in problems}
        error = (kinds.pop() if len(kinds) == 1 else cls)(
            "\n  ".join([f"{len(problems):,} {what}{f' (file: {file})' if file else ''}:", *lines]),
            file=first.file,
            tensor=first.tensor,
            expected=first.expected,
            found=first.found,
            hint=" ".join(filter(None, (shared, hint))) or None,
        )
        error._is_list = True
        return error

    def _pattern(self) -> tuple[object, ...]:
        names = pattern_of(self.tensor or ""), pattern_of(self.message)
        return type(self), *names, str(self.expected), str(self.found)

    def __str__(self) -> str:  # KeyError and OSError would print a repr or an errno tuple instead
        return redact_urls(self._text())

    def _text(self, *, with_hint: bool = True, with_file: bool = True) -> str:
        hint = self.hint if with_hint else None
        if self._is_list:
            return f"{self.message}\n{hint}" if hint else self.message
        fields = [
            ("file", self.file if with_file else None),
            ("tensor", None if self.tensor is None else repr(self.tensor)),
            ("expected", self.expected),
            ("found", self.found),
        ]
        text = self.message.rstrip(".")
        detail = ", ".join(f"{name}: {value}" for name, value in fields if value is not None)
        if detail:
            text += f" ({detail})"
        return f"{text}. {hint}" if hint else f"{text}."


class FormatError(SafetensorsLayoutError, ValueError):
    """The bytes of a checkpoint are not what the safetensors format asks for."""

    @classmethod
    def check_size(
        cls,
        subject: str,
        size: int,
        most_bytes: int,
        *,
        file: str,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Raises this error if a file or tensor, called `subject`, is larger than it may be."""
        if size > most_bytes:
            expected, found = f"at most {most_bytes} bytes", f"{size} bytes"
            message = f"{subject} is too large"
            raise cls(message, file=file, tensor=tensor, expected=expected, found=found, hint=hint)


class InvalidHeaderError(FormatError):
    """The header of a `.safetensors` file is malformed."""


class InvalidIndexError(FormatError):
    """A `model.safetensors.index.json`, or a folder of files without one, is inconsistent."""


class InvalidManifestError(FormatError):
    """An `orbax_safetensors_layout.json` is malformed, or of a newer version than this package."""


class UnsupportedDtypeError(FormatError):
    """A dtype that the format does not define, or that numpy and ml_dtypes do not have."""


class TruncatedFileError(FormatError):
    """A file is shorter than its header says, or shrank while it was read."""


class MismatchError(SafetensorsLayoutError, ValueError):
    """The checkpoint and the requested tree disagree."""


class ShapeMismatchError(MismatchError):
    """A leaf's shape is not the tensor's."""


class DtypeMismatchError(MismatchError):
    """A cast would change values, for instance int64 to int32 out of range."""


class MissingTensorError(MismatchError, KeyError):
    """The requested tree names tensors that the checkpoint does not have."""


class UnexpectedTensorError(MismatchError):
    """The checkpoint has tensors that the requested tree does not name."""


class MappingError(SafetensorsLayoutError, ValueError):
    """A mapping is malformed, or does not fit the names and shapes on either side of it."""


class InvalidArgumentError(SafetensorsLayoutError, ValueError):
    """An argument that cannot be used: a malformed pattern, an empty tree to save."""


class StorageError(SafetensorsLayoutError, OSError):
    """A read or write failed. The byte range is in the text, the cause is chained."""


class PeerError(SafetensorsLayoutError, RuntimeError):
    """Another process of the operation failed or did not answer; the text has its error."""


class CheckpointExistsError(SafetensorsLayoutError, FileExistsError):
    """A checkpoint already exists at the target of a save."""


class CheckpointNotFoundError(SafetensorsLayoutError, FileNotFoundError):
    """No safetensors checkpoint exists at the given path."""


class _Explanation:
    __slots__ = ("_note", "_tensor")

    def __init__(self, note: str, tensor: str) -> None:
        self._note = note
        self._tensor = tensor

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SafetensorsLayoutError):
            error.tensor = error.tensor or self._tensor
        elif error is not None:
            error.add_note(self._note)


def explained(note: str, tensor: str) -> contextlib.AbstractContextManager[None]:
    """Adds the tensor to errors of this package, and a note to all others."""
    return _Explanation(note, tensor)


# Without the scheme: looking for one takes time by the square of a long dotted name's length.
# `hf://model@revision` has no user info.
_URL = re.compile(
    r"://((?!(?<=hf://)[^\s/:@]*@)[^\s/?#\"'<>]*@)?(?P<rest>[^\s?#\"'<>]*)([?#][^\s\"'<>)]*)?"
)
_QUERY = re.compile(r"[?#][^\s\"'<>?#]*=[^\s\"'<>)]*")
_SECRET = re.compile(
    r"(?P<name>(authorization|bearer|token|secret|signature|password|credential|access.?key"
    r"|api.?key)[\w-]*[\"']?(\s*[:=>]|(?<=bearer) )\s*[\"']?(bearer\s+|basic\s+)?|\bbasic )"
    r"(?P<value>[^\s\"'<>,;)]{8,})",
    re.I,
)


def redact_urls(text: str) -> str:
    """Return a text whose URLs have no user info, query strings and fragments.

    >>> redact_urls("GET https://me:pw@host/model?X-Amz-Signature=abc: 403")
    'GET https://host/model 403'
    """
    return _URL.sub(r"://\g<rest>", text)


def redact(text: str) -> str:
    """Return a text as `redact_urls` does, also without other queries and without named secrets.

    >>> redact("Authorization: Bearer hf_abcdefghijkl with url: /model?sig=abc")
    'Authorization: Bearer *** with url: /model'
    """
    text = _QUERY.sub("", redact_urls(text))
    return _SECRET.sub(lambda match: match["name"] + "***", text)


_MOST_LINES = 20  # of a message, about; further ones are counted
_MOST_OF_A_KEY = 3
_NUMBERS = re.compile(r"(?<![^.'])[0-9]+(?![^.'])")


def pattern_of(text: str) -> str:
    """Return a text with `#` for numbers in dotted names: `'layers.#.mlp.w1' is missing`."""
    return _NUMBERS.sub("#", text)


def wildcard_pattern(name: str) -> str:
    """Return a name with wildcards for its numbers, as a rule has it: `layers.{i}.experts.{j}`."""
    letters = itertools.count(ord("i"))
    return _NUMBERS.sub(lambda _: f"{{{chr(next(letters))}}}", name)


def listed(items: Iterable[object], most: int = 10, separator: str = ", ") -> str:
    """Return the first items, and the number of the others: `a, b and 3 more`."""
    every = [*items]
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return separator.join(map(str, every[:most])) + more


def group_lines(items: Iterable[tuple[Hashable, T]], line: Callable[[T], str] = str) -> list[str]:
    """Return a line for each item; of many of one key for the first, with the number of the others.

    >>> group_lines((pattern_of(name), name) for name in ["a.0", "a.1", "a.2", "a.3", "b.0", "b.1"])
    ['a.0 (3 more like it)', 'b.0', 'b.1']
    """
    groups: dict[Hashable, list[T]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    lines: list[str] = []
    left = sum(map(len, groups.values()))
    for group in groups.values():
        if len(lines) >= _MOST_LINES:
            return [*lines, f"... {left:,} more"]
        if len(group) <= _MOST_OF_A_KEY:
            lines += map(line, group)
        else:
            lines.append(f"{line(group[0])} ({len(group) - 1:,} more like it)")
        left -= len(group)
    return lines
