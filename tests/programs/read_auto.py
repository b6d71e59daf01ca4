import asyncio
import importlib
import itertools
import logging
import os
import sys
import time

import jax


async def begun(load):
    return await (await load)


def main(path, case, other=None):
    """Load as `case` says; return the bytes read by each load, or the error and its seconds."""
    process = jax.process_index()
    if case in ("places", "hosts", "saves") and process:
        path = other
    if case in ("hosts", "saves"):  # what each has is at one path
        os.path.realpath = lambda path, **_: f"/models/{os.path.basename(path)}"
    if case == "cpus":  # before the package asks for them
        os.cpu_count = lambda: 64 if process else 2
        for name in [name for name in sys.modules if name.startswith("orbax_safetensors_layout")]:
            del sys.modules[name]

    import numpy as np
    import safetensors
    from etils import epath
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    import orbax_safetensors_layout as osl
    from orbax_safetensors_layout.reading.all_gather import SendBuffer

    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    if case == "edges":  # of a server, by the query, which is no part of the place
        abstract = {
            n: jax.ShapeDtypeStruct((64, 96), np.float32, sharding=everywhere) for n in "ab"
        }
        slow = {"bandwidth_bytes_per_second": {"https": 1e3}}
        try:
            options = osl.ReadOptions(timeout_seconds=20, **slow)
            loaded = osl.load(f"{path}?edge={process if other else 0}", abstract, options=options)
            return [float(array.addressable_data(0)[0, 0]) for array in loaded.values()]
        except osl.SafetensorsLayoutError as error:
            return f"{type(error).__name__}: {error}"

    if case == "dtypes":  # what JAX gave a process before must not count
        if process:
            jax.device_put(np.ones(3, other))
        with safetensors.safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        abstract = {
            name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=everywhere)
            for name, t in tensors.items()
        }
        options = osl.ReadOptions(replicated="read_once", timeout_seconds=20)
        loaded = osl.load(path, abstract, options=options)
        return [np.array_equal(loaded[name], tensors[name]) for name in abstract]

    if case == "saves":  # two of one tree; each process reads its own part
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
        abstract = {"a": jax.ShapeDtypeStruct((64, 96), np.float32, sharding=sharding)}
        try:
            return len(osl.load(path, abstract, options=osl.ReadOptions(timeout_seconds=20)))
        except osl.SafetensorsLayoutError as error:
            return f"{type(error).__name__}: {error}"

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("absl").addHandler(handler)
    logging.getLogger("absl").setLevel(logging.INFO)
    importlib.import_module("orbax_safetensors_layout.load")._MUCH_BYTES = 0
    with safetensors.safe_open(path, "numpy") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    read = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: event.endswith("safetensors/bytes_read") and read.append(value)
    )

    def lines(level):
        texts = [r.getMessage() for r in records if r.levelno == level]
        return [text for text in texts if text.startswith("Loading ")]

    def tree(spec, processes=None):
        devices = [d for d in jax.devices() if processes is None or d.process_index in processes]
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), spec)
        return {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
            for name, value in expected.items()
        }

    def load(abstract, mapping=None, seconds=20, **options):
        options = osl.ReadOptions(timeout_seconds=seconds, **options)
        planned = osl.plan_load(path, abstract, mapping=mapping, options=options).cost()
        read.clear()
        loaded = osl.load(path, abstract, mapping=mapping, options=options)
        for name, array in loaded.items():
            for shard in array.addressable_shards:
                part = expected[name][shard.index]
                assert np.asarray(shard.data).tobytes() == part.tobytes(), name
        assert case in ("places", "hosts", "gather fails") or [planned.read_bytes] == read, (
            planned,
            read,
        )
        return read[0]

    if case == "mapped":  # interleaved heads, and blocks with scales; rows are inputs
        q, w, scale = (expected.pop(name) for name in ("q", "w", "scale"))
        heads = q.reshape(2, 2, 8, 48).transpose(3, 0, 2, 1).reshape(48, 2, 16)
        decoded = w.astype(np.float32) * np.kron(scale, np.ones((8, 8), np.float32))
        expected |= {"heads": heads, "kernel": decoded.T}
        pattern = "(h t f) e -> e h (f t)"
        values = osl.dequantize_block(osl.tensor("w"), osl.tensor("scale"), (8, 8), "float32")
        rules = {
            "heads": osl.tensor("q").rearrange(pattern, h=2, t=2, f=8),
            "kernel": values.transpose(),
        }
        mapping = osl.Mapping([osl.rule(name, expr) for name, expr in rules.items()])
        wide = {"latency_seconds": {"local": 1e3}, "bandwidth_bytes_per_second": {"local": 1e3}}
        return load(tree(P("x")), mapping, **wide)
    slow = {"bandwidth_bytes_per_second": {"local": 1e3}}
    shared = {"shared_bandwidth_bytes_per_second": {"local": 1e3}}
    if case == "choice":
        replicated, columns = tree(P()), tree(P(None, "x"))
        read_bytes = {
            "near replicated": load(replicated),
            "slow replicated": load(replicated, **slow),
            "shared replicated": load(replicated, **shared),
            "near columns": load(columns),
            "slow columns": load(columns, latency_seconds={"local": 1e3}, **slow),
            "slow rows": load(tree(P("x")), **slow),
        }
        far = {"latency_seconds": {"local": 1e3}, "replicated": "each", **slow}
        read_bytes |= {"each columns": load(columns, **far)}
        return read_bytes, lines(logging.INFO), lines(logging.WARNING)
    if case in ("places", "hosts"):
        outcomes = []
        for spec, how in ((P(), "auto"), (P("x"), "auto"), (P(), "read_once")):
            try:
                outcomes.append(load(tree(spec), replicated=how, **slow))
            except osl.SafetensorsLayoutError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes, lines(logging.WARNING), lines(logging.INFO)
    if case == "cpus":  # a request more costs so much that it decides
        between = {"latency_seconds": {"local": 0.1}, "bandwidth_bytes_per_second": {"local": 2e3}}
        return load(tree(P(None, "x")), **between), osl.ReadOptions().profile("local").concurrency
    if case == "alone":  # only this process loads, on its own devices or on the host
        if process:
            return None
        return [load(tree(P(), [0]), **slow), len(osl.load(path)), load(tree(P("x"), [0]), **slow)]
    if case == "some":  # the others have nothing of the tree, and do not load it
        return None if process == 1 else load(tree(P(), [0, 2]), **slow)
    if case == "retries":  # one that process 1 does not begin, or cannot, then all in step
        texts = []
        for folder in (None, path + "/nowhere/" + os.path.basename(path), path, path):
            try:
                file = folder if process else path
                if file is not None:
                    options = osl.ReadOptions(timeout_seconds=3, **slow)
                    osl.load(file, tree(P()), options=options)
                texts.append("loaded")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
            multihost_utils.sync_global_devices("tried")
        return texts
    if case == "format unknown":  # to one process, whose storage fails before the load begins
        import orbax.checkpoint as ocp

        def failing(*_):
            raise OSError("stale file handle")

        item, resized, layout = (
            importlib.import_module(f"orbax_safetensors_layout.adapters.{name}")
            for name in ("item", "resized", "layout")
        )
        osl.using(read=osl.ReadOptions(timeout_seconds=20, **slow)).__enter__()
        folder, outcomes = epath.Path(path).parent, []
        handler = osl.SafetensorsCheckpointHandler()

        def restore_v0(kind, **options):
            return ocp.Checkpointer(handler).restore(folder, args=kind(tree(P()), **options))

        def load_v1(kind, *name):
            return asyncio.run(begun(kind().load(folder, *name, tree(P()))))

        for fails, name, restore in (
            (item, "is_orbax_item", lambda: restore_v0(osl.SafetensorsRestore)),
            (item, "is_orbax_item", lambda: load_v1(osl.SafetensorsHandler)),
            (layout, "_locate", lambda: load_v1(osl.SafetensorsLayout, None)),
            (
                resized.CheckpointMetadata,
                "read",
                lambda: restore_v0(ocp.args.StandardRestore, strict=False),
            ),
        ):
            own = getattr(fails, name)
            if process:
                setattr(fails, name, failing)
            began = time.monotonic()
            try:
                outcomes.append(len(restore()))
            except Exception as error:
                seconds = time.monotonic() - began
                outcomes.append((f"{type(error).__name__}: {error}", seconds))
            setattr(fails, name, own)
            multihost_utils.sync_global_devices("tried")
        return outcomes
    if case == "cancelled":  # while the other process does not come
        if process:
            return None

        async def load_v1():
            folder = epath.Path(path).parent
            return await (await osl.SafetensorsLayout().load(folder, None, tree(P())))

        async def cancelled():
            with osl.using(read=osl.ReadOptions(timeout_seconds=60, **slow)):
                task = asyncio.ensure_future(load_v1())
                await asyncio.sleep(0.5)
                assert not task.done()
                began = time.monotonic()
                task.cancel()
                await asyncio.wait([task])
            return task.cancelled(), time.monotonic() - began

        return asyncio.run(cancelled())
    if case in ("gather fails", "gather hangs"):
        gather = SendBuffer.gather
        numbers = itertools.count(1)

        def broken(buffer, of_process):
            number = next(numbers)
            if case == "gather hangs" and number == 1:
                time.sleep(5)
            if case == "gather fails" and number == jax.local_device_count():
                raise MemoryError("no memory")
            return gather(buffer, of_process)

        if process:
            SendBuffer.gather = broken
        outcomes = []
        for how in ("auto", "auto", "read_once"):
            began = time.monotonic()
            try:
                several = case == "gather fails" and jax.local_device_count() > 1
                rounds = {"memory_budget_bytes": 1 << 16} if several else {}
                outcomes.append(load(tree(P()), seconds=2, replicated=how, **rounds, **slow))
            except Exception as error:
                seconds = time.monotonic() - began
                outcomes.append((f"{type(error).__name__}: {error}", seconds))
        return outcomes, [r.getMessage() for r in records if r.levelno == logging.WARNING]
    if case == "saved":  # by a process alone, which loads it alone, to where it was saved from
        if process:
            return None
        leaf = jax.ShapeDtypeStruct((8,), np.float32)
        loaded = osl.load(other, {"own": leaf}, options=osl.ReadOptions(timeout_seconds=3))
        return [device.id for device in loaded["own"].sharding.device_set]
    began = time.monotonic()
    try:
        if case == "mappings":
            rules = [osl.rule("a", osl.tensor("b" if process else "a"))]
            mapping = osl.Mapping(rules, ignore=["*"])
            return load({"a": tree(P())["a"]}, mapping, **slow)
        if case == "trees":
            name = "b" if process else "a"
            return load({name: tree(P())[name]}, **slow)
        if case == "kinds":
            how = "read_once" if process else "auto"
            return load(tree(P()), replicated=how, **slow)
        if case == "missing" and process == 1:
            return None
        if case == "missing":
            return load(tree(P()), seconds=5, **slow)
        load(tree(P()), **(slow if process else {}))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "loaded"
