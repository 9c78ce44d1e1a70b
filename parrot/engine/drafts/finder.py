"""Finds where an output repeats known text: its own context, or texts that came with the request.

The newest tokens are searched in these texts. After a match, a cursor follows the text while the
output repeats it, at almost no cost. When the output differs, the text near the cursor is searched
first, because edited text often continues there. A search is a few NumPy passes over the text:
about 10 us for 2,000 tokens and 0.1 ms for 94,000. So there is no index. After 16 failed searches,
only every fourth step searches.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

_END = -1  # Marks the end of each text. It is not a token id.
_MIN_MATCH = 3  # Shortest match, in tokens. A larger value drafts less often.
_MAX_MATCH = 8  # Longest match, in tokens, that a search compares.
_NEAR_TOKENS = 48  # Tokens after a lost cursor within which a shorter match counts.
_MIN_NEAR_MATCH = 2  # Shortest match, in tokens, near a lost cursor.
_MAX_FULL_SEARCHES = 16  # Calls of `follow` without a match after which most calls do not search.
_STRIDE = 4  # Then only every `_STRIDE`-th call searches. Larger values cost less time.


class Followed(NamedTuple):
    """How an output continued after a match."""

    length: int  # Tokens of the match.
    num_right: int  # Tokens after the match that equal the text.
    is_lost: bool  # Whether the next token differs from the text.


class DraftFinder:
    """Follows one output. Searches `texts` and, with `in_context`, the output's own context."""

    def __init__(self, texts: Sequence[Sequence[int]], *, in_context: bool = True) -> None:
        parts = [np.array([*text, _END], dtype=np.int32) for text in texts if len(text)]
        self._texts: IntArray = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        self._in_context = in_context
        self._num_seen = 0  # Tokens of the context at the last `follow`.
        # Position of the next proposed token, in the concatenation of all texts and the context.
        self._cursor: int | None = None
        self.match_length = 0  # Tokens before the cursor that are known to equal the newest ones.
        self._lost_at: int | None = None  # The cursor when the output last differed.
        self._num_since_lost = 0
        self._num_failed = 0  # Calls without a match since the last match.

    def follow(self, context_ids: "array[int]") -> Followed | None:
        """Process the new tokens of the context. Returns None if there was no match to follow."""
        num_seen, self._num_seen = self._num_seen, len(context_ids)
        if num_seen == len(context_ids):
            return None
        if (cursor := self._cursor) is None:
            self._search(context_ids)
            return None
        length, new = self.match_length, context_ids[num_seen:].tolist()
        expected = self._tokens_after(cursor, len(new), context_ids)
        if new == expected:
            self._cursor, self.match_length = cursor + len(new), length + len(new)
            return Followed(length, len(new), False)
        pairs = enumerate(zip(new, [*expected, _END], strict=False))
        num_right = next(n for n, (token, other) in pairs if token != other)
        self._lost_at, self._num_since_lost, self._cursor = cursor + num_right, 0, None
        self._search(context_ids)
        return Followed(length, num_right, True)

    def propose(self, context_ids: "array[int]", limit: int) -> list[int]:
        """Propose at most `limit` next tokens. `follow` must have processed the whole context."""
        if self._cursor is None or limit <= 0:
            return []
        found = self._tokens_after(self._cursor, limit, context_ids)
        if self._cursor < len(self._texts):
            return found[: found.index(_END)] if _END in found else found
        while found and len(found) < limit:  # Assume that repeating text continues to repeat.
            found += found[: limit - len(found)]
        return found

    def _tokens_after(self, cursor: int, count: int, context_ids: "array[int]") -> list[int]:
        """The known tokens from `cursor` on, at most `count`."""
        start = cursor - len(self._texts)
        if start >= 0:
            return context_ids[start : start + count].tolist()
        found: list[int] = self._texts[cursor : cursor + count].tolist()
        return found

    def _search(self, context_ids: "array[int]") -> None:
        near = self._lost_at
        self._num_failed += 1
        if near is None and self._num_failed > _MAX_FULL_SEARCHES and self._num_failed % _STRIDE:
            return
        newest = context_ids[-_MAX_MATCH:].tolist()
        if near is not None:
            self._num_since_lost += 1
            if self._num_since_lost > _NEAR_TOKENS:
                near = self._lost_at = None
        found = _Match(0, 0)
        if len(self._texts):
            found = _find(self._texts, newest, near)
        if self._in_context:
            view = np.frombuffer(context_ids, dtype=np.int32)
            shift = len(self._texts)
            own = _find(view, newest, None if near is None else near - shift)
            if own.length > found.length:
                found = _Match(own.place + shift, own.length)
        is_near = near is not None and near <= found.place < near + _NEAR_TOKENS
        if found.length >= (_MIN_NEAR_MATCH if is_near else _MIN_MATCH):
            self._cursor, self.match_length = found.place, found.length
            self._lost_at, self._num_failed = None, 0


class _Match:
    """A match: the `length` tokens before `place` equal the newest tokens."""

    __slots__ = ("length", "place")

    def __init__(self, place: int, length: int) -> None:
        self.place = place
        self.length = length


def _find(text: IntArray, newest: Sequence[int], near: int | None) -> _Match:
    """The longest match. Of equal matches, the first one from `near` on, or the last one."""
    last = (text[:-1] == newest[-1]).nonzero()[0]  # Positions of the newest token.
    if not last.size:
        return _Match(0, 0)
    length = 1
    for back in range(1, len(newest)):
        kept = last if last[0] >= back else last[last >= back]
        kept = kept[text[kept - back] == newest[-1 - back]]
        if not kept.size:
            break
        last, length = kept, back + 1
    at = last.size if near is None else int(last.searchsorted(near - 1))
    return _Match(int(last[at if at < last.size else -1]) + 1, length)
