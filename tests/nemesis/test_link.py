"""A link forwards bytes, and can reset, stall and delay its connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.nemesis.link import Link

PATIENCE_S = 20
SOON_S = 0.1  # Seconds to wait before the test concludes that no data arrives.


class Echo:
    """A link to a server that echoes all data. `served` are the connections of the server."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.served: list[asyncio.StreamWriter] = []
        self.peers: list[Peer] = []

    async def peer(self) -> "Peer":
        self.peers.append(Peer(*await asyncio.open_connection("127.0.0.1", self.link.port)))
        return self.peers[-1]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.served.append(writer)
        try:
            while chunk := await reader.read(1000):
                writer.write(chunk)
        except ConnectionError:
            pass
        finally:
            writer.close()


class Peer:
    """A client of the link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def echoed(self, text: bytes) -> bytes:
        self.writer.write(text)
        return await self.reader.readexactly(len(text))


@asynccontextmanager
async def echoing() -> AsyncIterator[Echo]:
    links: list[Echo] = []
    server = await asyncio.start_server(lambda *ends: links[0].answer(*ends), "127.0.0.1", 0)
    async with (
        asyncio.timeout(PATIENCE_S),
        server,
        Link(server.sockets[0].getsockname()[1]) as link,
    ):
        links.append(echo := Echo(link))
        try:
            yield echo
        finally:
            for peer in echo.peers:
                peer.writer.transport.abort()
                with suppress(OSError):
                    await peer.writer.wait_closed()


async def test_data_and_end_are_forwarded_in_both_directions() -> None:
    async with echoing() as echo:
        peer = await echo.peer()
        assert await peer.echoed(b"hello") == b"hello"
        peer.writer.write_eof()
        assert await peer.reader.read() == b""


async def test_a_reset_reaches_both_ends_and_new_connections_work() -> None:
    async with echoing() as echo:
        peer = await echo.peer()
        await peer.echoed(b"hello")
        echo.link.reset()
        with pytest.raises(ConnectionResetError):
            await peer.reader.read()
        with pytest.raises(ConnectionResetError):
            await echo.served[0].wait_closed()
        assert await (await echo.peer()).echoed(b"again") == b"again"


async def test_a_server_that_dies_breaks_the_connection() -> None:
    async with echoing() as echo:
        peer = await echo.peer()
        await peer.echoed(b"hello")
        echo.served[0].transport.abort()
        with suppress(ConnectionResetError):
            assert await peer.reader.read() == b""


async def test_stalled_data_arrives_later_in_order() -> None:
    async with echoing() as echo:
        peer = await echo.peer()
        await peer.echoed(b"hello")
        echo.link.stall()
        peer.writer.write(b"one ")
        late = await echo.peer()
        late.writer.write(b"late")
        peer.writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.reader.read(1), SOON_S)
        echo.link.heal()
        assert await peer.reader.readexactly(7) == b"one two"
        assert await late.reader.readexactly(4) == b"late"


async def test_a_half_open_connection_is_silent_until_it_is_healed() -> None:
    async with echoing() as echo:
        peer = await echo.peer()
        await peer.echoed(b"hello")
        echo.link.half_open()
        with suppress(OSError):
            await echo.served[0].wait_closed()
        peer.writer.write(b"anybody there?")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.reader.read(1), SOON_S)
        assert await (await echo.peer()).echoed(b"again") == b"again"
        echo.link.heal()
        with pytest.raises(ConnectionResetError):
            await peer.reader.read()


async def test_delay() -> None:
    async with echoing() as echo:
        peer = await echo.peer()
        await peer.echoed(b"hello")
        echo.link.delay_s = 0.05
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await peer.echoed(b"slowly") == b"slowly"
        assert loop.time() - began >= 0.09
