import errno
import os
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl

mkdir = os.mkdir


def failing(path, *args, **kwargs):
    if "state.orbax-checkpoint-tmp" in os.fspath(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
    return mkdir(path, *args, **kwargs)


def main(root, items):
    placed = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    w = jax.make_array_from_callback((8,), placed, lambda at: np.arange(8.0)[at])
    trees = {name: ocp.args.StandardSave({"w": w}) for name in items}
    args = ocp.args.Composite(**trees)
    registry = osl.handler_registry(*items)
    manager = ocp.CheckpointManager(root, handler_registry=registry)
    manager.save(0, args=args)
    manager.wait_until_finished()
    if jax.process_index() == 0:
        os.mkdir = failing
    begin = time.monotonic()
    try:
        manager.save(1, args=args)
        manager.wait_until_finished()
        error = None
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin
    os.mkdir = mkdir
    manager.reload()
    steps = list(manager.all_steps())
    manager.save(2, args=args)
    manager.wait_until_finished()
    return {"error": error, "seconds": seconds, "steps": steps, "after": manager.all_steps()}
