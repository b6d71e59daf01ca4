"""A load of Orbax v1 that is cancelled: its reads are broken off, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from checkpoints import save
from http_server import file_server
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import abstract_of, mesh_of
from orbax_calls import layout_context
from recording import recording
from remote_checks import descriptors

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage.schemes import OPENERS

KIB = 1 << 10
TENSORS = {f"layers.{n}.w": np.full((64, 1024), n, np.uint8) for n in range(200)}
# A request for each tensor, one after the other.
READ = osl.ReadOptions(
    concurrency=1, request_bytes=64 * KIB, latency_seconds=dict.fromkeys(("https", "local"), 0.0)
)


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model", TENSORS)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of the files of `remote`, which Orbax takes for a local folder."""
    remote = save(tmp_path / "remote", TENSORS)
    local, web = OPENERS[""], OPENERS["http://"]
    with file_server(remote) as server:

        def opened(path, retries):
            is_remote = path.startswith(str(remote))
            return web(f"{server.url}/files", retries) if is_remote else local(path, retries)

        monkeypatch.setitem(OPENERS, "", opened)
        server.folder = remote
        yield server


class Reads:
    """The reads of tensors by a server's log; the third one is held, if `stalls`, or all slow."""

    def __init__(self, server, *, stalls):
        self.third, self.count = threading.Event(), 0
        self._stalls = stalls
        server.faults = self._fault

    def _fault(self, request):
        if not request.range or not request.range[0]:  # the header
            return None
        self.count += 1
        if self.count >= 3:
            self.third.set()
        return "stall" if self._stalls and self.count >= 3 else "delay"


async def cancelled(loading, begun):
    """Cancels a load after something has begun, and waits until it has ended."""
    task = asyncio.ensure_future(loading)
    while not begun.is_set():
        await asyncio.sleep(0.001)
        assert not task.done()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=50)  # less than a stalled read is waited for
    assert done
    assert task.cancelled()


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("safetensors")]


def by_layout(path):
    return osl.SafetensorsLayout().load(ocp.path.Path(path))


def by_layout_of_several(path):
    return osl.SafetensorsLayout().load_checkpointables(ocp.path.Path(path))


def by_handler(path):
    sharding = NamedSharding(mesh_of(x=8), P("x"))
    return osl.SafetensorsHandler().load(ocp.path.Path(path), abstract_of(TENSORS, sharding))


@pytest.mark.parametrize("load", [by_layout, by_layout_of_several, by_handler])
@pytest.mark.parametrize("stalls", [True, False])
def test_reads_from_a_server_end(server, load, stalls):
    """Leaving its block, the server makes sure that every connection was closed."""
    reads = Reads(server, stalls=stalls)

    async def run():
        with osl.using(read=READ):
            await cancelled(await load(server.folder), reads.third)
        assert not readers()
        at_end = reads.count
        assert at_end < len(TENSORS) // 4
        await asyncio.sleep(0.2)
        assert reads.count == at_end

    asyncio.run(run())


def test_headers_that_are_fetched_end(server):
    fetching = threading.Event()

    def stall(request):
        fetching.set()
        return "stall"

    server.faults = stall

    async def run():
        await cancelled(by_layout(server.folder), fetching)

    asyncio.run(run())
    assert not readers()


def test_local_reads_end(folder):
    """The one that is under way is waited for; no other follows."""
    reading = threading.Event()
    with recording() as storage:

        def hold(file, start, stop):
            if start:
                reading.set()
                time.sleep(0.05)

        storage.before_read = hold

        async def run():
            with osl.using(read=READ):
                await cancelled(await by_layout(folder), reading)

        asyncio.run(run())
        assert not readers()
        assert not storage.active
        at_end = len(storage.ranges)
        assert at_end < len(TENSORS) // 4
        time.sleep(0.2)
        assert len(storage.ranges) == at_end


def test_one_that_is_cancelled_before_it_begins_reads_nothing(server):
    reads = Reads(server, stalls=True)

    async def run():
        loading = await by_layout(server.folder)
        task = asyncio.ensure_future(loading)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=50)
        assert task.cancelled()

    asyncio.run(run())
    assert reads.count <= 1
    assert not readers()


def test_loads_that_nobody_awaits_leave_no_files_open(folder):
    """As of other items, where one of a checkpoint raises."""

    async def begin():
        with osl.using(read=READ):
            for load in (by_layout, by_layout_of_several, by_handler):
                loading = await load(folder)
                loading.close()

    asyncio.run(begin())
    before = descriptors()
    for _ in range(20):
        asyncio.run(begin())
    assert descriptors() <= before  # those of other tests' servers may be closed meanwhile
    assert not readers()


def test_orbaxs_own_load_that_is_interrupted(server, installed):
    """Ctrl-C leaves Orbax's event loop at once; the reads behind it end, too."""
    reads = Reads(server, stalls=True)

    def interrupt():
        assert reads.third.wait(50)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with layout_context(), osl.using(read=READ), pytest.raises(KeyboardInterrupt):
        ocp.load(server.folder)
    interrupting.join()
    deadline = time.monotonic() + 50
    while readers():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_orbaxs_load_async_whose_runner_is_shut_down(server, installed):
    reads = Reads(server, stalls=True)
    with layout_context(), osl.using(read=READ):
        response = ocp.load_async(server.folder)
    assert reads.third.wait(50)
    response._thread_runner._runner.shutdown(cancel=True)  # Orbax has no public way yet
    assert not readers()


def test_others_go_on(server, folder):
    """What is cancelled is one load, not those beside it."""
    reads = Reads(server, stalls=True)

    async def run():
        with osl.using(read=READ):
            beside = asyncio.ensure_future(await by_layout(folder))
            await cancelled(await by_layout(server.folder), reads.third)
            return await beside

    loaded = asyncio.run(run())
    assert {name: int(value[0, 0]) for name, value in loaded.items()} == {
        name: int(value[0, 0]) for name, value in TENSORS.items()
    }
