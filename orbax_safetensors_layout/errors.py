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
    ├── StorageError(OSError)              a read or write failed
    ├── PeerError(RuntimeError)            another process of the same save or load failed
    ├── CheckpointExistsError(FileExistsError)
    └── CheckpointNotFoundError(FileNotFoundError)

Each carries `file`, `tensor`, `expected` and `found` where they apply, as attributes and in its
text. Problems of one kind are reported together: `MismatchError.collect` makes one error of many,
and tells the first of those that differ in numbers only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from orbax_safetensors_layout.grouping import grouped, pattern_of
from orbax_safetensors_layout.redaction import redact_urls


class SafetensorsLayoutError(Exception):
    """Base of all errors raised by this package.

    Args:
        message: What was being done and what is wrong, one sentence, no final period needed.
        file: The file or folder concerned; of a URL what may be shown.
        tensor: The tensor concerned, by its name in the file, or the leaf by its dotted key path.
        expected: What was expected.
        found: What was found.
        hint: What the user can do.
    """

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
        self.message = message
        self.file = None if file is None else redact_urls(os.fsdecode(file))
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(self._render())

    def _render(self) -> str:
        fields = [
            ("file", self.file),
            ("tensor", None if self.tensor is None else repr(self.tensor)),
            ("expected", self.expected),
            ("found", self.found),
        ]
        text = self.message.rstrip(".")
        detail = ", ".join(f"{name}: {value}" for name, value in fields if value is not None)
        if detail:
            text += f" ({detail})"
        return f"{text}. {self.hint}" if self.hint else f"{text}."

    def __str__(self) -> str:  # KeyError and OSError would print a repr or an errno tuple instead
        return self._render()


def lines_of(problems: Sequence[SafetensorsLayoutError]) -> list[str]:
    """The texts of many problems; of those that differ in numbers only, the first."""
    return grouped(
        (
            (
                type(problem),
                pattern_of(problem.tensor or ""),
                pattern_of(problem.message),
                str(problem.expected),
                str(problem.found),
            ),
            str(problem),
        )
        for problem in problems
    )


class FormatError(SafetensorsLayoutError, ValueError):
    """The bytes of a checkpoint are not what the safetensors format asks for."""


class InvalidHeaderError(FormatError):
    """The header of a `.safetensors` file is malformed."""


class InvalidIndexError(FormatError):
    """A `model.safetensors.index.json`, or a folder of files without one, is inconsistent."""


class InvalidManifestError(FormatError):
    """An `orbax_safetensors_layout.json` is malformed, or of a newer version than this package."""


class UnsupportedDtypeError(FormatError):
    """A dtype that the format does not define, or that numpy and ml_dtypes can not hold."""


class TruncatedFileError(FormatError):
    """A file is shorter than its header says, or shrank while it was read."""


class MismatchError(SafetensorsLayoutError, ValueError):
    """The checkpoint and the requested tree disagree."""

    @classmethod
    def collect(cls, problems: Sequence[Self], *, hint: str | None = None) -> Self:
        """One error for many problems of this kind.

        Args:
            problems: At least one. The result has the first one's fields.
            hint: What the user can do about all of them.
        """
        first = problems[0]
        if len(problems) == 1:
            first.hint = hint or first.hint
            return first
        lines = "\n".join(f"  {line}" for line in lines_of(problems))
        return cls(
            f"{len(problems):,} problems:\n{lines}",
            file=first.file,
            tensor=first.tensor,
            expected=first.expected,
            found=first.found,
            hint=hint,
        )

    def _render(self) -> str:
        if "\n" not in self.message:
            return super()._render()
        return f"{self.message}\n{self.hint}" if self.hint else self.message


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

    def _render(self) -> str:
        if "\n" not in self.message:
            return super()._render()
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class StorageError(SafetensorsLayoutError, OSError):
    """A read or write failed. The byte range is in the text, the cause is chained."""


class PeerError(SafetensorsLayoutError, RuntimeError):
    """Another process of the same operation failed or did not answer; the text has its error."""


class CheckpointExistsError(SafetensorsLayoutError, FileExistsError):
    """A checkpoint stands where one is to be saved."""


class CheckpointNotFoundError(SafetensorsLayoutError, FileNotFoundError):
    """No safetensors checkpoint stands at the given path."""
