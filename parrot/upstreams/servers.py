"""Follows the model lists of servers, and keeps one engine registered for each model.

GET URL/models -> [A, B]        engines: A, B
GET URL/models -> [A, C]        engines: A, C    B is lost, C joins
HTTP 503, or a timeout          engines: A, C    as before
a call cannot connect           engines: C       its ping fails: A is lost
GET URL/models -> [A, C]        engines: A, C    A joins again
connection refused              no engines       except engines with calls
no answer for one lease         no engines       the leases expire

An answer of the server is the heartbeat of its engines. A server that restarts gets new engines,
because its cache is empty.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from parrot.engine.config import OpenAIConfig, parse_engine_config
from parrot.engine.openai.probe import ModelEntry, list_models
from parrot.engine.openai.upstream import server_client
from parrot.protocol.errors import ParrotError, Unavailable
from parrot.protocol.transport import Unreachable
from parrot.serve.config import CoreConfig, UpstreamServer
from parrot.serve.execution.fleet import Fleet
from parrot.upstreams.served_model import ServedModel, wait_until_set
from parrot.utils.clock import Clock
from parrot.utils.config import ConfigError
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

# Largest number of seconds between two reads of a model list. New models wait that long.
_LIST_INTERVAL_S = 10.0
# Seconds until a server that did not answer is asked again. Each failure doubles them.
_FIRST_RETRY_S, _MAX_RETRY_S = 0.25, 2.0
_READS_PER_LEASE = 3  # A lease survives two reads without an answer.
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
    """The servers of the config key `servers`. Raises `ConfigError` for wrong keys in `engine`, and
    if a server would get ServeCore's own API keys."""

    def __init__(
        self,
        config: CoreConfig,
        fleet: Fleet,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        urls = [server.url for server in config.servers if server.forward_client_key]
        if urls and config.needs_keys:
            raise ConfigError(
                "`servers`: `forward_client_key` cannot be used with `api_keys` or `keys_file`: "
                f"clients would send these keys, and {urls[0]} would get them"
            )
        self._followers = [_Follower(one, fleet, clock, environ) for one in config.servers]

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
        self._interval_s = min(_LIST_INTERVAL_S, fleet.lease_s / _READS_PER_LEASE)
        self._tasks = TaskSet()
        self._served: dict[str, tuple[ServedModel, asyncio.Task[None]]] = {}  # By model name.
        self._is_closing = False
        self._answered_at = -math.inf  # When the server last answered a request for the list.
        self._lost = asyncio.Event()  # An engine was lost since the last read of the list.

    async def run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self._read_list()
            except ParrotError as error:
                if retry_s == _FIRST_RETRY_S:  # Not at each attempt.
                    logger.warning("%s: %s", self.url, error.message)
                self._record_failure(error)
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
            else:
                retry_s = _FIRST_RETRY_S
                self._lost.clear()
                await wait_until_set(self._lost, self._clock, self._interval_s)

    async def close(self) -> None:
        """The engines stay registered: ServeCore ends their calls when it closes."""
        self._is_closing = True
        await self._tasks.close()
        await self._http.close()

    async def _read_list(self) -> None:
        if any(model.has_serial_answer for model, _ in self._served.values()):
            return
        listed = await list_models(self._http)
        self._answered_at = self._clock.now()
        self._follow(listed)

    def _record_failure(self, error: ParrotError) -> None:
        if not isinstance(error, Unavailable):
            self._answered_at = self._clock.now()  # The server answered with an error.
        elif isinstance(error, Unreachable):
            for model, _ in self._served.values():
                model.lose(error.message, if_idle=True)

    def _follow(self, listed: Sequence[ModelEntry]) -> None:
        wanted = self._server.models
        cards = {card.id: card for card in listed if card.id and (not wanted or card.id in wanted)}
        for name, (model, task) in list(self._served.items()):
            if cards.get(name) != model.card or task.done():
                task.cancel()
                del self._served[name]
        for name, card in cards.items():
            if name not in self._served:
                config = engine_config(self._server, name)
                model = ServedModel(
                    card,
                    config,
                    self._fleet,
                    self._clock,
                    self._environ,
                    self._require_server,
                    forwards_key=self._server.forward_client_key,
                )
                task = self._tasks.spawn(self._serve(model), name=f"{name} of {self.url}")
                self._served[name] = model, task

    async def _serve(self, model: ServedModel) -> None:
        """Serve the model until this task is cancelled or its engine is lost. After a loss, the
        next answer of `/models` starts a new task."""
        reason = f"{self.url} no longer serves {model.card.id}"
        try:
            reason = await model.serve(lambda: self._answered_at, self._interval_s)
        finally:
            if not self._is_closing:
                model.lose(reason)
                self._lost.set()

    async def _require_server(self) -> None:
        await list_models(self._http)
