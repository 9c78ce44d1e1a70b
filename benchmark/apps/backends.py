"""A ServeCore client with a network delay, and ServeCore's counters."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from parrot.cli.bench.program import Backend, Network, ProgramCall, ProgramOutput
from parrot.cli.bench.sessions import BenchSession, Data, close_session, prompt_of, sampling_of
from parrot.cli.bench.variables import GraphProgram
from parrot.cli.bench.waiting import WaitingProgram
from parrot.protocol.serve_client import ServeClient

Counters = Mapping[str, float]
Scrape = Callable[[], Awaitable[str]]
"""Returns a server's metrics page."""


@dataclass(frozen=True, slots=True)
class CountedBackend(Backend):
    """A backend whose server has a metrics page."""

    scrape: Scrape

    async def counters(self) -> Counters:
        """The server's counters since it started."""
        return read_counters(await self.scrape())


EAGER_TOKENS = "parrot_eager_fill_tokens_total outcome=filled"

_WANTED = ("parrot_kv_", "parrot_eager_", "parrot_calls_reused", "parrot_call_retries")
_TOTAL = "_total"


def read_counters(page: str) -> Counters:
    """The counters of caches and of saved work, by "name label=value ..."."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(_WANTED) and sample.name.endswith(_TOTAL):
                labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
                found[" ".join([sample.name, *labels])] = sample.value
    return found


def total(counters: Counters, name: str) -> float:
    """The sum of the counters that start with `name`, which may include some labels."""
    return sum(value for key, value in counters.items() if key.startswith(name))


def growth(before: Counters, after: Counters) -> dict[str, float]:
    """The increase of each counter, without those that did not change."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value}


LAN_RTT_S = 0.3e-3
WAN_FILE = Path(__file__).parent / "data" / "client_rtt_ms.txt"
NETWORKS = ("none", "lan", "wan")

_TIMER_RESOLUTION_S = 2e-3  # Timers of an event loop fire up to a millisecond late.

Sleep = Callable[[float], Awaitable[None]]


async def exact_sleep(seconds: float) -> None:
    """Sleep exactly, also for less than the resolution of a timer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    if seconds > _TIMER_RESOLUTION_S:
        await asyncio.sleep(seconds - _TIMER_RESOLUTION_S)
    while loop.time() < end:  # noqa: ASYNC110 - no timer has this resolution
        await asyncio.sleep(0)


class DelayedNetwork(Network):
    """Adds a round trip to each request of the client: one half before the server receives the
    request, the other half before the client receives the answer. WAN: measured samples, drawn with
    a seed."""

    def __init__(self, kind: str, seed: int = 0, sleep: Sleep = exact_sleep) -> None:
        """`kind`: one of `NETWORKS`. `sleep`: on virtual time `asyncio.sleep`."""
        samples = [float(line) for line in WAN_FILE.read_text().split()]
        self._samples_s = {"none": [0.0], "lan": [LAN_RTT_S], "wan": [ms / 1e3 for ms in samples]}[
            kind
        ]
        self._rng = random.Random(seed)
        self._sleep = sleep

    @asynccontextmanager
    async def trip(self) -> AsyncIterator[float]:
        """The block runs at the server. Yields the seconds until the answer reaches the client."""
        way_s = self._rng.choice(self._samples_s) / 2
        if not way_s:
            yield 0.0
            return
        await self._sleep(way_s)
        yield way_s
        await self._sleep(way_s)


def parrot_backend(
    client: ServeClient, scrape: Scrape, network: Network, *, whole_graph: bool
) -> CountedBackend:
    """`whole_graph`: programs submit their graphs; otherwise one request after the other."""
    kind = GraphProgram if whole_graph else RequestProgram
    return CountedBackend(lambda app: kind(client, network, app), client.close, scrape)


class RequestProgram(WaitingProgram):
    """ServeCore as a server of single requests: each call has its own session, so ServeCore does
    not know the graph. A call costs one round trip, as it does with a client of OpenAI's API."""

    def __init__(self, client: ServeClient, network: Network, app: str) -> None:
        super().__init__()
        self._client = client
        self._network = network
        self._app = app
        self._releases: list[asyncio.Task[None]] = []

    async def _complete(self, call: ProgramCall, texts: Sequence[str]) -> str:
        inputs = {
            piece: Data(text)
            for piece, text in zip(call.prompt, texts, strict=True)
            if isinstance(piece, ProgramOutput)
        }
        async with self._network.trip() as way_s:
            session = await BenchSession.begin(self._client, self._app)
            try:
                prompt, sampling = prompt_of(call, inputs), sampling_of(call)
                var = await session.call(
                    prompt, call.output.tokens, sampling=sampling, func_name=call.function
                )
                if call.streamed:
                    times = await session.stream(var)
                    self.account.streams[call.output] = times.later(way_s)
                return await session.read(var)
            finally:
                self._releases.append(self._loop.create_task(self._release(session)))

    async def end(self) -> None:
        await super().end()
        await asyncio.gather(*self._releases)

    async def _release(self, session: BenchSession) -> None:
        self.account.usages += await close_session(session)
