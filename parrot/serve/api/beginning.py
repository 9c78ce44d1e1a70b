"""Endpoints that begin sessions."""

from collections.abc import Callable
from typing import Any

from fastapi import Request

from parrot.protocol.endpoint import Endpoint
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.core import ServeCore
from parrot.serve.shards.affinity import Affinity, Load


def load_of(core: ServeCore) -> Load:
    num_placed = sum(core.fleet.load(engine) for engine in core.fleet)
    kv = round(100 * core.fleet.kv_promised)
    return Load(len(core.sessions), core.num_queued + num_placed, kv)


class Beginning(Endpoint):
    """A session that it begins has its place on its application's shard."""

    def __init__(
        self,
        core: ServeCore,
        begun: Callable[[Any], SessionCreateRequest | None],
        *args: Any,
        **options: Any,
    ) -> None:
        """`begun`: the session that a request begins; None if it does not."""
        super().__init__(*args, **options)
        self._core = core
        self._begun = begun
        self._affinity: Affinity | None = None
        if (shards := core.config.shards) is not None:
            self._affinity = Affinity(core.config.shard, shards.cores, lambda: load_of(core))

    async def _arguments(self, request: Request) -> dict[str, Any]:
        arguments = await super()._arguments(request)
        begun = self._begun(arguments["request"])
        if self._affinity is not None and begun is not None:
            tenant = self._core.tenant(begun.api_key)
            self._affinity.check(request, tenant, begun.apps or ())
        return arguments
