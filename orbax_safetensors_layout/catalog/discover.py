"""Finds the files of the checkpoint at a path, from names, index and manifest."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import logging

from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidIndexError,
    InvalidManifestError,
    StorageError,
    listed,
    redact_urls,
)
from orbax_safetensors_layout.format import (
    DIGESTS,
    ENCODING,
    INDEX_SUFFIX,
    MAIN_INDEX,
    MANIFEST,
    SUFFIX,
    Manifest,
    OnError,
    WeightIndex,
    is_piece_file,
    natural_key,
    parse_index,
    parse_manifest,
    raise_error,
)
from orbax_safetensors_layout.storage import (
    LocalStorage,
    Storage,
    check_path,
    join,
    local_path,
    open_storage,
    read_file,
)

_ORBAX_ITEM = "_METADATA"  # the file that every tree has which Orbax saved
_ORBAX_STEP = ("_CHECKPOINT_METADATA", "orbax.checkpoint")  # the files that its steps have
_USUAL_ITEMS = ("default", "state")  # opened where a step has several: those of Orbax v0 and v1
_STEP = re.compile(r"(?:.*[^0-9])?0*([0-9]+)")  # folders of steps, as `step_0007` is

_MOST_FOUND, _MOST_FOLDERS, _DEPTH = 5, 100, 3
_MODEL, _PART = "model.safetensors", re.compile(r"model-\d+-of-\d+\.safetensors")
_BESIDE_A_MODEL = ("adapter_model", "pytorch_lora_weights", "consolidated")
"""Prefixes of files that PEFT, Diffusers and Mistral put beside a model's own, of any name."""
_OF_LIBRARIES = {"model", "pytorch_model", "diffusion_pytorch_model", *_BESIDE_A_MODEL}
"""Names of which libraries write variants; files of other names may be parts of one checkpoint."""
_NUMBERED = re.compile(r"(.+)-(\d{1,255})-of-(\d{1,255})((?:\.[^.]+)?)\.safetensors")
_IN_ORBAXS_FORMAT = (
    "Orbax saved it in its own format: restore it with Orbax's own handlers, for instance a manager"
    " without `handler_registry`, or make safetensors of it with `osl.convert`."
)


def is_safetensors_checkpoint(
    path: str | os.PathLike[str], *, storage: Storage | None = None
) -> bool:
    """Return whether `path` is a `.safetensors` file, or a folder with one or with an index.

    Looks at names only. A path that does not exist, or that no storage serves, is not one.

    Raises:
        StorageError: The storage does not answer.
    """
    if storage is None:
        try:
            storage, path = open_storage(path)
        except StorageError:
            return False
        with storage:
            return is_safetensors_checkpoint(path, storage=storage)
    text = os.fspath(path)
    try:
        if storage.is_file(text):
            return text.endswith(SUFFIX)
        return _has_safetensors(_visible(storage, text))
    except CheckpointNotFoundError:
        return False


def is_orbax_checkpoint(folder: str) -> bool:
    """Whether Orbax made a folder."""
    return any(os.path.exists(os.path.join(folder, name)) for name in (_ORBAX_ITEM, *_ORBAX_STEP))


def holds_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint of either kind, or a step."""
    return is_safetensors_checkpoint(folder) or is_orbax_checkpoint(folder)


class CheckpointRef(NamedTuple):
    """The folder or file of a checkpoint's tree, of several its item; Orbax's own format or not."""

    path: str
    is_orbax: bool
    item: str | None

    @property
    def step_folder(self) -> str:
        """The folder of the step, where there is one: that of the tree, or of its item."""
        return self.path if self.item is None else os.path.dirname(self.path)


def resolve_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    item: str | None = None,
    has_steps: bool = False,
) -> CheckpointRef:
    """Resolves a path, with a step a manager's, to its tree or that of an item; a URL to itself.

    The item is by default the only one, or else the usual one. With `has_steps` the caller's user
    can choose a step, and is given those that are there.
    """
    check_path(text := os.fsdecode(path))
    text = local_path(text) or text
    with LocalStorage() as storage:
        if step is not None:
            text = _step_folder(storage, text, step)
        elif item is None and ("://" in text or storage.is_file(text)):
            return CheckpointRef(text, is_orbax=False, item=None)
        ref = _find_tree(storage, text, item, is_step=step is not None)
        if ref is None:
            error = _not_found(storage, text, item)
            steps = _steps(storage, text) if has_steps and step is None else {}
            for name, number in itertools.islice(steps.items(), _MOST_FOLDERS):
                with contextlib.suppress(StorageError):  # one may not look into it
                    if _find_tree(storage, join(text, name), item, is_step=True) is not None:
                        chosen = f"step={number} (--step {number})"
                        error.hint = f"Choose a step, as {chosen}; it has {listed(steps.values())}."
                        break
            raise error
        return ref


def _steps(storage: Storage, path: str) -> dict[str, int]:
    """Return the folders that may be steps, with their numbers, the latest first."""
    matches = ((name, _STEP.fullmatch(name)) for name in storage.folders(path))
    steps = {name: int(match[1]) for name, match in matches if match}
    return dict(sorted(steps.items(), key=lambda item: item[1], reverse=True))


def _step_folder(storage: Storage, path: str, step: int) -> str:
    steps = _steps(storage, path)
    names = [name for name, number in steps.items() if number == step]
    if len(names) != 1:
        raise CheckpointNotFoundError(
            f"several folders are step {step}" if names else f"there is no step {step}",
            file=path,
            found=listed(names or steps or storage.folders(path)),
        )
    return join(path, names[0])


def _find_tree(
    storage: Storage, folder: str, item: str | None = None, *, is_step: bool = False
) -> CheckpointRef | None:
    """Return the tree in a folder, or the named one of its items; of a step's the only or usual."""
    names = _visible(storage, folder)
    if item is None:
        if _is_tree(names):
            return CheckpointRef(folder, _is_orbax(names), None)
        if not is_step and not any(name in names for name in _ORBAX_STEP):
            return None
    folders = [name for name in storage.folders(folder) if not name.startswith(".")]
    files = {name: _visible(storage, join(folder, name)) for name in folders}
    items = [name for name in folders if _is_tree(files[name])]
    choices = [item] if item is not None else items if len(items) == 1 else _USUAL_ITEMS
    for name in choices:
        if name in items:
            return CheckpointRef(join(folder, name), _is_orbax(files[name]), name)
    return None


class Discovery(NamedTuple):
    """The files of a checkpoint, and its index or manifest."""

    path: str  # of the file or folder that holds it
    files: list[str]  # paths
    weights: WeightIndex | None = None
    manifest_file: str | None = None
    manifest: Manifest | None = None  # if it was read to know the files


def discover(storage: Storage, path: str, *, on_error: OnError = raise_error) -> Discovery:
    """Return the files of the checkpoint at a path; of a step of Orbax those of its item.

    `on_error` is called for missing files; if it returns, the others are taken.
    """
    if storage.is_file(path):
        if not path.endswith(SUFFIX):
            raise CheckpointNotFoundError(
                "the path is a file of another format",
                file=path,
                expected=f"a '{SUFFIX}' file, or a folder of them",
                found=os.path.basename(path),
                hint="Give the folder that holds the index." if path.endswith(".json") else None,
            )
        return Discovery(path, [path])
    names = _visible(storage, path)
    manifest_file = join(path, MANIFEST) if MANIFEST in names else None
    index_name = _index_name(names, path)
    if index_name is not None:
        index_file = join(path, index_name)
        data = read_file(storage, index_file, "the index", error=InvalidIndexError)
        index = parse_index(data, file=index_file)
        if ENCODING in index.metadata:
            raise InvalidIndexError(
                "the folder has the differences of a published version, not its tensors",
                file=index_file,
                hint="Take the version with osl.pull, which applies them.",
            )
        files = _present(storage, path, index.files, names, index_file, on_error)
        if _MODEL in names and _MODEL not in index.files:
            logging.warning(
                "%s does not list '%s', which is left out; transformers loads that file alone. Load"
                " it by its own path, or remove what is out of date.",
                redact_urls(index_file),
                _MODEL,
            )
        return Discovery(path, files, index, manifest_file)
    manifest = None if manifest_file is None else read_manifest(storage, manifest_file)
    if manifest is not None and manifest.pieces is not None and manifest_file is not None:
        weights = (name for name in names if name.endswith(SUFFIX))
        whole = [name for name in weights if _stem(name).partition(".")[0] == "model"]
        if whole:
            raise InvalidManifestError(
                "the folder holds whole tensors beside the pieces of its manifest",
                file=manifest_file,
                expected="one checkpoint in a folder",
                found=listed(whole),
                hint=f"Remove '{MANIFEST}' and the pieces, or those files.",
            )
        files = _present(storage, path, manifest.pieces.files, names, manifest_file, on_error)
        return Discovery(path, files, None, manifest_file, manifest)
    names = _model_alone(names, path)
    files = [join(path, name) for name in names if name.endswith(SUFFIX)]
    _check_complete(names, path, on_error)
    if files:
        return Discovery(path, files, None, manifest_file, manifest)
    ref = _find_tree(storage, path)
    if ref is None or ref.is_orbax or ref.item is None:
        raise _not_found(storage, path)
    return discover(storage, ref.path, on_error=on_error)


def _not_found(storage: Storage, path: str, item: str | None = None) -> CheckpointNotFoundError:
    names = _visible(storage, path)
    content = [*names, *(f"{name}/" for name in storage.folders(path))]
    is_there = content or (storage.kind == "local" and os.path.isdir(path))
    subject = "the folder" if is_there else "the path does not exist, or"
    return CheckpointNotFoundError(
        f"{subject} does not contain any '{SUFFIX}' files"
        if item is None
        else f"the folder has no checkpoint '{item}'",
        file=path,
        expected=f"a '{SUFFIX}' file, or a folder with '{SUFFIX}' files directly in it",
        found=listed(content) or ("an empty folder" if is_there else "nothing"),
        hint=_IN_ORBAXS_FORMAT if _ORBAX_ITEM in names else _hint(storage, path),
    )


def _hint(storage: Storage, folder: str) -> str | None:
    """Return which paths below a folder the user can give instead."""
    safetensors, orbax = _checkpoints_below(storage, folder)
    hints = []
    if safetensors:
        hints.append(f"Give a checkpoint below it: {', '.join(safetensors)}.")
    if orbax:
        hints.append(
            f"Below it are in Orbax's own format: {', '.join(orbax)}. Restore those with Orbax's"
            " handlers, or make safetensors of them with `osl.convert`."
        )
    if not hints and os.path.basename(folder).startswith(("snapshots", "models--")):
        hints.append(
            "In the cache of the hub, give the folder of a commit: models--…/snapshots/<commit>."
        )
    return " ".join(hints) or None


def _checkpoints_below(storage: Storage, folder: str) -> tuple[list[str], list[str]]:
    """Looks for safetensors and for Orbax's checkpoints, those of the highest numbers first."""
    safetensors: list[str] = []
    orbax: list[str] = []
    left = [""]
    for _ in range(_MOST_FOLDERS):
        if not left or len(safetensors) == _MOST_FOUND:
            break
        inner = left.pop()
        place = join(folder, inner) if inner else folder
        with contextlib.suppress(StorageError):  # one may not look into it
            names = storage.list(place) if inner else []
            if _has_safetensors(names):
                safetensors.append(inner)
            elif _ORBAX_ITEM in names:
                orbax.append(inner)
            elif inner.count("/") + bool(inner) < _DEPTH:
                folders = [name for name in storage.folders(place) if not name.startswith(".")]
                folders.sort(key=natural_key)
                left += [join(inner, name) if inner else name for name in folders]
    return safetensors, orbax[:_MOST_FOUND]


def _has_safetensors(names: Sequence[str]) -> bool:
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def _is_tree(names: Sequence[str]) -> bool:
    return _ORBAX_ITEM in names or MANIFEST in names or _has_safetensors(names)


def _is_orbax(names: Sequence[str]) -> bool:
    return _ORBAX_ITEM in names and not _has_safetensors(names)


def _visible(storage: Storage, folder: str) -> list[str]:
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
        names = _visible(storage, folder)
    weights = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
    own = {name for name in weights if not is_beside(name, stem)}
    if stem == "model":
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
        return is_piece_file(name) or (is_weights and _stem(name).partition(".")[0] == stem)

    return is_replaced


def is_beside(name: str, stem: str) -> bool:
    """Whether a file is not of a checkpoint whose files have such a stem, but of one beside it."""
    if stem.startswith(_BESIDE_A_MODEL):
        return _stem(name) != stem
    return name.startswith(_BESIDE_A_MODEL)


def _own_files(storage: Storage, folder: str, names: list[str]) -> set[str]:
    """Return the files of whole tensors that a load of a folder opens, and their index."""
    index = _index_name(names, folder)
    if index is None:
        pieces = {name for name in names if MANIFEST in names and is_piece_file(name)}
        weights = [name for name in names if name.endswith(SUFFIX)]
        model = _model_of(weights)
        return pieces or {name for name in model if not name.startswith(_BESIDE_A_MODEL)}
    file = join(folder, index)
    data = read_file(storage, file, "the index", error=InvalidIndexError)
    return {index, *(name for name in parse_index(data, file=file).files if "/" not in name)}


def _model_of(weights: Sequence[str]) -> set[str]:
    """Return the files of a model among weights, without those beside it and its variants."""
    model = {_MODEL} & {*weights} or {name for name in weights if _PART.fullmatch(name)}
    model = model or {name for name in weights if not name.startswith(_BESIDE_A_MODEL)}
    return {*_without_variants([*model] or weights)}


def _model_alone(names: list[str], path: str) -> list[str]:
    """Leaves out weights beside a model, and its variants, as transformers and Diffusers do."""
    weights = [name for name in names if name.endswith(SUFFIX)]
    model = _model_of(weights)
    if len(model) == len(weights):
        return names
    kept = [name for name in names if name in model or not name.endswith(SUFFIX)]
    logging.warning(
        "%s holds a model and other weights beside it: '%s' is left out. Load it by its own path.",
        redact_urls(path),
        "', '".join(sorted(set(names) - set(kept))),
    )
    return kept


def _without_variants(names: Sequence[str]) -> list[str]:
    """Leaves out variants of files that are there without: `model.fp16.safetensors` is one."""
    stems = {name: _stem(name) for name in names}
    whole = _OF_LIBRARIES & {*stems.values()}
    return [
        name for name, stem in stems.items() if stem.partition(".")[0] not in whole or stem in whole
    ]


def _stem(name: str) -> str:
    """Return the name of an index, file or numbered set without its ending, variant included."""
    numbered = _NUMBERED.fullmatch(name)
    if numbered:
        return numbered[1] + numbered[4]
    return name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX)


def _check_complete(names: Sequence[str], path: str, on_error: OnError) -> None:
    """Reports missing files of a numbered set, which only an index would name."""
    sets: dict[tuple[str, str, str], set[int]] = {}  # by stem, count and variant
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            stem, number, count, variant = numbered.groups()
            sets.setdefault((stem, count, variant), set()).add(int(number))
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
        expected = range(1, int(count) + 1)  # however long, by the names of hostile files
        missing = int(count) - sum(number in expected for number in numbers)
        if missing:
            absent = (f"{n:0{len(count)}}" for n in expected if n not in numbers)
            shown = ", ".join(itertools.islice(absent, _MOST_FOUND))
            shown += ", ..." if missing > _MOST_FOUND else ""
            on_error(
                InvalidIndexError(
                    "the folder has no index and lacks files of a numbered set",
                    file=path,
                    expected=f"{int(count)} files {stem}-…-of-{count}{variant}{SUFFIX}",
                    found=f"{missing:,} missing: numbers {shown}",
                    hint="Complete the download, or give the path of one file.",
                )
            )


def _index_name(names: Sequence[str], path: str) -> str | None:
    if MAIN_INDEX in names:
        return MAIN_INDEX
    if _MODEL in names:  # which transformers, too, takes before another index
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


def read_manifest(storage: Storage, file: str) -> Manifest:
    """Reads a manifest."""
    data = read_file(storage, file, "the manifest", error=InvalidManifestError)
    return parse_manifest(data, file=file)


def _present(
    storage: Storage,
    path: str,
    files: Sequence[str],
    names: Sequence[str],
    index_file: str,
    on_error: OnError,
) -> list[str]:
    """Return the paths of those of some files that exist; reports the others."""
    if not storage.lists:
        return [join(path, name) for name in files]  # a missing one fails when it is opened
    present = set(names)
    for folder in {name.rpartition("/")[0] for name in files} - {""}:
        present.update(f"{folder}/{name}" for name in storage.list(join(path, folder)))
    missing = [name for name in files if name not in present]
    if missing:
        on_error(
            InvalidIndexError(
                "the index lists files that are missing",
                file=index_file,
                expected=f"{len(files)} files",
                found=f"{len(missing)} missing: {listed(missing)}",
                hint="The download or copy of the checkpoint may be incomplete.",
            )
        )
    return [join(path, name) for name in files if name in present]
