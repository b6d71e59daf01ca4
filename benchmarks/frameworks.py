"""Runs of published frameworks, with the lines that docs/coming_from.md gives, bit for bit.

    python benchmarks/frameworks.py maxtext lora tunix keras kauldron gemma --dir FOLDER

needs Python 3.12 with the frameworks installed. The lines go into a copy of the framework, which is
otherwise as published. A small run on eight CPU devices is killed in the save of its third step and
resumed, four times, and the results are compared with those of the framework as it is:

`plain` is as published, `lines` with the lines; `over` is the killed run of `plain`, resumed with
the lines; `back` the killed run of `lines`, converted to Orbax's format and resumed as published.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY))
PAGE = REPOSITORY / "docs" / "coming_from.md"
DEVICES = "--xla_force_host_platform_device_count=8"
KILLED_AT, STEPS = 3, 5
_ROW = re.compile(r"\| `(?P<file>\w+/[\w/]+\.py)`[^|]*\| `(?P<old>[^|]+)` \| `(?P<new>[^|]+)` \|")
_FIRST_IMPORT = re.compile(r"^(import|from (?!__future__)\S+ import) ", re.M)
_IMPORT = "import orbax_safetensors_layout as osl; osl.install()\n"

MAXTEXT = """train base_emb_dim=32 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=64
base_num_decoder_layers=2 head_dim=8 vocab_size=64 max_target_length=16 per_device_batch_size=1
dataset_type=synthetic attention=dot_product hardware=cpu skip_jax_distributed_system=true
log_config=false ici_fsdp_parallelism=4 ici_tensor_parallelism=2 checkpoint_period=1
learning_rate_schedule_steps=10 learning_rate=1e-2 enable_goodput_recording=false
monitor_goodput=false"""
LORA = """use_sft=true lora.enable_lora=true lora.lora_rank=4 lora.lora_alpha=8
lora.lora_module_path=.*(query|value).*"""

Arrays = Mapping[str, np.ndarray]


def lines_of(page: str) -> dict[str, dict[str, str]]:
    """Return what a page replaces in which files: `f(...)` is each call of `f`."""
    files: dict[str, dict[str, str]] = {}
    for row in _ROW.finditer(page):
        files.setdefault(row["file"], {})[row["old"]] = row["new"]
    return files


def with_lines(source: str, replaced: Mapping[str, str]) -> str:
    """Return the source of a module with its lines, after an import."""
    for old, new in replaced.items():
        places = [old] * source.count(old)
        if old.endswith("(...)"):
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            calls = [node for node in nodes if ast.unparse(node.func) == old[:-5]]
            places = [ast.get_source_segment(source, node) or "" for node in calls]
        if not places:
            raise SystemExit(f"there is no {old!r} in this version")
        for place in places:
            source = source.replace(place, new)
    return _FIRST_IMPORT.sub(_IMPORT + r"\g<0>", source, count=1)


def copy_with_lines(packages: Sequence[str], folder: Path) -> None:
    """Copies installed packages, each with its lines."""
    for package in packages:
        (place,) = importlib.util.find_spec(package).submodule_search_locations
        shutil.copytree(place, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, replaced in lines_of(PAGE.read_text(encoding="utf-8")).items():
        if file.split("/")[0] in packages:
            path = folder / file
            path.write_text(with_lines(path.read_text(encoding="utf-8"), replaced))


# The runs. Each goes on from what its folder holds to the end, and returns all that it has then.


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by path; the data of keys, a note on what has no array."""
    import jax

    def bits(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return np.array(f"not materialized: {leaf.shape}")
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves}


def maxtext_config(folder: Path, name: str, *more: str) -> list[str]:
    return [*MAXTEXT.split(), f"base_output_directory={folder}", f"run_name={name}", *more]


def maxtext_train(folder: Path, name: str, *more: str) -> Any:
    from maxtext.trainers.pre_train import train

    return train.train_loop(*train.initialize(maxtext_config(folder, name, *more)))


def maxtext(folder: Path) -> Arrays:
    from flax import nnx
    from maxtext.checkpoint_conversion.utils import utils
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    trained = maxtext_train(folder, "run", f"steps={STEPS}")
    items = f"load_parameters_path={folder}/run/checkpoints/{STEPS - 1}/items"
    more = maxtext_train(folder, "more", "steps=1", items)
    config = pyconfig.initialize(maxtext_config(folder, "more", items))
    model, _ = model_creation_utils.from_pretrained(config)
    converted = utils.load_orbax_checkpoint(config)
    return flat([trained, more, nnx.state(model, nnx.Param), converted])


def lora(folder: Path) -> Arrays:
    import jax
    import orbax.checkpoint.experimental.v1 as ocp
    from flax import nnx
    from maxtext.checkpoint_conversion.utils import utils
    from maxtext.common import checkpoint_context
    from maxtext.configs import pyconfig
    from maxtext.trainers.post_train.sft import train_sft
    from maxtext.utils import lora_utils, model_creation_utils

    base = folder / "base" / "checkpoints" / "1"
    if not base.exists():
        maxtext_train(folder, "base", "steps=2")
    more = [*LORA.split(), f"load_parameters_path={base}/items"]
    config = pyconfig.initialize(maxtext_config(folder, "run", f"steps={STEPS}", *more))
    trainer, mesh = train_sft.setup_trainer_state(config)
    train_sft.train_model(config, trainer, mesh)
    weights = nnx.Any(nnx.Param, nnx.LoRAParam)
    result = {"trained": nnx.state((trainer.model, trainer.optimizer))}
    adapter = f"lora.lora_restore_path={folder}/run/checkpoints/{STEPS}/model_params"
    config = pyconfig.initialize(maxtext_config(folder, "more", *more, adapter))
    model, mesh = model_creation_utils.from_pretrained(config)
    model = lora_utils.apply_lora_to_model(model, mesh, config)
    asked = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        {"params": {"params": nnx.state(model, weights).to_pure_dict()}},
    )
    with checkpoint_context.build_context(partial_load=True):
        result["partial"] = ocp.load(base, asked, checkpointable_name="items")
    result["restored"] = nnx.state(lora_utils.restore_lora_from_path(model, config), weights)
    return flat(result | {"conversion": utils.load_orbax_checkpoint(config)})


def tunix(folder: Path) -> Arrays:
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from tunix.sft.checkpoint_manager import CheckpointManager

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

    @nnx.jit
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(batch) ** 2))(model))

    rngs = nnx.Rngs(0)
    up, down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
    model = nnx.Sequential(up, nnx.Dropout(0.1, rngs=rngs), jax.nn.relu, down)
    split = [NamedSharding(mesh, P(*names)) for names in ((), (), ("fsdp", "tensor"))]
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, split[leaf.ndim]), nnx.state(model))
    nnx.update(model, placed)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    manager = CheckpointManager(str(folder), ocp.CheckpointManagerOptions(save_interval_steps=1))
    done, custom = manager.maybe_restore(model, optimizer)
    for step in range(done + 1, STEPS + 1):
        train(model, optimizer, jax.random.normal(jax.random.key(step), (8, 16)))
        manager.save(step, model, optimizer, custom_metadata={"step": step})
    manager.close()
    return flat((custom, nnx.state(model), nnx.state(optimizer, nnx.optimizer.OptState)))


def keras(folder: Path) -> Arrays:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    done = max((int(path.name) for path in folder.glob("[0-9]")), default=-1)
    if done >= 0:
        model = keras.saving.load_model(folder)
    else:
        relu, norm = keras.layers.Dense(32, "relu"), keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((16,)), relu, norm, keras.layers.Dense(8)])
        model.compile("adamw", "mse")
    x, y = (np.random.default_rng(0).normal(size=(64, n)).astype("f4") for n in (16, 8))
    saving = keras.callbacks.OrbaxCheckpoint(folder, max_to_keep=None)
    epochs = {"initial_epoch": done + 1, "epochs": STEPS + 1}
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[saving], **epochs)
    trained = [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]
    model.load_weights(folder)
    return flat([trained, [np.asarray(v) for v in model.variables]])


def kauldron(folder: Path) -> Arrays:
    global kd  # its annotations are looked up
    import optax
    from flax import linen as nn
    from kauldron import kd

    class Model(nn.Module):
        x: kd.kontext.Key = "batch.x"

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))

    random = np.random.default_rng(0)
    examples = {k: random.normal(size=(64, n)).astype("f4") for k, n in (("x", 16), ("y", 8))}
    trainer = kd.train.Trainer(
        workdir=folder,
        train_ds=kd.data.InMemoryPipeline(loader=lambda: examples, batch_size=8, seed=0),
        model=Model(),
        num_train_steps=STEPS,
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
        optimizer=optax.adamw(1e-2),
        sharding=kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding()),
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=1, max_to_keep=None),
    )
    return flat(trainer.train()[0])


def gemma(folder: Path) -> Arrays:
    import jax
    import jax.numpy as jnp
    from gemma import gm
    from kauldron import kd

    random = np.random.default_rng(0)
    up, norm = (jnp.asarray(random.normal(size=s), jnp.bfloat16) for s in ((64, 32), (32,)))
    params = {"embedder": {"input_embedding": up}, "final_norm": {"scale": norm}}
    params |= {f"layer_{i}": {"mlp": {"linear": up + i}} for i in range(2)}
    if not (folder / "2").exists():
        gm.ckpts.save_params(params, folder / "2", wait_until_finished=True)
        gm.ckpts.save_params(params, folder / "3")
        time.sleep(60)  # it is killed in this save
    fsdp = gm.ckpts.load_params(folder / "2", sharding=kd.sharding.FSDPSharding())
    like = gm.ckpts.load_params(folder / "2", params=jax.tree.map(jnp.copy, params))
    return flat([gm.ckpts.load_params(folder / "2"), like, fsdp])


# By name: the run, the distribution, its packages, and where the steps are.
RUNS: dict[str, tuple[Callable[[Path], Arrays], str, Sequence[str], str]] = {
    "maxtext": (maxtext, "maxtext", ["maxtext"], "run/checkpoints"),
    "lora": (lora, "maxtext", ["maxtext", "tunix"], "run/checkpoints"),
    "tunix": (tunix, "google-tunix", ["tunix"], ""),
    "keras": (keras, "keras", ["keras"], ""),
    "kauldron": (kauldron, "kauldron", ["kauldron"], "checkpoints"),
    "gemma": (gemma, "gemma", ["gemma", "kauldron"], ""),
}


def whole_steps(steps: Path) -> dict[int, Path]:
    """Return the folders of steps, without what is being saved."""
    names = {path: path.name.removeprefix("ckpt_") for path in steps.iterdir()}
    return {int(name): path for path, name in names.items() if name.isdigit()}


def die_in_save(steps: Path) -> None:
    """Kills this process as soon as there is something of step KILLED_AT."""
    while not [*steps.glob(f"*{KILLED_AT}*")]:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def child(name: str, folder: Path, run: str, *, lines: bool, killed: bool) -> Arrays:
    """Runs a framework in a process of its own; returns its arrays, if it is not killed."""
    place, result, log = (folder / f"{run}{end}" for end in ("", ".npz", ".log"))
    path = [str(folder / "copy"), str(REPOSITORY)] if lines else []
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES, "PYTHONPATH": ":".join(path)}
    command = [sys.executable, __file__, name, f"--dir={place}", f"--child={result}"]
    command += ["--killed"] * killed
    with log.open("ab") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=os.environ | flags, timeout=900, check=False, **streams)
    if done.returncode != (-signal.SIGKILL if killed else 0):
        raise SystemExit(f"{name}, {run}: status {done.returncode}, see {log}")
    if not killed:
        return dict(np.load(result))
    if step := whole_steps(place / RUNS[name][3]).get(KILLED_AT):  # which is a matter of chance
        shutil.rmtree(step)
    return {}


def compare(name: str, folder: Path) -> bool:
    """Runs a framework four times, and prints what is equal; whether all is."""
    import orbax_safetensors_layout as osl

    _, distribution, packages, steps = RUNS[name]
    versions = map(importlib.metadata.version, (distribution, "orbax-checkpoint"))
    print("{}: {}, orbax-checkpoint {}".format(name, *versions), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    copy_with_lines(packages, folder / "copy")
    for run, begun in (("plain", "over"), ("lines", "back")):
        child(name, folder, run, lines=run == "lines", killed=True)
        shutil.copytree(folder / run, folder / begun)
    for place in {*(folder / "back").glob("base/checkpoints"), folder / "back" / steps}:
        there = place.with_name(f"{place.name}.orbax")
        for step in whole_steps(place):
            osl.convert(place, there, step=step, format="orbax")
        shutil.rmtree(place)
        there.rename(place)
    plain: dict[str, Any] = {}
    different: list[str] = []
    for run in ("plain", "lines", "over", "back"):
        arrays = child(name, folder, run, lines=run in ("lines", "over"), killed=False)
        bits = {leaf: (a.dtype, a.shape, a.tobytes()) for leaf, a in arrays.items()}
        plain = plain or bits
        wrong = [leaf for leaf in plain | bits if plain.get(leaf) != bits.get(leaf)]
        files = [path.name for path in (folder / run).rglob("*")]
        counts = ", ".join(f"{files.count(f)} {f}" for f in ("model.safetensors", "manifest.ocdbt"))
        total = sum(array.nbytes for array in arrays.values())
        print(f"  {run}: {len(arrays)} arrays, {total:,} bytes ({counts}):", end=" ")
        print(f"different: {wrong}" if wrong else "equal", flush=True)
        different += wrong
    return not different


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="+", choices=RUNS)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.child:
        folders = {name: arguments.dir.absolute() / name for name in arguments.names}
        sys.exit(not all(list(itertools.starmap(compare, folders.items()))))
    run, _, _, steps = RUNS[arguments.names[0]]
    arguments.dir.mkdir(parents=True, exist_ok=True)
    if arguments.killed:
        threading.Thread(target=die_in_save, args=[arguments.dir / steps], daemon=True).start()
    np.savez(arguments.child, **run(arguments.dir))


if __name__ == "__main__":
    main()
