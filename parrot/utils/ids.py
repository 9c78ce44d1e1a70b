"""Identifiers and secrets."""

import hashlib
import secrets
from base64 import urlsafe_b64encode


class IdCounter:
    """Hands out 0, 1, 2, ... (or from `start`); an id is never handed out twice, unless `upcoming`,
    the next one, is set back."""

    def __init__(self, start: int = 0) -> None:
        self.upcoming = start

    def next(self) -> int:
        number = self.upcoming
        self.upcoming += 1
        return number


class SecretIds:
    """Hands out tokens as `new_token` makes them, which follow from `secret` and their numbers:
    whoever has them, but not it, can guess no others. `upcoming`: the number of the next."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.upcoming = 0

    def next(self) -> str:
        number = self.upcoming
        self.upcoming += 1
        return derived_token(self._secret, number)


def derived_token(secret: bytes, number: int) -> str:
    """A token like those of `new_token`, which only `secret` can make."""
    digest = hashlib.blake2b(b"%d" % number, key=secret, digest_size=16).digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


def new_token() -> str:
    """An unguessable URL-safe token (128 bits), for session auth and variable ids."""
    return secrets.token_urlsafe(16)


def tokens_equal(given: str, expected: str) -> bool:
    """Compare two secrets in constant time. Any text is allowed, also non-ASCII."""
    return secrets.compare_digest(
        given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass")
    )
