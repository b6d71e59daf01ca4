import json

import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as v1

import orbax_safetensors_layout as osl

osl.install()
restored = [v0.Checkpointer(osl.SafetensorsCheckpointHandler()).restore("hf://org/model")]
for layout in ("safetensors", "auto"):
    with v1.Context(checkpoint_layout=layout):
        restored.append(v1.load("hf://org/model"))
        restored.append(v1.metadata("hf://org/model").metadata)
print(json.dumps([sorted(tree) for tree in restored]))
