"""Which outputs of a step get drafts, and how long they are."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parrot.engine.config import SchedulerConfig
from parrot.engine.drafts.pace import Acceptance, Candidate, DraftCosts, choose_draft_lengths
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import StepCosts
from parrot.utils.clock import Clock

if TYPE_CHECKING:
    from parrot.engine.drafts.finder import DraftFinder

_FORCED_ACCEPTANCE = 0.98  # of tokens that a grammar forces: their text may also be cut otherwise


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
        self._draft: list[int] = []
        self._draft_position = -1  # in the output, behind which they are
        self._is_forced = False
        self.num_drafted = 0
        self.num_accepted = 0

    def search(self, limit: int) -> None:
        """Look for at most `limit` tokens behind the newest one."""
        place = self._draft_position = len(self._output_ids)
        limit = min(limit, self._max_output - place - 1)
        if (followed := self._finder.follow(self._context_ids)) is not None:
            self._acceptance.count(*followed)
        forced = [] if self._constraint is None else self._constraint.forced(place)
        self._is_forced = bool(forced)
        self._draft = forced[:limit] if forced else self._finder.propose(self._context_ids, limit)
        if self._draft and self._constraint is not None and not forced:
            self._draft = self._draft[: self._constraint.num_valid(place, self._draft)]

    def candidate(self, num_pending: int = 0) -> Candidate:
        """The draft that was found behind the newest token, without its first `num_pending` tokens,
        which are known by then."""
        if self._draft_position != len(self._output_ids):
            return Candidate(0, 0.0)
        if self._is_forced:
            rate = _FORCED_ACCEPTANCE
        else:
            rate = self._acceptance.rate(self._finder.match_length + num_pending)
        return Candidate(max(0, len(self._draft) - num_pending), rate)

    def take(self, length: int) -> tuple[int, ...]:
        """The first tokens of what was found."""
        return tuple(self._draft[:length])

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """A step has come out with this draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


_FIRST_TURNAROUND_S = 0.3e-3
_MAX_SEARCH_SHARE = 0.25  # of a step's time, for looking, at most
_MIN_SEARCH_SHARE = 0.02  # of it, also if the device waits for the host
_IDLE_SEARCH_SHARE = 0.5  # of the time in which the host would only wait
_SMOOTHING = 0.1


class Drafter:
    """Decides by what steps take: without drafts, for each token of a draft, and more where they
    have to wait for the tokens of the step before.

    max_draft   tokens of one output's draft
    sizes       see `DraftCosts`
    acceptance  of all outputs, with which each begins"""

    def __init__(self, max_draft: int, sizes: Sequence[int], clock: Clock) -> None:
        usual = StepCosts()
        self._clock = clock
        self._max_draft = max_draft
        self.acceptance = Acceptance()
        self._next_search = 0
        self._searched: list[OutputDrafts] = []
        self._search_s = 0.0  # beside the step that runs
        self._idle_s: float | None = None  # of the host beside a step, if it is known
        self.costs = DraftCosts(sizes, usual.step_s, _FIRST_TURNAROUND_S)
        self.costs.token_s = usual.prefill_s

    def search_during_step(self, outputs: Sequence[OutputDrafts], *, has_prompts: bool) -> None:
        """Look for drafts of these outputs beside a step, in a part of the time in which the host
        would only wait for it: a host that is the slower one makes steps longer by looking. Beside
        prompts it does not only wait, since it launches their kernels one by one."""
        began = self._clock.now()
        most = _MAX_SEARCH_SHARE * self.costs.plain_s
        idle_s = 0.0 if has_prompts else self._idle_s
        if idle_s is not None:
            least = _MIN_SEARCH_SHARE * self.costs.plain_s
            most = min(most, max(least, _IDLE_SEARCH_SHARE * idle_s))
        self._search(outputs, began + most)
        self._search_s = self._clock.now() - began

    def record_wait(self, seconds: float, *, has_prompts: bool) -> None:
        """The host had nothing to do for so long before a step was over."""
        idle_s, self._search_s = seconds + self._search_s, 0.0
        if not has_prompts:
            before = idle_s if self._idle_s is None else self._idle_s
            self._idle_s = before + _SMOOTHING * (idle_s - before)

    def search(self, outputs: Sequence[OutputDrafts]) -> None:
        """Look for drafts of these outputs, as far as that takes a small part of a step."""
        self._search(outputs, self._clock.now() + _MAX_SEARCH_SHARE * self.costs.plain_s)

    def _search(self, outputs: Sequence[OutputDrafts], deadline: float) -> None:
        """Until then; the next time at the others first."""
        self._searched = []
        if not outputs or len(outputs) >= self.costs.sizes[-1]:
            return
        first = self._next_search % len(outputs)
        for index in (*range(first, len(outputs)), *range(first)):
            outputs[index].search(self._max_draft + 1)
            self._searched.append(outputs[index])
            if self._clock.now() > deadline:
                self._next_search = index + 1
                return

    def pays_to_wait(self, num_sequences: int) -> bool:
        """Whether drafts that were found would pay behind the tokens of the step that runs: no
        other is launched before these are known."""
        return any(self.choose_lengths(self._searched, num_sequences, num_pending=1))

    def find(self, outputs: Sequence[OutputDrafts], num_sequences: int) -> list[tuple[int, ...]]:
        """The drafts of the next step, one for each of these outputs, whose tokens are all known;
        empty where it does not pay."""
        self.search(outputs)
        lengths = self.choose_lengths(outputs, num_sequences)
        return [output.take(n) for output, n in zip(outputs, lengths, strict=True)]

    def choose_lengths(
        self, outputs: Sequence[OutputDrafts], num_sequences: int, *, num_pending: int = 0
    ) -> list[int]:
        """The tokens to draft of each output; all 0 if that does not pay. `num_pending`: tokens on
        their way for each of them, in a step behind which another could be launched ahead."""
        candidates = [output.candidate(num_pending) for output in outputs]
        if not any(c.length for c in candidates):
            return [0] * len(candidates)
        # The host is record_wait for behind this step, and before it, if that could be spared.
        return choose_draft_lengths(candidates, num_sequences, self.costs, 1 + num_pending)


def make_drafter(limits: SchedulerConfig, sizes: Sequence[int], clock: Clock) -> Drafter | None:
    """None if there are to be no drafts. `sizes`: those of the runner."""
    within = [size for size in sizes if size <= limits.max_batch_size]
    wanted = within and limits.max_draft_tokens > 0
    return Drafter(limits.max_draft_tokens, within, clock) if wanted else None
