"""Programs on servers of other projects, with ServeCore and the openai engine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient
from tests.foreign.servers import MODEL, ForeignServer, LlamaCppPython, Vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "common.py")
PARAGRAPHS = "\n\n".join(f"On day {day} the parrot learned a new word. " * 8 for day in range(3))
COUNTING = "One, two, three, four, five, six, seven,"
LONG = 1500  # Tokens of an output that is long enough to be observed while it runs.
HITS = "vllm:prefix_cache_hits_total"
OTHERS = "parrot_engine_server_requests_of_others{"
BY_LENGTH = {"logit_bias": {"2": -100}}  # excludes the token that ends a text
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(cluster.core_url, timeout=timeout) as session:
        yield session


def completion(prompt: str = COUNTING, **fields: Any) -> dict[str, Any]:
    given = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return given | fields


async def answer(http: Any, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def text_of(http: Any, body: Any) -> str:
    status, payload = await answer(http, body)
    assert status == 200, payload
    text: str = payload["choices"][0]["text"]
    return text


async def events(http: Any, body: Any) -> AsyncIterator[Any]:
    async with http.post("/v1/completions", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def own_text(server: ForeignServer, body: Any) -> str:
    """Return the server's own answer, without Parrot."""
    async with aiohttp.ClientSession(server.url) as http:
        return await text_of(http, body)


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_programs_run_to_their_end(
    program: str, cluster: Cluster, server: ForeignServer, tmp_path: Path
) -> None:
    document = tmp_path / "document.txt"
    document.write_text(PARAGRAPHS)
    shorter = {
        "chain_summary.py": [str(document), "--max-chunks", "2"],
        "map_reduce_summary.py": [str(document)],
        "linux_terminal.py": ["pwd", "ls"],
    }
    command = [sys.executable, str(EXAMPLES / program), "--core", cluster.core_url]
    ran = subprocess.run(
        [*command, *shorter.get(program, [])], capture_output=True, text=True, timeout=500
    )
    if program == "agent_with_tools.py" and isinstance(server, LlamaCppPython):
        assert "UnsupportedField: no engine supports `grammar`" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    assert "---" in ran.stdout
    assert "Traceback" not in ran.stderr


async def test_the_text_is_the_servers_own(
    http: aiohttp.ClientSession, server: ForeignServer
) -> None:
    """Texts are the same whole, streamed, and in parallel with other requests."""
    alone = await own_text(server, completion())
    assert await text_of(http, completion()) == alone
    deltas = [event["choices"][0]["text"] async for event in events(http, completion())]
    assert len(deltas) > 5
    assert "".join(deltas) == alone
    together = await asyncio.gather(*(text_of(http, completion()) for _ in range(3)))
    assert {text[:20] for text in together} == {alone[:20]}


async def test_streams_at_the_same_time_are_all_complete(http: aiohttp.ClientSession) -> None:
    """The texts are not compared with those of single requests, because rounding depends on the
    cache. Chunks are not counted, because a busy server sends several tokens per chunk."""

    async def streamed(number: str) -> tuple[int, str]:
        body = completion(f"{COUNTING} eight, the number after {number} is") | BY_LENGTH
        asked = body | {"stream_options": {"include_usage": True}}
        seen = [event async for event in events(http, asked)]
        ends = [choice["finish_reason"] for event in seen for choice in event["choices"]]
        return seen[-1]["usage"]["completion_tokens"], ends[-1]

    for num_tokens, reason in await asyncio.gather(*map(streamed, ("one", "two", "six"))):
        assert num_tokens >= 20
        assert reason == "length"


async def test_usage_is_counted(http: aiohttp.ClientSession) -> None:
    _, payload = await answer(http, completion())
    usage = payload["usage"]
    assert (usage["prompt_tokens"] > 5, usage["completion_tokens"]) == (True, 24)
    asked = completion(stream_options={"include_usage": True})
    last = [event async for event in events(http, asked)][-1]
    assert last["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_stops_the_work(
    http: aiohttp.ClientSession, server: ForeignServer, stream: bool
) -> None:
    body = completion(f"{COUNTING} {stream}", max_tokens=LONG) | BY_LENGTH
    if stream:
        async with aclosing(events(http, body)) as seen:
            for _ in range(3):
                await anext(seen)
            assert await asyncio.to_thread(server.is_working)
    else:
        asking = asyncio.create_task(answer(http, body))
        while not await asyncio.to_thread(server.is_working):
            assert not asking.done()
        asking.cancel()
    await asyncio.to_thread(server.wait_until_idle)


async def test_a_killed_server_causes_an_error_or_the_whole_text(
    http: aiohttp.ClientSession, server: ForeignServer
) -> None:
    """The server is killed during a stream and another request, and started again. Both requests
    end with an error, or with a text that continues where it was interrupted."""
    begins = (await own_text(server, completion(max_tokens=100)))[:40]
    body = completion(max_tokens=100) | BY_LENGTH
    seen = events(http, body | {"stream_options": {"include_usage": True}})
    streamed = [await anext(seen) for _ in range(12)]
    asking = asyncio.create_task(answer(http, body))
    server.end()
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    async with aclosing(seen), asyncio.timeout(300):
        streamed += [event async for event in seen]
        status, payload = await asking
    await starting
    failed = [event for event in streamed if "error" in event]
    choices = [event["choices"][0] for event in streamed if event.get("choices")]
    assert "".join(choice["text"] for choice in choices).startswith(begins)
    if not failed:
        assert choices[-1]["finish_reason"] == "length"
        assert streamed[-1]["usage"]["completion_tokens"] == pytest.approx(100, abs=2)
    assert status in (200, 502, 503), payload
    if status == 200:
        (choice,) = payload["choices"]
        assert (choice["text"][:40], choice["finish_reason"]) == (begins, "length")
    assert (await text_of(http, completion())).startswith(begins[:20])


async def test_a_common_prefix_is_reported_as_cached(
    http: aiohttp.ClientSession, server: ForeignServer
) -> None:
    beginning, cached, num_prompt = PARAGRAPHS + "\n\n", list[int](), 0
    hits = server.metric(HITS) if isinstance(server, Vllm) else 0.0
    for question in ("What did it learn?", "Who learned?", "When?"):
        _, payload = await answer(http, completion(beginning + question, max_tokens=2))
        cached.append(payload["usage"]["prompt_tokens_details"]["cached_tokens"])
        num_prompt = payload["usage"]["prompt_tokens"]
    if isinstance(server, Vllm):
        assert all(tokens > 0.8 * num_prompt for tokens in cached[1:]), (cached, num_prompt)
        assert server.metric(HITS) - hits >= sum(cached[1:])
    else:
        assert cached == [0, 0, 0], "the server reports no cached tokens"


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            # The grammar of llama-cpp-python allows line breaks in strings.
            lambda text: set(json.loads(text, strict=False)) == {"city", "large"},
        ),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"guided_grammar": 'root ::= "a" | "b"'}, lambda text: text in ("a", "b")),
    ],
)
async def test_constraints_are_enforced_or_rejected(
    http: aiohttp.ClientSession, server: ForeignServer, constraint: Any, is_right: Any
) -> None:
    messages = [{"role": "user", "content": "Which city is the capital of France?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 48, "temperature": 0} | constraint
    status, payload = await answer(http, body, "/v1/chat/completions")
    if isinstance(server, Vllm) or "response_format" in constraint:
        assert status == 200, payload
        assert is_right(payload["choices"][0]["message"]["content"]), payload
    else:
        assert (status, payload["error"]["code"]) == (400, "unsupported_field")


def chat(**fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Which city is the capital of France?"},
    ]
    given = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
    return given | fields


async def test_a_conversation_is_rendered_by_the_server(
    http: aiohttp.ClientSession, server: ForeignServer
) -> None:
    """Chats use the model's own template, so the answer is the same as without Parrot."""
    async with aiohttp.ClientSession(server.url) as direct:
        _, own = await answer(direct, chat(), "/v1/chat/completions")
    status, payload = await answer(http, chat(), "/v1/chat/completions")
    assert status == 200, payload
    said, own_said = [one["choices"][0]["message"]["content"] for one in (payload, own)]
    assert said[:30] == own_said[:30]
    assert payload["usage"]["completion_tokens"] > 0


async def test_tools_are_called_or_rejected(
    http: aiohttp.ClientSession, server: ForeignServer
) -> None:
    parameters = {
        "type": "object",
        "properties": {"large": {"type": "boolean"}},
        "required": ["large"],
        "additionalProperties": False,
    }
    judge = {"name": "judge", "parameters": parameters, "strict": True}
    tool = {"type": "function", "function": judge}
    choice = {"type": "function", "function": {"name": "judge"}}
    body = chat(tools=[tool], tool_choice=choice, max_tokens=64)
    status, payload = await answer(http, body, "/v1/chat/completions")
    if not isinstance(server, Vllm):
        assert (status, payload["error"]["param"]) == (400, "tools")
        return
    assert status == 200, payload
    (called,) = payload["choices"][0]["message"]["tool_calls"]
    assert called["function"]["name"] == "judge"
    assert set(json.loads(called["function"]["arguments"])) == {"large"}
    result_message = {"role": "tool", "tool_call_id": called["id"], "content": "It is."}
    said = {"role": "assistant", "content": None, "tool_calls": [called]}
    body = chat(messages=[*body["messages"], said, result_message], tools=[tool])
    status, payload = await answer(http, body, "/v1/chat/completions")
    assert status == 200, payload


async def test_a_callers_span_is_passed_on(http: aiohttp.ClientSession) -> None:
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    async with http.post("/v1/completions", json=completion(), headers=headers) as response:
        assert response.status == 200, await response.text()


async def test_embeddings_of_a_model_that_the_server_only_generates_with(http: Any) -> None:
    body = {"model": MODEL, "input": ["a", "b"]}
    status, payload = await answer(http, body, "/v1/embeddings")
    assert (status, payload["error"]["type"]) == (400, "invalid_request_error"), payload


async def test_log_probabilities_of_a_prompt(http: Any) -> None:
    """The request is that of evaluation harnesses, with a text as the prompt."""
    body = {"model": MODEL, "prompt": "The capital of France is Paris", "echo": True}
    status, payload = await answer(http, body | {"max_tokens": 0, "logprobs": 1}, "/v1/completions")
    assert status == 200, payload
    (choice,) = payload["choices"]
    assert choice["text"] == body["prompt"]
    assert "".join(choice["logprobs"]["tokens"]) == body["prompt"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(number < 0 for number in choice["logprobs"]["token_logprobs"][1:])
    assert payload["usage"]["prompt_tokens"] == len(choice["logprobs"]["tokens"])


async def test_what_others_ask_of_the_server_is_known(
    cluster: Cluster, server: ForeignServer
) -> None:
    """The load of other clients is known after a heartbeat, as long as it lasts."""
    if not isinstance(server, Vllm):
        pytest.skip("needs a foreign server that reports its load")

    async def num_others() -> float:
        metrics = await engine.text("/metrics", limit=2**20, timeout_s=30)
        found = [line for line in metrics.splitlines() if line.startswith(OTHERS)]
        return float(found[0].split()[-1]) if found else 0.0

    (name,) = cluster.engine_names
    async with HttpClient(cluster.url(name), bearer_token=cluster.cluster_token) as engine:
        body = completion(max_tokens=LONG) | BY_LENGTH
        asking = [asyncio.create_task(own_text(server, body)) for _ in range(2)]
        async with asyncio.timeout(120):
            while await num_others() != 2:
                assert not asking[0].done()
                await asyncio.sleep(0.5)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            while await num_others():  # noqa: ASYNC110 - the state of another process
                await asyncio.sleep(0.5)
