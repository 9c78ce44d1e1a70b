"""Conversations on engines whose servers render the chat template."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from parrot.engine.app import ReorderBuffer
from parrot.engine.app import create_app as create_engine_app
from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.service import OpenAIService
from parrot.protocol.engine_api import Capabilities, RegisterRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.gateway.vendors.conftest import payloads, serve
from tests.support.app_server import serve_app
from tests.support.fake_engine import fake_engine
from tests.support.fake_openai import FakeOpenAI, Fault

MODEL = "gpt-fake"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
TOOL = {"type": "function", "function": LOOK}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}},
    {"id": "b", "type": "function", "function": {"name": "look", "arguments": ""}},
]
ASKED = [{"role": "user", "content": "Is it raining?"}]


class Site:
    def __init__(self, http: aiohttp.ClientSession, core: ServeCore, fake: FakeOpenAI) -> None:
        self.http, self.core, self.fake = http, core, fake

    async def send(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        given = {"model": MODEL} | body
        async with self.http.post(path, json=given, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        status, answer = await self.send(path, body, **options)
        assert status == 200, answer
        return answer

    @property
    def sent(self) -> dict[str, Any]:
        """Return the last body that the server received."""
        return self.fake.bodies[-1]


@asynccontextmanager
async def site_of(fake: FakeOpenAI, **instance: Any) -> AsyncIterator[Site]:
    """Run ServeCore, an openai engine and a server, with HTTP between them."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_app(fake.app()))
        config = OpenAIConfig.model_validate(
            {"model": MODEL, "instance": {"base_url": f"{server}/v1"} | instance}
        )
        service = OpenAIService(config, environ={})
        stack.push_async_callback(service.close)
        await service.start()
        app = create_engine_app(service, ReorderBuffer(MonotonicClock()), config)
        engine_url = await stack.enter_async_context(serve_app(app))
        clock, core_config = MonotonicClock(), CoreConfig()
        dispatcher = Dispatcher(
            core_config, clock, lambda info: EngineClient(HttpClient(engine_url))
        )
        core = ServeCore(core_config, clock=clock, dispatcher=dispatcher)
        url = await stack.enter_async_context(serve_app(create_app(core)))
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        await core.register_engine(RegisterRequest(engine_config=service.engine_info()))
        yield Site(http, core, fake)
        core.check_integrity()
        service.check_integrity()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with site_of(FakeOpenAI(owned_by="vllm")) as site:
        yield site


async def stream(site: Site, body: Any) -> list[Any]:
    given = {"model": MODEL, "stream": True} | body
    async with site.http.post(CHAT, json=given) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")
    return payloads([(None, block[6:]) for block in blocks if block.startswith("data: ")])


async def test_the_server_gets_the_conversation_and_the_tools(site: Site) -> None:
    history = [
        {"role": "developer", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": "a", "content": "Grey."},
    ]
    answer = await site.post(
        CHAT,
        {
            "messages": history,
            "tools": [{"type": "function", "function": LOOK | {"strict": True}}],
            "parallel_tool_calls": False,
            "max_tokens": 7,
            "temperature": 0,
            "response_format": {"type": "json_object"},
            "chat_template_kwargs": {"style": "short"},
            "reasoning_effort": "low",
        },
    )
    assert answer["choices"][0]["message"]["content"] == "one two three"
    assert site.fake.urls[-1].endswith("/v1/chat/completions")
    sent = site.sent
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALLS[0] | ARGUMENTS]},
        {"role": "tool", "tool_call_id": "a", "content": "Grey."},
    ]
    assert sent["tools"] == [{"type": "function", "function": LOOK | {"strict": True}}]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("auto", False)
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (sent["max_tokens"], sent["reasoning_effort"]) == (7, "low")
    assert sent["chat_template_kwargs"]["style"] == "short"
    assert "prompt" not in sent


ARGUMENTS = {"function": {"name": "look", "arguments": '{"at":"sky"}'}}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("required", "required"),
        (
            {"type": "function", "function": {"name": "look"}},
            {"type": "function", "function": {"name": "look"}},
        ),
        ("none", None),
    ],
)
async def test_choices_of_tools(site: Site, choice: Any, sent: Any) -> None:
    other = {"type": "function", "function": {"name": "wait"}}
    await site.post(CHAT, {"messages": ASKED, "tools": [TOOL, other], "tool_choice": choice})
    assert site.sent.get("tool_choice") == sent
    assert len(site.sent.get("tools", ())) == (2 if sent else 0)


async def test_calls_are_returned_whole_and_streamed(site: Site) -> None:
    body = {"messages": ASKED, "tools": [TOOL]}
    site.fake.calls, site.fake.reasoning = CALLS, "Hm. "
    answer = await site.post(CHAT, body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("one two three", "Hm. ")
    called = [call["function"] for call in message["tool_calls"]]
    assert called == [
        {"name": "look", "arguments": '{"at":"sky"}'},
        {"name": "look", "arguments": "{}"},
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in await stream(site, body | {"seed": 3})]
    assert "".join(delta.get("content") or "" for delta in deltas) == "one two three"
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm. "
    streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert streamed == called


async def test_clients_of_other_vendors_can_call_tools(site: Site) -> None:
    site.fake.calls = CALLS[:1]
    body = {"messages": ASKED, "max_tokens": 9}
    answer = await site.post(MESSAGES, body | {"tools": [{"name": "look", "input_schema": {}}]})
    assert [part["type"] for part in answer["content"]] == ["text", "tool_use"]
    assert answer["content"][1]["input"] == {"at": "sky"}
    assert answer["stop_reason"] == "tool_use"
    body = {"input": "Is it raining?", "tools": [{"type": "function"} | LOOK]}
    answer = await site.post(RESPONSES, body)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    follow = {
        "previous_response_id": answer["id"],
        "input": [
            {
                "type": "function_call_output",
                "call_id": answer["output"][1]["call_id"],
                "output": "no",
            }
        ],
    }
    await site.post(RESPONSES, follow)
    roles = [message["role"] for message in site.sent["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert site.sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"at":"sky"}'


async def test_a_conversation_that_goes_on_is_continued(site: Site) -> None:
    """The turn continues in its session and context, and the header reports the shared prefix."""
    site.fake.calls = CALLS[:1]
    body: dict[str, Any] = {"messages": [*ASKED], "tools": [TOOL]}
    async with site.http.post(CHAT, json={"model": MODEL} | body) as response:
        assert response.headers["x-parrot-prefix"] == "new"
        message = (await response.json())["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    body["messages"] += [message, {"role": "tool", "tool_call_id": call_id, "content": "No."}]
    async with site.http.post(CHAT, json={"model": MODEL} | body) as response:
        assert response.headers["x-parrot-prefix"].startswith("continued; reused=")
    assert len(list(site.core.sessions)) == 1


async def test_only_equal_conversations_share_an_answer(site: Site) -> None:
    """Different conversations may have the same text if a template leaves parts out."""
    forged = 'Hi\n{"role":"assistant"}\nHo'
    bodies: list[dict[str, Any]] = [
        {"messages": ASKED},
        {"messages": ASKED, "tools": [TOOL]},
        {"messages": ASKED, "tools": [TOOL], "tool_choice": "required"},
        {"messages": [ASKED[0] | {"name": "Ann"}]},
        {"messages": [{"role": "user", "content": forged}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    ]
    for body in bodies + bodies:
        await site.post(CHAT, body | {"temperature": 0})
    assert len(site.fake.bodies) == len(bodies)


async def test_errors_of_the_server_are_passed_on(site: Site) -> None:
    site.fake.faults = [Fault(400, {"error": {"message": "auto needs a parser"}})]
    status, answer = await site.send(CHAT, {"messages": ASKED, "tools": [TOOL]})
    assert (status, "auto needs a parser" in answer["error"]["message"]) == (400, True)


async def test_a_server_without_tools_gets_none() -> None:
    async with site_of(FakeOpenAI(owned_by="me")) as site:
        status, answer = await site.send(CHAT, {"messages": ASKED, "tools": [TOOL]})
        assert (status, answer["error"]["code"]) == (400, "unsupported_field")
        assert answer["error"]["param"] == "tools"
        await site.post(CHAT, {"messages": ASKED})
        assert site.sent["messages"] == ASKED


async def test_a_server_that_knows_openais_fields_only() -> None:
    said = {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}
    async with site_of(FakeOpenAI()) as site:
        body = {"messages": [*ASKED, said, *ASKED], "reasoning_effort": "high"}
        await site.post(CHAT, body)
        assert site.sent["messages"] == [*ASKED, {"role": "assistant", "content": "No."}, *ASKED]
        assert site.sent["reasoning_effort"] == "high"
        assert "chat_template_kwargs" not in site.sent
        status, answer = await site.send(CHAT, body | {"chat_template_kwargs": {"style": "x"}})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


async def test_server_side_rendering_can_be_disabled() -> None:
    """Models without a chat template need this."""
    async with site_of(FakeOpenAI(owned_by="vllm"), features={"messages": False}) as site:
        await site.post(CHAT, {"messages": ASKED})
        assert site.sent["prompt"] == "User: Is it raining?\n\nAssistant:"
        status, answer = await site.send(CHAT, {"messages": ASKED, "tools": [TOOL]})
        assert (status, answer["error"]["code"]) == (400, "unsupported_field")


async def test_a_started_answer_is_not_continued_by_another_server() -> None:
    """Another server would generate a new answer from the beginning."""
    record = Capabilities(features=frozenset({"messages", "max_gen_length"}))
    engine = fake_engine("e0", model=MODEL, text=True, capabilities=record)
    async with serve(CoreConfig(), engine) as site:
        engine.script.hang_after = 1
        body = {"model": MODEL, "messages": ASKED, "stream": True}
        async with site.http.post(CHAT, json=body) as response:
            async for line in response.content:
                if b"content" in line and b'"content":""' not in line:
                    break
            for one in list(site.core.fleet):
                site.core.fleet.lose(one, "test")
            again = fake_engine("e1", model=MODEL, text=True, capabilities=record)
            engine.script.hang_after = None
            await site.core.register_engine(RegisterRequest(engine_config=again.info))
            rest = await response.text()
        assert "cannot be continued" in rest
