"""Errors of requests, whatever raises them, as answers."""

import logging

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.errors import (
    InternalError,
    MethodNotAllowed,
    NotFound,
    ParrotError,
    error_from_payload,
)
from parrot.protocol.gate.answer import ErrorForm, error_response

logger = logging.getLogger(__name__)


class ErrorBoundary:
    """Answers with an error whatever `app` raises before it answers."""

    def __init__(self, app: ASGIApp, error_form: ErrorForm) -> None:
        self._app = app
        self._error_form = error_form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            response = self._answer(Request(scope), error)
            if has_begun:
                raise
            await response(scope, receive, send)

    def _answer(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ParrotError):
            return self._respond(request, error)
        if not isinstance(error, HTTPException):
            path = request.url.path
            logger.error("unhandled error on %s %s", request.method, path, exc_info=error)
            return self._respond(request, InternalError("internal error"))
        if error.status_code == 404:
            return self._respond(request, NotFound(f"no such path: {request.url.path}"))
        if error.status_code == 405:
            refusal = MethodNotAllowed(f"{request.method} is not allowed here")
            response = self._respond(request, refusal)
            response.headers["Allow"] = ", ".join(_allowed_methods(request))
            return response
        return self._respond(request, error_from_payload(None, error.status_code))

    def _respond(self, request: Request, error: ParrotError) -> Response:
        return error_response(request, error, self._error_form)


def _allowed_methods(request: Request) -> list[str]:
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})
