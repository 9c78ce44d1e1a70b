"""Which outputs of a step get drafts, and how long they are."""

import time
from collections.abc import Sequence

from parrot.engine.drafts.output_drafts import OutputDrafts
from parrot.engine.drafts.pace import StepFacts, share_out
from parrot.protocol.engine_api import StepCosts

_SMOOTHING = 0.1
_FIRST_TURNAROUND_S = 0.5e-3
_LOOK_SHARE = 0.25  # of a step's time
_MIN_PLAIN_SHARE = 0.1  # of a step's time is never that of its prompt tokens and drafts


class Drafter:
    """Decides by what steps take: without drafts, for each token of a draft, and more where they
    have to wait for the tokens of the step before.

    max_draft    tokens of one output's draft
    max_samples  tokens that one step may sample, drafts included"""

    def __init__(self, max_draft: int, max_samples: int) -> None:
        self._max_draft = max_draft
        self._max_samples = max_samples
        self._plain_s = StepCosts().step_s
        self._turnaround_s = _FIRST_TURNAROUND_S
        self._next_look = 0
        self.costs = StepCosts()

    def look(self, outputs: Sequence[OutputDrafts]) -> None:
        """Look for drafts of these outputs, as far as that takes a small part of a step; then of
        the others first."""
        if len(outputs) >= self._max_samples or not outputs:
            return
        deadline = time.perf_counter() + _LOOK_SHARE * self._plain_s
        first = self._next_look % len(outputs)
        for index in (*range(first, len(outputs)), *range(first)):
            outputs[index].look(self._max_draft + 1)
            if time.perf_counter() > deadline:
                self._next_look = index + 1
                return

    def choose(
        self, outputs: Sequence[OutputDrafts], num_sequences: int, *, num_pending: int = 0
    ) -> list[int]:
        """The tokens to draft of each output; all 0 if that does not pay. `num_pending`: tokens on
        their way for each of them."""
        candidates = [output.candidate(num_pending) for output in outputs]
        if not any(c.length for c in candidates):
            return [0] * len(candidates)
        max_tokens = self._max_samples - num_sequences
        facts = StepFacts(num_sequences, self._plain_s, self._turnaround_s, max_tokens)
        return share_out(candidates, facts, self.costs)

    def stepped(self, seconds: float, num_prompt_tokens: int, num_drafts: int) -> None:
        """A step has run that computed so many tokens besides one of each output."""
        added_s = (num_prompt_tokens + num_drafts) * self.costs.prefill_s
        plain_s = max(seconds - added_s, _MIN_PLAIN_SHARE * seconds)
        if plain_s > 0:
            self._plain_s += _SMOOTHING * (plain_s - self._plain_s)

    def turned(self, seconds: float) -> None:
        """It took so long from the end of a step to the launch of the next."""
        self._turnaround_s += _SMOOTHING * (seconds - self._turnaround_s)
