"""What eviction by the predicted next use saves, against LRU and against one that knows the future.

    python -m benchmark.serve.bench_kv tool_pause --tools five two one
    python -m benchmark.serve.bench_kv dag --chats 10 --warm-up 10 --duration 100

Runs the real ServeCore over `sim` engines on virtual time, the same programs with `kv_eviction`
`lru` and `next_use`. For `tool_pause` the recorded turns are then replayed offline by Belady's
rule (see kv_belady.py).
"""

import argparse
import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count, product
from statistics import fmean
from typing import Any

from benchmark.results import Report, run
from benchmark.serve.common import Data, Session, Var, core_config, words
from benchmark.serve.kv_belady import Replay, Turn, farthest, mean_live, oldest
from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual

BLOCK_SIZE = 16
TASKS_CAPACITY = 16
EXACT = {"ignore_tokenizer_eos": True}


@dataclass(frozen=True)
class Setup:
    """`oversubscription`: tokens that are live at once, over what the engines hold."""

    seed: int
    num_chats: int
    num_turns: int
    tools: str
    oversubscription: float
    warm_up_s: float  # not counted
    duration_s: float
    system: int = 1000
    message: int = 300
    output: int = 60


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
"""How long each tool takes: uniform between these. A turn calls any of `two` equally often, and of
`five` so that all pauses together are uniform from 1 to 30 s, as they are with `one`."""


class Chats:
    """Chats with tools: each turn's answer calls a tool, whose result is the next message."""

    def __init__(self, setup: Setup, client: ServeClient) -> None:
        self.setup = setup
        self.turns: list[Turn] = []
        self._client = client
        self._system = words(random.Random(0), setup.system)

    async def run(self) -> None:
        await asyncio.gather(*(self._seat(i) for i in range(self.setup.num_chats)))

    async def _seat(self, seat: int) -> None:
        """One chat after the other."""
        draw = random.Random(self.setup.seed * 1000 + seat)
        await asyncio.sleep(draw.uniform(0, 30))
        for number in count():
            await self._chat(seat * 1000 + number, draw)

    async def _chat(self, chat: int, draw: random.Random) -> None:
        setup = self.setup
        session, now = await Session.begin(self._client), asyncio.get_running_loop().time
        length, previous = setup.system, None
        num_turns = draw.randint(setup.num_turns // 2, setup.num_turns * 3 // 2)
        for i in range(num_turns):
            tool, pause_s = self._draw_tool(draw)
            size = draw.randint(setup.message // 2, setup.message * 3 // 2)
            start = now()
            previous = await self._turn(session, previous, tool, words(draw, size))
            total = length + size + setup.output
            known, is_last = length if i else 0, i + 1 == num_turns
            self.turns.append(Turn(chat, start, now(), known, total, total, is_last))
            length = total
            if not is_last:
                await asyncio.sleep(pause_s)
        await session.end()

    def _draw_tool(self, draw: random.Random) -> tuple[str, float]:
        tools = TOOLS_S[self.setup.tools]
        widths = [1.0 if self.setup.tools == "two" else b - a for a, b in tools.values()]
        (tool,) = draw.choices(list(tools), widths)
        return f"call_{tool}", draw.uniform(*tools[tool])

    async def _turn(self, session: Session, previous: Var | None, tool: str, message: str) -> Var:
        """A stateful call, which continues the chat so far."""
        begin, request_id = (
            ([self._system], None) if previous is None else ([], previous.request_id)
        )
        out = await session.call(
            [*begin, Data(message)],
            self.setup.output,
            sampling=EXACT,
            func_name=tool,
            successor_of=request_id,
        )
        await session.read(out, PerformanceCriteria.THROUGHPUT)
        return out


class Apps:
    """Applications that read their documents twice: once each, then again with a question that
    comes from what all said. Everything is submitted at once.

        read (doc i) -> question -> read again (doc i, question) -> answer"""

    def __init__(self, setup: Setup, client: ServeClient) -> None:
        self.setup = setup
        self.seconds: list[float] = []
        self._client = client

    async def run(self) -> None:
        await asyncio.gather(*(self._seat(i) for i in range(self.setup.num_chats)))

    async def _seat(self, seat: int) -> None:
        draw = random.Random(self.setup.seed * 1000 + seat)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(draw.uniform(0, 10))
        while True:
            start = loop.time()
            await self._app(draw)
            self.seconds.append(loop.time() - start)
            await asyncio.sleep(draw.expovariate(1.0))

    async def _app(self, draw: random.Random) -> None:
        session, num_docs = await Session.begin(self._client), self.setup.num_turns

        async def ask(name: str, *prompt: str | Var) -> Var:
            tokens = self.setup.output
            return await session.call([name, " ", *prompt], tokens, sampling=EXACT, func_name=name)

        docs = [
            await session.create(f"doc{i}", words(draw, draw.randint(1500, 4500)))
            for i in range(num_docs)
        ]
        facts = [await ask("Read", doc, " Facts:") for doc in docs]
        question = await ask("Ask", *spaced(facts))
        found = [await ask("Read", doc, " Now:", question, " ") for doc in docs]
        answer = await ask("Join", *spaced(found))
        await session.read(answer, PerformanceCriteria.THROUGHPUT)
        await session.end()


def spaced(pieces: Sequence[Var]) -> list[str | Var]:
    return [part for piece in pieces for part in (piece, " ")]


def _engine(capacity: int) -> SimConfig:
    """The KV pool has room to spare: it is ServeCore's eviction that is compared."""
    return SimConfig.model_validate(
        {
            "tokens_capacity": capacity,
            "tasks_capacity": TASKS_CAPACITY,
            "instance": {"num_kv_cache_blocks": 2 * capacity // BLOCK_SIZE + 4096},
        }
    )


async def _simulate(
    workload: type[Chats] | type[Apps], setup: Setup, policy: str, capacity: int
) -> tuple[Any, dict[str, int]]:
    core = core_config(kv_eviction=policy)
    async with SimCluster(1, engine=_engine(capacity), core=core) as cluster:
        programs = workload(setup, cluster.client())
        running = asyncio.ensure_future(programs.run())
        await asyncio.sleep(setup.warm_up_s)
        before = _counts(cluster)
        await asyncio.sleep(setup.duration_s - setup.warm_up_s)
        counts = {name: value - before[name] for name, value in _counts(cluster).items()}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        cluster.core.check_integrity()
    return programs, counts


def _counts(cluster: SimCluster) -> dict[str, int]:
    text = cluster.core.metrics().decode()
    return {
        "hit_tokens": _metric(text, "parrot_kv_hit_tokens_total"),
        "recomputed_tokens": _metric(text, "parrot_kv_recomputed_tokens_total"),
        "evicted_tokens": _metric(text, 'parrot_kv_freed_tokens_total{reason="room"}'),
    }


def _metric(text: str, name: str) -> int:
    """The sum over its labels."""
    lines = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, lines)))


def tool_pause(setup: Setup) -> dict[str, Any]:
    roomy, _ = run_virtual(_simulate(Chats, setup, "lru", 10**8))
    live = mean_live(roomy.turns, setup.system, setup.warm_up_s, setup.duration_s)
    capacity = int(live / setup.oversubscription) // BLOCK_SIZE * BLOCK_SIZE
    result: dict[str, Any] = {"live_tokens": int(live), "capacity_tokens": capacity}
    for policy in ("lru", "next_use"):
        chats, counts = run_virtual(_simulate(Chats, setup, policy, capacity))
        offline = {
            name: Replay(capacity, setup.system, BLOCK_SIZE, rank, setup.warm_up_s).run(chats.turns)
            for name, rank in (("belady", farthest), ("lru", oldest))
        }
        result[policy] = counts | {
            "num_turns": len(chats.turns),
            "turn_s": fmean(turn.end - turn.start for turn in chats.turns),
            "offline_recomputed_tokens": offline,
            "vs_belady": counts["recomputed_tokens"] / offline["belady"],
        }
    return result | _ratios(result)


def dag(setup: Setup) -> dict[str, Any]:
    live = setup.num_chats * setup.num_turns * 3000
    capacity = int(live / setup.oversubscription) // BLOCK_SIZE * BLOCK_SIZE
    result: dict[str, Any] = {"live_tokens": live, "capacity_tokens": capacity}
    for policy in ("lru", "next_use"):
        apps, counts = run_virtual(_simulate(Apps, setup, policy, capacity))
        result[policy] = counts | {"num_apps": len(apps.seconds), "jct_s": fmean(apps.seconds)}
    return result | _ratios(result)


def _ratios(result: dict[str, Any]) -> dict[str, float]:
    lru, next_use = result["lru"]["recomputed_tokens"], result["next_use"]["recomputed_tokens"]
    return {"next_use_over_lru": next_use / lru if lru else 1.0}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", choices=["tool_pause", "dag"])
    parser.add_argument(
        "--tools", choices=list(TOOLS_S), nargs="+", default=["five"], help="of `tool_pause`"
    )
    parser.add_argument("--chats", type=int, default=48, help="chats or applications at once")
    parser.add_argument("--turns", type=int, default=12, help="turns of a chat, or documents")
    parser.add_argument("--oversubscription", type=float, nargs="+", default=[2.0])
    parser.add_argument("--warm-up", type=float, default=200.0, help="not counted")
    parser.add_argument("--duration", type=float, default=600.0, help="simulated seconds")
    parser.add_argument("--seeds", type=int, default=1)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", _engine(BLOCK_SIZE).model_dump(mode="json"))
    report["runs"] = []
    for tools, factor, seed in product(args.tools, args.oversubscription, range(args.seeds)):
        setup = Setup(seed, args.chats, args.turns, tools, factor, args.warm_up, args.duration)
        row = tool_pause(setup) if args.workload == "tool_pause" else dag(setup)
        report["runs"].append({"setup": asdict(setup)} | row)


if __name__ == "__main__":
    run(__name__)
