import sys

import orbax.checkpoint as ocp

import orbax_safetensors_layout as osl

registry = osl.handler_registry("default")
manager = ocp.CheckpointManager(sys.argv[1], handler_registry=registry)
try:
    manager.save(0, args=ocp.args.StandardSave({"a": object()}))
except osl.UnsupportedDtypeError:
    print("refused")
if sys.argv[2] == "close":
    manager.close()
