"""Costs of a save for every process of a cluster, from the one plan that all of them share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_safetensors_layout.format import NewTensor, lay_out, piece_file_prefix
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.sharding import GlobalShards, MeshShape, Partition, Spec

from .cluster_costs import ClusterTensor
from .cost import Cost
from .writes import LeafWrite, WritePlan, plan_writes


def plan_cluster_writes(
    leaves: Sequence[ClusterTensor], grid: MeshShape, options: WriteOptions
) -> tuple[Cost, ...]:
    """Return the cost of each process: its `WritePlan.cost`, but for the headers of pieces.

    Raises:
        ValueError: A spec does not fit its tensor.
    """
    held: dict[tuple[tuple[int, ...], Spec], GlobalShards] = {}
    writes = []
    for entry, spec in leaves:
        key = (entry.shape, spec)
        if key not in held:
            held[key] = Partition.of(entry.shape, spec, grid).held()
        tensor = NewTensor(entry.name, entry.dtype, entry.shape)
        writes.append(LeafWrite(tensor, entry.dtype.numpy, held[key]))
    plan = plan_writes(writes, options=options, process_count=grid.processes)
    return _costs(plan, {"format": "pt", **options.metadata})


def _costs(plan: WritePlan, metadata: dict[str, str]) -> tuple[Cost, ...]:
    zeros = [np.zeros(plan.process_count, np.int64) for _ in range(5)]
    tensors, needed, read, written, files = zeros
    pieced = {} if plan.stored is None else plan.stored.tensors
    for name, owner, members in plan.files:
        files[owner] += 1
        written[owner] += lay_out(name, members, metadata).size
        gathered = sum(tensor.nbytes for tensor in members if tensor.name in pieced)
        read[owner] += gathered
        needed[owner] += sum(tensor.nbytes for tensor in members) - gathered
        tensors[owner] += sum(bool(tensor.nbytes) for tensor in members)
    if plan.stored is not None:
        owners = _piece_owners(plan)
        files[list(set(owners))] += 1
        # Of each class: elements and tensors of each process, per tensor.
        elements = np.zeros((len(plan.stored.classes), plan.process_count), np.int64)
        for number, boxes in enumerate(plan.stored.classes):
            for box in boxes:
                elements[number, owners[box.file]] += box.box.size
        for leaf in plan.leaves:
            stored = pieced.get(leaf.tensor.name)
            if stored is None:
                continue
            bits = 8 if leaf.tensor.dtype.packed else leaf.tensor.dtype.bits
            nbytes = elements[stored.number] * bits // 8
            needed += nbytes
            written += nbytes
            tensors += (nbytes > 0) & (not plan.files)
    columns = np.stack([tensors, needed, read, written, files], 1).tolist()
    return tuple(
        Cost(tensors=t, needed_bytes=n, read_bytes=r, written_bytes=w, files=f)
        for t, n, r, w, f in columns
    )


def _piece_owners(plan: WritePlan) -> list[int]:
    """Return the process that writes each file of pieces."""
    assert plan.stored is not None
    owners = {piece_file_prefix(process): process for process in range(plan.process_count)}
    prefixes = [name.rpartition("/")[2].rpartition("-of-")[0] for name in plan.stored.files]
    return [owners[f"{prefix}-of-"] for prefix in prefixes]
