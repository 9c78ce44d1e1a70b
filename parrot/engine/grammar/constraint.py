"""The state of one output in its grammar, and the masks of allowed next tokens."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from parrot.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher

_MAX_REASON = 200  # Error messages quote at most this many characters of llguidance's reason.


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The values that all constraints of one tokenizer share."""

    num_words: int  # 32-bit words in a mask.
    eos: Sequence[int]  # Tokens that end an output.
    threads: "LLExecutor"  # Computes the masks of a step in parallel.


class Constraint:
    """Tracks the allowed next tokens of one output, and whether the output is complete.

    The engine's thread and the launcher thread may both report the same token: each position is
    consumed once. After an error every token is allowed, and `take` raises the error."""

    def __init__(
        self,
        matcher: "LLMatcher",
        field: str,
        vocabulary: Vocabulary,
        *,
        may_end_early: bool,
        lexer_id: int = 0,
    ) -> None:
        """`matcher` must not be shared. `field` is the request's field for error messages.

        Without `may_end_early`, end-of-text tokens are allowed only if no other token is. Masks
        with the same `lexer_id` are not computed in parallel, because they share a lock."""
        self._matcher = matcher  # Guarded by `_lock`: one thread at a time may use it.
        self._field = field
        self.vocabulary = vocabulary
        self._may_end_early = may_end_early
        self._lexer_id = lexer_id
        self._lock = Lock()
        # Read without the lock, so that a reader does not wait for a mask. Each is written last.
        self._num_taken = 0
        self._is_stopped = matcher.is_stopped()
        self._error: InvalidRequest | None = None

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end the output."""
        return self.vocabulary.eos

    @property
    def is_complete(self) -> bool:
        """Whether no further token is allowed."""
        return self._error is None and self._is_stopped

    def resume(self, token_ids: Sequence[int]) -> None:
        """Consume a prefix of the output. Raises `InvalidRequest` if the grammar rejects it."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._fail("the text so far is not a prefix of a valid output")
        self._is_stopped = self._matcher.is_stopped()

    def take(self, place: int, token_id: int) -> None:
        """Consume the token at index `place` of the output, unless it was consumed before.

        Raises `InvalidRequest` if the token is not allowed, or after an earlier error."""
        if self._error is not None:
            raise self._error
        if place < self._num_taken:
            return
        with self._lock:
            if self._error is not None:
                raise self._error
            if place < self._num_taken:
                return
            assert place == self._num_taken, (place, self._num_taken)
            if not self._is_stopped:
                if not self._matcher.consume_token(token_id):
                    reason = self._matcher.get_error()
                    raise self._fail(reason or f"token {token_id} is not allowed")
                self._is_stopped = self._matcher.is_stopped()
            self._num_taken += 1

    def forced(self, place: int) -> list[int]:
        """The tokens from index `place` on that the grammar leaves no choice about.

        Their text is split in the tokenizer's usual way. Empty unless exactly the tokens before
        `place` were consumed."""
        with self._lock:
            if place != self._num_taken or self._error is not None or self._is_stopped:
                return []
            found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def num_valid(self, place: int, token_ids: Sequence[int]) -> int:
        """The number of leading `token_ids` that the grammar allows from index `place` on.

        0 unless exactly the tokens before `place` were consumed."""
        with self._lock:
            if place != self._num_taken or self._error is not None or self._is_stopped:
                return 0
            found: int = self._matcher.validate_tokens(list(token_ids))
        return found

    def ahead(self, place: int, token_ids: Sequence[int]) -> "list[Constraint]":
        """This constraint, and one copy after each of `token_ids`, starting at index `place`.

        The grammar must allow all of `token_ids`."""
        found = [self]
        with self._lock:
            assert place == self._num_taken, (place, self._num_taken)
            matcher = self._matcher.deep_copy()
        for taken, token_id in enumerate(token_ids, place + 1):
            matcher.consume_token(token_id)
            copy = Constraint(
                matcher,
                self._field,
                self.vocabulary,
                may_end_early=self._may_end_early,
                lexer_id=self._lexer_id,
            )
            copy._num_taken = taken
            found.append(copy)
            matcher = matcher.deep_copy()
        return found

    def is_masked(self, place: int, before: int | None = None) -> bool:
        """Whether the token at index `place` needs a mask. False after the end or an error.

        `before` is the token at `place - 1`, which is consumed first if necessary."""
        try:
            if before is not None:
                self.take(place - 1, before)
        except InvalidRequest:
            return False
        assert place == self._num_taken, (place, self._num_taken)
        return self._error is None and not self._is_stopped

    def _finish(self, words: "npt.NDArray[np.int32]") -> None:
        """Correct the matcher's mask, int32 [words], after errors and for end-of-text tokens."""
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            words.fill(-1)
        elif not self._may_end_early:
            bits = words.view("uint8")
            kept = bits.copy()
            for token_id in self.vocabulary.eos:
                kept[token_id // 8] &= 255 - (1 << token_id % 8)
            if kept.any():
                bits[:] = kept

    def _fail(self, reason: str) -> InvalidRequest:
        first = reason.partition("\n")[0][:_MAX_REASON]
        text = f"the output cannot follow `{self._field}`: {first}"
        self._error = InvalidRequest(text, param=self._field)
        return self._error


def fill_masks(constraints: Sequence[Constraint], words: "npt.NDArray[np.int32]") -> None:
    """Write the allowed next tokens to `words` [constraints, words]: bit i of word j is token
    32 j + i. The constraints must be distinct, need a mask and share a vocabulary. The GIL is
    released meanwhile."""
    vocabulary = constraints[0].vocabulary
    with ExitStack() as locks:
        for constraint in constraints:
            locks.enter_context(constraint._lock)
        # A thread gets neighbours in this order, so two threads rarely contend for one lexer.
        order = sorted(enumerate(constraints), key=lambda each: each[1]._lexer_id)
        vocabulary.threads.unsafe_compute_mask_ptr(
            [(constraint._matcher, i) for i, constraint in order],
            words.ctypes.data,
            vocabulary.num_words * words.itemsize,
            len(constraints),
        )
        for constraint, row in zip(constraints, words, strict=True):
            constraint._finish(row)
