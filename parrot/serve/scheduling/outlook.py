"""What a newcomer would find on an engine: now, and usually."""

import math
from dataclasses import dataclass
from typing import NamedTuple

_MEMORY_S = 10.0  # an engine's load counts for so long as usual there
_MAX_PROMPT_SHARE = 0.8  # of the time: prompts that are given faster wait, and are not computed


class Outlook(NamedTuple):
    """A newcomer's view of an engine: the wait for the prompts there, the steps of the tasks there,
    which go on for `remaining_s` on average by weight, and the engine's usual steps after that."""

    wait_s: float
    step_s: float
    remaining_s: float
    weight: float
    usual_step_s: float
    usual_weight: float

    def steps_s(self, num_steps: float) -> float:
        """Predicted seconds for `num_steps` steps."""
        if num_steps * self.step_s <= self.remaining_s:
            return num_steps * self.step_s
        num_usual = num_steps - self.remaining_s / self.step_s
        return self.remaining_s + num_usual * self.usual_step_s

    def harm_s(self, prefill_s: float, num_steps: float, growth_s: float) -> float:
        """Weighted seconds that others lose to a newcomer: those who are there wait for its prompt,
        and the steps of whoever is there take `growth_s` longer while it lasts."""
        remaining_s = self.remaining_s
        steps = min(num_steps, remaining_s / self.step_s) if remaining_s else 0.0
        harm_s = self.weight * (min(prefill_s, remaining_s) + steps * growth_s)
        return harm_s + self.usual_weight * (num_steps - steps) * growth_s


@dataclass(slots=True)
class UsualLoad:
    """Averages of an engine's load over time, in which what is older than `_MEMORY_S` counts
    little. `prompt_share` is the share of the time that prompts take."""

    since: float = 0.0
    tasks: float = 0.0
    read: float = 0.0
    weight: float = 0.0
    prompt_share: float = 0.0

    def advance(
        self, now: float, tasks: float, read: float, weight: float, prompts_until: float
    ) -> None:
        """Take in that the engine had this load since the last call, and computed prompts until
        `prompts_until`."""
        if now == self.since:
            return
        old = math.exp((self.since - now) / _MEMORY_S)
        new = 1.0 - old
        self.tasks = old * self.tasks + new * tasks
        self.read = old * self.read + new * read
        self.weight = old * self.weight + new * weight
        self.prompt_share *= old
        if prompts_until >= now:
            self.prompt_share += new
        elif prompts_until > self.since:
            self.prompt_share += math.exp((prompts_until - now) / _MEMORY_S) - old
        self.since = now

    @property
    def stretch(self) -> float:
        """Factor by which prompts that are computed meanwhile lengthen steps."""
        return 1.0 / (1.0 - min(self.prompt_share, _MAX_PROMPT_SHARE))
