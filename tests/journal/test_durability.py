"""Every endpoint that changes a session answers only after the change is on disk."""

import asyncio
from typing import Any

import pytest

from parrot.protocol.endpoint import rules
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.gateway.vendors.conftest import MODEL, Site
from tests.journal.test_over_http import (
    CALL,
    ENDPOINTS,
    HeldFile,
    begun_in_the_background,
    full,
    hanging,
    journal_of,
    program,
    serving,
)

NATIVE = {
    "func_name": "f",
    "func_source": "def f(out):\n    out.set('x')\n",
    "parameters": [{"name": "out", "is_output": True}],
}
VENDORS = {f"POST {path}": [{"model": MODEL} | body] for path, body in ENDPOINTS.items()}
for path in ("/v1/chat/completions", "/v1/completions"):
    (answered,) = VENDORS[f"POST {path}"]
    VENDORS[f"POST {path}"].append(answered | {"parrot": {"defer": True}})
VENDORS["POST /v1/responses"].append(VENDORS["POST /v1/responses"][0] | {"background": True})

# Requests that change a session, by their route.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "POST /v1/session": [{}],
    "DELETE /v1/session/{session_id}": [{}],
    "POST /v1/semantic_call": [CALL],
    "POST /v1/py_native_call": [NATIVE],
    "POST /v1/semantic_graph": [{"calls": [CALL]}, {"session": {}, "calls": [CALL]}],
    "POST /v1/request/{request_id}/cancel": [{}],
    "POST /v1/semantic_var": [{"var_name": "w"}],
    "POST /v1/semantic_var/{var_id}": [{"content": "x"}],
    "POST /v1/semantic_var/{var_id}/cancel": [{}],
    "POST /v1/semantic_vars/first": [{"var_ids": ["{out_id}"], "k": 1}],
    "GET /v1/semantic_var/{out_id}": [{}],
    "DELETE /v1/admin/session/{session_id}": [{}],
    "DELETE /v1/admin/session/{session_id}/request/{request_id}": [{}],
    **VENDORS,
    "POST /v1/responses/{response_id}/cancel": [{}],
    "DELETE /v1/responses/{response_id}": [{}],
    "POST /ui/api/sessions": [{}],
    "POST /ui/api/sessions/{session_id}/end": [{}],
    "POST /ui/api/runs/{session_id}/delete": [{}],
    "POST /ui/api/sessions/{session_id}/cancel/{request_id}": [{}],
}
NO_CHANGES = {
    "POST /register_engine",
    "POST /engine_heartbeat",
    "POST /engine_leave",
    "POST /v1/admin/engine/{engine_id}/drain",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses/input_tokens",
    "POST /v1/embeddings",
    "POST /tokenize",
    "POST /detokenize",
    "POST /ui/api/enter",
    "POST /ui/api/leave",
    "POST /ui/api/engines/{engine_id}/drain",
}
SCOPED = ("/v1/semantic_", "/v1/py_native_call", "/v1/request/", "/v1/session/")
CASES = [(route, body) for route, bodies in CHANGES.items() for body in bodies]


async def test_every_route_that_may_change_something_is_listed() -> None:
    """A new route belongs to `CHANGES`, with a request, or to `NO_CHANGES`."""
    core = ServeCore(CoreConfig())
    found = {f"{rule.method} {rule.path}" for rule in rules(create_app(core).routes)}
    await core.close()
    may_change = {route for route in found if not route.startswith(("GET ", "* "))}
    listed = {route for route in CHANGES if not route.startswith("GET ")}
    assert may_change == listed | NO_CHANGES


@pytest.mark.parametrize(("route", "body"), CASES)
async def test_a_change_is_answered_after_it_is_on_disk(route: str, body: dict[str, Any]) -> None:
    file = HeldFile()
    method, _, path = route.partition(" ")
    async with serving(file, hanging() if "response_id" in path else None) as site:
        async with program(site) as scope:
            names = await ids(site, scope, needs_response="response_id" in path)
        if "/runs/" in path:  # runs are finished sessions
            path_of_session = f"/v1/session/{names['session_id']}"
            await (await site.http.delete(path_of_session, params=scope)).read()
        fields = with_ids(body, names)
        if path.startswith(SCOPED) and "session" not in body:
            fields = fields | scope
        if "parrot" in fields:
            fields = fields | {"parrot": fields["parrot"] | scope}
        await journal_of(site).durable()
        file.asked.clear()
        file.open.clear()

        async def returned() -> tuple[int, str]:
            url, query = path.format(**names), {k: str(v) for k, v in scope.items()}
            sent: dict[str, Any] = {"params": query} if method == "GET" else {"json": fields}
            async with site.http.request(method, url, **sent) as answer:
                return answer.status, await answer.text()

        asking = asyncio.ensure_future(returned())
        try:
            assert await asyncio.to_thread(file.asked.wait, 20), await asking
            await asyncio.wait([asking], timeout=0.1)
            assert not asking.done(), asking.result()
        finally:
            file.open.set()
        status, text = await asking
        assert status == 200, text


ADDED = [
    "POST /v1/semantic_call",
    "POST /v1/py_native_call",
    "POST /v1/semantic_graph",
    "POST /v1/semantic_var",
    "POST /v1/semantic_var/{var_id}",
]


@pytest.mark.parametrize("route", ADDED)
async def test_a_change_that_cannot_be_written_has_not_happened(route: str) -> None:
    """A rejected request has no effect on the session."""
    file, body = HeldFile(), CHANGES[route][0]

    async def shown() -> Any:
        async with site.http.get(f"/v1/session/{scope['session_id']}", params=scope) as answer:
            info = await answer.json()
            return info["vars"], info["calls"]

    async with serving(file) as site, program(site) as scope:
        names = await ids(site, scope, needs_response=False)
        before = await shown()
        await full(site, file)
        path = route.removeprefix("POST ").format(**names)
        assert (await site.send(path, scope | body))[0] == 507
        assert await shown() == before
        file.full = False


async def ids(site: Site, scope: dict[str, Any], *, needs_response: bool) -> dict[str, Any]:
    """Return the ids for paths: a variable without a value, a call and its output, a response."""
    variable = await site.post("/v1/semantic_var", scope | {"var_name": "v"})
    call = await site.post("/v1/semantic_call", scope | CALL)
    names = {"var_id": variable["var_id"], "request_id": call["request_id"]}
    names |= {"session_id": scope["session_id"], "out_id": call["param_info"][-1]["var_id"]}
    if needs_response:
        names["response_id"] = (await begun_in_the_background(site))["id"]
    return names


def with_ids(value: Any, names: dict[str, Any]) -> Any:
    match value:
        case {"var_ids": [one], **rest}:
            return rest | {"var_ids": [one.format(**names)]}
        case _:
            return value
