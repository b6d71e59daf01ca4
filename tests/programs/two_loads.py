import threading

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from recording import recording

import orbax_safetensors_layout as osl

TURNS = 8


def main(paths):
    """Loads two checkpoints at once, by `load_async` and in threads; returns what was wrong."""
    sharding = NamedSharding(mesh_of(x=-1), P())
    expected = [safetensors.numpy.load_file(path) for path in paths]
    trees = [
        {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for n, x in tensors.items()}
        for tensors in expected
    ]
    # So slow by the model that what all need is exchanged.
    options = osl.ReadOptions(
        bandwidth_bytes_per_second={"local": 1e3}, memory_budget_bytes=1 << 16, timeout_seconds=60
    )
    wrong = []

    def compare(number, loaded):
        for name, array in loaded.items():
            for shard in array.addressable_shards:
                if np.asarray(shard.data).tobytes() != expected[number][name].tobytes():
                    wrong.append(f"{number} {name}")

    def load(number):
        compare(number, osl.load(paths[number], trees[number], options=options))

    def begin(number):  # Orbax 0.12 gives the barriers of two loads at once one name
        multiprocessing = ocp.options.MultiprocessingOptions(
            barrier_sync_key_prefix=f"load{number}"
        )
        layout = osl.SafetensorsLayout
        with ocp.Context(checkpoint_layout=layout, multiprocessing_options=multiprocessing):
            return ocp.load_async(paths[number], trees[number])

    for turn in range(TURNS):
        with osl.using(read=options):
            for number, response in enumerate([begin(0), begin(1)]):
                compare(number, response.result())
        numbers = [0, 1] if (turn + jax.process_index()) % 2 else [1, 0]
        threads = [threading.Thread(target=load, args=[number]) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with recording() as storage:
        load(0)
    return wrong, sum(stop - start for _, start, stop in storage.tensor_ranges())
