"""Every workload runs the same programs and tokens in both styles. Small sizes, virtual time."""

import asyncio
import json
from dataclasses import replace

import pytest

from benchmark.apps.backends import DelayedNetwork, parrot_backend
from benchmark.apps.metrics import Bystanders, Run, run_plan, summarise
from parrot.cli.bench.agents import DATA, MultiAgent
from parrot.cli.bench.program import ProgramOutput
from parrot.cli.bench.requests import lengths_256
from parrot.cli.bench.text import TextSource
from parrot.cli.bench.workloads import WORKLOADS
from parrot.serve.config import GlobalSchedulerConfig
from parrot.simulation import PATIENT, SimCluster, fixed, run_virtual

TEXT = TextSource([chr(i) for i in range(ord("a"), ord("z") + 1)])
SMALL: dict[str, dict[str, float]] = {
    "requests": {"requests": 4},
    "chain": {"documents": 2, "document_tokens": 4000},
    "chain_background": {"document_tokens": 4000, "seconds": 1.0},
    "chain_many": {"documents": 3, "document_tokens": 6000},
    "map_reduce": {"document_tokens": 6000},
    "copilot": {"batch": 4},
    "roots4": {"batch": 8},
    "gpts": {"requests": 6},
    "multi_agent": {"files": 2, "num_rounds": 1},
    "mixed": {"chats": 3, "applications": 2, "document_tokens": 4000},
    "tool_pause": {"chats": 2, "turns": 3},
    "rag": {"users": 2},
    "fanout_cold": {"siblings": 5},
    "256": {"requests": 5},
    "job_mix": {"jobs": 4, "rate": 20.0},
}


async def no_page() -> str:
    return ""


NO_REUSE = PATIENT.model_copy(
    update={"global_scheduler": GlobalSchedulerConfig(reuse_results=False)}
)  # prompts this small may be equal by chance


def measure(
    name: str,
    *,
    whole_graph: bool,
    network: str = "lan",
    factor: float = 0.02,
    **options: object,
) -> Run:
    workload = replace(WORKLOADS[name].workload, factor=factor, **SMALL.get(name, {}))

    async def run() -> Run:
        async with SimCluster(2, core=NO_REUSE) as cluster:
            delays = DelayedNetwork(network, 0, asyncio.sleep)
            backend = parrot_backend(
                cluster.client(fixed(0.0)), no_page, delays, whole_graph=whole_graph
            )
            result = await run_plan(backend, workload.plan(TEXT, 0), **options)
            cluster.check_integrity()
            return result

    return run_virtual(run())


@pytest.mark.parametrize("name", WORKLOADS)
def test_both_styles_complete_the_same_calls(name):
    tokens = []
    for whole_graph in (True, False):
        run = measure(name, whole_graph=whole_graph)
        assert run.errors == []
        figures = summarise(run)
        assert figures["jct_s"]
        if name != "best_of_n":  # which candidates win depends on timing
            assert figures["tokens"]["calls_done"] == figures["tokens"]["calls"]
            assert figures["tokens"]["prompt"] == figures["tokens"]["prompt_planned"]
        tokens.append({k: figures["tokens"][k] for k in ("calls", "prompt_planned", "unique")})
    assert tokens[0] == tokens[1]


def test_losing_candidates_are_cancelled():
    tokens = summarise(measure("best_of_n", whole_graph=True))["tokens"]
    assert tokens["calls"] == 17
    assert 5 <= tokens["calls_done"] < 10


def test_a_chain_pays_the_network_latency_once():
    seconds = {
        (far, graph): measure("chain", whole_graph=graph, network="wan" if far else "none").seconds
        for far in (False, True)
        for graph in (False, True)
    }
    steps = 2 * 4
    assert seconds[True, False] - seconds[False, False] > 0.2 * steps
    assert seconds[True, True] - seconds[False, True] < 0.3 * 2 * 4


def test_multi_agent_has_the_recorded_prompts():
    plan = MultiAgent(files=8).plan(TEXT, 0)
    recorded = [
        call["prompt_tokens"]
        for entry in json.loads(DATA.read_text())
        for call in entry["calls"].values()
    ]

    class Recorder:
        def __init__(self) -> None:
            self.prompts: list[int] = []

        def call(self, function, prompt, tokens, **options):
            self.prompts.append(sum(piece.tokens for piece in prompt))
            return ProgramOutput(function, tokens)

        async def read(self, *outputs):
            assert len(outputs) == 8

    recorder = Recorder()
    asyncio.run(plan.jobs[0].run(recorder))
    assert len(recorder.prompts) == len(recorded)
    differences = [abs(a - b) for a, b in zip(recorder.prompts, recorded, strict=True)]
    assert max(differences) < 150  # reviews of files whose recordings had other lengths
    assert sum(recorder.prompts) == pytest.approx(sum(recorded), rel=0.01)


def test_256_is_the_usual_load():
    lengths = lengths_256()
    assert [sum(column) for column in zip(*lengths, strict=True)] == [142_827, 133_966]


def test_bystanders_are_measured_alone_and_with_the_application():
    others = Bystanders(TEXT, rate=20.0, alone_s=1.0, factor=0.1)
    run = measure("map_reduce", whole_graph=True, factor=0.5, bystanders=others)
    figures = summarise(run)["bystanders"]
    assert figures["during"]["tpot_s"]["p99"] >= figures["alone"]["tpot_s"]["p50"] > 0


def test_unfinished_calls_at_the_time_limit_are_errors():
    run = measure("chain", whole_graph=True, time_limit_s=0.01)
    assert run.timed_out
    assert summarise(run)["num_errors"] == 1
