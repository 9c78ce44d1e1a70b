"""OpenAI's responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from parrot.protocol.engine_api import NO_PARENT, FinishReason
from parrot.protocol.errors import EngineFailed, PromptTooLong
from parrot.serve.config import CoreConfig
from tests.gateway.test_transcript import HERMES
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import Script, fake_engine

PATH = "/v1/responses"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\n"


def body(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given} | fields


def says(text: str) -> Script:
    return Script(text=lambda prompt: text)


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def text_of(response: Any) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    return str(part["text"])


async def ask(site: Site, method: str, path: str, **options: Any) -> tuple[int, Any]:
    async with site.http.request(method, path, **options) as response:
        return response.status, await response.json()


async def get(site: Site, path: str) -> Any:
    status, answer = await ask(site, "GET", f"{PATH}/{path}")
    assert status == 200, answer
    return answer


async def events_of(site: Site, given: Any, **fields: Any) -> list[Any]:
    return _checked(await site.stream(PATH, body(given, stream=True, **fields)))


async def follow(site: Site, response_id: str, after: int | None = None) -> list[Any]:
    query = "stream=true" if after is None else f"stream=true&starting_after={after}"
    return _checked(await site.stream(f"{PATH}/{response_id}?{query}", None, "GET"))


def _checked(named: list[tuple[str | None, str]]) -> list[Any]:
    events = [json.loads(data) for _, data in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


def types_of(events: list[Any]) -> list[str]:
    """Return the types of events without their common prefix, and without repeated deltas."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [
        kind
        for kind, last in zip(types, ["", *types], strict=False)
        if not kind == last == "output_text.delta"
    ]


async def test_a_response(site: Site) -> None:
    site.engine.script = says("Paris.")
    response = await site.post(
        PATH,
        body("Capital of France?", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5),
    )
    prompt = f"{SYSTEM}Be brief.<|im_end|>\n{USER}Capital of France?{ASSISTANT}"
    assert site.engine.prompts == [prompt]
    (item,) = response["output"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
    }
    assert (response["object"], response["model"]) == ("response", MODEL)
    assert (response["status"], response["error"]) == ("completed", None)
    assert (response["metadata"], response["temperature"]) == ({"a": "b"}, 0.5)
    assert response["instructions"] == "Be brief."
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == len("Paris.") + 1
    assert usage["input_tokens_details"]["cached_tokens"] < usage["input_tokens"]
    assert await get(site, response["id"]) == response


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_response_has_numbers_for_its_sampling(is_text: bool) -> None:
    """The response shows the default sampling of the engine. If the engine reports none, it shows
    OpenAI's defaults, because clients expect numbers."""
    config = CoreConfig.model_validate({"model_aliases": {"other": MODEL}})
    async with serve(config, fake_engine("e0", model=MODEL, text=is_text)) as site:
        for model in (MODEL, "other"):
            returned = await site.post(PATH, body("Hi") | {"model": model})
            assert returned["temperature"] == (1.0 if is_text else 0.5)
            assert returned["top_p"] == 1.0
        returned = await site.post(PATH, body("Hi", temperature=0, top_p=0.3))
        assert (returned["temperature"], returned["top_p"]) == (0, 0.3)
    assert site.engine.requests[0].sampling_config.temperature is None


async def test_ignore_eos_generates_the_maximum_length(site: Site) -> None:
    """vLLM supports this field, and its benchmark sends it."""
    await site.post(PATH, body("Go on.", ignore_eos=True, max_output_tokens=7))
    sampling = site.engine.requests[-1].sampling_config
    assert (sampling.ignore_tokenizer_eos, sampling.max_gen_length) == (True, 7)


async def test_typed_items(site: Site) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    items = [
        message("developer", "Be brief."),
        {"role": "user", "content": "a"},
        reasoning,
        message("assistant", "b") | {"id": "msg_1", "status": "completed", "phase": None},
        message("user", "c"),
    ]
    await site.post(PATH, body(items))
    assert site.engine.prompts == [
        f"{SYSTEM}Be brief.<|im_end|>\n{USER}a{ASSISTANT}b<|im_end|>\n{USER}c{ASSISTANT}"
    ]


async def test_the_events_of_a_stream(site: Site) -> None:
    site.engine.script = says("Paris.")
    events = await events_of(site, "Capital of France?")
    assert types_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert 1 <= len(deltas) <= 3  # deltas that arrive at the same time may be merged
    assert "".join(deltas) == "Paris."
    (ids,) = {(e["item_id"], e["output_index"]) for e in events if "item_id" in e}
    response = events[-1]["response"]
    assert ids == (response["output"][0]["id"], 0)
    assert text_of(response) == "Paris."
    assert response["usage"]["output_tokens"] == len("Paris.") + 1
    assert await get(site, response["id"]) == response


async def test_an_answer_that_is_cut(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Par", finish_reason=FinishReason.LENGTH)
    response = await site.post(PATH, body("Capital of France?", max_output_tokens=3))
    assert site.engine.requests[0].sampling_config.max_gen_length == 3
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    events = await events_of(site, "Capital of Spain?", max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"


async def test_an_empty_answer_is_an_empty_message(site: Site) -> None:
    site.engine.script = says("")
    assert text_of(await site.post(PATH, body("Hi"))) == ""
    assert text_of((await events_of(site, "Ho"))[-1]["response"]) == ""


async def test_a_response_continues_another(site: Site) -> None:
    site.engine.script = says("Hi!")
    first = await site.post(PATH, body("Hello"))
    second = (await events_of(site, "More", previous_response_id=first["id"]))[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    third = await site.post(PATH, body("And more", previous_response_id=second["id"]))
    forked = await site.post(PATH, body("Less", previous_response_id=first["id"]))
    one, two, three, fork = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id
    assert three.fills[0].parent_context_id == two.context_id
    assert fork.fills[0].parent_context_id in (one.context_id, two.context_id)
    assert len({request.session_id for request in site.engine.requests}) == 1
    once = f"{USER}Hello{ASSISTANT}Hi!<|im_end|>\n{USER}"
    assert site.engine.prompts[2:] == [
        f"{once}More{ASSISTANT}Hi!<|im_end|>\n{USER}And more{ASSISTANT}",
        f"{once}Less{ASSISTANT}",
    ]
    assert third["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert forked["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_instructions_are_not_inherited(site: Site) -> None:
    site.engine.script = says("Hi!")
    first = await site.post(PATH, body("Hello", instructions="Be brief."))
    await site.post(PATH, body("More", previous_response_id=first["id"]))
    assert site.engine.prompts[1] == f"{USER}Hello{ASSISTANT}Hi!<|im_end|>\n{USER}More{ASSISTANT}"


async def test_resent_items_continue_the_turn_that_they_end_with(site: Site) -> None:
    site.engine.script = says("Hi!")
    first = await site.post(PATH, body([message("user", "Hello")], store=False))
    items = [message("user", "Hello"), *first["output"], message("user", "More")]
    await site.post(PATH, body(items, store=False))
    one, two = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id


async def test_a_reference_to_a_stored_item(site: Site) -> None:
    site.engine.script = says("Hi!")
    first = await site.post(PATH, body("Hello"))
    (given,) = (await get(site, f"{first['id']}/input_items"))["data"]
    items = [
        {"type": "item_reference", "id": given["id"]},
        {"id": first["output"][0]["id"]},
        {"type": "item_reference", "id": "rs_1"},
        message("user", "More"),
    ]
    await site.post(PATH, body(items))
    one, two = site.engine.requests
    assert two.fills[0].parent_context_id == one.context_id
    status, answer = await site.send(PATH, body([{"type": "item_reference", "id": "msg_x_0"}]))
    assert (status, answer["error"]["param"]) == (404, "input.0.id")


async def test_null_means_a_missing_field(site: Site) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    nulls = {"id": None, "status": None, "namespace": None, "async_": None, "parsed": None}
    parsed = {"parsed_arguments": {"a": 1}}
    response = await site.post(PATH, body([message("user", "a") | nulls, call | nulls | parsed]))
    page = await get(site, f"{response['id']}/input_items")
    assert page["data"][0] == call | {"id": page["first_id"], "status": "completed"}
    status, answer = await site.send(PATH, body([call | {"strange": "x"}]))
    assert (status, answer["error"]["param"]) == (400, "input.0.function_call.strange")


async def test_input_items_come_in_pages(site: Site) -> None:
    site.engine.script = says("b")
    first = await site.post(PATH, body("a"))
    second = await site.post(PATH, body("c", previous_response_id=first["id"]))
    path = f"{second['id']}/input_items"
    page = await get(site, f"{path}?limit=2")
    assert [item["content"][0]["text"] for item in page["data"]] == ["c", "b"]
    assert (page["object"], page["has_more"]) == ("list", True)
    assert page["first_id"] == page["data"][0]["id"]
    rest = await get(site, f"{path}?limit=2&after={page['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["a"]
    assert not rest["has_more"]
    page = await get(site, f"{path}?order=asc")
    assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]
    status, answer = await ask(site, "GET", f"{PATH}/{path}?after=x&include[]=y")
    assert (status, answer["error"]["param"]) == (404, "after")


async def test_the_tokens_of_a_prompt_are_counted(site: Site) -> None:
    site.engine.script = says("Hi!")
    first = await site.post(PATH, body("Hello"))
    more = body("More", previous_response_id=first["id"], instructions="Be brief.")
    counted = await site.post(f"{PATH}/input_tokens", more)
    second = await site.post(PATH, more)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": second["usage"]["input_tokens"],
    }
    assert len(site.engine.requests) == 2


async def test_responses_that_are_not_stored(site: Site) -> None:
    missing = (await site.post(PATH, body("Hi", store=False)))["id"]
    gone = (await site.post(PATH, body("Ho")))["id"]
    _, answer = await ask(site, "DELETE", f"{PATH}/{gone}")
    assert answer == {"id": gone, "object": "response", "deleted": True}
    for response_id in (missing, gone, "resp_x"):
        for method, path in (
            ("GET", ""),
            ("GET", "/input_items"),
            ("GET", "?stream=true"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            status, answer = await ask(site, method, f"{PATH}/{response_id}{path}")
            assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
        status, answer = await site.send(PATH, body("Hi", previous_response_id=response_id))
        assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")
        assert answer["error"]["param"] == "previous_response_id"


async def test_a_deleted_response_remains_in_its_continuation(site: Site) -> None:
    site.engine.script = says("Hi!")
    first = await site.post(PATH, body("Hello"))
    second = await site.post(PATH, body("More", previous_response_id=first["id"]))
    await ask(site, "DELETE", f"{PATH}/{first['id']}")
    await site.post(PATH, body("And more", previous_response_id=second["id"]))
    assert site.engine.prompts[-1].startswith(f"{USER}Hello{ASSISTANT}Hi!<|im_end|>\n{USER}More")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.message.role"),
        ({"input": ["x"]}, "input.0.message"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type"),
        ({"input": [message("user", "x"), {"type": "shell_call"}]}, "input.1.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.message.content.parts.0.text.text",
        ),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.message.content.parts"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input",
        ),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True, "store": False}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
    ],
)
async def test_bad_fields_are_named(site: Site, fields: dict[str, Any], param: str) -> None:
    status, answer = await site.send(PATH, body("Hi") | fields)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert not site.engine.requests


async def test_harmless_fields_are_accepted(site: Site) -> None:
    await site.post(
        PATH,
        body(
            "Hi",
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}, "verbosity": "low"},
            truncation="disabled",
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=True,
            service_tier="flex",
            user="me",
            safety_identifier="me",
            conversation=None,
            max_tool_calls=None,
            top_logprobs=0,
            client_metadata={"a": "b"},
            prompt_cache_retention="24h",
            stream_options={"include_obfuscation": False},
        ),
    )


async def test_the_schema_of_the_text(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    given = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = await site.post(PATH, body("Hi", text={"format": given}))
    assert site.engine.requests[0].sampling_config.json_schema == schema
    assert response["text"]["format"] == given
    await site.post(PATH, body("Ho", text={"format": {"type": "json_object"}}))
    assert site.engine.requests[1].sampling_config.json_schema == {"type": "object"}


async def test_programs_by_name_have_a_session_each(site: Site) -> None:
    await site.post(PATH, body("a", prompt_cache_key="one"))
    await site.post(PATH, body("b", prompt_cache_key="one"))
    await site.post(PATH, body("c", metadata={"user_id": "two"}))
    sessions = [request.session_id for request in site.engine.requests]
    assert sessions[0] == sessions[1] != sessions[2]


async def test_an_engine_that_fails_fails_the_request(site: Site) -> None:
    site.engine.script = Script(error=EngineFailed("broken"))
    status, answer = await site.send(PATH, body("Hi"))
    assert (status, answer["error"]["type"]) == (502, "server_error")
    site.engine.script = Script(error=PromptTooLong("too long"))
    status, answer = await site.send(PATH, body("Ho", stream=True))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_client_that_disconnects_stops_the_work(site: Site) -> None:
    site.engine.script = Script(hang_after=0)
    for stream in (False, True):
        await site.engine.cancel_after_requests(
            site.send(PATH, body(f"Hi {stream}", stream=stream))
        )
    async with asyncio.timeout(5):
        await site.engine.all_aborted()
    assert len(site.engine.requests) == 2


async def test_a_stream_that_breaks_ends_with_a_failed_response(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Paris.", hang_after=1)
    async with site.http.post(PATH, json=body("Hi", stream=True)) as answer:
        await answer.content.readuntil(b"response.output_text.delta")
        site.core.shut_down()
        last = (await answer.text()).split("\n\n")[-2]
    event = json.loads(last.split("data: ")[1])
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "server_error"


class TestInTheBackground:
    async def test_a_background_response_runs_without_a_client(self, site: Site) -> None:
        site.engine.script = Script(text=lambda prompt: "Paris.", hang_after=1)
        begun = await site.post(PATH, body("Capital of France?", background=True))
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        following = asyncio.ensure_future(follow(site, begun["id"]))
        async with site.http.get(f"{PATH}/{begun['id']}?stream=true") as stream:
            await stream.content.readuntil(b"response.output_text.delta")
        assert (await get(site, begun["id"]))["status"] == "in_progress"
        site.engine.resume.set()
        events = await following
        assert types_of(events)[:3] == ["created", "queued", "in_progress"]
        assert types_of(events)[-1] == "completed"
        assert text_of(events[-1]["response"]) == "Paris."
        assert await get(site, begun["id"]) == events[-1]["response"]
        assert await follow(site, begun["id"]) == events
        assert await follow(site, begun["id"], 3) == events[4:]
        path = f"{PATH}/{begun['id']}?stream=true&starting_after=100"
        assert await site.stream(path, None, "GET") == []

    async def test_a_client_may_leave_a_stream(self, site: Site) -> None:
        site.engine.script = Script(text=lambda prompt: "Paris.", hang_after=1)
        given = body("Capital of France?", background=True, stream=True)
        async with site.http.post(PATH, json=given) as stream:
            first = await stream.content.readuntil(b"\n\n")
        response_id = json.loads(first.split(b"data: ")[1])["response"]["id"]
        site.engine.resume.set()
        assert (await follow(site, response_id))[-1]["type"] == "response.completed"

    async def test_a_finished_response_can_be_continued(self, site: Site) -> None:
        site.engine.script = Script(text=lambda prompt: "Hi!", hang_after=0)
        begun = await site.post(PATH, body("Hello", background=True))
        status, answer = await site.send(PATH, body("More", previous_response_id=begun["id"]))
        assert (status, answer["error"]["param"]) == (400, "previous_response_id")
        site.engine.resume.set()
        await follow(site, begun["id"])
        await site.post(PATH, body("More", previous_response_id=begun["id"]))
        one, two = site.engine.requests
        assert two.fills[0].parent_context_id == one.context_id

    async def test_cancellation(self, site: Site) -> None:
        site.engine.script = Script(hang_after=1)
        begun = await site.post(PATH, body("Hello", background=True))
        following = asyncio.ensure_future(follow(site, begun["id"]))
        async with site.http.get(f"{PATH}/{begun['id']}?stream=true") as stream:
            await stream.content.readuntil(b"response.output_text.delta")
        for _ in range(2):
            cancelled = await site.post(f"{PATH}/{begun['id']}/cancel", None)
            assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        last = (await following)[-1]
        assert (last["type"], last["code"]) == ("error", "cancelled")
        assert await get(site, begun["id"]) == cancelled
        async with asyncio.timeout(5):
            await site.engine.all_aborted()
        status, answer = await site.send(PATH, body("More", previous_response_id=begun["id"]))
        assert (status, answer["error"]["param"]) == (400, "previous_response_id")

    async def test_deletion_cancels(self, site: Site) -> None:
        site.engine.script = Script(hang_after=0)
        begun = await site.post(PATH, body("Hello", background=True))
        assert (await ask(site, "DELETE", f"{PATH}/{begun['id']}"))[0] == 200
        assert (await ask(site, "GET", f"{PATH}/{begun['id']}"))[0] == 404
        async with asyncio.timeout(5):
            await site.engine.all_aborted()

    async def test_failure(self, site: Site) -> None:
        site.engine.script = Script(error=PromptTooLong("too long"))
        begun = await site.post(PATH, body("Hello", background=True))
        last = (await follow(site, begun["id"]))[-1]
        assert last["type"] == "response.failed"
        failed = await get(site, begun["id"])
        assert failed == last["response"]
        assert failed["error"] == {"code": "context_length_exceeded", "message": "too long"}
        assert (await site.post(f"{PATH}/{begun['id']}/cancel", None))["status"] == "failed"

    async def test_only_background_responses_can_be_cancelled_or_restreamed(
        self, site: Site
    ) -> None:
        response = await site.post(PATH, body("Hello"))
        for method, path in (("POST", "/cancel"), ("GET", "?stream=true")):
            status, answer = await ask(site, method, f"{PATH}/{response['id']}{path}")
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    async def test_work_ends_with_the_core(self, site: Site) -> None:
        site.engine.script = Script(hang_after=0)
        begun = await site.post(PATH, body("Hello", background=True))
        async with site.http.get(f"{PATH}/{begun['id']}?stream=true") as stream:
            await stream.content.readuntil(b"response.queued")
            site.core.shut_down()
            assert '"type":"response.failed"' in await stream.text()


class TestWithKeys:
    @pytest.fixture
    def core_config(self) -> CoreConfig:
        return CoreConfig(api_keys=("one", "two"))

    async def test_another_tenants_response_is_not_there(self, site: Site) -> None:
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        site.engine.script = says("Hi!")
        first = await site.post(PATH, body("Hello"), headers=one)
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        for given in (body("More", previous_response_id=first["id"]), body([item])):
            assert (await site.send(PATH, given, headers=two))[0] == 404
            assert (await site.send(PATH, given, headers=one))[0] == 200
        for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            path = f"{PATH}/{first['id']}{path}"
            assert (await ask(site, method, path, headers=two))[0] == 404
            assert (await ask(site, method, path))[0] == 401
            assert (await ask(site, method, path, headers=one))[0] == 200


class TestTools:
    """A model whose chat template shows tools, and whose answers call them between tags."""

    TOOL: ClassVar = {"type": "function", "name": "look", "parameters": {}, "strict": False}
    CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'

    @pytest.fixture
    async def site(self, core_config: CoreConfig) -> AsyncIterator[Site]:
        engine = fake_engine("e0", model=MODEL, chat_template=HERMES)
        engine.script = says(f"I look.\n{self.CALL}\n{self.CALL}")
        async with serve(core_config, engine) as site:
            yield site

    @pytest.mark.parametrize("is_resent", [True, False])
    async def test_calls_and_their_results(self, site: Site, is_resent: bool) -> None:
        asked = message("user", "Weather?")
        first = await site.post(PATH, body([asked], tools=[self.TOOL]))
        said, *calls = first["output"]
        assert said["content"][0]["text"] == "I look."
        assert [call["type"] for call in calls] == ["function_call"] * 2
        assert (calls[0]["name"], calls[0]["arguments"]) == ("look", '{"at":"sky"}')
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
            for call in calls
        ]
        if is_resent:
            given = body([asked, *first["output"], *results], tools=[self.TOOL])
        else:
            given = body(results, tools=[self.TOOL], previous_response_id=first["id"])
        second = await site.post(PATH, given)
        one, two = site.engine.requests
        assert two.fills[0].parent_context_id == one.context_id
        result = "<tool_response>\nblue\n</tool_response>"
        assert site.engine.prompts[1].endswith(
            f"{self.CALL}<|im_end|>\n<|im_start|>user\n{result}<|im_end|>\n"
            f"<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n"
        )
        page = await get(site, f"{second['id']}/input_items?order=asc")
        assert [item["type"] for item in page["data"]] == (
            ["message"] * 2 + ["function_call"] * 2 + ["function_call_output"] * 2
        )

    async def test_streamed_calls(self, site: Site) -> None:
        events = await events_of(site, "Weather?", tools=[self.TOOL])
        called = ["output_item.added", "function_call_arguments.delta"]
        called += ["function_call_arguments.done", "output_item.done"]
        assert types_of(events)[-11:] == [
            "content_part.done",
            "output_item.done",
            *called,
            *called,
            "completed",
        ]
        added = [event for event in events if event["type"].endswith("item.added")]
        done = [event for event in events if event["type"].endswith("item.done")]
        assert [e["output_index"] for e in added] == [e["output_index"] for e in done] == [0, 1, 2]
        assert added[1]["item"]["arguments"] == ""
        assert done[1]["item"]["arguments"] == '{"at":"sky"}'
        assert [e["item"] for e in done] == events[-1]["response"]["output"]

    async def test_only_one_call_without_parallel_calls(self, site: Site) -> None:
        fields = {"tools": [self.TOOL], "parallel_tool_calls": False}
        response = await site.post(PATH, body("Weather?", **fields))
        assert [item["type"] for item in response["output"]] == ["message", "function_call"]
        assert response["tools"] == [self.TOOL]

    async def test_required_and_strict_calls_are_constrained(self, site: Site) -> None:
        many = '"<tool_call>" body ("\\n" "<tool_call>" body)*'
        named = {"type": "function", "name": "look"}
        for fields, rule in (
            ({"tools": [self.TOOL | {"strict": True}]}, "(head body)* TEXT"),
            ({"tools": [self.TOOL], "tool_choice": "required"}, many),
            ({"tools": [self.TOOL], "tool_choice": named}, '"<tool_call>" body'),
        ):
            await site.post(PATH, body("Weather?", **fields))
            grammar = site.engine.requests[-1].sampling_config.grammar
            assert grammar is not None
            assert grammar.splitlines()[0] == f"start: {rule}"

    async def test_unsupported_constraints(self, site: Site) -> None:
        for choice in ({"type": "function"}, {"type": "function", "name": "see"}, "sometimes"):
            fields = {"tools": [self.TOOL], "tool_choice": choice}
            status, answer = await site.send(PATH, body("Weather?", **fields))
            assert (status, answer["error"]["param"]) == (400, "tool_choice")

    async def test_functions_of_a_namespace_are_called_with_its_name(self, site: Site) -> None:
        site.engine.script = says(self.CALL)
        tool = {"type": "namespace", "name": "eyes", "description": "Sight", "tools": [self.TOOL]}
        response = await site.post(PATH, body("Weather?", tools=[tool]))
        assert '{"type": "function", "function": {"name": "look"' in site.engine.prompts[0]
        (call,) = response["output"]
        assert (call["name"], call["namespace"]) == ("look", "eyes")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
        site.engine.script = says("Blue.")
        again = await site.post(
            PATH, body([message("user", "Weather?"), call, result], tools=[tool])
        )
        assert text_of(again) == "Blue."
        status, answer = await site.send(PATH, body("Weather?", tools=[tool, self.TOOL]))
        assert (status, answer["error"]["param"]) == (400, "tools")

    async def test_tools_are_not_shown_to_a_model_that_must_not_call_them(self, site: Site) -> None:
        response = await site.post(PATH, body("Hi", tools=[self.TOOL], tool_choice="none"))
        assert [item["type"] for item in response["output"]] == ["message"]


class TestWithOneSession:
    @pytest.fixture
    def core_config(self) -> CoreConfig:
        return CoreConfig(max_sessions_num=1)

    async def test_a_response_survives_its_session(self, site: Site) -> None:
        site.engine.script = says("Hi!")
        first = await site.post(PATH, body("Hello"))
        await site.post(PATH, body("Other"))
        await site.post(PATH, body("More", previous_response_id=first["id"]))
        prompt = f"{USER}Hello{ASSISTANT}Hi!<|im_end|>\n{USER}More{ASSISTANT}"
        assert site.engine.prompts[-1] == prompt
        assert len({request.session_id for request in site.engine.requests}) == 3


class TestWithLittleRoom:
    @pytest.fixture
    def core_config(self) -> CoreConfig:
        return CoreConfig(responses_size=20_000)

    async def test_the_oldest_responses_are_evicted(self, site: Site) -> None:
        ids = [(await site.post(PATH, body(str(i))))["id"] for i in range(6)]
        statuses = [(await ask(site, "GET", f"{PATH}/{one}"))[0] for one in ids]
        assert statuses == sorted(statuses, reverse=True)
        assert set(statuses) == {200, 404}

    async def test_a_response_is_evicted_after_its_continuations(self, site: Site) -> None:
        site.engine.script = says("Hi!")
        first = await site.post(PATH, body("Hello"))
        second = await site.post(PATH, body("More", previous_response_id=first["id"]))
        third = await site.post(PATH, body("And more", previous_response_id=second["id"]))
        assert third["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert site.engine.requests[0].fills[0].parent_context_id == NO_PARENT
        for one in (first, second, third):
            assert (await ask(site, "GET", f"{PATH}/{one['id']}"))[0] == 200
