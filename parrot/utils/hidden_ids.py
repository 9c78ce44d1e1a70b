"""Ids of things that are numbered, without their numbers."""

import hashlib
import hmac


class HiddenIds:
    """Makes ids of growing numbers, so that two ids do not tell how many there are between them.
    Numbers that differ modulo `step` have ids that differ as much. (A Feistel network of four
    rounds permutes the multiples of `step`.)"""

    FIRST = 2**52  # Smaller ids are numbers themselves.
    _HALF = 23  # Bits of each half of a permuted number.

    def __init__(self, secret: bytes, step: int) -> None:
        self._secret = hmac.digest(secret, b"hidden ids", "sha256")
        self._step = step

    def id_of(self, number: int) -> int:
        multiple, rest = divmod(number, self._step)
        left, right = divmod(multiple, 2**self._HALF)
        for step in range(4):
            left, right = right, left ^ self._mix(step, right)
        permuted: int = left << self._HALF | right
        return self.FIRST + permuted * self._step + rest

    def number_of(self, hidden: int) -> int:
        """The number of an id, also of an id that was made before ids were hidden."""
        if hidden < self.FIRST:
            return hidden
        permuted, rest = divmod(hidden - self.FIRST, self._step)
        left, right = divmod(permuted % 2 ** (2 * self._HALF), 2**self._HALF)
        for step in reversed(range(4)):
            left, right = right ^ self._mix(step, left), left
        multiple: int = left << self._HALF | right
        return multiple * self._step + rest

    def _mix(self, step: int, half: int) -> int:
        data = b"%d %d" % (step, half)
        digest = hashlib.blake2b(data, key=self._secret, digest_size=4).digest()
        return int.from_bytes(digest) >> (32 - self._HALF)
