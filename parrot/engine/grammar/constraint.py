"""One output's way through its grammar."""

from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from parrot.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_REASON = 200


class Constraint:
    """Knows which tokens may come next, and when the output is complete.

    The engine's thread and the one that launches steps may both tell it of the same token: it takes
    the token of each place once. An error, say of a grammar that becomes too large to follow, ends
    it: from then on any token may come, and `take` raises the error."""

    def __init__(
        self, matcher: "LLMatcher", field: str, eos: Sequence[int], *, may_end_early: bool
    ) -> None:
        """`matcher`: its own. `field`: of the request, named in errors. `eos`: tokens that end an
        output. Unless `may_end_early` they are allowed only where nothing else is."""
        self._matcher = matcher
        self._field = field
        self._eos = eos
        self._may_end_early = may_end_early
        self._num_taken = 0
        self._lock = Lock()
        self._error: InvalidRequest | None = None

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end the output."""
        return self._eos

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return self._error is None and self._matcher.is_stopped()

    def resume(self, token_ids: Sequence[int]) -> None:
        """Go on behind the beginning of an output. Raises `InvalidRequest` if it is none."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._fail("the text so far is not the beginning of such an output")

    def take(self, place: int, token_id: int) -> None:
        """The token at a place of the output, counted from 0. Raises `InvalidRequest` if it cannot
        stand there, or the grammar cannot be followed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if place < self._num_taken:
                return
            assert place == self._num_taken, (place, self._num_taken)
            self._num_taken += 1
            if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
                raise self._fail(f"token {token_id} cannot be taken")

    def mask(self, place: int, before: int | None = None) -> bytes | None:
        """The tokens that may stand at a place, one bit each, lowest bits first, in whole 32-bit
        words; None: all, since the output has ended. `before`: the token of the place before, which
        may have been taken already."""
        try:
            if before is not None:
                self.take(place - 1, before)
        except InvalidRequest:
            return None
        with self._lock:
            assert place == self._num_taken, (place, self._num_taken)
            if self._error is not None or self._matcher.is_stopped():
                return None
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
                return None
        return mask if self._may_end_early else self._without_ends(mask)

    def _without_ends(self, mask: bytes) -> bytes:
        bits = bytearray(mask)
        for token_id in self._eos:
            bits[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(bits) if any(bits) else mask

    def _fail(self, reason: str) -> InvalidRequest:
        first = reason.partition("\n")[0][:_MAX_REASON]
        text = f"`{self._field}` cannot be followed: {first}"
        self._error = InvalidRequest(text, param=self._field)
        return self._error
