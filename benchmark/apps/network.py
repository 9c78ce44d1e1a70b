"""How far the client is from the server: a delay for each request that the client makes."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from parrot.cli.bench.program import Network

LAN_RTT_S = 0.3e-3
WAN_FILE = Path(__file__).parent / "data" / "client_rtt_ms.txt"
NETWORKS = ("none", "lan", "wan")

_TIMER_RESOLUTION_S = 2e-3  # an event loop's timers come up to a millisecond late

Sleep = Callable[[float], Awaitable[None]]


async def exact_sleep(seconds: float) -> None:
    """For delays that are shorter than what a timer can do."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    if seconds > _TIMER_RESOLUTION_S:
        await asyncio.sleep(seconds - _TIMER_RESOLUTION_S)
    while loop.time() < end:  # noqa: ASYNC110 - nothing else tells so small times
        await asyncio.sleep(0)


class DelayedNetwork(Network):
    """Round trips of the client's requests, one half before the server sees the request, the other
    before the client sees the answer. WAN: measured samples, drawn with a seed."""

    def __init__(self, kind: str, seed: int = 0, sleep: Sleep = exact_sleep) -> None:
        """`kind`: one of `NETWORKS`. `sleep`: on virtual time `asyncio.sleep`."""
        samples = [float(line) for line in WAN_FILE.read_text().split()]
        self._samples_s = {"none": [0.0], "lan": [LAN_RTT_S], "wan": [ms / 1e3 for ms in samples]}[
            kind
        ]
        self._rng = random.Random(seed)
        self._sleep = sleep
        self.is_far = kind == "wan"

    @asynccontextmanager
    async def trip(self) -> AsyncIterator[float]:
        """What is done inside happens at the server; gives the seconds of the way back."""
        way_s = self._rng.choice(self._samples_s) / 2
        if not way_s:
            yield 0.0
            return
        await self._sleep(way_s)
        yield way_s
        await self._sleep(way_s)
