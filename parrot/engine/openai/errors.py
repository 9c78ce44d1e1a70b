"""A foreign server's refusals as Parrot's errors, and which of them are worth another try.

HTTP                     Parrot's error        tried again
400, context too long    PromptTooLong         no
400, 413, 422            InvalidRequest        no
401, 403                 EngineFailed          no (our key, not the caller's)
404, 405, 501            NotThere              no (wrong model or address)
429, 503, 529            QuotaExceeded         yes, unless credit is used up
408, 409, 500 and others EngineFailed          yes
no connection            Unavailable           yes
"""

from collections.abc import Mapping
from typing import Any

from parrot.protocol.errors import (
    EngineFailed,
    InvalidRequest,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    Unavailable,
    UnsupportedField,
)
from parrot.protocol.transport import retry_after_s

_MAX_MESSAGE = 500
_MAX_WAIT_S = 60.0
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_TOO_LONG_WORDS = ("context length", "context window", "context size", "maximum context")
_OVERLOADED = frozenset({429, 503, 529})
_NO_CREDIT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})


class Overloaded(QuotaExceeded):
    """The foreign server has no room now; it may have said after how many seconds to return. Not
    `Unavailable`: to ServeCore that would mean the loss of this engine and its contexts."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotThere(EngineFailed):
    """The foreign server has no such model, or does nothing of the kind."""


class Faltered(EngineFailed):
    """The foreign server failed in a way that may pass."""


def backoff(error: Exception) -> bool | float:
    """Stamina's question: whether to try again, or after how many seconds."""
    if isinstance(error, Overloaded):
        wait_s = error.retry_after_s
        return True if wait_s is None else (wait_s <= _MAX_WAIT_S and wait_s)
    return isinstance(error, Unavailable | Faltered)


def refused_embedding(error: EngineFailed) -> ParrotError:
    """The error of a server that was asked for embeddings, which may have none. llama-cpp-python
    answers 500 if it has none, and for token ids."""
    if isinstance(error, NotThere) or "embedding=True" in error.message:
        text = f"the model has no embeddings: {error.message}"
        return UnsupportedField(text, param="model")
    if "validation error" in error.message:
        return InvalidRequest(error.message, param="input")
    return error


class ErrorTranslator:
    """Reads a foreign server's error. No secret ever gets into a message."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret

    def read(self, payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
        """For a body of {"error": {"message", "type", "code"}}, or whatever else came."""
        error = payload.get("error", payload) if isinstance(payload, Mapping) else None
        details = error if isinstance(error, Mapping) else {}
        names = {details.get("code"), details.get("type")} if details else set()
        message = self._clean(details.get("message", error))
        if status in (401, 403):
            return EngineFailed(
                f"the server behind this engine refused its API key (HTTP {status}); "
                "check `instance.api_key` or the environment variable it stands for"
            )
        if names & _NO_CREDIT:
            return EngineFailed(f"the account behind this engine has no credit: {message}")
        if status in _OVERLOADED:
            return Overloaded(
                f"the server behind this engine is overloaded (HTTP {status}): {message}",
                retry_after_s(headers),
            )
        if status in (400, 413, 422):
            return self._refused(names, message)
        text = f"the server behind this engine answered HTTP {status}: {message}"
        if status in (404, 405, 501):
            return NotThere(text)
        may_pass = status >= 500 or status in (408, 409)
        told_not_to = headers.get("x-should-retry") == "false"
        return Faltered(text) if may_pass and not told_not_to else EngineFailed(text)

    def read_frame(self, payload: Any) -> ParrotError:
        """The error that ends a stream; vLLM puts the HTTP status in its `code`."""
        error = payload.get("error") if isinstance(payload, Mapping) else None
        code = error.get("code") if isinstance(error, Mapping) else None
        return self.read(payload, code if isinstance(code, int) else 500, {})

    @staticmethod
    def _refused(names: set[Any], message: str) -> InvalidRequest:
        lower = message.lower()
        if names & _TOO_LONG_CODES or any(words in lower for words in _TOO_LONG_WORDS):
            return PromptTooLong(message)
        return InvalidRequest(f"the server behind this engine refused the request: {message}")

    def _clean(self, message: object) -> str:
        text = message if isinstance(message, str) else "no reason given"
        if self._secret:
            text = text.replace(self._secret, "***")
        return text[:_MAX_MESSAGE]
