"""Embeddings: requests to engines that belong to no session, and of which nothing is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from parrot.protocol.engine_api import EmbedRequest, EmbedResponse
from parrot.protocol.errors import (
    InvalidRequest,
    ModelNumerics,
    ParrotError,
    PromptTooLong,
    Unavailable,
)
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.serve.execution.run import final_error, is_broken
from parrot.serve.quotas import QueuedByTenant, require_share

Input = list[int] | str
"""Token ids, or text for engines whose contexts are text."""

_MAX_FAILED = 3  # attempts
_MAX_INPUTS = 64  # of one request to an engine
_MAX_UNITS = 65_536  # tokens or characters of one request to an engine, but for a longer input
_PRIORITY = 2**30  # behind calls, so that beside them a long text comes in small parts


class Embedder:
    """Asks the engines of a model, for at most `limit` programs at once. An input never waits for a
    turn in ServeCore's queue: it waits at the engine, behind the calls that are there."""

    def __init__(self, fleet: Fleet, require_room: Callable[[str], None], limit: int) -> None:
        """`require_room` raises `QueueFull` for a tenant."""
        self._fleet = fleet
        self._require_room = require_room
        self._limit = limit
        self._asking = QueuedByTenant()

    async def embed(
        self, tenant: str, model: str, inputs: Sequence[Input], traceparent: str = ""
    ) -> tuple[list[str], int]:
        """The embedding of each input, as base64 of little-endian float32, and the tokens of all.
        `traceparent`: the span of who asks. Raises `NotFound` for the model, `NoEngine`,
        `QueueFull`, `PromptTooLong` naming the input, and what the engine raises."""
        embeddings: list[str] = []
        num_tokens = 0
        async with self._place(tenant):
            self._check_lengths(model, inputs)
            for batch in _batches(inputs):
                request = EmbedRequest.model_construct(
                    priority=_PRIORITY, cache_salt=tenant, traceparent=traceparent, inputs=batch
                )
                answer = await self._ask(model, request)
                embeddings += answer.embeddings
                num_tokens += answer.prompt_tokens
        return embeddings, num_tokens

    @asynccontextmanager
    async def _place(self, tenant: str) -> AsyncIterator[None]:
        self._require_room(tenant)
        if self._asking.total() >= self._limit:
            require_share(tenant, self._limit, self._asking)
        self._asking.enter(tenant)
        try:
            yield
        finally:
            self._asking.leave(tenant)

    def _check_lengths(self, model: str, inputs: Sequence[Input]) -> None:
        """Raises `PromptTooLong` for what no engine of the model takes."""
        engines = self._engines(model)
        if not engines:
            raise self._fleet.unserved([model], param="model")
        limit = max(engine.max_len for engine in engines)
        for index, given in enumerate(inputs):
            if not given:
                raise InvalidRequest(f"input {index} is empty", param="input")
            if isinstance(given, list) and len(given) > limit:
                text = f"input {index} has {len(given)} tokens; the limit is {limit}"
                raise PromptTooLong(text, param="input")

    def _engines(self, model: str) -> list[Engine]:
        return [engine for engine in self._fleet if engine.info.model == model]

    async def _ask(self, model: str, request: EmbedRequest) -> EmbedResponse:
        """Ask one engine after the other, as runs go on elsewhere."""
        failed: list[int] = []
        while True:
            engine = self._choose(model, request.inputs, failed)
            try:
                answer = await _answer(engine, request)
            except ParrotError as error:
                if is_broken(error):
                    await self._fleet.answers(engine)
                failed.append(engine.id)
                is_final = isinstance(error, InvalidRequest | ModelNumerics)
                if is_final or len(failed) == _MAX_FAILED or not self._engines(model):
                    raise final_error(engine, error) from None
            else:
                return answer

    def _choose(self, model: str, inputs: Sequence[Input], failed: Collection[int]) -> Engine:
        """The engine with the least to do, if there are any of those that have not failed and do
        not drain."""
        fleet = self._fleet
        longest = max(len(given) if isinstance(given, list) else 0 for given in inputs)
        engines = [engine for engine in self._engines(model) if engine.max_len >= longest]
        if not engines:
            raise fleet.unserved([model], param="model")
        return min(
            engines, key=lambda one: (one.id in failed, fleet.is_draining(one), fleet.load(one))
        )


async def _answer(engine: Engine, request: EmbedRequest) -> EmbedResponse:
    """Raises `Unavailable` when the engine is lost meanwhile."""
    asked = asyncio.ensure_future(engine.client.embed(request))
    engine.direct.add(asked)
    try:
        return await asked
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if engine.is_alive or (current is not None and current.cancelling()):
            raise
        raise Unavailable("the engine was lost") from None
    finally:
        engine.direct.discard(asked)


def _batches(inputs: Sequence[Input]) -> list[list[Input]]:
    batches: list[list[Input]] = []
    num_units = 0
    for given in inputs:
        if not batches or len(batches[-1]) == _MAX_INPUTS or num_units + len(given) > _MAX_UNITS:
            batches.append([])
            num_units = 0
        batches[-1].append(given)
        num_units += len(given)
    return batches
