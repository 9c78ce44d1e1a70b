"""The client's side of a channel, with engines without channels, and channels that break."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from parrot.protocol.engine_api import GenerateRequest, StreamChunk
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import NotFound, ParrotError, Unavailable, UnsupportedField

ANSWER = {"generated_text": "ab", "generated_ids": [1, 2], "finish_reason": "stop", "usage": {}}
Events = list[tuple[str, bytes] | ParrotError]


class Engine:
    """A transport with scripted streams. It answers `/generate` when `answer` is set."""

    def __init__(self, **streams: Events) -> None:
        self.streams = streams
        self.opened: list[str] = []
        self.bodies: list[Any] = []
        self.answer = asyncio.Event()
        self.more: asyncio.Queue[tuple[str, bytes] | ParrotError] = asyncio.Queue()

    async def request(self, method: str, path: str, **options: Any) -> Any:
        self.bodies.append(options["body"])
        await self.answer.wait()
        return ANSWER

    async def stream(
        self, method: str, path: str, **options: Any
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        self.opened.append(path)
        for event in self.streams[path.strip("/")]:
            if isinstance(event, ParrotError):
                raise event
            yield event
        while True:
            if isinstance(event := await self.more.get(), ParrotError):
                raise event
            yield event

    async def close(self) -> None: ...


def chunks(context_id: int, *texts: str) -> tuple[str, bytes]:
    rows = ",".join(f'{{"context_id":{context_id},"ids":[],"text":"{t}"}}' for t in texts)
    return "chunks", f'{{"chunks":[{rows}]}}'.encode()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_engine_without_channels_streams_each_output() -> None:
    done = b'{"generated_text":"ab","generated_ids":[],"finish_reason":"stop","usage":{}}'
    stream: Events = [("chunk", b'{"ids":[1],"text":"a"}'), ("done", done)]
    engine = Engine(channel=[NotFound("no such path")], generate_stream=stream)
    client, found = EngineClient(engine), list[StreamChunk]()
    for _ in range(2):
        await client.generate(GenerateRequest(context_id=1), found.append)
    assert [chunk.text for chunk in found] == ["a", "a"]
    assert engine.opened == ["/channel", "/generate_stream", "/generate_stream"]
    await client.close()


async def test_a_broken_channel_is_reopened_without_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    follow: Events = [
        ("chunk", b'{"ids":[1,2,3],"text":"abx"}'),
        ("chunk", b'{"ids":[4],"text":"y"}'),
        ("done", b"{}"),
    ]
    engine = Engine(channel=[("open", b"{}")], follow=follow)
    client, found = EngineClient(engine), list[StreamChunk]()
    first = asyncio.create_task(client.generate(GenerateRequest(context_id=1), found.append))
    await settled()
    engine.more.put_nowait(chunks(1, "a", "b"))
    engine.more.put_nowait(chunks(9, "of another"))
    await settled()
    engine.more.put_nowait(Unavailable("gone"))
    await settled()
    second = asyncio.create_task(client.generate(GenerateRequest(context_id=2), found.append))
    await settled()
    engine.more.put_nowait(chunks(1, "lost"))  # Its first chunks may be missing.
    engine.more.put_nowait(chunks(2, "c"))
    await settled()
    engine.answer.set()
    assert (await first).generated_text == (await second).generated_text == "ab"
    assert [chunk.text for chunk in found] == ["a", "b", "x", "y", "c"]
    assert sorted(engine.opened) == ["/channel", "/channel", "/follow"]
    assert len({body["channel"] for body in engine.bodies}) == 2
    assert "a channel broke" in caplog.text
    await client.close()


async def test_an_output_that_cannot_be_followed_arrives_at_its_end() -> None:
    refusal = UnsupportedField("the server was asked for the whole answer at once")
    engine = Engine(channel=[("open", b"{}")], follow=[refusal])
    client, found = EngineClient(engine), list[StreamChunk]()
    call = asyncio.create_task(client.generate(GenerateRequest(context_id=1), found.append))
    await settled()
    engine.more.put_nowait(chunks(1, "a"))
    engine.more.put_nowait(Unavailable("gone"))
    await settled()
    engine.answer.set()
    assert (await call).generated_text == "ab"
    assert [chunk.text for chunk in found] == ["a"]
    assert sorted(engine.opened) == ["/channel", "/follow"]
    await client.close()


async def test_a_channel_that_sends_invalid_data_is_reopened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(channel=[("open", b"{}")])
    client, found = EngineClient(engine), list[StreamChunk]()
    engine.answer.set()
    await client.generate(GenerateRequest(context_id=1), found.append)
    engine.more.put_nowait(("chunks", b'{"chunks": 1}'))
    await settled()
    await client.generate(GenerateRequest(context_id=2), found.append)
    assert engine.opened == ["/channel", "/channel"]
    assert "a channel broke" in caplog.text
    await client.close()


@pytest.mark.parametrize(
    ("event", "message"),
    [(Unavailable("no engine"), "no engine"), (("done", b"{}"), "before it was open")],
)
async def test_a_channel_that_cannot_be_opened_fails_the_request(
    event: tuple[str, bytes] | ParrotError, message: str
) -> None:
    engine = Engine(channel=[event])
    client = EngineClient(engine)
    for _ in range(2):
        with pytest.raises(Unavailable, match=message):
            await client.generate(GenerateRequest(context_id=1), print)
    assert engine.opened == ["/channel", "/channel"]
    await client.close()


async def test_an_invalid_chunk_does_not_affect_other_outputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(channel=[("open", b"{}")])
    client, found = EngineClient(engine), list[StreamChunk]()

    def refuse(chunk: StreamChunk) -> None:
        raise RuntimeError("defect")

    requests = [
        (GenerateRequest(context_id=1), refuse),
        (GenerateRequest(context_id=2), found.append),
    ]
    calls = [asyncio.create_task(client.generate(*given)) for given in requests]
    await settled()
    engine.more.put_nowait(chunks(1, "a"))
    engine.more.put_nowait(chunks(2, "b"))
    await settled()
    engine.answer.set()
    await asyncio.gather(*calls)
    assert [chunk.text for chunk in found] == ["b"]
    assert "could not be processed" in caplog.text
    await client.close()
