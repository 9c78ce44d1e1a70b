"""The bodies of requests: how much memory those have that are being read, and how much JSON one may
be made of."""

from collections.abc import Iterator
from contextlib import contextmanager

from parrot.protocol.errors import PayloadTooLarge, Unavailable

SMALL = 2**16  # bytes of a body that are not counted: the server has as many in its buffers
MAX_VALUES = 2**19
MAX_KEYS = 2**17  # of all objects
MAX_NESTED = 2**15  # arrays and objects
MAX_ESCAPES = 2**23  # backslashes: eight million take 0.03 s to read
_MAX_UNREAD = 2**20  # of bytes, which take a millisecond or two to look at


_MOST = (MAX_VALUES, MAX_KEYS, MAX_NESTED)
_WHAT = ("values", "keys", "arrays and objects")


class JsonMeter:
    """Counts in pieces of one text, which whoever reads it keeps until its end. What is no JSON is
    counted somehow."""

    def __init__(self) -> None:
        self._most = [0, 0, 0]  # what there could be, if nothing were in strings
        self._unread: list[bytes] = []  # the first pieces, of which no more is known
        self._num_unread = 0  # bytes of them
        self._counts = [0, 0, 0]
        self._num_escapes = 0
        self._is_string = False  # the next byte is in one
        self._held = b""  # a backslash whose meaning is not known yet

    def feed(self, piece: bytes) -> None:
        """Raises `PayloadTooLarge`."""
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
    """How many commas, colons and opening brackets there are."""
    return text.count(b","), text.count(b":"), text.count(b"[") + text.count(b"{")


class BodyBudget:
    """The memory for bodies that are being read or handed on."""

    def __init__(self, num_bytes: int) -> None:
        self._num_free = num_bytes

    @contextmanager
    def lease(self) -> "Iterator[BodyLease]":
        """A part of the budget, which is given back at the end."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            self._num_free += lease.num_bytes

    def take(self, num_bytes: int) -> None:
        """Raises `Unavailable` if there is not so much."""
        if num_bytes > self._num_free:
            raise Unavailable("the server is reading too many large requests: try again")
        self._num_free -= num_bytes


class BodyLease:
    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def hold(self, size: int) -> None:
        """Let it be for a body of which there are so many bytes."""
        num_bytes = max(0, size - SMALL)
        self._budget.take(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes
