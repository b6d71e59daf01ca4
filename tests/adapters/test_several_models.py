"""Folders of several models, as Diffusers and sentence-transformers publish them."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl

RNG = np.random.default_rng(3)


def tensors(*names):
    return {name: RNG.normal(size=(8, 4)).astype(np.float32) for name in names}


@pytest.fixture
def pipeline(tmp_path):
    """A Diffusers folder; the files of one component have names that only an index tells."""
    parts = {"unet": tensors("a.weight", "b.weight"), "vae": tensors("c.weight")}
    index = {"_class_name": "Pipeline", "scheduler": ["diffusers", "Euler"]}
    for name in parts:
        index[name] = ["diffusers", "Model"]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    safetensors.numpy.save_file(parts["vae"], tmp_path / "vae/diffusion_pytorch_model.safetensors")
    files = {"a.weight": "left.safetensors", "b.weight": "right.safetensors"}
    for tensor, file in files.items():
        safetensors.numpy.save_file({tensor: parts["unet"][tensor]}, tmp_path / "unet" / file)
    weights = json.dumps({"metadata": {}, "weight_map": files})
    (tmp_path / "unet/diffusion_pytorch_model.safetensors.index.json").write_text(weights)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/scheduler_config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return tmp_path, parts


def same(loaded, parts):
    assert loaded.keys() == parts.keys()
    for name, values in parts.items():
        assert loaded[name].keys() == values.keys()
        for tensor, value in values.items():
            np.testing.assert_array_equal(np.asarray(loaded[name][tensor]), value)


def sharded(values):
    sharding = NamedSharding(mesh_of(x=2), P("x"))
    return {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding) for n, v in values.items()}


def test_a_component_is_a_checkpoint_of_its_own(pipeline):
    path, parts = pipeline
    same({name: osl.load(path / name, sharded(parts[name])) for name in parts}, parts)
    with pytest.raises(osl.CheckpointNotFoundError, match=r"Give a checkpoint below it.*unet"):
        osl.load(path)


def test_components_are_checkpointables_of_v1(pipeline):
    path, parts = pipeline
    context = ocp_v1.Context()
    context.checkpoint_layout = osl.SafetensorsLayout
    with context:
        metadata = ocp_v1.checkpointables_metadata(path).metadata
        assert {name: set(tree) for name, tree in metadata.items()} == {
            name: set(values) for name, values in parts.items()
        }
        same(ocp_v1.load_checkpointables(path), parts)
        abstract = {name: sharded(values) for name, values in parts.items()}
        loaded = ocp_v1.load_checkpointables(path, abstract)
        same(loaded, parts)
        assert loaded["vae"]["c.weight"].sharding == abstract["vae"]["c.weight"].sharding


def test_components_are_items_of_v0(pipeline):
    path, parts = pipeline
    handlers = {name: osl.SafetensorsCheckpointHandler() for name in parts}
    args = {name: osl.SafetensorsRestore(sharded(values)) for name, values in parts.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
        same(dict(checkpointer.restore(path, args=ocp.args.Composite(**args)).items()), parts)


def test_modules_beside_a_model(tmp_path):
    """Sentence-transformers put a dense layer into a folder below the model."""
    parts = {".": tensors("encoder.weight"), "2_Dense": tensors("linear.weight")}
    for folder, values in parts.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        safetensors.numpy.save_file(values, tmp_path / folder / "model.safetensors")
    (tmp_path / "modules.json").write_text("[]")
    same({folder: osl.load(tmp_path / folder) for folder in parts}, parts)
