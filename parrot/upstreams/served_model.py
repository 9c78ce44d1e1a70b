"""One model of a server, and the engine that runs its calls."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.probe import ModelEntry
from parrot.engine.openai.service import OpenAIService
from parrot.engine.openai.upstream import TemporaryFailure
from parrot.protocol.engine_api import HeartbeatRequest
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.upstreams.hosted_engine import HostedEngine
from parrot.utils.clock import Clock
from parrot.utils.ids import new_token


async def wait_until_set(event: asyncio.Event, clock: Clock, most_s: float) -> bool:
    """Wait for the event, at most `most_s` seconds. Returns whether it is set."""
    waits = [asyncio.ensure_future(clock.sleep(most_s)), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return event.is_set()


class ServedModel:
    """Owns the model's engine, from its registration to its loss."""

    def __init__(
        self,
        card: ModelEntry,
        config: OpenAIConfig,
        fleet: Fleet,
        clock: Clock,
        environ: Mapping[str, str],
        require_server: Callable[[], Awaitable[None]],
        *,
        forwards_key: bool,
    ) -> None:
        self.card = card
        self._fleet = fleet
        self._clock = clock
        self._service = OpenAIService(
            config,
            clock=clock,
            environ=environ,
            backoff=self._retries_here,
            forwards_key=forwards_key,
        )
        self._client = HostedEngine(self._service, new_token(), require_server, self._is_alone)
        self._engine: Engine | None = None  # None: not registered yet.

    @property
    def has_serial_answer(self) -> bool:
        """Whether any other request to the server would cut off a running answer."""
        return self._service.has_serial_answer

    async def serve(self, answered_at: Callable[[], float], interval_s: float) -> str:
        """Register the engine and renew its lease. Returns the reason when the engine is lost or
        must be replaced.

        `answered_at` returns when the server last answered a request for its models. Without an
        answer, the lease is not renewed, unless the server may be busy with a call."""
        await self._service.start()
        info = self._service.engine_info()
        info = info.model_copy(update={"incarnation": await self._client.incarnation()})
        engine_id = await self._fleet.register(info, self._client)
        self._engine = engine = self._fleet.engines[engine_id]
        renewed_at = self._clock.now()
        while not await wait_until_set(self._client.closed, self._clock, interval_s):
            if self._service.server_restarted and not self._fleet.num_requests(engine):
                return "the server was restarted, and its cache is empty"
            last = max(answered_at(), self._service.answered_at)
            if last >= renewed_at or self._service.may_be_silent:
                renewed_at = self._clock.now()
                self._renew(engine)
        return "its client was closed"

    def lose(self, reason: str, *, if_idle: bool = False) -> None:
        """Remove the engine, if it is registered. `if_idle`: only if it has no requests."""
        engine = self._engine
        if engine is not None and not (if_idle and self._fleet.num_requests(engine)):
            self._fleet.lose(engine, reason)

    def _renew(self, engine: Engine) -> None:
        beat = HeartbeatRequest(
            engine_id=engine.id,
            engine_name=engine.info.engine_name,
            runtime_info=self._service.runtime_info({}),
        )
        self._fleet.heartbeat(beat)

    def _retries_here(self, error: Exception) -> bool:
        """Whether to send the request to this server again. ServeCore handles all other errors: it
        pings the server, waits, or sends the request to another server of the pool."""
        return isinstance(error, TemporaryFailure) and self._is_alone()

    def _is_alone(self) -> bool:
        others = [e for e in self._fleet if e is not self._engine]
        return all(other.info.model != self.card.id for other in others)
