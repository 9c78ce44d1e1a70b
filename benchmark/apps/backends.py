"""Servers as programs use them, in each style: at a distance, and with what they count themselves,
in Prometheus' text format."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from parrot.cli.bench.program import Backend, Network, ProgramCall, ProgramOutput
from parrot.cli.bench.styles import (
    BenchSession,
    Data,
    GraphProgram,
    OpenAIProgram,
    OpenAITarget,
    WaitingProgram,
    close_session,
    openai_http,
    submit_call,
)
from parrot.protocol.serve_client import ServeClient

Counters = Mapping[str, float]
Scrape = Callable[[], Awaitable[str]]
"""Gives a server's metrics page; "" if it has none."""


@dataclass(frozen=True, slots=True)
class CountedBackend(Backend):
    """One whose server counts."""

    scrape: Scrape

    async def counters(self) -> Counters:
        """What the server has counted since it began."""
        return read_counters(await self.scrape())


EAGER_TOKENS = "parrot_eager_fill_tokens_total outcome=filled"

_WANTED = (
    "parrot_kv_",
    "parrot_eager_",
    "parrot_calls_reused",
    "parrot_call_retries",
    "vllm:prefix_cache",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
)
_TOTAL = "_total"


def read_counters(page: str) -> Counters:
    """Those that say something of a run, by "name label=value ..."."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(_WANTED) and sample.name.endswith(_TOTAL):
                labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
                found[" ".join([sample.name, *labels])] = sample.value
    return found


def total(counters: Counters, name: str) -> float:
    """The sum over the labels that `name` leaves open; it may end with the first of them."""
    return sum(value for key, value in counters.items() if key.startswith(name))


def growth(before: Counters, after: Counters) -> dict[str, float]:
    """What has been counted in between, without what has not changed."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value}


def scrape(base_url: str, token: str | None = None) -> Scrape:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def get() -> str:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{base_url}/metrics") as response,
        ):
            return await response.text() if response.ok else ""

    return get


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


async def openai_backend(
    base_url: str, network: Network, model: str | None = None, api_key: str | None = None
) -> CountedBackend:
    """`model`: by default the one that the server names first."""
    http = openai_http(base_url, api_key)
    if model is None:
        answer = await http.request("GET", "/v1/models")
        model = str(answer["data"][0]["id"])
    target = OpenAITarget(http, model)
    return CountedBackend(lambda app: OpenAIProgram(target, network), http.close, scrape(base_url))


def parrot_backend(
    client: ServeClient, scrape: Scrape, network: Network, *, whole_graph: bool
) -> CountedBackend:
    """`whole_graph`: programs submit their graphs; otherwise one request after the other."""
    kind = GraphProgram if whole_graph else RequestProgram
    return CountedBackend(lambda app: kind(client, network, app), client.close, scrape)


class RequestProgram(WaitingProgram):
    """ServeCore as a server of single requests: each call is a session of its own, so nothing of
    the graph is known. What an OpenAI client costs, one round trip, is what it costs here."""

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
                var = await submit_call(session, call, inputs)
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
