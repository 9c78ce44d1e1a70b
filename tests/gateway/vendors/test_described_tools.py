"""Tools with a model whose chat template has no tool format. A system message describes them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.protocol.engine_api import Capabilities
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, payloads, serve
from tests.support.fake_engine import Script, fake_engine

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky", "n": [1, 2.5]}}\n</tool_call>'
ARGUMENTS = {"at": "sky", "n": [1, 2.5]}
START, END = "<|im_start|>", "<|im_end|>\n"
REFUSES_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL)) as site:
        site.engine.script = Script(text=lambda prompt: f"I look.\n{CALL}")
        yield site


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "tools": [TOOL]} | fields


def first_rule(site: Site, request: int = 0) -> str:
    grammar = site.engine.requests[request].sampling_config.grammar
    return "" if grammar is None else grammar.splitlines()[0]


async def test_a_call_and_its_result(site: Site) -> None:
    system, asked = {"role": "system", "content": "Be brief."}, user("Weather?")
    answer = await site.post(CHAT, chat(system, asked))
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    result = {"role": "tool", "content": "blue", "tool_call_id": call["id"]}
    site.engine.script = Script(text=lambda prompt: "It is blue.")
    said = choice["message"]
    second = await site.post(CHAT, chat(system, asked, said, result, result, user("So?")))
    assert second["choices"][0]["message"]["content"] == "It is blue."
    first, again = site.engine.prompts
    assert first.startswith(f"{START}system\nBe brief.\n\nYou can call functions.")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in first
    response = "<tool_response>\nblue\n</tool_response>"
    assert again == (
        f"{first}I look.\n{CALL}{END}{START}user\n{response}\n{response}\n\nSo?{END}"
        f"{START}assistant\n"
    )
    one, two = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id


async def test_tools_without_a_system_message(site: Site) -> None:
    counted = await site.post(f"{MESSAGES}/count_tokens", _messages(user("Hi")))
    answer = await site.post(MESSAGES, _messages(user("Hi"), max_tokens=50))
    assert site.engine.prompts[0].startswith(f"{START}system\nYou can call functions.")
    usage = answer["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_a_template_that_rejects_system_messages() -> None:
    engine = fake_engine("e0", model=MODEL, chat_template=REFUSES_SYSTEM)
    engine.script = Script(text=lambda prompt: CALL)
    async with serve(CoreConfig(), engine) as site:
        answer = await site.post(CHAT, chat(user("Weather?")))
    assert answer["choices"][0]["message"]["tool_calls"]
    assert engine.prompts[0].startswith(f"{START}user\nYou can call functions.")
    assert engine.prompts[0].endswith(f"\n\nWeather?{END}{START}assistant")


async def test_a_streamed_call(site: Site) -> None:
    chunks = payloads(await site.stream(CHAT, chat(user("Weather?"), stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "look",
        ARGUMENTS,
    )


def _messages(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    tools = [{"name": "look", "input_schema": SCHEMA}]
    return {"model": MODEL, "messages": list(messages), "tools": tools} | fields


async def test_anthropics_messages(site: Site) -> None:
    first = await site.post(MESSAGES, _messages(user("Weather?"), max_tokens=50))
    text, call = first["content"]
    assert (text["text"], call["input"], first["stop_reason"]) == ("I look.", ARGUMENTS, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "blue"}
    said = {"role": "assistant", "content": first["content"]}
    asked = _messages(user("Weather?"), said, user([result]), max_tokens=50)
    second = await site.post(MESSAGES, asked)
    one, two = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id
    assert second["usage"]["cache_read_input_tokens"] > first["usage"]["input_tokens"]


async def test_responses(site: Site) -> None:
    tools = [{"type": "function", **TOOL["function"]}]
    asked = {"model": MODEL, "tools": tools}
    first = await site.post(RESPONSES, asked | {"input": "Weather?"})
    message, call = first["output"]
    assert message["content"][0]["text"] == "I look."
    assert json.loads(call["arguments"]) == ARGUMENTS
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    follow = {"input": [output], "previous_response_id": first["id"]}
    await site.post(RESPONSES, asked | follow)
    one, two = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, 'start: head body ("\\n" "<tool_call>" body)* | TEXT'),
        ({"parallel_tool_calls": False}, "start: head body | TEXT"),
        ({"tool_choice": "required"}, 'start: "<tool_call>" body'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            'start: "<tool_call>" body',
        ),
        ({"tool_choice": "none"}, ""),
        ({"structured_outputs": {"regex": "a+"}}, ""),
    ],
)
async def test_allowed_answers(site: Site, fields: dict[str, Any], rule: str) -> None:
    await site.post(CHAT, chat(user("Hi"), **fields))
    assert first_rule(site) == rule


async def test_a_history_of_calls_without_tools(site: Site) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": '{"at":"sky"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "blue", "tool_call_id": "c"}
    await site.post(CHAT, chat(user("Hi"), said, result, tool_choice="none"))
    assert site.engine.prompts[0] == (
        f"{START}user\nHi{END}{START}assistant\n<tool_call>\n"
        f'{{"name": "look", "arguments": {{"at": "sky"}}}}\n</tool_call>{END}'
        f"{START}user\n<tool_response>\nblue\n</tool_response>{END}{START}assistant\n"
    )


async def test_more_tools_than_a_grammar_supports() -> None:
    """The names of calls are enforced, and their arguments are objects."""
    size = 500_000
    engine = fake_engine("e0", model=MODEL, max_seq_len=size, tokens_capacity=size)
    properties = {f"p{i}": {"type": "string"} for i in range(40)}
    parameters = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"look{i}", "parameters": parameters}}
        for i in range(100)
    ]
    async with serve(CoreConfig(), engine) as site:
        await site.post(CHAT, chat(user("Hi"), tools=tools))
        required = chat(user("Hi"), tools=tools, tool_choice="required")
        status, answer = await site.send(CHAT, required)
    grammar = engine.requests[0].sampling_config.grammar
    assert grammar is not None
    assert '"look99\\""' in grammar.replace("\\\\", "\\")
    assert "p39" not in grammar
    assert (status, answer["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("is_text", [True, False])
async def test_engines_without_grammars(is_text: bool) -> None:
    able = Capabilities(features=frozenset({"max_gen_length", "temperature"}))
    engine = fake_engine("e0", model=MODEL, text=is_text, capabilities=able)
    async with serve(CoreConfig(), engine) as site:
        status, answer = await site.send(CHAT, chat(user("Hi")))
        assert (status, answer["error"]["param"]) == (400, "tools")
        message = answer["error"]["message"]
        assert message.startswith(f"Model `{MODEL}` does not support tool calling: its ")
        assert "Qwen3" in message
        await site.post(CHAT, chat(user("Hi"), tool_choice="none"))
