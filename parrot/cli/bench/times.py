"""When an output came."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """`arrivals`: when each piece came, at least one, in the loop's time. `tokens`: as the server
    counted them; None: it did not say."""

    arrivals: tuple[float, ...]
    tokens: int | None = None

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def last(self) -> float:
        return self.arrivals[-1]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each piece to the next."""
        return [after - before for before, after in pairwise(self.arrivals)]

    def later(self, seconds: float) -> "StreamTimes":
        return StreamTimes(tuple(at + seconds for at in self.arrivals), self.tokens)
