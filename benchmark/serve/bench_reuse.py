"""The savings of stopped losers and of reused results, and the cost of the lookup.

    python -m benchmark.serve.bench_reuse

best_of_n   programs read the first 4 of 16 candidates and then have them judged. `all` reads all
            16, `keep` takes the first 4 while the others continue, `first` is a `first` read.
            Steps of a loser after the end of the last winner are wasted.
rerun       a map-reduce, the same again, and again with one part changed, with and without reuse
lookup      CPU time of a call without a hit, with and without reuse, in turns (in real time, with
            the real ServeCore and a simulated engine)

The first two run in virtual time with `sim` engines, so their figures do not depend on the machine.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import Any

from benchmark.results import Report, run
from benchmark.simulated import core_config
from parrot.cli.bench.sessions import BenchSession, Var, spaced
from parrot.engine.config import SimConfig
from parrot.engine.sim import byte_tokenizer_response
from parrot.protocol.engine_api import (
    EngineInfo,
    EngineType,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    RegisterRequest,
    TokenizerResponse,
    Usage,
)
from parrot.protocol.engine_client import EngineClient, OnChunk
from parrot.protocol.public import SemanticCallRequest, SessionCreateRequest, VarGetRequest
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.simulation import PATIENT, SimCluster, SimEngine, lan, run_virtual
from parrot.utils.clock import MonotonicClock

NUM_CANDIDATES, NUM_WINNERS = 16, 4
LENGTHS = (64, 256)  # Minimum and maximum tokens of a candidate.
JUDGEMENT = 64
TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=100_000))
GREEDY = {"temperature": 0.0}
EPSILON_S = 1e-9


def log_steps(engine: SimEngine, steps: list[tuple[float, int]]) -> None:
    """Record the start time and the number of sequences of each later step of the engine."""
    runner, loop = engine.service._sim_driver._runner, asyncio.get_running_loop()
    run = runner.run

    def logged(plan: Any) -> Any:
        steps.append((loop.time(), len(plan.sequences)))
        return run(plan)

    runner.run = logged  # type: ignore[method-assign]


async def candidates(session: BenchSession, rng: random.Random, **options: Any) -> list[Var]:
    start = rng.randrange(90_000)
    prompt = [TEXT[start : start + 400], " "]
    return [
        await session.call(prompt, rng.randint(*LENGTHS), **options) for _ in range(NUM_CANDIDATES)
    ]


async def first(session: BenchSession, candidates: Sequence[Var]) -> list[Var]:
    """Read the first candidates that finish, and cancel the others."""
    var_ids = [candidate.id for candidate in candidates]
    found = await session.client.first_vars(**session.scope, var_ids=var_ids, k=NUM_WINNERS)
    return [Var(value.var_id) for value in found]


async def best_of_n(session: BenchSession, rng: random.Random, mode: str) -> None:
    """One job, in one of the three modes."""
    found = await candidates(session, rng, output_criteria="latency" if mode == "keep" else None)
    if mode == "all":
        await asyncio.gather(*map(session.read, found))
        winners = found[:NUM_WINNERS]
    else:
        winners = await first(session, found)
    await session.read(await session.call(spaced(["Judge", *winners]), JUDGEMENT))


async def wasted_steps(num_engines: int, seed: int) -> float:
    """Steps per loser that begin after the engine has finished the last winner."""
    async with SimCluster(num_engines, core=PATIENT, leaps=False) as cluster:
        session = await BenchSession.begin(cluster.client())
        steps: list[tuple[float, int]] = []
        for engine in cluster.engines.values():
            log_steps(engine, steps)
        found = await candidates(session, random.Random(seed))
        await first(session, found)
        await asyncio.sleep(60)
        cluster.check_integrity()
        known = cluster.core.sessions.find(session.scope["session_id"])
        assert known is not None
        finished = [known.graph.variable(v.id).producer.times.finished for v in found]  # type: ignore[union-attr]
        decided = max(when for when in finished if when is not None)
        ended = decided - lan()() / 2  # Minus the answer's time on the network.
        wasted = sum(sequences for began, sequences in steps if began >= ended - EPSILON_S)
        return wasted / (NUM_CANDIDATES - NUM_WINNERS)


async def job_times(mode: str, num_programs: int, num_jobs: int) -> list[float]:
    """Programs that run one job after the other, all on one engine."""
    async with SimCluster(1, core=PATIENT, engine=SimConfig(tasks_capacity=64)) as cluster:
        loop = asyncio.get_running_loop()

        async def run(seed: int) -> list[float]:
            session, rng = await BenchSession.begin(cluster.client()), random.Random(seed)
            times: list[float] = []
            for _ in range(num_jobs):
                began = loop.time()
                await best_of_n(session, rng, mode)
                times.append(loop.time() - began)
            return times

        runs = await asyncio.gather(*(run(seed) for seed in range(num_programs)))
        return [seconds for times in runs for seconds in times]


async def rerun(reuse: bool, num_parts: int) -> list[dict[str, float]]:
    """The calls, computed tokens and seconds of three runs of a map-reduce. The maps run in
    parallel, so a run with one map takes as long as a run with all."""
    async with SimCluster(2, core=core_config(reuse_results=reuse)) as cluster:
        loop, runs = asyncio.get_running_loop(), []
        for changed in (None, None, num_parts // 2):
            session = await BenchSession.begin(cluster.client())
            began = loop.time()
            parts = []
            for number in range(num_parts):
                text = TEXT[number * 1000 :][:1000] + ("!" if number == changed else "")
                parts.append(await session.call([f"Summarise {text} "], 80, sampling=GREEDY))
            await session.read(await session.call(spaced(["Join", *parts]), 200, sampling=GREEDY))
            seconds = loop.time() - began
            info = await session.info()
            runs.append(
                {
                    "calls": len(info.calls),
                    "calls_run": sum(call.attempts for call in info.calls),
                    "tokens": sum(
                        c.computed_tokens + c.output_tokens for c in info.calls if not c.reused
                    ),
                    "seconds": seconds,
                }
            )
            await session.end()
        return runs


class InstantEngine(EngineClient):
    """An engine with unlimited capacity that immediately returns a constant answer."""

    info = EngineInfo(
        engine_type=EngineType.SIM,
        engine_name="instant",
        model="sim",
        tokenizer_id=sha256(byte_tokenizer_response().tokenizer_json.encode()).hexdigest(),
        host="127.0.0.1",
        port=9001,
        max_seq_len=50_000,
        tasks_capacity=64,
        tokens_capacity=100_000,
    )
    answer = GenerateResponse(
        generated_text="answer",
        generated_ids=list(b"answer"),
        finish_reason=FinishReason.STOP,
        usage=Usage(output_tokens=6),
    )

    def __init__(self) -> None:
        """Unlike the base class, needs no transport."""

    async def close(self) -> None: ...

    async def tokenizer(self) -> TokenizerResponse:
        return byte_tokenizer_response()

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        return self.answer

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        return 0


class Caller:
    """Makes calls with different prompts on an engine that answers immediately."""

    def __init__(self, reuse: bool) -> None:
        config = CoreConfig(
            global_scheduler=GlobalSchedulerConfig(reuse_results=reuse),
            engine_heartbeat_timeout=1e6,
        )
        self._engine = InstantEngine()
        clock = MonotonicClock()
        dispatcher = Dispatcher(config, clock, lambda info: self._engine)
        self.core = ServeCore(config, clock=clock, dispatcher=dispatcher)
        self._numbers = count()

    async def start(self) -> None:
        await self.core.register_engine(RegisterRequest(engine_config=self._engine.info))

    async def spend(self, num_calls: int) -> float:
        """CPU seconds per call."""
        scope = self.core.create_session(SessionCreateRequest()).model_dump()
        began = time.process_time()
        for _ in range(num_calls):
            parameters = [
                {"name": "q", "value": f"what is {next(self._numbers)}?"},
                {"name": "a", "is_output": True, "sampling_config": GREEDY},
            ]
            body = scope | {"template": "Answer {{q}} now: {{a}}", "parameters": parameters}
            response = self.core.submit_call(SemanticCallRequest.model_validate(body))
            await self.core.read(VarGetRequest(**scope), response.param_info[-1].var_id)
        spent = time.process_time() - began
        self.core.delete_session(**scope)
        await asyncio.sleep(0.03)
        return spent / num_calls


async def lookup(num_turns: int, num_calls: int) -> dict[str, Any]:
    """CPU time with and without reuse, each from the turn with the lowest time."""
    callers = {"off": Caller(reuse=False), "on": Caller(reuse=True)}
    spent: dict[str, list[float]] = {name: [] for name in callers}
    for caller in callers.values():
        await caller.start()
        await caller.spend(num_calls)
    for turn in range(num_turns):
        for name in callers if turn % 2 else reversed(callers):
            spent[name].append(await callers[name].spend(num_calls))
    for caller in callers.values():
        await caller.core.close()
    off, on = min(spent["off"]), min(spent["on"])
    return {
        "off_us": 1e6 * off,
        "on_us": 1e6 * on,
        "ratio": on / off,
        "medians_us": {name: 1e6 * statistics.median(times) for name, times in spent.items()},
        "num_turns": num_turns,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--programs", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--calls", type=int, default=500)


def measure(args: argparse.Namespace, report: Report) -> None:
    waste = {
        str(engines): [run_virtual(wasted_steps(engines, seed)) for seed in range(args.seeds)]
        for engines in (1, 4)
    }
    modes = ("all", "keep", "first")
    times = {mode: run_virtual(job_times(mode, args.programs, args.jobs)) for mode in modes}
    report["best_of_n"] = {
        "candidates": NUM_CANDIDATES,
        "winners": NUM_WINNERS,
        "wasted_steps_per_loser": {engines: _spread(steps) for engines, steps in waste.items()},
        "job_seconds": {mode: _spread(seconds) for mode, seconds in times.items()},
    }
    report["rerun"] = {
        "off": run_virtual(rerun(False, args.parts)),
        "on": run_virtual(rerun(True, args.parts)),
    }
    report["lookup"] = asyncio.run(lookup(args.turns, args.calls))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "max": max(values)}


if __name__ == "__main__":
    run(__name__)
