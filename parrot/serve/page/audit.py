"""The log of what operators and tenants do beside their work: who, what, when and from where."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.endpoint import Endpoint, Handler
from parrot.protocol.errors import ParrotError
from parrot.utils.config import ConfigError
from parrot.utils.private_files import open_private

logger = logging.getLogger(__name__)

_MAX_REFUSED = 10  # lines of refused requests in each period
_PERIOD_S = 10.0


class AuditLog:
    """Lines of JSON in a file that only this user can read."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` if it cannot be written."""
        self._period = -1.0  # when the last one of refused requests began
        self._num_refused = 0
        try:
            self._file: BinaryIO = open_private(path, is_new=False)
        except OSError as error:
            raise ConfigError(f"audit_path: {path}: {error.strerror}") from None

    def note(self, request: Request, who: str | None, outcome: str, **facts: Any) -> None:
        """On disk before the request is answered. `outcome`: "ok", or the error's type."""
        address = None if request.client is None else request.client.host
        what = f"{request.method} {request.url.path[:512]}"
        self._write({"who": who, "from": address, "what": what, "outcome": outcome, **facts})

    def event(self, what: str, outcome: str, **facts: Any) -> None:
        """Note what no request did."""
        self._write({"who": None, "from": None, "what": what, "outcome": outcome, **facts})

    def refused(self, request: Request) -> None:
        """Note a failed authentication, unless there were many just now: of those the number is
        told with the next."""
        now = time.monotonic()
        if self._period < 0 or now - self._period > _PERIOD_S:
            left_out = max(0, self._num_refused - _MAX_REFUSED)
            self._period, self._num_refused = now, 0
            if left_out:
                self.event("failed authentications", "not_noted", count=left_out)
        self._num_refused += 1
        if self._num_refused <= _MAX_REFUSED:
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
            logger.error("a line of the audit log is lost: %s", error)


def audited(
    endpoint: Endpoint,
    audit: AuditLog | None,
    who: Callable[[Request], str],
    facts: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Endpoint:
    """The endpoint, of which the log, if there is one, has what it does, and by whom, before it is
    answered. `who` tells that of a request, or raises for one that may not be made; `facts` is the
    part of the verb's arguments that is logged."""
    if audit is None or endpoint.method == "GET":
        return endpoint.checked(who)

    def remember(request: Request, arguments: dict[str, Any]) -> None:
        request.state.asked = dict(arguments)

    async def noting(request: Request, endpoint: Handler) -> Response:
        name = who(request)
        try:
            response = await endpoint(request)
        except ParrotError as error:
            audit.note(request, name, error.type)
            raise
        audit.note(request, name, "ok", **facts(request.state.asked))
        return response

    return endpoint.stepping(remember).wrapped(noting)


class AuditedRefusals:
    """A layer that notes which requests fail to say who they are from."""

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                self._audit.refused(Request(scope))
            await send(message)

        await self._app(scope, receive, noting if scope["type"] == "http" else send)
