"""An engine's memory, and what of it live sessions will go on from."""

from dataclasses import dataclass
from typing import Protocol


class Memory(Protocol):
    """Tokens that contexts may have, and that they have."""

    capacity: int
    used: int


@dataclass(slots=True)
class Room:
    """`promised`: tokens of the contexts that belong to sessions. A session may be thinking, and
    its engine look idle meanwhile."""

    memory: Memory
    promised: int = 0

    def lost(self, num_new: int) -> float:
        """The tokens of what is promised that would give way to so many more: as large a part of
        those evicted as of all."""
        memory = self.memory
        num_evicted = min(num_new, memory.used, memory.used + num_new - memory.capacity)
        return num_evicted * self.promised / memory.used if num_evicted > 0 else 0.0
