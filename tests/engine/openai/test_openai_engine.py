"""The openai engine against a scripted server, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import stamina

from parrot.cluster.ports import free_port
from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.logprobs import AnswerLogprobs, ChoiceLogprobs
from parrot.engine.openai.service import OpenAIService
from parrot.engine.service import ServiceState
from parrot.protocol.engine_api import (
    FillPiece,
    FillRequest,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
)
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    Unavailable,
    UnsupportedField,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.config import ConfigError
from tests.support import fake_openai
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI, Fault

KEY = "sk-very-secret"
Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=3):
        yield


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
async def start(fake: FakeOpenAI) -> AsyncIterator[Start]:
    """Start a service for the fake server. Keywords are keys of `instance`."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_app(fake.app()))

        async def start_service(top: dict[str, Any] | None = None, **keys: Any) -> OpenAIService:
            instance = {"api_key": KEY, "base_url": url + "/v1", **keys}
            if keys.get("is_azure"):
                instance["azure_endpoint"] = url + "/"
            config = {"model": "gpt-fake", "instance": instance, **(top or {})}
            service = OpenAIService(OpenAIConfig.model_validate(config), environ={})
            stack.push_async_callback(close_checked, service)
            await service.start()
            return service

        yield start_service


async def close_checked(service: OpenAIService) -> None:
    """Close the service and check that no job or context is left."""
    service.check_integrity()
    await service.reset()
    service.check_integrity()
    info = service.runtime_info()
    assert (info.num_total_jobs, info.num_running_jobs, info.num_cached_tokens) == (0, 0, 0)
    await service.close()
    await service.close()


def ask(
    context_id: int,
    text: str | None = None,
    *,
    parent: int = -1,
    parent_len: int | None = None,
    priority: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    fill = FillPiece(
        context_id=context_id, parent_context_id=parent, parent_len=parent_len, text=text
    )
    return GenerateRequest(
        context_id=context_id,
        fills=[] if text is None else [fill],
        priority=priority,
        sampling_config=SamplingConfig(**sampling),
    )


async def collect(
    service: OpenAIService, request: GenerateRequest
) -> tuple[list[str], GenerateResponse]:
    texts: list[str] = []
    async for item in service.generate_stream(request):
        if isinstance(item, StreamChunk):
            texts.append(item.text)
        else:
            return texts, item
    raise AssertionError("no response")


# Requests and answers


async def test_a_completion_request_and_its_answer(start: Start, fake: FakeOpenAI) -> None:
    fake.cached_tokens = 1
    service = await start()
    response = await service.generate(ask(1, "say a number", temperature=0, stop_str="X"))
    assert response.generated_text == "one two three"
    assert response.generated_ids == []
    assert response.finish_reason is FinishReason.STOP
    usage = response.usage
    assert (usage.cached_tokens, usage.computed_tokens, usage.output_tokens) == (1, 2, 3)
    assert usage.decode_s > 0.0
    assert fake.bodies == [
        {
            "model": "gpt-fake",
            "prompt": "say a number",
            "temperature": 0.0,
            "max_tokens": 512,
            "stop": ["X"],
        }
    ]
    assert fake.headers[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
async def test_streaming_gives_every_word_and_then_the_whole_answer(
    start: Start, fake: FakeOpenAI, endpoint: str
) -> None:
    service = await start(api_endpoint=endpoint)
    texts, response = await collect(service, ask(1, "say a number", max_gen_length=2))
    assert texts == ["one ", "two "]
    assert response.generated_text == "one two "
    assert response.finish_reason is FinishReason.LENGTH
    assert response.usage.output_tokens == 2
    assert response.usage.computed_tokens == 3
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}


async def test_chat_sends_the_context_as_one_user_message(start: Start, fake: FakeOpenAI) -> None:
    service = await start(api_endpoint="chat")
    response = await service.generate(ask(1, "hi", json_schema='{"type": "object"}', seed=3))
    assert response.generated_text == "one two three"
    body = fake.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["seed"] == 3


async def test_the_format_of_a_schema_for_llama_cpp_python(start: Start, fake: FakeOpenAI) -> None:
    fake.owned_by = "me"
    service = await start(api_endpoint="chat")
    await service.generate(ask(1, "hi", json_schema={"type": "array"}))
    wanted = {"type": "json_object", "schema": {"type": "array"}}
    assert fake.bodies[0]["response_format"] == wanted


async def test_azure_has_its_own_url_and_key(start: Start, fake: FakeOpenAI) -> None:
    service = await start(is_azure=True, azure_api_version="2024-10-21", api_endpoint="chat")
    await collect(service, ask(1, "hi"))
    assert "/openai/deployments/gpt-fake/chat/completions?api-version=2024-10-21" in fake.urls[0]
    assert fake.headers[0]["api-key"] == KEY
    assert "authorization" not in fake.headers[0]
    assert fake.bodies[0]["max_completion_tokens"] == 512


async def test_old_azure_gets_only_the_fields_it_knows(start: Start, fake: FakeOpenAI) -> None:
    service = await start(is_azure=True, api_endpoint="chat")
    texts, response = await collect(service, ask(1, "hi"))
    assert "".join(texts) == response.generated_text
    assert fake.bodies[0]["max_tokens"] == 512
    assert "stream_options" not in fake.bodies[0]


# Contexts


async def test_contexts_grow_fork_and_keep_generated_text(start: Start, fake: FakeOpenAI) -> None:
    service = await start()
    filled = await service.fill(FillRequest(context_id=1, text="abcdef"))
    assert filled.filled_len == 6
    await service.generate(ask(1))
    await service.generate(ask(2, "!", parent=1, parent_len=3))
    await service.generate(ask(3, "?", parent=1))
    prompts = [body["prompt"] for body in fake.bodies]
    assert prompts == ["abcdef", "abc!", "abcdefone two three?"]
    assert await service.free_contexts([1, 99]) == len("abcdefone two three")
    await service.generate(ask(4, "", parent=3, parent_len=8))
    assert fake.bodies[-1]["prompt"] == "abcdefon", "forks keep the text of a freed parent"


async def test_a_request_with_several_contexts_is_sent_as_one_prompt(
    start: Start, fake: FakeOpenAI
) -> None:
    service = await start()
    request = GenerateRequest(
        context_id=2,
        fills=[
            FillPiece(context_id=1, text="system. "),
            FillPiece(context_id=2, parent_context_id=1, parent_len=8, text="question "),
            FillPiece(context_id=1, text="more of 1"),
            FillPiece(context_id=3, parent_context_id=1, text=""),
            FillPiece(context_id=2, text="end"),
        ],
    )
    await service.generate(request)
    await service.generate(ask(3))
    assert [b["prompt"] for b in fake.bodies] == ["system. question end", "system. more of 1"]


async def test_jobs_of_one_context_keep_their_order(start: Start, fake: FakeOpenAI) -> None:
    fake.hold = asyncio.Event()
    service = await start()
    first = asyncio.ensure_future(service.generate(ask(1, "a")))
    await fake.wait_for_requests()
    later = [
        asyncio.ensure_future(service.fill(FillRequest(context_id=1, text="+b"))),
        asyncio.ensure_future(service.generate(ask(1))),
        asyncio.ensure_future(service.generate(ask(2, "!", parent=1))),
        asyncio.ensure_future(service.generate(ask(3, "?", parent=1, parent_len=4))),
    ]
    at_once = asyncio.ensure_future(service.generate(ask(4, "#", parent=1, parent_len=1)))
    await fake.wait_for_requests()
    assert [body["prompt"] for body in fake.bodies] == ["a", "a#"]
    service.check_integrity()
    fake.hold.set()
    await asyncio.gather(first, at_once, *later)
    text = "aone two three+b"
    assert {b["prompt"] for b in fake.bodies[2:]} == {
        text,
        text + "one two three!",
        text[:4] + "?",
    }


async def test_a_waiting_fork_has_the_prefix_of_its_parent_at_its_arrival(
    start: Start, fake: FakeOpenAI
) -> None:
    fake.hold = asyncio.Event()
    service = await start()
    parent = service.generate_stream(ask(1, "a"))
    assert await anext(parent) == StreamChunk(ids=[], text="one ")
    other = asyncio.ensure_future(service.generate(ask(9, "b")))
    await fake.wait_for_requests(2)
    fork = GenerateRequest(
        context_id=2,
        fills=[
            FillPiece(context_id=9, text="waits for the other"),
            FillPiece(context_id=2, parent_context_id=1, text="!"),
        ],
    )
    late = asyncio.ensure_future(service.generate(fork))
    more = asyncio.ensure_future(service.fill(FillRequest(context_id=1, text="+c")))
    await asyncio.sleep(0)
    await parent.aclose()  # type: ignore[attr-defined]
    await more
    fake.hold.set()
    await asyncio.gather(other, late)
    assert fake.bodies[-1]["prompt"] == "aone !"


async def test_invalid_requests_are_refused_and_leave_no_context(start: Start) -> None:
    service = await start()
    with pytest.raises(InvalidRequest, match="contexts are text"):
        await service.fill(FillRequest(context_id=1, token_ids=[1]))
    with pytest.raises(NotFound, match="no context 7"):
        await service.generate(ask(1, "a", parent=7))
    await service.fill(FillRequest(context_id=1, text="abc"))
    with pytest.raises(NotFound, match="3 characters, not 9"):
        await service.fill(FillRequest(context_id=2, parent_context_id=1, parent_len=9, text="d"))
    orphan = {"context_id": 4, "fills": [{"context_id": 4, "text": "d"}]}
    with pytest.raises(InvalidRequest, match="context 4") as refused:
        await service.generate(GenerateRequest.model_validate({**orphan, "parent_context_id": 1}))
    assert refused.value.param == "parent_context_id"
    with pytest.raises(UnsupportedField) as caught:
        await service.generate(ask(3, "a", n=2))
    assert caught.value.param == "n"
    assert await service.free_contexts([1, 2, 3]) == 3


async def test_text_beyond_the_capacity_is_refused(start: Start) -> None:
    service = await start({"tokens_capacity": 10})
    await service.fill(FillRequest(context_id=1, text="a" * 8))
    with pytest.raises(OutOfMemory):
        await service.fill(FillRequest(context_id=2, text="bbb"))
    await service.free_contexts([1])
    await service.fill(FillRequest(context_id=2, text="bbb"))
    assert service.runtime_info().num_free_blocks == 7


# Sampling fields


async def test_a_standard_server_gets_no_extras(start: Start) -> None:
    service = await start()
    extras: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_tokenizer_eos": True,
        "stop_token_ids": (7,),
        "json_schema": {},
        "regex": "a",
        "grammar": 'start: "a"',
        "choices": ("a",),
        "length_penalty": 0.5,
        "best_of": 2,
    }
    for name, value in extras.items():
        with pytest.raises(UnsupportedField, match=f"`{name}`") as caught:
            await service.generate(ask(1, "a", **{name: value}))
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("owner", "fields", "sent"),
    [
        ("vllm", {"grammar": 's: "a"'}, {"structured_outputs": {"grammar": 's: "a"'}}),
        ("vllm", {"choices": ("a", "b")}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ("sglang", {"choices": ("a.", "b")}, {"regex": r"a\.|b"}),
    ],
)
async def test_grammars_and_choices_have_the_names_of_each_server(
    start: Start, fake: FakeOpenAI, owner: str, fields: dict[str, Any], sent: dict[str, Any]
) -> None:
    fake.owned_by = owner
    service = await start()
    await service.generate(ask(1, "a", **fields))
    assert fake.bodies[0].items() >= sent.items()


async def test_tenants_share_nothing_in_a_server_that_knows_salts(
    start: Start, fake: FakeOpenAI
) -> None:
    """A salt may be longer than vLLM accepts and contain other characters."""
    fake.owned_by = "vllm"
    service = await start()
    salts = ["a/b" * 300, "\ud800", "a/b" * 300, ""]
    for context_id, salt in enumerate(salts):
        await service.generate(ask(context_id, "a").model_copy(update={"cache_salt": salt}))
    first, second, third, none = [body.get("cache_salt") for body in fake.bodies]
    assert first == third != second
    assert (len(first), first.isalnum(), none) == (64, True, None)


async def test_a_vllm_server_gets_what_the_request_sets(start: Start, fake: FakeOpenAI) -> None:
    fake.owned_by, fake.max_model_len = "vllm", 777
    service = await start()
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.0}
    await service.generate(ask(1, "a", **off))
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert fake.bodies[0].items() >= (off | neutral).items()
    await service.generate(ask(2, "a"))
    assert fake.bodies[1].keys() == {"model", "prompt", "max_tokens"}
    await service.generate(
        ask(
            1,
            top_k=5,
            ignore_tokenizer_eos=True,
            regex="a+",
            logit_bias={5: -100.0},
            presence_penalty=0.5,
            frequency_penalty=0.25,
            top_p=0.5,
        )
    )
    sent = {
        "top_k": 5,
        "ignore_eos": True,
        "structured_outputs": {"regex": "a+"},
        "logit_bias": {"5": -100.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "top_p": 0.5,
    }
    assert fake.bodies[2].items() >= sent.items()
    info = service.engine_info()
    assert info.default_sampling is None
    assert info.max_seq_len == 777
    assert info.capabilities.server == "vllm"
    assert info.tokenizer_id is None
    assert service.tokenizer() is None


async def test_an_invalid_schema_is_an_invalid_request(start: Start) -> None:
    service = await start(api_endpoint="chat")
    with pytest.raises(InvalidRequest, match="not JSON"):
        await service.generate(ask(1, "a", json_schema="{"))


# Errors


def error(status: int, **body: Any) -> Fault:
    return Fault(status, {"error": {"message": f"told {KEY} off", **body}})


FAULTS: list[tuple[Fault, type[ParrotError], int]] = [
    (error(401), EngineFailed, 1),
    (error(403), EngineFailed, 1),
    (error(404), EngineFailed, 1),
    (error(400), InvalidRequest, 1),
    (error(400, code={"number": 1}, type=["a"]), InvalidRequest, 1),
    (error(400, code="context_length_exceeded"), PromptTooLong, 1),
    (error(400, type="exceed_context_size_error"), PromptTooLong, 1),
    (Fault(400, {"error": {"message": "maximum context length is 8"}}), PromptTooLong, 1),
    (Fault(400, {"detail": "x", "message": "maximum context length"}), PromptTooLong, 1),
    (error(429), QuotaExceeded, 3),
    (error(429, code="insufficient_quota"), EngineFailed, 1),
    (Fault(429, None, {"retry-after": "3600"}), QuotaExceeded, 1),
    (Fault(429, None, {"retry-after": "Wed, 21 Oct 2037 07:28:00 GMT"}), QuotaExceeded, 1),
    (Fault(503, None, {"retry-after-ms": "5"}), QuotaExceeded, 3),
    (Fault(503, None, {"retry-after": "soon"}), QuotaExceeded, 3),
    (Fault(503, None, {"retry-after": "9" * 400}), QuotaExceeded, 1),
    (Fault(503, None, {"retry-after": f"Wed, 21 Oct {10**20} 07:28:00 GMT"}), QuotaExceeded, 3),
    (error(500), EngineFailed, 3),
    (Fault(500, None, {"x-should-retry": "false"}), EngineFailed, 1),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_server(start: Start, fake: FakeOpenAI, stream: bool) -> None:
    service = await start()
    for context_id, (fault, expected, tries) in enumerate(FAULTS):
        fake.faults, fake.bodies = [fault] * 5, []
        request = ask(context_id, "a")
        with pytest.raises(ParrotError) as caught:
            await (collect(service, request) if stream else service.generate(request))
        assert isinstance(caught.value, expected), fault
        assert KEY not in str(caught.value)
        assert len(fake.bodies) == tries, fault
        fake.faults = []
        assert (await service.generate(ask(context_id))).generated_text == "one two three"
        assert fake.bodies[-1]["prompt"] == "a", "a failed answer adds nothing to its context"


async def test_an_answer_of_another_shape_is_an_error(start: Start, fake: FakeOpenAI) -> None:
    service = await start()
    for body in (["nonsense"], {"choices": []}, {"choices": 3}, {}):
        fake.faults = [Fault(200, body)]
        with pytest.raises(EngineFailed):
            await service.generate(ask(1, "a"))


async def test_temporary_faults_are_retried(start: Start, fake: FakeOpenAI) -> None:
    service = await start()
    fake.faults = [error(500), Fault(429, None, {"retry-after": "0.001"})]
    assert (await service.generate(ask(1, "a"))).generated_text == "one two three"
    fake.faults = [error(503), error(500)]
    texts, _ = await collect(service, ask(2, "a"))
    assert "".join(texts) == "one two three"


BREAKS: list[tuple[Any, type[ParrotError]]] = [
    (None, Unavailable),
    ({"error": {"message": f"no {KEY}", "code": 500}}, EngineFailed),
    ({"error": {"message": "full", "code": 503}}, QuotaExceeded),
    ({"error": "text"}, EngineFailed),
    ({"choices": "what"}, EngineFailed),
]


async def test_a_broken_stream_is_an_error_and_keeps_the_received_text(
    start: Start, fake: FakeOpenAI
) -> None:
    service = await start()
    for context_id, (body, expected) in enumerate(BREAKS):
        fake.faults, fake.bodies = [Fault(200, body, after_chunks=2)], []
        stream = service.generate_stream(ask(context_id, "a"))
        assert await anext(stream) == StreamChunk(ids=[], text="one ")
        assert await anext(stream) == StreamChunk(ids=[], text="two ")
        with pytest.raises(ParrotError) as caught:
            await anext(stream)
        assert isinstance(caught.value, expected), body
        assert KEY not in str(caught.value)
        assert len(fake.bodies) == 1, "a stream that has sent text must not be retried"
        await service.generate(ask(context_id))
        assert fake.bodies[-1]["prompt"] == "aone two "


async def test_a_server_that_does_not_stream_sends_the_whole_answer(
    start: Start, fake: FakeOpenAI
) -> None:
    service = await start()
    choice = {"index": 0, "text": "one two", "finish_reason": "stop"}
    fake.faults = [Fault(200, {"choices": [choice]})]
    texts, response = await collect(service, ask(1, "a"))
    assert (texts, response.generated_text) == (["one two"], "one two")
    for body, expected in BREAKS[1:]:
        fake.faults = [Fault(200, body)]
        with pytest.raises(expected):
            await collect(service, ask(2, "a"))


async def test_a_stream_that_stops_before_its_text_has_ended_is_an_error(
    start: Start, fake: FakeOpenAI
) -> None:
    """llama-cpp-python's server ends a stream like this when another client sends a request."""
    service = await start()
    fake.faults = [Fault(200, after_chunks=2, is_tidy=True)]
    with pytest.raises(Unavailable, match="cut off"):
        await collect(service, ask(1, "a"))


@pytest.mark.parametrize("reason", ["content_filter", "abort", "error"])
async def test_an_answer_that_the_server_cut_off_is_an_error(
    start: Start, fake: FakeOpenAI, reason: str
) -> None:
    fake.finish_reason = reason
    service = await start()
    with pytest.raises(EngineFailed, match=reason):
        await service.generate(ask(1, "a"))
    with pytest.raises(EngineFailed, match=reason):
        await collect(service, ask(2, "a"))


async def test_requests_without_a_server_fail() -> None:
    config = OpenAIConfig.model_validate(
        {"model": "m", "instance": {"base_url": "http://127.0.0.1:9/v1"}}
    )
    service = OpenAIService(config, environ={})
    assert service.state() is not ServiceState.READY
    with pytest.raises(Unavailable, match="not running"):
        await service.generate(ask(1, "a"))
    await service.start()
    assert service.state() is ServiceState.READY
    with pytest.raises(Unavailable, match="no answer"):
        await service.generate(ask(1, "a"))
    with pytest.raises(UnsupportedField, match="top_k"):
        await service.generate(ask(1, "a", top_k=3))
    await close_checked(service)


async def test_a_server_that_starts_later_is_identified_at_the_first_request(
    fake: FakeOpenAI,
) -> None:
    """The kind of the server decides how a field is turned off against the server's defaults."""
    port = free_port("127.0.0.1", set())
    config = OpenAIConfig.model_validate(
        {"model": "gpt-fake", "instance": {"base_url": f"http://127.0.0.1:{port}/v1"}}
    )
    service = OpenAIService(config, environ={})
    await service.start()
    fake.owned_by = "vllm"
    async with serve_app(fake.app(), port):
        await service.generate(ask(1, "a", top_k=0))
    assert fake.bodies[0]["top_k"] == -1
    await close_checked(service)


def test_a_missing_key_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        OpenAIService(OpenAIConfig(model="gpt-4o"), environ={})
    azure = OpenAIConfig.model_validate(
        {"model": "m", "instance": {"is_azure": True, "azure_endpoint": "https://x.example"}}
    )
    with pytest.raises(ConfigError, match="api_key"):
        OpenAIService(azure, environ={})
    OpenAIService(azure, environ={"AZURE_OPENAI_API_KEY": "k"})
    OpenAIService(OpenAIConfig(model="gpt-4o"), environ={"OPENAI_API_KEY": "k"})


# Concurrency and cancellation


async def test_requests_are_bounded_and_served_by_priority(start: Start, fake: FakeOpenAI) -> None:
    fake.hold = asyncio.Event()
    service = await start({"scheduler": {"max_batch_size": 2}})
    priorities = [0, 0, 3, 1, 2, 1]
    tasks = [
        asyncio.ensure_future(service.generate(ask(i, f"p{i}", priority=priority)))
        for i, priority in enumerate(priorities)
    ]
    await fake.wait_for_requests(2)
    assert service.runtime_info().num_running_jobs == 2
    assert service.runtime_info().num_total_jobs == 6
    fake.hold.set()
    await asyncio.gather(*tasks)
    assert fake.max_open == 2
    order = [body["prompt"] for body in fake.bodies]
    assert order.index("p3") < order.index("p4") < order.index("p2")
    assert order.index("p5") < order.index("p2")
    assert service.runtime_info().num_steps == 6


async def test_a_server_for_one_request_gets_one_at_a_time_and_streams_it(
    start: Start, fake: FakeOpenAI
) -> None:
    """Its streams report no token counts, so each chunk counts as one token."""
    fake.owned_by, fake.counts_in_streams = "me", False
    fake.hold = asyncio.Event()
    service = await start()
    tasks = [asyncio.ensure_future(service.generate(ask(i, "a" * 10))) for i in range(3)]
    await fake.wait_for_requests()
    assert service.runtime_info().num_running_jobs == 1
    tasks[0].cancel()
    await asyncio.wait_for(fake.cancelled.wait(), 30)
    fake.hold.set()
    responses = await asyncio.gather(*tasks[1:])
    assert fake.max_open == 1
    assert all(body["stream"] for body in fake.bodies)
    assert {response.generated_text for response in responses} == {"one two three"}
    assert [(r.usage.computed_tokens, r.usage.output_tokens) for r in responses] == [(3, 3)] * 2


async def test_more_requests_than_the_backlog_are_refused(start: Start, fake: FakeOpenAI) -> None:
    fake.hold = asyncio.Event()
    service = await start({"scheduler": {"max_batch_size": 1}})
    tasks = [asyncio.ensure_future(service.generate(ask(i, "a"))) for i in range(1024)]
    await fake.wait_for_requests()
    with pytest.raises(QuotaExceeded):
        await service.generate(ask(5000, "a"))
    await service.reset()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, Cancelled) for outcome in outcomes)


@pytest.mark.parametrize("stream", [False, True])
async def test_freeing_a_context_aborts_its_request_at_once(
    start: Start, fake: FakeOpenAI, stream: bool
) -> None:
    fake.hold = asyncio.Event()
    service = await start()
    request = ask(1, "a")
    work = collect(service, request) if stream else service.generate(request)
    task = asyncio.ensure_future(work)
    await fake.wait_for_requests()
    waiting = asyncio.ensure_future(service.fill(FillRequest(context_id=1, text="b")))
    await asyncio.sleep(0)
    assert await service.free_contexts([1]) >= 1
    for job in (task, waiting):
        with pytest.raises(Cancelled):
            await job
    await asyncio.wait_for(fake.cancelled.wait(), 30)
    service.check_integrity()


async def test_closing_a_stream_stops_the_request(start: Start, fake: FakeOpenAI) -> None:
    fake.hold = asyncio.Event()
    service = await start()
    stream = service.generate_stream(ask(1, "a"))
    assert await anext(stream) == StreamChunk(ids=[], text="one ")
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.wait_for(fake.cancelled.wait(), 30)
    fake.hold = None
    await service.generate(ask(1))
    assert fake.bodies[-1]["prompt"] == "aone "


async def test_cancelled_requests_are_stopped_also_in_the_queue(
    start: Start, fake: FakeOpenAI
) -> None:
    fake.hold = asyncio.Event()
    service = await start({"scheduler": {"max_batch_size": 1}})
    tasks = [asyncio.ensure_future(service.generate(ask(i, "a"))) for i in range(3)]
    await fake.wait_for_requests()
    for task in tasks[:2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    fake.hold.set()
    assert (await tasks[2]).generated_text == "one two three"


async def test_closing_fails_unfinished_requests(start: Start, fake: FakeOpenAI) -> None:
    fake.hold = asyncio.Event()
    service = await start()
    task = asyncio.ensure_future(service.generate(ask(1, "a")))
    await fake.wait_for_requests()
    await service.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await task
    assert service.state() is not ServiceState.READY


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@pytest.mark.parametrize(("num_top", "fields"), [(0, (True, 1)), (3, (True, 3))])
async def test_log_probabilities_are_passed_on(
    start: Start, fake: FakeOpenAI, endpoint: str, num_top: int, fields: tuple[Any, Any]
) -> None:
    """The token that ended the text is omitted. If the server returns fewer likely tokens than
    requested, the rest of the row is empty."""
    service = await start(api_endpoint=endpoint)
    fake.reply = "a bcd"
    whole = await service.generate(ask(1, "x", logprobs=num_top))
    assert fake.bodies[0]["logprobs"] == fields[endpoint == "completion"]
    assert fake.bodies[0].get("top_logprobs") == (num_top or None if endpoint == "chat" else None)
    found = whole.logprobs
    assert (len(found), found.width) == (2, 1 + num_top)
    tokens = [None if i < 0 else found.tokens[i] for i in found.ids]
    likely = [[b"a", b"a ", None], [b"b", b"bc", b"bcd"]]
    want = [[word, *likely[i][:num_top]] for i, word in enumerate((b"a ", b"bcd"))]
    assert tokens == [token for row in want for token in row]
    assert list(found.values[:: found.width]) == [-2.0, -3.0]
    *chunks, last = [e async for e in service.generate_stream(ask(2, "x", logprobs=num_top))]
    assert last.logprobs == found
    shown = [c.logprobs.tokens[i] for c in chunks for i in c.logprobs.ids[:: found.width]]
    assert shown == [b"a ", b"bcd", b"<end>"]
    assert (await service.generate(ask(3, "x"))).logprobs is None


def test_log_probabilities_of_partial_characters_and_missing_values() -> None:
    answer = AnswerLogprobs(1)
    given = {
        "tokens": [r"bytes:\xe2\x82", r"bytes:\xac", "bytes:x"],
        "token_logprobs": [-1.0, None, -2.0],
        "top_logprobs": [{"a": None, "b": -3.0}, None, {}],
    }
    answer.add(ChoiceLogprobs.model_validate(given))
    found = answer.of_text("€bytes:x and more")
    assert found is not None
    assert found.tokens is not None
    assert [found.tokens[i] for i in found.ids[::2]] == [b"\xe2\x82", b"\xac", b"bytes:x"]
    assert list(found.values[::2]) == [-1.0, -9999.0, -2.0]
    assert found.tokens[found.ids[1]] == b"b"


async def test_answers_of_a_server_without_log_probabilities_have_none(
    start: Start, fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_openai, "_logprobs", lambda *_: {"logprobs": None})
    found = (await (await start()).generate(ask(1, "x", logprobs=2))).logprobs
    assert found is None
