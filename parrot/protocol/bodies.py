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
_KEY_BYTES = 4  # Bytes that a key and its value take at least.


_MOST = (MAX_VALUES, MAX_KEYS, MAX_NESTED)
_WHAT = ("values", "keys", "arrays and objects")


class JsonMeter:
    """Counts JSON values, keys and containers in the chunks of one body. The caller keeps all
    chunks. Invalid JSON gives arbitrary counts."""

    def __init__(self) -> None:
        self._size = 0  # Bytes.
        # Upper bounds of the counts, as if the body had no strings.
        self._most_nested = self._most_values = self._most_keys = 0
        self._unread: list[bytes] = []  # First chunks, which only have upper bounds.
        self._num_bounded = 0  # Of these chunks, those in the bounds of values and keys.
        self._counts = [0, 0, 0]
        self._num_escapes = 0
        self._is_string = False  # The next byte is inside a string.
        self._held = b""  # A backslash at the end of the last chunk.

    def feed(self, piece: bytes) -> None:
        """Count the next chunk. Raises `PayloadTooLarge` above a limit."""
        self._size += len(piece)
        self._num_escapes += _number(b"\\", piece)
        if self._num_escapes > MAX_ESCAPES:
            raise PayloadTooLarge(f"the request body has more than {MAX_ESCAPES} escapes in texts")
        if self._size <= _MAX_UNREAD:
            self._unread.append(piece)
            self._most_nested += _number(b"[", piece) + _number(b"{", piece)
            if self._most_nested <= _MOST[2] and self._has_few_values():
                return
            self._size, piece = _MAX_UNREAD + 1, b""  # The following chunks are counted.
        for one in self._unread:
            self._count(one)
        self._unread.clear()
        self._count(piece)

    def _has_few_values(self) -> bool:
        max_values, max_keys, _ = _MOST
        if self._size <= min(max_values, _KEY_BYTES * max_keys):
            return True
        for piece in self._unread[self._num_bounded :]:
            self._most_values += _number(b",", piece)
            self._most_keys += _number(b":", piece)
        self._num_bounded = len(self._unread)
        return self._most_values <= max_values and self._most_keys <= max_keys

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
    return _number(b",", text), _number(b":", text), _number(b"[", text) + _number(b"{", text)


def _number(sign: bytes, text: bytes) -> int:
    """As `text.count(sign)`, which takes 10 times as long for a rare sign."""
    return len(text) - len(text.replace(sign, b""))


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
