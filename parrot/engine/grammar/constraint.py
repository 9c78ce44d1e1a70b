"""One output's way through its grammar."""

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

_MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The facts that the constraints for one tokenizer share. `num_words`: of 32 bits, in a mask.
    `eos`: tokens that end an output. `threads` compute the masks of a step beside each other."""

    num_words: int
    eos: Sequence[int]
    threads: "LLExecutor"


class Constraint:
    """Knows which tokens may come next, and when the output is complete.

    The engine's thread and the one that launches steps may both tell it of the same token: it takes
    the token of each place once, and whoever comes second does not wait for a mask that is being
    computed. An error, say of a grammar that becomes too large to follow, ends it: from then on any
    token may come, and `take` raises the error."""

    def __init__(
        self,
        matcher: "LLMatcher",
        field: str,
        vocabulary: Vocabulary,
        *,
        may_end_early: bool,
        lexer_id: int = 0,
    ) -> None:
        """`matcher`: its own. `field`: of the request, named in errors. Unless `may_end_early`, the
        tokens that end an output are allowed only where nothing else is. Masks of the same
        `lexer_id` cannot be computed beside each other."""
        self._matcher = matcher  # used by one thread at a time: behind the lock
        self._field = field
        self.vocabulary = vocabulary
        self._may_end_early = may_end_early
        self._lexer_id = lexer_id
        self._lock = Lock()
        # Read without the lock, so each is written only after what it stands for has happened.
        self._num_taken = 0
        self._is_stopped = matcher.is_stopped()
        self._error: InvalidRequest | None = None

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end the output."""
        return self.vocabulary.eos

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return self._error is None and self._is_stopped

    def resume(self, token_ids: Sequence[int]) -> None:
        """Go on behind the beginning of an output. Raises `InvalidRequest` if it is none."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._fail("the text so far is not the beginning of such an output")
        self._is_stopped = self._matcher.is_stopped()

    def take(self, place: int, token_id: int) -> None:
        """The token at a place of the output, counted from 0. Raises `InvalidRequest` if it cannot
        stand there, or the grammar cannot be followed."""
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
                    raise self._fail(reason or f"token {token_id} cannot be taken")
                self._is_stopped = self._matcher.is_stopped()
            self._num_taken += 1

    def forced(self, place: int) -> list[int]:
        """The tokens that come next whatever the model says, as the grammar's text is usually cut
        into tokens; none if the token before `place` has not been taken yet, or one behind it."""
        with self._lock:
            if place != self._num_taken or self._error is not None or self._is_stopped:
                return []
            found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def num_valid(self, place: int, token_ids: Sequence[int]) -> int:
        """How many of these tokens may stand at `place` and behind it, as far as it is known."""
        with self._lock:
            if place != self._num_taken or self._error is not None or self._is_stopped:
                return 0
            found: int = self._matcher.validate_tokens(list(token_ids))
        return found

    def ahead(self, place: int, token_ids: Sequence[int]) -> "list[Constraint]":
        """This one, and copies that have taken the first, the first two... of these tokens, which
        may stand at `place` and behind it."""
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
        """Whether a mask says which tokens may stand at a place; if not, all may, since the output
        has ended. `before`: the token of the place before, which may have been taken already."""
        try:
            if before is not None:
                self.take(place - 1, before)
        except InvalidRequest:
            return False
        assert place == self._num_taken, (place, self._num_taken)
        return self._error is None and not self._is_stopped

    def _finish(self, words: "npt.NDArray[np.int32]") -> None:
        """Make of what the matcher left in int32 [words] the mask."""
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
        text = f"`{self._field}` cannot be followed: {first}"
        self._error = InvalidRequest(text, param=self._field)
        return self._error


def fill_masks(constraints: Sequence[Constraint], words: "npt.NDArray[np.int32]") -> None:
    """Write the tokens that may come next into [constraints, words]: bit i of word j is token
    32 j + i. All constraints are masked, different, and of one vocabulary. Other Python runs
    beside."""
    vocabulary = constraints[0].vocabulary
    with ExitStack() as locks:
        for constraint in constraints:
            locks.enter_context(constraint._lock)
        # Threads take neighbours, and so seldom wait for each other's lexers.
        order = sorted(enumerate(constraints), key=lambda each: each[1]._lexer_id)
        vocabulary.threads.unsafe_compute_mask_ptr(
            [(constraint._matcher, i) for i, constraint in order],
            words.ctypes.data,
            vocabulary.num_words * words.itemsize,
            len(constraints),
        )
        for constraint, row in zip(constraints, words, strict=True):
            constraint._finish(row)
