"""Trains a flax model, is killed in the middle of a save, and resumes bit by bit.

    python examples/train_and_resume.py               # the whole story, in a temporary folder
    python examples/train_and_resume.py train ROOT    # only the training: kill it, start it again

The training loop is one for Orbax's `CheckpointManager` as its users write it. One line makes its
checkpoints safetensors: `handler_registry=osl.handler_registry("default")`.

It needs flax, optax and safetensors: `pip install '.[examples]'`.
Four virtual CPU devices stand for an accelerator's. The exit status is 0 only if the run that was
killed and resumed has, bit by bit, the losses and the parameters of a run that was not.
"""

import os

# Before the first import of jax, which reads both of them once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl

try:
    import optax
    import safetensors
    from flax import nnx
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install flax optax safetensors") from error

STEPS, SAVE_EVERY, KILL_AT = 12, 3, 9
WIDTH, BATCH = 256, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    training = commands.add_parser("train", help="train, or go on where the last run ended")
    training.add_argument("root", type=Path)
    training.add_argument("--slow-disk", action="store_true", help="make saves take a second")
    arguments = parser.parse_args()
    if arguments.command == "train":
        logging.set_verbosity(logging.ERROR)  # not that a slow disk is slow
        train(arguments.root.resolve(), slow_disk=arguments.slow_disk)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        return tell(Path(scratch))


# The training loop.


class Model(nnx.Module):
    """Dropout makes the random state a part of what must come back."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.gelu(self.hidden(x))))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def train(root: Path, *, slow_disk: bool = False) -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    shard(model, optimizer)

    registry = osl.handler_registry("default", write=write_options(slow_disk))
    options = ocp.CheckpointManagerOptions(save_interval_steps=SAVE_EVERY, max_to_keep=2)
    with ocp.CheckpointManager(root, options=options, handler_registry=registry) as manager:
        first = 0
        if manager.latest_step() is not None:
            restore = ocp.args.StandardRestore(state_of(model, optimizer))
            nnx.update((model, optimizer), manager.restore(None, args=restore))
            first = manager.latest_step() + 1
            print(f"resumed after step {manager.latest_step()}", flush=True)
        for step in range(first, STEPS + 1):
            loss = train_step(model, optimizer, *batch(step))
            print(f"step {step} loss {float(loss).hex()}", flush=True)
            if manager.save(step, args=ocp.args.StandardSave(state_of(model, optimizer))):
                print(f"saving {step}", flush=True)


def state_of(model: Model, optimizer: nnx.Optimizer) -> Any:
    """Parameters, moments, counts and typed PRNG keys."""
    return nnx.state((model, optimizer))


def shard(model: Model, optimizer: nnx.Optimizer) -> None:
    """Matrices, and their moments, over all devices by their first dimension."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))

    def place(leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec("fsdp") if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    nnx.update((model, optimizer), jax.tree.map(place, state_of(model, optimizer)))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(step)
    x = random.standard_normal((BATCH, WIDTH), np.float32)
    return x, np.roll(x, 1, axis=1)


def write_options(slow_disk: bool) -> osl.WriteOptions:
    """Pauses between many files stand for a slow disk, so that the kill comes during a save."""
    if not slow_disk:
        return osl.WriteOptions()
    return osl.WriteOptions(
        max_file_bytes=1 << 20, concurrency=1, progress=lambda _: time.sleep(0.2)
    )


# The story.


def tell(scratch: Path) -> int:
    print("a run that nothing interrupts")
    undisturbed = dict(losses(output("train", scratch / "undisturbed")))
    print_losses(undisturbed)

    print(f"\na run that is killed (SIGKILL) while it saves step {KILL_AT}")
    disturbed = dict(losses(run_and_kill(scratch / "killed")))
    print_losses(disturbed)
    print("left behind:", ", ".join(sorted(path.name for path in (scratch / "killed").iterdir())))

    print("\nthe same command again")
    lines = output("train", scratch / "killed")
    print(lines[0])
    resumed = dict(losses(lines))
    print_losses(resumed)

    problems = [
        f"the loss of step {step} is another"
        for step, loss in (*disturbed.items(), *resumed.items())
        if loss != undisturbed[step]
    ]
    folders = [scratch / name / str(STEPS) / "default" for name in ("undisturbed", "killed")]
    problems += compare(*map(read, folders))
    print_tensors(folders[1])
    for problem in problems:
        print(f"DIFFERENT  {problem}", file=sys.stderr)
    if not problems:
        print("\nboth runs have the same losses and end with the same state, bit by bit")
    return 1 if problems else 0


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, __file__, *map(str, arguments)]


def output(*arguments: str | Path) -> list[str]:
    done = subprocess.run(command(*arguments), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def run_and_kill(root: Path) -> list[str]:
    lines = []
    with subprocess.Popen(
        command("train", root, "--slow-disk"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith(f"saving {KILL_AT}"):
                time.sleep(0.5)  # some files are written by now, not all
                process.send_signal(signal.SIGKILL)
                break
        lines += process.stdout.read().splitlines()
    return lines


def losses(lines: list[str]) -> Iterator[tuple[int, float]]:
    for line in lines:
        if line.startswith("step "):
            _, step, _, loss = line.split()
            yield int(step), float.fromhex(loss)


def print_losses(found: dict[int, float]) -> None:
    for step, loss in found.items():
        if step in (min(found), max(found)):
            print(f"  step {step:2}  loss {loss!r}")


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a step, by the library `safetensors` alone."""
    with safetensors.safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def compare(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    if one.keys() != other.keys():
        return [f"the tensors are others: {sorted(one.keys() ^ other.keys())}"]
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def print_tensors(folder: Path) -> None:
    print(f"\nits last step, {folder.parent.name}, opened with `safetensors` alone")
    for name, tensor in sorted(read(folder).items()):
        print(f"  {name:32} {tensor.dtype!s:8} {list(tensor.shape)}")


if __name__ == "__main__":
    sys.exit(main())
