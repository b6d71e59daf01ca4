"""The files of a model beside its tensors: configuration, tokenizer and the like."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from orbax_safetensors_layout.catalog import Catalog, discover
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    SafetensorsLayoutError,
    StorageError,
    listed,
)
from orbax_safetensors_layout.format import SUFFIX
from orbax_safetensors_layout.mapping import (
    has_tied_head,
    parse_config,
    plain_configurations,
)
from orbax_safetensors_layout.options import MIB, PathLike, WriteOptions, is_floating
from orbax_safetensors_layout.plan import PIECES_FOLDER
from orbax_safetensors_layout.storage import Storage, check_link, join, open_storage, read_file

from .commit import appearance_rank

_CONFIG = "config.json"
_CARD = "README.md"
# The output kernel and the table of tokens of the text model, not of a vision or draft model; the
# first is as long as the vocabulary, the second may have rows besides.
_OUTER = "language_model|text_model|model|decoder|thinker|transformer|gpt_neox|backbone"
_VOCABULARIES = [
    re.compile(rf"(({_OUTER})\.)*({names})\.weight")
    for names in ("lm_head|embed_out", "embed_tokens|wte|embed_in|word_embeddings|embeddings")
]
_TIES = "tie_word_embeddings"
# All tables of tokens, of which a model may have several of different sizes.
_TABLE = re.compile(
    r"(.*\.)?(lm_head|embed_tokens|embed_in|embed_out|wte|shared|word_embeddings|tok_embeddings)"
    r"\.weight"
)
_MOST_BYTES = 512 * MIB  # of a side file: the largest tokenizers have some 30 MB
# Integers that models have beside their weights.
_BUFFER = re.compile(r"(^|[._])(ids|index|mask|bias|tracked)$")
# Patterns of names. Tokenizers' are those of transformers 5.24's VOCAB_FILES_NAMES and of its hub.
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "*.jinja")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *_TEMPLATES,
    "tokenizer.model",
    "spiece.model",
    "*.model",
    "*.model.v[0-9]*",
    "*.tiktoken",
    "*.tokenizer",
    "*.spm",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "*[_-]vocab.json",
    "vocab-*.json",
    "merges.txt",
    "dict.txt",
    "bpe.codes",
    "encoder.json",
    "byte_maps.json",
    "emoji.json",
    "normalizer.json",
    "tekken.json",
    "word_*.json",
)
_MODEL = (
    _CONFIG,
    "generation_config.json",
    *_TOKENIZER,
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "modules.json",  # with the next ones of sentence-transformers
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "decision.json",  # with the next ones of decision heads in transformers 5.24
    "decision_config.json",
    "judge_config.json",
    "calibration.json",
    "LICENSE*",
    "NOTICE*",
)
_IN_FOLDERS = {
    "additional_chat_templates": _TEMPLATES,
    "*_tokenizer": _TOKENIZER,  # all but the first of a processor with several
    "[0-9]_*": (_CONFIG, f"model{SUFFIX}"),  # modules of sentence-transformers
}
_CODE = "*.py"
_CODE_IN_FOLDERS = {"custom_generate": (_CODE, "requirements.txt")}
_WITH_CODE = {_CONFIG, "tokenizer_config.json", "processor_config.json"}  # that may name it


class SavedTensor(NamedTuple):
    """The shape of a tensor in the files, the dtype of its values, and what these are."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: object = None  # equal ones are of equal values; None where the configuration knows

    @classmethod
    def of(cls, array: Any, asked: np.dtype[Any] | None, values: object) -> SavedTensor:
        """Return what an array becomes where floating-point ones are written in a dtype."""
        dtype = array.dtype if asked is None or not is_floating(array.dtype) else asked
        return cls(array.shape, dtype, values)


class ModelFiles(dict[str, bytes]):
    """Side files of a model by name, and the names of its tensors, where they are known."""

    tensors: frozenset[str] = frozenset()


def read_sidecar_files(
    path: PathLike,
    *,
    storage: Storage | None = None,
    code: bool = False,
    with_card: bool = False,
    required: str | None = None,
) -> dict[str, bytes]:
    """Returns the side files of a Hugging Face folder, or that one file, by name.

    They are those of the version that a `storage` has pinned, if it is given. Names of files in
    folders are paths; with `code` the modules that a configuration may name are among them. The
    model card is that of another model, unless the tensors are the same (`with_card`). Links
    in a local folder may lead to files below it, and from a snapshot of the hub's cache to its
    blobs. Where there have to be some, `required` is the name of the argument.
    """
    folder = os.fsdecode(path)
    with contextlib.ExitStack() as stack:
        if storage is None:
            storage, folder = open_storage(path)
            stack.enter_context(storage)
        if storage.is_file(folder):
            name = os.path.basename(folder)
            files = {name: folder} if _is_among(name, _MODEL) else {}
        else:
            names = sorted(_names(storage, folder, code=code, with_card=with_card))
            files = {name: join(folder, name) for name in names}
            if storage.kind == "local":
                _check_links(folder, files)
        data = {
            name: read_file(storage, file, "a file beside the tensors", most_bytes=_MOST_BYTES)
            for name, file in files.items()
        }
    if required and not data:
        is_missing = storage.kind == "local" and not os.path.exists(folder)
        raise CheckpointNotFoundError(
            f"{required} names {'a path that does not exist' if is_missing else 'no such files'}",
            file=folder,
            expected="a folder with config.json, a tokenizer or similar files, or one of them",
        )
    return data


def model_files(
    model: PathLike | Mapping[str, bytes], *, code: bool, required: str = "WriteOptions(model=...)"
) -> ModelFiles:
    """Returns the side files of `WriteOptions.model`, or of the argument `required`."""
    if not isinstance(model, Mapping):
        storage, folder = open_storage(model)
        with storage:
            data = read_sidecar_files(folder, storage=storage, code=code, required=required)
            files = ModelFiles(data)
            with contextlib.suppress(SafetensorsLayoutError):  # it may have a configuration alone
                discovery = discover(storage, folder, on_error=lambda _: None)
                files.tensors = frozenset(Catalog(discovery, storage).listed())
        return files
    folders = {name.rpartition("/")[0] for name in model}
    for name in model:
        if appearance_rank(name) is not None or name.startswith(PIECES_FOLDER) or name in folders:
            raise InvalidArgumentError(
                f"WriteOptions.model has a name that a save, or another of its files, has: {name}."
            )
    return model if isinstance(model, ModelFiles) else ModelFiles(model)


def with_model_files(options: WriteOptions | None) -> WriteOptions | None:
    """Returns options that hold the files of their model: it need not be there any more."""
    if options is None or options.model is None:
        return options
    return dataclasses.replace(options, model=model_files(options.model, code=options.code))


def _names(storage: Storage, folder: str, *, code: bool, with_card: bool) -> Iterator[str]:
    """Yield the names of side files in a folder, and those in folders there as paths."""
    patterns = (*_MODEL, *[_CODE] * code, *[_CARD] * with_card)
    in_folders = {**_IN_FOLDERS, **(_CODE_IN_FOLDERS if code else {})}
    if not storage.lists:
        yield from storage.existing(folder, {p for p in patterns if "*" not in p})
        return
    yield from (name for name in storage.list(folder) if _is_among(name, patterns))
    for inner in storage.folders(folder):
        for pattern, within in in_folders.items():
            if _is_among(inner, (pattern,)):
                names = storage.list(join(folder, inner))
                yield from (f"{inner}/{name}" for name in names if _is_among(name, within))


def _is_among(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and name[0] != "."


def _check_links(folder: str, names: Iterable[str]) -> None:
    """Refuses links by which files of other places would be copied, and perhaps published."""
    root = pathlib.Path(os.path.realpath(folder))
    caches = [above.parent / "blobs" for above in root.parents if above.name == "snapshots"]
    for name in names:
        check_link(join(folder, name))
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
            *(f"{key}: {_as_json(value, allow_nan=False)}" for key, value in fields.items()),
            "---",
            "",
        ]
        rows = [f"| {name} | {_as_json(value)} |" for name, value in metrics.items()]
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


def _as_json(value: Any, *, allow_nan: bool = True) -> str:
    """Returns a value in JSON; scalars of numpy and JAX are numbers."""

    def number(array: Any) -> Any:
        if getattr(array, "shape", None) != ():
            raise TypeError(f"a value is of type {type(array).__name__}")
        return array.item()

    return json.dumps(value, allow_nan=allow_nan, default=number)


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
    """Returns side files whose `config.json` says of the tensors beside it what they are.

    Only what it says already is changed: `dtype` (before transformers 5 `torch_dtype`) to that of
    most bytes of floating-point matrices of 16 bits or more, `vocab_size` to the rows of
    `lm_head.weight`, or else of `embed_tokens.weight`, if no table has its rows. What files say of
    a quantisation goes if no tensor is quantised; else the dtype stays, which is that of what is
    not quantised. Nothing is tied any more where an output kernel is written that may differ from
    the embedding, but behind encoders, where that says how the output is scaled, too.

    Raises:
        InvalidArgumentError: None of the tensors is one of the files' model.
    """
    known = files.tensors if isinstance(files, ModelFiles) else frozenset()
    if known and known.isdisjoint(tensors):
        raise InvalidArgumentError(
            "no tensor has a name of the model whose configuration comes along: programs would"
            " start all of its weights anew",
            expected=f"names such as {listed(map(repr, sorted(known)), 3)}",
            found=listed(map(repr, tensors), 3),
            hint="Pass the mapping that these tensors were loaded with, or leave the model out.",
        )
    _warn_of_missing(known - tensors.keys(), files)
    if names := _named_code(files) - files.keys():
        text = "The model has code of its own (%s), which does not come along without code=True."
        logging.warning(text, listed(sorted(names)))
    if not _has_quantized(tensors):
        files = plain_configurations(files)
    if _CONFIG not in files:
        return dict(files)
    config = parse_config(files[_CONFIG], _CONFIG)
    nbytes: collections.Counter[str] = collections.Counter()
    for shape, dtype, _ in tensors.values():
        if len(shape) > 1 and is_floating(dtype) and dtype.itemsize > 1:
            nbytes[dtype.name] += int(np.prod(shape)) * dtype.itemsize
    said: dict[str, object] = {}
    if nbytes and "quantization_config" not in config:
        said = dict.fromkeys(("dtype", "torch_dtype"), nbytes.most_common(1)[0][0])
    heads, embeddings = (
        [tensor for name, tensor in tensors.items() if pattern.fullmatch(name)]
        for pattern in _VOCABULARIES
    )
    for tables in (heads, embeddings):
        if len(tables) == 1:
            said["vocab_size"] = tables[0].shape[0]
            break
    pairs = itertools.product(heads, embeddings)
    has_own = any(head.values != embedding.values for head, embedding in pairs)
    is_tied = any(section.get(_TIES) for section in _sections(config))
    is_tied |= has_own and has_tied_head(config, unknown=True)
    if has_own and is_tied and not config.get("is_encoder_decoder"):
        said[_TIES] = False
    rows = {tensor.shape[0] for name, tensor in tensors.items() if _TABLE.fullmatch(name)}
    is_changed = False
    for section in _sections(config):
        for key in said:
            if key == "vocab_size" and section.get(key) in rows:
                continue
            old = section.get(key)
            if old != said[key] and (old is not None or key == _TIES):
                section[key], is_changed = said[key], True
    if not is_changed:
        return dict(files)
    return {**files, _CONFIG: json.dumps(config, indent=2).encode() + b"\n"}


def _warn_of_missing(names: Set[str], files: Mapping[str, bytes]) -> None:
    """Warns of tensors of the model that are not written: programs start these weights anew.

    Not of parts of quantised weights, of buffers, and of heads that are tied.
    """
    config = parse_config(files[_CONFIG], _CONFIG) if _CONFIG in files else {}
    if any("quantization" in key for section in _sections(config) for key in section):
        return
    is_tied = any(section.get(_TIES) for section in _sections(config))
    missing = [
        name
        for name in sorted(names)
        if name.endswith((".weight", ".bias"))
        and not (_VOCABULARIES[0].fullmatch(name) and (is_tied or has_tied_head(config)))
    ]
    if missing:
        logging.warning(
            "The model has %d tensors that are not written, which programs start anew: %s.",
            len(missing),
            listed(map(repr, missing), 3),
        )


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a configuration, and those of its text models."""
    yield config
    for name in ("text_config", "thinker_config"):
        if isinstance(inner := config.get(name), dict):
            yield from _sections(inner)


def _named_code(files: Mapping[str, bytes]) -> set[str]:
    """Returns the modules in the same folder that `auto_map` entries of configurations name."""
    names: set[str] = set()
    for name in files.keys() & _WITH_CODE:
        classes = None
        with contextlib.suppress(SafetensorsLayoutError):  # else it comes along as it is
            classes = parse_config(files[name], name).get("auto_map")
        for value in classes.values() if isinstance(classes, dict) else ():
            texts = value if isinstance(value, list) else [value]
            names |= {
                f"{t.partition('.')[0]}.py" for t in texts if isinstance(t, str) and "--" not in t
            }
    return names


def _has_quantized(tensors: Mapping[str, SavedTensor]) -> bool:
    """Returns whether a tensor is a float of 8 bits or fewer, or integers that may be codes.

    They are, but for those of 64 bits, unless their module has a weight of more bits.
    """

    def is_quantized(name: str, tensor: SavedTensor) -> bool:
        shape, dtype, _ = tensor
        if is_floating(dtype):
            return dtype.itemsize == 1 and len(shape) > 1
        if not shape or dtype.itemsize == 8 or "int" not in dtype.name or _BUFFER.search(name):
            return False
        weight = tensors.get(f"{name.rpartition('.')[0]}.weight")
        return weight is None or not is_floating(weight.dtype) or weight.dtype.itemsize == 1

    return any(is_quantized(*tensor) for tensor in tensors.items())
