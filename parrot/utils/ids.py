"""Identifiers and secrets."""

import hashlib
import os
import secrets
from binascii import b2a_base64

_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class IdCounter:
    """Returns 0, 1, 2, ... (or from `start`). `upcoming` is the next id. Ids are unique unless
    `upcoming` is decreased."""

    def __init__(self, start: int = 0) -> None:
        self.upcoming = start

    def next(self) -> int:
        number = self.upcoming
        self.upcoming += 1
        return number


class SecretIds:
    """Returns tokens in the form of `new_token`, derived from `secret` and a counter. Without
    `secret`, known tokens do not help to guess other tokens. `upcoming` is the next number."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.upcoming = 0

    def next(self) -> str:
        number = self.upcoming
        self.upcoming += 1
        return derived_token(self._secret, number)


def derived_token(secret: bytes, number: int) -> str:
    """The token with this number. It looks like a token of `new_token`, but requires `secret`."""
    return _token(hashlib.blake2b(b"%d" % number, key=secret, digest_size=16).digest())


def new_token() -> str:
    """An unguessable URL-safe token (128 bits), for session auth and variable ids."""
    return _token(os.urandom(16))


def _token(raw: bytes) -> str:
    """URL-safe base64, without the calls of `base64`'s function for it."""
    return b2a_base64(raw, newline=False).translate(_URL_SAFE).rstrip(b"=").decode()


def tokens_equal(given: str, expected: str) -> bool:
    """Compare two secrets in constant time. They may contain any characters."""
    return secrets.compare_digest(
        given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass")
    )
