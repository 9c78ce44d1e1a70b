"""Copies of blocks and of window slots, which have pools and CPU memory of their own."""

from collections.abc import Sequence

from parrot.engine.core.steps import BlockCopy, Landed, StepPlan, Transfer
from parrot.engine.runner.host.copies import HostCopies, RankTransfers


class SlottedCopies:
    """`HostCopies` of a model with window slots."""

    def __init__(self, blocks: HostCopies | None, slots: HostCopies, spare_slot: int) -> None:
        """`blocks`: None if blocks have no KV."""
        self._blocks = blocks
        self._slots = slots
        self._spare_slot = spare_slot
        self._landed: list[Landed] = []  # Transfers of blocks without KV.

    def warm_up(self, block: int) -> None:
        if self._blocks is not None:
            self._blocks.warm_up(block)
        self._slots.warm_up(self._spare_slot)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            copies = self._slots if transfer.of_windows else self._blocks
            if copies is None:
                self._landed.append(Landed(transfer.transfer_id, True, 0.0))
            else:
                copies.transfer((transfer,))

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        landed, self._landed = self._landed, []
        landed += self._slots.landed(wait=False)
        if self._blocks is not None:
            landed += self._blocks.landed(wait=wait and not landed)
        return landed or self._slots.landed(wait=wait)

    def guard(self, plan: StepPlan) -> Sequence[int]:
        """A slot is attached to a block before it is written to, so changes name all of them."""
        awaited = [] if self._blocks is None else [*self._blocks.guard(plan)]
        written = {slot for _, slot in plan.slot_changes}
        written |= {copy.target_slot for copy in plan.copies}
        targets = tuple(BlockCopy(-1, slot, 0) for slot in written)
        return [*awaited, *self._slots.guard(StepPlan((), targets))]

    def follow(self, transfers: RankTransfers) -> None:
        for copies, of_windows in ((self._blocks, False), (self._slots, True)):
            if copies is not None:
                begun = tuple(one for one in transfers.begun if one.of_windows == of_windows)
                copies.follow(RankTransfers(begun, transfers.landed, transfers.awaited))
