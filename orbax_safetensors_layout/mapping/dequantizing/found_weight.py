"""A weight as it is found in a checkpoint: its parts, and the figures that are needed of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import TensorEntry, short_repr

from ..expr.expression import Expr, tensor
from ..quantizing.encoder import WeightLayout, joined_name
from ..regexes import compiled_regex

INPUT_SCALE = "/pre_quant_scale"  # ModelOpt's: inputs are multiplied by it before the weight
_BLOCK = (128, 128)
_BLOCK_TEXT = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")  # as older files have it
_CLASS = "Linear"  # of modules with weights
_MOST_BYTES = 1 << 20  # of a part that is read while the mapping is made


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """Figures of a `quantization_config`; None where there is none, or several."""

    values: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.values.get("quant_method") or self.values.get("quant_algo") or "unknown")

    def integer(self, *names: str) -> int | None:
        """Return a positive integer, of all groups of weights."""
        given = [self.values.get(name) for name in names]
        given += [group.get(name) for group in self._groups() for name in names]
        kinds = {value for value in given if type(value) is int and value > 0}
        return kinds.pop() if len(kinds) == 1 else None

    def blocks(self) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
        """Return the rows and columns that share a scale in blocks, with the targets of each."""
        blocks: list[tuple[tuple[int, int], tuple[str, ...]]] = []
        block = self.values.get("weight_block_size")
        if block is not None:
            blocks.append((_block(block, "weight_block_size"), ()))
        for group in self._config_groups():
            block, targets = _weights(group).get("block_structure"), group.get("targets")
            if block is not None:
                if isinstance(block, str) and (text := _BLOCK_TEXT.fullmatch(block)):
                    block = [*map(int, text.groups())]
                targets = tuple(map(str, targets)) if isinstance(targets, list | tuple) else ()
                blocks.append((_block(block, "block_structure"), targets))
        return blocks or [(_BLOCK, ())]

    def _groups(self) -> list[Mapping[str, Any]]:
        return [_weights(group) for group in self._config_groups()]

    def _config_groups(self) -> list[Mapping[str, Any]]:
        groups = self.values.get("config_groups")
        outer = groups.values() if isinstance(groups, Mapping) else ()
        return [group for group in outer if isinstance(group, Mapping)]


def _block(value: object, name: str) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and min(rows, columns) > 0:
            return rows, columns
    raise MappingError(
        f"{name} of the quantization_config is {short_repr(value)}, not two positive integers",
        expected="rows and columns that share a scale, as [128, 128]",
        hint="Correct the configuration of these files.",
    )


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, Mapping) else {}


def first_target(module: str, targets: Iterable[str]) -> str | None:
    """Return the target that counts for a linear module: of all that match, the most specific.

    As `match_targets` of compressed-tensors 0.20 orders them: names, then `re:` and an expression
    that a name begins with, then classes.
    """
    for target in sorted(targets, key=lambda target: ("re:" in target, target)):
        if target == module:
            return target
        if target.startswith("re:"):
            regex = compiled_regex(target.removeprefix("re:"), len(module), "config_groups.targets")
            if regex.match(module):
                return target
    return _CLASS if _CLASS in targets else None


@dataclasses.dataclass(frozen=True, slots=True)
class FoundWeight:
    """A quantised weight and what is beside it."""

    plain: str  # the name of the weight without quantisation
    named: str  # the same, perhaps with wildcards
    entries: Mapping[str, TensorEntry]
    settings: QuantizationSettings
    dtype: str  # of the result
    read: Callable[[TensorEntry], bytes]  # reads a small tensor
    is_written: bool = False  # rather than decoded

    def name_of(self, part: str) -> str:
        return joined_name(self.plain, part)

    def entry(self, part: str) -> TensorEntry | None:
        return self.entries.get(self.name_of(part))

    def shape(self, part: str) -> tuple[int, ...]:
        entry = self.entry(part)
        if entry is None:
            raise self.error(f"there is no {self.name_of(part)!r}")
        return entry.shape

    def code(self, part: str) -> str:
        entry = self.entry(part)
        return "" if entry is None else entry.dtype.code

    def expr(self, part: str) -> Expr:
        return tensor(joined_name(self.named, part))

    def maybe(self, part: str) -> Expr | None:
        return None if self.entry(part) is None else self.expr(part)

    def single(self, part: str) -> Expr | None:
        """A part of one number, as an array of one axis."""
        if self.entry(part) is None:
            return None
        if math.prod(self.shape(part)) != 1:
            raise self.error(f"{self.name_of(part)!r} is not one number")
        return self.expr(part).reshape(1)

    def small(self, part: str) -> bytes:
        entry = self.entry(part)
        if entry is None:
            raise self.error(f"there is no {self.name_of(part)!r}")
        if entry.nbytes > _MOST_BYTES:
            raise self.error(
                f"{entry.name!r} has {entry.nbytes:,} bytes, not at most {_MOST_BYTES:,}"
            )
        return self.read(entry)

    def error(self, problem: str) -> MappingError:
        listed = ", ".join(
            f"{name} {entry.dtype.code} {list(entry.shape)}"
            for name, entry in self.entries.items()
            if name.startswith(self.plain.rpartition(".")[0] + ".")
        )
        doing, hint = (
            "decoded",
            (
                "Write a rule for it, with osl.opaque or osl.tensor; or give the"
                " quantization_config that belongs to these files."
            ),
        )
        if self.is_written:
            doing, hint = "written in its format", "Choose another: osl.Quantization('fp8_block')."
        return MappingError(
            f"the weight {self.plain!r}, quantised with {self.settings.method!r}, cannot be"
            f" {doing}: {problem}",
            found=listed[:400],
            hint=hint,
        )


class WeightScheme(NamedTuple):
    """A format of quantised weights, known by the names and dtypes of their parts.

    Parts are written as `FoundWeight.name_of` takes them: `_scale` is `up.weight_scale`, `/scales`
    is `up.scales`, and the empty part is `up.weight` itself.
    """

    name: str
    values: str  # the part with the values
    dtypes: tuple[str, ...]  # of these, as headers write them: `I8`
    needs: tuple[str, ...]  # other parts that tell it from others
    decode: Callable[[FoundWeight], Expr]
    beside: tuple[str, ...] = ()  # further parts, which it may have
    layout: Callable[[FoundWeight], WeightLayout] | None = None  # to write it, where that is known

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.values, *self.needs, *self.beside)

    def fits(self, parts: Sequence[TensorEntry | None]) -> bool:
        """Whether a weight has this format, of which so many of its `parts` are there."""
        values, *needs = parts[: 1 + len(self.needs)]
        return values is not None and values.dtype.code in self.dtypes and None not in needs
