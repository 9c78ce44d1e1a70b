"""Copies between the tiers of a simulated engine, which only take time."""

from collections import deque
from collections.abc import Sequence

from parrot.engine.core.plan import Landed, Transfer
from parrot.utils.clock import Clock

_ROUNDING_S = 1e-9  # of a clock that was told to sleep until then


class SimTransfers:
    """Each direction takes one transfer after the other, `block_s` for each of its blocks."""

    def __init__(self, block_s: float, clock: Clock) -> None:
        self._block_s = block_s
        self._clock = clock
        self._lanes: dict[bool, deque[tuple[float, Landed]]] = {True: deque(), False: deque()}
        self._busy_until = {True: 0.0, False: 0.0}

    def begin(self, transfers: Sequence[Transfer]) -> None:
        now = self._clock.now()
        for transfer in transfers:
            way, seconds = transfer.to_host, len(transfer.blocks) * self._block_s
            end = self._busy_until[way] = max(now, self._busy_until[way]) + seconds
            self._lanes[way].append((end, Landed(transfer.transfer_id, True, seconds)))

    @property
    def next_landing(self) -> float | None:
        """When the next one lands, by the clock; None if none is under way."""
        return min((lane[0][0] for lane in self._lanes.values() if lane), default=None)

    def landed(self) -> list[Landed]:
        """The copies that have landed by now and were not reported yet."""
        now, landed = self._clock.now(), []
        for lane in self._lanes.values():
            while lane and lane[0][0] <= now + _ROUNDING_S:
                landed.append(lane.popleft()[1])
        return landed
