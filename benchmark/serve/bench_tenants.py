"""What one tenant's crowd of calls does to another's chat, on virtual time.

    python -m benchmark.serve.bench_tenants --output benchmark/results/tenants.json

Tenant A submits all its calls at once and reads every one. Tenant B has one chat: a turn, some
seconds to think, the next turn, each with the whole conversation before it; a new one after ten
turns. B's times, as its client sees them, are compared with those of the same chat alone. Besides,
A's tokens a second, alone and beside the chat: what the chat costs it.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.results import Report, run
from benchmark.simulated import ENGINES, core_config, sim_engine, words
from parrot.cli.bench.session import Data, Piece, Session
from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual

SAMPLING = {"ignore_tokenizer_eos": True, "temperature": 1.0}
TURNS_OF_A_CHAT = 10
CRITERIA = {"latency": PerformanceCriteria.LATENCY, "throughput": PerformanceCriteria.THROUGHPUT}


@dataclass
class Scene:
    """`crowd`: A's calls. `kind`: what their readers want. `query`: tokens of B's turns."""

    engine: SimConfig
    num_engines: int
    crowd: int
    kind: str
    query: int
    think_s: float
    turns: int
    settle_s: float = 5.0  # from when on the chat begins: the crowd generates by then
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """B's turns: seconds to the first piece, and for each token behind it; and A's output tokens
    until the chat ended, by the time at which their calls did."""

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    crowd_tokens: int = 0
    chat_s: float = 0.0
    crowd_s: float = 0.0


async def chat(client: ServeClient, scene: Scene, seen: Seen) -> None:
    draw, now = random.Random(7), asyncio.get_running_loop().time
    session, history = await Session.begin(client, "chat", "b"), list[Piece]()
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
    session, system = await Session.begin(client, "crowd", "a"), words(draw, 300)
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
    """The chat beside the crowd, until the chat has ended; without a crowd or without turns, the
    other alone."""

    async def main() -> Seen:
        seen = Seen()
        settings = {"max_queue_size": 100_000} | scene.settings
        core = core_config(**settings)
        async with SimCluster(scene.num_engines, engine=scene.engine, core=core) as cluster:
            crowded = asyncio.create_task(crowd(cluster.client(), scene, seen))
            if scene.turns:
                await asyncio.sleep(scene.settle_s)
                await chat(cluster.client(), scene, seen)
                seen.chat_s = asyncio.get_running_loop().time()
                if scene.crowd and crowded.done():
                    raise ValueError("the crowd is too small: it ended before the chat did")
                crowded.cancel()
                await asyncio.gather(crowded, return_exceptions=True)
            else:
                await crowded
        return seen

    return run_virtual(main())


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def compare(alone: Seen, beside: Seen) -> dict[str, float]:
    row = {}
    for name in ("first", "token"):
        for label, part in (("p50", 0.5), ("p99", 0.99)):
            before = percentile(getattr(alone, f"{name}_s"), part)
            after = percentile(getattr(beside, f"{name}_s"), part)
            row[f"{name}_{label}_alone_ms"] = round(1e3 * before, 3)
            row[f"{name}_{label}_ms"] = round(1e3 * after, 3)
            row[f"{name}_{label}_ratio"] = round(after / before, 3)
    return row


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", type=Path, default=ENGINES / "sim_llama_3_1_8b.json")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--crowd", type=int, default=10_000, help="calls of tenant A, per scene")
    parser.add_argument("--kinds", nargs="+", choices=sorted(CRITERIA), default=sorted(CRITERIA))
    parser.add_argument("--queries", type=int, nargs="+", default=[1000], help="tokens of a turn")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between turns")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument(
        "--unbound", action="store_true", help="also with `tenant_step_growth` null"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", args.engine)
    engine = sim_engine(args.engine)
    bounds: list[dict[str, Any]] = [{}]
    if args.unbound:
        bounds.append({"tenant_step_growth": None})
    for num_engines in args.engines:
        for query in args.queries:
            base = Scene(engine, num_engines, 0, "latency", query, args.think, args.turns)
            alone = play(base)
            for kind in args.kinds:
                for settings in bounds:
                    scene = Scene(
                        engine,
                        num_engines,
                        args.crowd,
                        kind,
                        query,
                        args.think,
                        args.turns,
                        settings=settings,
                    )
                    beside = play(scene)
                    row = {"engines": num_engines, "crowd": kind, "query": query}
                    row |= {"bound": not settings, **compare(alone, beside)}
                    row["crowd_tokens_per_s"] = round(beside.crowd_tokens / beside.crowd_s)
                    report.add("scenes", row)


if __name__ == "__main__":
    run(__name__)
