"""Anthropic's messages."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import PromptTooLong
from parrot.serve.config import CoreConfig
from tests.gateway.test_transcript import HERMES
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import Script, fake_engine

PATH = "/v1/messages"
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    engine = fake_engine("e0", model=MODEL, chat_template=HERMES)
    async with serve(CoreConfig(), engine) as site:
        yield site


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": list(messages)} | fields


async def events(site: Site, asked: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, data in await site.stream(PATH, asked | {"stream": True}):
        event = json.loads(data)
        assert event["type"] == name
        found.append(event)
    return found


async def test_a_message(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Paris.", finish_reason=FinishReason.LENGTH)
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = await site.post(PATH, body(user("Capital?"), system=system, temperature=0))
    assert site.engine.prompts == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["content"] == [{"type": "text", "text": "Paris."}]
    assert answer["stop_reason"] == "max_tokens"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > usage["output_tokens"] > 0


ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}{% endif %}"
    "{{ '<' + m.role + '>' + m.content + '</' + m.role + '>' }}{% endfor %}{{ '<assistant>' }}"
)


async def test_a_system_message_after_the_first_user_message() -> None:
    """Claude Code sends such a message. The model's template requires another order."""
    engine = fake_engine("e0", model=MODEL, chat_template=ALTERNATING)
    async with serve(CoreConfig(), engine) as site:
        engine.script = Script(text=lambda prompt: "Paris, of course.", stop_token=False)
        messages = [
            {"role": "user", "content": "Capital?"},
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        ]
        asked = body(*messages, system="You know.", temperature=0)
        assert (await site.post(PATH, asked))["content"][0]["text"] == "Paris, of course."
        begin = "<system>You know.</system><user>Capital?\n\nBe brief.</user><assistant>"
        assert engine.prompts == [begin]
        messages += [
            {"role": "assistant", "content": "Paris, of course."},
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Spain's?"},
        ]
        async with site.http.post(PATH, json=body(*messages, system="You know.")) as response:
            reused = len(begin + "Paris, of course.")
            assert response.headers["x-parrot-prefix"].startswith(
                f"continued; reused={reused}; of="
            )
        assert engine.prompts[1] == (
            begin + "Paris, of course.</assistant><user>Be kind.\n\nSpain's?</user><assistant>"
        )


async def test_the_stop_sequence_that_ended_the_text(site: Site) -> None:
    """A repeated message, which reuses the result, has the same stop sequence."""
    site.engine.script = Script(text=lambda prompt: "Paris", stop_string="\n\n")
    asked = body(user("Capital?"), stop_sequences=["x", "\n\n"], temperature=0)
    for _ in range(2):
        answer = await site.post(PATH, asked)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\n")
    found = await events(site, asked)
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "\n\n"}
    site.engine.script = Script(text=lambda prompt: "Paris")
    answer = await site.post(PATH, body(user("And Spain's?"), stop_sequences=["x"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


async def test_the_events_of_a_stream(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: f"I look.\n{CALL}")
    found = await events(site, body(user("Weather?"), tools=[TOOL]))
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["text", "tool_use"]
    assert [event["index"] for event in starts] == [0, 1]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "I look."
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"at":"sky"}'
    assert kinds.count("content_block_stop") == 2


async def test_a_result_continues_the_turn_that_called_the_tool(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: f"I look.\n{CALL}")
    first = await site.post(PATH, body(user("Weather?"), tools=[TOOL]))
    _, call = first["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "sky"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "blue"}
    asked = user([result, {"type": "text", "text": "So?"}])
    said = {"role": "assistant", "content": first["content"]}
    second = await site.post(PATH, body(user("Weather?"), said, asked, tools=[TOOL]))
    one, two = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id
    assert second["usage"]["cache_read_input_tokens"] > first["usage"]["input_tokens"]
    assert site.engine.prompts[1].endswith(
        "<tool_response>\nblue\n</tool_response><|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_tokens_are_counted_as_the_prompt_has_them(site: Site) -> None:
    asked = {"model": MODEL, "messages": [user("Hi")], "system": "Be brief.", "tools": [TOOL]}
    counted = await site.post(f"{PATH}/count_tokens", asked)
    answer = await site.post(PATH, asked | {"max_tokens": 5})
    usage = answer["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "image"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "see"}}, "tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
async def test_bad_fields_are_named(site: Site, fields: dict[str, Any], named: str) -> None:
    status, answer = await site.send(PATH, body(user("Hi")) | fields)
    assert status == 400
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert named in answer["error"]["message"]


async def test_errors_in_the_vendors_form(site: Site) -> None:
    status, answer = await site.send(PATH, body(user("Hi"), model="none"))
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert answer["request_id"].startswith("req_")
    site.engine.script = Script(error=PromptTooLong("too long"))
    status, answer = await site.send(PATH, body(user("Hi"), stream=True))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("tool", "choice", "rule"),
    [
        ({}, {"type": "any"}, '"<tool_call>" body ("\\n" "<tool_call>" body)*'),
        ({}, {"type": "any", "disable_parallel_tool_use": True}, '"<tool_call>" body'),
        ({}, {"type": "tool", "name": "look"}, '"<tool_call>" body'),
        ({"strict": True}, {"type": "auto"}, "(head body)* TEXT"),
    ],
)
async def test_required_and_strict_calls_are_constrained(
    site: Site, tool: dict[str, Any], choice: dict[str, Any], rule: str
) -> None:
    await site.post(PATH, body(user("Hi"), tools=[TOOL | tool], tool_choice=choice))
    grammar = site.engine.requests[0].sampling_config.grammar
    assert grammar is not None
    assert grammar.splitlines()[0] == f"start: {rule}"


async def test_an_answer_with_a_schema(site: Site) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    site.engine.script = Script(text=lambda prompt: '{"city": "Paris"}')
    config = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    await site.post(PATH, body(user("Capital?"), output_config=config))
    (request,) = site.engine.requests
    assert request.sampling_config.json_schema == schema
    status, answer = await site.send(PATH, body(user("x"), output_config={"format": {"type": "x"}}))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "output_config.format.type" in answer["error"]["message"]
