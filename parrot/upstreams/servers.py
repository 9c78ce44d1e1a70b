"""Follows the model lists of servers, and keeps one engine registered for each model.

GET URL/models -> [A, B]        engines: A, B
GET URL/models -> [A, C]        engines: A, C    B is lost, C joins
no answer                       engines: A, C    as before
a call cannot connect           engines: C       its ping fails: A is lost
GET URL/models -> [A, C]        engines: A, C    A joins again
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from parrot.engine.config import OpenAIConfig, parse_engine_config
from parrot.engine.openai.probe import ModelEntry, list_models
from parrot.engine.openai.service import OpenAIService
from parrot.engine.openai.upstream import server_client
from parrot.protocol.engine_api import HeartbeatRequest
from parrot.protocol.errors import ParrotError
from parrot.serve.config import UpstreamServer
from parrot.serve.execution.fleet import Fleet
from parrot.upstreams.hosted_engine import HostedEngine
from parrot.utils.clock import Clock
from parrot.utils.ids import new_token
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_LIST_INTERVAL_S = 10.0  # Seconds between two reads of a model list. New models wait that long.
_FIRST_RETRY_S = 0.25  # Seconds until a server that did not answer is asked again, at first.
_HEARTBEATS_PER_LEASE = 3  # A lease survives two heartbeats that are late.
_DEFAULT_PORTS = {"http": 80, "https": 443}


def engine_config(server: UpstreamServer, model: str) -> OpenAIConfig:
    """The config of the engine for one model. Raises `ConfigError` for wrong keys in `engine`."""
    parts = urlsplit(server.url)
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    instance: dict[str, Any] = {"base_url": server.url, **server.engine.get("instance", {})}
    payload = {
        "engine_type": "openai",
        "engine_name": f"{model}@{parts.hostname}:{port}"[:256],
        "model": model,
        "host": parts.hostname,
        "port": port,
        **server.engine,
        "instance": instance,
    }
    config = parse_engine_config(payload, f"`servers`: {server.url}")
    assert isinstance(config, OpenAIConfig), config
    return config


class Upstreams:
    """The servers of the config key `servers`. Raises `ConfigError` for wrong keys in `engine`."""

    def __init__(
        self,
        servers: Sequence[UpstreamServer],
        fleet: Fleet,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._followers = [_Follower(server, fleet, clock, environ) for server in servers]

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """In the block, the models of the servers have engines."""
        tasks = TaskSet()
        for follower in self._followers:
            tasks.spawn(follower.run(), name=f"models of {follower.url}")
        try:
            yield
        finally:
            await tasks.close()
            for follower in self._followers:
                await follower.close()


class _Follower:
    """One server: its model list, and a task for each model."""

    def __init__(
        self, server: UpstreamServer, fleet: Fleet, clock: Clock, environ: Mapping[str, str]
    ) -> None:
        self.url = server.url
        self._server = server
        self._fleet = fleet
        self._clock = clock
        self._environ = environ
        self._http = server_client(engine_config(server, "any"), environ)
        self._tasks = TaskSet()
        self._served: dict[str, tuple[ModelEntry, asyncio.Task[None]]] = {}  # By model name.
        self._is_closing = False
        self._lost = asyncio.Event()  # An engine was lost since the last read of the list.

    async def run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                listed = await list_models(self._http)
            except ParrotError as error:
                if retry_s == _FIRST_RETRY_S:  # Not at each attempt.
                    logger.warning("%s: %s", self.url, error.message)
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, _LIST_INTERVAL_S)
            else:
                retry_s = _FIRST_RETRY_S
                self._follow(listed)
                await self._pause()

    async def close(self) -> None:
        """The engines stay registered: ServeCore ends their calls when it closes."""
        self._is_closing = True
        await self._tasks.close()
        await self._http.close()

    async def _pause(self) -> None:
        """Wait until the list should be read again."""
        self._lost.clear()
        waits = [
            asyncio.ensure_future(self._clock.sleep(_LIST_INTERVAL_S)),
            asyncio.ensure_future(self._lost.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _follow(self, listed: Sequence[ModelEntry]) -> None:
        wanted = self._server.models
        cards = {card.id: card for card in listed if card.id and (not wanted or card.id in wanted)}
        for name, (card, task) in list(self._served.items()):
            if cards.get(name) != card or task.done():
                task.cancel()
                del self._served[name]
        for name, card in cards.items():
            if name not in self._served:
                task = self._tasks.spawn(self._serve(name), name=f"{name} of {self.url}")
                self._served[name] = card, task

    async def _serve(self, model: str) -> None:
        """Keep the model's engine registered until this task is cancelled or the engine is lost.
        After a loss, the next answer of `/models` starts this again."""
        service = OpenAIService(
            engine_config(self._server, model), clock=self._clock, environ=self._environ
        )
        incarnation = new_token()
        client = HostedEngine(service, incarnation, self._require_server)
        await service.start()
        info = service.engine_info().model_copy(update={"incarnation": incarnation})
        engine_id = await self._fleet.register(info, client)
        try:
            while True:
                await self._clock.sleep(self._fleet.lease_s / _HEARTBEATS_PER_LEASE)
                beat = HeartbeatRequest(
                    engine_id=engine_id,
                    engine_name=info.engine_name,
                    runtime_info=service.runtime_info({}),
                )
                if self._fleet.heartbeat(beat).state == "unknown":
                    self._lost.set()
                    return
        finally:
            engine = self._fleet.engines.get(engine_id)
            if engine is not None and not self._is_closing:
                self._fleet.lose(engine, f"{self.url} no longer serves {model}")

    async def _require_server(self) -> None:
        await list_models(self._http)
