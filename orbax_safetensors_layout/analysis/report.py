"""The report of `verify`."""

from __future__ import annotations

import dataclasses

from orbax_safetensors_layout.errors import group_lines, pattern_of
from orbax_safetensors_layout.runtime import number_text


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or, as a note, that should be known.

    Attributes:
        kind: `header`, `index`, `file`, `manifest`, `pieces`, `digest`, `array`, `chunk` or
            `value`.
        text: A description that names file and tensor.
        is_error: Whether the checkpoint is at fault; otherwise it is a note.
    """

    kind: str
    text: str
    is_error: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify`.

    Attributes:
        path: The checkpoint.
        findings: All of them. The text gives the first of those that differ in numbers only.
        files: Files whose headers were read; none of a checkpoint of Orbax.
        tensors: Tensors, or pieces of such, in them.
        digested_files: Files whose contents were compared with their checksums.
        compared_tensors: Tensors that were compared with another checkpoint's.
        compared_bytes: Their bytes.
    """

    path: str
    findings: tuple[Finding, ...]
    files: int = 0
    tensors: int = 0
    digested_files: int = 0
    compared_tensors: int = 0
    compared_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.is_error for finding in self.findings)

    def __str__(self) -> str:
        texts = [f"{f.kind}{'' if f.is_error else ' (note)'}: {f.text}" for f in self.findings]
        # Where tensors differ is not the same of any two.
        lines = group_lines((pattern_of(text.partition(" differs: ")[0]), text) for text in texts)
        counts = {"file": self.files, "tensor": self.tensors, "checksum": self.digested_files}
        details = [number_text(count, noun) for noun, count in counts.items() if count]
        if self.compared_tensors:
            details.append(f"{number_text(self.compared_tensors, 'tensor')} compared")
        errors = sum(finding.is_error for finding in self.findings)
        verdict = "whole" if self.ok else number_text(errors, "finding")
        counted = f" ({', '.join(details)})" if details else ""
        return "\n".join([*lines, f"{self.path}: {verdict}{counted}"])
