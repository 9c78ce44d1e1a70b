"""Idempotency keys: a repeated request gets the first one's answer and does nothing."""

import hashlib

from parrot.protocol.errors import Conflict
from parrot.protocol.public import CallResponse, NativeCallRequest, SemanticCallRequest

CallRequest = SemanticCallRequest | NativeCallRequest


class Replays:
    """Remembers the answered requests of one session that carried a key."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[bytes, CallResponse]] = {}

    def find(self, request: CallRequest) -> CallResponse | None:
        """The answer that this key got, if any. Raises `Conflict` if it was for another request."""
        key = request.idempotency_key
        if key is None or key not in self._answers:
            return None
        fingerprint, response = self._answers[key]
        if fingerprint != _fingerprint(request):
            raise Conflict("the idempotency key was used for another request")
        return response

    def remember(self, request: CallRequest, response: CallResponse) -> None:
        if request.idempotency_key is not None:
            self._answers[request.idempotency_key] = (_fingerprint(request), response)


def _fingerprint(request: CallRequest) -> bytes:
    content = request.model_dump_json(exclude={"session_auth"})
    return hashlib.sha256(f"{type(request).__name__} {content}".encode()).digest()
