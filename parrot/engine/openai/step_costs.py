"""The costs of the foreign server's steps, fitted to the times of its answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from parrot.engine.core.step_costs import StepCostFit
from parrot.protocol.engine_api import ServerLoad, StepCosts, Usage
from parrot.utils.clock import Clock

_LATENCY_SMOOTHING = 0.1


class _Totals(NamedTuple):
    """Sums of the server's work so far: answers and their tokens of context, times seconds, and
    prompt tokens computed."""

    answer_s: float = 0.0
    token_s: float = 0.0
    prompt_tokens: float = 0.0


@dataclass(slots=True)
class Answer:
    """One answer under way; `usage` is set when it is there."""

    usage: Usage | None = None


class AnswerCosts:
    """Takes the server to make one step for each token of an answer, beside all other answers that
    are under way: this engine's, and others' as far as `heed` tells. What is not told makes steps
    look slower, as they are. `latency_s`: seconds that an answer took of late, of `num_answered` so
    far."""

    def __init__(self, clock: Clock) -> None:
        self.num_answered = 0
        self.latency_s = 0.0
        self._clock = clock
        self._fit = StepCostFit()
        self._totals = _Totals()
        self._since = clock.now()
        self._num_answers = 0
        self._num_tokens = 0.0
        self._others = ServerLoad()

    def heed(self, load: ServerLoad | None) -> None:
        """Count from now on what others have the server do; None: not known."""
        self._advance()
        self._others = load or ServerLoad()

    def costs(self) -> StepCosts | None:
        """The costs; None before the first answer that counts its tokens."""
        return self._fit.costs()

    @contextmanager
    def answering(self, num_tokens: float) -> Iterator[Answer]:
        """An answer is under way inside; its prompt has about `num_tokens`."""
        before, began = self._advance(), self._since
        self._num_answers += 1
        self._num_tokens += num_tokens
        answer = Answer()
        try:
            yield answer
        finally:
            after = self._advance()
            self._num_answers -= 1
            self._num_tokens -= num_tokens
        if answer.usage is not None:
            self._learn(before, after, self._since - began, answer.usage)

    def _learn(self, before: _Totals, after: _Totals, seconds: float, usage: Usage) -> None:
        weight = _LATENCY_SMOOTHING if self.num_answered else 1.0
        self.latency_s += weight * (seconds - self.latency_s)
        self.num_answered += 1
        self._totals = after._replace(prompt_tokens=after.prompt_tokens + usage.computed_tokens)
        if usage.output_tokens <= 0 or seconds <= 0:
            return
        steps_per_s = usage.output_tokens / seconds
        self._fit.observe(
            seconds,
            num_steps=usage.output_tokens,
            num_sequences=(after.answer_s - before.answer_s) * steps_per_s,
            num_tokens=(after.token_s - before.token_s) * steps_per_s,
            num_prompt_tokens=self._totals.prompt_tokens - before.prompt_tokens,
        )

    def _advance(self) -> _Totals:
        now, totals, others = self._clock.now(), self._totals, self._others
        elapsed_s, self._since = now - self._since, now
        self._totals = totals._replace(
            answer_s=totals.answer_s + (self._num_answers + others.num_others) * elapsed_s,
            token_s=totals.token_s + (self._num_tokens + others.other_tokens) * elapsed_s,
        )
        return self._totals
