import contextlib

import numpy as np
import orbax.checkpoint as ocp
from checkpoints import values_of
from fork_server import kill_at, say

import orbax_safetensors_layout as osl

for name in osl.__all__:
    getattr(osl, name)  # imported now, not in every child


def main(root, model, step, kill):
    """Saves a step with an export beside the state, as every second one has."""
    export = osl.SafetensorsCheckpointHandler(write=osl.WriteOptions(model=model))
    handlers = {"state": osl.SafetensorsCheckpointHandler(), "hf": export}
    values = {name: np.asarray(value) for name, value in values_of(step).items()}
    calls = kill_at(kill)
    say("begin")
    with contextlib.closing(ocp.CheckpointManager(root, item_handlers=handlers)) as manager:
        items = {"state": osl.SafetensorsSave({"params": values, "step": step})}
        if step % 2 == 0:
            items["hf"] = osl.SafetensorsSave(values)
        manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    say(calls[0])
