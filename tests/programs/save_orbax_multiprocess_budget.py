import jax
import orbax.checkpoint.experimental.v1 as ocp
from cluster_trees import args_v0, manager_v0, tree_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.writing import host

host._on_host = lambda array: False  # stands for devices with memory of their own


def main(root, api):
    write = osl.WriteOptions(memory_budget_bytes=20_000, max_file_bytes=100_000, concurrency=1)
    manager = manager_v0(root, write) if api == "v0" else None
    training = ocp.training.Checkpointer(root, context=osl.context("state"))
    for step in range(3):
        tree = tree_of(step)
        if api == "v0":
            manager.save(step, args=args_v0(tree))
            finish = manager.wait_until_finished
        elif api == "v1":
            with osl.context("state"), osl.using(write=write):
                finish = ocp.save_async(f"{root}/{step}", tree).result
        else:
            with osl.using(write=write):
                finish = training.save_async(step, tree).result
        for array in jax.tree.leaves(tree["params"]):
            array.delete()
        finish()
