"""Names of files in a folder: which are a model's, which beside it, which a save replaces."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence

from orbax_safetensors_layout.errors import CheckpointNotFoundError, InvalidIndexError, listed
from orbax_safetensors_layout.format import (
    DIGESTS,
    INDEX_SUFFIX,
    MAIN_INDEX,
    MANIFEST,
    SUFFIX,
    OnError,
    is_piece_file,
    parse_index,
    without_rank,
)
from orbax_safetensors_layout.storage import Storage, join, read_file

_MOST_SHOWN = 5
MODEL_FILE, _PART = "model.safetensors", re.compile(r"model-\d+-of-\d+\.safetensors")
_BESIDE_A_MODEL = ("adapter_model", "adapters", "pytorch_lora_weights", "consolidated")
"""Prefixes of files that PEFT, MLX, Diffusers and Mistral put beside a model's, of any name."""
_OF_LIBRARIES = {"model", "pytorch_model", "diffusion_pytorch_model", *_BESIDE_A_MODEL}
"""Names of which libraries write variants; files of other names may be parts of one checkpoint."""
_NUMBERED = re.compile(r"(.+)-(\d{1,255})-of-(\d{1,255})((?:\.[^.]+)?)\.safetensors")

_OF_RANKS = {
    r"model-rank-\d+-part-\d+": "vLLM or SGLang, as load format sharded_state",
    r"rank\d+": "TensorRT-LLM",
    r"tp\d+_sharded_checkpoint": "neuronx-distributed",
    r"model\d+-mp(?!1$)\d+": "DeepSeek's own inference code",
    r"(.*[^a-z])?[dept]p[-_]?rank[-_]?\d.*": "a program of parallel processes",
}
"""Who gives such names, without their ending, to files that have parts of the same tensors."""


def visible_names(storage: Storage, folder: str) -> list[str]:
    """Return the names of the files in a folder that are not hidden."""
    # Downloads in progress leave hidden files; an archive made on macOS has a
    # `._model.safetensors` beside each `model.safetensors`.
    return [name for name in storage.list(folder) if not name.startswith(".")]


def replaced_files(storage: Storage, folder: str, stem: str) -> Callable[[str], bool]:
    """Return which files go when a checkpoint is saved to a folder, by the stem of its files.

    They are those of the checkpoint that is there. What a load of a model leaves out stays, such as
    an adapter; and where an adapter is saved, the model.
    """
    names: list[str] = []
    with contextlib.suppress(CheckpointNotFoundError):
        names = visible_names(storage, folder)
    weights = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
    own = {name for name in weights if not is_beside(name, stem)}
    if stem == "model":
        own = {name for name in own if stem_of(name).partition(".")[0] == stem} or own
        with contextlib.suppress(InvalidIndexError):  # else nothing there is a checkpoint
            own = _own_files(storage, folder, names)
    is_model_there = stem.startswith(_BESIDE_A_MODEL) and len(own) < len(weights)
    shared = () if is_model_there else (MANIFEST, DIGESTS)  # of the whole folder

    def is_replaced(name: str) -> bool:
        if name in own or name in shared:
            return True
        if "/" in name or is_beside(name, stem):
            return False
        is_weights = name.endswith((SUFFIX, INDEX_SUFFIX))
        return is_piece_file(name) or (is_weights and stem_of(name).partition(".")[0] == stem)

    return is_replaced


def is_beside(name: str, stem: str) -> bool:
    """Whether a file is not of a checkpoint whose files have such a stem, but of one beside it."""
    if stem.startswith(_BESIDE_A_MODEL):
        return stem_of(name) != stem
    return name.startswith(_BESIDE_A_MODEL)


def _own_files(storage: Storage, folder: str, names: list[str]) -> set[str]:
    """Return the files of whole tensors that a load of a folder opens, and their index."""
    index = index_name(names, folder)
    if index is None:
        pieces = {name for name in names if MANIFEST in names and is_piece_file(name)}
        weights = [name for name in names if name.endswith(SUFFIX)]
        model = files_of_model(weights)
        return pieces or {name for name in model if not name.startswith(_BESIDE_A_MODEL)}
    if index.startswith(_BESIDE_A_MODEL):
        return set()
    file = join(folder, index)
    data = read_file(storage, file, "the index", error=InvalidIndexError)
    return {index, *(name for name in parse_index(data, file=file).files if "/" not in name)}


def files_of_model(weights: Sequence[str]) -> set[str]:
    """Return the files of a model among weights, without those beside it and its variants."""
    model = {MODEL_FILE} & {*weights} or {name for name in weights if _PART.fullmatch(name)}
    model = model or {name for name in weights if not name.startswith(_BESIDE_A_MODEL)}
    return {*_without_variants([*model] or weights)}


def _without_variants(names: Sequence[str]) -> list[str]:
    """Leaves out variants of files that are there without: `model.fp16.safetensors` is one."""
    stems = {name: stem_of(name) for name in names}
    whole = _OF_LIBRARIES & {*stems.values()}
    return [
        name for name, stem in stems.items() if stem.partition(".")[0] not in whole or stem in whole
    ]


def stem_of(name: str) -> str:
    """Return the name of an index, file or numbered set without its ending, variant included."""
    numbered = _NUMBERED.fullmatch(without_rank(name))
    if numbered:
        return numbered[1] + numbered[4]
    return name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX)


def check_complete(names: Sequence[str], path: str, on_error: OnError) -> None:
    """Reports missing files of a numbered set, which only an index would name."""
    sets: dict[tuple[str, str, str], set[int]] = {}  # by stem, count and variant
    for name in names:
        plain = without_rank(name)
        numbered = _NUMBERED.fullmatch(plain)
        if numbered:
            stem, number, count, variant = numbered.groups()
            # Ranks have no file where they had nothing to write; see `absent_files`.
            own = {int(number)} if plain == name else {*range(1, int(count) + 1)}
            sets.setdefault((stem, count, variant), set()).update(own)
    counts = sorted({count for _, count, _ in sets}, key=int)
    if len(sets) > len({(stem, variant) for stem, _, variant in sets}):
        on_error(
            InvalidIndexError(
                "the folder has no index and several numbered sets of files",
                file=path,
                expected="one set of each name",
                found=f"sets of {' and of '.join(counts)} files",
                hint="Remove the files of the set that is out of date.",
            )
        )
    for (stem, count, variant), numbers in sets.items():
        first = 0 if 0 in numbers and int(count) not in numbers else 1
        expected = range(first, first + int(count))  # however long, by the names of hostile files
        missing = int(count) - sum(number in expected for number in numbers)
        if missing:
            absent = (f"{n:0{len(count)}}" for n in expected if n not in numbers)
            shown = ", ".join(itertools.islice(absent, _MOST_SHOWN))
            shown += ", ..." if missing > _MOST_SHOWN else ""
            on_error(
                InvalidIndexError(
                    "the folder has no index and lacks files of a numbered set",
                    file=path,
                    expected=f"{int(count)} files {stem}-…-of-{count}{variant}{SUFFIX}",
                    found=f"{missing:,} missing: numbers {shown}",
                    hint="Complete the download, or give the path of one file.",
                )
            )


def check_no_ranks(names: Sequence[str], path: str, on_error: OnError) -> None:
    """Reports files of which each has its rank's part of each tensor, and none says which part."""
    for pattern, writer in _OF_RANKS.items():
        files = [n for n in names if re.fullmatch(pattern, n.removesuffix(SUFFIX)) and SUFFIX in n]
        if files:
            on_error(
                InvalidIndexError(
                    f"the files are those of {writer}: each has its rank's part of every tensor,"
                    " and none says which",
                    file=path,
                    expected="files of whole tensors",
                    found=listed(files, 3),
                    hint="Give the checkpoint that they were made from, or, of a run of one rank,"
                    " the path of a file.",
                )
            )


def index_name(names: Sequence[str], path: str) -> str | None:
    """Return the name of the index that counts in a folder, if any does."""
    if MAIN_INDEX in names:
        return MAIN_INDEX
    if MODEL_FILE in names:  # which transformers, too, takes before another index
        return None
    if MANIFEST in names and any(map(is_piece_file, names)):
        return None
    files = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
    files = [name for name in files if not name.startswith(_BESIDE_A_MODEL)] or files
    indices = [name for name in _without_variants(files) if name.endswith(INDEX_SUFFIX)]
    if len(indices) > 1:
        raise InvalidIndexError(
            "the folder has several indices",
            file=path,
            expected=f"'{MAIN_INDEX}', or only one other",
            found=listed(indices),
            hint=f"Rename the one that counts to '{MAIN_INDEX}'.",
        )
    return indices[0] if indices else None
