"""The shares of all processes of a cluster in what they read once and exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Ints
from orbax_safetensors_layout.sharding import Replicas

from .array_source import StoredSource
from .cost import Cost
from .exchange_plan import ExchangePolicy
from .shared_leaves import SharedLeaves


def plan_cluster_exchange(
    entries: Sequence[TensorEntry],
    class_of: Sequence[int],
    replicas: Sequence[Replicas],
    exchange: ExchangePolicy,
    holders: Sequence[npt.NDArray[np.bool_]],
    request_bytes: int,
) -> tuple[set[int], tuple[Cost, ...]]:
    """Plan the exchange of tensors as stored; replicas by class, which `class_of` has for each.

    `holders` says of each class which processes hold tensors of it. Returns the classes that are
    exchanged, and what that adds to the cost of each process, where requests and memory are
    estimates; none where nothing is exchanged.
    """
    processes = holders[0].size if holders else 0
    stored_bytes = sum(entry.nbytes for entry in entries)
    if not processes or not exchange.load_may_gain(stored_bytes, processes):
        return set(), ()
    leaves = SharedLeaves(exchange, merges=True)
    for number, (entry, of_class) in enumerate(zip(entries, class_of, strict=True)):
        if 0 in entry.shape:
            continue
        source, of_leaf = StoredSource(entry), replicas[of_class]
        strides = source.strides(of_leaf.boxes[0])
        fields = source.shape, strides, source.dtype, source.place
        leaves.add(number, of_leaf, *fields, stored_bytes=source.nbytes)
    stages = exchange.plan(leaves, stored_bytes, processes)
    items = [item for stage in stages for step in stage for lane in step.lanes for item in lane]
    box_bytes = {leaf: entries[leaf].nbytes // len(boxes) for leaf, boxes, _ in items}
    exchanged = {class_of[leaf] for leaf in box_bytes}
    tensors, read, requests, received, peak = np.zeros((5, processes), np.int64)
    gathered, rounds, programs = np.zeros((3, processes), np.int64)
    compiled: dict[int, npt.NDArray[np.bool_]] = {}  # by form: the processes that take part
    opened: dict[str, Ints] = {}
    for stage in stages:
        buffered = np.zeros(processes, np.int64)
        for step in stage:
            of_column = step.column_bytes(box_bytes)
            # The process of each device: [boxes, columns].
            owners = np.array(step.form.grid.processes)
            devices = np.bincount(owners.reshape(-1), minlength=processes)
            for total, each in ((read, of_column), (requests, -(-of_column // request_bytes))):
                weights = np.broadcast_to(each, owners.shape).reshape(-1)
                total += np.bincount(owners.reshape(-1), weights, processes).astype(np.int64)
            received += devices * step.form.device_received_bytes
            gathered += devices * step.form.gathered_bytes
            rounds += devices > 0
            compiled[id(step.form)] = devices > 0
            buffered += devices * step.form.slot_bytes
            for number, lane in enumerate(step.lanes):
                columns = slice(number * step.form.parts, (number + 1) * step.form.parts)
                readers = np.unique(owners[:, columns][:, of_column[columns] > 0])
                tensors[readers] += len(lane)
                for file in {entries[item.leaf].file for item in lane}:
                    opened.setdefault(file, np.zeros(processes, np.int64))[readers] = 1
        peak = np.maximum(peak, buffered)
    for file, number in {(entry.file, n) for entry, n in zip(entries, class_of, strict=True)}:
        if file in opened and number not in exchanged:
            opened[file][holders[number]] = 0  # for what they read alone they open it anyway
    files = sum(opened.values(), np.zeros(processes, np.int64))
    for taking_part in compiled.values():
        programs += taking_part
    written = np.zeros(processes, np.int64)
    moved = received, gathered, rounds, programs
    rows = np.stack([tensors, read, read, requests, files, peak, written, *moved], 1).tolist()
    costs = tuple(Cost(*row) for row in rows) if stages else ()
    return exchanged, costs
