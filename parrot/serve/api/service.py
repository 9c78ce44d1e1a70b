"""The service itself over HTTP: models, health, metrics, and engines that join."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import Request

from parrot.protocol.answers import Check
from parrot.protocol.endpoint import (
    LARGE,
    SMALL_BODY,
    Access,
    BodyRules,
    Described,
    Endpoint,
    Verb,
    api_key_of,
    knows_cluster_token,
    require_cluster_token,
)
from parrot.protocol.errors import AuthenticationFailed, NotFound
from parrot.protocol.public import ModelCard
from parrot.serve.core import ServeCore
from parrot.serve.tenants.table import Scope
from parrot.utils.metrics import CONTENT_TYPE


def service_endpoints(core: ServeCore) -> list[Endpoint]:
    def model(model_id: str) -> ModelCard:
        for card in core.models().data:
            if card.id == model_id:
                return card
        raise NotFound(f"unknown model: {model_id}", param="model")

    async def metrics() -> bytes:
        parts: list[bytes] = []
        for part in core.metrics():
            parts.append(part)
            await asyncio.sleep(0)  # others may have a turn
        return b"".join(parts)

    def with_key(path: str, verb: Verb, summary: str, *errors: int) -> Endpoint:
        endpoint = Endpoint(
            "GET", path, verb, summary, access=Access.API_KEY, described=Described(errors)
        )
        return endpoint.checked(key_check(core))

    return [
        with_key("/v1/models", core.models, "Models that are served now", 401, 403),
        with_key("/v1/models/{model_id:path}", model, "A model", 401, 403, 404),
        Endpoint("GET", "/health", _alive, "The process answers", access=Access.ANYBODY),
        _ready_endpoint(core),
        Endpoint(
            "GET",
            "/metrics",
            metrics,
            "Metrics for Prometheus (Bearer: the cluster token, or a key)",
            access=Access.METRICS,
            described=Described((401, 403), media_type=CONTENT_TYPE),
        ).checked(holder_of(core, Scope.METRICS)),
        *_engine_endpoints(core),
    ]


def key_check(core: ServeCore) -> Check:
    """Requests must have an API key, where there are any."""

    def check(request: Request) -> None:
        core.tenant(api_key_of(request))

    return check


def holder_of(core: ServeCore, scope: Scope) -> Callable[[Request], str]:
    """Says who asks: whoever has the cluster token, or a key with the scope. What it gives raises
    `AuthenticationFailed` and `PermissionDenied` for others."""
    token = core.config.cluster_token

    def holder(request: Request) -> str:
        if knows_cluster_token(request, token):
            return "operator"
        tenant = core.tenants.find_by_key(api_key_of(request) or "")
        if tenant is None:
            raise AuthenticationFailed(
                f"missing or wrong cluster token, or key with the scope `{scope}` "
                "(`Authorization: Bearer`)"
            )
        tenant.require(scope)
        return f"operator {tenant.id}"

    return holder


def _engine_check(core: ServeCore) -> Callable[[Request], str]:
    token = core.config.cluster_token

    def check(request: Request) -> str:
        require_cluster_token(request, token)
        return "engine"

    return check


def _engine_endpoints(core: ServeCore) -> list[Endpoint]:
    def of_engines(path: str, verb: Verb, summary: str, body: BodyRules, *errors: int) -> Endpoint:
        endpoint = Endpoint(
            "POST",
            path,
            verb,
            f"{summary} (Bearer: the cluster token)",
            access=Access.CLUSTER,
            body=body,
            described=Described(errors),
        )
        return endpoint.checked(_engine_check(core))

    return [
        of_engines(
            "/register_engine",
            core.register_engine,
            "An engine joins",
            SMALL_BODY,
            401,
            409,
            429,
            503,
        ),
        of_engines(
            "/engine_heartbeat", core.fleet.heartbeat, "An engine is alive", BodyRules(LARGE), 401
        ),
        of_engines(
            "/engine_leave",
            core.dispatcher.drains.engine_leaves,
            "An engine is about to end",
            SMALL_BODY,
            401,
            404,
        ),
    ]


def _ready_endpoint(core: ServeCore) -> Endpoint:
    """Says which engines there are to those who have the cluster token."""
    token = core.config.cluster_token

    def sees_engines(request: Request, arguments: dict[str, Any]) -> None:
        arguments["sees_engines"] = knows_cluster_token(request, token)

    return Endpoint(
        "GET",
        "/ready",
        core.readiness,
        "An engine is there (Bearer: the cluster token, to see which)",
        access=Access.ANYBODY,
        described=Described((503,)),
    ).stepping(sees_engines)


def _alive() -> None:
    pass
