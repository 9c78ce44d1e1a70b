"""Idempotency keys: a repeated request gets the first one's answer and does nothing."""

import hashlib
from typing import TypeVar

from pydantic import BaseModel

from parrot.protocol.errors import Conflict
from parrot.protocol.public import GraphRequest, NativeCallRequest, SemanticCallRequest

Repeatable = SemanticCallRequest | NativeCallRequest | GraphRequest
Answer = TypeVar("Answer", bound=BaseModel)


class Replays:
    """Remembers the answered requests of one session that carried a key."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[bytes, BaseModel]] = {}

    def find(self, request: Repeatable, kind: type[Answer]) -> Answer | None:
        """The answer that this key got, if any. Raises `Conflict` if it was for another request."""
        key = request.idempotency_key
        if key is None or key not in self._answers:
            return None
        fingerprint, response = self._answers[key]
        if fingerprint != _fingerprint(request):
            raise Conflict("the idempotency key was used for another request")
        assert isinstance(response, kind)
        return response

    def remember(self, request: Repeatable, response: BaseModel) -> None:
        if request.idempotency_key is not None:
            self._answers[request.idempotency_key] = (_fingerprint(request), response)


def _fingerprint(request: Repeatable) -> bytes:
    content = request.model_dump_json(exclude={"session_auth"})
    return hashlib.sha256(f"{type(request).__name__} {content}".encode()).digest()
