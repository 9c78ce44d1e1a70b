"""The ids of what is in a session's graph."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from parrot.utils.ids import IdCounter, SecretIds
from parrot.utils.tasks import Backlog


@dataclass(frozen=True, slots=True)
class Shared:
    """The counters, and the backlog, that the graphs of all sessions of a ServeCore share."""

    tasks: IdCounter = field(default_factory=lambda: IdCounter(1))
    requests: IdCounter = field(default_factory=lambda: IdCounter(1))
    backlog: Backlog = field(default_factory=Backlog)


class SessionIds:
    """The sources of one session's ids: the shared counters, and ids of variables that
    follow from the session's secret."""

    def __init__(self, shared: Shared, secret: str) -> None:
        self.tasks, self.requests = shared.tasks, shared.requests
        self.variables = SecretIds(secret)

    @property
    def upcoming(self) -> list[int]:
        """The numbers of the next ids. Set back, the same ids come again."""
        return [self.tasks.upcoming, self.requests.upcoming, self.variables.upcoming]

    @upcoming.setter
    def upcoming(self, numbers: Sequence[int]) -> None:
        self.tasks.upcoming, self.requests.upcoming, self.variables.upcoming = numbers
