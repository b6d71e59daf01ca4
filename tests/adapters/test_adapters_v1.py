"""Orbax v1: the layout through `ocp.load` and its kin, the handler through a context."""

from __future__ import annotations

import asyncio
import threading
import time

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits, save
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_versions import enable_x64
from llama_folder import (
    NORM,
    NORM_LEAF,
    TENSORS,
    check_host,
    check_sharded,
    sharded_abstract,
)
from meshes import mesh_of
from orbax_calls import layout_context

import orbax_safetensors_layout as osl


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "hf", TENSORS, files=3, metadata={"format": "pt", "origin": "test"})


@pytest.fixture(params=["safetensors", "auto", osl.SafetensorsLayout])
def layout(request):
    if isinstance(request.param, str):
        request.getfixturevalue("installed")
    with layout_context(request.param):
        yield request.param


@pytest.fixture(params=["safetensors", osl.SafetensorsLayout])
def safetensors_layout(request):
    if isinstance(request.param, str):
        request.getfixturevalue("installed")
    with layout_context(request.param):
        yield


def test_load_sharded(layout, folder):
    check_sharded(ocp.load(folder, sharded_abstract()))


def test_shardings_over_an_abstract_mesh_find_the_mesh_that_is_set(layout, folder):
    mesh = mesh_of(a=4, b=2, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    shape = TENSORS[NORM].shape
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh.abstract_mesh, P("a"))
        leaf = jax.ShapeDtypeStruct(shape, NORM_LEAF.dtype, sharding=sharding)
        abstract = {name: leaf if name == NORM else ... for name in TENSORS}
        if not hasattr(jax.sharding, "get_mesh"):  # jax 0.7: nobody may ask which mesh is set
            with pytest.raises(osl.MismatchError, match="names no devices"):
                ocp.load(folder, abstract)
            return
        loaded = ocp.load(folder, abstract)
    assert loaded[NORM].sharding == NamedSharding(mesh, P("a"))
    assert_same_bits(loaded[NORM], TENSORS[NORM])


def test_load_without_a_tree_gives_numpy_as_the_builtin_layout_does(layout, folder):
    check_host(ocp.load(folder))
    osl.uninstall()
    assert {type(array) for array in ocp.load(folder).values()} == {np.ndarray}


def test_load_nested_tree_with_placeholders(layout, folder):
    tree = {"model": {"norm": {"weight": NORM_LEAF}, "embed_tokens": {"weight": ...}}}
    loaded = ocp.load(folder, tree)
    assert_same_bits(loaded["model"]["norm"]["weight"], TENSORS[NORM])
    assert loaded["model"]["embed_tokens"]["weight"] is ...


@pytest.mark.parametrize("name", ["state", None])
def test_load_by_name(layout, folder, name):
    check_sharded(ocp.load(folder, sharded_abstract(), checkpointable_name=name))


def test_load_by_a_name_that_is_not_there(layout, folder):
    with pytest.raises(ocp.errors.InvalidLayoutError, match=r"'params' \(.*found: state\)"):
        ocp.load(folder, checkpointable_name="params")


def test_load_a_single_file(layout, folder):
    file = folder / "model-00002-of-00003.safetensors"
    expected = safetensors.numpy.load_file(file)
    loaded = ocp.load(file)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(loaded[name], tensor)


def test_metadata_describes_and_loads(layout, folder):
    before = time.time_ns()
    metadata = ocp.metadata(folder)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in metadata.metadata.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()
    }
    assert metadata.custom_metadata == {"format": "pt", "origin": "test"}
    assert before - 600e9 < metadata.commit_timestamp_nsecs <= before
    for name, array in ocp.load(folder, metadata).items():
        assert isinstance(array, jax.Array)
        assert_same_bits(array, TENSORS[name])


def test_checkpointables_of_a_plain_folder(layout, folder):
    assert ocp.load_checkpointables(folder).keys() == {"state"}
    check_host(ocp.load_checkpointables(folder, {"state": None})["state"])
    check_sharded(ocp.load_checkpointables(folder, {"state": sharded_abstract()})["state"])
    metadata = ocp.checkpointables_metadata(folder)
    assert metadata.metadata.keys() == {"state"}
    assert metadata.custom_metadata == {"format": "pt", "origin": "test"}
    assert ocp.load_checkpointables(folder, metadata)["state"].keys() == TENSORS.keys()


def test_checkpointables_are_subfolders(safetensors_layout, tmp_path):
    parts = {"vae": {"a": np.arange(3.0)}, "unet": {"b": np.arange(4.0)}}
    for number, (name, tensors) in enumerate(parts.items()):
        save(tmp_path / name, tensors, metadata={"number": str(number)})
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "config.json").write_text("{}")
    loaded = ocp.load_checkpointables(tmp_path)
    assert loaded.keys() == parts.keys()
    assert_same_bits(loaded["vae"]["a"], parts["vae"]["a"])
    leaf = jax.ShapeDtypeStruct((4,), np.float32)
    loaded = ocp.load_checkpointables(tmp_path, {"unet": {"b": leaf}})
    assert loaded.keys() == {"unet"}
    assert_same_bits(loaded["unet"]["b"], np.arange(4.0, dtype=np.float32))
    metadata = ocp.checkpointables_metadata(tmp_path)
    assert metadata.metadata["vae"]["a"].shape == (3,)
    assert metadata.custom_metadata == {"vae": {"number": "0"}, "unet": {"number": "1"}}
    assert_same_bits(ocp.load(tmp_path, checkpointable_name="vae")["a"], parts["vae"]["a"])
    assert ocp.metadata(tmp_path, "unet").custom_metadata == {"number": "1"}
    with pytest.raises(osl.CheckpointNotFoundError, match=r"text_encoder.*unet, vae"):
        ocp.load_checkpointables(tmp_path, {"text_encoder": None})
    with pytest.raises(ocp.errors.InvalidLayoutError):
        ocp.load(tmp_path, checkpointable_name=None)


def test_load_async(safetensors_layout, folder):
    check_sharded(ocp.load_async(folder, sharded_abstract()).result(60))
    check_host(ocp.load_async(folder).result(60))


def test_load_async_keeps_the_settings_it_started_with(safetensors_layout, folder):
    seen = []
    with osl.using(read=osl.ReadOptions(progress=seen.append)):
        response = ocp.load_async(folder)
    with osl.using(read=osl.ReadOptions(progress=lambda _: pytest.fail("not these"))):
        response.result(60)
    assert seen[-1].done_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_load_async_gives_what_is_wrong_with_the_tree_as_its_result(safetensors_layout, folder):
    response = ocp.load_async(folder, {"model.nrom.weight": NORM_LEAF})
    with pytest.raises(KeyError, match=r"Tensor 'model\.nrom\.weight' not found"):
        response.result(60)


def test_load_inside_a_running_event_loop(layout, folder):
    async def load():
        return ocp.load(folder, sharded_abstract())

    check_sharded(asyncio.run(load()))


def test_reading_does_not_block_the_event_loop(folder):
    reading, seen = threading.Event(), threading.Event()
    in_time = []

    def progress(_):
        reading.set()
        in_time.append(seen.wait(30))

    async def load():
        layout = osl.SafetensorsLayout()
        with osl.using(read=osl.ReadOptions(progress=progress)):
            loading = asyncio.ensure_future(await layout.load(ocp.path.Path(folder)))
        while not reading.is_set():
            await asyncio.sleep(0.001)
        seen.set()
        return await loading

    check_host(asyncio.run(load()))
    assert all(in_time)


def test_x64_of_the_caller_reaches_the_reading_thread(layout, tmp_path):
    path = save(tmp_path, {"step": np.array(2**40, np.int64)})
    abstract = {"step": jax.ShapeDtypeStruct((), np.int64)}
    with pytest.raises(osl.DtypeMismatchError, match="x64"):
        ocp.load(path, abstract)
    with enable_x64(True):
        assert ocp.load(path, abstract)["step"].dtype == np.int64


@pytest.fixture
def storage_reads():
    """Numbers of requests, as each load reports them to `jax.monitoring`."""
    reads = []

    def listen(event, value, **_):
        if event == "/jax/orbax/read/safetensors/storage_reads":
            reads.append(value)

    jax.monitoring.register_scalar_listener(listen)
    yield reads
    jax.monitoring.clear_event_listeners()


def test_options_of_orbax_context(installed, tmp_path, storage_reads):
    folder = save(tmp_path, {"t": np.zeros(500_000, np.uint8)})

    def reads_with(**options: int) -> float:
        context = layout_context("safetensors")
        if "chunk" in options:
            context.safetensors.read_chunk_bytes = options["chunk"]
        if "budget" in options:
            context.memory.read_concurrent_bytes = options["budget"]
        with context:
            ocp.load(folder)
        return storage_reads[-1]

    usual = reads_with()
    assert reads_with(chunk=1024) > 2 * usual
    assert reads_with(budget=1024) > 2 * usual
    with osl.using(read=osl.ReadOptions()):
        assert reads_with(chunk=1024, budget=1024) == usual


def test_missing_path_and_wrong_file(safetensors_layout, tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, problem in {
        "nowhere": "the path does not exist",
        "weights.bin": "a file of another format",
        "empty": "the folder does not contain any '.safetensors' files",
    }.items():
        for call in (ocp.load, ocp.load_checkpointables, ocp.metadata):
            with pytest.raises(ocp.errors.InvalidLayoutError) as caught:
                call(tmp_path / name)
            assert isinstance(caught.value.__cause__, osl.CheckpointNotFoundError)
            assert caught.value.__cause__.file == str(tmp_path / name)
            assert problem in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "call",
    [
        lambda layout, path: layout.validate(path, None),
        lambda layout, path: layout.validate_checkpointables(path),
        lambda layout, path: layout.load(path),
        lambda layout, path: layout.metadata(path, "state"),
    ],
    ids=["validate", "validate_checkpointables", "load", "metadata"],
)
@pytest.mark.parametrize("name", ["nowhere", "text.txt", "empty", "other"])
def test_nothing_or_something_else_is_orbaxs_error_and_ours(tmp_path, name, call):
    (tmp_path / "text.txt").write_text("no weights")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_bytes(b"")
    with pytest.raises(ocp.errors.InvalidLayoutError) as caught:
        asyncio.run(call(osl.SafetensorsLayout(), ocp.path.Path(tmp_path / name)))
    assert isinstance(caught.value, osl.CheckpointNotFoundError)
    assert caught.value.file == str(tmp_path / name)


def test_errors_keep_the_words_of_the_builtin_layout(safetensors_layout, folder, tmp_path):
    wrong = {NORM: jax.ShapeDtypeStruct((65,), ml_dtypes.bfloat16)}
    with pytest.raises(ValueError, match="Shape mismatch"):
        ocp.load(folder, wrong)
    with pytest.raises(KeyError, match="Tensor 'absent' not found"):
        ocp.load(folder, {"absent": NORM_LEAF})
    double = save(tmp_path / "double", TENSORS)
    (double / "copy.safetensors").write_bytes((double / "model.safetensors").read_bytes())
    (double / "model.safetensors").rename(double / "first.safetensors")
    with pytest.raises(ValueError, match="Duplicate tensor model"):
        ocp.load(double)
    cut = save(tmp_path / "cut", TENSORS) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated"):
        ocp.load(cut)


def test_more_tensors_than_the_tree_names_are_no_error_as_with_the_builtin(layout, folder):
    assert ocp.load(folder, {NORM: NORM_LEAF}).keys() == {NORM}


def test_strict_of_using(layout, folder):
    with (
        osl.using(read=osl.ReadOptions(strict=True)),
        pytest.raises(osl.UnexpectedTensorError),
    ):
        ocp.load(folder, {NORM: NORM_LEAF})


def test_install_replaces_and_uninstall_restores(folder):
    nested = {"model": {"norm": {"weight": NORM_LEAF}}}
    with layout_context("safetensors"):
        with pytest.raises(ValueError, match="not a flat dictionary"):
            ocp.load(folder, nested)
        osl.install()
        osl.install()
        assert_same_bits(ocp.load(folder, nested)["model"]["norm"]["weight"], TENSORS[NORM])
        osl.uninstall()
        with pytest.raises(ValueError, match="not a flat dictionary"):
            ocp.load(folder, nested)
        osl.uninstall()
        osl.install()
        ocp.load(folder, nested)
        osl.uninstall()


def orbax_step(path, item: str, folder):
    """A checkpoint in Orbax's own layout, whose item's folder holds safetensors files."""
    (path / item).mkdir(parents=True)
    for file in folder.iterdir():
        (path / item / file.name).symlink_to(file)
    (path / item / "_METADATA").write_text("{}")
    (path / "orbax.checkpoint").touch()
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    return path


def test_handler_serves_items_of_orbax_checkpoints(tmp_path, folder):
    path = orbax_step(tmp_path / "step", "state", folder)
    with osl.context("state"):
        check_sharded(ocp.load(path, sharded_abstract()))
        check_host(ocp.load(path))
        check_sharded(ocp.load_checkpointables(path, {"state": sharded_abstract()})["state"])
        metadata = ocp.metadata(path)
        assert metadata.metadata[NORM].shape == (64,)
        assert ocp.load(path, metadata).keys() == TENSORS.keys()
        placeholders = dict.fromkeys(TENSORS, ...) | {NORM: NORM_LEAF}
        assert_same_bits(ocp.load(path, placeholders)[NORM], TENSORS[NORM])


def test_handler_serves_a_training_checkpointer(tmp_path, folder):
    orbax_step(tmp_path / "root" / "3", "state", folder)
    with ocp.training.Checkpointer(tmp_path / "root", context=osl.context("state")) as training:
        assert training.latest.step == 3
        check_sharded(training.load(3, sharded_abstract()))
        assert training.metadata(3).metadata[NORM].shape == (64,)


@pytest.mark.parametrize("record", ["{}", '{"item_handlers": {"other": "a.Handler"}}', None])
def test_handler_serves_published_weights_without_any_record(tmp_path, folder, record):
    step = tmp_path / "step"
    step.mkdir()
    (step / "pretrained").symlink_to(folder)
    if record is not None:
        (step / "_CHECKPOINT_METADATA").write_text(record)
        (step / "orbax.checkpoint").touch()
    with osl.context("pretrained"):
        check_host(ocp.load_checkpointables(step, {"pretrained": None})["pretrained"])
        abstract = {"pretrained": sharded_abstract()}
        check_sharded(ocp.load_checkpointables(step, abstract)["pretrained"])


def test_handler_follows_partial_load(tmp_path, folder):
    path = orbax_step(tmp_path / "step", "params", folder)
    tree = {"model": {"norm": {"weight": NORM_LEAF}}}
    with osl.context("params"), pytest.raises(osl.UnexpectedTensorError, match="partial_load"):
        ocp.load(path, tree, checkpointable_name="params")
    context = osl.context("params")
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load(path, tree, checkpointable_name="params")
    assert_same_bits(loaded["model"]["norm"]["weight"], TENSORS[NORM])


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"a": np.ones(3), "c": np.ones(2)}, osl.MissingTensorError),
        ({"a": np.ones(3)}, osl.UnexpectedTensorError),
        ({"a": np.ones(4), "b": np.ones(2)}, osl.ShapeMismatchError),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_step_that_does_not_fit_the_tree_is_our_error(tmp_path, tree, kind):
    """Not Orbax's, of an incompatible handler and all of the tree."""
    with ocp.training.Checkpointer(tmp_path / "run", context=osl.context("state")) as training:
        training.save(1, {"a": np.ones(3), "b": np.ones(2)})
        with pytest.raises(kind):
            training.load(1, tree)


@pytest.mark.parametrize(
    ("abstract", "handled"),
    [
        ({"a": NORM_LEAF, "b": [..., 1, 2.0, True, int, float]}, True),
        ({"a": np.ones(3), "b": np.float32(1)}, True),
        ({}, True),
        ({"a": object()}, False),
        ("text", True),
        ({"a": str}, True),
    ],
)
def test_handler_takes_the_leaves_that_load_takes(abstract, handled):
    assert osl.SafetensorsHandler().is_abstract_handleable(abstract) is handled


def test_context_needs_names():
    with pytest.raises(ValueError, match='"state"'):
        osl.context()


def test_headers_are_checked_before_anything_is_awaited_and_the_tree_then(tmp_path, folder):
    """As by Orbax's own layout."""
    layout = osl.SafetensorsLayout()
    cut = save(tmp_path / "cut", TENSORS, files=3)
    file = next(cut.glob("*-00002-*"))
    file.write_bytes(file.read_bytes()[:-1])
    held = safetensors.numpy.load_file(folder / file.name)
    inside, outside = next(iter(held)), next(name for name in TENSORS if name not in held)

    async def begin(path, abstract=None):
        return await layout.load(ocp.path.Path(path), None, abstract)

    def leaf(name):
        return {name: jax.ShapeDtypeStruct(TENSORS[name].shape, TENSORS[name].dtype)}

    for path, abstract in ((file, None), (cut, None), (cut, leaf(inside))):
        with pytest.raises(osl.TruncatedFileError, match="truncated"):
            asyncio.run(begin(path, abstract))

    async def load(path, abstract=None):
        return await (await begin(path, abstract))

    async def finish(loading):
        return await loading

    loaded = asyncio.run(load(cut, leaf(outside)))
    assert_same_bits(loaded[outside], TENSORS[outside])
    check_host(asyncio.run(load(folder)))
    context = layout_context(osl.SafetensorsLayout)
    context.safetensors.read_chunk_bytes = 0
    wrong = {NORM: jax.ShapeDtypeStruct((65,), ml_dtypes.bfloat16)}
    for abstract, kind, problem in (
        (None, ValueError, r"safetensors\.read_chunk_bytes must be"),
        ({"absent": NORM_LEAF}, KeyError, "Tensor 'absent' not found"),
        (wrong, ValueError, "Shape mismatch"),
    ):
        if abstract is not None:
            context = layout_context(osl.SafetensorsLayout)
        with context:
            loading = asyncio.run(begin(folder, abstract))
        with pytest.raises(kind, match=problem):
            asyncio.run(finish(loading))
