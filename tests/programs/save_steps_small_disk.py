import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def state(value, rows):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    array = np.full((rows, 1000), value, np.float32)
    return {"w": jax.make_array_from_callback(array.shape, sharding, array.__getitem__)}


def manager_of(root):
    return ocp.CheckpointManager(root, handler_registry=osl.handler_registry("default"))


def main(root):
    results = []
    manager = manager_of(root)
    manager.save(0, args=ocp.args.StandardSave(state(0, 100)))
    manager.wait_until_finished()
    try:
        manager.save(1, args=ocp.args.StandardSave(state(1, 2000)))
        manager.wait_until_finished()
    except Exception as error:
        results.append(f"{type(error).__name__}: {error}")
    with manager_of(root) as manager:
        results.append(manager.latest_step())
        restored = manager.restore(0)["w"]
        results.append(all((np.asarray(s.data) == 0).all() for s in restored.addressable_shards))
        manager.save(1, args=ocp.args.StandardSave(state(1, 100)))
        manager.wait_until_finished()
        results.append(manager.latest_step())
    return results
