"""A TCP link that can be cut, held up and slowed down: a proxy in user space."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Self

_CHUNK = 2**16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER for no time: the peer gets a reset


class _Pair:
    """A connection of a client, and the one that carries it on to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.is_deaf = False  # both ends are open, and nothing passes any more
        self.is_over = asyncio.Event()

    def reset(self) -> None:
        for writer in (self.client, self.server):
            with suppress(OSError):
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self.is_over.set()


class Link:
    """Carries connections at `port` on to `target`, a port of this machine. Use as an asynchronous
    context. What is held up passes, complete and in its order, when it is let go."""

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
        """Break all connections, at both ends; new ones are carried."""
        for pair in self._pairs:
            pair.reset()

    def stall(self) -> None:
        """Hold up everything, new connections too."""
        self._passes.clear()

    def half_open(self) -> None:
        """Let all connections lose their servers, and let no client know; new ones are carried."""
        for pair in self._pairs:
            pair.is_deaf = True
            pair.server.transport.abort()

    def heal(self) -> None:
        """Carry everything again. Clients whose connection has lost its server get to know it."""
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
        """From one end to the other, until the connection ends; a deaf one swallows all."""
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
