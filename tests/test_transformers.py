"""Tiny models of `transformers`: saved by it, restored sharded, saved by us, opened by it again.

Names, dtypes and shapes are those on disk, which since version 5 differ from the ones in memory
(Mixtral's experts are one tensor each on disk and fused in the model). `.ci/do.py test` installs
torch and `transformers` where it finds a build of torch without CUDA's libraries; with
OSL_TRANSFORMERS=1 it always does, and these tests then fail where they would be skipped.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import safetensors
from checkpoints import nested
from huggingface_hub import split_torch_state_dict_into_shards
from jax.sharding import NamedSharding, PartitionSpec
from libraries import need
from meshes import abstract_of, mesh_of
from orbax_calls import installed_context, load_v1, restore_standard, restore_v0, save_standard
from programs import run_processes

import orbax_safetensors_layout as osl

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "bfloat16", {}),
    "qwen3": ("Qwen3ForCausalLM", "float32", {"head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "bfloat16", {"head_dim": 8}),
    "gemma3_text": ("Gemma3ForCausalLM", "float32", {"head_dim": 8, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", "bfloat16", {"num_local_experts": 4}),
}
TIED = {"gemma", "gemma3_text"}
FILE_BYTES = 30_000  # several files for every family
SEVERAL_FILES = osl.WriteOptions(max_file_bytes=FILE_BYTES)


@pytest.fixture(scope="module")
def torch() -> Any:
    return need("torch")


@pytest.fixture(scope="module")
def transformers(torch) -> Iterator[Any]:
    """Imported here, not while tests are collected: it takes seconds and few tests need it."""
    hub = need("huggingface_hub.constants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "HF_HUB_OFFLINE", True)  # no test may ask the network for anything
        yield need("transformers")


@dataclasses.dataclass(frozen=True)
class Published:
    """A model as `save_pretrained` leaves it.

    Attributes:
        family: Its `model_type`.
        folder: Several files, their index and `config.json`.
        model: The model in memory.
        tensors: What is on disk, by name.
    """

    family: str
    folder: Path
    model: Any
    tensors: Mapping[str, Any]


@pytest.fixture(scope="module")
def publish(torch, transformers, tmp_path_factory):
    """Makes each family once."""
    models: dict[str, Published] = {}

    def make(family: str) -> Published:
        if family in models:
            return models[family]
        architecture, dtype, more = FAMILIES[family]
        config = transformers.AutoConfig.for_model(
            family, **SIZES, **more, tie_word_embeddings=family in TIED
        )
        torch.manual_seed(len(family))
        # `dtype` here, not `model.to`: rotary frequencies stay float32, as when a model is opened.
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        assert type(model).__name__ == architecture
        with torch.no_grad():
            for parameter in model.parameters():  # norms start as ones, all alike
                parameter.uniform_(-0.5, 0.5)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder, max_shard_size=FILE_BYTES)
        assert len([*folder.glob("model-*-of-*.safetensors")]) > 1
        models[family] = Published(family, folder, model, read(folder))
        return models[family]

    return make


@pytest.fixture(params=FAMILIES)
def published(publish, request) -> Published:
    return publish(request.param)


@pytest.fixture
def check(torch, transformers):
    """Checks that `transformers` opens a folder as the model with these tensors."""

    def run(folder: Path, expected: Published) -> None:
        copy_config(expected.folder, folder)
        assert_same_tensors(read(folder), expected.tensors)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(report.values()), report
        assert type(model) is type(expected.model)
        assert model.dtype == expected.model.dtype
        tokens = torch.arange(24).reshape(2, 12) * 3 + 3
        with torch.no_grad():
            logits, expected_logits = model(tokens).logits, expected.model(tokens).logits
        assert torch.isfinite(expected_logits).all()
        assert expected_logits.std() > 0.01
        assert torch.equal(logits, expected_logits)

    return run


def copy_config(source: Path, target: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists() and not (target / name).exists():
            shutil.copy(source / name, target / name)


def read(folder: Path) -> dict[str, Any]:
    """All tensors by `safetensors` alone; the index, where one is, must be right."""
    tensors, files = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                assert name not in tensors
                tensors[name], files[name] = file.get_tensor(name), path.name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        assert content["weight_map"] == files
        assert content["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    else:
        assert set(files.values()) == {"model.safetensors"}
    return tensors


def assert_same_tensors(tensors: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor), name


def bits(tensor: Any) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def sharding_of(shape: tuple[int, ...]) -> NamedSharding:
    """Matrices over both axes, vectors over all devices."""
    mesh = mesh_of(fsdp=4, tensor=2)
    spec = PartitionSpec("fsdp", "tensor") if len(shape) > 1 else PartitionSpec(("fsdp", "tensor"))
    return NamedSharding(mesh, spec)


def sharded_tree(folder: Path) -> Any:
    return abstract_of(osl.metadata(folder), lambda tensor: sharding_of(tensor.shape))


def load(folder: Path) -> dict[str, jax.Array]:
    return osl.load(folder, sharded_tree(folder))


def load_by_v0(folder: Path) -> dict[str, jax.Array]:
    return restore_v0(folder, ocp.args.StandardRestore(sharded_tree(folder)))


def load_by_v1(folder: Path) -> dict[str, jax.Array]:
    return load_v1(folder, sharded_tree(folder))


@pytest.mark.parametrize("restore", [load, load_by_v0, load_by_v1])
def test_restored_sharded_and_saved_again(tmp_path, published, restore, check):
    state = restore(published.folder)
    for array in state.values():
        assert array.sharding == sharding_of(array.shape)
        assert not array.sharding.is_fully_replicated
    copy_config(published.folder, tmp_path)
    osl.save(tmp_path, state, options=SEVERAL_FILES)
    assert (tmp_path / "config.json").exists()  # a save leaves other files alone
    assert len([*tmp_path.glob("model-*-of-*.safetensors")]) > 1
    check(tmp_path, published)


@pytest.mark.parametrize("options", [osl.WriteOptions(), SEVERAL_FILES], ids=["one", "several"])
def test_saved_in_pieces_and_consolidated(tmp_path, published, options, check):
    copy_config(published.folder, tmp_path)
    osl.save(tmp_path, load(published.folder), options=osl.WriteOptions(layout="sharded"))
    osl.consolidate(tmp_path, options=options)
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "model.safetensors").exists() is (options is not SEVERAL_FILES)
    check(tmp_path, published)


def test_files_are_filled_as_hugging_face_fills_them(tmp_path, published):
    osl.save(tmp_path, load(published.folder), options=SEVERAL_FILES)
    in_order = {name: published.tensors[name] for name in sorted(published.tensors)}
    expected = split_torch_state_dict_into_shards(in_order, max_shard_size=FILE_BYTES)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"]["total_size"] == expected.metadata["total_size"]


def as_models(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as models hold them: dicts, and a list of layers."""
    tree = nested(flat)
    layers = tree["model"]["layers"]
    tree["model"]["layers"] = [layers[str(number)] for number in range(len(layers))]
    return tree


def test_a_nested_tree(tmp_path, published, check):
    tree = osl.load(published.folder, as_models(sharded_tree(published.folder)))
    osl.save(tmp_path, tree, options=SEVERAL_FILES)
    check(tmp_path, published)


def test_saved_over_the_published_files(tmp_path, torch, publish, check):
    """The old files and their index go; one of them left behind would be opened instead."""
    original = publish("llama")
    folder = tmp_path / "llama"
    shutil.copytree(original.folder, folder)
    state = jax.tree.map(lambda array: -array, load(folder))
    with pytest.raises(osl.CheckpointExistsError):
        osl.save(folder, state)
    osl.save(folder, state, overwrite=True)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    model = copy.deepcopy(original.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    tensors = {name: -value for name, value in original.tensors.items()}
    check(folder, dataclasses.replace(original, model=model, tensors=tensors))


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_saved_as_bfloat16(tmp_path, torch, transformers, publish, family, layout, check):
    original = publish(family)
    assert original.model.dtype == torch.float32
    options = dataclasses.replace(SEVERAL_FILES, layout=layout, dtype="bfloat16")
    osl.save(tmp_path, load(original.folder), options=options)
    if layout == "sharded":
        osl.consolidate(tmp_path)
    copy_config(original.folder, tmp_path)
    # `from_pretrained` takes the dtype of the config where it has one, whatever the files hold.
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.float32
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(original.folder, dtype=torch.bfloat16)
    tensors = {name: value.to(torch.bfloat16) for name, value in original.tensors.items()}
    check(tmp_path, dataclasses.replace(original, model=model, tensors=tensors))


def save_v0(root: Path, state: object) -> Path:
    handler = osl.SafetensorsCheckpointHandler(write=SEVERAL_FILES)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(root / "saved", args=osl.SafetensorsSave(state))
    return root / "saved"


def save_step_v0(root: Path, state: object) -> Path:
    registry = osl.handler_registry("params", write=SEVERAL_FILES)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        manager.save(5, args=ocp.args.Composite(params=ocp.args.StandardSave(state)))
    return root / "5" / "params"


def save_v1(root: Path, state: object) -> Path:
    with installed_context(), osl.using(write=SEVERAL_FILES):
        ocp_v1.save(root / "saved", state)
    return root / "saved" / "state"


def save_step_v1(root: Path, state: object) -> Path:
    with (
        osl.using(write=SEVERAL_FILES),
        ocp_v1.training.Checkpointer(root, context=osl.context("params")) as training,
    ):
        training.save_checkpointables(5, {"params": state})
    return root / "5" / "params"


@pytest.mark.parametrize("save", [save_v0, save_step_v0, save_v1, save_step_v1])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_items_that_orbax_saved(tmp_path, publish, family, save, check):
    """With the model's config beside its files, an item's folder is one of Hugging Face."""
    original = publish(family)
    folder = save(tmp_path, load(original.folder))
    assert len([*folder.glob("model-*-of-*.safetensors")]) > 1
    check(folder, original)


def test_saved_by_two_processes(tmp_path, publish, check):
    original = publish("mixtral")
    arguments = {"folder": str(original.folder), "target": str(tmp_path / "saved")}
    results = run_processes(
        "transformers_save.py", processes=2, devices=2, max_file_bytes=FILE_BYTES, **arguments
    )
    assert not any(map(any, results))
    check(tmp_path / "saved", original)


@pytest.mark.parametrize("save", [save_standard, ocp_v1.save])
@pytest.mark.parametrize("names", ["flat", "nested", "maxtext"])
def test_converted_from_what_orbax_saved(tmp_path, publish, save, names, check):
    published = publish("llama")
    mapping = None
    state: Any = load(published.folder)
    if names == "nested":
        state = as_models(state)
    elif names == "maxtext":
        mapping = osl.families.mapping(published.folder, target="maxtext")
        state = osl.load(published.folder, mapping.abstract(published.folder), mapping=mapping)
    save(tmp_path / "orbax", state)
    osl.convert(
        tmp_path / "orbax",
        tmp_path / "hf",
        mapping=mapping,
        config=published.folder,
        # MaxText's norms are in float32.
        options=osl.ConvertOptions(max_file_bytes=FILE_BYTES, dtype="bfloat16"),
    )
    assert (tmp_path / "hf" / "config.json").exists()
    assert len([*(tmp_path / "hf").glob("model-*-of-*.safetensors")]) > 1
    check(tmp_path / "hf", published)


def test_converted_for_maxtext_and_restored_by_orbax(tmp_path, publish):
    folder = publish("llama").folder
    mapping = osl.families.mapping(folder, target="maxtext")
    osl.convert(folder, tmp_path / "model", mapping=mapping, mesh={"fsdp": 4})
    expected = osl.load(folder, mapping.abstract(folder), mapping=mapping)
    restored = restore_standard(tmp_path / "model", expected)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
