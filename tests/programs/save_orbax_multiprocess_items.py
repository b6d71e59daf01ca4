import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from cluster_trees import array_of
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from orbax_calls import layout_context

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.writing import host

host._on_host = lambda array: False  # stands for devices with memory of their own


def main(root, route):
    """Items that the first process alone writes, and of which it cannot hold a copy."""
    write = osl.WriteOptions(memory_budget_bytes=20_000, concurrency=1)
    items = {
        name: {"w": array_of(np.full((64, 1000), number, np.float32), mesh_of(x=-1), P())}
        for number, name in enumerate("abc")
    }
    with osl.using(write=write):
        if route == "layout":
            with layout_context(osl.SafetensorsLayout):
                ocp.save_checkpointables(f"{root}/0", items)
        else:
            with osl.context(*items):
                ocp.save_checkpointables_async(f"{root}/0", items).result()
    return [jax.process_index()]
