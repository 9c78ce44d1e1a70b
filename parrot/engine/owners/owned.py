"""One ServeCore's view of an engine that it shares with others."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from parrot.engine.owners.share import Share
from parrot.engine.service import EVERYTHING, EngineService, Namespace, ServiceState
from parrot.protocol.engine_api import (
    NO_PARENT,
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    FillPiece,
    FillRequest,
    FillResponse,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.engine_client import OnChunk
from parrot.protocol.errors import Cancelled

Request = TypeVar("Request", FillPiece, FillRequest, GenerateRequest)


class OwnedService:
    """An `EngineService` in which there are no contexts but those that are made by it. `reset`
    frees these alone; starting and closing are left to the owner of the whole."""

    def __init__(self, service: EngineService, namespace: Namespace, share: Share) -> None:
        self._service = service
        self._namespace = namespace
        self._share = share
        self._contexts: set[int] = set()  # that requests have named and nobody has freed
        self._reads: set[asyncio.Future[EmbedResponse | ScoreResponse]] = set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def state(self) -> ServiceState:
        return self._service.state()

    async def prepare(self, request: GenerateRequest) -> None:
        await self._service.prepare(request)

    async def fill(self, request: FillRequest) -> FillResponse:
        return await self._service.fill(self._renamed(request))

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        return await self._service.generate(self._generation(request), on_chunk)

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse]:
        async with aclosing(self._service.generate_stream(self._generation(request))) as events:
            async for event in events:
                yield event

    def follow(self, context_id: int) -> AsyncGenerator[StreamChunk]:
        return self._service.follow(self._namespace.outer(context_id))

    async def read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        reading = asyncio.ensure_future(self._service.read(request))
        self._reads.add(reading)
        try:
            await asyncio.wait((reading,))
            if reading.cancelled():
                raise Cancelled("the engine was reset")
            return reading.result()
        finally:
            self._reads.discard(reading)
            reading.cancel()

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        outer = [self._namespace.outer(context_id) for context_id in context_ids]
        self._contexts.difference_update(outer)
        return await self._service.free_contexts(outer)

    async def reset(self) -> None:
        for reading in self._reads:
            reading.cancel()
        contexts, self._contexts = self._contexts, set()
        if contexts and self.state() is ServiceState.READY:
            await self._service.free_contexts(list(contexts))

    def runtime_info(
        self, told: Mapping[int, int] | None = None, whose: Namespace = EVERYTHING
    ) -> RuntimeInfo:
        space = self._namespace
        if told is not None:
            told = {space.outer(context_id): count for context_id, count in told.items()}
        info = self._service.runtime_info(told, space)
        info.outputs = [
            part.model_copy(update={"context_id": space.inner(part.context_id)})
            for part in info.outputs
        ]
        return self._share.told(info)

    def engine_info(self) -> EngineInfo:
        """Say that leases tell what may be used of it, but for an equal part of its host."""
        info = self._service.engine_info()
        on_host = info.host_tokens_capacity // self._namespace.count
        return info.model_copy(update={"is_leased": True, "host_tokens_capacity": on_host})

    def tokenizer(self) -> TokenizerResponse | None:
        return self._service.tokenizer()

    def check_integrity(self) -> None:
        self._service.check_integrity()

    def _generation(self, request: GenerateRequest) -> GenerateRequest:
        fills = [self._renamed(piece) for piece in request.fills]
        return self._renamed(request).model_copy(update={"fills": fills})

    def _renamed(self, request: Request) -> Request:
        context_id, parent_id = request.context_id, request.parent_context_id
        outer = self._namespace.outer(context_id)
        self._contexts.add(outer)
        parent = NO_PARENT if parent_id == NO_PARENT else self._namespace.outer(parent_id)
        return request.model_copy(update={"context_id": outer, "parent_context_id": parent})
