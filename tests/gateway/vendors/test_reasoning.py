"""Models that reason before they answer, with each vendor's API."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.protocol.engine_api import FinishReason
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, payloads, serve
from tests.support.fake_engine import Script, fake_engine

# Modelled after Qwen3's template: reasoning is shown again after the last question.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '<tools><tool_call>' + (tools | tojson) + '</tools>\\n' }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}
        {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content.split('</think>')[-1] }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
THOUGHT = "Where is it?\n\nUp, I think."
REASONED = f"<think>\n{THOUGHT}\n</think>\n\n"
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "Weather?"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    engine = fake_engine("e0", model=MODEL, chat_template=THINKING)
    async with serve(CoreConfig(), engine) as site:
        site.engine.script = Script(
            text=lambda prompt: (
                f"{REASONED}Sunny, all of the day."
                if "sunny" in prompt
                else f"{REASONED}I look.\n{CALL}"
            )
        )
        yield site


def asked(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages)} | fields


async def prefix(site: Site, path: str, body: Any) -> tuple[str, Any]:
    async with site.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-parrot-prefix"].partition(";")[0], await response.json()


async def test_a_chat_with_reasoning_and_calls(site: Site) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    answer = await site.post(CHAT, asked(USER, tools=tools))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "I look.")
    (call,) = message["tool_calls"]
    result = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
    found, answer = await prefix(site, CHAT, asked(USER, message, result, tools=tools))
    assert found == "continued"
    assert answer["choices"][0]["message"]["content"] == "Sunny, all of the day."
    assert site.engine.prompts[1].startswith(f"{site.engine.prompts[0]}{REASONED}I look.\n{CALL}")
    # With vLLM's field name, and without reasoning. The template shows another text.
    renamed = {**message, "reasoning": message["reasoning_content"], "reasoning_content": None}
    found, _ = await prefix(site, CHAT, asked(USER, renamed, result, tools=tools))
    assert found == "continued"
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    found, _ = await prefix(site, CHAT, asked(USER, bare, result, tools=tools))
    assert found != "continued"
    assert len(site.core.sessions) == 1


async def test_a_template_that_omits_earlier_reasoning(site: Site) -> None:
    """The prompt is the same with and without the reasoning, and so is the program."""
    question = {"role": "user", "content": "Is it sunny?"}
    answer = await site.post(CHAT, asked(question))
    message = answer["choices"][0]["message"]
    bare = {"role": "assistant", "content": message["content"]}
    for sent in (message, bare):
        await site.post(CHAT, asked(question, sent, USER))
    assert site.engine.prompts[1] == site.engine.prompts[2]
    assert "Up, I think" not in site.engine.prompts[1]
    assert len(site.core.sessions) == 1


async def test_a_chat_as_a_stream(site: Site) -> None:
    chunks = payloads(await site.stream(CHAT, asked(USER, stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == f"I look.\n{CALL}"
    kinds = [key for delta in deltas for key in delta if key in ("reasoning_content", "content")]
    assert kinds[1:] == sorted(kinds[1:], reverse=True)  # after the first, empty content


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "max_tokens": 90}),
    ],
)
async def test_reasoning_is_switched_off(site: Site, path: str, fields: dict[str, Any]) -> None:
    site.engine.script = Script(text=lambda prompt: "Sunny.")
    answer = await site.post(path, asked(USER, **fields))
    assert "Sunny." in json.dumps(answer)
    assert site.engine.prompts[0].endswith("<think>\n\n</think>\n\n")


async def test_an_answer_that_is_cut_while_it_reasons(site: Site) -> None:
    site.engine.script = Script(
        text=lambda prompt: "<think>\nWhere", finish_reason=FinishReason.LENGTH
    )
    choice = (await site.post(CHAT, asked(USER)))["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Where", "")
    assert choice["finish_reason"] == "length"
    response = await site.post(RESPONSES, {"model": MODEL, "input": "Weather?"})
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["output"][0]["status"] == response["status"] == "incomplete"


async def test_a_constrained_answer_has_no_reasoning() -> None:
    """The prompt begins the reasoning, but the grammar does not allow any."""
    engine = fake_engine("e0", model=MODEL, chat_template=THINKING + "{{- '<think>\\n' }}")
    async with serve(CoreConfig(), engine) as site:
        engine.script = Script(text=lambda prompt: '{"at": "sky"}')
        fields = {"response_format": {"type": "json_object"}}
        message = (await site.post(CHAT, asked(USER, **fields)))["choices"][0]["message"]
        assert message["content"] == '{"at": "sky"}'
        engine.script = Script(text=lambda prompt: f"{THOUGHT}\n</think>\n\nSunny.")
        message = (await site.post(CHAT, asked(USER)))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Sunny.")


async def test_messages_with_blocks_of_thinking(site: Site) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    fields = {"max_tokens": 90, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 9}}
    answer = await site.post(MESSAGES, asked(USER, **fields))
    thinking, text, call = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", THOUGHT)
    assert thinking["signature"]
    assert (text["text"], call["type"]) == ("I look.", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    history = [USER, {"role": "assistant", "content": answer["content"]}]
    history.append({"role": "user", "content": [result]})
    assert (await prefix(site, MESSAGES, asked(*history, **fields)))[0] == "continued"

    found = [
        json.loads(data)
        for _, data in await site.stream(MESSAGES, asked(USER, **fields, stream=True))
    ]
    begun = [event["content_block"]["type"] for event in found if "content_block" in event]
    assert begun == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    signed = [delta for delta in deltas if delta["type"] == "signature_delta"]
    assert signed == [{"type": "signature_delta", "signature": thinking["signature"]}]
    ends = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert ends == [0, 1, 2]


async def test_responses_with_items_of_reasoning(site: Site) -> None:
    tools = [{"type": "function", **FUNCTION}]
    body = {"model": MODEL, "tools": tools, "reasoning": {"effort": "low", "summary": "auto"}}
    first = await site.post(RESPONSES, body | {"input": "Weather?"})
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    reasoning, _, call = first["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert (reasoning["summary"], reasoning["status"]) == ([], "completed")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    resent = [{"role": "user", "content": "Weather?"}, *first["output"], result]
    continued = {"input": [result], "previous_response_id": first["id"]}
    for fields in (continued, {"input": resent}):
        found, second = await prefix(site, RESPONSES, body | fields)
        assert found == "continued"
        assert second["output"][-1]["content"][0]["text"] == "Sunny, all of the day."


async def test_the_events_of_reasoning_in_a_response(site: Site) -> None:
    body = {"model": MODEL, "input": "Is it sunny?", "stream": True}
    events = [json.loads(data) for _, data in await site.stream(RESPONSES, body)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    done = kinds.index("reasoning_text.done")
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[done : done + 4] == [
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in deltas) == events[done]["text"] == THOUGHT
    output = events[-1]["response"]["output"]
    assert {event["item_id"] for event in deltas} == {output[0]["id"]}
    assert output[1]["content"][0]["text"] == "Sunny, all of the day."
