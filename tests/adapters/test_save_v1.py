"""Orbax v1: saving through the handler's context, and through the layout that `install` sets."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import gc
import logging
import operator
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from checkpoints import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec as P
from limits import full_disk
from meshes import mesh_of, place
from orbax.checkpoint.experimental.v1._src.handlers import registration
from orbax.checkpoint.experimental.v1._src.layout import registry, safetensors_layout
from orbax_calls import installed as installing, installed_context, layout_context
from programs import program_path
from sampling import every
from saving import Gate, opened, tensor_files
from states import everything, same, train_state

import orbax_safetensors_layout as osl

VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)
# What Orbax itself leaves behind when a save fails before its background phase.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine '_create_paths' was never awaited")


@pytest.fixture(autouse=True, scope="module")
def only_objects_of_this_module_are_collected():
    """After each test; a million others were made before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def drop_what_orbax_dropped():
    """Here and now: where garbage is collected amid code without builtins, nothing can warn."""
    yield
    gc.collect()


def handler_context() -> ocp.Context:
    return osl.context("state", "params", "opt", "other")


@pytest.fixture(params=["handler", "installed", "class"])
def route(request):
    """Makes the contexts of one of the ways to us."""
    match request.param:
        case "handler":
            yield handler_context
        case "installed":
            with installing():
                yield layout_context
        case "class":
            yield functools.partial(layout_context, osl.SafetensorsLayout)


def state(step=0):
    return {"w": place(VALUES + step, P("x", "y")), "step": step, "name": "run"}


def writes_ocdbt(path):
    return any(file.name == "manifest.ocdbt" for file in path.rglob("*"))


def test_everything_comes_back(tmp_path, route):
    tree = everything()
    with route():
        ocp.save(tmp_path / "a", tree)
        same(ocp.load(tmp_path / "a"), tree)
        same(ocp.load(tmp_path / "a", tree), tree)


def test_a_train_state(tmp_path, route):
    tree = train_state()
    with route():
        ocp.save(tmp_path / "a", tree)
        same(ocp.load(tmp_path / "a", tree), tree)


def test_a_bare_array(tmp_path, route):
    with route():
        ocp.save(tmp_path / "a", jnp.arange(3))
        assert_same_bits(ocp.load(tmp_path / "a"), np.arange(3, dtype=np.int32))


def test_safetensors_reads_what_was_saved(tmp_path, route):
    with route():
        ocp.save(tmp_path / "a", {"b": {"c": place(VALUES, P("x", "y"))}})
    stored = opened(tmp_path / "a" / "state")
    assert stored.keys() == {"b.c"}
    assert_same_bits(stored["b.c"], VALUES)


def test_overwrite(tmp_path, route):
    with route():
        ocp.save(tmp_path / "a", state(0))
        with pytest.raises(ValueError, match="already exists"):
            ocp.save(tmp_path / "a", state(1))
        ocp.save(tmp_path / "a", state(1), overwrite=True)
        same(ocp.load(tmp_path / "a"), state(1))


def test_other_names(tmp_path, route):
    with route():
        ocp.save(tmp_path / "a", state(), checkpointable_name="params")
        same(ocp.load(tmp_path / "a", checkpointable_name="params"), state())
        same(ocp.load(tmp_path / "a"), state())


def test_several_checkpointables(tmp_path, route):
    trees = {"params": state(1), "opt": {"count": 3}, "other": {"a": np.arange(3)}}
    with route():
        ocp.save_checkpointables(tmp_path / "a", trees)
        same(ocp.load_checkpointables(tmp_path / "a"), trees)
        loaded = ocp.load_checkpointables(tmp_path / "a", {"opt": None, "params": state()})
        same(loaded, {"opt": {"count": 3}, "params": state(1)})
        metadata = ocp.checkpointables_metadata(tmp_path / "a")
        assert metadata.metadata["opt"] == {"count": int}
    assert opened(tmp_path / "a" / "other").keys() == {"a"}


def test_metadata(tmp_path, route):
    tree = everything()
    with route():
        ocp.save(tmp_path / "a", tree, custom_metadata={"run": [1]})
        metadata = ocp.metadata(tmp_path / "a")
        assert metadata.custom_metadata == {"run": [1]}
        assert 0 < metadata.init_timestamp_nsecs <= metadata.commit_timestamp_nsecs
        assert jax.tree.structure(metadata.metadata) == jax.tree.structure(tree)
        leaf = metadata.metadata["int4"]
        assert leaf.sharding == NamedSharding(mesh_of(x=4, y=2), P("x"))
        assert (leaf.shape, leaf.dtype) == ((8, 2), tree["int4"].dtype)
        assert metadata.metadata["scalars"]["text"] is str
        assert metadata.metadata["keys"].dtype == tree["keys"].dtype
        loaded = ocp.load(tmp_path / "a", metadata)
    tree["host"] = [np.asarray(value) for value in tree["host"]]
    same(loaded, tree)


def test_save_async_then_the_arrays_go(tmp_path, route):
    gate = Gate()
    tree = {name: place(VALUES + number, P("x")) for number, name in enumerate("abc")}
    with route(), osl.using(write=gate.options):
        response = ocp.save_async(tmp_path / "a", tree)
    assert gate.reached.wait(30)
    for array in jax.tree.leaves(tree):
        array.delete()
    assert not (tmp_path / "a").exists()
    gate.open()
    response.result(60)
    for number, name in enumerate("abc"):
        assert_same_bits(opened(tmp_path / "a" / "state")[name], VALUES + number)


def test_numpy_arrays_may_be_overwritten(tmp_path, route):
    gate = Gate()
    tree = {name: VALUES + number for number, name in enumerate("abc")}
    with route(), osl.using(write=gate.options):
        response = ocp.save_async(tmp_path / "a", tree)
    assert gate.reached.wait(30)
    for array in tree.values():
        array[...] = -1
    gate.open()
    response.result(60)
    assert_same_bits(opened(tmp_path / "a" / "state")["c"], VALUES + 2)


def test_inside_a_running_event_loop(tmp_path, route):
    async def run():
        with route():
            ocp.save(tmp_path / "a", state())
            ocp.save_async(tmp_path / "b", state()).result()
            return ocp.load(tmp_path / "a"), ocp.load(tmp_path / "b")

    same(asyncio.run(run()), (state(), state()))


def test_an_error_in_the_background_is_the_results(tmp_path, route):
    big = {"a": np.zeros(100_000, np.float32)}
    with route():
        with full_disk(8192):
            response = ocp.save_async(tmp_path / "a", big)
            with pytest.raises(osl.StorageError, match=r"model\.safetensors"):
                response.result(60)
        assert not (tmp_path / "a").exists()
        ocp.save(tmp_path / "a", big)
        same(ocp.load(tmp_path / "a"), big)


def test_an_empty_tree_is_an_error(tmp_path, route):
    with route():
        with pytest.raises(ValueError, match="empty tree"):
            ocp.save(tmp_path / "a", {})
        ocp.save(tmp_path / "a", {"a": 1})


def test_options_of_using_and_of_orbaxs_context(tmp_path, route):
    tree = {"a": VALUES, "b": VALUES, "c": VALUES}
    context = route()
    context.memory.write_concurrent_bytes = 1 << 20
    with context:
        with osl.using(write=osl.WriteOptions(max_file_bytes=300)):
            ocp.save(tmp_path / "a", tree)
        ocp.save(tmp_path / "b", tree)
    assert len(list((tmp_path / "a" / "state").glob("*.safetensors"))) == 3
    assert len(list((tmp_path / "b" / "state").glob("*.safetensors"))) == 1


def test_the_sharded_layout(tmp_path, route):
    with route():
        with osl.using(write=osl.WriteOptions(layout="sharded")):
            ocp.save(tmp_path / "a", everything())
        same(ocp.load(tmp_path / "a"), everything())


def test_training_checkpointer(tmp_path, route):
    policy = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(
        tmp_path, context=route(), preservation_policy=policy
    ) as training:
        for step in range(3):
            training.save(
                step, state(step), metrics={"loss": 1.0 / (step + 1)}, custom_metadata={"at": step}
            )
        response = training.save_async(3, state(3), metrics={"loss": 0.1})
        assert response.result(60)
        assert [checkpoint.step for checkpoint in training.checkpoints] == [2, 3]
        assert training.latest.metrics == {"loss": 0.1}
        same(training.load(), state(3))
        same(training.load(2, state()), state(2))
        assert training.metadata(2).custom_metadata == {"at": 2}
        assert training.metadata(2).metadata["step"] is int
        assert set(training.load_checkpointables(2)) == {"state"}
    assert not writes_ocdbt(tmp_path)
    assert_same_bits(opened(tmp_path / "3" / "state")["w"], VALUES + 3)


def test_training_checkpointer_goes_on_after_a_full_disk(tmp_path, route):
    training = ocp.training.Checkpointer(tmp_path, context=route())
    training.save(0, state(0))
    with full_disk(8192), pytest.raises(osl.StorageError, match=r"model\.safetensors"):
        training.save(1, {"big": np.zeros(100_000)})
    with pytest.raises(osl.StorageError):  # Orbax says it twice, of its own format, too
        training.save(2, state(2))
    same(training.load(), state(0))
    assert training.save(2, state(2))
    same(training.load(), state(2))
    training.close()


def test_both_routes_leave_the_same_folder(tmp_path):
    tree = everything()
    with handler_context():
        ocp.save(tmp_path / "handler", tree)
    with installed_context():
        ocp.save(tmp_path / "layout", tree)
    handler, layout = tensor_files(tmp_path / "handler"), tensor_files(tmp_path / "layout")
    for files in (handler, layout):
        assert b"SafetensorsHandler" in files.pop("_CHECKPOINT_METADATA")
    assert handler == layout


def test_each_route_loads_what_the_other_saved(tmp_path, installed):
    for number, (save, load) in enumerate(
        [(handler_context, layout_context), (layout_context, handler_context)]
    ):
        path = tmp_path / str(number)
        with save():
            ocp.save(path, state(number))
        with load():
            same(ocp.load(path), state(number))


@pytest.mark.parametrize("name", ["state", "params"])
def test_auto_loads_what_the_layout_saved(tmp_path, installed, name):
    with layout_context():
        ocp.save(tmp_path / "a", state(), checkpointable_name=name)
    same(ocp.load(tmp_path / "a"), state())
    same(ocp.load(tmp_path / "a", state()), state())
    same(ocp.load_checkpointables(tmp_path / "a"), {name: state()})
    assert ocp.metadata(tmp_path / "a").metadata["step"] is int


def test_auto_saves_as_orbax_does(tmp_path, installed):
    ocp.save(tmp_path / "a", state())
    assert writes_ocdbt(tmp_path / "a")
    same(ocp.load(tmp_path / "a", state(1)), state(0))


def test_uninstalled_orbax_is_as_it_was(tmp_path):
    osl.install()
    osl.uninstall()
    with ocp.training.Checkpointer(tmp_path / "a", context=layout_context()) as training:
        training.save(0, {"a": VALUES})
    assert writes_ocdbt(tmp_path / "a")
    with layout_context(), pytest.raises(NotImplementedError):
        ocp.save(tmp_path / "b", {"a": VALUES})


def test_without_the_handler_orbax_says_what_the_folder_holds(tmp_path):
    """Alone, not after a list of all handlers; the handler is used where the context has it."""
    with ocp.training.Checkpointer(tmp_path / "run", context=osl.context("state")) as training:
        training.save(0, state())
    step = tmp_path / "run" / "0"
    plain = ocp.training.Checkpointer(tmp_path / "run")
    for call in (
        lambda: ocp.load(step),
        lambda: ocp.load_checkpointables(step, {"state": state()}),
        lambda: ocp.metadata(step),
        lambda: plain.load(0, state()),
        lambda: plain.metadata(0),
    ):
        with pytest.raises(osl.SafetensorsLayoutError, match=r"^This folder holds.*osl\.context"):
            call()
    plain.close()
    with osl.context("other"):
        same(ocp.load(step), state())


def test_partial_saves_are_refused_in_that_layout_alone(tmp_path, installed):
    with layout_context(), pytest.raises(osl.SafetensorsLayoutError, match="part by part"):
        ocp.partial.save(tmp_path / "a", {"a": VALUES})
    assert not writes_ocdbt(tmp_path)
    ocp.partial.save(tmp_path / "a", {"a": VALUES})
    ocp.partial.finalize(tmp_path / "a")
    assert_same_bits(ocp.load(tmp_path / "a")["a"], VALUES)


@dataclasses.dataclass
class Counter:
    """Brings its own way to be saved, as a data set's iterator does."""

    count: int = 0

    async def save(self, directory: ocp.path.PathAwaitingCreation) -> Awaitable[None]:
        return self._write(directory, self.count)

    async def _write(self, directory: Any, count: int) -> None:
        ((await directory.await_creation()) / "count").write_text(str(count))

    async def load(self, directory: ocp.path.Path) -> Awaitable[None]:
        return self._read(directory)

    async def _read(self, directory: Any) -> None:
        self.count = int((directory / "count").read_text())


def test_what_saves_itself_keeps_that(tmp_path, route):
    with route():
        ocp.save_checkpointables(tmp_path / "a", {"state": state(), "data": Counter(5)})
        counter = Counter()
        loaded = ocp.load_checkpointables(tmp_path / "a", {"data": counter, "state": None})
        assert list(loaded) == ["data", "state"]
        same(loaded["state"], state())
        assert counter.count == 5


def test_a_registry_of_ones_own(tmp_path):
    """As docs/saving.md spells it."""
    context = ocp.Context()
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(osl.SafetensorsHandler, checkpointable_name="state")
    context.checkpointables.registry = registry
    with context:
        ocp.save(tmp_path / "a", state())
        same(ocp.load(tmp_path / "a", state()), state())
    assert list((tmp_path / "a" / "state").glob("*.safetensors"))


def test_a_step_without_a_tree(tmp_path, route):
    with route():
        ocp.save_checkpointables(tmp_path / "a", {"data": Counter(5)})
        counter = Counter()
        ocp.load_checkpointables(tmp_path / "a", {"data": counter})
    assert counter.count == 5


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("layout", [osl.SafetensorsLayout, "safetensors"])
def test_trees_of_both_formats_in_one_step(tmp_path, layout, installed):
    """None is taken for another one: without a name it is "state", as Orbax has it."""
    placed = place(VALUES, P("x", "y"))
    trees = {"state": {"w": placed, "step": 3}, "ema": {"w": -placed, "step": 4}}
    with osl.context("ema"):
        ocp.save_checkpointables(tmp_path / "a", trees)
    assert not list((tmp_path / "a" / "state").glob("*.safetensors"))
    w = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=placed.sharding)
    abstract, path = {"w": w, "step": 0}, tmp_path / "a"
    with layout_context(layout):
        for tree in (None, abstract):
            assert_same_bits(ocp.load(path, tree)["w"], VALUES)
            for name, expected in trees.items():
                loaded = ocp.load(path, tree, checkpointable_name=name)
                assert_same_bits(loaded["w"], np.asarray(expected["w"]))
                assert loaded["step"] == expected["step"]
        for name in trees:
            assert ocp.metadata(path, name).metadata["w"].shape == (8, 8)
        described = ocp.checkpointables_metadata(path).metadata
        assert list(described) == ["state", "ema"]
        for asked in (None, described):
            loaded = ocp.load_checkpointables(path, asked)
            assert loaded.keys() == trees.keys()
            for name, expected in trees.items():
                assert_same_bits(loaded[name]["w"], np.asarray(expected["w"]))
        with pytest.raises(ocp.errors.InvalidLayoutError, match="found: state, ema"):
            ocp.load(path, checkpointable_name="other")


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("rows", [4, 8, 13])
def test_arrays_of_another_shape_where_the_context_says_so(tmp_path, route, rows):
    sharding = place(VALUES, P("y")).sharding
    tree = {"w": place(VALUES + 1, P("x")), "b": place(VALUES, P("x", "y")), "step": 3}
    asked = tree | {
        "w": jax.ShapeDtypeStruct((4 * rows, 8), jnp.bfloat16, sharding=sharding),
        "b": jax.ShapeDtypeStruct((8, 2 * rows), jnp.float32),
    }
    loaded = {}
    for name, make in (("orbax", ocp.Context), ("ours", route)):
        context = make()
        context.array.loading.enable_padding_and_truncation = True
        with context:
            ocp.save(tmp_path / name, tree)
            loaded[name] = ocp.load(tmp_path / name, asked)
    same(loaded["ours"], loaded["orbax"])
    if rows != 8:
        with route(), pytest.raises(osl.ShapeMismatchError, match="'w'"):
            ocp.load(tmp_path / "ours", asked)
    with context, pytest.raises(osl.ShapeMismatchError, match="'w'"):
        ocp.load(tmp_path / "ours", tree | {"w": jax.ShapeDtypeStruct((8,), jnp.float32)})


def test_what_saves_itself_in_a_training_step(tmp_path, route):
    with ocp.training.Checkpointer(tmp_path, context=route()) as training:
        training.save_checkpointables(0, {"state": state(), "data": Counter(5)})
        counter = Counter()
        loaded = training.load_checkpointables(0, {"state": state(), "data": counter})
        same(loaded["state"], state())
        assert counter.count == 5


def test_a_save_that_is_cancelled_does_not_go_on_behind_the_next(tmp_path, route):
    gate = Gate()
    training = ocp.training.Checkpointer(tmp_path, context=route())
    with osl.using(write=gate.options):
        training.save_async(0, dict.fromkeys("abc", VALUES))
    assert gate.reached.wait(30)
    training.cancel(0)
    threading.Timer(0.3, gate.open).start()
    training.save(0, {"a": VALUES + 1})
    assert opened(tmp_path / "0" / "state").keys() == {"a"}
    same(training.load(0), {"a": VALUES + 1})
    training.close()


def test_processes_that_the_context_leaves_out(tmp_path):
    context = osl.context("state")
    context.multiprocessing.active_processes = {0, 1}
    handler, path = osl.SafetensorsHandler(), ocp.path.Path(tmp_path)
    with context, pytest.raises(osl.SafetensorsLayoutError, match=r"found: \[0, 1\]"):
        asyncio.run(handler.save(path, state()))


def test_what_a_handler_was_registered_for_keeps_it(tmp_path, installed):
    context = layout_context()
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    context.checkpointables.registry = registry
    trees = {"state": state(), "config": {"lr": 0.1}}
    with context:
        ocp.save_checkpointables(tmp_path / "a", trees)
        assert not list((tmp_path / "a" / "config").glob("*.safetensors"))
        same(ocp.load_checkpointables(tmp_path / "a"), trees)


def test_leaves_that_cannot_be_saved_never_go_to_orbaxs_format(tmp_path, installed):
    training = ocp.training.Checkpointer(tmp_path, context=layout_context())
    with pytest.raises(osl.UnsupportedDtypeError, match="bytes"):
        training.save(0, {"a": b"bytes"})
    training.save(1, state())  # Orbax is not closed while it makes the folders of step 0
    assert not writes_ocdbt(tmp_path)


@pytest.mark.parametrize(
    ("tree", "handled"),
    [
        ({"a": VALUES, "b": [jnp.ones(2), np.float32(1), 1, 2.0, True, "text", None]}, True),
        ({"key": jax.random.key(0)}, True),
        ({}, False),
        (None, False),
        ({"a": object()}, False),
        ({"a": b"bytes"}, False),
    ],
)
def test_handler_takes_the_leaves_that_save_takes(tree, handled):
    assert osl.SafetensorsHandler().is_handleable(tree) is handled


def test_install_twice_and_uninstall_once(tmp_path):
    osl.install()
    osl.install()
    osl.uninstall()
    osl.save(tmp_path, {"a": VALUES})
    with layout_context(), pytest.raises(ValueError, match="not a flat dictionary"):
        ocp.load(tmp_path, {"a": {"b": VALUES}})


def test_uninstall_leaves_what_others_put_there():
    original = registration.resolve_handler_for_save
    osl.install()
    theirs = functools.partial(registration.resolve_handler_for_save)
    registration.resolve_handler_for_save = theirs
    try:
        osl.uninstall()
        assert registration.resolve_handler_for_save is theirs
    finally:
        registration.resolve_handler_for_save = original


@pytest.fixture(params=[osl.SafetensorsLayout, osl.SafetensorsLayout()], ids=["class", "instance"])
def ours(request):
    return layout_context(request.param)


def test_a_context_hands_our_layout_on(tmp_path, ours):
    inner, copied = ocp.Context(ours), ocp.Context()
    copied.checkpoint_layout = ours.checkpoint_layout
    for number, context in enumerate(
        (inner, copied, ocp.Context(checkpoint_layout=osl.SafetensorsLayout))
    ):
        with context:
            ocp.save(tmp_path / str(number), state())
        assert not writes_ocdbt(tmp_path)
        assert opened(tmp_path / str(number) / "state").keys() == {"w"}


def test_other_contexts_stay_orbaxs(tmp_path, ours):
    with layout_context(), pytest.raises(NotImplementedError):
        ocp.save(tmp_path / "a", {"a": VALUES})
    with layout_context("orbax"):
        ocp.save(tmp_path / "b", {"a": VALUES})
    assert writes_ocdbt(tmp_path / "b")
    with ours:  # which reads the steps that a run holds already
        assert_same_bits(ocp.load(tmp_path / "b", {"a": VALUES})["a"], VALUES)
    with pytest.raises(ValueError, match="not a valid CheckpointLayout"):
        layout_context(osl.SafetensorsHandler)
    assert ours.checkpoint_layout == ocp.options.CheckpointLayout.SAFETENSORS
    assert ours.checkpoint_layout != ocp.options.CheckpointLayout.ORBAX


def test_an_instance_keeps_what_it_was_made_with(tmp_path):
    tree = {"a": VALUES, "b": VALUES, "c": VALUES}
    seen: list[osl.Progress] = []
    mapping = osl.Mapping([osl.rule("{x}", osl.tensor("model.{x}"))])
    layout = osl.SafetensorsLayout(
        mapping=mapping,
        read=osl.ReadOptions(progress=seen.append),
        write=osl.WriteOptions(max_file_bytes=300),
    )
    context = layout_context(layout)
    with context:
        ocp.save(tmp_path / "a", tree)
    with ocp.training.Checkpointer(tmp_path / "run", context=context) as training:
        training.save(0, tree)
        same(training.load(0, tree), tree)
        assert training.metadata(0).metadata["a"].shape == VALUES.shape
    for folder in (tmp_path / "a" / "state", tmp_path / "run" / "0" / "state"):
        assert len(list(folder.glob("*.safetensors"))) == 3
        assert opened(folder).keys() == {"model.a", "model.b", "model.c"}
    assert seen[-1].done_bytes == 3 * VALUES.nbytes
    with context, osl.using(write=osl.WriteOptions()):
        ocp.save(tmp_path / "b", tree)
    assert len(list((tmp_path / "b" / "state").glob("*.safetensors"))) == 1


def test_a_layout_that_would_not_take_effect_is_refused(monkeypatch):
    async def builtin(*_: Any) -> Any:
        return safetensors_layout.SafetensorsLayout

    def pytrees(*_: Any, **__: Any) -> Any:
        return ocp.handlers.PyTreeHandler()

    for module, name, other in (
        (registry, "get_layout_class", builtin),
        (registration, "resolve_handler_for_save", pytrees),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            with pytest.raises(osl.SafetensorsLayoutError, match="take effect"):
                layout_context(osl.SafetensorsLayout)
    layout_context(osl.SafetensorsLayout)


def test_nothing_is_reported_as_malformed(tmp_path, route, caplog):
    context = route()
    with caplog.at_level(logging.WARNING, "absl"):
        with context:
            ocp.save(tmp_path / "a", state())
            ocp.load(tmp_path / "a")
            ocp.load(tmp_path / "a", state())
            ocp.metadata(tmp_path / "a")
        with ocp.training.Checkpointer(tmp_path / "run", context=context) as training:
            training.save(0, state(), metrics={"loss": 0.5})
            training.load(0)
    assert [record.getMessage() for record in caplog.records] == []


def test_orbax_reports_what_is_malformed(tmp_path, caplog):
    with handler_context():
        ocp.save(tmp_path / "a", state())
        (tmp_path / "a" / "state" / "model.safetensors").unlink()
        with caplog.at_level(logging.WARNING, "absl"), pytest.raises(osl.SafetensorsLayoutError):
            ocp.load(tmp_path / "a")
    assert "malformed" in caplog.text


def test_a_context_of_an_older_orbaxs_item_is_an_error(tmp_path):
    context = osl.context("pytree", "opt")
    text = r'item "state" is not registered.*expected: "pytree", "opt".*osl\.context\("state"\)'
    with context, pytest.raises(osl.SafetensorsLayoutError, match=text):
        ocp.save(tmp_path / "a", state())
    with ocp.training.Checkpointer(tmp_path / "run", context=ocp.Context(context)) as training:
        with pytest.raises(osl.SafetensorsLayoutError, match=text):
            training.save(0, state())
        with pytest.raises(osl.SafetensorsLayoutError, match=text):
            training.save_async(0, state()).result()
    assert not writes_ocdbt(tmp_path)


def test_an_item_saved_before_all_that_are_registered_is_a_warning(tmp_path):
    trees = {"params": state(), "opt": state()}
    with ocp.Context(osl.context("params", "opt_state")):
        with pytest.warns(UserWarning, match=r'"opt" is not registered.*\("opt_state"\)'):
            ocp.save_checkpointables(tmp_path / "misspelt", trees)
        ocp.save_checkpointables(tmp_path / "b", trees | {"opt_state": state()})
        ocp.save_checkpointables(tmp_path / "c", trees)
    with osl.context("params"):  # what was loaded is used
        ocp.load(tmp_path / "b", checkpointable_name="params")
        ocp.save(tmp_path / "d", state())
    told = r'item "state" is not registered.*"pretrained".*Orbax\'s own format'
    with osl.context("pretrained"), pytest.warns(UserWarning, match=told):
        ocp.save(tmp_path / "e", state())
    assert writes_ocdbt(tmp_path / "misspelt" / "opt")
    assert writes_ocdbt(tmp_path / "e")


def test_a_context_on_the_base_of_a_programs_own(tmp_path):
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    base = ocp.Context()
    base.pytree.loading.partial_load = True
    base.checkpointables.registry = registry
    items = {"state": state(), "config": {"lr": 1}}
    with base, osl.context("state", base=base):  # also while the other is active
        ocp.save_checkpointables(tmp_path / "a", items)
        loaded = ocp.load_checkpointables(tmp_path / "a", {"state": {"w": ...}, "config": None})
    assert loaded == {"state": {"w": ...}, "config": {"lr": 1}}
    assert not writes_ocdbt(tmp_path / "a")
    with base:  # which stays as it was
        ocp.save_checkpointables(tmp_path / "b", items)
    assert writes_ocdbt(tmp_path / "b" / "state")


def test_contexts_add_up(tmp_path):
    context = osl.context("opt", base=osl.context("state"))
    with context:
        ocp.save_checkpointables(tmp_path / "a", {"state": state(), "opt": state()})
        ocp.save_checkpointables(tmp_path / "b", {"state": state(), "other": state()})
    assert not writes_ocdbt(tmp_path / "a")
    assert writes_ocdbt(tmp_path / "b" / "other")
    with pytest.raises(ValueError, match=r"base must be an `ocp\.Context`, not 'state'"):
        osl.context("opt", base="state")


def test_a_program_whose_save_was_refused_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, program_path("save_v1_refused.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "refused\n" * 2
    assert "never awaited" not in done.stderr


@pytest.mark.parametrize("is_layout", [False, True], ids=["handler", "layout"])
def test_a_program_whose_training_step_failed_ends(tmp_path, is_layout):
    """Also where it is at its end before Orbax has made the folders of the step."""
    done = subprocess.run(
        [sys.executable, program_path("save_v1_step_fails.py"), str(tmp_path), str(is_layout)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout == "refused\n"
    assert done.returncode == 0


@pytest.mark.parametrize("names", [("state", "opt"), ("opt", "state")])
def test_other_items_stay_orbaxs_beside_a_registered_one(tmp_path, names):
    trees = {name: state() for name in names} | {"data": Counter(3), "config": {"lr": "x"}}
    context = osl.context("opt")
    with context:
        for number in range(3):
            ocp.save_checkpointables(tmp_path / str(number), trees)
        ocp.save_checkpointables(tmp_path / "data", {"data": Counter(3)})
    with ocp.training.Checkpointer(tmp_path / "run", context=context) as training:
        training.save_checkpointables(0, trees, metrics={"loss": 0.5})
    for path in (tmp_path / "0", tmp_path / "2", tmp_path / "run" / "0"):
        assert opened(path / "opt").keys() == {"w"}
        assert writes_ocdbt(path / "state")
        with ocp.Context():  # Orbax's own, which finds its handler by the name that is recorded
            same(ocp.load(path, state(1), checkpointable_name="state"), state())


StorageOptions = ocp.options.ArrayOptions.Saving.StorageOptions


def in_float16(path, leaf):
    return StorageOptions(dtype=np.float16) if "half" in jax.tree_util.keystr(path) else None


def in_orbaxs_order(path, leaf):
    return StorageOptions(dtype=None, chunk_byte_size=1024)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, "float32", np.int32])
@pytest.mark.parametrize("creator", [None, in_float16, in_orbaxs_order])
def test_storage_dtypes_are_those_of_orbax(tmp_path, dtype, creator):
    tree = {
        "w": place(VALUES / 3, P("x", "y")),
        "half": {"a": place(VALUES / 7, P("x"))},
        "host": {"half": VALUES / 9, "ints": np.arange(5)},
        "ints": place(np.arange(8, dtype=np.int32), P("x")),
    }

    def saved(context, path, tree):
        context.array.saving.storage_options.dtype = dtype
        context.array.saving.scoped_storage_options_creator = creator
        with context:
            ocp.save(path, tree)
            return ocp.load(path, ocp.metadata(path))

    stored = saved(handler_context(), tmp_path / "a", tree | {"step": 3})
    assert stored.pop("step") == 3
    same(stored, saved(ocp.Context(), tmp_path / "b", tree))


def test_storage_dtypes_in_a_training_step(tmp_path, route):
    context = route()
    context.array.saving.storage_options.dtype = jnp.bfloat16
    with ocp.training.Checkpointer(tmp_path, context=context) as training:
        training.save(0, {"w": VALUES / 3, "key": jax.random.key(0), "step": 70_001})
        loaded = training.load(0)
    assert_same_bits(loaded["w"], (VALUES / 3).astype(jnp.bfloat16))
    assert loaded["step"] == 70_001
    assert loaded["key"] == jax.random.key(0)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float6_e2m3fn", "uint4"])
def test_storage_dtypes_are_of_whole_bytes(tmp_path, route, layout, dtype):
    context = route()
    context.array.saving.storage_options.dtype = dtype
    found = f"expected: float32, or a dtype of whole bytes, found: {dtype}"
    write = osl.WriteOptions(layout=layout)
    refused = pytest.raises(osl.UnsupportedDtypeError, match=found)
    with context, osl.using(write=write), refused as caught:
        ocp.save(tmp_path / "a", {"b": {"w": place(VALUES, P("x"))}})
    assert caught.value.tensor == "b.w"


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("safetensors", "read_chunk_bytes", 0),
        ("memory", "read_concurrent_bytes", -1),
        ("memory", "write_concurrent_bytes", 0),
        ("memory", "transfer_concurrent_bytes", 0.5),
        ("array.saving", "storage_options", StorageOptions(dtype="none such")),
        ("array.saving", "storage_options", np.float32),
        ("array.saving", "scoped_storage_options_creator", lambda path, leaf: np.float32),
    ],
)
def test_options_of_orbaxs_context_are_refused_by_name(tmp_path, route, group, name, value):
    with route():
        ocp.save(tmp_path / "a", state())
    context = route()
    setattr(operator.attrgetter(group)(context), name, value)
    run = functools.partial(ocp.save, tmp_path / "b", state())
    if name.startswith("read"):
        run = functools.partial(ocp.load, tmp_path / "a")
    with context, pytest.raises(ValueError, match=f"context.{group}.{name} "):
        run()


def partly_deleted(root, orders):
    """Restores the state of a step after each file that its deletion has removed."""
    whole = root / "0"
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    rng = random.Random(0)
    for number in range(orders):
        rng.shuffle(files)
        copy = root.parent / f"{root.name} {number}"
        shutil.copytree(root, copy)
        for file in files:
            (copy / "0" / file).unlink()
            records = ["_CHECKPOINT_METADATA", "orbax.checkpoint", "state/_METADATA"]
            yield copy, any((copy / "0" / record).exists() for record in records)


@pytest.mark.parametrize("layout", every(2, ["sharded", "hf"]))
def test_a_step_that_is_partly_deleted_is_never_another_tree(tmp_path, layout):
    """Orbax lists such a step, and its own handlers fail with it, too."""
    write = osl.WriteOptions(layout=layout, max_file_bytes=300)
    with (
        osl.using(write=write),
        ocp.training.Checkpointer(tmp_path / "run", context=handler_context()) as training,
    ):
        training.save(0, state())
    outcomes = collections.Counter()
    for root, has_records in partly_deleted(tmp_path / "run", 5):
        for context in (handler_context(), layout_context(osl.SafetensorsLayout)):
            if not has_records:
                continue  # nothing tells it from a folder that others made
            with ocp.training.Checkpointer(root, context=context) as training:
                for abstract in (None, state()):
                    try:
                        same(training.load(0, abstract), state())
                        outcomes["same"] += 1
                    except (osl.SafetensorsLayoutError, ocp.errors.InvalidLayoutError, KeyError):
                        outcomes["refused"] += 1
    assert outcomes["same"] >= 10
    assert outcomes["refused"] >= 40


def test_what_a_partly_deleted_step_says(tmp_path):
    with ocp.training.Checkpointer(tmp_path, context=handler_context()) as training:
        training.save(0, state())
        training.save(1, state(1))
        (tmp_path / "1" / "state" / "orbax_safetensors_layout.json").unlink()
        with pytest.raises(
            osl.InvalidManifestError,
            match=r"a part of the checkpoint is gone.*1/state.*restore another step",
        ):
            training.load(1)
        same(training.load(0), state())


MANIFESTS = ("orbax_safetensors_layout.json", "manifest.ocdbt")  # ours, Orbax's
DATA = ("*.safetensors", "d", "ocdbt.process_0")
LEFT = {  # of a step by an interrupted deletion: what is gone, in any order
    "no record of the step": ["_CHECKPOINT_METADATA"],
    "no mark of success": ["commit_success.txt", "state/commit_success.txt"],
    "no files of the step": ["*.txt", "_CHECKPOINT_METADATA"],
    "no item": ["state"],
    "an empty item": ["state/*"],
    "the record of the step": ["state", "*.txt"],
    "an empty step": ["*"],
    "no metadata of the item": ["state/_METADATA"],
    "no manifest": [f"state/{name}" for name in MANIFESTS],
    "no data": [f"state/{name}" for name in DATA],
    "the metadata of the item": [f"state/{name}" for name in (*MANIFESTS, *DATA, "*.txt")],
    "the manifest": [f"state/{name}" for name in ("_METADATA", *DATA)],
}


def remove(step, patterns):
    for path in [path for pattern in patterns for path in step.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own load
@pytest.mark.parametrize("left", every(3, LEFT))
def test_what_is_left_of_a_step_is_read_where_orbax_reads_its_own(tmp_path, left):
    layout = functools.partial(layout_context, osl.SafetensorsLayout)
    read = {}
    for kind, make in {"orbax": ocp.Context, "handler": handler_context, "layout": layout}.items():
        root = tmp_path / kind
        with ocp.training.Checkpointer(root, context=make()) as training:
            training.save(0, state())
            training.save(1, state(1))
        remove(root / "1", LEFT[left])
        with ocp.training.Checkpointer(root, context=make()) as training:
            assert training.latest.step == 1
            for abstract in (None, state()):
                error = None
                try:
                    same(training.load(None, abstract), state(1))
                except Exception as problem:
                    error = problem
                read[kind] = error is None
                if error is not None and kind != "orbax":
                    assert isinstance(error, osl.SafetensorsLayoutError)
                    assert re.search(f"{root / '1'}.*restore another step", str(error))
            same(training.load(0), state())
            training.save(2, state(2))
            same(training.load(), state(2))
    assert read["handler"] >= read["orbax"]
    assert read["layout"] >= read["orbax"]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_file_that_is_gone_is_no_incompatible_handler(tmp_path, has_manifest):
    """Orbax names the handler only, where an error comes after a load has begun."""
    mapping = None if has_manifest else osl.Mapping([osl.rule("{x}", osl.tensor("{x}"))])
    tree = {"a": VALUES, "b": VALUES, "c": VALUES}
    write = osl.WriteOptions(max_file_bytes=300)
    with (
        osl.using(write=write, mapping=mapping),
        ocp.training.Checkpointer(tmp_path, context=handler_context()) as training,
    ):
        training.save(0, tree)
        files = sorted((tmp_path / "0" / "state").glob("*.safetensors"))
        assert len(files) == 3
        for file in files:
            file.unlink()
            with pytest.raises(osl.SafetensorsLayoutError, match="0/state"):
                training.load(0, tree)
