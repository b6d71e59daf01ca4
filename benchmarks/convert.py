"""A conversion of a large checkpoint there and back, within a hard limit of memory.

    python benchmarks/convert.py FOLDER --gigabytes 24

makes a checkpoint of Llama's shapes in sparse files, a sixteenth of them random bits and the rest
zeros; converts it to Orbax, cut for 16 devices; restores that by Orbax alone onto 16 and onto 8
devices, some tensors at a time; converts it back; and compares every bit with the first files. Each
conversion runs in a memory control group of 3 GB, page cache included, where the system lets us
make one; otherwise a watch kills it as soon as its resident memory is larger.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import machine
import numpy as np
from deepseek import Tensor, make_index

_LAYER = {
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "mlp.gate_proj.weight": (14_336, 4096),
    "mlp.up_proj.weight": (14_336, 4096),
    "mlp.down_proj.weight": (4096, 14_336),
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
}
_STRIDE, _RANDOM = 1 << 20, 1 << 16
_CHUNK = 64 << 20
_GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")  # version 1, version 2


def tensors(nbytes: int) -> Iterator[Tensor]:
    """The embedding, and layers until there are so many bytes."""
    yield Tensor("model.embed_tokens.weight", (128_256, 4096), "BF16")
    done, layer = 128_256 * 4096 * 2, 0
    while done < nbytes:
        for name, shape in _LAYER.items():
            tensor = Tensor(f"model.layers.{layer}.{name}", shape, "BF16")
            done += tensor.nbytes
            yield tensor
        layer += 1


def make_source(folder: Path, nbytes: int) -> int:
    """Writes the checkpoint; returns its bytes."""
    made = make_index(folder, tensors(nbytes), files=max(1, nbytes // 5_000_000_000))
    rng = np.random.default_rng(0)
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as stream:
            (header,) = struct.unpack("<Q", stream.read(8))
            for start in range(8 + header, file.stat().st_size - _RANDOM, _STRIDE):
                stream.seek(start)
                stream.write(rng.bytes(_RANDOM))
    return sum(tensor.nbytes for tensor in made)


class Limited:
    """Runs commands that may not hold more memory than a limit.

    Args:
        limit_bytes: The limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._group: Path | None = None
        for root, limit in zip(_GROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
            group = root / f"osl-benchmark-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                if (group / limit).exists():
                    (group / limit).write_text(str(limit_bytes))
                    self._group = group
                    return
                group.rmdir()

    @property
    def how(self) -> str:
        """What enforces the limit."""
        return "a watch of resident memory" if self._group is None else "a control group"

    def run(self, *command: str) -> tuple[float, int]:
        """Runs a command; returns seconds and the most bytes that were resident."""
        group = self._group

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], preexec_fn=enter)
        watch = threading.Thread(target=self._watch, args=(process,))
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.join()
        if process.returncode:
            raise SystemExit(f"{command} ended with {process.returncode}")
        return time.perf_counter() - started, usage.ru_maxrss * 1024

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = Path(f"/proc/{process.pid}/statm")
        while process.returncode is None:
            with contextlib.suppress(OSError, IndexError, ValueError):
                pages = int(status.read_text().split()[1])
                if pages * resource.getpagesize() > self._limit_bytes:
                    process.kill()
            time.sleep(0.02)

    def close(self) -> None:
        """Removes the control group."""
        if self._group is not None:
            self._group.rmdir()


RESTORE = """
import json, sys
import jax, numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
folder, source, ways, every = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, sys.argv[5])
from convert import raw
where = raw(source)
mesh = Mesh(np.array(jax.devices()[:ways]), ("fsdp",))
handler = ocp.PyTreeCheckpointHandler()
count = 0
with ocp.Checkpointer(handler) as checkpointer:
    for name in sorted(where)[::every]:
        file, start, stop, shape = where[name]
        spec = PartitionSpec("fsdp") if len(shape) > 1 else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        args = ocp.args.PyTreeRestore(
            item={name: 0}, partial_restore=True,
            restore_args={name: ocp.ArrayRestoreArgs(sharding=sharding)},
        )
        array = checkpointer.restore(folder, args=args)[name]
        assert array.sharding == sharding and array.shape == tuple(shape)
        bits = np.memmap(file, np.uint16, "r", start, tuple(shape))
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data).view(np.uint16), bits[shard.index]), name
        count += 1
assert not [name for name in sys.modules if name.startswith("orbax_safetensors")]
print(f"Orbax alone, fsdp={ways}: {count} of {len(where)} tensors equal", flush=True)
"""


def raw(folder: str) -> dict[str, tuple[str, int, int, list[int]]]:
    """File, first byte, stop and shape of each tensor, from the headers alone."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (8 + length + at for at in entry["data_offsets"])
            found[name] = (str(file), start, stop, entry["shape"])
    return found


def compare(one: Path, other: Path) -> int:
    """Compares all tensors bit by bit; returns how many there are."""
    left, right = raw(str(one)), raw(str(other))
    assert left.keys() == right.keys()
    for name, (file, start, stop, shape) in left.items():
        other_file, other_start, other_stop, other_shape = right[name]
        assert (shape, stop - start) == (other_shape, other_stop - other_start), name
        with open(file, "rb") as a, open(other_file, "rb") as b:
            a.seek(start)
            b.seek(other_start)
            for at in range(0, stop - start, _CHUNK):
                size = min(_CHUNK, stop - start - at)
                assert a.read(size) == b.read(size), name
    return len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to; what is made in it is removed")
    parser.add_argument("--gigabytes", type=float, default=24.0)
    parser.add_argument("--limit-gigabytes", type=float, default=3.0)
    parser.add_argument("--every", type=int, default=8, help="Orbax alone restores every n-th")
    parsed = parser.parse_args()
    work = parsed.folder / "osl-benchmark-convert"
    source, orbax, back = work / "source", work / "orbax", work / "back"
    limited = Limited(int(parsed.limit_gigabytes * 1e9))
    try:
        nbytes = make_source(source, int(parsed.gigabytes * 1e9))
        for key, text in machine.describe(work).items():
            print(f"{key}: {text}")
        print(f"{nbytes / 1e9:.2f} GB; limit {parsed.limit_gigabytes} GB, by {limited.how}")
        verb = ("-m", "orbax_safetensors_layout", "convert", "--quiet")
        for command in (
            (str(source), str(orbax), "--mesh", "fsdp=16"),
            (str(orbax), str(back)),
        ):
            seconds, peak = limited.run(*verb, *command)
            print(
                f"{Path(command[0]).name} -> {Path(command[1]).name}: {seconds:.1f} s,"
                f" {nbytes / seconds / 1e9:.2f} GB/s with the comparison,"
                f" at most {peak / 1e9:.2f} GB resident",
                flush=True,
            )
        for ways in (16, 8):
            flags = "--xla_force_host_platform_device_count=16"
            arguments = [str(orbax), str(source), str(ways), str(parsed.every)]
            subprocess.run(
                [sys.executable, "-c", RESTORE, *arguments, str(Path(__file__).parent)],
                env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                check=True,
            )
        print(f"{compare(source, back)} tensors equal, every bit, after the way there and back")
    finally:
        limited.close()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
