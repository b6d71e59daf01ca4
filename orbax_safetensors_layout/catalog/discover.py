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
    redact_urls,
)
from orbax_safetensors_layout.format import (
    INDEX_SUFFIX,
    MAIN_INDEX,
    MANIFEST,
    SUFFIX,
    Manifest,
    OnError,
    WeightIndex,
    parse_index,
    parse_manifest,
    raise_error,
)
from orbax_safetensors_layout.storage import Storage, join, open_storage, read_file

from .nearby import ORBAX_ITEM, ORBAX_STEP, checkpoints_below, has_safetensors, item_of_step

_BESIDE_A_MODEL = ("adapter_model", "pytorch_lora_weights", "consolidated")
"""Prefixes of files that PEFT, Diffusers and Mistral put beside the model's own."""
_MAX_LISTED = 10
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MAX_NUMBERED = 100_000
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
    with contextlib.ExitStack() as stack:
        if storage is None:
            try:
                storage, text = open_storage(path)
            except StorageError:
                return False
            stack.enter_context(storage)
        else:
            text = os.fspath(path)
        try:
            if storage.is_file(text):
                return text.endswith(SUFFIX)
            return has_safetensors(_visible(storage, text))
        except CheckpointNotFoundError:
            return False


class Discovery(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        path: The file or folder that holds it.
        files: Paths of the `.safetensors` files.
        weights: The index of Hugging Face, if there is one.
        manifest_file: Path of the manifest, if there is one.
        manifest: The manifest, if it was read to know the files.
    """

    path: str
    files: list[str]
    weights: WeightIndex | None = None
    manifest_file: str | None = None
    manifest: Manifest | None = None


def discover(storage: Storage, path: str, *, on_error: OnError = raise_error) -> Discovery:
    """Return the files of the checkpoint at a path; of a step of Orbax those of its item.

    Args:
        storage: The storage of the path.
        path: The path.
        on_error: Called for missing files; returning takes the others.

    Raises:
        CheckpointNotFoundError: There is no `.safetensors` file.
        FormatError: The index or the manifest is malformed, or lists files that are missing.
        StorageError: A read failed.
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
        index = _read_index(storage, index_file)
        present = _present(storage, path, index.files, names, index_file, on_error)
        return Discovery(path, [join(path, name) for name in present], index, manifest_file)
    manifest = None if manifest_file is None else read_manifest(storage, manifest_file)
    if manifest is not None and manifest.pieces is not None:
        pieces = manifest.pieces.files
        whole = [n for n in names if n.startswith("model") and n.endswith(SUFFIX)]
        if whole:
            raise InvalidManifestError(
                "the folder holds whole tensors beside the pieces that its manifest tells of",
                file=manifest_file,
                expected="one checkpoint in a folder",
                found=listed(whole),
                hint=f"Remove '{MANIFEST}' and the pieces, or those files.",
            )
        present = _present(storage, path, pieces, names, join(path, MANIFEST), on_error)
        return Discovery(
            path, [join(path, name) for name in present], None, manifest_file, manifest
        )
    if manifest is None:
        names = _model_alone(names, path)
    files = [join(path, name) for name in names if name.endswith(SUFFIX)]
    _check_complete(names, path, on_error)
    if files:
        return Discovery(path, files, None, manifest_file, manifest)
    if any(name in names for name in ORBAX_STEP):
        item = item_of_step(storage, path)
        if item is not None:
            return discover(storage, join(path, item), on_error=on_error)
    found = [*names, *(f"{name}/" for name in storage.folders(path))]
    is_there = found or (storage.kind == "local" and os.path.isdir(path))
    subject = "the folder" if is_there else "the path does not exist, or"
    raise CheckpointNotFoundError(
        f"{subject} does not contain any '{SUFFIX}' files",
        file=path,
        expected=f"a '{SUFFIX}' file, or a folder with '{SUFFIX}' files directly in it",
        found=listed(found) or ("an empty folder" if is_there else "nothing"),
        hint=_IN_ORBAXS_FORMAT
        if ORBAX_ITEM in names
        else checkpoints_below(storage, path).hint() or _hint(path),
    )


def _hint(path: str) -> str | None:
    if not os.path.basename(path).startswith(("snapshots", "models--")):
        return None
    return "In the cache of the hub, give the folder of a commit: models--…/snapshots/<commit>."


def _visible(storage: Storage, folder: str) -> list[str]:
    """Return the files of a folder without hidden ones.

    Downloads in progress leave such; an archive made on macOS has a `._model.safetensors` beside
    each `model.safetensors`.
    """
    return [name for name in storage.list(folder) if not name.startswith(".")]


def _model_alone(names: list[str], path: str) -> list[str]:
    """Return the names without an adapter or a second copy beside a model, as transformers does."""
    models = [n for n in names if n.endswith(SUFFIX) and not n.startswith(_BESIDE_A_MODEL)]
    kept = [n for n in names if not (n.endswith(SUFFIX) and n.startswith(_BESIDE_A_MODEL))]
    if not models or len(kept) == len(names):
        return names
    logging.warning(
        "%s holds a model and other weights beside it: '%s' is left out. Load it by its own path.",
        redact_urls(path),
        "', '".join(sorted(set(names) - set(kept))),
    )
    return kept


def _check_complete(names: Sequence[str], path: str, on_error: OnError) -> None:
    """Reports missing files of a numbered set, which only an index would name."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            stem, number, count = numbered.groups()
            sets.setdefault((stem, count), set()).add(int(number))
    for (stem, count), numbers in sets.items():
        missing = set(range(1, int(count) + 1)) - numbers
        if missing and int(count) < _MAX_NUMBERED:
            absent = [f"{number:0{len(count)}}" for number in sorted(missing)]
            on_error(
                InvalidIndexError(
                    "the folder has no index and lacks files of a numbered set",
                    file=path,
                    expected=f"{int(count)} files {stem}-…-of-{count}{SUFFIX}",
                    found=f"{len(missing)} missing: numbers {listed(absent)}",
                    hint="Complete the download, or give the path of one file.",
                )
            )


def _index_name(names: Sequence[str], path: str) -> str | None:
    if MAIN_INDEX in names:
        return MAIN_INDEX
    found = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(found) > 1:
        raise InvalidIndexError(
            "the folder has several indices",
            file=path,
            expected=f"'{MAIN_INDEX}', or only one other",
            found=", ".join(found),
            hint=f"Rename the one that counts to '{MAIN_INDEX}'.",
        )
    return found[0] if found else None


def _read_index(storage: Storage, file: str) -> WeightIndex:
    data = read_file(storage, file, "the index", error=InvalidIndexError)
    return parse_index(data, file=file)


def read_manifest(storage: Storage, file: str) -> Manifest:
    """Reads a manifest.

    Raises:
        InvalidManifestError: It is malformed, or of a newer version.
        StorageError: The read failed.
    """
    data = read_file(storage, file, "the manifest", error=InvalidManifestError)
    return parse_manifest(data, file=file)


def _present(
    storage: Storage,
    path: str,
    files: Sequence[str],
    names: Sequence[str],
    index_file: str,
    on_error: OnError,
) -> Sequence[str]:
    """Return those of some files that exist; reports the others."""
    if not storage.lists:
        return files  # a missing one fails when it is opened
    present = set(names)
    folders = {name.rpartition("/")[0] for name in files} - {""}
    for folder in folders:
        present.update(f"{folder}/{name}" for name in storage.list(join(path, folder)))
    missing = [name for name in files if name not in present]
    if missing:
        on_error(
            InvalidIndexError(
                "the index lists files that are missing",
                file=index_file,
                expected=f"{len(files)} files",
                found=f"{len(missing)} missing: {', '.join(missing)}",
                hint="The download or copy of the checkpoint may be incomplete.",
            )
        )
    return [name for name in files if name in present]


def listed(items: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
