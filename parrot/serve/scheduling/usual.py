"""An engine's usual load: what those who come next will find there, on average."""

import math
from dataclasses import dataclass

_MEMORY_S = 10.0  # an engine's load counts for so long as usual there
_MAX_PROMPT_SHARE = 0.8  # of the time: prompts that are given faster wait, and are not computed


@dataclass(slots=True)
class UsualLoad:
    """Averages over time, in which what is older than `_MEMORY_S` counts little. `prompt_share`: of
    the time, what prompts take."""

    since: float = 0.0
    tasks: float = 0.0
    read: float = 0.0
    weight: float = 0.0
    prompt_share: float = 0.0

    def advance(
        self, now: float, tasks: float, read: float, weight: float, prompts_until: float
    ) -> None:
        """The engine had this load since it was told last, and computed prompts until then."""
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
        """How many times as long steps take because of the prompts that are computed meanwhile."""
        return 1.0 / (1.0 - min(self.prompt_share, _MAX_PROMPT_SHARE))
