"""Required tool calls by the embedded model are valid, although the model is small. The chat
template is that of its model family with support for tools."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import jsonschema
import pytest
import pytest_asyncio

from parrot.cluster import Cluster
from tests.gateway.test_transcript import HERMES
from tests.support.embedded_folder import write_embedded_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "smol-with-tools"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 16},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
CLOCK: dict[str, Any] = {
    "name": "get_time",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"type": "string", "maxLength": 8}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED = "What is the weather in Paris?"
CHAT_TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, CLOCK)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = write_embedded_folder(tmp_path_factory.mktemp("model") / MODEL, HERMES)
    with Cluster(engines=[{"model": str(folder)}]) as running:
        yield running


async def post(cluster: Cluster, path: str, body: Any) -> Any:
    async with aiohttp.ClientSession(cluster.core_url) as http:
        async with http.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        async with http.post(path, json={"model": model} | body) as response:
            assert response.status == 200, await response.text()
            if not body.get("stream"):
                return await response.json()
            lines = [line async for line in response.content]
            return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def check(name: str, arguments: str | dict[str, Any]) -> None:
    """Raise an error if the call does not match one of the tools."""
    schemas = {tool["name"]: tool["parameters"] for tool in (WEATHER, CLOCK)}
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(given, schemas[name])


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": ASKED}]
    given = {"messages": messages, "tools": CHAT_TOOLS, "max_tokens": 100, "temperature": 0}
    return given | {"parallel_tool_calls": False} | fields


NAMED = {"type": "function", "function": {"name": "get_time"}}
RESPONSE: dict[str, Any] = {
    "input": ASKED,
    "tools": [{"type": "function", **tool} for tool in (WEATHER, CLOCK)],
    "tool_choice": "required",
    "max_output_tokens": 100,
    "parallel_tool_calls": False,
    "temperature": 0,
}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": ASKED}],
    "tools": [
        {"name": tool["name"], "input_schema": tool["parameters"], "strict": True}
        for tool in (WEATHER, CLOCK)
    ],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 100,
    "temperature": 0,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "required": ("/v1/chat/completions", chat(tool_choice="required")),
    **{
        f"named {seed}": (
            "/v1/chat/completions",
            chat(tool_choice=NAMED, temperature=2, seed=seed),
        )
        for seed in range(2)
    },
    "response": ("/v1/responses", RESPONSE),
    "message": ("/v1/messages", MESSAGE),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(cluster: Cluster) -> dict[str, Any]:
    """Send all requests in parallel. Together they need few more steps than the longest one."""
    made = await asyncio.gather(*(post(cluster, path, body) for path, body in REQUESTS.values()))
    return dict(zip(REQUESTS, made, strict=True))


def test_a_required_call_is_well_formed(answers: dict[str, Any]) -> None:
    (choice,) = answers["required"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    check(call["function"]["name"], call["function"]["arguments"])


@pytest.mark.parametrize("seed", range(2))
def test_a_named_call_is_well_formed_however_it_is_sampled(
    answers: dict[str, Any], seed: int
) -> None:
    (call,) = answers[f"named {seed}"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time"
    check("get_time", call["function"]["arguments"])


async def test_a_streamed_call_is_the_same(cluster: Cluster, answers: dict[str, Any]) -> None:
    path, body = REQUESTS["required"]
    whole = answers["required"]
    events = await post(cluster, path, body | {"stream": True})
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    (wanted,) = whole["choices"][0]["message"]["tool_calls"]
    assert parts[0]["name"] == wanted["function"]["name"]
    assert "".join(p.get("arguments") or "" for p in parts) == wanted["function"]["arguments"]


async def test_the_result_of_a_call_is_read(cluster: Cluster, answers: dict[str, Any]) -> None:
    message = answers["required"]["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    messages = [{"role": "user", "content": ASKED}, message, result]
    second = await post(cluster, "/v1/chat/completions", chat(messages=messages, max_tokens=8))
    assert second["choices"][0]["message"]["content"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


def test_the_other_vendors_formats(answers: dict[str, Any]) -> None:
    (item,) = answers["response"]["output"]
    check(item["name"], item["arguments"])
    answer = answers["message"]
    assert answer["stop_reason"] == "tool_use"
    (block,) = answer["content"]
    check(block["name"], block["input"])
