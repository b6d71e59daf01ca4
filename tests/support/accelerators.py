"""Loads as on an accelerator."""

from __future__ import annotations

import ctypes
import importlib

import numpy as np

import orbax_safetensors_layout.reading.plan_reader as read_module
from orbax_safetensors_layout.reading import LeafBuilder, tile_buffers
from orbax_safetensors_layout.runtime import memory


class Driver:
    """Stands for a driver that memory is registered with, and which refuses memory twice."""

    def __init__(self, *, fails=False):
        self.registered: dict[int, int] = {}
        self.log: list[str] = []
        self.fails = fails

    def register(self, address, nbytes):
        self.log.append("refuse" if self.fails else "register")
        if self.fails:
            return None
        for other, size in self.registered.items():
            assert address + nbytes <= other or other + size <= address
        self.registered[address] = nbytes
        return lambda: self.end(address)

    def end(self, address):
        ctypes.string_at(address, self.registered.pop(address))  # all of it is there
        self.log.append("end")

    def holds(self, array):
        """Whether an array's memory is registered."""
        address = array.ctypes.data
        return any(at <= address < at + size for at, size in self.registered.items())


class Accelerator:
    """Makes the load believe that arrays do not keep the buffers they are made of."""

    def __init__(self, monkeypatch):
        module = importlib.import_module("orbax_safetensors_layout.load")
        monkeypatch.setattr(module, "adopts", lambda parsed: False)
        self.driver = Driver()
        monkeypatch.setattr(module, "registration", lambda parsed: self.driver.register)  # if asked
        monkeypatch.setattr(read_module, "buffer_slices", self.buffer_slices)
        self.sizes: list[int] = []

    def buffer_slices(self, *arguments):
        slices = tile_buffers.buffer_slices(*arguments)
        memories = {
            id(destination.buffer.memory): destination.buffer.memory for destination in slices
        }
        self.sizes.append(sum(memory.size for memory in memories.values()))
        return slices


class Transfers(Accelerator):
    """The transfers of such a load: each reads its memory until it is waited for.

    Attributes:
        log: "put" where one begins, "wait" where it has ended.
        put_bytes: Of all.
        most_bytes: The most that were in flight at once.
        allocated_bytes: Fresh memory.
    """

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.log: list[str] = []
        self.put_bytes = self.most_bytes = 0
        self._in_flight_bytes = 0
        self.allocated_bytes = 0
        take, allocate = LeafBuilder.take, memory.allocate

        def begin(builder, leaves, boxes, parts):
            if all(leaf.abstract.placement is None for leaf in leaves):
                return take(builder, leaves, boxes, parts)
            copies = [part.copy() for part in parts]  # the memory of the devices
            take(builder, leaves, boxes, copies)
            return self._begin(parts, copies)

        def count(nbytes, **where):
            self.allocated_bytes += nbytes
            return allocate(nbytes, **where)

        monkeypatch.setattr(LeafBuilder, "take", begin)
        for module in (memory, read_module):
            monkeypatch.setattr(module, "allocate", count)

    def _begin(self, parts, copies):
        nbytes = sum(part.nbytes for part in parts)
        self.log.append("put")
        self.put_bytes += nbytes
        self._in_flight_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self._in_flight_bytes)
        in_flight = [*zip(parts, copies, strict=True)]

        def wait():
            for part, copied in in_flight:
                np.testing.assert_array_equal(part.view(np.uint8), copied.view(np.uint8))
            in_flight.clear()
            self._in_flight_bytes -= nbytes
            self.log.append("wait")

        return wait
