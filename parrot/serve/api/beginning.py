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


def beginning(
    core: ServeCore, endpoint: Endpoint, begun: Callable[[Any], SessionCreateRequest | None]
) -> Endpoint:
    """The endpoint, of which each session that it begins has its place on its application's shard.
    `begun`: the session that a request begins; None if it does not."""
    if (shards := core.config.shards) is None:
        return endpoint
    affinity = Affinity(core.config.shard, shards.cores, lambda: load_of(core))

    def check(request: Request, arguments: dict[str, Any]) -> None:
        if (session := begun(arguments["request"])) is not None:
            tenant = core.tenant(session.api_key)
            affinity.check(request, tenant, session.apps or ())

    return endpoint.stepping(check)
