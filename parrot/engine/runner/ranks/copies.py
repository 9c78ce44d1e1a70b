"""The host copies of a runner that may be one of several ranks."""

from collections.abc import Sequence

from parrot.engine.core.plan import Landed, StepPlan, Transfer
from parrot.engine.runner.host.copies import HostCopies, ToldTransfers
from parrot.engine.runner.ranks.steps import RankStep
from parrot.engine.runner.ranks.unit import Unit, together


class RankCopies:
    """`HostCopies` that lets the other ranks do the same. `unit`: on rank 0 of several, the
    others."""

    def __init__(self, copies: HostCopies, unit: Unit | None) -> None:
        self._copies = copies
        self._unit = unit

    def warm_up(self, block: int) -> None:
        self._copies.warm_up(block)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        with together(self._unit):
            self._tell(ToldTransfers(begun=tuple(transfers)))
            self._copies.transfer(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        with together(self._unit):
            if landed := self._copies.landed(wait=wait):
                self._tell(ToldTransfers(landed=tuple(one.transfer_id for one in landed)))
            return landed

    def guard(self, plan: StepPlan) -> Sequence[int]:
        if awaited := self._copies.guard(plan):
            self._tell(ToldTransfers(awaited=tuple(awaited)))
        return awaited

    def follow(self, told: ToldTransfers) -> None:
        self._copies.follow(told)

    def _tell(self, transfers: ToldTransfers) -> None:
        if self._unit is not None:
            self._unit.tell(RankStep.of(transfers))
