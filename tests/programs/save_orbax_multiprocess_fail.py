import contextlib
import os
import time

import jax
import orbax.checkpoint.experimental.v1 as ocp
from cluster_trees import args_v0, manager_v0, tree_of
from limits import full_disk

import orbax_safetensors_layout as osl


def main(root, api, guilty):
    def save(number):
        if api == "v0":
            manager.save(number, args=args_v0(tree_of(number)))
            manager.wait_until_finished()
        else:
            with osl.context("state"):
                ocp.save_async(f"{root}/{number}", tree_of(number)).result()

    manager = manager_v0(root) if api == "v0" else None
    save(0)
    begin = time.monotonic()
    with full_disk() if jax.process_index() == guilty else contextlib.nullcontext():
        try:
            save(1)
            error = None
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin
    if manager is not None:
        manager.reload()
    steps = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    save(2)
    return {"error": error, "seconds": seconds, "steps": steps}
