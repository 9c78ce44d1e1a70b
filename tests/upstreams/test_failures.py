"""Servers that die, refuse, hang or break off their answers."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import orjson
import pytest
import stamina
from fastapi import Request, Response

from parrot.upstreams import servers
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.fake_openai_process import FakeProcess
from tests.upstreams.conftest import Client, chat, core_of

WORDS = " ".join(f"word{number}" for number in range(40))
SLOW = {"reply": WORDS, "word_s": 0.05, "owned_by": "vllm"}
OVERLOADED = {"error": {"message": "full", "type": "overloaded"}}
COMPLETION = {"model": "gpt-fake", "prompt": "x", "max_tokens": 100}


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    started = FakeProcess(SLOW)
    started.start()
    yield started
    started.kill()


async def in_front(stack: AsyncExitStack, *fakes: FakeOpenAI, **keys: Any) -> Client:
    urls = [await stack.enter_async_context(serve_app(fake.app())) for fake in fakes]
    entries = [{"url": f"{url}/v1"} for url in urls]
    client = await stack.enter_async_context(core_of(*entries, **keys))
    await client.until_served("gpt-fake", times=len(fakes))
    return client


# A server of a pool that is full


@pytest.mark.parametrize("status", [429, 503])
async def test_a_call_that_a_server_rejects_runs_on_another_server(status: int) -> None:
    full = FakeOpenAI(faults=[Fault(status, OVERLOADED, {"retry-after": "60"})] * 99)
    other = FakeOpenAI(reply="from the other")
    async with AsyncExitStack() as stack:
        client = await in_front(stack, full, other)
        texts = await asyncio.gather(*(client.said() for _ in range(8)))
        assert set(texts) == {"from the other"}
        full.bodies.clear()
        assert [await client.said() for _ in range(8)] == ["from the other"] * 8
        assert full.bodies == [], "calls were sent although the server said when to return"


class SmallServer(FakeOpenAI):
    """Answers 429 to more than three requests at a time."""

    num_accepted = num_refused = 0

    def _next_fault(self) -> Fault | None:
        if self.num_accepted == 3:
            self.num_refused += 1
            return Fault(429, OVERLOADED)
        self.num_accepted += 1
        return None

    async def _events(
        self, body: Mapping[str, Any], is_chat: bool, fault: Fault | None
    ) -> AsyncIterator[bytes]:
        async for event in super()._events(body, is_chat, fault):
            yield event
        self.num_accepted -= 1


async def test_calls_wait_for_the_only_server() -> None:
    server = SmallServer(reply="one two three", word_s=0.02)
    async with AsyncExitStack() as stack:
        client = await in_front(stack, server)

        async def streamed(number: int) -> str:
            body = COMPLETION | {"seed": number}
            events = [event async for event in client.events("/v1/completions", body)]
            return "".join(event["choices"][0]["text"] for event in events if event["choices"])

        texts = await asyncio.gather(*map(streamed, range(20)))
        assert set(texts) == {"one two three"}
        assert server.num_refused > 0


async def test_a_server_that_rejects_all_calls_gives_its_error() -> None:
    fake = FakeOpenAI(faults=[Fault(429, OVERLOADED, {"retry-after": "0.1"})] * 99)
    async with AsyncExitStack() as stack:
        client = await in_front(stack, fake)
        status, answer = await client.ask()
        assert (status, client.retry_after) == (429, "1")
        assert "is overloaded (HTTP 429): full" in answer["error"]["message"]
        assert "http://127.0.0.1:" in answer["error"]["message"], "the error names the server"
        assert len(fake.bodies) == 5


async def test_embeddings_wait_for_a_full_server() -> None:
    fake = FakeOpenAI(faults=[Fault(429, OVERLOADED, {"retry-after": "0.1"})] * 3)
    async with AsyncExitStack() as stack:
        client = await in_front(stack, fake)
        assert await client.embedded("abc") == 1
        assert len(fake.bodies) == 4


async def test_a_server_error_is_retried_on_another_server() -> None:
    broken = FakeOpenAI(faults=[Fault(500, {"error": {"message": "bad GPU"}})] * 99)
    async with AsyncExitStack() as stack:
        client = await in_front(stack, broken, FakeOpenAI(reply="good"))
        assert {await client.said() for _ in range(4)} == {"good"}
        assert len(broken.bodies) <= 4, "each call is sent to the server once"


async def test_the_only_server_gets_five_requests_for_a_call_that_fails() -> None:
    broken = FakeOpenAI(faults=[Fault(500, {"error": {"message": "bad GPU"}})] * 99)
    async with AsyncExitStack() as stack:
        client = await in_front(stack, broken)
        stack.enter_context(stamina.set_testing(True, attempts=5))  # No pauses.
        status, answer = await client.ask()
        assert (status, answer["error"]["code"]) == (502, "engine_failed")
        assert "bad GPU" in answer["error"]["message"]
        assert len(broken.bodies) == 5


# A server that dies


async def test_a_killed_server_is_named_and_used_again_when_it_is_back(
    process: FakeProcess,
) -> None:
    async with core_of({"url": process.url}, no_engine_timeout=0.3) as client:
        await client.until_served("gpt-fake")
        process.kill()
        status, answer = await client.ask()
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert process.url in answer["error"]["message"]
        await asyncio.to_thread(process.start)
        await client.until_served("gpt-fake")
        assert await client.said() == WORDS


async def test_a_call_waits_until_its_server_is_back(process: FakeProcess) -> None:
    async with core_of({"url": process.url}) as client:
        await client.until_served("gpt-fake")
        process.kill()
        asking = asyncio.create_task(client.said())
        await asyncio.to_thread(process.start)
        assert await asking == WORDS
        assert process.num_requests == 1


class ClosesUnderRequests:
    """Answers one call per connection. It closes the connection when another call arrives."""

    def __init__(self) -> None:
        self.num_closed = 0
        self._handlers: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        server.close()
        await asyncio.wait(self._handlers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        has_called = False
        with suppress(asyncio.IncompleteReadError):  # The client has closed its connection.
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                answer: dict[str, Any] = {"data": [{"id": "gpt-fake"}]}
                if head.startswith(b"POST"):
                    size = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                    await reader.readexactly(int(size))
                    if has_called:
                        self.num_closed += 1
                        break
                    has_called = True
                    message = {"role": "assistant", "content": "yes"}
                    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
                raw = orjson.dumps(answer)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw))
        writer.close()
        await writer.wait_closed()


async def test_a_connection_that_closes_during_a_request_is_replaced() -> None:
    """A server closes a connection that it has not used for some seconds. The next request may
    already be on its way."""
    server = ClosesUnderRequests()
    async with server.listening() as url, core_of({"url": url}) as client:
        await client.until_served("gpt-fake")
        (engine,) = client.core.fleet
        for number in range(3):
            status, answer = await client.ask(max_tokens=10 + number)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "yes")
        assert server.num_closed == 2
        assert list(client.core.fleet) == [engine]


async def test_a_dead_server_is_not_listed_and_loses_its_prefixes(process: FakeProcess) -> None:
    async with core_of({"url": process.url}) as client:
        await client.until_served("gpt-fake")
        (engine,) = client.core.fleet
        await client.said()
        process.kill()
        async with asyncio.timeout(20):
            while client.num_engines:  # noqa: ASYNC110 - without any call
                await asyncio.sleep(0.01)
        assert await client.models() == []
        assert not engine.is_alive
        await asyncio.to_thread(process.start)
        await client.until_served("gpt-fake")
        assert [view.num_contexts for view in client.core.fleet.views()] == [0]


@pytest.mark.parametrize("has_other", [True, False])
async def test_a_chat_that_was_cut_off_is_not_continued_with_another_answer(
    process: FakeProcess, has_other: bool
) -> None:
    other = FakeOpenAI(reply="another answer")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_app(other.app()))
        client = await stack.enter_async_context(core_of({"url": process.url}))
        await client.until_served("gpt-fake")
        events = client.events("/v1/chat/completions", chat())
        seen = [await anext(events) for _ in range(3)]
        if has_other:
            await stack.enter_async_context(_second_server(client, f"{url}/v1"))
            await client.until_served("gpt-fake", times=2)
        process.kill()
        seen += [event async for event in events]
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in seen[:-1])
        assert WORDS.startswith(text), text
        assert text
        assert process.url in seen[-1]["error"]["message"]


async def test_a_completion_that_was_cut_off_is_continued(process: FakeProcess) -> None:
    """Another server gets the prompt and the text so far, and continues it."""
    other = FakeOpenAI(reply="the end")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_app(other.app()))
        client = await stack.enter_async_context(core_of({"url": process.url}))
        await client.until_served("gpt-fake")
        events = client.events("/v1/completions", COMPLETION)
        seen = [await anext(events) for _ in range(3)]
        await stack.enter_async_context(_second_server(client, f"{url}/v1"))
        await client.until_served("gpt-fake", times=2)
        process.kill()
        seen += [event async for event in events]
        text = "".join(event["choices"][0]["text"] for event in seen if event["choices"])
        assert text.endswith("the end")
        (body,) = other.bodies
        assert body["prompt"] == "x" + text.removesuffix("the end")


@pytest.mark.parametrize("started_at", [1.0, 2.0])
async def test_a_server_that_was_restarted_is_known_by_its_start_time(started_at: float) -> None:
    """Its cache is empty, so its engine and the prefixes of that engine are forgotten."""
    fake = FakeOpenAI(owned_by="vllm", responses={"/metrics": _metrics(1.0)})
    async with AsyncExitStack() as stack:
        client = await in_front(stack, fake)
        (engine,) = client.core.fleet
        await client.said()
        async with asyncio.timeout(20):
            while _num_waiting(client) != 0:  # noqa: ASYNC110 - the first metrics were read
                await asyncio.sleep(0.01)
            fake.responses["/metrics"] = _metrics(started_at, num_waiting=7)
            while _num_waiting(client) != 7:  # noqa: ASYNC110 - the new metrics were read
                await asyncio.sleep(0.01)
            while engine.is_alive and started_at != 1.0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.is_alive == (started_at == 1.0)
        assert await client.said() == fake.reply


def _metrics(started_at: float, num_waiting: int = 0) -> str:
    running = 'vllm:num_requests_running{engine="0"} 0.0\n'
    waiting = f'vllm:num_requests_waiting{{engine="0"}} {num_waiting}.0\n'
    return f"process_start_time_seconds {started_at}\n{running}{waiting}"


def _num_waiting(client: Client) -> int | None:
    loads = [e.runtime.server_load for e in client.core.fleet if e.runtime is not None]
    return loads[0].num_waiting if loads and loads[0] is not None else None


# A server that hangs


async def test_a_server_that_no_longer_answers_is_lost(process: FakeProcess) -> None:
    """The server is stopped by SIGSTOP, so that it accepts connections but never answers."""
    other = FakeOpenAI(reply="from the other")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_app(other.app()))
        client = await stack.enter_async_context(
            core_of({"url": process.url}, engine_heartbeat_timeout=2.0)
        )
        await client.until_served("gpt-fake")
        process.send(signal.SIGSTOP)
        asking = asyncio.create_task(client.said())
        await stack.enter_async_context(_second_server(client, f"{url}/v1"))
        assert await asking == "from the other"
        process.send(signal.SIGCONT)
        await client.until_served("gpt-fake", times=2)


def _second_server(client: Client, url: str) -> object:
    config = servers.CoreConfig(servers=(servers.UpstreamServer(url=url),))
    return servers.Upstreams(config, client.core.fleet, client.core.clock).followed()


class BlockingServer(FakeOpenAI):
    """Answers nothing else while it computes for two seconds, as many small servers do."""

    is_busy = False

    async def _models(self) -> Response:
        while self.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super()._models()

    async def _completions(self, request: Request) -> Response:
        self.is_busy = True
        await asyncio.sleep(2.0)
        self.is_busy = False
        return await super()._completions(request)


@pytest.mark.parametrize("owner", ["me", "unknown"])
async def test_a_server_that_is_busy_with_a_call_may_be_silent(owner: str) -> None:
    server = BlockingServer(owned_by=owner)
    async with AsyncExitStack() as stack:
        client = await in_front(stack, server, engine_heartbeat_timeout=0.5)
        (engine,) = client.core.fleet
        assert await client.said() == server.reply
        assert engine.is_alive
        assert len(server.bodies) == 1
