import errno
import logging
import os
import time

import jax
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl

logging.disable()  # a pipe holds less than Orbax logs
mkdir = os.mkdir
folders_first = v0.AsyncOptions(create_directories_asynchronously=False)


def fail(broken):
    def failing(path, *args, **kwargs):
        path = os.fspath(path)
        is_item = os.path.basename(path).startswith("state")
        if "orbax-checkpoint-tmp" in path and is_item == (broken == "item"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return mkdir(path, *args, **kwargs)

    os.mkdir = failing


def manager(root, **options):
    manager = v0.CheckpointManager(
        root,
        handler_registry=osl.handler_registry("state"),
        options=v0.CheckpointManagerOptions(**options),
    )

    def save(number, tree):
        manager.save(number, args=v0.args.Composite(state=v0.args.StandardSave(tree)))
        manager.wait_until_finished()

    return save


def checkpointer(root, kind=v0.Checkpointer, **options):
    with_handler = kind(osl.SafetensorsCheckpointHandler(), **options)

    def save(number, tree):
        with_handler.save(f"{root}/{number}", args=osl.SafetensorsSave(tree))
        if kind is v0.AsyncCheckpointer:
            with_handler.wait_until_finished()

    return save


def layout(_):
    context = ocp.Context()
    context.checkpoint_layout = osl.SafetensorsLayout
    return context


def v1(root, context=osl.context, in_background=True):
    context = context("state")
    context.asynchronous.create_directories_asynchronously = in_background

    def save(number, tree):
        with context:
            ocp.save(f"{root}/{number}", tree)

    return save


def training(root, context=osl.context):
    return ocp.training.Checkpointer(root, context=context("state")).save


WAYS = {
    "manager": manager,
    "manager, synchronous": lambda root: manager(root, enable_async_checkpointing=False),
    "manager, folders first": lambda root: manager(root, async_options=folders_first),
    "checkpointer": checkpointer,
    "checkpointer, in background": lambda root: checkpointer(root, v0.AsyncCheckpointer),
    "checkpointer, folders first": lambda root: checkpointer(
        root, v0.AsyncCheckpointer, async_options=folders_first
    ),
    "v1": v1,
    "v1, layout": lambda root: v1(root, layout),
    "v1, folders first": lambda root: v1(root, in_background=False),
    "training": training,
    "training, layout": lambda root: training(root, layout),
}


def main(root):
    placed = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    w = jax.make_array_from_callback((8,), placed, lambda at: np.arange(8.0)[at])
    results = {}
    for name, way in WAYS.items():
        for broken in ("step",) if name.startswith("checkpointer") else ("step", "item"):
            place = f"{root}/{name} {broken}"
            save = way(place)
            save(0, {"w": w})
            if jax.process_index() == 0:
                fail(broken)
            begin = time.monotonic()
            try:
                save(1, {"w": w})
                error = None
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
            seconds = time.monotonic() - begin
            os.mkdir = mkdir
            if not name.startswith("training"):  # which reports an error once more
                save(2, {"w": w})
            results[f"{name}, {broken}"] = error, seconds
    return results
