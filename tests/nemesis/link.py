"""A TCP proxy that can reset, stall and delay its connections."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Self

_CHUNK = 2**16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with 0 s: closing sends a reset to the peer.


class _Pair:
    """A connection of a client, and its connection to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.is_deaf = False  # the client's connection is open, but all data is discarded
        self.is_over = asyncio.Event()

    def reset(self) -> None:
        for writer in (self.client, self.server):
            with suppress(OSError):
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self.is_over.set()


class Link:
    """Forwards connections from `port` to `target`, a port of this machine. Use as an asynchronous
    context manager. `heal` delivers stalled data completely and in order."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.delay_s = 0.0
        self._pairs: set[_Pair] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Reset all connections at both ends. New connections work."""
        for pair in self._pairs:
            pair.reset()

    def stall(self) -> None:
        """Stall all connections, including new ones."""
        self._passes.clear()

    def half_open(self) -> None:
        """Close all connections to the server without notice to the clients. New connections
        work."""
        for pair in self._pairs:
            pair.is_deaf = True
            pair.server.transport.abort()

    def heal(self) -> None:
        """Forward everything again. Half-open connections are reset at the client."""
        self.delay_s = 0.0
        self._passes.set()
        for pair in [pair for pair in self._pairs if pair.is_deaf]:
            pair.reset()

    def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.create_task(self._carry_on(reader, client)))
        task.add_done_callback(self._tasks.discard)

    async def _carry_on(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        try:
            back, server = await asyncio.open_connection("127.0.0.1", self.target, limit=_CHUNK)
        except OSError:
            client.transport.abort()
            return
        pair = _Pair(client, server)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._carry(pair, reader, server), self._carry(pair, back, client))
        finally:
            self._pairs.discard(pair)
            pair.reset()

    async def _carry(
        self, pair: _Pair, reader: asyncio.StreamReader, to: asyncio.StreamWriter
    ) -> None:
        """Forward data in one direction until the connection ends."""
        try:
            while chunk := await reader.read(_CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passes.wait()
                if not pair.is_deaf:
                    to.write(chunk)
                    await to.drain()
            if not pair.is_deaf:
                to.write_eof()
            elif to is pair.server:
                pair.is_over.set()  # the client has left
        except OSError:
            if not pair.is_deaf:
                pair.reset()
        if pair.is_deaf and to is pair.client:
            await pair.is_over.wait()
