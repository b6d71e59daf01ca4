"""Orbax v0: `Checkpointer` and `CheckpointManager` over folders that `safetensors` wrote."""

from __future__ import annotations

import json
import os

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from checkpoints import assert_same_bits, nested, save
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from llama_folder import (
    NORM,
    NORM_LEAF,
    TENSORS,
    check_host,
    check_sharded,
    sharded_abstract,
    sharding_of,
)
from orbax_calls import layout_context

import orbax_safetensors_layout as osl

NESTED_NORM = nested({NORM: NORM_LEAF})


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "hf", TENSORS, files=3)


@pytest.fixture(params=[osl.SafetensorsCheckpointHandler, osl.SafetensorsLayout])
def checkpointer(request):
    return ocp.Checkpointer(request.param())


@pytest.mark.parametrize(
    "restore", [osl.SafetensorsRestore, ocp.args.StandardRestore, ocp.args.PyTreeRestore]
)
def test_hugging_face_folder_is_restored_sharded(folder, checkpointer, restore):
    check_sharded(checkpointer.restore(folder, args=restore(sharded_abstract())))


def test_nested_item_comes_back_nested(folder, checkpointer):
    abstract = nested(sharded_abstract())
    restored = checkpointer.restore(folder, args=osl.SafetensorsRestore(abstract))
    assert jax.tree.structure(restored) == jax.tree.structure(abstract)
    array = restored["model"]["layers"]["1"]["mlp"]["up_proj"]["weight"]
    assert_same_bits(array, TENSORS["model.layers.1.mlp.up_proj.weight"])


def test_concrete_arrays_are_templates(folder, checkpointer):
    item = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        sharded_abstract(),
    )
    check_sharded(checkpointer.restore(folder, args=ocp.args.StandardRestore(item)))


@pytest.mark.parametrize(
    "args",
    [(), (osl.SafetensorsRestore(),), (ocp.args.StandardRestore(),), (ocp.args.PyTreeRestore(),)],
    ids=["none", "own", "standard", "pytree"],
)
def test_without_a_tree_everything_comes_back_as_numpy(folder, checkpointer, args):
    check_host(checkpointer.restore(folder, *args))


def test_restore_args_of_construct_restore_args(folder, checkpointer):
    abstract = sharded_abstract()
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    for args in (
        ocp.args.PyTreeRestore(abstract, restore_args=restore_args),
        ocp.args.PyTreeRestore(restore_args=restore_args),
        osl.SafetensorsRestore(abstract, restore_args),
        osl.SafetensorsRestore(restore_args=restore_args),
    ):
        check_sharded(checkpointer.restore(folder, args=args))


def test_restore_args_override_the_item(folder, checkpointer):
    sharding = SingleDeviceSharding(jax.devices()[3])
    leaf = jax.ShapeDtypeStruct((64,), ml_dtypes.bfloat16, sharding=sharding_of(NORM))

    def restored(args, item=leaf):
        request = osl.SafetensorsRestore({NORM: item}, {NORM: args}, partial_restore=True)
        return checkpointer.restore(folder, args=request)[NORM]

    assert restored(ocp.RestoreArgs()).sharding == sharding_of(NORM)
    cast = restored(ocp.RestoreArgs(dtype=np.float32))
    assert (cast.dtype, cast.sharding) == (np.float32, sharding_of(NORM))
    assert_same_bits(cast, TENSORS[NORM].astype(np.float32))
    moved = restored(ocp.ArrayRestoreArgs(sharding=sharding))
    assert (moved.dtype, moved.sharding) == (leaf.dtype, sharding)
    mesh = sharding_of(NORM).mesh
    meshed = restored(ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=PartitionSpec("tensor")))
    assert meshed.sharding == NamedSharding(mesh, PartitionSpec("tensor"))
    assert isinstance(restored(ocp.RestoreArgs(restore_type=np.ndarray)), np.ndarray)
    dummy = restored(ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.float32), item=0)
    assert (dummy.shape, dummy.dtype, dummy.sharding) == ((64,), np.float32, sharding)
    assert restored(ocp.ArrayRestoreArgs(sharding=sharding), item=...) is ...


def test_global_shape_of_restore_args_must_be_the_files(folder, checkpointer):
    args = {NORM: ocp.ArrayRestoreArgs(sharding=sharding_of(NORM), global_shape=(128,))}
    request = osl.SafetensorsRestore(restore_args=args, partial_restore=True)
    with pytest.raises(osl.ShapeMismatchError, match=r"Shape mismatch.*\(128,\).*\(64,\)"):
        checkpointer.restore(folder, args=request)


def test_restore_args_for_leaves_that_the_item_lacks(folder, checkpointer):
    args = {NORM: ocp.RestoreArgs(), "model.nrom.weight": ocp.RestoreArgs()}
    item = {NORM: NORM_LEAF}
    with pytest.raises(osl.MismatchError, match=r"model\.nrom\.weight"):
        checkpointer.restore(folder, args=osl.SafetensorsRestore(item, args))
    request = osl.SafetensorsRestore(item, args, partial_restore=True)
    assert checkpointer.restore(folder, args=request).keys() == {NORM}


def test_fallback_sharding_places_what_names_none(folder, checkpointer):
    sharding = SingleDeviceSharding(jax.devices()[3])
    abstract = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()
    }
    restored = checkpointer.restore(folder, args=ocp.args.StandardRestore(abstract))
    assert all(array.is_fully_replicated for array in restored.values())
    args = ocp.args.StandardRestore(abstract, fallback_sharding=sharding)
    restored = checkpointer.restore(folder, args=args)
    assert all(array.sharding == sharding for array in restored.values())


def test_tensors_that_the_tree_does_not_name_are_an_error(folder, checkpointer):
    with pytest.raises(osl.UnexpectedTensorError) as caught:
        checkpointer.restore(folder, args=osl.SafetensorsRestore(NESTED_NORM))
    text = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert "partial_restore=True" in text
    assert "`...`" in text
    request = osl.SafetensorsRestore(NESTED_NORM, partial_restore=True)
    restored = checkpointer.restore(folder, args=request)
    assert_same_bits(restored["model"]["norm"]["weight"], TENSORS[NORM])


def test_empty_transforms_are_a_partial_restore(folder, checkpointer):
    """As in Orbax, whose users restore a part with them, by keyword too."""
    restore_args = {"model": {"norm": {"weight": ocp.ArrayRestoreArgs()}}}
    for restored in (
        checkpointer.restore(folder, args=osl.SafetensorsRestore(NESTED_NORM, transforms={})),
        checkpointer.restore(folder, args=ocp.args.PyTreeRestore(NESTED_NORM, transforms={})),
        checkpointer.restore(folder, item=NESTED_NORM, restore_args=restore_args, transforms={}),
    ):
        assert_same_bits(restored["model"]["norm"]["weight"], TENSORS[NORM])


def test_hint_stands_in_the_error_of_a_single_tensor_too(folder, checkpointer):
    abstract = sharded_abstract()
    del abstract[NORM]
    with pytest.raises(osl.UnexpectedTensorError, match="partial_restore=True"):
        checkpointer.restore(folder, args=ocp.args.StandardRestore(abstract))


def test_placeholders_name_their_tensors(folder, checkpointer):
    item = dict.fromkeys(TENSORS, ...) | {NORM: sharded_abstract()[NORM]}
    restored = checkpointer.restore(folder, args=osl.SafetensorsRestore(item))
    assert_same_bits(restored.pop(NORM), TENSORS[NORM])
    assert set(restored.values()) == {...}


def test_missing_tensors_are_named(folder, checkpointer):
    item = {"model.nrom.weight": sharded_abstract()[NORM]}
    with pytest.raises(osl.MissingTensorError, match=r"Tensor 'model\.nrom\.weight' not found"):
        checkpointer.restore(folder, args=osl.SafetensorsRestore(item))


def test_metadata_describes_and_restores(folder, checkpointer):
    metadata = checkpointer.metadata(folder).item_metadata
    assert metadata.custom_metadata == {"format": "pt"}
    for name, tensor in TENSORS.items():
        leaf = metadata[name]
        assert isinstance(leaf, ocp.metadata.ArrayMetadata)
        assert (leaf.name, leaf.shape, leaf.dtype) == (name, tensor.shape, tensor.dtype)
        assert leaf.sharding is None
        assert leaf.storage.chunk_shape == tensor.shape
    for tree in (metadata, metadata.tree):
        for restore in (osl.SafetensorsRestore, ocp.args.StandardRestore):
            restored = checkpointer.restore(folder, args=restore(tree))
            for name, tensor in TENSORS.items():
                assert_same_bits(restored[name], tensor)


@pytest.mark.parametrize(
    "given",
    [
        {"transforms": {"norm": ocp.Transform(original_key=NORM)}},
        {"transforms": {}, "transforms_default_to_original": False},
        {"legacy_transform_fn": lambda *_: None},
    ],
)
def test_transformations_are_refused_for_a_mapping(folder, checkpointer, given):
    item = {"norm": sharded_abstract()[NORM]}
    hint = r"not supported.*mapping=\.\.\..*osl\.rule.*transforms=\{\} alone"
    for name in (osl.SafetensorsRestore, ocp.args.PyTreeRestore):
        with pytest.raises(osl.SafetensorsLayoutError, match=hint):
            checkpointer.restore(folder, args=name(item, **given))
    mapping = osl.Mapping([osl.rule("norm", osl.tensor(NORM))], strict=False)
    restored = checkpointer.restore(folder, args=osl.SafetensorsRestore(item, mapping=mapping))
    assert_same_bits(restored["norm"], TENSORS[NORM])
    with osl.using(mapping=mapping):
        restored = checkpointer.restore(folder, args=ocp.args.StandardRestore(item))
    assert_same_bits(restored["norm"], TENSORS[NORM])


def test_the_error_of_a_shape_says_what_cuts_and_pads(folder, checkpointer):
    item = {NORM: jax.ShapeDtypeStruct((99,), np.float32)}
    args = ocp.args.PyTreeRestore(item, transforms={})
    with pytest.raises(
        osl.ShapeMismatchError, match=r"mapping.*`strict=False`.*cuts `jax\.Array`s"
    ):
        checkpointer.restore(folder, args=args)
    item |= dict.fromkeys(TENSORS.keys() - item.keys(), ...)
    args = ocp.args.StandardRestore(item, strict=False)
    size = TENSORS[NORM].size
    restored = np.asarray(checkpointer.restore(folder, args=args)[NORM])
    np.testing.assert_array_equal(restored[:size], TENSORS[NORM][:99].astype(np.float32))
    context = layout_context(osl.SafetensorsLayout)
    with context, pytest.raises(ValueError, match=r"enable_padding_and_truncation = True`"):
        ocp_v1.load(folder, item)
    context.array.loading.enable_padding_and_truncation = True
    with context:
        np.testing.assert_array_equal(ocp_v1.load(folder, item)[NORM], restored)


def test_orbax_takes_a_single_file_for_an_incomplete_checkpoint(folder, checkpointer):
    with pytest.raises(ValueError, match="Found incomplete checkpoint"):
        checkpointer.restore(folder / "model-00001-of-00003.safetensors")


def test_folder_without_checkpoint(tmp_path, checkpointer):
    with pytest.raises(osl.CheckpointNotFoundError, match="does not contain any"):
        checkpointer.restore(tmp_path)


def test_options_of_the_handler_and_of_using(folder):
    seen: list[str] = []

    def reading(name: str) -> osl.ReadOptions:
        return osl.ReadOptions(progress=lambda _: seen.append(name))

    def one_of_each() -> set[str]:
        seen.clear()
        ocp.Checkpointer(osl.SafetensorsCheckpointHandler(read=reading("handler"))).restore(folder)
        return set(seen)

    assert one_of_each() == {"handler"}
    with osl.using(read=reading("outer")):
        assert one_of_each() == {"outer"}
        with osl.using(read=reading("inner")):
            assert one_of_each() == {"inner"}
        with osl.using():
            assert one_of_each() == {"outer"}
    assert one_of_each() == {"handler"}


def test_strict_of_read_options_does_not_override_partial_restore(folder):
    handler = osl.SafetensorsCheckpointHandler(read=osl.ReadOptions(strict=True))
    request = osl.SafetensorsRestore(NESTED_NORM, partial_restore=True)
    ocp.Checkpointer(handler).restore(folder, args=request)


def link_step(root, step: str, item: str, folder) -> None:
    (root / step).mkdir(parents=True)
    (root / step / item).symlink_to(folder)


def test_manager_with_the_registry_runs_an_existing_pipeline(tmp_path, folder):
    root = tmp_path / "root"
    link_step(root, "7", "default", folder)
    registry = osl.handler_registry("default")
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        assert manager.latest_step() == 7
        assert manager.all_steps() == [7]
        metadata = manager.item_metadata(7)
        assert set(metadata) == set(TENSORS)
        check_host(manager.restore(7))
        check_sharded(manager.restore(7, args=ocp.args.StandardRestore(sharded_abstract())))
        check_sharded(manager.restore(None, args=ocp.args.PyTreeRestore(sharded_abstract())))
        check_sharded(manager.restore(7, args=osl.SafetensorsRestore(sharded_abstract())))
        assert manager.restore(7, args=ocp.args.StandardRestore(metadata)).keys() == set(TENSORS)


def test_manager_starts_from_published_weights_and_goes_on(tmp_path, folder):
    """The recipe in the module's docstring; when the step is deleted, the folder stays."""
    root = tmp_path / "root"
    link_step(root, "0", "pretrained", folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(root, options=options) as manager:
        args = ocp.args.Composite(pretrained=osl.SafetensorsRestore(sharded_abstract()))
        params = manager.restore(manager.latest_step(), args=args).pretrained
        check_sharded(params)
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(params)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        args = ocp.args.Composite(state=ocp.args.StandardRestore(sharded_abstract()))
        check_sharded(manager.restore(3, args=args).state)
    assert not os.path.lexists(root / "0")
    check_host(osl.load(folder))


def test_manager_with_a_json_item_beside(tmp_path, folder):
    root = tmp_path / "root"
    link_step(root, "5", "params", folder)
    (root / "5" / "config").mkdir()
    (root / "5" / "config" / "metadata").write_text(json.dumps({"lr": 0.1}))
    with ocp.CheckpointManager(root, handler_registry=osl.handler_registry("params")) as manager:
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(sharded_abstract()), config=ocp.args.JsonRestore()
        )
        restored = manager.restore(5, args=args)
        check_sharded(restored.params)
        assert restored.config == {"lr": 0.1}
        check_host(manager.restore(5, args=ocp.args.Composite(params=None)).params)
        assert set(manager.item_metadata(5).params) == set(TENSORS)


def test_registry_needs_names():
    with pytest.raises(ValueError, match='"default"'):
        osl.handler_registry()
    for wrong in (["state"], ("state",), None, 5, b"state"):
        for function in (osl.handler_registry, osl.context):
            with pytest.raises(ValueError, match="item_names must be names of items"):
                function(wrong)
