"""Saves with torch's DCP in gloo processes: `python torch_dcp_save.py FOLDER`.

Below FOLDER: `RANKS-FILES` (1, 2, 4 ranks, one file or two each), `consolidated` (by torch), `one`
(each rank over the file of the others, without `save_distributed`), `model` (FSDP with tensor
parallelism) and `model.npz` (its whole tensors).
"""

import functools
import os
import sys
import traceback

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_folders import dcp_weights
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def tensor_of(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def state(ranks):
    line = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, 2)) if ranks == 4 else line
    placements = {
        "both": (grid, [Shard(0), Shard(1)] if ranks == 4 else [Shard(0)]),
        "codes": (grid, [Replicate(), Shard(0)] if ranks == 4 else [Shard(0)]),
        "column": (line, [Shard(1)]),
        "replicated": (line, [Replicate()]),
        "scalar": (line, [Replicate()]),
    }
    tensors = {name: tensor_of(array) for name, array in dcp_weights().items()}
    return {
        name: tensor
        if name == "plain"
        else distribute_tensor(tensor, *placements.get(name, (line, [Shard(0)])))
        for name, tensor in tensors.items()
    }


def save(tensors, folder, **options):
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(folder, **options))


def save_model(folder, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 10))
    if rank == 0:
        whole = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
        np.savez(f"{folder}.npz", **whole)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for part in (*model, model):
        fully_shard(part, mesh=mesh["fsdp"])
    save(model.state_dict(), folder, save_distributed=True)


def run(rank, ranks, root):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store-{ranks}", ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    tensors = state(ranks)
    numbers = {name: 1 + index % 2 for index, name in enumerate(tensors)}
    distributed = functools.partial(save, save_distributed=True)
    distributed(tensors, f"{root}/{ranks}-1")
    distributed(tensors, f"{root}/{ranks}-2", fqn_to_index_mapping=numbers)
    if ranks == 2:
        # torch 2.13 fails on integers here, and makes zeros of what has no dimensions.
        floats = {n: t for n, t in tensors.items() if t.is_floating_point() and t.dim()}
        distributed(floats, f"{root}/consolidated", enable_consolidation=True)
        save(tensors, f"{root}/one")
    if ranks == 4:
        save_model(f"{root}/model", rank)
    dist.barrier()
    dist.destroy_process_group()


def fork(function, *arguments):
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return child


if __name__ == "__main__":
    for ranks in (1, 2, 4):
        children = [fork(run, rank, ranks, sys.argv[1]) for rank in range(ranks)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(1)
