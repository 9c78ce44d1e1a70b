"""Mean and tail of job completion times under each order policy, on the same simulated engines.

    python -m benchmark.serve.bench_policies mixed --slots 8
    python -m benchmark.serve.bench_policies chain_many --slots 16

`mixed`: chains, map-reduces, single chats and fans of candidates with a judge, a quarter of the
jobs each, arrive by a Poisson process at a share of the rate at which the cluster gets through a
burst of such jobs. `chain_many`: 25 chains at once. Everything but the engines' steps is the real
system, on virtual time; seeds and so jobs are the same for every policy. Some chats come first, one
by one: from them the service learns the speed of its engines and how many tokens a text has.
"""

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, get_args

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.common import ENGINES, Data, Session, Var, core_config, sim_engine
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import OrderName
from parrot.simulation import SimCluster, fixed, run_virtual

POLICIES = get_args(OrderName)
NUM_FIRST = 8  # chats that do not count
TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=100_000))


class Call(NamedTuple):
    """`taken`: the earlier calls of the job whose outputs it takes. Lengths in tokens, which are
    characters here; `num_own` is what no other call has."""

    function: str
    num_own: int
    num_output: int
    taken: tuple[int, ...] = ()


class Job(NamedTuple):
    """The output of the last call is what the program waits for."""

    kind: str
    arrives: float
    calls: list[Call]


def chain(rng: random.Random) -> list[Call]:
    steps = range(rng.randint(5, 20))
    return [_step("refine", rng, (i - 1,) if i else ()) for i in steps]


def map_reduce(rng: random.Random) -> list[Call]:
    maps = [_step("map", rng) for _ in range(rng.randint(10, 30))]
    return [*maps, Call("reduce", 60, rng.randint(100, 200), tuple(range(len(maps))))]


def chat(rng: random.Random) -> list[Call]:
    return [Call("chat", rng.randint(50, 1000), rng.randint(30, 400))]


def fan(rng: random.Random) -> list[Call]:
    size = rng.randint(300, 600)
    tries = [Call("try", size, rng.randint(100, 200)) for _ in range(rng.randint(4, 12))]
    return [*tries, Call("judge", 60, 30, tuple(range(len(tries))))]


def _step(function: str, rng: random.Random, taken: tuple[int, ...] = ()) -> Call:
    return Call(function, rng.randint(600, 1500), rng.randint(30, 100), taken)


KINDS: tuple[Callable[[random.Random], list[Call]], ...] = (chain, map_reduce, chat, fan)


def mixed(seed: int, num_jobs: int, rate: float) -> list[Job]:
    """`rate` in jobs per second; infinite for a burst."""
    rng, now, jobs = random.Random(seed), 0.0, []
    for i in range(num_jobs):
        now += rng.expovariate(1.0) / rate
        make = KINDS[i % len(KINDS)]
        jobs.append(Job(make.__name__, now, make(rng)))
    return jobs


def chain_many(num_apps: int) -> list[Job]:
    """Of 20 steps each: a chunk of 2048 tokens, an instruction of 60 and the summary so far. They
    come a millisecond after each other."""
    calls = [Call("refine", 2048, 50, (i - 1,) if i else ()) for i in range(20)]
    return [Job("chain", i * 1e-3, calls) for i in range(num_apps)]


class Run:
    """One simulation of some jobs."""

    def __init__(self, jobs: Sequence[Job], policy: str, args: argparse.Namespace) -> None:
        self._jobs = jobs
        self._core = core_config(policy=policy, max_queue_size=10**9)
        self._args = args
        engine = sim_engine(args.engine)
        limits = engine.scheduler
        if args.mixed_fill_tokens:
            limits = limits.model_copy(update={"mixed_fill_tokens": args.mixed_fill_tokens})
        changes = {"tasks_capacity": args.slots, "scheduler": limits}
        self._engine = engine.model_copy(update=changes)
        self._rng = random.Random(1)
        self._start = 0.0
        self.ends: list[tuple[str, float, float]] = []  # kind, completion time, when

    def __call__(self) -> "Run":
        run_virtual(self._main())
        return self

    async def _main(self) -> None:
        async with SimCluster(self._args.engines, engine=self._engine, core=self._core) as cluster:
            client = cluster.client(fixed(0.0))
            draw = random.Random(2)
            for _ in range(NUM_FIRST):
                await self._job(client, Job("first", 0.0, chat(draw)))
            self.ends.clear()
            self._start = asyncio.get_running_loop().time()
            await asyncio.gather(*[self._job(client, job) for job in self._jobs])
            cluster.core.check_integrity()

    async def _job(self, client: ServeClient, job: Job) -> None:
        await asyncio.sleep(job.arrives)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        session = await Session.begin(client)
        outputs: list[Var] = []
        for call in job.calls:
            outputs.append(await self._call(session, call, [outputs[i] for i in call.taken]))
        await session.read(outputs[-1])
        self.ends.append((job.kind, loop.time() - begin, loop.time() - self._start))
        await session.end()

    async def _call(self, session: Session, call: Call, taken: Sequence[Var]) -> Var:
        start = self._rng.randrange(len(TEXT) - call.num_own)
        own = Data(TEXT[start : start + call.num_own])
        instruction = f"Instruction of {call.function}: ".ljust(60, ".")
        inputs = [piece for var in taken for piece in (var, " ")][:-1]
        tokens, sampling = call.num_output, {"ignore_tokenizer_eos": True}
        if self._args.unknown_lengths:
            tokens, sampling = 512, {"stop_str": "z"}
        prompt = [instruction, own, *inputs]
        return await session.call(prompt, tokens, sampling=sampling, func_name=call.function)


def capacity(args: argparse.Namespace) -> float:
    """Jobs per second: how fast the cluster gets through a burst of them, to its end."""
    run = Run(mixed(999, args.jobs, float("inf")), "fcfs", args)()
    return len(run.ends) / max(when for _, _, when in run.ends)


def summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    middle, tail = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return {"mean": round(mean(ordered), 3), "p50": round(middle, 3), "p99": round(tail, 3)}


def compare(make_jobs: Callable[[int], list[Job]], args: argparse.Namespace) -> dict[str, Any]:
    """Times by policy and kind of job, and how many times longer the mean of each policy is than
    that of the default, by seed."""
    policies: dict[str, Any] = {}
    means: dict[str, list[float]] = {}
    for policy in args.policies:
        times: dict[str, list[float]] = defaultdict(list)
        means[policy] = []
        for seed in args.seeds:
            ends = Run(make_jobs(seed), policy, args)().ends
            means[policy].append(mean(jct for _, jct, _ in ends))
            for kind, jct, _ in ends:
                times[kind].append(jct)
                times["all"].append(jct)
        policies[policy] = {kind: summary(values) for kind, values in sorted(times.items())}
        print(f"{policy:14}", *(f"{k}: {v}" for k, v in policies[policy].items()), flush=True)
    best = means[args.policies[0]]
    ratios = {
        policy: [round(other / own, 3) for other, own in zip(values, best, strict=True)]
        for policy, values in means.items()
    }
    return {"jct_s": policies, "mean_vs_first_by_seed": ratios}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", choices=["mixed", "chain_many"])
    parser.add_argument("--engine", type=Path, default=ENGINES / "sim_llama_2_13b.json")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16, help="calls that an engine runs at once")
    parser.add_argument("--mixed-fill-tokens", type=int, help="instead of the engine's default")
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--apps", type=int, default=25, help="of chain_many")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument(
        "--unknown-lengths", action="store_true", help="outputs end by chance: they must be learnt"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", args.engine)
    if args.workload == "mixed":
        rate = capacity(args)
        report["capacity_jobs_per_s"] = round(rate, 3)
        report |= compare(lambda seed: mixed(seed, args.jobs, args.load * rate), args)
    else:
        args.seeds, args.engines = [0], 1
        report |= compare(lambda _: chain_many(args.apps), args)


if __name__ == "__main__":
    run_benchmark(__name__)
