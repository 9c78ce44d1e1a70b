"""Where an output goes on in text that is known: its own context, and texts that came with it.

The newest tokens are looked for in these texts. Once they are found, a cursor follows as long as
the output repeats the text, which costs next to nothing; when it does not, it is looked for again,
first just behind where the cursor was: edited text goes on there. Looking is a few passes of numpy
over the text, some 20 us for 2,000 tokens and 0.1 ms for 94,000, so nothing is indexed."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

_END = -1  # stands behind each text, and is no token
_MIN_MATCH = 3
_MAX_MATCH = 8
_NEAR = 48  # tokens behind a lost cursor where fewer tokens are a match
_MIN_NEAR_MATCH = 2


class DraftFinder:
    """Follows one output. `texts` are searched besides its context, if `in_context`; with neither
    there is never a draft."""

    def __init__(self, texts: Sequence[Sequence[int]], *, in_context: bool = True) -> None:
        parts = [np.array([*text, _END], dtype=np.int32) for text in texts if len(text)]
        self._texts: IntArray = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        self._in_context = in_context
        self._num_seen = 0  # tokens of the context that are followed
        self._cursor: int | None = None  # in the texts, then the context: what may come next
        self._lost_at: int | None = None
        self._num_since_lost = 0

    def follow(self, context_ids: "array[int]") -> None:
        """Take in what the context has grown by since the last time."""
        num_seen, self._num_seen = self._num_seen, len(context_ids)
        for place in range(num_seen, len(context_ids)):
            if (cursor := self._cursor) is None:
                break
            if self._token_at(cursor, context_ids) == context_ids[place]:
                self._cursor = cursor + 1
            else:
                self._lost_at, self._num_since_lost, self._cursor = cursor, 0, None
        if self._cursor is None and len(context_ids) > num_seen:
            self._look(context_ids)

    def ahead(self, context_ids: "array[int]", limit: int) -> list[int]:
        """At most `limit` tokens that may come next, if `follow` has seen all of the context."""
        if self._cursor is None or limit <= 0:
            return []
        place = self._cursor - len(self._texts)
        if place < 0:
            found: list[int] = self._texts[self._cursor : self._cursor + limit].tolist()
            return found[: found.index(_END)] if _END in found else found
        found = context_ids[place : place + limit].tolist()
        while found and len(found) < limit:  # what repeats itself goes on doing so
            found += found[: limit - len(found)]
        return found

    def _token_at(self, cursor: int, context_ids: "array[int]") -> int:
        place = cursor - len(self._texts)
        return int(self._texts[cursor]) if place < 0 else context_ids[place]

    def _look(self, context_ids: "array[int]") -> None:
        newest = context_ids[-_MAX_MATCH:].tolist()
        near = self._lost_at
        if near is not None:
            self._num_since_lost += 1
            if self._num_since_lost > _NEAR:
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
        is_near = near is not None and near <= found.place < near + _NEAR
        if found.length >= (_MIN_NEAR_MATCH if is_near else _MIN_MATCH):
            self._cursor = found.place
            self._lost_at = None


class _Match:
    """`place` behind the match, where `length` tokens before it are the newest ones."""

    __slots__ = ("length", "place")

    def __init__(self, place: int, length: int) -> None:
        self.place = place
        self.length = length


def _find(text: IntArray, newest: Sequence[int], near: int | None) -> _Match:
    """The longest match; of equal ones the first from `near` on, else the last."""
    places = np.flatnonzero(text[:-1] == newest[-1]) + 1
    if not len(places):
        return _Match(0, 0)
    length = 1
    for back in range(2, len(newest) + 1):
        kept = places[places >= back]
        kept = kept[text[kept - back] == newest[-back]]
        if not len(kept):
            break
        places, length = kept, back
    later = places[places >= near] if near is not None else places[:0]
    return _Match(int(later[0] if len(later) else places[-1]), length)
