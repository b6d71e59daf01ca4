"""Adapters of PEFT: loaded and saved as trees, and merged into the base model as it is loaded.

An adapter is a folder, or an `hf://` path, with `adapter_config.json` and
`adapter_model.safetensors`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping as Dict
from typing import Any

from orbax_safetensors_layout.catalog import Catalog, suggest_names
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    MappingError,
    listed,
)
from orbax_safetensors_layout.format import short_repr
from orbax_safetensors_layout.load import LoadRequest, load_requested, telling_others
from orbax_safetensors_layout.mapping import (
    Mapping,
    has_tied_head,
    overlaid,
    read_config,
    rule,
    tensor,
)
from orbax_safetensors_layout.options import PathLike, ReadOptions, WriteOptions, given_or_default
from orbax_safetensors_layout.pytree import leaf_shapes
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.save import PreparedSave, save_group
from orbax_safetensors_layout.storage import join, open_storage

from .adapter_files import CONFIG_FILE, STEM, WEIGHTS_FILE, opened
from .peft_folder import PREFIX, PeftFolder, TiedHeads, is_head, mixtral_names


def config(path: PathLike, *, options: ReadOptions | None = None) -> dict[str, Any]:
    """Return an adapter's `adapter_config.json`; `options` say how to read.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It is malformed.
    """
    with opened(path, given_or_default(options, ReadOptions)) as (storage, folder):
        return read_config(join(folder, CONFIG_FILE), storage=storage)


def load(path: PathLike, abstract: Any = None, *, options: ReadOptions | None = None) -> Any:
    """Loads the tensors of an adapter, sharded as `abstract` asks.

    Args:
        path: The adapter's folder.
        abstract: The tree to load, as for `osl.load`. Leaves are called as the adapter's tensors,
            without `base_model.model.`: `model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in]
            and `.lora_B.weight` [out, rank]. None gives a flat dict of numpy arrays.
        options: How to read.

    Raises:
        CheckpointNotFoundError: There is no adapter at `path`.
        SafetensorsLayoutError: As from `osl.load`.
    """
    options = given_or_default(options, ReadOptions)

    def open_weights() -> Catalog:
        storage, folder = open_storage(path, retries=options.retries, cache=options.cache_folder)
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(storage)
            catalog = Catalog.open(join(folder, WEIGHTS_FILE), storage=storage)
            on_error.pop_all()
        return catalog

    with (
        telling_others(path, LoadRequest(abstract, None, None, options)),
        opened(path, options) as (storage, folder),
    ):
        names = Catalog.open(join(folder, WEIGHTS_FILE), storage=storage).names
    rules = [rule(name.removeprefix(PREFIX), tensor(name)) for name in names]
    mapping = Mapping(rules, strict=False)
    return load_requested(path, LoadRequest(abstract, mapping, None, options), open_weights)


def save(
    path: PathLike,
    lora: Any,
    *,
    config: Dict[str, Any],
    options: WriteOptions | None = None,
    overwrite: bool = False,
) -> None:
    """Saves an adapter, which `peft.PeftModel.from_pretrained` then opens.

    Args:
        path: A folder, which may be that of the model: its files stay.
        lora: A tree of arrays, with names as `load` gives them.
        config: What `adapter_config.json` says: at least `r`, `lora_alpha`, `target_modules`. A
            `peft_type` of LORA is added. `LoraConfig(...).to_dict()` is one.
        options: How to write.
        overwrite: Replace an adapter that is there.

    Raises:
        SafetensorsLayoutError: As from `osl.save`.
    """
    text = _config_text({"peft_type": "LORA", **config})
    # One file, of the name that PEFT opens.
    options = given_or_default(options, WriteOptions)
    options = dataclasses.replace(options, file_stem=STEM, max_file_bytes=1 << 62)
    names = leaf_shapes(lora)
    mapping = Mapping([rule(name, tensor(PREFIX + name.removeprefix(PREFIX))) for name in names])
    with frozen_heap(), save_group(path, options) as group:
        prepared = PreparedSave.of(lora, options, mapping=mapping)
        files = {CONFIG_FILE: text.encode()}
        prepared.commit(path, group=group, overwrite=overwrite, sidecar_files=files)


def _config_text(config: Dict[str, Any]) -> str:
    """The text of an adapter's configuration; sets are sorted lists there, as PEFT writes them."""

    def listed_set(value: object) -> list[Any]:
        if isinstance(value, set | frozenset):
            return sorted(value)
        raise TypeError

    for name, value in config.items():
        try:
            json.dumps(value, default=listed_set)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"config[{name!r}] has no form in adapter_config.json: {short_repr(value)}"
            ) from error
    return json.dumps(config, default=listed_set, indent=2, sort_keys=True)


def merge(
    mapping: Mapping | None,
    adapter: PathLike,
    *,
    base: PathLike | None = None,
    rename: Callable[[str], str] | None = None,
    transposed: Iterable[str] | None = None,
    options: ReadOptions | None = None,
) -> Mapping:
    """Return a mapping whose weights have an adapter added: `W + (alpha / r) B A`.

    Each shard computes its own part when it is loaded, from its part of the base and the small
    matrices, which are read whole where they are needed and are not in plans. Weights that the
    mapping decodes are decoded first. Products are summed in float64 and rounded to float32, added
    in float32, and rounded once to the weight's dtype: the values do not depend on shardings. A
    shard of a weight with DoRA reads all inputs of its outputs, for their norms. A merged mapping
    loads and converts; it does not save.

    Args:
        mapping: That of the base's model. None for leaves that are the base's tensors.
        adapter: The adapter's folder, or its `hf://` path.
        base: The base's folder, which None in place of a mapping needs. A head that is stored and
            that its configuration ties to the embedding takes the change of that, as in PEFT.
        rename: Gives the base's name of a tensor for the adapter's, where they differ. None knows
            of Mixtral's `block_sparse_moe`, which PEFT calls `mlp` by now.
        transposed: Patterns of modules whose square weights are [in, out], `()` if none are; shapes
            tell of others. None refuses square experts.
        options: How to read the adapter: its retries, and its cache.

    Raises:
        CheckpointNotFoundError: There is no adapter, or no base.
        FormatError: The adapter is malformed.
        MappingError: The adapter has tensors that no rule's tensors belong to, is of another method
            than LoRA, or does not fit (when the mapping is used).
    """
    options = given_or_default(options, ReadOptions)
    patterns = None if transposed is None else tuple(transposed)
    heads: TiedHeads = ()
    if base is not None:
        with Catalog.open(base, retries=options.retries, cache=options.cache_folder) as catalog:
            names, heads = [*catalog.names], _tied_heads(catalog)
    elif mapping is None:
        raise MappingError(
            "merge needs the base's folder, or a mapping of its tensors",
            expected="merge(None, adapter, base=FOLDER), or merge(mapping, adapter)",
        )
    if mapping is not None:
        names = [name for each in mapping.rules for name in each.patterns()]
    folder = PeftFolder(adapter, rename or mixtral_names(names), patterns, options, heads)
    if mapping is None:
        leaves = dict.fromkeys([*names, *filter(folder.replaces, folder.names)])
        mapping = Mapping([rule(name, tensor(name)) for name in leaves])
    merged = copy.copy(mapping)
    merged.rules, taken = overlaid(mapping.rules, folder)
    merged.merged = *mapping.merged, folder.digest
    lost = [name for name in folder.names if name not in taken]
    if lost:
        close = suggest_names(lost[0], names, 3)
        raise MappingError(
            f"the adapter changes {len(lost)} tensors that no rule takes",
            found=listed(map(repr, lost), 3),
            expected=f"names such as {listed(map(repr, close), 3)}" if close else None,
            hint="Give rename=, if the base's names differ from the adapter's; a mapping that"
            " decodes, if the base is quantised; untie=True of a family's, for a tied head.",
        )
    return merged


def _tied_heads(catalog: Catalog) -> TiedHeads:
    """Return the output heads of a base whose configuration ties them, with their shapes."""
    heads = {name: entry for name, entry in catalog.all_entries().items() if is_head(name)}
    if heads:
        with contextlib.suppress(CheckpointNotFoundError):
            if has_tied_head(read_config(catalog.path, storage=catalog.storage)):
                return tuple((name, entry.shape) for name, entry in heads.items())
    return ()
