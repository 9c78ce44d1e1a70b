"""A simulated network. A `Latency` returns the seconds of one round trip."""

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

LAN_RTT_S = 0.3e-3  # Seconds of a round trip in a LAN.
WAN_MEDIAN_RTT_S = 0.238  # Median seconds of a round trip of distant clients.
WAN_SPREAD = 0.076  # Standard deviation of the logarithm of a distant client's round trip.


def fixed(rtt_s: float) -> Latency:
    return lambda: rtt_s


def lan() -> Latency:
    return fixed(LAN_RTT_S)


def wan(seed: int = 0) -> Latency:
    """Log-normal round trips with a median of 238 ms. 90% are between 210 and 270 ms."""
    draw = random.Random(seed)
    median = math.log(WAN_MEDIAN_RTT_S)
    return lambda: draw.lognormvariate(median, WAN_SPREAD)


def sampled(rtts_s: Sequence[float], seed: int = 0) -> Latency:
    """A random one of the measured values for each round trip."""
    draw = random.Random(seed)
    return lambda: draw.choice(rtts_s)


class DistantTransport:
    """A transport to an app with simulated latency. Each request draws a round trip. Half of it
    passes before the app receives the request, half before the client receives the answer. Aborts
    take no time."""

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
        """See `Transport`. Events are delayed in parallel: each arrives half a round trip after the
        app sends it."""
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
