"""When what ended by itself starts again."""

_STABLE_S = 60.0  # what ran for so long starts again after the first pause


class Restarts:
    """Pauses by name: each twice as long as the one before, until what ended had run for a minute.
    Times are on the clock `time.monotonic`."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def ended(self, name: str, started_at: float, now: float) -> float:
        """Note that it has ended; returns the pause."""
        is_stable = now - started_at > _STABLE_S
        pause_s = self._first_s if is_stable else self._next_s.get(name, self._first_s)
        self._next_s[name] = min(2 * pause_s, self._longest_s)
        self._due[name] = now + pause_s
        return pause_s

    def take_due(self, now: float) -> list[str]:
        """The names whose pause is over, each once."""
        names = [name for name, when in self._due.items() if when <= now]
        for name in names:
            del self._due[name]
        return names

    def wait_s(self, now: float) -> float | None:
        """Seconds until one is due; None: none will be."""
        return min((max(0.0, when - now) for when in self._due.values()), default=None)
