import os
import time

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from cluster_trees import args_v0, manager_v0, tree_of

import orbax_safetensors_layout as osl


def main(root, api, guilty):
    manager = manager_v0(root) if api == "v0" else None

    def save(number, tree):
        if api == "v0":
            manager.save(number, args=args_v0(tree))
            manager.wait_until_finished()
        else:
            with osl.context("state"):
                ocp.save_async(f"{root}/{number}", tree).result()

    save(0, tree_of(0))
    tree = tree_of(1)
    if jax.process_index() == guilty:
        tree["bad"] = np.array(["text"])
    begin = time.monotonic()
    try:
        save(1, tree)
        error = None
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin
    save(2, tree_of(2))
    steps = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    return {"error": error, "seconds": seconds, "steps": steps}
