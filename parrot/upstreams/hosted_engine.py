"""The client of an engine that runs in the same process."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from parrot.engine.openai.upstream import TemporaryFailure
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import (
    EmbedRequest,
    EmbedResponse,
    FillRequest,
    FillResponse,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    ScoreRequest,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.engine_client import EngineClient, OnChunk
from parrot.protocol.errors import NotFound
from parrot.serve.execution.run import RetriesExhausted

_R = TypeVar("_R")


class HostedEngine(EngineClient):
    """Each request is a call of the engine's service. Requests arrive in the order of the calls, so
    the HTTP server's reordering is not needed. `close` closes the service."""

    def __init__(
        self,
        service: EngineService,
        incarnation: str,
        require_server: Callable[[], Awaitable[None]],
        is_alone: Callable[[], bool],
    ) -> None:
        """`require_server` raises `Unavailable` if the server does not answer. `is_alone`: no other
        engine has the model, so the service retries temporary failures."""
        self._service = service
        self._incarnation = incarnation
        self._require_server = require_server
        self._is_alone = is_alone
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()
        await self._service.close()

    async def fill(self, request: FillRequest) -> FillResponse:
        return await self._service.fill(request)

    def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> Coroutine[Any, Any, GenerateResponse]:
        return self._result(self._service.generate(request, on_chunk))

    def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        return self._service.generate_stream(request)

    def follow(self, context_id: int) -> AsyncGenerator[StreamChunk, None]:
        return self._service.follow(context_id)

    async def embed(self, request: EmbedRequest) -> EmbedResponse:
        response = await self._result(self._service.read(request))
        assert isinstance(response, EmbedResponse), response
        return response

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        response = await self._result(self._service.read(request))
        assert isinstance(response, ScoreResponse), response
        return response

    async def _result(self, work: Awaitable[_R]) -> _R:
        try:
            return await work
        except TemporaryFailure as error:
            if self._is_alone():
                raise RetriesExhausted(error.message) from error
            raise

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        return await self._service.free_contexts(context_ids)

    async def ping(self) -> RuntimeInfo:
        """Raises `Unavailable` if the server does not answer: then the engine is lost, and its
        calls run on another one."""
        await self._require_server()
        return self._service.runtime_info()

    async def incarnation(self) -> str:
        return self._incarnation

    async def tokenizer(self) -> TokenizerResponse:
        response = self._service.tokenizer()
        if response is None:
            raise NotFound("this engine's contexts are text: it has no tokenizer")
        return response
