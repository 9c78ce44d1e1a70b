"""The service itself over HTTP: models, health, metrics, and engines that join."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Request

from parrot.protocol.endpoint import (
    LARGE,
    SMALL_BODY,
    Access,
    BodyRules,
    Check,
    Endpoint,
    api_key_of,
    knows_cluster_token,
    require_cluster_token,
)
from parrot.protocol.errors import AuthenticationFailed, NotFound
from parrot.protocol.public import ModelCard
from parrot.serve.core import ServeCore
from parrot.serve.page.audit import AuditedEndpoint, AuditLog
from parrot.serve.tenants.table import Scope
from parrot.utils.metrics import CONTENT_TYPE


def service_endpoints(core: ServeCore, audit: AuditLog) -> list[Endpoint]:
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

    with_key = partial(Endpoint, access=Access.API_KEY, check=key_check(core))
    return [
        with_key("GET", "/v1/models", core.models, "Models that are served now", errors=(401, 403)),
        with_key("GET", "/v1/models/{model_id:path}", model, "A model", errors=(401, 403, 404)),
        Endpoint("GET", "/health", _alive, "The process answers", access=Access.ANYBODY),
        _ReadyEndpoint(core),
        Endpoint(
            "GET",
            "/metrics",
            metrics,
            "Metrics for Prometheus (Bearer: the cluster token, or a key)",
            access=Access.METRICS,
            check=holder_of(core, Scope.METRICS),
            errors=(401, 403),
            media_type=CONTENT_TYPE,
        ),
        _RegistrationEndpoint(core, audit),
        Endpoint(
            "POST",
            "/engine_heartbeat",
            core.fleet.heartbeat,
            "An engine is alive (Bearer: the cluster token)",
            access=Access.CLUSTER,
            check=_engine_check(core),
            errors=(401,),
            body=BodyRules(LARGE),
        ),
        Endpoint(
            "POST",
            "/engine_leave",
            core.dispatcher.drains.engine_leaves,
            "An engine is about to end (Bearer: the cluster token)",
            access=Access.CLUSTER,
            check=_engine_check(core),
            errors=(401, 404),
            body=SMALL_BODY,
        ),
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


class _ReadyEndpoint(Endpoint):
    """Says which engines there are to those who have the cluster token."""

    def __init__(self, core: ServeCore) -> None:
        super().__init__(
            "GET",
            "/ready",
            core.readiness,
            "An engine is there (Bearer: the cluster token, to see which)",
            errors=(503,),
            access=Access.ANYBODY,
        )
        self._token = core.config.cluster_token

    async def _arguments(self, request: Request) -> dict[str, Any]:
        return {"sees_engines": knows_cluster_token(request, self._token)}


class _RegistrationEndpoint(AuditedEndpoint):
    def __init__(self, core: ServeCore, audit: AuditLog) -> None:
        super().__init__(
            audit,
            _engine_check(core),
            "POST",
            "/register_engine",
            core.register_engine,
            "An engine joins (Bearer: the cluster token)",
            access=Access.CLUSTER,
            errors=(401, 409, 429, 503),
            body=SMALL_BODY,
        )

    def facts(self, asked: dict[str, Any]) -> dict[str, Any]:
        info = asked["request"].engine_config
        address = f"{info.host}:{info.port}"
        return {"engine": info.engine_name, "model": info.model, "address": address}


def _alive() -> None:
    pass
