"""Restores a Hugging Face checkpoint, as it is, through three Orbax APIs into sharded `jax.Array`s.

    python examples/quickstart.py           # makes a Llama-shaped checkpoint of 200 MB
    python examples/quickstart.py PATH      # a folder of safetensors files, or one file

Eight virtual CPU devices stand for an accelerator's; nothing else changes on a real one. The exit
status is 0 only if every array has, bit by bit, the values that `safetensors` itself reads, which
has to be installed.
"""

import os

# Before the first import of jax, which reads both of them once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl

try:
    import safetensors
    import safetensors.numpy
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install safetensors") from error

Tree = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, help="a checkpoint; without it, one is made")
    path = parser.parse_args().path
    if path is not None and not osl.is_safetensors_checkpoint(path):
        parser.error(f"{path} is neither a .safetensors file nor a folder that has any")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch)) if path is None else as_folder(path, Path(scratch))
        return show(folder, Path(scratch))


def show(folder: Path, scratch: Path) -> int:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    abstract = abstract_state(folder, mesh)
    print_plan(folder, abstract)

    bytes_read = listen_to_bytes_read()
    routes: dict[str, Callable[[], Tree]] = {
        "v0  ocp.Checkpointer": lambda: restore_v0(folder, abstract),
        "v1  ocp.load": lambda: restore_v1(folder, abstract),
        "v0  ocp.CheckpointManager": lambda: restore_step(folder, abstract, scratch / "run"),
    }
    differences: list[str] = []
    print(f"\n{'restored through':25}  seconds  {'bytes read':>14}  same bits as safetensors")
    for route, restore in routes.items():
        bytes_read.clear()
        begin = time.perf_counter()
        restored = jax.block_until_ready(restore())
        seconds = time.perf_counter() - begin
        wrong = compare(folder, abstract, restored)
        del restored  # before the next route needs the memory
        verdict = f"{len(abstract) - len(wrong)} of {len(abstract)} tensors"
        print(f"{route:25}  {seconds:7.2f}  {sum(bytes_read):14,}  {verdict}", flush=True)
        differences += [f"{route}: {name}" for name in wrong]
    for difference in differences:
        print(f"DIFFERENT  {difference}", file=sys.stderr)
    return 1 if differences else 0


# ---- What is wanted: a tree of shapes, dtypes and shardings --------------------------------------


def abstract_state(folder: Path, mesh: Mesh) -> Tree:
    """One leaf a tensor, from the headers alone. A model's own nested tree would do as well.

    With a model at hand, `jax.eval_shape` gives the shapes and dtypes, and only the shardings are
    added here. Leaves are matched to tensors by their dotted key paths.
    """
    return {
        name: abstract_leaf(tensor, mesh)
        # A leaf that JAX cannot hold is given as it is: without a sharding it means a numpy array.
        if jax_holds(tensor.dtype)
        else tensor
        for name, tensor in osl.metadata(folder).items()
    }


def abstract_leaf(tensor: osl.TensorMetadata, mesh: Mesh) -> jax.ShapeDtypeStruct:
    # The first dimension over "fsdp", the second over "tensor", where they divide; else replicated.
    spec = PartitionSpec(
        *(
            axis if size % mesh.shape[axis] == 0 else None
            for size, axis in zip(tensor.shape, mesh.axis_names, strict=False)
        )
    )
    return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=NamedSharding(mesh, spec))


@functools.cache
def jax_holds(dtype: np.dtype) -> bool:
    """Not 64-bit numbers unless `jax_enable_x64` is set, nor float6 before jax 0.12."""
    try:
        return jax.device_put(np.zeros(1, dtype)).dtype == dtype
    except (TypeError, jax.errors.JaxRuntimeError):
        return False


# ---- The three standard ways to restore it -------------------------------------------------------


def restore_v0(folder: Path, abstract: Tree) -> Tree:
    with ocp.Checkpointer(osl.SafetensorsCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder, args=osl.SafetensorsRestore(abstract))


def restore_v1(folder: Path, abstract: Tree) -> Tree:
    osl.install()  # once a process: "safetensors" now means this package's layout
    context = ocp_v1.Context()
    context.checkpoint_layout = "safetensors"
    with context:
        return ocp_v1.load(folder, abstract)


def restore_step(folder: Path, abstract: Tree, root: Path) -> Tree:
    # Step 0 of a new run is the published folder, linked under a name of its own: nothing is copied
    # or converted, and later steps are saved under another name with Orbax's own handlers. When the
    # manager deletes step 0, it deletes the link.
    (root / "0").mkdir(parents=True)
    (root / "0" / "pretrained").symlink_to(folder)
    (root / "0" / "_CHECKPOINT_METADATA").write_text("{}")  # optional: Orbax warns without it
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(pretrained=osl.SafetensorsRestore(abstract))
        return manager.restore(manager.latest_step(), args=args).pretrained


# ---- What it costs -------------------------------------------------------------------------------


def print_plan(folder: Path, abstract: Tree) -> None:
    """The plan is made from the headers: nothing has been read yet when this is printed."""
    plan = osl.plan_load(folder, abstract)
    print(f"tensor\n{'    shape':18}  {'sharding':16}  {'bytes needed':>14}  {'bytes read':>14}")
    for name, needed, read in plan.by_tensor():
        shape = f"    {list(abstract[name].shape)}"
        print(f"{name}\n{shape:18}  {describe(abstract[name]):16}  {needed:14,}  {read:14,}")
    cost = plan.cost()
    print(f"total\n{'':18}  {'':16}  {cost.needed_bytes:14,}  {cost.read_bytes:14,}\n")
    print(textwrap.fill(f"Plan: {cost}", 80))


def describe(leaf: Any) -> str:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return "numpy array"
    axes = ", ".join(str(axis) for axis in leaf.sharding.spec)
    return "replicated" if leaf.sharding.is_fully_replicated else f"({axes})"


def listen_to_bytes_read() -> list[int]:
    """Each load reports what it read through `jax.monitoring`, as Orbax's own reader does."""
    found: list[int] = []

    def listen(event: str, value: float, **_: Any) -> None:
        if event == "/jax/orbax/read/safetensors/bytes_read":
            found.append(int(value))

    jax.monitoring.register_scalar_listener(listen)
    return found


# ---- Is it right? --------------------------------------------------------------------------------


def compare(folder: Path, abstract: Tree, restored: Tree) -> list[str]:
    """Names of the tensors that are not what was asked for."""
    right = {
        name
        for name, expected in read_with_safetensors(folder)
        if name in restored and is_as_asked(restored[name], abstract[name], expected)
    }
    return sorted((set(abstract) | set(restored)) - right)


def is_as_asked(array: Any, leaf: Any, expected: np.ndarray) -> bool:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return isinstance(array, np.ndarray) and same_bits(array, expected)
    return array.sharding == leaf.sharding and all(
        same_bits(np.asarray(shard.data), expected[shard.index])
        for shard in array.addressable_shards
    )


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Not `==`: a NaN differs from itself, and -0.0 equals 0.0."""
    return (found.dtype, found.shape, found.tobytes()) == (
        expected.dtype,
        expected.shape,
        expected.tobytes(),
    )


def read_with_safetensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, one file after the other, as `safetensors` reads it.

    `deserialize` gives plain bytes, for all dtypes of the format; `safetensors.numpy` refuses
    float8 and narrower ones.
    """
    tensors = osl.metadata(folder)
    for file in sorted({tensor.file for tensor in tensors.values()}):
        for name, stored in safetensors.deserialize(Path(file).read_bytes()):
            if name in tensors:
                yield name, as_array(stored["data"], stored["shape"], tensors[name].dtype)


def as_array(data: bytes, shape: list[int], dtype: np.dtype) -> np.ndarray:
    count = math.prod(shape)
    if len(data) < count * dtype.itemsize:  # float4 and float6 share bytes in the file
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        data = np.packbits(bits.reshape(count, -1), axis=1, bitorder="little").tobytes()
    return np.frombuffer(data, dtype).reshape(shape)


# ---- A checkpoint to play with -------------------------------------------------------------------


def as_folder(path: Path, scratch: Path) -> Path:
    """`osl.load` and `ocp.load` take a single file; v0 of Orbax takes nothing but folders."""
    path = path.resolve()
    if path.is_dir():
        return path
    folder = scratch / "one-file"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(path)
    return folder


def make_checkpoint(scratch: Path, layers: int = 3, max_file_bytes: int = 64 << 20) -> Path:
    """A folder as the Hugging Face hub has it: several files and an index."""
    folder = scratch / "llama"
    folder.mkdir()
    files: list[Tree] = [{}]
    for name, tensor in llama_tensors(layers):
        filled = sum(other.nbytes for other in files[-1].values())
        if files[-1] and filled + tensor.nbytes > max_file_bytes:
            files.append({})
        files[-1][name] = tensor
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    print(f"made {len(weight_map)} tensors, {total:,} bytes, in {len(files)} files with an index\n")
    return folder


def llama_tensors(layers: int) -> Iterator[tuple[str, np.ndarray]]:
    hidden, mlp, kv, vocabulary = 1024, 2816, 256, 32000
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, hidden)}
    for layer, (name, shape) in itertools.product(range(layers), block.items()):
        shapes[f"model.layers.{layer}.{name}"] = shape
    shapes |= {"model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        # All bit patterns, NaNs with payloads among them: whoever changes a bit is found out.
        bits = random.integers(0, 1 << 16, shape, np.uint16)
        yield f"{name}.weight", bits.view(ml_dtypes.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
