"""The connection of a channel breaks while outputs are generated. No text is lost, repeated or
late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import GenerateRequest, StreamChunk
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app

INSTANCE = {"step_s": 0.002, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}


class Relay:
    """Passes bytes between clients and a server, and can break connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._channels: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, to_writer), self._pass(to_reader, writer))
        for end in (writer, to_writer):
            end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if data.startswith(b"POST /channel"):
                self._channels.append(writer)
            writer.write(data)
        writer.close()

    def break_channels(self) -> int:
        """Break all channels. Returns their number."""
        channels, self._channels = self._channels, []
        for writer in channels:
            writer.transport.abort()
        return len(channels)


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[EngineClient, Relay]]:
    config = SimConfig(instance=INSTANCE)
    service = SimService(config)
    await service.start()
    async with serve_app(create_app(service, ReorderBuffer(MonotonicClock()), config)) as url:
        relay = Relay(urlsplit(url).port or 0)
        server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = EngineClient(HttpClient(f"http://127.0.0.1:{port}"))
        yield client, relay
        await client.close()
        server.close()
    service.check_integrity()
    await service.close()


def wanted(context_id: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {
            "context_id": context_id,
            "fills": [{"context_id": context_id, "token_ids": list(b"tell me")}],
            "sampling_config": {"max_gen_length": 150} | sampling,
        }
    )


class Output:
    """The chunks of an output. A test can wait for a number of tokens."""

    def __init__(self) -> None:
        self.chunks: list[StreamChunk] = []
        self._came = asyncio.Event()

    def take(self, chunk: StreamChunk) -> None:
        self.chunks.append(chunk)
        self._came.set()

    @property
    def ids(self) -> list[int]:
        return [i for chunk in self.chunks for i in chunk.ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    async def has(self, num_tokens: int) -> None:
        async with asyncio.timeout(20):
            while len(self.ids) < num_tokens:
                self._came.clear()
                await self._came.wait()


async def test_the_rest_of_each_output_is_streamed_after_a_break() -> None:
    async with relayed() as (client, relay):
        outputs = [Output() for _ in range(4)]
        samplings: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"stop_str": ["\x00"]}, {}]
        running = [
            asyncio.create_task(client.generate(wanted(i, **sampling), output.take))
            for i, (sampling, output) in enumerate(zip(samplings, outputs, strict=True), 1)
        ]
        await asyncio.gather(*(output.has(20) for output in outputs))
        assert relay.break_channels() == 1
        await asyncio.gather(*(output.has(120) for output in outputs))
        assert not any(call.done() for call in running)
        # A new request opens a new channel.
        another = Output()
        answer = await client.generate(wanted(9), another.take)
        for output, call in zip([*outputs, another], [*running, None], strict=True):
            whole = answer if call is None else await call
            # The answer may arrive before the last chunks. It contains their tokens.
            assert output.ids == whole.generated_ids[: len(output.ids)]
            assert whole.generated_text.startswith(output.text)
        likely = [chunk.logprobs for chunk in outputs[1].chunks]
        assert [len(part) for part in likely if part] == [len(c.ids) for c in outputs[1].chunks]
        assert relay.break_channels() == 1


async def test_an_output_that_is_cancelled_after_a_break_leaves_nothing() -> None:
    async with relayed() as (client, relay):
        output = Output()
        call = asyncio.create_task(client.generate(wanted(1), output.take))
        await output.has(10)
        relay.break_channels()
        await output.has(30)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert (await client.generate(wanted(2, max_gen_length=5))).generated_ids
