import asyncio

import pytest

from parrot.protocol.errors import Unavailable
from parrot.protocol.failover_client import LivenessProbe


class Server:
    def __init__(self) -> None:
        self.num_asked = 0
        self.hangs = False

    async def ask(self) -> None:
        self.num_asked += 1
        if self.hangs:
            raise Unavailable("no answer")


async def test_a_read_continues_while_the_server_is_alive() -> None:
    server, read = Server(), asyncio.get_running_loop().create_future()
    guarded = asyncio.create_task(LivenessProbe(server.ask, 0.01).guard(read))
    await asyncio.sleep(0.05)
    assert server.num_asked >= 2
    read.set_result("value")
    assert await guarded == "value"


async def test_every_read_ends_when_the_server_hangs() -> None:
    server = Server()
    server.hangs = True
    probe = LivenessProbe(server.ask, 0.01)
    reads = [asyncio.get_running_loop().create_future() for _ in range(50)]
    results = await asyncio.gather(*(probe.guard(r) for r in reads), return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    assert all(read.cancelled() for read in reads)
    assert server.num_asked < 10


async def test_a_fast_read_sends_no_probe_and_keeps_its_error() -> None:
    server = Server()

    async def fail() -> str:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await LivenessProbe(server.ask, 10).guard(fail())
    assert server.num_asked == 0


async def test_cancelling_cancels_the_read() -> None:
    read: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    guarded = asyncio.create_task(LivenessProbe(Server().ask, 10).guard(read))
    await asyncio.sleep(0)
    guarded.cancel()
    with pytest.raises(asyncio.CancelledError):
        await guarded
    assert read.cancelled()
