"""Limits for request bodies: the memory of all bodies that are being read, and the number of JSON
values in one body."""

from collections.abc import Iterator
from contextlib import contextmanager

from parrot.protocol.errors import PayloadTooLarge, Unavailable

SMALL = 2**16  # First bytes of each body that are not counted. The server's buffers are as large.
MAX_VALUES = 2**19  # JSON values in a body.
MAX_KEYS = 2**17  # Keys of all JSON objects in a body.
MAX_NESTED = 2**15  # Arrays and objects in a body.
MAX_ESCAPES = 2**23  # Backslashes in a body. Eight million take 0.03 s to parse.
# Bytes of a body that get only a rough upper bound at first. Scanning them takes 1 to 2 ms.
_MAX_UNREAD = 2**20


_MOST = (MAX_VALUES, MAX_KEYS, MAX_NESTED)
_WHAT = ("values", "keys", "arrays and objects")


class JsonMeter:
    """Counts JSON values, keys and containers in the chunks of one body. The caller keeps all
    chunks. Invalid JSON gives arbitrary counts."""

    def __init__(self) -> None:
        self._most = [0, 0, 0]  # Upper bounds of the counts, as if the body had no strings.
        self._unread: list[bytes] = []  # First chunks, which only have upper bounds.
        self._num_unread = 0  # Bytes of these chunks.
        self._counts = [0, 0, 0]
        self._num_escapes = 0
        self._is_string = False  # The next byte is inside a string.
        self._held = b""  # A backslash at the end of the last chunk.

    def feed(self, piece: bytes) -> None:
        """Count the next chunk. Raises `PayloadTooLarge` above a limit."""
        self._num_escapes += piece.count(b"\\")
        if self._num_escapes > MAX_ESCAPES:
            raise PayloadTooLarge(f"the request body has more than {MAX_ESCAPES} escapes in texts")
        self._num_unread += len(piece)
        if self._num_unread <= _MAX_UNREAD:
            self._unread.append(piece)
            self._most = [most + new for most, new in zip(self._most, _signs(piece), strict=True)]
            if all(most <= limit for most, limit in zip(self._most, _MOST, strict=True)):
                return
            self._num_unread, piece = _MAX_UNREAD + 1, b""
        for one in self._unread:
            self._count(one)
        self._unread.clear()
        self._count(piece)

    def _count(self, piece: bytes) -> None:
        piece = (self._held + piece).replace(rb"\\", b"")
        self._held = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._is_string :: 2])
        self._is_string ^= len(parts) % 2 == 0
        for i, number in enumerate(_signs(outside)):
            self._counts[i] += number
        for number, most, what in zip(self._counts, _MOST, _WHAT, strict=True):
            if number > most:
                raise PayloadTooLarge(f"the request body has more than {most} {what}")


def _signs(text: bytes) -> tuple[int, int, int]:
    """The numbers of commas, colons and opening brackets."""
    return text.count(b","), text.count(b":"), text.count(b"[") + text.count(b"{")


class BodyBudget:
    """The memory for all bodies that are being read or forwarded."""

    def __init__(self, num_bytes: int) -> None:
        self._num_free = num_bytes

    @contextmanager
    def lease(self) -> "Iterator[BodyLease]":
        """A lease on the budget. Its bytes are released at the end of the block."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            self._num_free += lease.num_bytes

    def take(self, num_bytes: int) -> None:
        """Reserve memory. Raises `Unavailable` if the budget is exceeded."""
        if num_bytes > self._num_free:
            raise Unavailable("the server is reading too many large requests: try again")
        self._num_free -= num_bytes


class BodyLease:
    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def hold(self, size: int) -> None:
        """Change the lease to the size of its body, in bytes."""
        num_bytes = max(0, size - SMALL)
        self._budget.take(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes
