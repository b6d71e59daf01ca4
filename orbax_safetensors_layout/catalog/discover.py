"""Finds the files of the checkpoint at a path, from names, index and manifest."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
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
    INDEX_SUFFIX,
    MANIFEST,
    SUFFIX,
    Manifest,
    OnError,
    WeightIndex,
    natural_key,
    parse_index,
    parse_manifest,
    raise_error,
)
from orbax_safetensors_layout.storage import (
    LocalStorage,
    Storage,
    check_link,
    check_path,
    hub_hint,
    join,
    local_path,
    open_storage,
    read_file,
)

from .folder_names import (
    MODEL_FILE,
    check_complete,
    check_no_ranks,
    files_of_model,
    index_name,
    stem_of,
    visible_names,
)

ORBAX_ITEM = "_METADATA"  # the file that every tree has which Orbax saved
_ARRAY_ALONE = "checkpoint"  # the folder of the one array that `ocp.args.ArraySave` saves
_ORBAX_STEP = ("_CHECKPOINT_METADATA", "orbax.checkpoint")  # the files that its steps have
_USUAL_ITEMS = ("default", "state")  # opened where a step has several: those of Orbax v0 and v1
_STEP = re.compile(r"(?:.*[^0-9])?0*([0-9]+)")  # folders of steps, as `step_0007` is
_UNFINISHED = ".orbax-checkpoint-tmp"  # in names of steps and items that Orbax has not finished

_MOST_FOUND, _MOST_FOLDERS, _DEPTH = 5, 100, 3
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
        return _has_safetensors(visible_names(storage, text))
    except CheckpointNotFoundError:
        return False


def is_orbax_checkpoint(folder: str) -> bool:
    """Whether Orbax made a folder."""
    return any(os.path.exists(os.path.join(folder, name)) for name in (ORBAX_ITEM, *_ORBAX_STEP))


def holds_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint of either kind, or a step."""
    return is_safetensors_checkpoint(folder) or is_orbax_checkpoint(folder)


def checkpoint_beside(storage: Storage, folder: str) -> str | None:
    """Return a checkpoint that would stay beside one that is saved to a folder, if there is one.

    It is in Orbax's own format, or an item of a step that Orbax made.
    """
    with contextlib.suppress(CheckpointNotFoundError):
        names = visible_names(storage, folder)
        if _is_orbax(names):
            return folder
        if _is_step(names):
            return next((tree.path for tree in _items(storage, folder).trees.values()), None)
    return None


class CheckpointRef(NamedTuple):
    """The folder or file of a checkpoint's tree, of several its item; Orbax's own format or not."""

    path: str
    is_orbax: bool
    item: str | None


class StepItems(NamedTuple):
    """A folder of items: trees by name, and the names of what other handlers of Orbax saved."""

    path: str
    trees: dict[str, CheckpointRef]
    others: list[str]

    def tree(self, item: str | None) -> CheckpointRef | None:
        """Return the tree of an item; by default the only one, or else the usual one."""
        usual = self.trees if len(self.trees) == 1 else _USUAL_ITEMS
        names = usual if item is None else [item]
        return next((self.trees[name] for name in names if name in self.trees), None)


def find_step(path: str | os.PathLike[str], *, step: int | None = None) -> StepItems:
    """Return the items of the step at a path, or of a step of a manager; none of another path."""
    with LocalStorage() as storage:
        folder, is_step = _folder(storage, path, step)
        if "://" in folder or storage.is_file(folder) or _tree(storage, folder) is not None:
            return StepItems(folder, {}, [])
        return _items(storage, folder) if is_step else StepItems(folder, {}, [])


def resolve_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    item: str | None = None,
    by_path: bool = False,
) -> CheckpointRef:
    """Resolves a path, with a step a manager's, to its tree or that of an item; a URL to itself.

    The item is by default the only one, or else the usual one. With `by_path` the two do not count
    for a tree's own path, and errors name paths to give instead.
    """
    with LocalStorage() as storage:
        text, _ = _folder(storage, path, None)
        is_url = "://" in text
        if by_path or (step is None and item is None):
            if is_url or storage.is_file(text):
                return CheckpointRef(text, is_orbax=False, item=None)
            if (tree := _tree(storage, text)) is not None:
                return tree
        if is_url:
            raise CheckpointNotFoundError(
                "a step or an item is found on local and mounted file systems alone",
                file=text,
                hint="Mount the bucket, or give the path of the item.",
            )
        folder, is_step = _folder(storage, path, step)
        ref = _find_tree(storage, folder, item, is_step=is_step)
        if ref is not None:
            return ref
        error = _not_found(storage, folder, item)
        if not by_path:
            trees = _items(storage, folder).trees
            if trees and (is_step or item is not None):
                choices = [f"item={name!r} (--item {name})" for name in trees]
                error.hint = f"Choose one: {listed(choices)}."
            elif step is None and (steps := _steps_with_trees(storage, folder)):
                chosen = f"step={steps[0]} (--step {steps[0]})"
                error.hint = f"Choose a step, as {chosen}; it has {listed(steps)}."
        raise error


def _folder(storage: Storage, path: str | os.PathLike[str], step: int | None) -> tuple[str, bool]:
    """Return the path, or that of a step below it; and whether that is a step."""
    check_path(text := os.fsdecode(path))
    text = local_path(text) or text
    if "://" in text:
        return text, False
    if step is None:
        return text, _is_step(visible_names(storage, text))
    steps = _steps(storage, text)
    names = [name for name, number in steps.items() if number == step]
    if len(names) == 1:
        return join(text, names[0]), True
    if not os.path.isdir(text):
        raise _not_found(storage, text)
    raise CheckpointNotFoundError(
        f"several folders are step {step}" if names else f"there is no step {step}",
        file=text,
        found=listed(names or steps or storage.folders(text)) or "no folders",
    )


def _steps(storage: Storage, path: str) -> dict[str, int]:
    """Return the folders that may be steps, with their numbers, the latest first."""
    matches = ((name, _STEP.fullmatch(name)) for name in _folders(storage, path))
    steps = {name: int(match[1]) for name, match in matches if match}
    return dict(sorted(steps.items(), key=lambda item: item[1], reverse=True))


def _steps_with_trees(storage: Storage, path: str) -> list[int]:
    """Return the numbers of all steps, the latest first that has a tree; none where none has."""
    steps = _steps(storage, path)
    for name in [*steps][:_MOST_FOLDERS]:
        with contextlib.suppress(StorageError):  # one may not look into it
            folder = join(path, name)
            if _tree(storage, folder) is not None or _items(storage, folder).trees:
                return [steps[name], *(n for other, n in steps.items() if other != name)]
    return []


def _folders(storage: Storage, path: str) -> list[str]:
    names = storage.folders(path)
    return [name for name in names if not name.startswith(".") and _UNFINISHED not in name]


def _tree(storage: Storage, folder: str, item: str | None = None) -> CheckpointRef | None:
    """Return the tree whose files are directly in a folder."""
    names = visible_names(storage, folder)
    if not _is_tree(names):
        return None
    if is_orbax := _is_orbax(names):
        folders = {*storage.folders(folder)}
        if _ARRAY_ALONE in folders and folders <= {_ARRAY_ALONE, "array_metadatas"}:
            return None
    return CheckpointRef(folder, is_orbax, item)


def _items(storage: Storage, folder: str) -> StepItems:
    names = _folders(storage, folder)
    trees = {name: tree for name in names if (tree := _tree(storage, join(folder, name), name))}
    return StepItems(folder, trees, [name for name in names if name not in trees])


def _find_tree(
    storage: Storage, folder: str, item: str | None, *, is_step: bool
) -> CheckpointRef | None:
    """Return the tree in a folder, or the named one of its items; of a step's the only or usual."""
    if item is None and (tree := _tree(storage, folder)) is not None:
        return tree
    return _items(storage, folder).tree(item) if is_step or item is not None else None


class Discovery(NamedTuple):
    """The files of a checkpoint, and its index or manifest."""

    path: str  # of the file or folder that holds it
    files: list[str]  # paths
    weights: WeightIndex | None = None
    index_file: str | None = None
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
    names = visible_names(storage, path)
    manifest_file = join(path, MANIFEST) if MANIFEST in names else None
    name = index_name(names, path)
    if name is not None:
        index_file = join(path, name)
        data = read_file(storage, index_file, "the index", error=InvalidIndexError)
        index = parse_index(data, file=index_file)
        missing = _missing(storage, path, index.files, names)
        own = [n for n in names if n.endswith(SUFFIX) and stem_of(n) == stem_of(name)]
        if own and len(missing) == len(index.files):
            logging.warning(
                "%s lists files that are all missing: it is of an older version, and is left out.",
                redact_urls(index_file),
            )
            return _without_index(storage, path, names, manifest_file, on_error)
        files = _present(path, index.files, missing, index_file, on_error, own)
        if MODEL_FILE in names and MODEL_FILE not in index.files:
            logging.warning(
                "%s does not list '%s', which is left out; transformers loads that file alone. Load"
                " it by its own path, or remove what is out of date.",
                redact_urls(index_file),
                MODEL_FILE,
            )
        return Discovery(path, files, index, index_file, manifest_file)
    return _without_index(storage, path, names, manifest_file, on_error)


def _without_index(
    storage: Storage, path: str, names: list[str], manifest_file: str | None, on_error: OnError
) -> Discovery:
    manifest = None if manifest_file is None else read_manifest(storage, manifest_file)
    if manifest is not None and manifest.pieces is not None and manifest_file is not None:
        weights = (name for name in names if name.endswith(SUFFIX))
        whole = [name for name in weights if stem_of(name).partition(".")[0] == "model"]
        if whole:
            raise InvalidManifestError(
                "the folder holds whole tensors beside the pieces of its manifest",
                file=manifest_file,
                expected="one checkpoint in a folder",
                found=listed(whole),
                hint=f"Remove '{MANIFEST}' and the pieces, or those files.",
            )
        missing = _missing(storage, path, manifest.pieces.files, names)
        files = _present(path, manifest.pieces.files, missing, manifest_file, on_error)
        return Discovery(path, files, manifest_file=manifest_file, manifest=manifest)
    names = _model_alone(names, path)
    files = [join(path, name) for name in names if name.endswith(SUFFIX)]
    check_no_ranks(names, path, on_error)
    check_complete(names, path, on_error)
    if files:
        return Discovery(path, files, manifest_file=manifest_file, manifest=manifest)
    ref = _find_tree(storage, path, None, is_step=_is_step(names))
    if ref is None or ref.is_orbax or ref.item is None:
        raise _not_found(storage, path)
    return discover(storage, ref.path, on_error=on_error)


def _not_found(storage: Storage, path: str, item: str | None = None) -> CheckpointNotFoundError:
    if storage.kind == "local":
        check_link(path)
    names, folders = visible_names(storage, path), storage.folders(path)
    content = [*names, *(f"{name}/" for name in folders)]
    is_there = content or (storage.kind == "local" and os.path.isdir(path))
    trees, expected = _items(storage, path).trees if _is_step(names) else {}, None
    if not is_there:
        problem = "the path does not exist"
    elif item is not None:
        problem = (
            f"item {item!r} is not a tree" if item in folders else f"there is no item {item!r}"
        )
    elif len(trees) > 1:
        problem = f"the step has several items: {listed(trees)}"
    else:
        problem = f"the folder does not contain any '{SUFFIX}' files"
        expected = f"a '{SUFFIX}' file, or a folder with '{SUFFIX}' files directly in it"
    return CheckpointNotFoundError(
        problem,
        file=path,
        expected=expected,
        found=listed(content) or ("an empty folder" if is_there else None),
        hint=_IN_ORBAXS_FORMAT if ORBAX_ITEM in names else _hint(storage, path),
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
    if not hints and storage.kind == "local" and not os.path.exists(folder):
        return hub_hint(folder)
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
            elif ORBAX_ITEM in names:
                orbax.append(inner)
            elif inner.count("/") + bool(inner) < _DEPTH:
                folders = sorted(_folders(storage, place), key=natural_key)
                left += [join(inner, name) if inner else name for name in folders]
    return safetensors, orbax[:_MOST_FOUND]


def _has_safetensors(names: Sequence[str]) -> bool:
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def _is_tree(names: Sequence[str]) -> bool:
    return ORBAX_ITEM in names or MANIFEST in names or _has_safetensors(names)


def _is_step(names: Sequence[str]) -> bool:
    return any(name in names for name in _ORBAX_STEP)


def _is_orbax(names: Sequence[str]) -> bool:
    return ORBAX_ITEM in names and not _has_safetensors(names)


def _model_alone(names: list[str], path: str) -> list[str]:
    """Leaves out weights beside a model, and its variants, as transformers and Diffusers do."""
    weights = [name for name in names if name.endswith(SUFFIX)]
    model = files_of_model(weights)
    if len(model) == len(weights):
        return names
    kept = [name for name in names if name in model or not name.endswith(SUFFIX)]
    logging.warning(
        "%s holds a model and other weights beside it: '%s' is left out. Load it by its own path.",
        redact_urls(path),
        "', '".join(sorted(set(names) - set(kept))),
    )
    return kept


def read_manifest(storage: Storage, file: str) -> Manifest:
    """Reads a manifest."""
    data = read_file(storage, file, "the manifest", error=InvalidManifestError)
    return parse_manifest(data, file=file)


def _missing(storage: Storage, path: str, files: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return those of some files that do not exist; none where that would take many requests."""
    if not storage.lists and (MODEL_FILE in files or MODEL_FILE not in names):
        return []  # a missing one fails when it is opened
    others = sorted({*files}.difference(names))
    present = storage.existing(path, others) if others else ()
    return [name for name in others if name not in present]


def _present(
    path: str,
    files: Sequence[str],
    missing: Sequence[str],
    index_file: str,
    on_error: OnError,
    others: Sequence[str] = (),
) -> list[str]:
    """Return the paths of files but missing ones, which it reports; `others` are of a model."""
    gone = set(missing)
    if gone:
        hint = "The download or copy of the checkpoint may be incomplete."
        if MODEL_FILE in others:
            hint += f" If '{MODEL_FILE}' is the whole model, remove the index."
        on_error(
            InvalidIndexError(
                "the index lists files that are missing",
                file=index_file,
                expected=f"{len(files)} files",
                found=f"{len(missing)} missing: {listed(missing)}",
                hint=hint,
            )
        )
    return [join(path, name) for name in files if name not in gone]
