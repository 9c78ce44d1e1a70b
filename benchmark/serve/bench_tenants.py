"""The effect of one tenant's many calls on another tenant's chat, in virtual time.

    python -m benchmark.serve.bench_tenants --output benchmark/results/tenants.json

Tenant A submits all its calls at once and reads all of them. Tenant B has one chat with several
seconds between turns. Each turn contains the whole conversation, and a new conversation starts
after ten turns. B's times, as its client sees them, are compared with the same chat alone. A's
tokens per second, alone and with the chat, show the cost of the chat.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.results import Report, run
from benchmark.simulated import ENGINES, core_config, sim_engine, words
from parrot.cli.bench.sessions import BenchSession, Data, Piece
from parrot.engine.config import SimConfig
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual

SAMPLING = {"ignore_tokenizer_eos": True, "temperature": 1.0}
TURNS_OF_A_CHAT = 10
CRITERIA = {"latency": PerformanceCriteria.LATENCY, "throughput": PerformanceCriteria.THROUGHPUT}


@dataclass
class Scene:
    """`crowd`: A's calls. `kind`: the criteria of their reads. `query`: tokens of B's turns."""

    engine: SimConfig
    num_engines: int
    crowd: int
    kind: str
    query: int
    think_s: float
    turns: int
    settle_s: float = 5.0  # The chat begins after this time, when A's calls are decoding.
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """B's turns: seconds to the first chunk, and seconds per later token. Also the output tokens of
    A's finished calls, the last of which finished at `crowd_s`."""

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    crowd_tokens: int = 0
    crowd_s: float = 0.0

    @property
    def crowd_rate(self) -> float:
        return round(self.crowd_tokens / self.crowd_s)


async def chat(client: ServeClient, scene: Scene, seen: Seen) -> None:
    """All turns, or the turns that end before A's last call."""
    draw, now = random.Random(7), asyncio.get_running_loop().time
    session, history = await BenchSession.begin(client, "chat", "b"), list[Piece]()
    for turn in range(scene.turns):
        if turn % TURNS_OF_A_CHAT == 0:
            history = [Data(words(draw, 2000))]
        history.append(Data(words(draw, scene.query)))
        num_tokens = draw.randint(100, 300)
        began = now()
        out = await session.call(history, num_tokens, sampling=SAMPLING, func_name="turn")
        times = (await session.stream(out)).arrivals
        seen.first_s.append(times[0] - began)
        seen.token_s.append((times[-1] - times[0]) / (num_tokens - 1))
        history.append(out)
        await asyncio.sleep(scene.think_s)
    await session.end()


async def crowd(client: ServeClient, scene: Scene, seen: Seen) -> None:
    draw = random.Random(3)
    session, system = await BenchSession.begin(client, "crowd", "a"), words(draw, 300)
    now = asyncio.get_running_loop().time

    async def one(query: str, num_tokens: int) -> None:
        out = await session.call([system, Data(query)], num_tokens, sampling=SAMPLING)
        await session.read(out, CRITERIA[scene.kind])
        seen.crowd_tokens += num_tokens
        seen.crowd_s = now()

    async with asyncio.TaskGroup() as group:
        for _ in range(scene.crowd):
            length, num_tokens = draw.randint(200, 800), draw.randint(50, 250)
            group.create_task(one(words(draw, length), num_tokens))


def play(scene: Scene) -> Seen:
    """Run the chat and A's calls until the chat ends. With no calls or no turns, the other runs
    alone."""

    async def main() -> Seen:
        seen = Seen()
        settings = {"max_queue_size": 100_000} | scene.settings
        core = core_config(**settings)
        async with SimCluster(scene.num_engines, engine=scene.engine, core=core) as cluster:
            crowded = asyncio.create_task(crowd(cluster.client(), scene, seen))
            if scene.turns:
                await asyncio.sleep(scene.settle_s)
                chatting = asyncio.create_task(chat(cluster.client(), scene, seen))
                first = asyncio.FIRST_COMPLETED if scene.crowd else asyncio.ALL_COMPLETED
                await asyncio.wait([crowded, chatting], return_when=first)
                for task in (crowded, chatting):
                    task.cancel()
                await asyncio.gather(crowded, chatting, return_exceptions=True)
            else:
                await crowded
        return seen

    return run_virtual(main())


def percentile(values: Sequence[float], part: float) -> float:
    """The percentile by nearest rank."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def compare(alone: Seen, beside: Seen) -> dict[str, float]:
    """The ratios of turns that overlap A's calls. Raises `ValueError` if no turn does."""
    if not beside.token_s:
        raise ValueError("tenant A has too few calls: they ended before the chat's first turn")
    row: dict[str, float] = {"turns": len(beside.token_s)}
    for name in ("first", "token"):
        for label, part in (("p50", 0.5), ("p99", 0.99)):
            number = len(beside.token_s)
            before = percentile(getattr(alone, f"{name}_s")[:number], part)
            after = percentile(getattr(beside, f"{name}_s")[:number], part)
            row[f"{name}_{label}_alone_ms"] = round(1e3 * before, 3)
            row[f"{name}_{label}_ms"] = round(1e3 * after, 3)
            row[f"{name}_{label}_ratio"] = round(after / before, 3)
    return row


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", type=Path, default=ENGINES / "sim_llama_3_1_8b.json")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--crowd", type=int, default=10_000, help="calls of tenant A")
    parser.add_argument("--kinds", nargs="+", choices=sorted(CRITERIA), default=sorted(CRITERIA))
    parser.add_argument("--queries", type=int, nargs="+", default=[1000, 100], help="tokens a turn")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between turns")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before the chat begins")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", args.engine)
    engine = sim_engine(args.engine)

    def scene(crowd: int, kind: str, query: int, turns: int, **settings: Any) -> Scene:
        return Scene(
            engine,
            args.engines,
            crowd,
            kind,
            query,
            args.think,
            turns,
            args.settle,
            settings,
        )

    bounds: dict[str, dict[str, Any]] = {"0.25": {}, "none": {"tenant_step_growth": None}}
    for query in args.queries:
        alone = play(scene(0, "latency", query, args.turns))
        for kind in args.kinds:
            for bound, settings in bounds.items():
                beside = play(scene(args.crowd, kind, query, args.turns, **settings))
                row = {"crowd": kind, "query": query, "step_growth": bound}
                row |= compare(alone, beside)
                report.add("scenes", row | {"crowd_tokens_per_s": beside.crowd_rate})
    for kind in args.kinds:
        seen = play(scene(args.crowd, kind, 0, 0))
        report.add("crowd_alone", {"crowd": kind, "tokens_per_s": seen.crowd_rate})


if __name__ == "__main__":
    run(__name__)
