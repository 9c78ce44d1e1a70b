"""ServeCore's client of an engine in the same process: payloads go over as objects."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from parrot.engine.service import EngineService
from parrot.protocol.engine_api import (
    FillRequest,
    FillResponse,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import NotFound


class EngineLink(EngineClient):
    """A message takes half of `rtt_s`, an abort no time. A service that was closed answers like a
    dead process: every exchange, also one under way, raises `Unavailable`."""

    def __init__(self, service: EngineService, rtt_s: float) -> None:
        self._service = service
        self._way_s = rtt_s / 2

    async def close(self) -> None:
        """The service is not the link's to close."""

    async def fill(self, request: FillRequest) -> FillResponse:
        await self._travel()
        response = await self._service.fill(request)
        await self._travel()
        return response

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        await self._travel()
        response = await self._service.generate(request)
        await self._travel()
        return response

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        await self._travel()
        async with aclosing(self._service.generate_stream(request)) as events:
            async for event in events:
                await self._travel()  # far less than a step: messages do not queue
                yield event

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        await self._travel()
        num_tokens = await self._service.free_contexts(context_ids)
        await self._travel()
        return num_tokens

    async def ping(self) -> RuntimeInfo:
        await self._travel()
        info = self._service.runtime_info()
        await self._travel()
        return info

    async def tokenizer(self) -> TokenizerResponse:
        response = self._service.tokenizer()
        if response is None:
            raise NotFound("this engine's contexts are text: it has no tokenizer")
        return response

    async def _travel(self) -> None:
        if self._way_s:
            await asyncio.sleep(self._way_s)
