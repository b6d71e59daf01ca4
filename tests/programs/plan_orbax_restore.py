"""Restores what Orbax saved, on several processes; returns the bytes that TensorStore read."""

import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_READ = "/tensorstore/kvstore/file/bytes_read"


def main(path, mesh, specs):
    devices = np.array(jax.devices()).reshape([*mesh.values()])
    named = functools.partial(NamedSharding, Mesh(devices, tuple(mesh)))
    targets = {
        name: jax.ShapeDtypeStruct(
            shape, dtype, sharding=named(PartitionSpec(*(tuple(p) or None for p in spec)))
        )
        for name, (shape, dtype, spec) in specs.items()
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    args = ocp.checkpoint_utils.construct_restore_args(targets)
    with ocp.Checkpointer(handler) as checkpointer:
        before = bytes_read()
        checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=targets, restore_args=args))
        return bytes_read() - before


def bytes_read():
    metrics = ts.experimental_collect_matching_metrics(_READ)
    return sum(value["value"] for metric in metrics for value in metric["values"])
