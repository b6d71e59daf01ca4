import sys

import orbax.checkpoint as ocp

import orbax_safetensors_layout as osl

root, how = sys.argv[1:]
registry = osl.handler_registry("default") if how == "registry" else None
if registry is None:
    osl.SafetensorsCheckpointHandler  # noqa: B018  # the import alone
with ocp.CheckpointManager(root, handler_registry=registry) as manager:
    step = manager.latest_step()
    print(step, manager.restore(step)["step"], manager.item_metadata(step)["w"].shape)
