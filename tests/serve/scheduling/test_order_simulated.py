"""The effect of order policies on whole applications, on simulated engines and virtual time."""

import asyncio
from statistics import mean
from typing import Any

from benchmark.serve.baselines import ORDERS, cluster_with
from parrot.engine.config import SimConfig
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.simulation import PATIENT, fixed, run_virtual

STEP_S = 0.01
COSTS = {"step_s": STEP_S, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}
ONE_SLOT = SimConfig.model_validate({"instance": COSTS, "tasks_capacity": 1})


async def application(
    client: ServeClient,
    begin: float,
    num_calls: int,
    length: int,
    deadline_s: float | None = None,
    text: str = "Go on",
) -> float:
    """Run a chain of calls that starts at a given time. Returns when its last output is ready."""
    await asyncio.sleep(begin)
    session = await client.create_session()
    scope = {"session_id": session.session_id, "session_auth": session.session_auth}
    sampling = {"max_gen_length": length, "ignore_tokenizer_eos": True}
    var_id = None
    for number in range(num_calls):
        out = {"name": "out", "is_output": True, "sampling_config": sampling}
        before = [] if var_id is None else [{"name": "before", "var_id": var_id}]
        template = f"{number}: {text}{' {{before}}' if before else ''}: {{{{out}}}}"
        request = {"template": template, "parameters": [*before, out]} | scope
        response = await client.semantic_call(SemanticCallRequest.model_validate(request))
        var_id = response.param_info[-1].var_id
    assert var_id is not None
    await client.get_var(
        **scope, var_id=var_id, criteria=PerformanceCriteria.LATENCY, deadline_s=deadline_s
    )
    return asyncio.get_running_loop().time()


def with_policy(policy: str) -> CoreConfig:
    order = GlobalSchedulerConfig.model_validate({} if policy in ORDERS else {"policy": policy})
    return PATIENT.model_copy(update={"global_scheduler": order})


def simulate(policy: str, *applications: tuple[Any, ...]) -> list[float]:
    """The completion times of the applications, each from its start."""

    async def main() -> list[float]:
        core = with_policy(policy)
        async with cluster_with(policy)(1, engine=ONE_SLOT, core=core, engine_rtt_s=0.0) as cluster:
            client = cluster.client(fixed(0.0))
            ends = await asyncio.gather(*[application(client, *a) for a in applications])
            await asyncio.sleep(1)
            cluster.check_integrity()
            return [end - a[0] for end, a in zip(ends, applications, strict=True)]

    return run_virtual(main())


def test_equal_chains_finish_one_after_the_other() -> None:
    chains = [(0.01 * i, 10, 10) for i in range(4)]
    ends = {policy: simulate(policy, *chains) for policy in ("critical_path", "las", "fcfs")}
    last = 4 * 10 * 10 * STEP_S
    assert max(map(max, ends.values())) < 1.1 * last
    assert mean(ends["las"]) > 0.9 * last
    assert mean(ends["fcfs"]) > 0.9 * last
    assert mean(ends["critical_path"]) < 0.7 * last


def test_short_applications_do_not_wait_for_an_older_long_one() -> None:
    work = [(0.0, 20, 50), *((0.1 + i, 1, 10) for i in range(5))]
    long, *short = simulate("critical_path", *work)
    assert max(short) < 0.8  # A running call of the long application is not interrupted.
    assert long < 20 * 50 * STEP_S + 5 * 10 * STEP_S + 0.1
    assert mean(simulate("app_fifo", *work)[1:]) > 5


def test_a_read_with_a_deadline_is_served_in_time_if_that_is_possible() -> None:
    """More short calls arrive than can be served. A long call waits until its age outweighs its
    length, except if its reader has an earlier deadline."""
    calls = [(0.08 * i, 1, 10) for i in range(200)]
    relaxed, *_ = simulate("critical_path", (0.55, 1, 200), *calls)
    assert 6.5 < relaxed < 20
    timed, *others = simulate("critical_path", (0.55, 1, 200, 6.0), *calls)
    assert timed < 6
    hopeless, *_ = simulate("critical_path", (0.55, 1, 200, 0.5), *calls)
    assert hopeless > 6.5
    assert max(others) < 8
