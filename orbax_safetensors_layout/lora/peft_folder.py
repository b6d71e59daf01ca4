"""A folder of PEFT: `adapter_config.json`, and what each tensor of the adapter does to the base."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import compile_pattern
from orbax_safetensors_layout.errors import (
    FormatError,
    MappingError,
    SafetensorsLayoutError,
    listed,
)
from orbax_safetensors_layout.format import TensorEntry, short_repr
from orbax_safetensors_layout.mapping import (
    BoundExpr,
    Decoded,
    LowRank,
    NameTree,
    Replacement,
    TensorSpecs,
    compiled_regex,
)
from orbax_safetensors_layout.options import ReadOptions, is_floating
from orbax_safetensors_layout.storage import join

from .adapter_files import CONFIG_FILE, AdapterFiles

PREFIX = "base_model.model."

Rename = Callable[[str], str]
TiedHeads = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the base's output heads, if its configuration ties them to the embedding."""

_DEFAULT = ReadOptions()

_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(\.(?!weight$|bias$)[^.]+)?(\.(?P<of>weight|bias))?"
)
_WRAPPED = re.compile(r"\.base_layer(?=\.|$)|\.modules_to_save(\.[^.]+(?=\.))?")
_OTHER_METHOD = re.compile(r"\.(lora_\w+|trainable_tokens\w*|token_adapter)(\.|$)")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of `init_lora_weights`
# Embeddings of tokens in models that may have a head, and heads, as transformers calls them.
_EMBEDDING = re.compile(r".+\.(?!\w*(pos|type))(\w*embed(?!_out)\w*|wte|shared)")
_HEAD = re.compile(r"(.+\.)?((lm_)?head|embed_out|output|output_layer)\.weight")
_HEADLESS_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_CONV1D = "Conv1D"  # of transformers, whose weights are [in, out], and which has a bias
_CONV1D_NAMES = ("c_attn", "c_fc", "c_proj", "q_attn")  # of all its layers; others have them, too
_SWAPPED = (0, 19)  # before this version PEFT took all experts for [in, out]
_LARGEST = 1 << 60  # rank or alpha, which float64 holds
_EXPERT = re.compile(
    r"(?P<fused>.+\.experts)\.(?P<expert>\d+|\{\w+\})\.(?P<part>(gate|up|down)_proj|w[123])\.weight"
)
_PARTS = {  # of an expert: the tensor of all experts, and the half of it, if it is one
    "gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1), "w3": ("gate_up_proj", 1),
    "down_proj": ("down_proj", -1), "w2": ("down_proj", -1),
}  # fmt: skip


# Of modules of experts, in the order in which those of transformers 5.24 register them.
_PARAMETERS = tuple(
    name + bias
    for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
    for bias in ("", "_bias")
)


class _Module(NamedTuple):
    """The tensors of an adapter that change one weight."""

    name: str  # of the module, or of the parameter, as the configuration speaks of it
    parts: dict[str, TensorEntry]
    is_parameter: bool  # of `target_parameters`: may hold all experts


class PeftFolder:
    """An adapter as an `Overlay` of the base's tensors. Safe to use from many threads.

    Only its header and configuration are read; tensors follow when regions that need them are
    computed. Nothing stays open in between.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rename: Rename | None = None,
        transposed: tuple[str, ...] | None = None,
        options: ReadOptions = _DEFAULT,
        tied_heads: TiedHeads = (),
        digest: str | None = None,
    ) -> None:
        self._files = files = AdapterFiles(path, options)
        self.path, self.file, self.config = files.path, files.file, files.config
        self._config_file = join(os.path.dirname(self.file), CONFIG_FILE)
        self.digest = files.digest
        self._how = rename, transposed, dataclasses.replace(options, progress=False), tied_heads
        self._transposed = [compile_pattern(pattern) for pattern in transposed or ()]
        self._is_transposed_given = transposed is not None
        files.check(files.digest, digest)
        self._check_method()
        self._modules: dict[str, _Module] = {}
        self._replaced: dict[str, TensorEntry] = {}
        self._tables: set[str] = set()  # of those, embeddings that a head may be tied to
        self._sort(rename or (lambda name: name))
        self._tie(tied_heads)
        self._check_patterns(transposed or ())
        self._tree = NameTree(self.names)
        self._known_figures: dict[str, tuple[int, float]] = {}
        self._seen: tuple[TensorSpecs, dict[str, set[bool]]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Equal adapters are equal mappings, in every process."""
        return type(self), (self.path, *self._how, self.digest)

    @property
    def names(self) -> tuple[str, ...]:
        """The base's tensors that it changes."""
        return (*self._modules, *self._replaced)

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        return self._files.read(name)

    def replaces(self, name: str) -> bool:
        """Whether it has a tensor in place of the base's."""
        return name in self._replaced

    def matches(self, pattern: str) -> set[str]:
        """Return those of `names` that change tensors of a pattern's names."""
        fused = [name for name, *_ in _fused(pattern)]
        return {name for p in (pattern, *fused) for name, _ in self._tree.match(p)}

    def changed(
        self, name: str, operand: BoundExpr | None, specs: TensorSpecs, *, decoded: bool
    ) -> BoundExpr:
        """Return a tensor of the base with its change; None where the base does not have it."""
        if name in self._replaced:
            if name in self._tables and operand is not None:
                self._check_head(name, {*specs.names, *self._replaced} - {*operand.sources()})
            operand = self._replacement(self._replaced[name], operand)
        assert operand is not None, name
        module, expert, half = self._modules.get(name), None, 0
        fused = next(_fused(name), None)
        if module is None and fused is not None:
            module, expert, half = self._modules.get(fused[0]), int(fused[1]), fused[2]
        if module is None:
            return operand
        if not is_floating(operand.dtype) or operand.dtype.itemsize < 2:
            raise MappingError(
                f"the adapter changes {name!r}, which the mapping takes as {operand.dtype.name}",
                hint="Merge it into a mapping that decodes the base's quantised weights.",
            )
        try:
            square = None if decoded else functools.partial(self._is_transposed, name, specs)
            kernel = self._low_rank(module, operand, expert, half, square)
        except SafetensorsLayoutError:
            raise
        except ValueError as error:
            raise MappingError(
                f"the adapter's tensors do not fit {name!r}: {error}",
                expected=f"those of a weight of shape {list(operand.shape)}",
                found=", ".join(f"{e.name} {list(e.shape)}" for e in module.parts.values()),
                hint=f"Take the base that {self.path} was trained on"
                f" ({short_repr(self.config.get('base_model_name_or_path'))}).",
            ) from error
        return Decoded(operand.shape, operand.dtype, (operand,), kernel)

    def _check_head(self, name: str, others: Iterable[str]) -> None:
        """Raises if a head is the base's embedding, which a trained copy leaves as it is."""
        if not any(map(is_head, others)):
            raise MappingError(
                f"the adapter replaces the embedding {name!r} (modules_to_save), and the base's own"
                " stays the output head, as nothing else is one: they are no longer tied",
                file=self.file,
                expected="an output head in the base or the adapter, such as 'lm_head.weight'",
                hint="Merge it with PEFT (merge_and_unload), which saves both; or train it with the"
                " head among modules_to_save, or with ensure_weight_tying=True.",
            )

    def _replacement(self, entry: TensorEntry, operand: BoundExpr | None) -> BoundExpr:
        operands = () if operand is None else (operand,)
        dtype = entry.dtype.numpy if operand is None else operand.dtype
        if not is_floating(dtype) or dtype.itemsize < 2:
            dtype = entry.dtype.numpy
        ranks = tuple(len(of.shape) for of in operands)
        return Decoded(entry.shape, dtype, operands, Replacement(self, entry.name, dtype, ranks))

    def _low_rank(
        self,
        module: _Module,
        weight: BoundExpr,
        expert: int | None,
        half: int,
        is_transposed: Callable[[_Module, bool], bool] | None,
    ) -> LowRank:
        rank, scale = self._figures(module.name)
        parts, shape, dtype = module.parts, weight.shape, weight.dtype
        if "bias" in parts:
            _check(parts["bias"].shape == shape, "the bias has another shape")
            return LowRank(self, None, parts["bias"].name, scale, dtype, shape)
        _check("a" in parts and "b" in parts, "lora_A or lora_B is missing")
        a, b, magnitude = parts["a"], parts["b"], parts.get("magnitude")
        _check(min(len(a.shape), len(b.shape)) > 1, "lora_A or lora_B has fewer than two axes")
        columns, experts = math.prod(b.shape[1:]), 0
        if module.is_parameter and (len(shape) == 3 or expert is not None):
            experts, rest = divmod(a.shape[0], rank)
            _check(not rest and columns == a.shape[0], f"the rank is not {rank} of each expert")
            _check(expert is not None or shape[0] == experts, f"there are {experts} experts")
            _check(magnitude is None, "magnitudes are not those of experts")
        else:
            _check(a.shape[0] == columns == rank, f"the rank is not {rank}")
        inputs, outputs = a.shape[1:], b.shape[0]
        first = 0
        if expert is not None:
            first, outputs = half * outputs // 2, outputs // (2 if half >= 0 else 1)
            first = max(first, 0)
            _check(shape == (outputs, *inputs) and expert < experts, "outputs or inputs differ")
            is_square = inputs == b.shape[:1]  # as PEFT sees all experts in one tensor
            may_be_swapped = is_square and self._peft_version() < _SWAPPED
            if may_be_swapped and is_transposed is not None and is_transposed(module, True):
                raise MappingError(
                    f"experts of {module.name!r} that are stored each by itself are [out, in]",
                    hint="Merge an adapter of [in, out] (by PEFT before 0.19) into a base that has"
                    " them in one tensor.",
                )
            return LowRank(
                self, a.name, b.name, scale, dtype, shape,
                experts=experts, expert=expert, first=first,
            )  # fmt: skip
        kernel = shape[1:] if experts else shape
        straight, across = kernel == (outputs, *inputs), kernel == (*inputs, outputs)
        _check(straight or across, "outputs or inputs differ")
        transposed = across
        if "embedding" in parts:
            _check(across, "an embedding is [tokens, hidden]")
        elif straight and across:
            transposed = is_transposed is not None and is_transposed(module, bool(experts))
        if magnitude is not None:
            is_whole = math.prod(magnitude.shape) == outputs
            _check(is_whole, f"magnitudes are not those of {outputs} outputs")
        return LowRank(
            self, a.name, b.name, scale, dtype, shape, transposed,
            magnitude=None if magnitude is None else magnitude.name, experts=experts,
        )  # fmt: skip

    def _peft_version(self) -> tuple[int, ...]:
        """The first two numbers of the version that wrote the adapter; none where it is unknown."""
        match = re.match(r"(\d+)\.(\d+)", str(self.config.get("peft_version")), re.A)
        return tuple(map(int, match.groups())) if match else ()

    def _is_transposed(
        self, name: str, specs: TensorSpecs, module: _Module, is_fused: bool
    ) -> bool:
        """Whether a square weight is [in, out], which its shape cannot show."""
        if self._is_transposed_given:
            return any(pattern.fullmatch(module.name) for pattern in self._transposed)
        if is_fused:
            raise MappingError(
                f"each expert of {module.name!r} is square: its shape does not show which axis"
                " is the inputs",
                hint="Say which weights are [expert, in, out], as GPT-OSS's:"
                " merge(..., transposed=['*.experts.*']); or transposed=() if none are.",
            )
        flag, kind = bool(self.config.get("fan_in_fan_out")), _kind(module.name)
        layouts = self._layouts(specs)
        if len(own := layouts.get(kind, set())) == 1:
            return own == {True}
        # PEFT writes the flag of that module which it wrapped last: a head, or a Conv1D.
        if flag:
            doubtful = kind != _CONV1D and _CONV1D in map(_kind, self._modules)
        else:
            doubtful = kind == _CONV1D and f"{name.removesuffix('weight')}bias" in specs.names
        if doubtful or any(layout != {flag} for layout in layouts.values()):
            raise MappingError(
                f"{module.name!r} is square: its shape does not show which axis is the inputs,"
                " and fan_in_fan_out does not hold for all modules of the adapter",
                file=self._config_file,
                found=f"fan_in_fan_out {flag}",
                hint="Say which square weights are [in, out], as those of Conv1D are:"
                " merge(..., transposed=['*.c_proj']); or transposed=() if none are.",
            )
        return flag

    def _layouts(self, specs: TensorSpecs) -> dict[str, set[bool]]:
        """Return whether weights are [in, out], by kind, of those whose shapes show it."""
        seen = self._seen  # others may bind it to another base meanwhile
        if seen is None or seen[0] is not specs:
            layouts: dict[str, set[bool]] = {}
            for name, module in self._modules.items():
                a, b = module.parts.get("a"), module.parts.get("b")
                if a and b and name in specs and "embedding" not in module.parts:
                    shape, straight = specs[name].shape, (*b.shape[:1], *a.shape[1:])
                    across = *a.shape[1:], *b.shape[:1]
                    if straight != across and shape in (straight, across):
                        layouts.setdefault(_kind(module.name), set()).add(shape == across)
            seen = self._seen = specs, layouts
        return seen[1]

    def _check_patterns(self, transposed: Sequence[str]) -> None:
        names = [module.name for module in self._modules.values()]
        for pattern, compiled in zip(transposed, self._transposed, strict=True):
            if not any(map(compiled.fullmatch, names)):
                raise MappingError(
                    f"transposed= names {pattern!r}, which no module of the adapter is called",
                    file=self._config_file,
                    expected=f"names such as {listed(map(repr, names), 3)}",
                    hint="Give patterns of these names, or transposed=() if none are [in, out].",
                )

    def _parameters(self, module: str, levels: int) -> list[str]:
        """Return those of a module that are targets, the outermost last."""
        targets = [target.rpartition(".") for target in self._strings("target_parameters")]
        named = {last for head, dot, last in targets if dot and f".{module}".endswith(f".{head}")}
        # A name alone is that of a parameter of any module but those that are targets: PEFT writes
        # it where the modules of experts, which are one module by now, are targets.
        if len(named) < levels and not self._is_target(module):
            named |= {last for _, dot, last in targets if not dot}
        if named and len(named) != levels:
            raise MappingError(
                f"the adapter has tensors of {levels} parameters of {module!r}",
                file=self._config_file,
                expected=f"those of target_parameters: {listed(map(repr, sorted(named)), 5)}",
                hint="Merge it with PEFT (merge_and_unload).",
            )
        if len(named) < 2:
            return [*named]
        # Wrappers of one module's parameters are nested, in the order in which models have them.
        if not named.issubset(_PARAMETERS):
            raise MappingError(
                f"the adapter has tensors of {levels} parameters of {module!r}, whose order in the"
                " model is not known",
                file=self._config_file,
                expected=f"those of target_parameters: {listed(map(repr, _PARAMETERS), 6)}",
                found=listed(map(repr, sorted(named)), 5),
                hint="Merge it with PEFT (merge_and_unload).",
            )
        return sorted(named, key=_PARAMETERS.index)

    def _is_target(self, module: str) -> bool:
        """Whether a module is one of `target_modules`: names, or one pattern."""
        if isinstance(pattern := self.config.get("target_modules"), str):
            return self._key({pattern: None}, module) == pattern
        return f".{module}".endswith(tuple(f".{name}" for name in self._strings("target_modules")))

    def _strings(self, name: str) -> list[str]:
        value = self.config.get(name)
        return [*map(str, value)] if isinstance(value, list) else []

    def _figures(self, module: str) -> tuple[int, float]:
        """Return the rank of a module, and what its product is scaled with; remembers them."""
        figures = self._known_figures.get(module)
        if figures is None:
            figures = self._known_figures[module] = self._read_figures(module)
        return figures

    def _read_figures(self, module: str) -> tuple[int, float]:
        ranks, alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")
        rank: Any = ranks.get(self._key(ranks, module), self.config.get("r"))
        alpha: Any = alphas.get(self._key(alphas, module), self.config.get("lora_alpha"))
        is_rank = type(rank) is int and 0 < rank <= _LARGEST
        is_alpha = type(alpha) in (int, float) and abs(alpha) <= _LARGEST
        if not is_rank or not is_alpha:
            raise FormatError(
                f"the adapter's configuration gives {module!r} no rank and alpha",
                file=self._config_file,
                expected="a positive integer `r`, a finite number `lora_alpha`",
                found=f"{short_repr(rank)}, {short_repr(alpha)}",
            )
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _key(self, patterns: dict[str, Any], name: str) -> str:
        """Return the first pattern that a module's name ends with, as PEFT finds it."""
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
        regexes = _compiled(tuple(patterns), self._config_file)
        for pattern, regex in zip(patterns, regexes, strict=True):
            if any(regex.fullmatch(name, start) for start in starts):
                return pattern
        return name

    def _pattern(self, name: str) -> dict[str, Any]:
        value = self.config.get(name) or {}
        return value if isinstance(value, dict) else {}

    def _check_method(self) -> None:
        kind, start = self.config.get("peft_type"), self.config.get("init_lora_weights")
        unknown = [n for n in ("use_qalora", "layer_replication", "use_bdlora", "arrow_config",
                               "kasa_config", "velora_config", "alora_invocation_tokens",
                               "trainable_token_indices", "monteclora_config")
                   if self.config.get(n)]  # fmt: skip
        if kind != "LORA":
            what, hint = f"peft_type {short_repr(kind)}", "Merge it with PEFT (merge_and_unload)."
        elif unknown:
            what, hint = f"{unknown[0]!r}", "Merge it with PEFT (merge_and_unload)."
        elif isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            what = f"init_lora_weights {start!r}, which changes the base's weights, too"
            hint = "Save it with PEFT's path_initial_model_for_weight_conversion."
        else:
            return
        raise MappingError(
            f"the adapter cannot be merged: its configuration has {what}",
            expected="peft_type LORA",
            found=self._config_file,
            hint=hint,
        )

    def _sort(self, rename: Rename) -> None:
        """Finds what each tensor of the adapter is for."""
        parts: dict[str, dict[str, TensorEntry]] = {}
        trained = tuple(self._strings("modules_to_save"))
        has_head = self.config.get("task_type") not in _HEADLESS_TASKS
        for name, entry in self._files.entries.items():
            plain = name.removeprefix(PREFIX)
            match = _PART.fullmatch(plain)
            if match is None:
                plain = _WRAPPED.sub("", plain)
                if _OTHER_METHOD.search(plain):
                    raise MappingError(
                        f"{self.file}: tensor {name!r} belongs to an unknown method of PEFT"
                    )
                self._replaced[rename(plain)] = entry
                of = plain.removesuffix(".weight")
                if has_head and of.endswith(trained) and _EMBEDDING.fullmatch(of):
                    self._tables.add(rename(plain))
                continue
            role = {"A": "a", "B": "b", "r": "magnitude"}[match["part"][-1]]
            own = parts.setdefault(match["module"], {})
            own["bias" if match["of"] == "bias" else role] = entry
            if "embedding" in match["part"]:
                own["embedding"] = entry
        levels = collections.Counter(_WRAPPED.sub("", path) for path in parts)
        for path, own in parts.items():
            for name, module in self._targets(path, own, levels):
                self._modules[rename(name)] = module

    def _tie(self, heads: TiedHeads) -> None:
        """Gives a stored copy of the embedding the change of that, as it is one tensor in PEFT."""
        for name, shape in heads:
            if name in self.names:
                continue
            for module in self._modules.values():
                if "embedding" in module.parts and _EMBEDDING.fullmatch(module.name):
                    a, b = module.parts.get("a"), module.parts.get("b")
                    if a and b and shape == (*a.shape[1:], *b.shape[:1]):
                        self._modules[name] = module
                        break

    def _targets(
        self, path: str, parts: dict[str, TensorEntry], levels: dict[str, int]
    ) -> Iterator[tuple[str, _Module]]:
        """Yields the base's tensors that parts are for, and what of them is for each."""
        module = _WRAPPED.sub("", path)
        parameters = self._parameters(module, levels[module])
        depth = path.count(".base_layer")
        bias = parts.pop("bias", None)
        if bias is not None:
            yield f"{module}.bias", _Module(module, {"bias": bias}, is_parameter=False)
        if depth < len(parameters):
            parameter = parameters[len(parameters) - 1 - depth]
            yield f"{module}.{parameter}", _Module(f"{module}.{parameter}", parts, True)
        else:
            yield f"{module}.weight", _Module(module, parts, is_parameter=False)


@functools.lru_cache(64)
def _compiled(patterns: tuple[str, ...], place: str) -> tuple[re.Pattern[str], ...]:
    return tuple(compiled_regex(pattern, place) for pattern in patterns)


def _fused(name: str) -> Iterator[tuple[str, str, int]]:
    """Yields the parameter that holds all experts of a tensor, its expert, and the half of it."""
    match = _EXPERT.fullmatch(name)
    if match:
        fused, half = _PARTS[match["part"]]
        yield f"{match['fused']}.{fused}", match["expert"], half


def is_head(name: str) -> bool:
    """Whether a tensor is called as an output head."""
    return _HEAD.fullmatch(name) is not None


def mixtral_names(names: Collection[str]) -> Rename | None:
    """Return how a base calls what `transformers` calls `mlp` since version 5, if it does."""
    holds = any(".block_sparse_moe." in name for name in names)
    return _to_mixtral if holds and not any(".mlp." in name for name in names) else None


def _to_mixtral(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


def _kind(module: str) -> str:
    """Return the last part of a module's name, or one name for all that Conv1D layers have."""
    last = module.removesuffix(".weight").rpartition(".")[2]
    return _CONV1D if last in _CONV1D_NAMES else last


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
