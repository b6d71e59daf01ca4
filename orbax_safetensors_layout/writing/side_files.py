"""The files of a model beside its tensors: configuration, tokenizer and the like; never code."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    StorageError,
)
from orbax_safetensors_layout.mapping import parse_config, plain_configurations
from orbax_safetensors_layout.options import MIB, PathLike, is_floating
from orbax_safetensors_layout.storage import Storage, join, open_storage, read_file

from .commit import appearance_rank

_CONFIG = "config.json"
_CARD = "README.md"
_EMBEDDING = "embed_tokens.weight"
_MOST_BYTES = 512 * MIB  # of a side file: the largest tokenizers have some 30 MB
_SIDECAR_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_OF_SCALES = ("scale", "absmax", "SCB", "qzeros")  # in the names of what quantised integers need
_OF_OTHER_FILES = (  # of an adapter, or of a training: with the first, a model opens as no model
    "adapter_config.json",
    "pytorch_model.bin.index.json",
    "trainer_state.json",
    "training_args.json",
)
_SIDECAR_NAMES = (  # that are asked for where a folder cannot be listed
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
)


class SavedTensor(NamedTuple):
    """The shape of a tensor in the files, and the dtype of its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def read_sidecar_files(
    path: PathLike, *, storage: Storage | None = None, required: bool = False
) -> dict[str, bytes]:
    """Returns the side files of a Hugging Face folder, or that one file, by name.

    They are those of the version that a `storage` has pinned, if it is given. Links in a local
    folder may lead to files below it, and from a snapshot of the hub's cache to its blobs.
    """
    folder = os.fsdecode(path)
    with contextlib.ExitStack() as stack:
        if storage is None:
            storage, folder = open_storage(path)
            stack.enter_context(storage)
        if storage.is_file(folder):
            files = {os.path.basename(folder): folder} if _is_sidecar(folder) else {}
        else:
            names = {*storage.list(folder)}
            if not storage.lists:
                names |= storage.existing(folder, _SIDECAR_NAMES)
            files = {name: join(folder, name) for name in sorted(filter(_is_sidecar, names))}
            if storage.kind == "local":
                _check_links(folder, files)
        data = {
            name: read_file(storage, file, "a file beside the tensors", most_bytes=_MOST_BYTES)
            for name, file in files.items()
        }
    if required and not data:
        raise CheckpointNotFoundError(
            "no config.json, tokenizer or similar file is there",
            file=path,
            expected="a folder with such files, or one of them",
        )
    return data


def _is_sidecar(path: str) -> bool:
    name = os.path.basename(path)
    is_known = name.endswith(_SIDECAR_SUFFIXES) and appearance_rank(name) is None
    return is_known and not name.startswith(".") and name not in _OF_OTHER_FILES


def _check_links(folder: str, names: Iterable[str]) -> None:
    """Refuses links by which files of other places would be copied, and perhaps published."""
    root = pathlib.Path(os.path.realpath(folder))
    caches = [above.parent / "blobs" for above in root.parents if above.name == "snapshots"]
    for name in names:
        place = pathlib.Path(os.path.realpath(root / name))
        if not any(map(place.is_relative_to, (root, *caches))):
            raise StorageError(
                f"{name!r} is a link that leads out of the folder",
                file=folder,
                expected="a file, or a link to one in the folder",
                found=place,
                hint="Copy the file in place of the link, or remove it.",
            )


def card_file(card: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> dict[str, bytes]:
    """Returns the model card of `WriteOptions.card`, by its name; `step` and `metrics` are text."""
    fields = {"library_name": "transformers", **(card() if callable(card) else card)}
    step, metrics = fields.pop("step", None), fields.pop("metrics", None) or {}
    try:  # values in JSON are YAML, too
        lines = [
            "---",
            *(f"{key}: {json.dumps(value, allow_nan=False)}" for key, value in fields.items()),
            "---",
            "",
        ]
        rows = [f"| {name} | {json.dumps(value)} |" for name, value in metrics.items()]
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            "WriteOptions.card holds a value that a model card cannot have",
            expected="text, numbers, lists and dicts; metrics by name",
            found=error,
        ) from error
    lines += [f"# {fields.get('model_name', 'Model')}", ""]
    origin = fields.get("base_model")
    if origin is not None:
        lines += [f"Trained from {json.dumps(origin)}.", ""]
    if step is not None:
        lines += [f"Step {step} of the training.", ""]
    if rows:
        lines += ["| metric | value |", "|---|---|", *rows, ""]
    return {_CARD: "\n".join(lines).encode()}


def configured_files(
    files: Mapping[str, bytes],
    target: PathLike,
    configured: Callable[[Mapping[str, bytes]], dict[str, bytes]],
) -> dict[str, bytes]:
    """Returns the side files of a save as `configured` returns them.

    Files that are in the target already and stay there are among them where it changes these.
    """
    present: dict[str, bytes] = {}
    with contextlib.suppress(CheckpointNotFoundError):  # a repository that is yet to be made
        present = read_sidecar_files(target)
    changed = configured({**present, **files})
    return {
        name: data for name, data in changed.items() if name in files or data != present.get(name)
    }


def described_files(
    files: Mapping[str, bytes], tensors: Mapping[str, SavedTensor]
) -> dict[str, bytes]:
    """Returns side files whose `config.json` says dtype and vocabulary of the tensors beside it.

    Only what it says already is changed: `dtype` (before transformers 5 `torch_dtype`) to that of
    most bytes of floating-point matrices of 16 bits or more, `vocab_size` to the rows of
    `embed_tokens.weight`. What files say of a quantisation goes if no tensor is quantised; else the
    dtype stays, which is that of what is not quantised.
    """
    if not _has_quantized(tensors):
        files = plain_configurations(files)
    if _CONFIG not in files:
        return dict(files)
    config = parse_config(files[_CONFIG], _CONFIG)
    nbytes: collections.Counter[str] = collections.Counter()
    for shape, dtype in tensors.values():
        if len(shape) > 1 and is_floating(dtype) and dtype.itemsize > 1:
            nbytes[dtype.name] += int(np.prod(shape)) * dtype.itemsize
    said: dict[str, object] = {}
    if nbytes and "quantization_config" not in config:
        said = dict.fromkeys(("dtype", "torch_dtype"), nbytes.most_common(1)[0][0])
    rows = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_EMBEDDING)]
    if len(rows) == 1:
        said["vocab_size"] = rows[0]
    is_changed = False
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, dict) else {}):
        for key in said:
            if section.get(key) not in (None, said[key]):
                section[key], is_changed = said[key], True
    if not is_changed:
        return dict(files)
    return {**files, _CONFIG: json.dumps(config, indent=2).encode() + b"\n"}


def _has_quantized(tensors: Mapping[str, SavedTensor]) -> bool:
    """Returns whether a tensor is a float of 8 bits or fewer, or integers with scales beside."""
    scaled = {
        name.rpartition(".")[0] for name in tensors if any(word in name for word in _OF_SCALES)
    }

    def is_quantized(name: str, tensor: SavedTensor) -> bool:
        if is_floating(tensor.dtype):
            return tensor.dtype.itemsize == 1 and len(tensor.shape) > 1
        holds_codes = tensor.dtype.itemsize == 1 or tensor.dtype.name == "int32"
        return holds_codes and not scaled.isdisjoint((name, name.rpartition(".")[0]))

    return any(is_quantized(*tensor) for tensor in tensors.items())
