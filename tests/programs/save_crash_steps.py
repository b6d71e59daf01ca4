import contextlib
import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
from checkpoints import values_of
from cluster_trees import is_same
from fork_server import kill_at, say
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from limits import full_disk

import orbax_safetensors_layout as osl

jax.config.update("jax_enable_x64", True)
for name in osl.__all__:
    getattr(osl, name)  # imported now, not in every child

SPECS = {"rows": P("x"), "columns": P(None, "x"), "all": P(), "scalar": P(), "empty": P()}


def tree_of(step):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, SPECS[name]), value.__getitem__
        )
        for name, value in values_of(step).items()
    }
    return {"params": tree, "step": step}


class V0:
    def __init__(self, root, write, is_async):
        self._manager = ocp.CheckpointManager(
            root,
            handler_registry=osl.handler_registry("state", write=write),
            options=ocp.CheckpointManagerOptions(
                enable_async_checkpointing=is_async, max_to_keep=2
            ),
        )
        self.latest = self._manager.latest_step
        self.close = self._manager.close

    def restore(self, step):
        return self._manager.restore(step)["state"]

    def save(self, step, tree):
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(tree)))
        self._manager.wait_until_finished()


class V1:
    def __init__(self, root, write, is_async):
        self._is_async = is_async
        self._using = functools.partial(osl.using, write=write)
        self._training = ocp1.training.Checkpointer(
            root,
            context=osl.context("state"),
            preservation_policy=ocp1.training.preservation_policies.LatestN(2),
        )
        self.close = self._training.close

    def latest(self):
        return None if self._training.latest is None else self._training.latest.step

    def restore(self, step):
        return self._training.load(step)

    def save(self, step, tree):
        with self._using():
            if self._is_async:
                self._training.save_async(step, tree).result()
            else:
                self._training.save(step, tree)


def main(root, api, layout, kill, step, index=0, count=1, port=0, full=False, heartbeat=100):
    if count > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            count,
            index,
            initialization_timeout=60,
            heartbeat_timeout_seconds=heartbeat,
        )
    api, _, mode = api.partition(" ")
    write = osl.WriteOptions(layout=layout, max_file_bytes=1000)
    make = functools.partial({"v0": V0, "v1": V1}[api], root, write, mode == "async")
    calls = kill_at(kill)
    say("begin")
    if full:
        fill_disk(make(), step)
    with contextlib.closing(make()) as manager:
        latest = manager.latest()
        same = latest is None or is_same(manager.restore(latest), tree_of(latest))
        say({"latest": latest, "same": same})
        manager.save(step, tree_of(step))
        say("saved")
    say(calls[0])
    if count > 1:
        jax.distributed.shutdown()  # together: who is left when process 0 has gone is ended


def fill_disk(manager, step):
    with full_disk(1000):
        try:
            manager.save(step, tree_of(step))
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
    with contextlib.suppress(osl.SafetensorsLayoutError):  # v1 raises it once more
        manager.close()
