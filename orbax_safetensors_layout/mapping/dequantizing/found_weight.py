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
_BLOCK_TEXT = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")  # as older files have it
_CLASS = "Linear"  # of modules with weights
_BITS = ("num_bits", "bits", "w_bit")
_ORDERED = (True, "group", "dynamic")  # as `actorder`
OWN_CONFIG = "Put the quantization_config that belongs to these tensors beside them."
OWN_RULES = (
    "Its tensors load as they are stored without osl.dequantized; a rule with osl.opaque decodes"
    " them."
)
_MOST_BYTES = 1 << 20  # of a part that is read while the mapping is made


class WeightRecipe(NamedTuple):
    """Configured figures of some weights; None where nothing is said."""

    bits: int | None = None
    kind: str | None = None  # `int` or `float`
    block: tuple[int, int] | None = None  # rows and columns that share a scale; 0 for all
    is_ordered: bool = False  # by importance, so that an index says the group of each column
    has_zeros: bool = False

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> WeightRecipe:
        """Read an object of a configuration, in the keys of any of its writers."""
        bits = next((said[key] for key in _BITS if type(said.get(key)) is int), None)
        size, kind, strategy = said.get("group_size"), said.get("type"), said.get("strategy")
        block = _block_of(said)
        if block is None and type(size) is int and size > 0:
            block = 1, size
        elif block is None and (size == -1 or strategy == "channel"):
            block = 1, 0
        elif block is None and strategy == "tensor":
            block = 0, 0
        return cls(
            bits,
            kind if kind in ("int", "float") else None,
            block,
            said.get("desc_act") is True or said.get("actorder") in _ORDERED,
            said.get("symmetric") is False or said.get("zero_point") is True,
        )

    def __str__(self) -> str:
        rows, columns = (n or "all" for n in self.block or ("any", "any"))
        text = f"{self.kind or 'values'} of {self.bits or 'any'} bits, a scale for {rows} rows and"
        text += f" {columns} columns" + ", an index of groups" * self.is_ordered
        return text + ", zero points" * self.has_zeros


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """Figures of a `quantization_config`; None where there is none, or several."""

    values: Mapping[str, Any]
    format: str | None = None  # known by other marks

    @property
    def method(self) -> str:
        said = self.values.get("quant_method") or self.values.get("quant_algo")
        return self.format or str(said or "unknown")

    def recipes(self, module: str) -> list[WeightRecipe]:
        """Return what is said of a module: one recipe, or all where several may be its own."""
        said = self.values
        layers = [said.get(key) for key in ("quantized_layers", "extra_config", "dynamic")]
        own, changed, patterns = (dict(of) if isinstance(of, Mapping) else {} for of in layers)
        if isinstance(own.get(module), Mapping):  # ModelOpt
            return [WeightRecipe.of(own[module])]
        if isinstance(changed.get(module), Mapping):  # auto-round
            return [WeightRecipe.of({**said, **changed[module]})]
        target, recipe = self.targeted(module)
        if target is not None and target != _CLASS:
            return [recipe]
        others = [of for of in own.values() if isinstance(of, Mapping)]
        others += [{**said, **of} for of in patterns.values() if isinstance(of, Mapping)]
        usual = [WeightRecipe.of(of) for of in (said, *self.groups())]
        return [recipe for recipe in usual if recipe != WeightRecipe()] + [
            *map(WeightRecipe.of, others)
        ]

    def targeted(self, module: str) -> tuple[str | None, WeightRecipe]:
        """Return the target of a group that counts for a module, and what is said of the group."""
        targets: dict[str, Mapping[str, Any]] = {}
        for group in self._config_groups():
            given = group.get("targets")
            for target in given if isinstance(given, list | tuple) else ():
                targets.setdefault(str(target), _weights(group))
        first = first_target(module, targets)
        return first, WeightRecipe.of({} if first is None else targets[first])

    @property
    def varies(self) -> bool:
        """Whether modules may have recipes of their own."""
        said = (self.values.get(key) for key in ("quantized_layers", "extra_config", "dynamic"))
        return len(self._config_groups()) > 1 or any(said)

    def groups(self) -> list[Mapping[str, Any]]:
        """Return what is said of the weights of each group of modules."""
        return [_weights(group) for group in self._config_groups()]

    def _config_groups(self) -> list[Mapping[str, Any]]:
        groups = self.values.get("config_groups")
        outer = groups.values() if isinstance(groups, Mapping) else ()
        return [group for group in outer if isinstance(group, Mapping)]


def _block_of(said: Mapping[str, Any]) -> tuple[int, int] | None:
    name = "weight_block_size" if "weight_block_size" in said else "block_structure"
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, str) and name == "block_structure":
        text = _BLOCK_TEXT.fullmatch(value)
        value = value if text is None else [*map(int, text.groups())]
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
            regex = compiled_regex(target.removeprefix("re:"), "config_groups.targets")
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

    @property
    def module(self) -> str:
        return self.plain.removesuffix(".weight")

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

    def recipes(self) -> list[WeightRecipe]:
        """Return what is configured of the weight: one recipe, or all that may be its own."""
        return self.settings.recipes(self.module)

    def check_recipe(
        self,
        bits: int,
        kind: str,
        shape: Sequence[int],
        block: Sequence[int],
        usual: tuple[int, int] | None = None,
        *,
        is_ordered: bool = True,
        has_zeros: bool = True,
    ) -> None:
        """Refuses a weight that the configuration says to be stored in another way.

        Args:
            bits: Of a value.
            kind: Of a value: `int` or `float`.
            shape: The weight's, `[.., rows, columns]`.
            block: Extents of what shares a scale, of as many axes.
            usual: Those of the last two axes where nothing is configured; None for any.
            is_ordered: Whether an index says the group of each column, or nothing has to.
            has_zeros: Whether there are zero points, or they can be none.
        """
        whole = (1, *shape)[-2:]
        stored = [min(pair) for pair in zip((1, *block)[-2:], whole, strict=True)]

        def fits(recipe: WeightRecipe) -> bool:
            said = recipe.block or usual
            extents = [min(n or end, end) for n, end in zip(said or stored, whole, strict=True)]
            return (
                recipe.bits in (None, bits)
                and recipe.kind in (None, kind)
                and extents == stored
                and is_ordered >= (recipe.is_ordered and stored[-1] < whole[-1])
                and has_zeros >= recipe.has_zeros
            )

        recipes = self.recipes() or [WeightRecipe()]
        if not any(map(fits, recipes)):
            said = " or ".join(dict.fromkeys(map(str, recipes))) if self.settings.values else usual
            own = WeightRecipe(bits, kind, (stored[0], stored[1]))
            raise self.error(
                f"the tensors are {own}, and the configuration says {said}"[:600], OWN_CONFIG
            )

    def error(self, problem: str, hint: str | None = None) -> MappingError:
        listed = ", ".join(
            f"{name} {entry.dtype.code} {list(entry.shape)}"
            for name, entry in self.entries.items()
            if name.startswith(self.plain.rpartition(".")[0] + ".")
        )
        doing = "decoded"
        hint = hint or OWN_RULES
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
