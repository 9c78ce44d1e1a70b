"""Simulated network: a `Latency` gives the seconds of one round trip."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Unpack

from parrot.protocol.errors import ParrotError
from parrot.protocol.transport import App, AppTransport, RequestOptions, StreamOptions
from parrot.utils.tasks import TaskSet

Latency = Callable[[], float]

LAN_RTT_S = 0.3e-3
WAN_MEDIAN_RTT_S = 0.238
WAN_SPREAD = 0.076  # standard deviation of the logarithm, of clients far away


def fixed(rtt_s: float) -> Latency:
    return lambda: rtt_s


def lan() -> Latency:
    return fixed(LAN_RTT_S)


def wan(seed: int = 0) -> Latency:
    """Log-normal around a median of 238 ms, nine of ten between 210 and 270."""
    draw = random.Random(seed)
    median = math.log(WAN_MEDIAN_RTT_S)
    return lambda: draw.lognormvariate(median, WAN_SPREAD)


def sampled(rtts_s: Sequence[float], seed: int = 0) -> Latency:
    """One of the measured values each time."""
    draw = random.Random(seed)
    return lambda: draw.choice(rtts_s)


class DistantTransport:
    """A transport to an app that is `latency` away: each request draws a round trip, of which half
    passes on either way. An abort takes no time."""

    def __init__(self, app: App, latency: Latency) -> None:
        self._transport = AppTransport(app)
        self._latency = latency
        self._senders = TaskSet()

    async def close(self) -> None:
        await self._senders.close()
        await self._transport.close()

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        way_s = self._latency() / 2
        await asyncio.sleep(way_s)
        try:
            answer = await self._transport.request(method, path, **options)
        except ParrotError:
            await asyncio.sleep(way_s)
            raise
        await asyncio.sleep(way_s)
        return answer

    async def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Events follow each other on their way, as fast as they are made."""
        way_s = self._latency() / 2
        await asyncio.sleep(way_s)
        loop = asyncio.get_running_loop()
        arriving: asyncio.Queue[tuple[float, tuple[str, bytes] | ParrotError | None]]
        arriving = asyncio.Queue()

        async def send() -> None:
            end: ParrotError | None = None
            try:
                async with aclosing(self._transport.stream(method, path, **options)) as events:
                    async for event in events:
                        arriving.put_nowait((loop.time() + way_s, event))
            except ParrotError as error:
                end = error
            arriving.put_nowait((loop.time() + way_s, end))

        sender = self._senders.spawn(send(), name=f"{method} {path}, from afar")
        try:
            while True:
                when, event = await arriving.get()
                await asyncio.sleep(max(0.0, when - loop.time()))
                if isinstance(event, ParrotError):
                    raise event
                if event is None:
                    return
                yield event
        finally:
            sender.cancel()
