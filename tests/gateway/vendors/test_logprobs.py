"""Log probabilities of answers in OpenAI's formats."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import Unavailable
from parrot.serve.config import CoreConfig
from tests.gateway.test_transcript import HERMES
from tests.gateway.vendors.conftest import MODEL, Site, payloads, serve
from tests.journal.replayed import MemoryFile
from tests.journal.test_over_http import serving
from tests.support.fake_engine import FakeEngine, Script, fake_engine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def says(text: str, **fields: Any) -> Script:
    return Script(text=lambda _: text, **fields)


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "logprobs": True} | fields


def logprob(byte: int) -> float:
    """Return the fake engine's log probability of a token, which is a byte."""
    return -(byte % 8) / 8


def entry(byte: int, num_top: int) -> dict[str, Any]:
    likely = [_plain((byte + i) % 256) for i in range(num_top)]
    return _plain(byte) | {"top_logprobs": likely}


def _plain(byte: int) -> dict[str, Any]:
    token = bytes([byte]).decode(errors="replace")
    return {"token": token, "logprob": logprob(byte), "bytes": [byte]}


@pytest.mark.parametrize(("asked", "num_top"), [({}, 0), ({"top_logprobs": 3}, 3)])
@pytest.mark.parametrize("text", ["Good.", "Grüße €!"])
async def test_a_chats_answer(site: Site, text: str, asked: dict[str, Any], num_top: int) -> None:
    """The end token has no entry. Bytes of an incomplete character have no text."""
    want = [entry(byte, num_top) for byte in text.encode()]
    site.engine.script = says(text)
    answer = await site.post(CHAT, chat(**asked))
    (choice,) = answer["choices"]
    assert choice["logprobs"] == {"content": want, "refusal": None}
    assert site.engine.requests[0].sampling_config.logprobs == num_top
    chunks = payloads(await site.stream(CHAT, chat(stream=True, **asked)))
    found: list[Any] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        shown = (choice["logprobs"] or {}).get("content", [])
        found += shown
        if content := choice["delta"].get("content"):
            assert b"".join(bytes(e["bytes"]) for e in shown) == content.encode()
    assert found == want


async def test_answers_have_no_log_probabilities_by_default(site: Site) -> None:
    (choice,) = (await site.post(CHAT, chat(logprobs=False)))["choices"]
    assert choice["logprobs"] is None
    assert site.engine.requests[0].sampling_config.logprobs is None
    status, answer = await site.send(CHAT, chat(logprobs=None, top_logprobs=2))
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")
    status, _ = await site.send(CHAT, chat(top_logprobs=21))
    assert status == 400


async def test_tokens_of_a_call_are_included(core_config: CoreConfig) -> None:
    text = 'So. <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = fake_engine("e0", model=MODEL, chat_template=HERMES, script=says(text, steps=9))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with serve(core_config, engine) as site:
        (choice,) = (await site.post(CHAT, chat(tools=tools)))["choices"]
        chunks = payloads(await site.stream(CHAT, chat(tools=tools, stream=True)))
    assert choice["finish_reason"] == "tool_calls"
    assert [e["bytes"][0] for e in choice["logprobs"]["content"]] == list(text.encode())
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", ())]
    assert [e["bytes"][0] for e in entries] == list(text.encode())


async def test_choices_have_their_own_log_probabilities(site: Site) -> None:
    site.engine.scripts = [says("ab"), says("xyz")]
    answer = await site.post(CHAT, chat(n=2))
    texts = ["".join(e["token"] for e in c["logprobs"]["content"]) for c in answer["choices"]]
    assert texts == [c["message"]["content"] for c in answer["choices"]] == ["ab", "xyz"]


@pytest.mark.parametrize("num_extra", [0, 1, 4])
async def test_tokens_of_a_stop_string_are_not_shown(site: Site, num_extra: int) -> None:
    """The engine's text ends before the stop string, but its tokens include it."""
    extra = list(b"STOP"[:num_extra])
    site.engine.script = says("abc", stop_token=False, extra_ids=extra)
    for stream in (False, True):
        asked = chat(stop="STOP", stream=stream)
        if stream:
            chunks = payloads(await site.stream(CHAT, asked))
            found = [
                e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", ())
            ]
        else:
            found = (await site.post(CHAT, asked))["choices"][0]["logprobs"]["content"]
        assert [e["token"] for e in found] == ["a", "b", "c"]


async def test_completions(site: Site) -> None:
    """The generated token is always among the top tokens. Offsets count characters."""
    text = "né€o"
    site.engine.script = says(text, finish_reason=FinishReason.LENGTH, stop_token=False)
    body = {"model": MODEL, "prompt": "x", "logprobs": 2}
    (choice,) = (await site.post(COMPLETIONS, body))["choices"]
    want = {
        "tokens": [
            "n",
            r"bytes:\xc3",
            r"bytes:\xa9",
            r"bytes:\xe2",
            r"bytes:\x82",
            r"bytes:\xac",
            "o",
        ],
        "token_logprobs": [logprob(byte) for byte in text.encode()],
        "text_offset": [0, 1, 1, 2, 2, 2, 3],
    }
    assert {name: choice["logprobs"][name] for name in want} == want
    likely = choice["logprobs"]["top_logprobs"]
    assert likely[0] == {"n": logprob(ord("n")), "o": logprob(ord("o"))}
    assert likely[2] == {r"bytes:\xa9": logprob(0xA9), r"bytes:\xaa": logprob(0xAA)}
    parts = payloads(await site.stream(COMPLETIONS, body | {"stream": True}))
    for name in want:
        joined = [x for p in parts for x in (p["choices"][0]["logprobs"] or {}).get(name, ())]
        assert joined == want[name]


async def test_completions_without_top_tokens(site: Site) -> None:
    site.engine.script = says("ab")
    body = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "logprobs": 0}
    for choice in (await site.post(COMPLETIONS, body))["choices"]:
        assert choice["logprobs"] == {
            "tokens": ["a", "b"],
            "token_logprobs": [logprob(97), logprob(98)],
            "top_logprobs": [{"a": logprob(97)}, {"b": logprob(98)}],
            "text_offset": [0, 1],
        }


async def test_a_stream_that_continues_after_a_failure_is_complete(site: Site) -> None:
    """The output of the first attempt counts, and the second attempt generates the rest."""
    site.engine.scripts = [says("abcdef")]
    site.engine.script = says("ef")

    fail = failing(site.engine, after=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.engine, "generate_stream", fail)
        asked = chat(max_tokens=20, temperature=0)
        chunks = payloads(await site.stream(CHAT, asked | {"stream": True}))
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", ())]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == "abcdef"
    assert [e["token"] for e in entries] == list("abcdef")
    again = await site.post(CHAT, asked)  # From the result cache.
    kept = again["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in kept] == list("abcdef")
    assert len(site.engine.requests) == 2


def failing(engine: FakeEngine, after: int) -> Callable[..., Any]:
    """Make the engine's first stream break after `num_chunks` chunks."""
    stream, num_streams = engine.generate_stream, 0

    async def broken(request: Any) -> Any:
        nonlocal num_streams
        num_streams += 1
        is_first, num_chunks = num_streams == 1, 0
        async for event in stream(request):
            yield event
            num_chunks += 1
            if is_first and num_chunks == after:
                raise Unavailable("the connection was reset")

    return broken


async def test_a_reused_result_includes_log_probabilities(site: Site) -> None:
    site.engine.script = says("abc")
    asked = chat(temperature=0, top_logprobs=1)
    first = await site.post(CHAT, asked)
    again = await site.post(CHAT, asked)
    assert len(site.engine.requests) == 1
    assert again["choices"] == first["choices"]
    await site.post(CHAT, asked | {"top_logprobs": 2})
    assert len(site.engine.requests) == 2


def response(**fields: Any) -> dict[str, Any]:
    include = {"include": ["message.output_text.logprobs"]}
    return {"model": MODEL, "input": "Hi", "top_logprobs": 2} | include | fields


def events(named: list[tuple[str | None, str]]) -> list[dict[str, Any]]:
    return [json.loads(data) for _, data in named]


async def test_a_response(site: Site) -> None:
    text = "Grüße!"
    site.engine.script = says(text)
    want = [entry(byte, 2) for byte in text.encode()]
    answer = await site.post(RESPONSES, response())
    assert answer["top_logprobs"] == 2
    assert answer["output"][0]["content"][0]["logprobs"] == want
    found = events(await site.stream(RESPONSES, response(stream=True)))
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == want
    for event in deltas:
        assert b"".join(bytes(e["bytes"]) for e in event["logprobs"]) == event["delta"].encode()
    (done,) = [event for event in found if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == want
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == want


async def test_a_background_response_and_its_continuation(site: Site) -> None:
    site.engine.script = says("ab")
    made = await site.post(RESPONSES, response(background=True, stream=False, top_logprobs=0))
    async with site.http.get(f"{RESPONSES}/{made['id']}?stream=true") as followed:
        blocks = (await followed.text()).split("\n\n")
    ended = json.loads([b for b in blocks if b.strip()][-1].split("data: ")[1])["response"]
    want = [entry(byte, 0) for byte in b"ab"]
    assert ended["output"][0]["content"][0]["logprobs"] == want
    again = await site.post(RESPONSES, response(previous_response_id=made["id"]))
    resent = {"model": MODEL, "input": [*again["output"], {"role": "user", "content": "x"}]}
    (item,) = (await site.post(RESPONSES, resent))["output"]
    assert item["content"][0]["logprobs"] == []
    async with site.http.get(f"{RESPONSES}/{again['id']}/input_items") as listed:
        assert listed.status == 200


async def test_a_response_with_a_call_has_log_probabilities_of_its_text(
    core_config: CoreConfig,
) -> None:
    text = 'So. <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = fake_engine("e0", model=MODEL, chat_template=HERMES, script=says(text, steps=30))
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    async with serve(core_config, engine) as site:
        found = events(await site.stream(RESPONSES, response(tools=tools, stream=True)))
    message, call = found[-1]["response"]["output"]
    assert call["name"] == "f"
    assert message["content"][0]["text"] == "So."
    shown = "".join(e["token"] for e in message["content"][0]["logprobs"])
    assert shown.strip() == "So."


async def test_an_engine_of_text_reports_its_tokens(core_config: CoreConfig) -> None:
    engine = fake_engine("e0", model=MODEL, text=True, script=says("ab€"))
    async with serve(core_config, engine) as site:
        (choice,) = (await site.post(CHAT, chat(top_logprobs=1)))["choices"]
        chunks = payloads(await site.stream(CHAT, chat(stream=True, top_logprobs=1)))
    want = [entry(byte, 1) for byte in "ab€".encode()]
    assert choice["logprobs"]["content"] == want
    assert [
        e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", ())
    ] == want


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"background": True}])
async def test_log_probabilities_survive_a_restart(asked: dict[str, Any]) -> None:
    """A stored response is unchanged, can be continued, and its items can be referenced."""
    file, fields = MemoryFile(), response(stream=False, top_logprobs=1) | asked
    async with serving(file, fake_engine("e0", model=MODEL, script=says("ab"))) as site:
        async with site.http.post(RESPONSES, json=fields) as answer:
            assert answer.status == 200, await answer.text()
            returned = await answer.text()
        made = [
            json.loads(line.removeprefix("data: ")) for line in returned.split("\n") if "{" in line
        ]
        response_id = made[0].get("response", made[0])["id"]
        ended = await ended_response(site, response_id)
        want = [entry(byte, 1) for byte in b"ab"]
        assert ended["output"][0]["content"][0]["logprobs"] == want
        reference = {"type": "item_reference", "id": ended["output"][0]["id"]}
        again = await site.post(
            RESPONSES, {"model": MODEL, "input": [reference, {"role": "user", "content": "x"}]}
        )
        assert again["status"] == "completed"
    async with serving(file) as site:
        assert await ended_response(site, response_id) == ended
        await site.post(
            RESPONSES, {"model": MODEL, "input": "x", "previous_response_id": response_id}
        )


async def ended_response(site: Site, response_id: str) -> Any:
    while True:
        async with site.http.get(f"{RESPONSES}/{response_id}") as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        if found["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.01)
