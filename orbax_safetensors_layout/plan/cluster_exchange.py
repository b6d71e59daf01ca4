"""The shares of all processes of a cluster in what they read once and exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Ints
from orbax_safetensors_layout.sharding import Replicas

from .array_source import StoredSource
from .cost import Cost
from .exchange_rounds import Exchange, plan_exchange
from .shared_leaves import SharedLeaves


def plan_cluster_exchange(
    entries: Sequence[TensorEntry],
    class_of: Sequence[int],
    replicas: Sequence[Replicas],
    exchange: Exchange,
    processes: int,
    request_bytes: int,
) -> tuple[set[int], tuple[Cost, ...]]:
    """Plan the exchange of tensors as stored; replicas by class, which `class_of` has for each.

    Returns the classes that are exchanged, and the cost of that for each process, of which requests
    and memory are estimates; none where nothing is exchanged.
    """
    leaves = SharedLeaves(exchange, merges=True)
    for number, (entry, of_class) in enumerate(zip(entries, class_of, strict=True)):
        if 0 in entry.shape:
            continue
        source, of_leaf = StoredSource(entry), replicas[of_class]
        strides = source.strides(of_leaf.boxes[0])
        fields = source.shape, strides, source.dtype, source.place
        leaves.add(number, of_leaf, *fields, stored_bytes=source.nbytes)
    stages = plan_exchange(leaves, exchange.limits, exchange.rates)
    items = [item for stage in stages for step in stage for lane in step.lanes for item in lane]
    box_bytes = {leaf: entries[leaf].nbytes // len(boxes) for leaf, boxes, _ in items}
    tensors, read, requests, exchanged, peak = np.zeros((5, processes), np.int64)
    opened: dict[str, Ints] = {}
    for stage in stages:
        staged = np.zeros(processes, np.int64)
        for step in stage:
            of_column = step.column_bytes(box_bytes)
            owners = np.array(step.grid.processes)  # [boxes, columns] the process of each device
            devices = np.bincount(owners.reshape(-1), minlength=processes)
            for total, each in ((read, of_column), (requests, -(-of_column // request_bytes))):
                weights = np.broadcast_to(each, owners.shape).reshape(-1)
                total += np.bincount(owners.reshape(-1), weights, processes).astype(np.int64)
            exchanged += devices * step.device_received_bytes
            staged += devices * step.slot_bytes
            for number, lane in enumerate(step.lanes):
                columns = slice(number * step.parts, (number + 1) * step.parts)
                readers = np.unique(owners[:, columns][:, of_column[columns] > 0])
                tensors[readers] += len(lane)
                for file in {entries[item.leaf].file for item in lane}:
                    opened.setdefault(file, np.zeros(processes, np.int64))[readers] = 1
        peak = np.maximum(peak, staged)
    files = sum(opened.values(), np.zeros(processes, np.int64))
    written = np.zeros(processes, np.int64)
    rows = np.stack([tensors, read, read, requests, files, peak, written, exchanged], 1).tolist()
    costs = tuple(Cost(*row) for row in rows) if stages else ()
    return {class_of[leaf] for leaf in box_bytes}, costs
