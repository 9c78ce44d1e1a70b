"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from typing import Any

from parrot.protocol.errors import ParrotError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ParrotError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """The status and the body. Anthropic has no 422: a bad request is always a 400."""
    status = 400 if error.status == 422 else error.status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    fields = {"type": kind, "message": error.message}
    return status, {"type": "error", "error": fields, "request_id": request_id or None}
