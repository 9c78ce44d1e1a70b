"""Programs that submit their graph in one request: with high latency, and in a trace."""

from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.protocol.public import GraphRequest, SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.transport import AppTransport
from parrot.server.app import create_app
from parrot.simulation import SimCluster, fixed, run_virtual
from parrot.simulation.replay import Replay
from parrot.simulation.trace import Trace

RTT_S = 0.24
NUM_PARTS = 20
ENGINE = SimConfig()


def output(**fields: Any) -> dict[str, Any]:
    return {"name": "out", "is_output": True, "sampling_config": {"max_gen_length": 20}} | fields


def graph() -> dict[str, Any]:
    """A map over 20 parts and its reduce, which comes first."""
    parts = [f"part_{n}" for n in range(NUM_PARTS)]
    end = {
        "template": "".join(f"{{{{{name}}}}} " for name in parts) + "{{out}}",
        "parameters": [{"name": name, "var": name} for name in parts] + [output(var="end")],
    }
    maps = [
        {
            "template": "Summarize {{text}}: {{out}}",
            "parameters": [{"name": "text", "value": f"{name} " * 50}, output(var=name)],
        }
        for name in parts
    ]
    return {"calls": [end, *maps]}


async def at_once(client: ServeClient, scope: dict[str, Any]) -> str:
    answer = await client.semantic_graph(GraphRequest.model_validate(scope | graph()))
    return answer.variables["end"]


async def one_by_one(client: ServeClient, scope: dict[str, Any]) -> str:
    end, *maps = graph()["calls"]
    ids = {}
    for call in (*maps, end):
        for parameter in call["parameters"]:
            name = parameter.pop("var", None)
            if not parameter.get("is_output"):
                parameter |= {} if name is None else {"var_id": ids[name]}
        request = SemanticCallRequest.model_validate(scope | call)
        response = await client.semantic_call(request)
        ids[f"part_{len(ids)}"] = response.param_info[-1].var_id
    return response.param_info[-1].var_id


@pytest.mark.parametrize(("submit", "num_exchanges"), [(at_once, 1), (one_by_one, 21)])
def test_the_time_to_submit_21_calls_with_high_latency(submit: Any, num_exchanges: int) -> None:
    async def main() -> tuple[float, str]:
        async with SimCluster(2, engine=ENGINE) as cluster:
            client = cluster.client(fixed(RTT_S))
            scope = (await client.create_session()).model_dump()
            began = cluster.clock.now()
            end = await submit(client, scope)
            took = cluster.clock.now() - began
            text = await client.get_var(**scope, var_id=end)
            cluster.check_integrity()
            return took, text

    took, text = run_virtual(main())
    assert took == pytest.approx(num_exchanges * RTT_S)
    assert text


def test_a_recorded_graph_is_replayed() -> None:
    async def main() -> Trace:
        trace = Trace()
        async with SimCluster(2, engine=ENGINE, trace=trace.add) as cluster:
            client = cluster.client(fixed(RTT_S))
            scope = (await client.create_session()).model_dump()
            await client.get_var(**scope, var_id=await at_once(client, scope))
            await client.delete_session(**scope)
        return trace

    recorded = run_virtual(main())
    replayed = Replay(engine=ENGINE).run(recorded)
    (before,), (after,) = recorded.sessions, replayed.sessions
    assert len(after.calls) == len(before.calls) == NUM_PARTS + 1
    assert all(call.finished_s is not None for call in after.calls)
    assert after.jct_s == pytest.approx(before.jct_s, rel=0.05)


def test_a_recorded_chain_is_replayed() -> None:
    async def main() -> Trace:
        trace = Trace()
        async with SimCluster(2, engine=ENGINE, trace=trace.add) as cluster:
            transport = AppTransport(create_app(cluster.core))
            client = cluster.client(fixed(RTT_S))
            scope = (await client.create_session()).model_dump()

            async def ask(prompt: str, **parrot: Any) -> Any:
                body = {"model": model, "prompt": prompt, "parrot": scope | parrot}
                return await transport.request("POST", "/v1/completions", body=body)

            (card,) = (await transport.request("GET", "/v1/models"))["data"]
            model = card["id"]
            ids = []
            for n in range(NUM_PARTS):
                answer = await ask(f"part {n} {{{{no_input}}}}" * 50, defer=True)
                ids += answer["parrot"]["outputs"]
            inputs = {f"p{n}": var_id for n, var_id in enumerate(ids)}
            await ask(" ".join(f"{{{{{name}}}}}" for name in inputs), inputs=inputs)
            await client.delete_session(**scope)
            await transport.close()
        return trace

    recorded = run_virtual(main())
    replayed = Replay(engine=ENGINE).run(recorded)
    (before,), (after,) = recorded.sessions, replayed.sessions
    assert len(after.calls) == len(before.calls) == NUM_PARTS + 1
    assert all(call.finished_s is not None for call in after.calls)
    assert after.jct_s == pytest.approx(before.jct_s, rel=0.1)
