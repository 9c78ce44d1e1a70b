"""Embeddings and log probabilities of prompts: requests to engines that belong to no session and
leave no state."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from pydantic import SecretStr

from parrot.gateway.prompt_tokens import prompt_tokens
from parrot.gateway.turns import revealed
from parrot.protocol.engine_api import CHARS_PER_TOKEN, EmbedRequest, ScoreRequest
from parrot.protocol.errors import (
    InvalidRequest,
    ModelNumerics,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    Unavailable,
)
from parrot.protocol.sampling import Logprobs
from parrot.serve.config import CoreConfig
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.serve.execution.run import RetriesExhausted, final_error, needs_ping
from parrot.serve.tenants.limits import Meters, QueuedByTenant, require_share
from parrot.serve.tenants.table import TenantTable

Input = list[int] | str
"""Token ids; text for engines whose contexts are text."""

_MAX_FAILED = 4  # Failed attempts after which the request fails.
# Seconds to wait if all engines are full: without a `Retry-After`, and at most.
_PAUSE_S, _MAX_PAUSE_S = 0.5, 60.0
_MAX_INPUTS = 64  # Inputs per request to an engine.
_MAX_UNITS = 65_536  # Tokens or characters per request to an engine, except for one longer input.
_PRIORITY = 2**30  # Lower than that of all calls, so long texts are computed in small chunks.


class DirectRequests:
    """Sends inputs directly to a model's engines, without ServeCore's queue. The inputs wait at the
    engine, after its calls. At most `max_queue_size` requests are in flight. Raises `NotFound` for
    the model, `NoEngine`, `QueueFull`, `PromptTooLong` and the engine's errors."""

    def __init__(
        self,
        fleet: Fleet,
        tenants: TenantTable,
        meters: Meters | None,
        require_room: Callable[[str], None],
        config: CoreConfig,
    ) -> None:
        """`meters`: None if no tenant has limits. `require_room` raises `QueueFull`."""
        self._tenants = tenants
        self._meters = meters
        self._fleet = fleet
        self._require_room = require_room
        self._aliases = config.model_aliases
        self._limit = config.global_scheduler.max_queue_size
        self._in_flight = QueuedByTenant()

    async def embed(
        self,
        tenant: str,
        model: str,
        given: Sequence[Input],
        traceparent: str = "",
        request_id: str = "",
        client_key: SecretStr | None = None,
        extra: dict[str, Any] | None = None,
    ) -> tuple[list[str], int]:
        """The embedding of each input as base64 of little-endian float32, and the number of tokens
        of all inputs. `traceparent`: the caller's span. `extra`: see `takes_extra`."""
        request = EmbedRequest.model_construct(
            priority=_PRIORITY,
            cache_salt=self._tenants.cache_salt(tenant),
            tenant=tenant,
            weight=self._tenants.weigh(tenant),
            traceparent=traceparent,
            request_id=request_id,
            client_key=revealed(client_key),
            inputs=[],
            extra=extra or None,
        )
        model = self._aliases.get(model, model)
        answers, num_tokens = await self._send_all(tenant, model, given, request)
        return [one for answer in answers for one in answer.embeddings], num_tokens

    def takes_extra(self, model: str) -> bool:
        """Whether all engines of the model forward further fields to a server."""
        engines = self._engines(self._aliases.get(model, model))
        return all("extra" in (one.info.capabilities.features or ()) for one in engines)

    async def score(
        self,
        tenant: str,
        model: str,
        given: Sequence[Input],
        num_top: int,
        max_tokens: int,
        traceparent: str = "",
        client_key: SecretStr | None = None,
    ) -> tuple[list[Logprobs], int]:
        """The log probabilities of each input's tokens (see `ScoreResponse`), and the number of
        tokens of all inputs. Raises `InvalidRequest` for more than `max_tokens`."""
        model = self._aliases.get(model, model)
        request = ScoreRequest.model_construct(
            priority=_PRIORITY,
            cache_salt=self._tenants.cache_salt(tenant),
            tenant=tenant,
            weight=self._tenants.weigh(tenant),
            traceparent=traceparent,
            client_key=revealed(client_key),
            inputs=[],
            num_top=num_top,
        )
        answers, num_tokens = await self._send_all(tenant, model, given, request, max_tokens)
        found: list[Logprobs] = [one for answer in answers for one in answer.logprobs]
        tokenizer = self._fleet.tokenizer(model)
        if tokenizer is not None:
            for one in found:
                one.tokens = tokenizer.encoder.vocabulary
        return found, num_tokens

    async def _send_all(
        self,
        tenant: str,
        model: str,
        given: Sequence[Input],
        request: EmbedRequest,
        max_tokens: int | None = None,
    ) -> tuple[list[Any], int]:
        """The answers to copies of `request`, each with some of the inputs, and the number of
        tokens of all inputs. The tokens are charged to the tenant."""
        inputs = await self._inputs(model, given)
        count = sum(len(i) if isinstance(i, list) else len(i) // CHARS_PER_TOKEN for i in inputs)
        if max_tokens is not None and count > max_tokens:
            text = (
                f"the prompts have {count} tokens; the limit for log probabilities is {max_tokens}"
            )
            raise InvalidRequest(text, param="prompt")
        async with self._queue_slot(tenant, count):
            self._check_lengths(model, inputs)
            batches = _batches(inputs)
            copies = [request.model_copy(update={"inputs": batch}) for batch in batches]
            answers = [await self._send(model, copy) for copy in copies]
        num_tokens: int = sum(answer.prompt_tokens for answer in answers)
        if self._meters is not None:
            self._meters.charge(tenant, num_tokens - count)
        return answers, num_tokens

    async def _inputs(self, model: str, given: Sequence[Input]) -> list[Input]:
        tokenizer = self._fleet.tokenizer(model)
        inputs: list[Input] = []
        for index, one in enumerate(given):
            if not one:
                raise InvalidRequest(f"input {index} is empty", param="input")
            if isinstance(one, str) and tokenizer is not None:
                inputs.append(await prompt_tokens(one, {}, model, tokenizer))
                await asyncio.sleep(0)  # Let other tasks run.
            else:
                inputs.append(one)
        return inputs

    @asynccontextmanager
    async def _queue_slot(self, tenant: str, num_tokens: int) -> AsyncIterator[None]:
        self._require_room(tenant)
        if self._in_flight.total() >= self._limit:
            require_share(tenant, self._limit, self._tenants.weigh, None, self._in_flight)
        self._in_flight.enter(tenant)
        try:
            meters = self._meters
            with nullcontext() if meters is None else meters.running(tenant, num_tokens):
                yield
        finally:
            self._in_flight.leave(tenant)

    def _check_lengths(self, model: str, inputs: Sequence[Input]) -> None:
        """Raises `PromptTooLong` for an input that is too long for all engines of the model."""
        engines = self._engines(model)
        if not engines:
            raise self._fleet.unserved_error([model], param="model")
        limit = max(engine.max_len for engine in engines)
        for index, given in enumerate(inputs):
            if isinstance(given, list) and len(given) > limit:
                text = f"input {index} has {len(given)} tokens; the limit is {limit}"
                raise PromptTooLong(text, param="input")

    def _engines(self, model: str) -> list[Engine]:
        return [engine for engine in self._fleet if engine.info.model == model]

    async def _send(self, model: str, request: EmbedRequest) -> Any:
        """Send the request to one engine after another, until one succeeds."""
        failed: list[int] = []
        while True:
            engine = self._choose(model, request.inputs, failed)
            try:
                answer = await _answer(engine, request)
            except ParrotError as error:
                if needs_ping(error):
                    await self._fleet.check_reachable(engine)
                failed.append(engine.id)
                is_final = isinstance(error, InvalidRequest | ModelNumerics | RetriesExhausted)
                if is_final or len(failed) == _MAX_FAILED or not self._engines(model):
                    raise final_error(engine, error) from None
                if isinstance(error, QuotaExceeded) and len(failed) >= len(self._engines(model)):
                    given_s = error.retry_after_s
                    await asyncio.sleep(_PAUSE_S if given_s is None else min(given_s, _MAX_PAUSE_S))
            else:
                return answer

    def _choose(self, model: str, inputs: Sequence[Input], failed: Collection[int]) -> Engine:
        """The least loaded engine. Engines that have failed before come last."""
        longest = max(len(given) if isinstance(given, list) else 0 for given in inputs)
        engines = [engine for engine in self._engines(model) if engine.max_len >= longest]
        if not engines:
            raise self._fleet.unserved_error([model], param="model")
        return min(engines, key=lambda one: (one.id in failed, self._fleet.num_requests(one)))


async def _answer(engine: Engine, request: EmbedRequest) -> Any:
    """The engine's answer. Raises `Unavailable` if the engine is lost meanwhile."""
    client = engine.client
    asked: asyncio.Task[Any] = asyncio.create_task(
        client.score(request) if isinstance(request, ScoreRequest) else client.embed(request)
    )
    engine.direct_requests.add(asked)
    try:
        return await asked
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if engine.is_alive or (current is not None and current.cancelling()):
            raise
        raise Unavailable("the engine was lost") from None
    finally:
        engine.direct_requests.discard(asked)


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
