"""A web server that is far away: `python slow_server.py FOLDER LATENCY BANDWIDTH`; prints its port.

Every request waits for `LATENCY` seconds, the first of a connection twice that (its handshake), and
every connection brings at most `BANDWIDTH` bytes a second. `/stats` reports, and forgets, what went
out since it was asked last.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import BinaryIO

_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)
_STEP_SECONDS = 0.02


class SlowServer:
    """The server.

    Args:
        folder: What it serves.
        latency_seconds: Before each answer.
        bandwidth: Bytes a second of each connection.
    """

    def __init__(self, folder: Path, latency_seconds: float, bandwidth: float) -> None:
        self._folder = folder
        self._latency = latency_seconds
        self._bandwidth = bandwidth
        self._stats: Counter[str] = Counter()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection."""
        self._stats["connections"] += 1
        wait = 2 * self._latency
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                if path == "/stats":
                    self._tell(writer)
                    continue
                await asyncio.sleep(wait)
                wait = self._latency
                self._stats["requests"] += 1
                await self._answer(writer, self._folder / path.lstrip("/"), _RANGE.search(head))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _tell(self, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(self._stats).encode()
        self._stats = Counter()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def _answer(
        self, writer: asyncio.StreamWriter, path: Path, found: re.Match[bytes] | None
    ) -> None:
        if not path.is_file() or found is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = path.stat().st_size
        start, stop = int(found[1]), min(int(found[2]) + 1, size)
        writer.write(
            b'HTTP/1.1 206 Partial Content\r\nETag: "1"\r\nContent-Length: %d\r\n'
            b"Content-Range: bytes %d-%d/%d\r\n\r\n" % (stop - start, start, stop - 1, size)
        )
        await writer.drain()
        with open(path, "rb") as file:
            await self._pace(writer, file, start, stop)
        self._stats["bytes"] += stop - start

    async def _pace(
        self, writer: asyncio.StreamWriter, file: BinaryIO, start: int, stop: int
    ) -> None:
        """Sends a range at the connection's bandwidth."""
        loop = asyncio.get_running_loop()
        begun, at = loop.time(), start
        while at < stop:
            count = min(max(1 << 14, int(self._bandwidth * _STEP_SECONDS)), stop - at)
            due = begun + (at + count - start) / self._bandwidth
            await asyncio.sleep(due - loop.time())
            await loop.sendfile(writer.transport, file, at, count)
            at += count


async def main() -> None:
    """Serves until it is killed."""
    folder, latency_seconds, bandwidth = sys.argv[1:]
    slow = SlowServer(Path(folder), float(latency_seconds), float(bandwidth))
    server = await asyncio.start_server(slow.connection, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
