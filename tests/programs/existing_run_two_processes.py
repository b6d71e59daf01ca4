import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(root, use_ocdbt):
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    placed = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y")), P("y", "x"))

    def state(step):
        w = jax.make_array_from_callback((8, 8), placed, lambda at: values[at] + step)
        return {"w": w, "step": step}

    abstract = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=placed), "step": 0}

    def right(restored, step):
        w = restored["w"]
        return (
            w.sharding == placed
            and restored["step"] == step
            and all(np.array_equal(s.data, values[s.index] + step) for s in w.addressable_shards)
        )

    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    orbaxs = ocp.StandardCheckpointHandler(use_ocdbt=use_ocdbt)
    with ocp.CheckpointManager(root, options=options, item_handlers=orbaxs) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    registry = osl.handler_registry("default")
    results = []
    with ocp.CheckpointManager(root, options=options, handler_registry=registry) as manager:
        assert manager.latest_step() == 2
        assert manager.item_metadata(2)["w"].shape == (8, 8)
        results.append(right(manager.restore(2), 2))
        manager.save(3, args=ocp.args.StandardSave(state(3)))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2, 3]
        for step in (1, 2, 3):
            args = ocp.args.StandardRestore(abstract)
            results.append(right(manager.restore(step, args=args), step))
    return results
