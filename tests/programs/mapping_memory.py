import json
import sys
from pathlib import Path

import jax
import numpy as np
import peak_memory
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def write(path, shapes):
    header, start = {}, 0
    for name, shape in shapes.items():
        stop = start + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)


def load(folder, experts, split):
    kinds = {"up": (1408, 2048), "gate": (1408, 2048), "down": (2048, 1408)}
    name = "layers.{i}.experts.{e}.%s.weight"
    folder.mkdir()
    for i in range(2):
        shapes = {
            (name % kind).format(i=i, e=e): shape
            for e in range(experts)
            for kind, shape in kinds.items()
        }
        write(folder / f"model-{i + 1:05}-of-00002.safetensors", shapes)
    rules = [
        osl.rule(k, osl.stack(osl.stack(osl.tensor(name % k).transpose(), over="e"), over="i"))
        for k in kinds
    ]
    mapping = osl.Mapping(rules)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P(*split))
    abstract = {
        kind: jax.ShapeDtypeStruct(metadata.shape, metadata.dtype, sharding=sharding)
        for kind, metadata in osl.metadata(folder, mapping=mapping).items()
    }
    options = osl.ReadOptions(memory_budget_bytes=64 << 20)
    peak_memory.reset()
    before = peak_memory.resident_bytes()
    model = jax.block_until_ready(osl.load(folder, abstract, mapping=mapping, options=options))
    return sum(a.nbytes for a in model.values()), peak_memory.peak_bytes() - before


split = json.loads(sys.argv[2])
load(Path(sys.argv[1]) / "warm", 8, split)
print(json.dumps(load(Path(sys.argv[1]) / "large", 64, split)))
