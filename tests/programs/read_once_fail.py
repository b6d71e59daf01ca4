import os
import signal
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kills import die
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.reading import ReplicaExchange
from orbax_safetensors_layout.reading.all_gather import SendBuffer
from orbax_safetensors_layout.runtime import ProcessGroup, heartbeat
from orbax_safetensors_layout.storage import LocalStorage


def main(path, guilty, where):
    heartbeat.SILENCE_SECONDS = 5.0
    is_guilty = jax.process_index() == guilty
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {
        name: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, P()))
        for name, t in osl.metadata(path).items()
    }
    if where == "tree" and is_guilty:
        del tree["model.norm.weight"]
    target = None if where == "no tree" and is_guilty else tree
    seen = []

    def before_read(file, start, stop):
        if start and is_guilty and where in ("error", "killed"):
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

    if where == "slow" and not is_guilty:  # a read that waits for a server, until it is broken off
        broken_off = threading.Event()
        LocalStorage.interrupt = lambda storage: broken_off.set()

        def before_read(file, start, stop):
            assert not start or broken_off.wait(120)

    if where == "slow" and is_guilty:

        def before_read(file, start, stop):
            if start:
                raise OSError(5, "the disk is gone")

    if where == "gather" and is_guilty:
        SendBuffer.gather = gather_or_die
    phases = {  # the first call of each is the last thing that the process does
        "opening": (Catalog, "open"),
        "agreeing": (ProcessGroup, "barrier"),
        "ending": (ReplicaExchange, "finish"),
    }
    if where in phases and is_guilty:
        setattr(*phases[where], die)
    verify = where == "verify" and is_guilty
    options = osl.ReadOptions(
        replicated="auto" if where in phases else "read_once",
        bandwidth_bytes_per_second={"local": 1e3},
        memory_budget_bytes=1 << 16,
        verify=verify,
        timeout_seconds=10 if where in phases else 1800,
    )
    started = time.monotonic()
    try:
        with recording() as storage:
            storage.before_read = before_read
            osl.load(path, target, options=options)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    if where in ("error", "tree"):  # and the next load is none the wiser
        tree.pop("model.norm.weight", None)
        osl.load(path, tree, options=options)
    return text, seconds
