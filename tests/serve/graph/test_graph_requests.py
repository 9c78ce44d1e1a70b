"""A whole graph in one request, over real HTTP."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from parrot.observe.recorder import Recorder
from parrot.protocol.public import MAX_BINDINGS, MAX_CALLS, GraphRequest
from parrot.protocol.trace import AnyTraceEvent, CallLine, VariableLine
from parrot.serve.config import CoreConfig, SessionQuota
from parrot.utils.clock import MonotonicClock
from tests.server.test_serve_http import Site, open_site
from tests.support.held_world import HeldWorld

PATH = "/v1/semantic_graph"


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[Site]:
    sites = open_site(CoreConfig(**config))
    site = await anext(sites)
    try:
        yield site
        site.core.check_integrity()
    finally:
        await sites.aclose()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


def output(name: str = "out", **fields: Any) -> dict[str, Any]:
    return {"name": name, "is_output": True} | fields


def call(makes: str | None, *takes: str, **fields: Any) -> dict[str, Any]:
    """A semantic call: local names of its output and of its inputs."""
    parameters: list[dict[str, Any]] = [
        {"name": f"i{n}", "var": name} for n, name in enumerate(takes)
    ]
    template = "f " + "".join(f"{{{{{p['name']}}}}} " for p in parameters) + "{{out}}"
    made = output() if makes is None else output(var=makes)
    return {"template": template, "parameters": [*parameters, made]} | fields


def native(makes: str, *takes: str) -> dict[str, Any]:
    parameters = [{"name": f"i{n}", "var": name} for n, name in enumerate(takes)]
    source = f"def f({', '.join(p['name'] for p in parameters)}, out): pass"
    return {
        "func_name": "f",
        "func_source": source,
        "parameters": [*parameters, output(var=makes)],
    }


class TestWhatIsSubmitted:
    async def test_names_refer_to_variables_in_any_order(self, site: Site) -> None:
        scope = await site.session()
        body = {
            "variables": [{"name": "text", "content": "hello"}, {"name": "later", "var_name": "x"}],
            "calls": [
                call("end", "joined", "later"),
                native("joined", "a", "b"),
                call("a", "text"),
                call("b", "text"),
            ],
        }
        answer = await site.post(PATH, scope | body)
        assert answer["session_id"] == scope["session_id"]
        assert answer["session_auth"] is None
        assert set(answer["variables"]) == {"text", "later", "end", "joined", "a", "b"}
        info = await site.get(f"/v1/session/{scope['session_id']}", **scope)
        names = {row["var_id"]: row["var_name"] for row in info["vars"]}
        ids = answer["variables"]
        assert [names[ids[name]] for name in ("text", "later", "end")] == ["text", "x", "out"]
        edges = {(edge["source"], edge["target"]) for edge in info["edges"]}
        wanted = [("a", "joined"), ("b", "joined"), ("joined", "end")]
        assert {(ids[source], ids[target]) for source, target in wanted} <= edges
        assert [row["kind"] for row in info["calls"]].count("native") == 1
        requests = [described["request_id"] for described in answer["calls"]]
        made = {row["output_var_id"]: row["request_id"] for row in info["calls"]}
        assert requests == [made[ids[name]] for name in ("end", "joined", "a", "b")]
        assert answer["calls"][2]["param_info"][0]["var_id"] == ids["text"]

    async def test_existing_variables_are_referenced_by_id(self, site: Site) -> None:
        scope = await site.session()
        source = await site.call(scope, "source")
        target = (await site.post("/v1/semantic_var", scope | {"var_name": "t"}))["var_id"]
        body = {
            "template": "f {{i}} {{out}}",
            "parameters": [{"name": "i", "var_id": source}, output(var_id=target)],
        }
        answer = await site.post(PATH, scope | {"calls": [body]})
        assert [info["var_id"] for info in answer["calls"][0]["param_info"]] == [source, target]
        assert answer["variables"] == {}

    async def test_a_graph_with_a_new_session(self, site: Site) -> None:
        body = {"session": {"apps": ["mine"]}, "calls": [call("a"), call(None, "a")]}
        answer = await site.post(PATH, body)
        scope = {name: answer[name] for name in ("session_id", "session_auth")}
        info = await site.get(f"/v1/session/{scope['session_id']}", **scope)
        assert info["apps"] == ["mine"]
        assert len(info["calls"]) == 2

    async def test_a_key_for_the_session_may_be_a_bearer_token(self) -> None:
        async with serving(api_keys=("secret",)) as site:
            body = {"session": {}, "calls": [call("a")]}
            assert (await site.send("POST", PATH, json=body))[0] == 401
            await site.post(PATH, body, headers={"authorization": "Bearer secret"})
            await site.post(PATH, body | {"session": {"api_key": "secret"}})

    async def test_a_repeated_request_gets_its_answer_again(self, site: Site) -> None:
        scope = await site.session()
        body = scope | {"calls": [call("a")], "idempotency_key": "once"}
        first = await site.post(PATH, body)
        assert await site.post(PATH, body) == first
        status, answer = await site.send("POST", PATH, json=body | {"calls": [call("b")]})
        assert (status, answer["error"]["type"]) == (409, "conflict")
        assert len(site.core.sessions.find(scope["session_id"]).graph.calls) == 1

    async def test_the_whole_graph_runs_when_it_is_read(self) -> None:
        world = await HeldWorld.open()
        body = {"calls": [call("c", "a", "b"), call("b"), call("a")]}
        answer = world.core.submit_graph(GraphRequest.model_validate(world.scope | body))
        reading = world.read(answer.variables["c"])
        await world.settle()
        world.core.check_integrity()
        assert len(world.engine.held) == 2
        for task in list(world.engine.held):
            await world.answer(task, "text")
        await world.settle()
        await world.answer(world.engine.held[-1], "end")
        assert await reading == "end"
        world.core.check_integrity()
        await world.core.close()


BOTH = {"name": "x", "var": "a", "value": "b"}
WRONG_TYPE = call("b") | {"template": 5}
UNKNOWN_ID = call(None) | {"parameters": [output(var_id="x")]}
SET = [{"name": "a", "content": "x"}]

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown name": (
        {"calls": [call("a"), call("b", "c")]},
        "400 invalid_request",
        "1.parameters.0.var",
    ),
    "made twice": ({"calls": [call("a")] * 2}, "400 invalid_request", "1.parameters.0.var"),
    "bad template": (
        {"calls": [call("a"), call("b", template="{{x}}")]},
        "400 invalid_request",
        "1.x",
    ),
    "no output": ({"calls": [native("a") | {"parameters": []}]}, "400 invalid_request", "0"),
    "no Python name": ({"calls": [native("b") | {"func_name": "1"}]}, "400 invalid_request", "0.1"),
    "set already": ({"variables": SET, "calls": [call("a")]}, "409 already_set", "0.out"),
    "unknown id": ({"calls": [UNKNOWN_ID]}, "404 not_found", "0.out"),
    "type": ({"calls": [call("a"), WRONG_TYPE]}, "422 validation_failed", "1.semantic.template"),
    "two sources": (
        {"calls": [call("a") | {"parameters": [BOTH]}]},
        "422 validation_failed",
        "0.semantic.parameters.0",
    ),
    "unknown field": ({"calls": [call("a", x=1)]}, "422 validation_failed", "0.semantic.x"),
}


class TestWhatIsRefused:
    @pytest.mark.parametrize("case", BAD)
    async def test_nothing_is_submitted_and_the_error_names_the_call(
        self, site: Site, case: str
    ) -> None:
        body, kind, param = BAD[case]
        scope = await site.session()
        status, answer = await site.send("POST", PATH, json=scope | body)
        error = answer["error"]
        assert (f"{status} {error['type']}", error["param"]) == (kind, f"calls.{param}")
        session = site.core.sessions.find(scope["session_id"])
        assert session is not None
        assert not session.graph.calls
        assert not session.graph.variables
        assert sum(session.account.used.values()) == 1  # The session itself.
        num_sessions = len(site.core.sessions)
        assert (await site.send("POST", PATH, json={"session": {}} | body))[0] == status
        assert len(site.core.sessions) == num_sessions

    async def test_a_graph_with_a_cycle_is_rejected(self, site: Site) -> None:
        scope = await site.session()
        calls = [call("x"), call("a", "c", "x"), call("b", "a"), native("c", "b")]
        status, answer = await site.send("POST", PATH, json=scope | {"calls": calls})
        assert (status, answer["error"]["type"]) == (409, "cyclic_graph")
        assert "`out` -> `out`" in answer["error"]["message"]
        assert not site.core.sessions.find(scope["session_id"]).graph.calls

    async def test_a_cycle_through_existing_calls(self, site: Site) -> None:
        scope = await site.session()
        begin = (await site.post("/v1/semantic_var", scope | {"var_name": "begin"}))["var_id"]
        end = await site.call(scope, "end", begin)
        closing = call("a")
        closing["parameters"] = [{"name": "i", "var_id": end}, output(var="mid")]
        closing["template"] = "{{i}} f {{out}}"
        last = call(None, "mid")
        last["parameters"][-1] = output(var_id=begin)
        status, _ = await site.send("POST", PATH, json=scope | {"calls": [last, closing]})
        assert status == 409
        site.core.check_integrity()
        last["parameters"][-1] = output()
        await site.post(PATH, scope | {"calls": [last, closing]})

    async def test_one_output_of_two_calls(self, site: Site) -> None:
        scope = await site.session()
        target = (await site.post("/v1/semantic_var", scope | {"var_name": "t"}))["var_id"]
        twice = call(None) | {"parameters": [output(var_id=target)]}
        status, answer = await site.send("POST", PATH, json=scope | {"calls": [twice, twice]})
        assert (status, answer["error"]["param"]) == (409, "calls.1")

    async def test_a_name_is_declared_once(self, site: Site) -> None:
        body = {"session": {}, "variables": [{"name": "a"}, {"name": "a"}]}
        status, answer = await site.send("POST", PATH, json=body)
        assert (status, answer["error"]["param"]) == (400, "variables.1.name")

    async def test_limits(self, site: Site) -> None:
        scope = await site.session()
        many = [{"template": "", "parameters": []}] * (MAX_CALLS + 1)
        status, answer = await site.send("POST", PATH, json=scope | {"calls": many})
        assert (status, answer["error"]["param"]) == (422, "calls")
        wide = call("a") | {"parameters": [{"name": "x", "value": "y"}] * 1000}
        calls = [wide] * (MAX_BINDINGS // 1000 + 1)
        status, answer = await site.send("POST", PATH, json=scope | {"calls": calls})
        assert (status, answer["error"]["type"]) == (422, "validation_failed")
        calls = [call(None) | {"template": "{{i}}" * 4096 + "x {{out}}"}] * 5
        status, answer = await site.send("POST", PATH, json=scope | {"calls": calls})
        assert status == 422
        assert "`{{`" in answer["error"]["message"]
        for fields in ({"session": {}}, {"session_id": None}):
            body = scope | {"calls": [call("a")]} | fields
            assert (await site.send("POST", PATH, json=body))[0] == 422
        own = {"session": {}, "calls": [call("a")], "idempotency_key": "x"}
        assert (await site.send("POST", PATH, json=own))[0] == 422

    async def test_quotas_count_the_whole_graph(self) -> None:
        quota = SessionQuota(calls=3, variables=5, text_bytes=1000)
        async with serving(session_quota=quota) as site:
            scope = await site.session()
            for body in (
                {"calls": [call(f"v{n}") for n in range(4)]},
                {"variables": [{"name": f"v{n}"} for n in range(6)]},
                {"variables": [{"name": f"v{n}", "content": "x" * 400} for n in range(3)]},
            ):
                status, answer = await site.send("POST", PATH, json=scope | body)
                assert (status, answer["error"]["type"]) == (429, "quota_exceeded")
            await site.post(PATH, scope | {"calls": [call(f"v{n}") for n in range(3)]})
            status, _ = await site.send("POST", PATH, json=scope | {"calls": [call("v")]})
            assert status == 429


async def test_the_recorder_sees_single_calls() -> None:
    events: list[AnyTraceEvent] = []
    world = await HeldWorld.open(sinks=[Recorder(events.append, MonotonicClock()).sink])
    body = {
        "variables": [{"name": "text", "content": "hello"}],
        "calls": [call("b", "a"), call("a", "text")],
    }
    answer = world.core.submit_graph(GraphRequest.model_validate(world.scope | body))
    created = [event for event in events if isinstance(event, VariableLine)]
    assert [event.var_id for event in created] == list(answer.variables.values())
    assert [event.value is not None for event in created] == [True, False, False]
    submitted = [event for event in events if isinstance(event, CallLine)]
    assert [event.request_id for event in submitted] == [c.request_id for c in answer.calls]
    assert all(parameter.was_bound for event in submitted for parameter in event.parameters)
    await world.core.close()


async def test_random_graphs_have_the_edges_of_the_same_calls_one_by_one() -> None:
    """The order of the calls in the request does not matter."""
    draw = random.Random(0)
    for _ in range(20):
        world = await HeldWorld.open()
        names = [f"v{n}" for n in range(draw.randint(1, 30))]
        calls = []
        for n, name in enumerate(names):
            calls.append(call(name, *draw.sample(names[:n], draw.randint(0, min(n, 3)))))
        draw.shuffle(calls)
        request = GraphRequest.model_validate(world.scope | {"calls": calls})
        answer = world.core.submit_graph(request)
        world.core.check_integrity()
        reading = world.read(answer.variables[names[-1]])
        await world.settle()
        while not reading.done():
            await world.answer(world.engine.held[-1], "text")
            await world.settle()
            world.core.check_integrity()
        await world.core.close()
