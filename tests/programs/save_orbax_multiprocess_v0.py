import orbax.checkpoint as ocp0
from cluster_trees import args_v0, is_same, manager_v0, tree_of

import orbax_safetensors_layout as osl


def main(root, layout):
    with manager_v0(root, osl.WriteOptions(layout=layout, max_file_bytes=100_000)) as manager:
        for step in range(2):
            manager.save(step, args=args_v0(tree_of(step)))
        manager.wait_until_finished()
        restore = ocp0.args.Composite(state=ocp0.args.StandardRestore(tree_of(1)))
        return [
            manager.all_steps(),
            is_same(manager.restore(1, args=restore)["state"], tree_of(1)),
            is_same(manager.restore(0)["state"], tree_of(0)),
        ]
