"""Errors as HTTP answers."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from parrot.protocol.errors import ParrotError, QueueFull

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

ErrorForm = Callable[[Request, ParrotError], tuple[int, Mapping[str, Any]]]
"""The status and the JSON of an error that a request gets."""


def own_form(request: Request, error: ParrotError) -> tuple[int, Mapping[str, Any]]:
    """Parrot's own: see errors.py."""
    return error.status, error.to_payload()


def error_headers(error: ParrotError, status: int) -> Mapping[str, str] | None:
    if isinstance(error, QueueFull) and error.retry_after_s is not None:
        return {"Retry-After": str(max(1, ceil(error.retry_after_s)))}
    return _HEADERS.get(status)


def error_response(
    request: Request, error: ParrotError, error_form: ErrorForm = own_form
) -> Response:
    status, payload = error_form(request, error)
    return Response(
        orjson.dumps(payload, option=orjson.OPT_NON_STR_KEYS, default=str),
        status_code=status,
        media_type="application/json",
        headers=error_headers(error, status),
    )
