"""Decides which outputs of a step get drafts, and how long the drafts are."""

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

# Assumed acceptance of tokens that a grammar forces. The same text may also have other tokens.
_FORCED_ACCEPTANCE = 0.98


class OutputDrafts:
    """Proposes drafts for one output, and counts the accepted tokens.

    `context_ids` and `output_ids` are views that grow with each token."""

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
        self._draft_position = -1  # Length of the output when `_draft` was found.
        self._is_forced = False  # Whether the grammar allows no other tokens than `_draft`.
        self.num_drafted = 0
        self.num_accepted = 0

    def search(self, limit: int) -> None:
        """Search for a draft of at most `limit` tokens after the newest token."""
        position = self._draft_position = len(self._output_ids)
        limit = min(limit, self._max_output - position - 1)
        if (followed := self._finder.follow(self._context_ids)) is not None:
            self._acceptance.count(*followed)
        forced = [] if self._constraint is None else self._constraint.forced(position)
        self._is_forced = bool(forced)
        self._draft = forced[:limit] if forced else self._finder.propose(self._context_ids, limit)
        if self._draft and self._constraint is not None and not forced:
            self._draft = self._draft[: self._constraint.num_valid(position, self._draft)]

    def candidate(self, num_pending: int = 0) -> Candidate:
        """The draft after the newest token, without its first `num_pending` tokens.

        These tokens will be known when the draft is used."""
        if self._draft_position != len(self._output_ids):
            return Candidate(0, 0.0)
        if self._is_forced:
            rate = _FORCED_ACCEPTANCE
        else:
            rate = self._acceptance.rate(self._finder.match_length + num_pending)
        return Candidate(max(0, len(self._draft) - num_pending), rate)

    def take(self, length: int) -> tuple[int, ...]:
        """The first `length` tokens of the draft."""
        return tuple(self._draft[:length])

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the result of a step that verified a draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


_FIRST_TURNAROUND_S = 0.3e-3  # Assumed turnaround, in seconds, before the first measurement.
_MAX_SEARCH_SHARE = 0.25  # Most time for searches, as a fraction of a step's time.
_MIN_SEARCH_SHARE = 0.02  # Least time for searches, as a fraction of a step's time.
# Fraction of the CPU's idle time that searches may use. A larger value may delay the GPU.
_IDLE_SEARCH_SHARE = 0.5
_SMOOTHING = 0.1  # Weight of the newest step in the average idle time. Larger adapts faster.


class Drafter:
    """Chooses drafts that increase the tokens per second, by measured costs and acceptance."""

    def __init__(self, max_draft: int, sizes: Sequence[int], clock: Clock) -> None:
        """`max_draft`: most tokens of one draft. `sizes`: see `DraftCosts`."""
        defaults = StepCosts()
        self._clock = clock
        self._max_draft = max_draft
        self.acceptance = Acceptance()  # Of all outputs. Each output starts with these rates.
        self._next_search = 0  # Index of the output that is searched first.
        self._searched: list[OutputDrafts] = []  # Outputs of the last search.
        self._search_s = 0.0  # Search time during the step in flight.
        self._idle_s: float | None = None  # Average idle time of the CPU in a step.
        self.costs = DraftCosts(sizes, defaults.step_s, _FIRST_TURNAROUND_S)
        self.costs.token_s = defaults.prefill_s

    def search_during_step(self, outputs: Sequence[OutputDrafts], *, has_prompts: bool) -> None:
        """Search for drafts during a step, within a fraction of the CPU's idle time.

        A CPU without idle time would lengthen steps by searching. In steps with prompts, the CPU is
        assumed to have none, because it launches their kernels one by one."""
        began = self._clock.now()
        most = _MAX_SEARCH_SHARE * self.costs.plain_s
        idle_s = 0.0 if has_prompts else self._idle_s
        if idle_s is not None:
            least = _MIN_SEARCH_SHARE * self.costs.plain_s
            most = min(most, max(least, _IDLE_SEARCH_SHARE * idle_s))
        self._search(outputs, began + most)
        self._search_s = self._clock.now() - began

    def record_wait(self, seconds: float, *, has_prompts: bool) -> None:
        """Record that the CPU was idle for `seconds` at the end of a step."""
        idle_s, self._search_s = seconds + self._search_s, 0.0
        if not has_prompts:
            before = idle_s if self._idle_s is None else self._idle_s
            self._idle_s = before + _SMOOTHING * (idle_s - before)

    def search(self, outputs: Sequence[OutputDrafts]) -> None:
        """Search for drafts of the outputs, within a fraction of a step's time."""
        self._search(outputs, self._clock.now() + _MAX_SEARCH_SHARE * self.costs.plain_s)

    def _search(self, outputs: Sequence[OutputDrafts], deadline: float) -> None:
        """Search until `deadline`. The next call starts with the outputs that were left out."""
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
        """Whether the drafts are worth waiting for the tokens of the step in flight.

        Without drafts, the next step would be launched before these tokens are known."""
        return any(self.choose_lengths(self._searched, num_sequences, num_pending=1))

    def find(self, outputs: Sequence[OutputDrafts], num_sequences: int) -> list[tuple[int, ...]]:
        """Search and return the drafts of the next step, one per output, which may be empty.

        All tokens of the outputs must be known."""
        self.search(outputs)
        lengths = self.choose_lengths(outputs, num_sequences)
        return [output.take(n) for output, n in zip(outputs, lengths, strict=True)]

    def choose_lengths(
        self, outputs: Sequence[OutputDrafts], num_sequences: int, *, num_pending: int = 0
    ) -> list[int]:
        """The length of each output's draft; all 0 if drafts do not pay.

        `num_pending`: tokens of each output that a step in flight samples."""
        candidates = [output.candidate(num_pending) for output in outputs]
        if not any(c.length for c in candidates):
            return [0] * len(candidates)
        # The GPU waits for the CPU after this step. It also waits before it if a step is in flight.
        return choose_draft_lengths(candidates, num_sequences, self.costs, 1 + num_pending)


def make_drafter(limits: SchedulerConfig, sizes: Sequence[int], clock: Clock) -> Drafter | None:
    """Make a drafter; None if drafts are turned off. `sizes`: the runner's `draft_sizes`."""
    within = [size for size in sizes if size <= limits.max_batch_size]
    wanted = within and limits.max_draft_tokens > 0
    return Drafter(limits.max_draft_tokens, within, clock) if wanted else None
