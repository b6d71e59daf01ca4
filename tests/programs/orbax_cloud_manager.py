import orbax.checkpoint as ocp
from bucket_states import make_state, same
from etils import epath

import orbax_safetensors_layout as osl


def main(root, atomicity):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode(atomicity)),
    )
    registry = osl.handler_registry("default")
    path = epath.Path(root)
    with ocp.CheckpointManager(path, options=options, handler_registry=registry) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(make_state(step)))
        manager.wait_until_finished()
        kept = list(manager.all_steps())
    with ocp.CheckpointManager(path, options=options, handler_registry=registry) as manager:
        restored = manager.restore(3, args=ocp.args.StandardRestore(make_state(0)))
        return [kept, list(manager.all_steps()), same(restored, 3)]
