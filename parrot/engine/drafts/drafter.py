"""Which outputs of a step get drafts, and how long they are."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parrot.engine.config import SchedulerConfig
from parrot.engine.drafts.pace import Acceptance, Candidate, DraftCosts, share_out
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import StepCosts
from parrot.utils.clock import Clock

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


_FIRST_TURNAROUND_S = 0.3e-3
_LOOK_SHARE = 0.25  # of a step's time, for looking, at most
_LEAST_LOOK_SHARE = 0.02  # of it, also if the device waits for the host
_SPARE_SHARE = 0.5  # of the time in which the host would only wait
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
        self._next_look = 0
        self._looked_at: list[OutputDrafts] = []
        self._looked_s = 0.0  # beside the step that runs
        self._spare_s: float | None = None  # of the host beside a step, if it is known
        self.costs = DraftCosts(sizes, usual.step_s, _FIRST_TURNAROUND_S)
        self.costs.token_s = usual.prefill_s

    def look_beside(self, outputs: Sequence[OutputDrafts], *, has_prompts: bool) -> None:
        """Look for drafts of these outputs beside a step, in a part of the time in which the host
        would only wait for it: a host that is the slower one makes steps longer by looking. Beside
        prompts it does not only wait, since it launches their kernels one by one."""
        began = self._clock.now()
        most = _LOOK_SHARE * self.costs.plain_s
        spare_s = 0.0 if has_prompts else self._spare_s
        if spare_s is not None:
            least = _LEAST_LOOK_SHARE * self.costs.plain_s
            most = min(most, max(least, _SPARE_SHARE * spare_s))
        self._look(outputs, began + most)
        self._looked_s = self._clock.now() - began

    def waited(self, seconds: float, *, has_prompts: bool) -> None:
        """The host had nothing to do for so long before a step was over."""
        spare_s, self._looked_s = seconds + self._looked_s, 0.0
        if not has_prompts:
            before = spare_s if self._spare_s is None else self._spare_s
            self._spare_s = before + _SMOOTHING * (spare_s - before)

    def look(self, outputs: Sequence[OutputDrafts]) -> None:
        """Look for drafts of these outputs, as far as that takes a small part of a step."""
        self._look(outputs, self._clock.now() + _LOOK_SHARE * self.costs.plain_s)

    def _look(self, outputs: Sequence[OutputDrafts], deadline: float) -> None:
        """Until then; the next time at the others first."""
        self._looked_at = []
        if not outputs or len(outputs) >= self.costs.sizes[-1]:
            return
        first = self._next_look % len(outputs)
        for index in (*range(first, len(outputs)), *range(first)):
            outputs[index].look(self._max_draft + 1)
            self._looked_at.append(outputs[index])
            if self._clock.now() > deadline:
                self._next_look = index + 1
                return

    def pays_to_wait(self, num_sequences: int) -> bool:
        """Whether drafts that were found would pay behind the tokens of the step that runs: no
        other is launched before these are known."""
        return any(self.choose(self._looked_at, num_sequences, num_pending=1))

    def find(self, outputs: Sequence[OutputDrafts], num_sequences: int) -> list[tuple[int, ...]]:
        """The drafts of the next step, one for each of these outputs, whose tokens are all known;
        empty where it does not pay."""
        self.look(outputs)
        lengths = self.choose(outputs, num_sequences)
        return [output.take(n) for output, n in zip(outputs, lengths, strict=True)]

    def choose(
        self, outputs: Sequence[OutputDrafts], num_sequences: int, *, num_pending: int = 0
    ) -> list[int]:
        """The tokens to draft of each output; all 0 if that does not pay. `num_pending`: tokens on
        their way for each of them, in a step behind which another could be launched ahead."""
        candidates = [output.candidate(num_pending) for output in outputs]
        if not any(c.length for c in candidates):
            return [0] * len(candidates)
        # The host is waited for behind this step, and before it, if that could be spared.
        return share_out(candidates, num_sequences, self.costs, 1 + num_pending)


def make_drafter(limits: SchedulerConfig, sizes: Sequence[int], clock: Clock) -> Drafter | None:
    """None if there are to be no drafts. `sizes`: those of the runner."""
    within = [size for size in sizes if size <= limits.max_batch_size]
    wanted = within and limits.max_draft_tokens > 0
    return Drafter(limits.max_draft_tokens, within, clock) if wanted else None
