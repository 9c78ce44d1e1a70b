"""The drafts of one output."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parrot.engine.drafts.pace import Acceptance, Candidate
from parrot.engine.grammar.constraint import Constraint

if TYPE_CHECKING:
    from parrot.engine.drafts.finder import DraftFinder

_FORCED_RATE = 0.98  # of tokens that a grammar forces: their text may also be cut otherwise


class OutputDrafts:
    """Proposes what comes next, and counts what became of it. `context_ids` and `output_ids` grow
    with each token."""

    def __init__(
        self,
        finder: "DraftFinder",
        context_ids: "array[int]",
        output_ids: Sequence[int],
        max_output: int,
        constraint: Constraint | None,
        acceptance: Acceptance,
    ) -> None:
        self._finder = finder
        self._context_ids = context_ids
        self._output_ids = output_ids
        self._max_output = max_output
        self._constraint = constraint
        self._acceptance = acceptance
        self._ahead: list[int] = []
        self._place = -1  # in the output, behind which they are
        self._is_forced = False
        self.num_drafted = 0
        self.num_accepted = 0

    def look(self, limit: int) -> None:
        """Look for at most `limit` tokens behind the newest one."""
        place = self._place = len(self._output_ids)
        limit = min(limit, self._max_output - place - 1)
        if (followed := self._finder.follow(self._context_ids)) is not None:
            self._acceptance.count(*followed)
        forced = [] if self._constraint is None else self._constraint.forced(place)
        self._is_forced = bool(forced)
        self._ahead = forced[:limit] if forced else self._finder.ahead(self._context_ids, limit)
        if self._ahead and self._constraint is not None and not forced:
            self._ahead = self._ahead[: self._constraint.num_valid(place, self._ahead)]

    def candidate(self, num_pending: int = 0) -> Candidate:
        """The draft that was found behind the newest token, without its first `num_pending` tokens,
        which are known by then."""
        if self._place != len(self._output_ids):
            return Candidate(0, 0.0)
        if self._is_forced:
            rate = _FORCED_RATE
        else:
            rate = self._acceptance.rate(self._finder.match_length + num_pending)
        return Candidate(max(0, len(self._ahead) - num_pending), rate)

    def take(self, length: int) -> tuple[int, ...]:
        """The first tokens of what was found."""
        return tuple(self._ahead[:length])

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """A step has come out with this draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
