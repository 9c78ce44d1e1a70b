"""Requests with parts that Parrot does not know. With an external server, the server receives the
whole request. A builtin engine rejects the request. The tests use HTTP and a fake server."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from parrot.journal.log import Journal
from parrot.journal.sqlite import JournalFile
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError, parse_config
from tests.gateway.vendors.conftest import serve
from tests.support.app_server import serve_app
from tests.support.fake_engine import fake_engine
from tests.support.fake_openai import FakeOpenAI, Fault

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,C"}}
TEXT = {"type": "text", "text": "What is this?"}


class Front:
    """A client of a ServeCore in front of `fake`."""

    def __init__(self, http: aiohttp.ClientSession, core: ServeCore, fake: FakeOpenAI) -> None:
        self.http, self.core, self.fake = http, core, fake

    async def send(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        given = {"model": "gpt-fake"} | body
        async with self.http.post(path, json=given, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        status, answer = await self.send(path, body, **options)
        assert status == 200, answer
        return answer

    async def chat(self, *content: Any, **fields: Any) -> Any:
        messages = [{"role": "user", "content": list(content) or "x"}]
        return await self.post(CHAT, {"messages": messages} | fields)

    @property
    def sent(self) -> dict[str, Any]:
        """Return the last body that the server received."""
        return self.fake.bodies[-1]

    @property
    def content(self) -> Any:
        """Return the content of the last message that the server received."""
        return self.sent["messages"][-1]["content"]


@asynccontextmanager
async def front_of(
    fake: FakeOpenAI, entry: Any = None, journal_file: Path | None = None
) -> AsyncIterator[Front]:
    async with serve_app(fake.app()) as server:
        entries = [{"url": f"{server}/v1"} | (entry or {})]
        core = ServeCore(parse_config(CoreConfig, {"servers": entries}, "test"))
        journal = None
        if journal_file is not None:
            journal = Journal(JournalFile(str(journal_file), 2**24), MonotonicClock())
        async with serve_app(create_app(core, journal)) as url, aiohttp.ClientSession(url) as http:
            while not core.fleet.engines:
                await core.fleet.joined()
            yield Front(http, core, fake)
            core.check_integrity()
        if journal is not None:
            await journal.close()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async with front_of(FakeOpenAI(owned_by="vllm")) as front:
        yield front


@pytest.fixture
async def builtin() -> AsyncIterator[Any]:
    """A ServeCore with a builtin engine."""
    async with serve(CoreConfig(), fake_engine("e0", model="gpt-fake")) as site:
        yield site


async def test_unknown_fields_reach_the_server(front: Front) -> None:
    extra = {"min_tokens": 2, "mm_processor_kwargs": {"fps": [1]}, "think": False, "none": None}
    known = {"service_tier": "on_demand", "user": "ann", "verbosity": "low", "store": False}
    await front.chat(**extra, **known)
    assert extra.items() <= front.sent.items()
    assert known.items() <= front.sent.items()
    await front.post(COMPLETIONS, {"prompt": "x", "suffix": "y", "skip_special_tokens": False})
    assert (front.sent["suffix"], front.sent["skip_special_tokens"]) == ("y", False)
    await front.post(MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
                     | {"min_tokens": 3})  # fmt: skip
    assert front.sent["min_tokens"] == 3
    await front.post(RESPONSES, {"input": "x", "min_tokens": 4, "text": {"verbosity": "high"}})
    assert (front.sent["min_tokens"], front.sent["verbosity"]) == (4, "high")


async def test_parrots_own_fields_take_precedence(front: Front) -> None:
    await front.chat(max_tokens=2, cache_salt="mine", priority=7)
    assert (front.sent["max_tokens"], front.sent["priority"]) == (2, 7)
    for name in ("prompt", "echo", "input"):
        body = {"messages": [{"role": "user", "content": "x"}], name: "y"}
        status, answer = await front.send(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, name)


async def test_calls_with_different_fields_share_no_result(front: Front) -> None:
    """A result is reused for equal requests only."""
    for min_tokens in (1, 2, 1):
        await front.chat(temperature=0, min_tokens=min_tokens)
    assert [body["min_tokens"] for body in front.fake.bodies] == [1, 2]


async def test_unknown_fields_of_messages_reach_the_server(front: Front) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "prefix": True, "audio": None},
    ]
    await front.post(CHAT, {"messages": messages})
    assert front.sent["messages"][1] == {"role": "assistant", "content": "y", "prefix": True}


async def test_images_audio_and_files_reach_the_server(front: Front) -> None:
    await front.chat(TEXT, IMAGE, AUDIO, FILE)
    assert front.content == [TEXT, IMAGE, AUDIO, FILE]


async def test_images_of_other_apis_reach_the_server(front: Front) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": source}
    pdf = {"type": "document", "title": "a.pdf", "source": source | {"media_type": "x/pdf"}}
    link = {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}}
    body = {"messages": [{"role": "user", "content": [TEXT, image, link, pdf]}], "max_tokens": 9}
    await front.post(MESSAGES, body)
    assert front.content == [
        TEXT,
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://h/i.png"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:x/pdf;base64,AAAA"}},
    ]
    url = IMAGE["image_url"]["url"]
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": url, "detail": "low"},
        {"type": "input_file"} | FILE["file"],
    ]
    answer = await front.post(RESPONSES, {"input": [{"role": "user", "content": content}]})
    assert front.content == [TEXT, IMAGE, FILE]
    await front.post(RESPONSES, {"input": "And now?", "previous_response_id": answer["id"]})
    assert front.sent["messages"][0]["content"] == [TEXT, IMAGE, FILE]


async def test_a_journal_contains_no_images(tmp_path: Path) -> None:
    long = "A" * 10_000
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{long}"}}
    async with front_of(FakeOpenAI(owned_by="vllm"), journal_file=tmp_path / "journal") as front:
        await front.chat(TEXT, image)
        assert front.content[1] == image
    written = _written(tmp_path)
    assert long[:100].encode() not in written
    assert b"What is this?" in written


async def test_a_result_of_a_tool_may_be_an_image(front: Front) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await front.post(MESSAGES, {"messages": messages, "max_tokens": 9})
    assert front.content == [{"type": "image_url", "image_url": {"url": "https://h/i.png"}}]


async def test_files_that_only_another_api_can_reference_are_rejected(front: Front) -> None:
    for part in ({"type": "input_image", "file_id": "f"}, {"type": "input_file", "file_url": "u"}):
        body = {"input": [{"role": "user", "content": [part]}]}
        status, answer = await front.send(RESPONSES, body)
        assert (status, answer["error"]["param"]) == (400, "input.0.content.0")


async def test_equal_images_have_equal_prefixes(front: Front) -> None:
    """In prefixes and in the prompt on the page, an image counts only by its hash."""
    long = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    ask = {"role": "user", "content": [TEXT, long]}
    headers = []
    for messages in (
        [ask],
        [ask, {"role": "assistant", "content": "one two three"}, ask],
        [{"role": "user", "content": [TEXT, IMAGE]}],
    ):
        async with front.http.post(
            CHAT, json={"model": "gpt-fake", "messages": messages}
        ) as response:
            assert response.status == 200
            headers.append(response.headers["x-parrot-prefix"])
    assert headers[0] == headers[2] == "new"
    assert headers[1].startswith("continued; reused=")
    assert int(headers[1].rpartition("=")[2]) < 1000


async def test_a_builtin_engine_rejects_all_this(builtin: Any) -> None:
    user = {"role": "user", "content": "x"}
    cases = [
        (CHAT, {"messages": [user], "min_tokens": 2}, "min_tokens"),
        (CHAT, {"messages": [user | {"prefix": True}]}, "messages.0.prefix"),
        (CHAT, {"messages": [user | {"content": [TEXT, IMAGE]}]}, "messages.0.content.1"),
        (CHAT, {"messages": [user], "modalities": ["text", "audio"]}, "modalities"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (RESPONSES, {"input": "x", "min_tokens": 2}, "min_tokens"),
        (
            RESPONSES,
            {"input": [user | {"content": [{"type": "input_image", "image_url": "u"}]}]},
            "input.0.content.0",
        ),
        ("/v1/responses/input_tokens", {"input": "x", "min_tokens": 2}, "min_tokens"),
        ("/tokenize", {"messages": [user | {"content": [IMAGE]}]}, "messages.0.content.0"),
    ]
    for path, body, param in cases:
        status, answer = await builtin.send(path, {"model": "gpt-fake"} | body)
        assert (status, answer["error"]["param"]) == (400, param), path
    image = {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        limit = {"max_tokens": 9} if path == MESSAGES else {}
        for body in ({"min_tokens": 2, "messages": [user]},
                     {"messages": [user | {"content": [image]}]}):  # fmt: skip
            status, answer = await builtin.send(path, {"model": "gpt-fake"} | limit | body)
            assert status == 400, answer
            named = "min_tokens" if "min_tokens" in body else "type `image`"
            assert named in answer["error"]["message"]


async def test_the_ids_of_a_request_reach_the_server(front: Front) -> None:
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "mine", "traceparent": span}
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        (COMPLETIONS, {"prompt": "x"}),
        (MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        (RESPONSES, {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        await front.post(path, body, headers=headers)
        sent = front.fake.headers[-1]
        assert (sent["x-request-id"], sent["traceparent"]) == ("mine", span), path


async def test_two_requests_in_flight_have_different_ids(front: Front) -> None:
    """vLLM rejects a request with the id of a running one."""
    front.fake.hold = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2}
    both = asyncio.create_task(front.post(CHAT, body, headers={"x-request-id": "mine"}))
    async with asyncio.timeout(5):
        await front.fake.wait_for_requests(2)
    front.fake.hold.set()
    await both
    assert sorted(sent["x-request-id"] for sent in front.fake.headers) == ["mine", "mine-2"]
    await front.post(CHAT, body | {"n": 1}, headers={"x-request-id": "mine"})
    assert front.fake.headers[-1]["x-request-id"] == "mine"
    for path, fields in ((CHAT, body | {"n": 1}), ("/v1/embeddings", {"input": "x"})):
        await front.post(path, fields, headers={"x-request-id": "m\xfcne"})
        assert "x-request-id" not in front.fake.headers[-1]


async def test_a_refusal_names_the_server_and_the_field(front: Front) -> None:
    refusal = {"message": "too small", "param": "min_tokens", "code": "bad_value", "type": "x"}
    front.fake.faults = [Fault(400, {"error": refusal})]
    status, answer = await front.send(CHAT, {"messages": [{"role": "user", "content": "x"}]})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "min_tokens", "bad_value")
    assert error["message"].startswith("the server http://127.0.0.1:")
    assert error["message"].endswith("refused the request: too small")
    detail = [{"loc": ["body", "min_tokens"], "msg": "Input should be a number"}]
    front.fake.faults = [Fault(422, {"detail": detail})]
    status, answer = await front.send(COMPLETIONS, {"prompt": "x"})
    assert (status, "Input should be a number" in answer["error"]["message"]) == (400, True)


async def test_the_error_uses_the_field_name_of_the_client() -> None:
    async with front_of(FakeOpenAI(owned_by="library")) as front:
        body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        status, answer = await front.send(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, "ignore_eos")
        assert answer["error"]["message"] == (
            "no engine of gpt-fake supports `ignore_eos` (servers: ollama)"
        )


async def test_the_key_of_a_client_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The configured key is only used to ask for the models. It never stands in for a client."""
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-operator")
    entry = {"forward_client_key": True}
    async with front_of(FakeOpenAI(owned_by="vllm"), entry, tmp_path / "journal") as front:
        chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
        for path, body in (
            (CHAT, chat),
            (CHAT, chat | {"stream": True}),
            (COMPLETIONS, {"prompt": "x"}),
            (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}),
            (RESPONSES, {"input": "x"}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            given = {"model": "gpt-fake"} | body
            headers = {"authorization": "Bearer of-ann"}
            async with front.http.post(path, json=given, headers=headers) as response:
                assert response.status == 200, await response.text()
                await response.read()
            assert front.fake.headers[-1]["authorization"] == "Bearer of-ann", (path, body)
        message = chat | {"max_tokens": 9}
        await front.post(MESSAGES, message, headers={"x-api-key": "of-bob"})
        assert front.fake.headers[-1]["authorization"] == "Bearer of-bob"
        num_asked = len(front.fake.headers)
        await front.post(CHAT, chat)
        assert "authorization" not in front.fake.headers[-1]
        assert len(front.fake.headers) == num_asked + 1  # clients share no results
        salts = [body.get("cache_salt") for body in front.fake.bodies if "messages" in body]
        assert len(set(salts)) == 3
        front.fake.faults = [Fault(401, {"error": {"message": "no"}})]
        status, answer = await front.send(CHAT, chat | {"seed": 1}, headers=headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert "refused your API key" in answer["error"]["message"]
    written = _written(tmp_path)
    assert b"of-ann" not in written
    assert b"one two three" in written


def _written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_parrots_own_keys_are_not_sent_to_a_server() -> None:
    servers = [{"url": "http://h/v1", "forward_client_key": True}]
    with pytest.raises(ConfigError, match="`forward_client_key` cannot be used with `api_keys`"):
        create_app(
            ServeCore(parse_config(CoreConfig, {"servers": servers, "api_keys": ["k"]}, "test"))
        )


async def test_fields_of_embeddings_reach_the_server(front: Front, builtin: Any) -> None:
    extra = {"dimensions": 2, "user": "ann", "truncate_prompt_tokens": 5}
    body = {"input": [[1, 2], [3]], "encoding_format": "base64"} | extra
    answer = await front.post("/v1/embeddings", body)
    assert front.sent == {
        "model": "gpt-fake", "input": [[1, 2], [3]], "encoding_format": "float", **extra
    }  # fmt: skip
    assert [len(b64decode(item["embedding"])) for item in answer["data"]] == [8, 8]
    assert answer["usage"]["prompt_tokens"] == 3
    for name in ("dimensions", "truncate_prompt_tokens"):
        body = {"model": "gpt-fake", "input": "x", name: 5}
        status, answer = await builtin.send("/v1/embeddings", body)
        assert (status, answer["error"]["param"]) == (400, name)


async def test_unknown_fields_of_an_answer_reach_the_client(front: Front) -> None:
    note = {"type": "url_citation", "url": "https://h"}
    front.fake.more = {"annotations": [note], "audio": {"id": "a", "data": "QQ=="}}
    front.fake.more_of_answer = {"citations": ["https://h"], "model": "other"}
    front.fake.reasoning, front.fake.stop_reason = "Hm. ", None
    answer = await front.chat()
    message = answer["choices"][0]["message"]
    assert {name: message[name] for name in front.fake.more} == front.fake.more
    assert message["reasoning"] == message["reasoning_content"] == "Hm. "
    assert (answer["citations"], answer["model"]) == (["https://h"], "gpt-fake")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "model": "gpt-fake"}
    options = {"stream_options": {"include_usage": True}}
    async with front.http.post(CHAT, json=body | options) as response:
        lines = (await response.text()).split("\n\n")
    chunks = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert front.fake.more in deltas
    assert "".join(delta.get("content") or "" for delta in deltas) == "one two three"
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Hm. "
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert chunks[-1]["citations"] == ["https://h"]


async def test_unknown_fields_of_a_completion_reach_the_client(front: Front) -> None:
    front.fake.more, front.fake.more_of_answer = (
        {"audio": {"id": "a"}},
        {"citations": ["https://h"]},
    )
    details = {"reasoning_tokens": 1}
    answer = await front.post(COMPLETIONS, {"prompt": "x"})
    assert answer["citations"] == ["https://h"]
    assert answer["usage"]["completion_tokens_details"] == details
    body = {"model": "gpt-fake", "prompt": "x", "stream": True}
    options = {"stream_options": {"include_usage": True}}
    async with front.http.post(COMPLETIONS, json=body | options) as response:
        lines = (await response.text()).split("\n\n")
    end = orjson.loads(next(line for line in reversed(lines) if line.startswith("data: {"))[6:])
    assert end["usage"]["completion_tokens_details"] == details


async def test_tools_and_formats_of_the_server(front: Front, builtin: Any) -> None:
    tools = [
        {"type": "web_search", "web_search": {"depth": 1}},
        {"type": "function", "function": {"name": "look"}},
    ]
    tag = {"type": "structural_tag", "format": {}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": tools}, "tools.0"),
        ({"tools": tools[:1]}, "tools.0"),
        ({"response_format": tag}, "response_format"),
    ]
    for fields, param in cases:
        await front.chat(**fields)
        assert fields.items() <= front.sent.items()
        body = {"model": "gpt-fake", "messages": [{"role": "user", "content": "x"}], **fields}
        status, answer = await builtin.send(CHAT, body)
        assert (status, answer["error"]["param"]) == (400, param)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    await front.chat(response_format={"type": "json_object", "schema": schema})
    assert front.sent["response_format"]["json_schema"]["schema"] == schema


async def test_a_prompt_of_token_ids_reaches_the_server(front: Front) -> None:
    body = {"prompt": [[1, 2], [3]], "temperature": 0, "max_tokens": 2}
    answer = await front.post(COMPLETIONS, body)
    assert sorted(sent["prompt"] for sent in front.fake.bodies) == [[1, 2], [3]]
    assert [choice["text"] for choice in answer["choices"]] == ["one two "] * 2
    num_asked = len(front.fake.bodies)
    await front.post(COMPLETIONS, body | {"prompt": "1 2"})  # Not the same prompt.
    assert front.fake.bodies[num_asked]["prompt"] == "1 2"
    async with front.http.post(
        COMPLETIONS, json={"model": "gpt-fake", "prompt": [7], "stream": True}
    ) as response:
        lines = (await response.text()).split("\n\n")
    chunks = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three"
    assert front.sent["prompt"] == [7]
    answer = await front.post(
        COMPLETIONS, {"prompt": [4, 5], "echo": True, "logprobs": 1, "max_tokens": 0}
    )
    assert answer["choices"][0]["text"] == "t4 t5 "
    assert answer["choices"][0]["logprobs"]["tokens"] == ["t4 ", "t5 "]
    status, answer = await front.send(COMPLETIONS, {"prompt": [4, 5], "echo": True})
    assert (status, answer["error"]["param"]) == (400, "echo")


async def test_a_semantic_call_may_have_fields_of_the_server(front: Front) -> None:
    sampling = {"max_gen_length": 2, "extra": {"min_tokens": 2}}
    answer = {"name": "answer", "is_output": True, "sampling_config": sampling}
    call = {"template": "Hi {{answer}}", "parameters": [answer], "models": ["gpt-fake"]}
    async with front.http.post("/v1/session", json={}) as response:
        session = await response.json()
    headers = {"authorization": f"Bearer {session['session_auth']}"}
    body = call | {"session_id": session["session_id"]}
    async with front.http.post("/v1/semantic_call", json=body, headers=headers) as response:
        (output,) = (await response.json())["param_info"]
    url = f"/v1/semantic_var/{output['var_id']}?session_id={session['session_id']}"
    async with front.http.get(url, headers=headers) as response:
        assert (await response.json())["content"] == "one two "
    assert front.sent["min_tokens"] == 2


async def test_messages_may_have_outputs_of_other_requests(front: Front) -> None:
    names = {"prompt_cache_key": "news"}
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "Say it."}]
    part = await front.post(CHAT, names | {"messages": messages, "parrot": {"defer": True}})
    inputs = {"part": part["parrot"]["outputs"][0]}
    ending = [{"role": "user", "content": [IMAGE]}, {"role": "user", "content": "Why {{part}}?"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"messages": [system, *ending], "parrot": {"inputs": inputs}, "tools": [tool]}
    answer = await front.post(CHAT, names | body | {"min_tokens": 1})
    assert answer["choices"][0]["message"]["content"] == "one two three"
    first, second = front.fake.bodies
    assert first["messages"] == messages
    assert second["messages"] == [
        system,
        ending[0],
        {"role": "user", "content": "Why one two three?"},
    ]
    assert (second["tools"], second["min_tokens"]) == ([tool], 1)


async def test_a_deferred_chat_is_sent_as_messages_after_a_restart(tmp_path: Path) -> None:
    names, file = {"prompt_cache_key": "news"}, tmp_path / "journal.db"
    said = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}
    async with front_of(FakeOpenAI(owned_by="vllm"), journal_file=file) as front:
        first = await front.post(CHAT, names | {"messages": said, "parrot": {"defer": True}})
        inputs = {"part": first["parrot"]["outputs"][0]}
        ending = [{"role": "user", "content": "Why {{part}}?"}]
        body = {"messages": ending, "parrot": {"inputs": inputs, "defer": True}}
        second = await front.post(CHAT, names | body)
        assert front.fake.bodies == []
    async with front_of(FakeOpenAI(owned_by="vllm"), journal_file=file) as front:
        inputs = {"part": second["parrot"]["outputs"][0]}
        await front.post(CHAT, names | {"messages": ending, "parrot": {"inputs": inputs}})
        asked = [body["messages"] for body in front.fake.bodies]
        assert asked[0] == list(said)
        assert asked[1:] == [[{"role": "user", "content": "Why one two three?"}]] * 2
