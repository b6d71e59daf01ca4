"""Finds the files of the checkpoint at a path, from names, index and manifest."""

from __future__ import annotations

import contextlib
import itertools
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
_ORBAX_STEP = ("_CHECKPOINT_METADATA", "orbax.checkpoint")  # the files that its steps have
_USUAL_ITEMS = ("default", "state")  # opened where a step has several: those of Orbax v0 and v1
_STEP = re.compile(r"(?:.*[^0-9])?0*([0-9]+)")  # folders of steps, as `step_0007` is

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
        if any(name in names for name in _ORBAX_STEP):
            items = (join(folder, name) for name in storage.folders(folder))
            return next((item for item in items if _is_tree(visible_names(storage, item))), None)
    return None


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
    names = visible_names(storage, folder)
    if item is None:
        if _is_tree(names):
            return CheckpointRef(folder, _is_orbax(names), None)
        if not is_step and not any(name in names for name in _ORBAX_STEP):
            return None
    folders = [name for name in storage.folders(folder) if not name.startswith(".")]
    files = {name: visible_names(storage, join(folder, name)) for name in folders}
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
    ref = _find_tree(storage, path)
    if ref is None or ref.is_orbax or ref.item is None:
        raise _not_found(storage, path)
    return discover(storage, ref.path, on_error=on_error)


def _not_found(storage: Storage, path: str, item: str | None = None) -> CheckpointNotFoundError:
    if storage.kind == "local":
        check_link(path)
    names = visible_names(storage, path)
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
                folders = [name for name in storage.folders(place) if not name.startswith(".")]
                folders.sort(key=natural_key)
                left += [join(inner, name) if inner else name for name in folders]
    return safetensors, orbax[:_MOST_FOUND]


def _has_safetensors(names: Sequence[str]) -> bool:
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def _is_tree(names: Sequence[str]) -> bool:
    return ORBAX_ITEM in names or MANIFEST in names or _has_safetensors(names)


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
    """Return those of some files that do not exist, as far as the storage can list them."""
    if not storage.lists:
        return []  # a missing one fails when it is opened
    present = set(names)
    for folder in {name.rpartition("/")[0] for name in files} - {""}:
        present.update(f"{folder}/{name}" for name in storage.list(join(path, folder)))
    return [name for name in files if name not in present]


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
