"""Host memory of a large load through a mapping, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Two layers of 64 experts, a tensor each, as sparse files: 2.2 GB that take no disk.
SOURCE = """
import json, sys
from pathlib import Path
import jax, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import orbax_safetensors_layout as osl

def status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024

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
            for e in range(experts) for kind, shape in kinds.items()
        }
        write(folder / f"model-{i + 1:05}-of-00002.safetensors", shapes)
    rules = [
        osl.rule(k, osl.stack(osl.stack(osl.tensor(name % k).transpose(), over="e"), over="i"))
        for k in kinds
    ]
    mapping = osl.Mapping(rules)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P(*split))
    abstract = {
        kind: jax.ShapeDtypeStruct(fact.shape, fact.dtype, sharding=sharding)
        for kind, fact in osl.metadata(folder, mapping=mapping).items()
    }
    options = osl.ReadOptions(memory_budget_bytes=64 << 20)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    model = jax.block_until_ready(osl.load(folder, abstract, mapping=mapping, options=options))
    return sum(a.nbytes for a in model.values()), status("VmHWM") - before

split = json.loads(sys.argv[2])
load(Path(sys.argv[1]) / "warm", 8, split)
print(json.dumps(load(Path(sys.argv[1]) / "large", 64, split)))
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is asked of /proc")
@pytest.mark.parametrize("split", [[None, "x"], [None, None, "x"], [None, None, None, "x"]])
def test_stacked_experts_take_their_arrays_and_the_budget(tmp_path, split):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, str(tmp_path), json.dumps(split)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    arrays, grown = json.loads(done.stdout.splitlines()[-1])
    assert arrays > 2_000_000_000
    print(f"{split}: arrays of {arrays / 1e6:,.0f} MB, peak {(grown - arrays) / 1e6:,.1f} MB more")
    assert grown <= arrays + (64 << 20) + (64 << 20)
