"""The audit log of operators' and tenants' actions: caller, action, time and address."""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.endpoint import Access, Endpoint, Handler
from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import DrainRequest
from parrot.utils.config import ConfigError
from parrot.utils.private_files import open_private

logger = logging.getLogger(__name__)

_MAX_AUTH_FAILURES = 10  # Failed authentications that are logged per period; others are counted.
_PERIOD_S = 10.0  # Seconds.


class AuditLog:
    """JSON lines in a file that only the server's user can read."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        self._period = -1.0  # when the current period of failed authentications began
        self._num_auth_failures = 0
        try:
            self._file: BinaryIO = open_private(path, is_new=False)
        except OSError as error:
            raise ConfigError(f"audit_path: {path}: {error.strerror}") from None

    def note(self, request: Request, who: str | None, outcome: str, **facts: Any) -> None:
        """Log a request. The line is written before the answer. `outcome`: "ok", or the error's
        type."""
        address = None if request.client is None else request.client.host
        what = f"{request.method} {request.url.path[:512]}"
        self._write({"who": who, "from": address, "what": what, "outcome": outcome, **facts})

    def event(self, what: str, outcome: str, **facts: Any) -> None:
        """Log an event that no request caused."""
        self._write({"who": None, "from": None, "what": what, "outcome": outcome, **facts})

    def auth_failed(self, request: Request) -> None:
        """Log a failed authentication. Beyond 10 in 10 s they are counted, and the next period
        logs their number."""
        now = time.monotonic()
        if self._period < 0 or now - self._period > _PERIOD_S:
            left_out = max(0, self._num_auth_failures - _MAX_AUTH_FAILURES)
            self._period, self._num_auth_failures = now, 0
            if left_out:
                self.event("failed authentications", "not_noted", count=left_out)
        self._num_auth_failures += 1
        if self._num_auth_failures <= _MAX_AUTH_FAILURES:
            self.note(request, None, "authentication_failed")

    def close(self) -> None:
        self._file.close()

    def _write(self, facts: dict[str, Any]) -> None:
        moment = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        try:
            line = orjson.dumps({"time": moment, **facts}, option=orjson.OPT_APPEND_NEWLINE)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            logger.error("a line of the audit log could not be written: %s", error)


def audited(endpoint: Endpoint, audit: AuditLog) -> Endpoint:
    """The endpoint, with each request logged before it is answered. Reads (GET) are not logged.
    The caller's name is the result of the endpoint's check."""
    if endpoint.method == "GET":
        return endpoint

    def remember(request: Request, arguments: dict[str, Any]) -> None:
        request.state.facts = _facts(arguments)

    async def noting(request: Request, endpoint: Handler) -> Response:
        try:
            response = await endpoint(request)
        except ParrotError as error:
            if hasattr(request.state, "who"):  # Otherwise the caller was not authenticated.
                audit.note(request, request.state.who, error.type)
            raise
        audit.note(request, request.state.who, "ok", **request.state.facts)
        return response

    return endpoint.stepping(remember).wrapped(noting)


def is_operator_endpoint(endpoint: Endpoint) -> bool:
    """Whether the endpoint's requests change the service itself."""
    return endpoint.access is Access.ADMIN or endpoint.path == "/register_engine"


def _facts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are logged. They contain no secrets."""
    facts = {name: value for name, value in arguments.items() if isinstance(value, int | str)}
    match arguments.get("request"):
        case RegisterRequest(engine_config=info):
            address = f"{info.host}:{info.port}"
            facts |= {"engine": info.engine_name, "model": info.model, "address": address}
        case DrainRequest(is_wanted=is_wanted):
            facts["is_wanted"] = is_wanted
    return facts


class AuditedAuthFailures:
    """A layer that logs requests that fail authentication."""

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                self._audit.auth_failed(Request(scope))
            await send(message)

        await self._app(scope, receive, noting if scope["type"] == "http" else send)
