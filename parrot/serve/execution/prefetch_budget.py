"""How much of an engine's time may go into what is perhaps computed for nothing."""

from dataclasses import dataclass, field

_WASTED_SHARE = 0.02  # how much longer steps may become for what nobody will use
_MAX_SHARE = 0.2
_PRIOR_TOKENS = 16384
_MEMORY = 7 / 8  # from one completion to the next


@dataclass(slots=True)
class Waste:
    """How many of the tokens that engines were asked to compute ahead were for nothing, lately.
    Before anything is known, `prior` of them are."""

    prior: float
    asked: float = _PRIOR_TOKENS
    wasted: float = field(init=False)

    def __post_init__(self) -> None:
        self.wasted = self.prior * self.asked

    def add(self, num_tokens: int, *, is_used: bool) -> None:
        self.asked = self.asked * _MEMORY + num_tokens
        self.wasted = self.wasted * _MEMORY + (0 if is_used else num_tokens)

    @property
    def share(self) -> float:
        """Of an engine's time, for more of the same. What will be used only comes earlier; what is
        wasted takes `_WASTED_SHARE`, as expected."""
        return min(_MAX_SHARE, _WASTED_SHARE * self.asked / max(self.wasted, 1.0))
