"""Errors in the form that each API's clients expect.

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
from parrot.protocol.sampling import OPENAI_NAMES, VLLM_NAMES
from parrot.serve.prompts.encode import CountedPromptTooLong

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
"""Codes of `NotFound`, by the field that names the missing object."""
_SAMPLING_NAMES = OPENAI_NAMES | VLLM_NAMES
_CLIENT_NAMES = {ours: name for ours, name in _SAMPLING_NAMES.items() if name != ours}
"""The names of sampling fields in OpenAI's API, if they differ from Parrot's."""
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


def openai_error(
    error: ParrotError, request_id: str = "", *, prompt: str = "prompt"
) -> tuple[int, dict[str, Any]]:
    """The status and the body. OpenAI has no 422, so an invalid request is always a 400.
    `prompt`: the field that holds the prompt."""
    status = 400 if error.status == 422 else error.status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = error.code
    code = code or next((code for cls, code in _CODES if isinstance(error, cls)), error.type)
    if isinstance(error, NotFound):
        code = _NOT_FOUND.get(error.param or "", code)
    param = prompt if isinstance(error, PromptTooLong) and not error.param else error.param
    message = openai_message(error, prompt)
    if (name := _CLIENT_NAMES.get(param or "")) is not None:
        message, param = message.replace(f"`{param}`", f"`{name}`"), name
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return status, {"error": fields}


def openai_message(error: ParrotError, prompt: str) -> str:
    """For a prompt that is too long, OpenAI's message, which clients parse; else the error's."""
    if not isinstance(error, CountedPromptTooLong):
        return error.message
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your {prompt} "
        f"resulted in {_count(error)}. Please reduce the length of the {prompt}."
    )


def _anthropic_message(error: ParrotError) -> str:
    """For a prompt that is too long, Anthropic's message; else the error's."""
    if isinstance(error, CountedPromptTooLong):
        return f"prompt is too long: {_count(error)} > {error.limit - 1} maximum"
    is_long = isinstance(error, PromptTooLong)
    return f"prompt is too long: {error.message}" if is_long else error.message


def _count(error: CountedPromptTooLong) -> str:
    return f"{'' if error.are_all else 'at least '}{error.num_tokens} tokens"


def anthropic_error(error: ParrotError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """The status and the body. Anthropic has no 422: a bad request is always a 400."""
    status = 400 if error.status == 422 else error.status
    kind = _KINDS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    fields = {"type": kind, "message": _anthropic_message(error)}
    return status, {"type": "error", "error": fields, "request_id": request_id or None}
