"""Identifiers and secrets."""

import secrets
from itertools import count


class IdCounter:
    """Hands out 0, 1, 2, ... (or from `start`); an id is never handed out twice."""

    def __init__(self, start: int = 0) -> None:
        self._numbers = count(start)

    def next(self) -> int:
        return next(self._numbers)


def new_token() -> str:
    """An unguessable URL-safe token (128 bits), for session auth and variable ids."""
    return secrets.token_urlsafe(16)


def tokens_equal(given: str, expected: str) -> bool:
    """Compare two secrets in constant time. Any text is allowed, also non-ASCII."""
    return secrets.compare_digest(
        given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass")
    )
