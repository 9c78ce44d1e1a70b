"""Errors as the clients of each API read them.

OpenAI       {"error": {"message", "type", "param", "code"}}
Anthropic    {"type": "error", "error": {"type", "message"}, "request_id"}
"""

from typing import Any

from parrot.protocol.errors import (
    AuthenticationFailed,
    ClusterFull,
    NotFound,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
)

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
_CODES: tuple[tuple[type[ParrotError], str], ...] = (
    (PromptTooLong, "context_length_exceeded"),
    (AuthenticationFailed, "invalid_api_key"),
    (ClusterFull, "overloaded"),
    (QuotaExceeded, "rate_limit_exceeded"),
)
_NOT_FOUND = {
    "model": "model_not_found",
    "previous_response_id": "previous_response_not_found",
}
"""By the field that names what is not there."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(error: ParrotError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """The status and the body. OpenAI has no 422: what is wrong with a request is always a 400."""
    status = 400 if error.status == 422 else error.status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = next((code for cls, code in _CODES if isinstance(error, cls)), error.type)
    if isinstance(error, NotFound):
        code = _NOT_FOUND.get(error.param or "", code)
    fields = {"message": error.message, "type": kind, "param": error.param, "code": code}
    return status, {"error": fields}


def anthropic_error(error: ParrotError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """The status and the body. Anthropic has no 422: a bad request is always a 400."""
    status = 400 if error.status == 422 else error.status
    kind = _KINDS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    fields = {"type": kind, "message": error.message}
    return status, {"type": "error", "error": fields, "request_id": request_id or None}
