"""What stopping losers and reusing results save, and what looking for results costs.

    python benchmark/serve/bench_reuse.py --out benchmark/results/reuse.json

best_of_n   programs want the first 4 of 16 candidates and then a judgement of these. `all` reads
            all 16, `keep` takes the first 4 while the others run on, `first` is a `first` read.
            Steps that an engine makes for a loser after the last winner's end are wasted.
rerun       a map-reduce, the same again, and again with one part changed, with and without reuse
lookup      CPU time of a call that finds nothing, with and without reuse, in turns (this one in
            real time; everything but the engine is the real ServeCore)

The first two run on virtual time over `sim` engines: the same everywhere.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import bound, circumstances, core_config, output_id, places, save, submit

from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.public import SemanticCallRequest, SessionCreateRequest, VarGetRequest
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.simulation import PATIENT, SimClient, SimCluster, SimEngine, lan, run_virtual
from parrot.testing.fake_engine import Script, fake_engine
from parrot.utils.clock import MonotonicClock

NUM_CANDIDATES, NUM_WINNERS = 16, 4
LENGTHS = (64, 256)  # tokens of a candidate
JUDGEMENT = 64
TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=100_000))
GREEDY = {"temperature": 0.0}
EPSILON_S = 1e-9


class Program:
    """One session of a simulated program."""

    def __init__(self, client: SimClient, scope: dict[str, Any]) -> None:
        self.client = client
        self.scope = scope

    async def call(self, text: str, length: int, inputs: Sequence[str] = (), **options: Any) -> str:
        """Returns the output's id. `inputs` are ids."""
        template = " ".join([text, *([places(len(inputs), " ")] if inputs else []), "{{out}}"])
        sampling = options.pop("sampling", {}) | {"max_gen_length": length}
        return output_id(
            await submit(self.client, self.scope, template, bound(inputs), sampling, **options)
        )

    async def read(self, var_id: str) -> str:
        return await self.client.get_var(
            **self.scope, var_id=var_id, criteria=PerformanceCriteria.LATENCY
        )


class StepLog:
    """When each step of the engines began, and of how many sequences."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self.steps: list[tuple[float, int]] = []
        for engine in engines:
            self._watch(engine.service)

    def _watch(self, service: Any) -> None:
        runner, loop = service._sim_driver._runner, asyncio.get_running_loop()
        run = runner.run

        def logged(plan: Any) -> Any:
            self.steps.append((loop.time(), len(plan.sequences)))
            return run(plan)

        runner.run = logged

    def sequences_since(self, when: float) -> int:
        return sum(count for began, count in self.steps if began >= when - EPSILON_S)


async def candidates(program: Program, rng: random.Random, **options: Any) -> list[str]:
    start = rng.randrange(90_000)
    prompt = TEXT[start : start + 400]
    return [
        await program.call(prompt, rng.randint(*LENGTHS), **options) for _ in range(NUM_CANDIDATES)
    ]


async def best_of_n(program: Program, rng: random.Random, mode: str) -> None:
    """One job, in one of the three modes."""
    keeps = {"output_criteria": "latency"} if mode == "keep" else {}
    ids = await candidates(program, rng, **keeps)
    if mode == "all":
        await asyncio.gather(*(program.read(var_id) for var_id in ids))
        winners = ids[:NUM_WINNERS]
    else:
        found = await program.client.first_vars(**program.scope, var_ids=ids, k=NUM_WINNERS)
        winners = [value.var_id for value in found]
    await program.read(await program.call("Judge", JUDGEMENT, winners))


async def wasted_steps(num_engines: int, seed: int) -> float:
    """Steps per loser that begin after the engine has finished the last winner."""
    async with SimCluster(num_engines, core=PATIENT, leaps=False) as cluster:
        program = await begin(cluster)
        log = StepLog(list(cluster.engines.values()))
        ids = await candidates(program, random.Random(seed))
        await program.client.first_vars(**program.scope, var_ids=ids, k=NUM_WINNERS)
        await asyncio.sleep(60)
        cluster.check_integrity()
        session = cluster.core._sessions.find(program.scope["session_id"])
        assert session is not None
        finished = [session.graph.node(v).producer.task.times.finished for v in ids]  # type: ignore[union-attr]
        decided = max(when for when in finished if when is not None)
        ended = decided - lan()() / 2  # the answer was under way for so long
        return log.sequences_since(ended) / (NUM_CANDIDATES - NUM_WINNERS)


async def job_times(mode: str, num_programs: int, num_jobs: int) -> list[float]:
    """Programs that do one job after the other, all on one engine."""
    async with SimCluster(1, core=PATIENT, engine=SimConfig(tasks_capacity=64)) as cluster:
        loop = asyncio.get_running_loop()

        async def run(seed: int) -> list[float]:
            program, rng, times = await begin(cluster), random.Random(seed), []
            for _ in range(num_jobs):
                began = loop.time()
                await best_of_n(program, rng, mode)
                times.append(loop.time() - began)
            return times

        runs = await asyncio.gather(*(run(seed) for seed in range(num_programs)))
        return [seconds for times in runs for seconds in times]


async def begin(cluster: SimCluster) -> Program:
    client = cluster.client()
    return Program(client, (await client.create_session()).model_dump())


async def rerun(reuse: bool, num_parts: int) -> list[dict[str, float]]:
    """Calls that engines ran, tokens that they computed, and seconds, of three runs of a
    map-reduce. Its parts run side by side, so a run takes as long with one part as with all."""
    async with SimCluster(2, core=core_config(reuse_results=reuse)) as cluster:
        loop, runs = asyncio.get_running_loop(), []
        for changed in (None, None, num_parts // 2):
            program, began = await begin(cluster), loop.time()
            parts = []
            for number in range(num_parts):
                text = TEXT[number * 1000 :][:1000] + ("!" if number == changed else "")
                parts.append(await program.call(f"Summarise {text}", 80, sampling=GREEDY))
            await program.read(await program.call("Join", 200, parts, sampling=GREEDY))
            seconds = loop.time() - began
            info = await program.client.session_info(**program.scope)
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
            await program.client.delete_session(**program.scope)
        return runs


class Caller:
    """Calls, each with another prompt, on an engine that answers at once."""

    def __init__(self, reuse: bool) -> None:
        config = CoreConfig(
            global_scheduler=GlobalSchedulerConfig(reuse_results=reuse),
            engine_heartbeat_timeout=1e6,
        )
        self._engine = fake_engine(script=Script(text=lambda prompt: "answer", steps=1))
        clock = MonotonicClock()
        dispatcher = Dispatcher(config, clock, lambda info: self._engine)
        self._core = ServeCore(config, clock=clock, dispatcher=dispatcher)
        self._numbers: Iterator[int] = iter(range(10**9))

    async def start(self) -> None:
        await self._core.register_engine(RegisterRequest(engine_config=self._engine.info))

    async def spend(self, num_calls: int) -> float:
        """CPU seconds per call."""
        scope = self._core.create_session(SessionCreateRequest()).model_dump()
        began = time.process_time()
        for _ in range(num_calls):
            parameters = [
                {"name": "q", "value": f"what is {next(self._numbers)}?"},
                {"name": "a", "is_output": True, "sampling_config": GREEDY},
            ]
            body = scope | {"template": "Answer {{q}} now: {{a}}", "parameters": parameters}
            response = self._core.submit_call(SemanticCallRequest.model_validate(body))
            await self._core.read(VarGetRequest(**scope), response.param_info[-1].var_id)
        spent = time.process_time() - began
        self._core.delete_session(**scope)
        self._engine.prompts.clear()
        self._engine.requests.clear()
        await asyncio.sleep(0.03)
        return spent / num_calls

    async def close(self) -> None:
        await self._core.close()


async def lookup(num_turns: int, num_calls: int) -> dict[str, Any]:
    """Of each, the turn that was disturbed least."""
    callers = {"off": Caller(reuse=False), "on": Caller(reuse=True)}
    spent: dict[str, list[float]] = {"off": [], "on": []}
    for caller in callers.values():
        await caller.start()
        await caller.spend(num_calls)
    for turn in range(num_turns):
        for name in ("off", "on") if turn % 2 else ("on", "off"):
            spent[name].append(await callers[name].spend(num_calls))
    for caller in callers.values():
        await caller.close()
    off, on = min(spent["off"]), min(spent["on"])
    return {
        "off_us": 1e6 * off,
        "on_us": 1e6 * on,
        "ratio": on / off,
        "medians_us": {name: 1e6 * statistics.median(times) for name, times in spent.items()},
        "num_turns": num_turns,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    waste = {
        str(engines): [run_virtual(wasted_steps(engines, seed)) for seed in range(args.seeds)]
        for engines in (1, 4)
    }
    times = {
        mode: run_virtual(job_times(mode, args.programs, args.jobs))
        for mode in ("all", "keep", "first")
    }
    return circumstances() | {
        "best_of_n": {
            "candidates": NUM_CANDIDATES,
            "winners": NUM_WINNERS,
            "wasted_steps_per_loser": {
                engines: {"mean": statistics.mean(steps), "max": max(steps)}
                for engines, steps in waste.items()
            },
            "job_seconds": {
                mode: {"mean": statistics.mean(t), "max": max(t)} for mode, t in times.items()
            },
        },
        "rerun": {
            "off": run_virtual(rerun(False, args.parts)),
            "on": run_virtual(rerun(True, args.parts)),
        },
        "lookup": asyncio.run(lookup(args.turns, args.calls)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--programs", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = measure(args)
    print(json.dumps(results, indent=1))
    if args.out is not None:
        save(args.out, results)


if __name__ == "__main__":
    main()
