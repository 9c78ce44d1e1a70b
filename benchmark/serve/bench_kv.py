"""Savings of eviction by predicted next use, compared with LRU and with an optimal eviction.

    python -m benchmark.serve.bench_kv tool_pause --tools five two one
    python -m benchmark.serve.bench_kv dag --chats 10 --warm-up 10 --duration 100

Runs the real ServeCore with `sim` engines in virtual time: the same programs with `kv_eviction`
`lru` and `next_use`. For `tool_pause`, Belady's rule then replays the recorded turns offline
(kv_belady.py).
"""

import argparse
import asyncio
import random
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from itertools import count, product
from statistics import fmean
from typing import Any

from benchmark.apps.backends import read_counters, total
from benchmark.results import Report, run
from benchmark.serve.kv_belady import RANKS, Replay, Turn, mean_live
from benchmark.simulated import core_config, words
from parrot.cli.bench.sessions import BenchSession, Data, Piece, Var, spaced
from parrot.engine.config import SimConfig
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual

BLOCK_SIZE = 16
TASKS_CAPACITY = 16
EXACT = {"ignore_tokenizer_eos": True}
SYSTEM, MESSAGE, OUTPUT = 1000, 300, 60  # Tokens. A message has 0.5 to 1.5 times as many.
DOCUMENT = (1500, 4500)  # Minimum and maximum tokens.
COUNTERS = {
    "hit_tokens": "parrot_kv_hit_tokens_total",
    "recomputed_tokens": "parrot_kv_recomputed_tokens_total",
    "evicted_tokens": "parrot_kv_freed_tokens_total reason=room",
}


@dataclass(frozen=True)
class Setup:
    """`oversubscription`: tokens that are live at once, divided by the engines' capacity."""

    seed: int
    num_chats: int
    num_turns: int
    tools: str
    oversubscription: float
    warm_up_s: float  # Time that is not counted.
    duration_s: float


TOOLS_S: dict[str, dict[str, tuple[float, float]]] = {
    "five": {
        "lookup": (1.0, 3.0),
        "search": (3.0, 8.0),
        "test": (8.0, 15.0),
        "build": (15.0, 22.0),
        "deploy": (22.0, 30.0),
    },
    "two": {"lookup": (1.0, 3.0), "build": (20.0, 30.0)},
    "one": {"work": (1.0, 30.0)},
}
"""The duration of each tool is uniform between these seconds. Turns call both tools of `two`
equally often. They call the tools of `five` so that all pauses together are uniform from 1 to 30 s,
as with `one`."""


class Load(ABC):
    """Programs on seats. A seat runs one program after the other."""

    def __init__(self, setup: Setup, client: ServeClient) -> None:
        self.setup = setup
        self.client = client
        self.now = asyncio.get_running_loop().time

    async def run(self) -> None:
        draws = [random.Random(self.setup.seed * 1000 + i) for i in range(self.setup.num_chats)]
        await asyncio.gather(*(self.seat(number, draw) for number, draw in enumerate(draws)))

    @abstractmethod
    async def seat(self, number: int, draw: random.Random) -> None:
        """Run one program after the other, until cancelled."""

    @abstractmethod
    def figures(self, capacity: int) -> dict[str, Any]:
        """The measured figures, besides ServeCore's counters."""


class Chats(Load):
    """Chats with tools: each turn's answer calls a tool, whose result is the next message."""

    def __init__(self, setup: Setup, client: ServeClient) -> None:
        super().__init__(setup, client)
        self.turns: list[Turn] = []
        self._system = words(random.Random(0), SYSTEM)

    async def seat(self, number: int, draw: random.Random) -> None:
        await asyncio.sleep(draw.uniform(0, 30))
        for chat in count(number * 1000):
            await self._chat(chat, draw)

    def figures(self, capacity: int) -> dict[str, Any]:
        offline = {
            name: Replay(capacity, SYSTEM, BLOCK_SIZE, rank, self.setup.warm_up_s).run(self.turns)
            for name, rank in RANKS.items()
        }
        return {
            "num_turns": len(self.turns),
            "turn_s": fmean(turn.end - turn.start for turn in self.turns),
            "offline_recomputed_tokens": offline,
        }

    async def _chat(self, chat: int, draw: random.Random) -> None:
        session = await BenchSession.begin(self.client)
        length, previous = SYSTEM, None
        num_turns = draw.randint(self.setup.num_turns // 2, self.setup.num_turns * 3 // 2)
        for i in range(num_turns):
            tool, pause_s = self._draw_tool(draw)
            size = draw.randint(MESSAGE // 2, MESSAGE * 3 // 2)
            start = self.now()
            previous = await self._turn(session, previous, tool, words(draw, size))
            known, is_last = length if i else 0, i + 1 == num_turns
            length += size + OUTPUT
            self.turns.append(Turn(chat, start, self.now(), known, length, is_last))
            if not is_last:
                await asyncio.sleep(pause_s)
        await session.end()

    def _draw_tool(self, draw: random.Random) -> tuple[str, float]:
        tools = TOOLS_S[self.setup.tools]
        widths = [1.0 if self.setup.tools == "two" else b - a for a, b in tools.values()]
        (tool,) = draw.choices(list(tools), widths)
        return f"call_{tool}", draw.uniform(*tools[tool])

    async def _turn(
        self, session: BenchSession, previous: Var | None, tool: str, message: str
    ) -> Var:
        """A stateful call that continues the chat."""
        prompt = [Data(message)] if previous else [self._system, Data(message)]
        continued = previous.request_id if previous else None
        options: dict[str, Any] = {"func_name": tool, "successor_of": continued}
        out = await session.call(prompt, OUTPUT, sampling=EXACT, **options)
        await session.read(out, PerformanceCriteria.THROUGHPUT)
        return out


class Apps(Load):
    """Applications that read each document twice: first alone, then with a question that is
    generated from all first readings. All calls are submitted at once.

        read (doc i) -> question -> read again (doc i, question) -> answer"""

    def __init__(self, setup: Setup, client: ServeClient) -> None:
        super().__init__(setup, client)
        self.seconds: list[float] = []

    async def seat(self, number: int, draw: random.Random) -> None:
        await asyncio.sleep(draw.uniform(0, 10))
        while True:
            start = self.now()
            await self._app(draw)
            self.seconds.append(self.now() - start)
            await asyncio.sleep(draw.expovariate(1.0))

    def figures(self, capacity: int) -> dict[str, Any]:
        return {"num_apps": len(self.seconds), "jct_s": fmean(self.seconds)}

    async def _app(self, draw: random.Random) -> None:
        session = await BenchSession.begin(self.client)

        async def ask(name: str, *prompt: Piece) -> Var:
            prompt = (name, " ", *prompt)
            return await session.call(prompt, OUTPUT, sampling=EXACT, func_name=name)

        docs = [
            await session.create(f"doc{i}", words(draw, draw.randint(*DOCUMENT)))
            for i in range(self.setup.num_turns)
        ]
        facts = [await ask("Read", doc, " Facts:") for doc in docs]
        question = await ask("Ask", *spaced(facts))
        found = [await ask("Read", doc, " Now:", question, " ") for doc in docs]
        answer = await ask("Join", *spaced(found))
        await session.read(answer, PerformanceCriteria.THROUGHPUT)
        await session.end()


def _engine(capacity: int) -> SimConfig:
    """An engine with more KV than ServeCore uses, since only ServeCore's eviction is measured."""
    return SimConfig.model_validate(
        {
            "tokens_capacity": capacity,
            "tasks_capacity": TASKS_CAPACITY,
            "instance": {"num_kv_cache_blocks": 2 * capacity // BLOCK_SIZE + 4096},
        }
    )


async def _simulate(
    kind: type[Chats] | type[Apps], setup: Setup, policy: str, capacity: int
) -> tuple[Any, dict[str, int]]:
    """The programs, and ServeCore's counters after the warm-up."""
    core = core_config(kv_eviction=policy)
    async with SimCluster(1, engine=_engine(capacity), core=core) as cluster:
        load = kind(setup, cluster.client())
        running = asyncio.ensure_future(load.run())
        await asyncio.sleep(setup.warm_up_s)
        before = _counts(cluster)
        await asyncio.sleep(setup.duration_s - setup.warm_up_s)
        counts = {name: value - before[name] for name, value in _counts(cluster).items()}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        cluster.core.check_integrity()
    return load, counts


def _counts(cluster: SimCluster) -> dict[str, int]:
    counters = read_counters(b"".join(cluster.core.metrics()).decode())
    return {name: int(total(counters, counter)) for name, counter in COUNTERS.items()}


def compare(workload: str, setup: Setup) -> dict[str, Any]:
    """Both policies, on engines with less capacity than there are live tokens."""
    kind: type[Chats] | type[Apps] = Chats if workload == "tool_pause" else Apps
    live: float = setup.num_chats * setup.num_turns * sum(DOCUMENT) / 2
    if kind is Chats:
        roomy, _ = run_virtual(_simulate(Chats, setup, "lru", 10**8))
        live = mean_live(roomy.turns, SYSTEM, setup.warm_up_s, setup.duration_s)
    capacity = int(live / setup.oversubscription) // BLOCK_SIZE * BLOCK_SIZE
    row: dict[str, Any] = {"live_tokens": int(live), "capacity_tokens": capacity}
    for policy in ("lru", "next_use"):
        load, counts = run_virtual(_simulate(kind, setup, policy, capacity))
        row[policy] = counts | load.figures(capacity)
        if (offline := row[policy].get("offline_recomputed_tokens")) is not None:
            row[policy]["vs_belady"] = counts["recomputed_tokens"] / offline["belady"]
    lru, next_use = (row[policy]["recomputed_tokens"] for policy in ("lru", "next_use"))
    return row | {"next_use_over_lru": next_use / lru if lru else 1.0}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", choices=["tool_pause", "dag"])
    parser.add_argument(
        "--tools", choices=list(TOOLS_S), nargs="+", default=["five"], help="of `tool_pause`"
    )
    parser.add_argument("--chats", type=int, default=48, help="chats or applications at once")
    parser.add_argument(
        "--turns", type=int, default=12, help="turns of a chat, or documents of an application"
    )
    parser.add_argument("--oversubscription", type=float, nargs="+", default=[2.0])
    parser.add_argument("--warm-up", type=float, default=200.0, help="not counted")
    parser.add_argument("--duration", type=float, default=600.0, help="simulated seconds")
    parser.add_argument("--seeds", type=int, default=1)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", _engine(BLOCK_SIZE).model_dump(mode="json"))
    for tools, factor, seed in product(args.tools, args.oversubscription, range(args.seeds)):
        setup = Setup(seed, args.chats, args.turns, tools, factor, args.warm_up, args.duration)
        report.add("runs", {"setup": asdict(setup)} | compare(args.workload, setup))


if __name__ == "__main__":
    run(__name__)
