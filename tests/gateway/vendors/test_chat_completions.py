"""OpenAI's chat completions."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer

from parrot.protocol import answers
from parrot.protocol.engine_api import NO_PARENT, EngineType, FinishReason
from parrot.protocol.errors import EngineFailed, PromptTooLong
from parrot.serve.config import CoreConfig
from tests.gateway.test_transcript import HERMES
from tests.gateway.vendors.conftest import MODEL, Site, payloads, serve
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.fake_engine import Script, fake_engine

PATH = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages)} | fields


async def test_an_answer(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Paris.")
    system = {"role": "developer", "content": "Be brief."}
    answer = await site.post(PATH, body(system, user("Capital of France?")))
    prompt = f"<|im_start|>system\nBe brief.<|im_end|>\n{USER}Capital of France?{ASSISTANT}"
    assert site.engine.prompts == [prompt]
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len("Paris.") + 1


async def test_a_stream_ends_with_its_reason_its_usage_and_done(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Paris.", finish_reason=FinishReason.LENGTH)
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = payloads(await site.stream(PATH, body(user("Hi"), **fields)))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *spoken, last = chunks
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] > 0
    deltas = [chunk["choices"][0]["delta"] for chunk in spoken]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Paris."
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in spoken]
    assert reasons == [None] * (len(spoken) - 1) + ["length"]


async def test_parts_of_text_are_one_message(site: Site) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await site.post(PATH, body(user(parts)))
    assert site.engine.prompts == [f"{USER}ab{ASSISTANT}"]


async def test_a_resent_history_continues_the_turn_that_it_ends_with(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Hi!")
    messages = [user("Hello")]
    for _ in range(3):
        answer = await site.post(PATH, body(*messages))
        messages += [answer["choices"][0]["message"], user("More")]
    first, second, third = site.engine.requests
    assert second.fills[0].parent_context_id == first.context_id
    assert third.fills[0].parent_context_id == second.context_id
    assert {first.session_id} == {second.session_id, third.session_id}
    once = f"{USER}Hello{ASSISTANT}Hi!"
    more = f"<|im_end|>\n{USER}More{ASSISTANT}"
    assert site.engine.prompts[2] == f"{once}{more}Hi!{more}"


async def test_a_changed_history_shares_its_unchanged_prefix(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "Hi!")
    await site.post(PATH, body(user("Hello")))
    said = {"role": "assistant", "content": "Something else"}
    await site.post(PATH, body(user("Hello"), said, user("More")))
    assert site.engine.prompts[1] == (
        f"{USER}Hello{ASSISTANT}Something else<|im_end|>\n{USER}More{ASSISTANT}"
    )
    again = await site.post(PATH, body(user("Hello"), said, user("Less")))
    shared = f"{USER}Hello{ASSISTANT}Something else<|im_end|>\n{USER}"
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(shared.replace("<|im_end|>", "x").replace("<|im_start|>", "x"))


@pytest.mark.parametrize(
    "content", ["as it is", [{"type": "text", "text": "as "}, {"type": "text", "text": "it is"}]]
)
async def test_a_prediction_goes_to_the_engine(content: Any) -> None:
    engine = fake_engine("e0", model=MODEL)
    engine.info = engine.info.model_copy(update={"engine_type": EngineType.BUILTIN})
    async with serve(CoreConfig(), engine) as site:
        await site.post(PATH, body(user("Hi"), prediction={"type": "content", "content": content}))
    drafts = engine.requests[-1].drafts
    assert drafts is not None
    codec = Tokenizer.from_str(byte_tokenizer().tokenizer_json)
    assert [codec.decode(ids) for ids in drafts.texts] == ["as it is"]


async def test_programs_by_name_have_a_session_each(site: Site) -> None:
    await site.post(PATH, body(user("a"), prompt_cache_key="one"))
    await site.post(PATH, body(user("b"), prompt_cache_key="one"))
    await site.post(PATH, body(user("c"), metadata={"user_id": "two"}))
    await site.post(PATH, body(user("d")), headers={"x-session-affinity": "two"})
    sessions = [request.session_id for request in site.engine.requests]
    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]


async def test_choices_are_made_of_one_prompt(site: Site) -> None:
    texts = iter("AB")
    site.engine.script = Script(text=lambda prompt: next(texts))
    answer = await site.post(PATH, body(user("Hi"), n=2, temperature=1))
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"A", "B"}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 4
    site.engine.script = Script(text=lambda prompt: "C")
    chunks = payloads(await site.stream(PATH, body(user("Ho"), n=3, seed=1, stream=True)))
    ended = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]
    seeds = [request.sampling_config.seed for request in site.engine.requests[-3:]]
    assert seeds == [1, 2, 3]


async def test_fields_of_sampling(site: Site) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7, "stop": ["x"]}
    more = {"logit_bias": {"5": -3}, "seed": 3, "top_k": 4, "presence_penalty": 1}
    await site.post(PATH, body(user("Hi"), **fields, **more))
    sampling = site.engine.requests[0].sampling_config
    assert (sampling.temperature, sampling.top_p, sampling.max_gen_length) == (0.5, 0.9, 7)
    assert (sampling.stop_strings, sampling.logit_bias, sampling.seed) == (("x",), {5: -3}, 3)
    assert (sampling.top_k, sampling.presence_penalty) == (4, 1)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"json": {"type": "array"}}}, "json_schema", {"type": "array"}),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choices", ("a", "b")),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choices", ("a",)),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
    ],
)
async def test_all_field_names_of_constraints(
    site: Site, fields: dict[str, Any], name: str, value: Any
) -> None:
    await site.post(PATH, body(user("Hi")) | fields)
    sampling = site.engine.requests[0].sampling_config
    assert sampling.constraint == name
    assert getattr(sampling, name) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"n": 17}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "messages.0.content.0"),
    ],
)
async def test_bad_fields_are_named(site: Site, fields: dict[str, Any], param: str) -> None:
    status, answer = await site.send(PATH, body(user("Hi")) | fields)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param


async def test_an_unknown_model_and_a_body_that_is_no_json(site: Site) -> None:
    status, answer = await site.send(PATH, body(user("Hi"), model="none"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    async with site.http.post(PATH, data=b"{", headers=JSON) as response:
        assert response.status == 400
        assert response.headers["x-request-id"]


async def test_an_engine_that_fails_fails_the_request(site: Site) -> None:
    site.engine.script = Script(error=EngineFailed("broken"))
    status, answer = await site.send(PATH, body(user("Hi")))
    assert (status, answer["error"]["type"]) == (502, "server_error")
    site.engine.script = Script(error=PromptTooLong("too long"))
    status, answer = await site.send(PATH, body(user("Ho"), stream=True))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_late_error_is_the_last_event_of_the_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_REFUSAL_S", 0.0)
    site.engine.script = Script(error=EngineFailed("broken"))
    ((name, data),) = await site.stream(PATH, body(user("Hi"), stream=True))
    assert name == "error"
    assert json.loads(data)["error"] == {
        "message": "broken",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }


async def test_query_parameters_are_ignored(site: Site) -> None:
    await site.post(f"{PATH}?beta=true", body(user("Hi")))


async def test_a_client_that_disconnects_stops_the_work(site: Site) -> None:
    site.engine.script = Script(hang_after=0)
    for stream in (False, True):
        await site.engine.cancel_after_requests(
            site.send(PATH, body(user("Hi"), stream=stream, n=2, seed=1)), num_requests=2
        )
    async with asyncio.timeout(5):
        await site.engine.all_aborted()
    assert len(site.engine.requests) == 4


class TestWithKeys:
    @pytest.fixture
    def core_config(self) -> CoreConfig:
        return CoreConfig(api_keys=("one", "two"), max_sessions_num=2)

    async def test_a_key_comes_in_either_header(self, site: Site) -> None:
        status, answer = await site.send(PATH, body(user("Hi")))
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for headers in ({"authorization": "Bearer one"}, {"x-api-key": "one"}):
            await site.post(PATH, body(user("Hi")), headers=headers)

    async def test_another_tenants_history_is_not_continued(self, site: Site) -> None:
        site.engine.script = Script(text=lambda prompt: "Hi!")
        said = [user("Hello"), {"role": "assistant", "content": "Hi!"}, user("More")]
        await site.post(PATH, body(said[0]), headers={"x-api-key": "one"})
        await site.post(PATH, body(*said), headers={"x-api-key": "two"})
        first, second = site.engine.requests
        assert second.fills[0].parent_context_id == NO_PARENT
        assert first.cache_salt != second.cache_salt

    async def test_idle_programs_are_evicted(self, site: Site) -> None:
        for i in range(5):
            await site.post(PATH, body(user(str(i))), headers={"x-api-key": "one"})
        assert len({request.session_id for request in site.engine.requests}) == 5
        for _ in range(2):
            await site.post("/v1/session", {"api_key": "two"})
        status, answer = await site.send("/v1/session", {"api_key": "two"})
        assert (status, answer["error"]["type"]) == (429, "quota_exceeded")


class TestTools:
    """A model whose chat template shows tools, and whose answers call them between tags."""

    TOOL: ClassVar = {"type": "function", "function": {"name": "look", "parameters": {}}}
    STRICT: ClassVar = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'

    @pytest.fixture
    async def site(self, core_config: CoreConfig) -> AsyncIterator[Site]:
        engine = fake_engine("e0", model=MODEL, chat_template=HERMES)
        engine.script = Script(text=lambda prompt: f"I look.\n{self.CALL}")
        async with serve(core_config, engine) as site:
            yield site

    async def test_a_call_and_its_result(self, site: Site) -> None:
        messages = [user("Weather?")]
        answer = await site.post(PATH, body(*messages, tools=[self.TOOL]))
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "I look."
        assert call["function"] == {"name": "look", "arguments": '{"at":"sky"}'}
        assert choice["finish_reason"] == "tool_calls"
        result = {"role": "tool", "content": "blue", "tool_call_id": call["id"]}
        await site.post(PATH, body(*messages, choice["message"], result, tools=[self.TOOL]))
        first, second = site.engine.requests
        assert second.fills[0].parent_context_id == first.context_id
        assert site.engine.prompts[1].endswith(
            f"I look.\n{self.CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nblue\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )

    async def test_a_streamed_call(self, site: Site) -> None:
        chunks = payloads(
            await site.stream(PATH, body(user("Weather?"), tools=[self.TOOL], stream=True))
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
        ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert (call["index"], call["function"]["name"]) == (0, "look")
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    async def test_tools_are_not_shown_to_a_model_that_must_not_call_them(self, site: Site) -> None:
        fields = {"tools": [self.TOOL], "tool_choice": "none"}
        answer = await site.post(PATH, body(user("Weather?"), **fields))
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert "look" not in site.engine.prompts[0]

    @pytest.mark.parametrize(
        ("fields", "rule"),
        [
            ({"tool_choice": "required"}, 'start: "<tool_call>" body ("\\n" "<tool_call>" body)*'),
            (
                {"tool_choice": "required", "parallel_tool_calls": False},
                'start: "<tool_call>" body',
            ),
            (
                {"tool_choice": {"type": "function", "function": {"name": "look"}}},
                'start: "<tool_call>" body',
            ),
            ({"tools": [STRICT]}, "start: (head body)* TEXT"),
            (
                {"response_format": {"type": "json_object"}},
                'start: "<tool_call>" body ("\\n" "<tool_call>" body)* | json',
            ),
        ],
    )
    async def test_required_and_strict_calls_are_constrained(
        self, site: Site, fields: dict[str, Any], rule: str
    ) -> None:
        await site.post(PATH, body(user("Hi")) | {"tools": [self.TOOL]} | fields)
        sampling = site.engine.requests[0].sampling_config
        assert sampling.constraint == "grammar"
        assert sampling.grammar is not None
        assert sampling.grammar.splitlines()[0] == rule
        assert "strict" not in site.engine.prompts[0]

    async def test_optional_calls_are_not_constrained(self, site: Site) -> None:
        await site.post(PATH, body(user("Hi"), tools=[self.TOOL], tool_choice="auto"))
        assert site.engine.requests[0].sampling_config.constraint is None

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tool_choice": {"type": "function", "function": {"name": "see"}}}, "tool_choice"),
            ({"tool_choice": "sometimes"}, "tool_choice"),
            ({"tool_choice": "required", "tools": []}, "tool_choice"),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"tools": [{"type": "function", "function": {}}]}, "tools.0"),
        ],
    )
    async def test_what_is_not_supported(
        self, site: Site, fields: dict[str, Any], param: str
    ) -> None:
        status, answer = await site.send(PATH, body(user("Hi")) | {"tools": [self.TOOL]} | fields)
        assert (status, answer["error"]["param"]) == (400, param)


class TestPrefix:
    """A header reports whether a program's prompts share a prefix with the earlier ones."""

    async def reported(self, site: Site, asked: dict[str, Any]) -> str:
        async with site.http.post(PATH, json=asked) as response:
            assert response.status == 200
            self.answer = (await response.json())["choices"][0]["message"]
            return response.headers["x-parrot-prefix"]

    def system(self, text: str) -> dict[str, Any]:
        return {"role": "system", "content": text}

    async def test_a_program_that_changes_its_system_prompt(self, site: Site) -> None:
        site.engine.script = Script(text=lambda prompt: "A long answer to be recognised by.")
        first = [self.system("It is 10:00."), user("Hi")]
        assert await self.reported(site, body(*first)) == "new"
        more = [self.answer, user("More")]
        reported = await self.reported(site, body(*first, *more))
        reused, whole = len(site.engine.prompts[0] + self.answer["content"]), site.engine.prompts[1]
        assert reported == f"continued; reused={reused}; of={len(whole)}"
        changed = [self.system("It is 10:01."), user("Hi"), *more, self.answer, user("Again")]
        reported = await self.reported(site, body(*changed))
        assert reported.startswith("broken; reason=date; message=0; at=")
        sessions = {request.session_id for request in site.engine.requests}
        assert len(sessions) == 1  # still the same program
        async with site.http.get("/metrics") as response:
            assert 'parrot_prefix_breaks_total{reason="date"} 1.0' in await response.text()

    async def test_a_long_conversation(self, site: Site) -> None:
        """A long conversation is rendered in a thread, and continues its last turn. Two can be
        rendered at the same time."""
        rounds = [[user(f"{i}"), {"role": "assistant", "content": "Yes."}] for i in range(60)]
        first = [message for pair in rounds for message in pair] + [user("Hi")]
        others = [user("Other"), *first[1:]]
        assert await self.reported(site, body(*first)) == "new"
        more = [self.answer, user("More")]
        reused = len(site.engine.prompts[0] + self.answer["content"])
        reported = await asyncio.gather(
            self.reported(site, body(*first, *more)), self.reported(site, body(*others))
        )
        assert {prompt.count("Yes.") for prompt in site.engine.prompts} == {60}
        assert reported[1] == "new"
        assert reported[0].startswith(f"continued; reused={reused}; of=")

    async def test_a_program_that_is_named(self, site: Site) -> None:
        for text, expected in (("Hi", "new"), ("Ho", "broken; reason=history_changed; message=0")):
            reported = await self.reported(site, body(user(text), prompt_cache_key="p"))
            assert reported.startswith(expected)

    @pytest.mark.parametrize(
        ("num_kept", "reported"),
        [(990, "continued; reused="), (800, "broken; reason=history_changed")],
    )
    async def test_a_small_difference_is_not_reported(
        self, site: Site, num_kept: int, reported: str
    ) -> None:
        """A break is reported if the prompts share less than 90% of the earlier prompt."""
        for text in ("x" * 1000, "x" * num_kept + "y" * 60):
            found = await self.reported(site, body(user(text), prompt_cache_key="p"))
        assert found.startswith(reported)
        if num_kept == 990:
            at = site.engine.prompts[1].index("xy") + 1
            assert found == f"continued; reused={at}; of={len(site.engine.prompts[1])}"

    async def test_the_varying_part_of_the_prompt_is_kept(self, site: Site) -> None:
        await site.post(PATH, body(self.system("x-anthropic-billing-header: a\nB"), user("Hi")))
        assert "billing" in site.engine.prompts[0]
