"""Bodies for the OpenAI and Anthropic endpoints that would take long to parse or to serialize."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.test_transcript import HERMES
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import fake_engine

RESPONSES, CHAT, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL, chat_template=HERMES)) as site:
        yield site


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(path: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    items = list(messages) or [user()]
    if path == RESPONSES:
        return {"model": MODEL, "input": items} | fields
    return {"model": MODEL, "messages": items} | ({"max_tokens": 9} | fields)


def nested(depth: int) -> Any:
    return json.loads('{"a":' * depth + "1" + "}" * depth)


def tool(path: str, schema: Any) -> dict[str, Any]:
    if path == MESSAGES:
        return {"name": "f", "input_schema": schema}
    function = {"name": "f", "parameters": schema}
    if path == RESPONSES:
        return {"type": "function"} | function
    return {"type": "function", "function": function}


def call(path: str, arguments: Any) -> dict[str, Any]:
    if path == MESSAGES:
        used = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        return {"role": "assistant", "content": [used]}
    text = json.dumps(arguments)
    if path == RESPONSES:
        return {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


@pytest.mark.parametrize("path", [RESPONSES, CHAT, MESSAGES])
async def test_deep_nesting(site: Site, path: str) -> None:
    """Each depth gets 200 or 400, never a server error."""
    for depth in (1, 200, *range(235, 260), 900):
        deep = nested(depth)
        bodies = [
            body(path, tools=[tool(path, deep)]),
            body(path, user(), call(path, deep), user()),
            body(path, metadata={"x": deep}),
            body(path, user([{"type": "image", "x": deep}])),
        ]
        statuses = [(await site.send(path, given))[0] for given in bodies]
        assert set(statuses) <= {200, 400}, (depth, statuses)
        assert depth != 200 or statuses == [200, 200, 200, 400]
        assert depth != 900 or statuses == [400] * 4


@pytest.mark.parametrize("path", [RESPONSES, CHAT, MESSAGES])
async def test_objects_with_very_many_fields(site: Site, path: str) -> None:
    wide = {f"k{i}": 1 for i in range(20_000)}
    for given in (
        body(path, **wide),
        body(path, metadata=wide),
        body(path, user() | wide),
    ):
        status, answer = await site.send(path, given)
        assert status == 400
        assert re.search("more than [0-9]+ fields", json.dumps(answer))
    assert (await site.send(path, body(path, user([{"type": "image"} | wide]))))[0] == 400


@pytest.mark.parametrize("path", [RESPONSES, CHAT, MESSAGES])
async def test_the_first_of_many_errors_is_enough(site: Site, path: str) -> None:
    for given in (
        body(path, *[{"role": "wizard"}] * 16_000),
        body(path, user([{"type": 3}] * 20_000)),
        body(path, user([{"type": "text", "text": ""}] * 20_000)),
    ):
        status, answer = await site.send(path, given)
        assert status == 400
        assert len(json.dumps(answer)) < 1000


@pytest.mark.parametrize(
    "given",
    [
        [1] * 300_000 + ["a"],
        [[1] * 100] * 2047 + [["a"]],
        [["a"] * 80] * 2048,
        ["a"] * 150_000,
        [["a"]],
        [[[1]]],
        [{"a": 1}] * 2000,
        [True],
        [1.5],
        [2**31],
        nested(200),
    ],
    ids=lambda given: f"{str(given)[:20]}-{len(given)}",
)
async def test_invalid_inputs_of_embeddings_are_rejected(site: Site, given: Any) -> None:
    status, answer = await site.send("/v1/embeddings", {"model": MODEL, "input": given})
    assert status == 400
    assert len(json.dumps(answer)) < 1000
    assert not site.engine.embedded
