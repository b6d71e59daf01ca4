"""Several real processes that read replicas once: each byte by one, all values everywhere."""

from __future__ import annotations

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import llama_like, random_tensor, save
from programs import run_processes

PROMPT_SECONDS = 60  # far below the time-outs, far above what a busy machine needs

LOAD = """
def main(path, shape, budgets, out):
    import json
    from pathlib import Path
    import numpy as np
    import safetensors
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from recording import recording
    import orbax_safetensors_layout as osl

    expected = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safetensors.safe_open(file, "numpy") as opened:
            expected |= {name: opened.get_tensor(name) for name in opened.keys()}
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(shape), ("data", "fsdp"))
    read = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: event.endswith("safetensors/bytes_read") and read.append(value)
    )
    results = {}

    def load(label, tree, options):
        plan = osl.plan_load(path, tree, options=options)
        read.clear()
        with recording() as storage:
            loaded = osl.load(path, tree, options=options)
        ranges = sorted({tuple(r) for r in storage.tensor_ranges()})
        assert sum(stop - start for _, start, stop in ranges) == sum(
            stop - start for _, start, stop in storage.tensor_ranges()
        )
        cost = plan.cost()
        assert [cost.read_bytes] == read, (label, cost, read)
        for name, array in loaded.items():
            assert array.sharding == tree[name].sharding, (label, name)
            for shard in array.addressable_shards:
                part = expected[name][shard.index].astype(array.dtype)
                assert np.asarray(shard.data).tobytes() == part.tobytes(), (label, name)
        results[label] = {
            "ranges": ranges,
            "read": read[0],
            "needed": sum(part.nbytes for array in loaded.values() for part in distinct(array)),
            "total": sum(expected[name].nbytes for name in tree),
            "files": len({file for file, _, _ in ranges}),
        }

    def distinct(array):
        return {str(s.index): s.data for s in array.addressable_shards}.values()

    def tree_of(spec):
        return {
            name: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=NamedSharding(mesh, P(*spec[: value.ndim]))
            )
            for name, value in expected.items()
        }

    exact = {"latency_seconds": {"local": 0.0}}
    for budget in budgets:
        for label, spec in {
            "replicated": P(),
            "dim0": P(("data", "fsdp")),
            "dim1": P(None, ("data", "fsdp")),
            "partly0": P("fsdp"),
            "partly1": P(None, "fsdp"),
            "2d": P("data", "fsdp"),
        }.items():
            for how, gaps in (("each", exact), ("read_once", exact), ("read_once", {})):
                options = osl.ReadOptions(replicated=how, memory_budget_bytes=budget, **gaps)
                tree = {
                    name: leaf
                    for name, leaf in tree_of(spec).items()
                    if len(leaf.shape) > 1 or len(spec) < 2
                }
                load(f"{label} {how} {'exact' if gaps else 'default'} {budget}", tree, options)

    # Other devices, in another order; arrays that some processes hold nothing of; a cast.
    name = "model.embed_tokens.weight"
    half = devices[: len(devices) // 2]
    mixed = np.concatenate([devices[::2], devices[1::2]])
    tree = {
        name: NamedSharding(Mesh(half, ("x",)), P()),
        "model.norm.weight": NamedSharding(Mesh(mixed[::-1].reshape(2, -1), ("x", "y")), P("x")),
        "model.layers.0.mlp.up_proj.weight": NamedSharding(Mesh(mixed, ("x",)), P()),
        "model.layers.1.mlp.up_proj.weight": NamedSharding(
            Mesh(mixed.reshape(-1, 2), ("x", "y")), P(None, "y")
        ),
    }
    tree = {
        n: jax.ShapeDtypeStruct(expected[n].shape, np.float32, sharding=s) for n, s in tree.items()
    }
    load("elsewhere", tree, osl.ReadOptions(replicated="read_once", **exact))
    Path(out, f"{jax.process_index()}.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("once") / "ckpt", llama_like(layers=3), files=4)


@pytest.mark.parametrize(
    ("processes", "devices", "budgets"),
    [(2, 2, [2 << 30, 1 << 16]), (4, 2, [2 << 30]), (8, 1, [2 << 30])],
)
def test_every_byte_is_read_by_one_process(path, tmp_path, processes, devices, budgets):
    run_processes(
        LOAD,
        processes=processes,
        devices=devices,
        path=str(path),
        shape=[processes * devices // 2, 2],
        budgets=budgets,
        out=str(tmp_path),
    )
    results = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(processes)]
    for label in results[0]:
        of_label = [process[label] for process in results]
        read, total = sum(one["read"] for one in of_label), of_label[0]["total"]
        if "each" in label:
            assert [one["read"] for one in of_label] == [one["needed"] for one in of_label], label
            continue
        assert read == total, label
        ranges = sorted(tuple(r) for one in of_label for r in one["ranges"])
        for (file, _, stop), (other, start, _) in itertools.pairwise(ranges):
            assert file != other or stop <= start, label


ORBAX = """
def main(path):
    from pathlib import Path
    import numpy as np
    import orbax.checkpoint as v0
    import orbax.checkpoint.experimental.v1 as v1
    import safetensors.numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import orbax_safetensors_layout as osl

    expected = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        expected |= safetensors.numpy.load_file(file)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    tree = {
        name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)
        for name, t in expected.items()
    }
    tree["norm"] = tree.pop("model.norm.weight")
    mapping = osl.Mapping(
        [osl.rule("norm", osl.tensor("model.norm.weight"))]
        + [osl.rule(name, osl.tensor(name)) for name in expected if name != "model.norm.weight"],
    )
    once = osl.ReadOptions(replicated="read_once")
    read = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: event.endswith("safetensors/bytes_read") and read.append(value)
    )
    with v0.Checkpointer(osl.SafetensorsCheckpointHandler(read=once)) as checkpointer:
        args = osl.SafetensorsRestore(tree, mapping=mapping)
        loaded = [checkpointer.restore(path, args=args)]
    osl.install()
    with osl.using(read=once, mapping=mapping), v1.Context(checkpoint_layout="safetensors"):
        loaded.append(v1.load(path, tree))
    for found in loaded:
        for name, array in found.items():
            value = expected["model.norm.weight" if name == "norm" else name]
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == value.tobytes()
    return read
"""


def test_the_same_through_orbax(path):
    results = run_processes(ORBAX, processes=2, devices=2, path=str(path))
    total = sum(tensor.nbytes for tensor in llama_like(layers=3).values())
    assert [sum(read) for read in zip(*results, strict=True)] == [total, total]


FAIL = """
def main(path, guilty, where):
    import os, signal, threading, time
    from pathlib import Path
    from unittest import mock
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from recording import recording
    import orbax_safetensors_layout as osl
    from orbax_safetensors_layout.reading.all_gather import SendBuffer
    from orbax_safetensors_layout.storage.local import LocalStorage
    from orbax_safetensors_layout.runtime import heartbeat

    heartbeat.SILENCE_SECONDS = 5.0
    mine = jax.process_index() == guilty
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {
        name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, P()))
        for name, t in osl.metadata(path).items()
    }
    if where == "tree" and mine:
        del tree["model.norm.weight"]
    wanted = None if where == "no tree" and mine else tree
    seen = []

    def before_read(file, start, stop):
        if start and mine and where in ("error", "killed"):
            seen.append(start)
            if len(seen) == 3:
                if where == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(5, "the disk is gone")

    gather = SendBuffer.gather

    def gather_or_die(slots, process):
        seen.append(slots)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(slots, process)

    if where == "slow" and not mine:  # a read that waits for a server, until it is broken off
        broken_off = threading.Event()
        LocalStorage.interrupt = lambda storage: broken_off.set()

        def before_read(file, start, stop):
            assert not start or broken_off.wait(120)

    if where == "slow" and mine:

        def before_read(file, start, stop):
            if start:
                raise OSError(5, "the disk is gone")

    if where == "gather" and mine:
        SendBuffer.gather = gather_or_die
    options = osl.ReadOptions(replicated="read_once", memory_budget_bytes=1 << 16)
    started = time.monotonic()
    try:
        with recording() as storage:
            storage.before_read = before_read
            osl.load(path, wanted, options=options)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    if where in ("error", "tree"):  # and the next load is none the wiser
        tree.pop("model.norm.weight", None)
        osl.load(path, tree, options=options)
    return text, seconds
"""


@pytest.mark.parametrize("guilty", [0, 2])
def test_an_error_of_one_reaches_all(path, guilty):
    results = run_processes(
        FAIL, processes=3, devices=1, path=str(path), guilty=guilty, where="error"
    )
    for process, (text, seconds) in enumerate(results):
        assert "the disk is gone" in text
        assert seconds < PROMPT_SECONDS
        if process != guilty:
            assert f"PeerError: process {guilty} failed while loading tensors: " in text


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_error_of_one_breaks_off_what_others_wait_for(path, guilty):
    results = run_processes(
        FAIL, processes=2, devices=1, path=str(path), guilty=guilty, where="slow"
    )
    for text, seconds in results:
        assert "the disk is gone" in text
        assert seconds < PROMPT_SECONDS


@pytest.mark.parametrize("where", ["tree", "no tree"])
def test_processes_that_load_differently_are_told(path, where):
    results = run_processes(FAIL, processes=2, devices=1, path=str(path), guilty=1, where=where)
    for text, _ in results:
        assert "PeerError: process 1 failed while planning the load: it has not the same" in text


@pytest.mark.parametrize("where", ["killed", "gather"])
def test_the_others_end_when_one_is_killed(path, where):
    results = run_processes(
        FAIL, processes=3, devices=1, lost=1, path=str(path), guilty=1, where=where
    )
    for text, seconds in (results[0], results[2]):
        assert "PeerError: process 1 failed while loading tensors: no sign of life" in text
        assert seconds < PROMPT_SECONDS


LARGE = """
def main(path, sizes, out, every_pair):
    import json
    from pathlib import Path
    import numpy as np
    import safetensors
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import orbax_safetensors_layout as osl

    expected = {}
    with safetensors.safe_open(Path(path, "model.safetensors"), "numpy") as opened:
        expected |= {name: opened.get_tensor(name) for name in opened.keys()}
    expected["head"] = expected["cube"]
    mapping = osl.Mapping(
        [osl.rule(name, osl.tensor(name)) for name in expected if name != "head"]
        + [osl.rule("head", None, tied_to="cube")]
    )
    devices = np.array(jax.devices())
    shuffled = np.random.default_rng(0).permutation(devices)
    read = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: event.endswith("safetensors/bytes_read") and read.append(value)
    )
    results = {}
    for label, some in {"in order": devices, "shuffled": shuffled}.items():
        mesh = Mesh(some.reshape(sizes), ("a", "b"))
        two = [P(None, "a", "b"), P("a", None, "b"), P(None, None, ("a", "b"))]
        for number, spec in enumerate([P(), P("b"), P(None, "b"), *two]):
            dtypes = [None, np.float32]
            for dtype in dtypes if every_pair else [dtypes[(number + (label == "shuffled")) % 2]]:
                sharding = NamedSharding(mesh, spec)
                tree = {
                    name: jax.ShapeDtypeStruct(value.shape, dtype or value.dtype, sharding=sharding)
                    for name, value in expected.items()
                }
                options = osl.ReadOptions(replicated="read_once")
                plan = osl.plan_load(path, tree, mapping=mapping, options=options)
                read.clear()
                loaded = osl.load(path, tree, mapping=mapping, options=options)
                for name, array in loaded.items():
                    assert array.sharding == sharding, (label, spec, name)
                    for shard in array.addressable_shards:
                        part = expected[name][shard.index].astype(array.dtype)
                        found = np.asarray(shard.data)
                        assert found.tobytes() == part.tobytes(), (label, spec, name)
                results[f"{label} {spec} {dtype}"] = read[0]
                assert plan.cost().read_bytes == read[0]
    Path(out, f"{jax.process_index()}.json").write_text(json.dumps(results))
"""


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("processes", "sizes"), [(3, [3, 2]), (2, [2, 3]), (4, [4, 1])])
def test_large_tensors_are_exchanged_and_tied_ones_keep_their_parts(
    tmp_path, processes, sizes, every_pair
):
    """Of more than a MiB, which are not packed; rows that the processes do not divide.

    Each sharding is loaded in both orders of devices and in both dtypes, if not in every pair.
    """
    shape = (12 * 43, 24, 48)
    tensors = {
        "cube": random_tensor(shape, ml_dtypes.bfloat16, 0),
        "other": random_tensor(shape, ml_dtypes.bfloat16, 1),
        "flags": random_tensor(shape, np.bool_, 2),
    }
    path = save(tmp_path / "ckpt", tensors)
    run_processes(
        LARGE,
        processes=processes,
        devices=sizes[0] * sizes[1] // processes,
        path=str(path),
        every_pair=every_pair,
        sizes=sizes,
        out=str(tmp_path),
    )
    results = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(processes)]
    once = sum(tensor.nbytes for tensor in tensors.values())
    for label in results[0]:
        assert sum(one[label] for one in results) == once, label
