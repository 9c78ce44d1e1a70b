"""The block tables of layers with windows, which name window slots instead of blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from parrot.engine.attention.work_list import StepRows
from parrot.engine.runner.staging import Stage


class SlotTable:
    """The slot of each block. Blocks without a slot have the slot of an earlier time, or slot 0.

    A step does not read or write slots of such blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.slot_of = np.zeros(num_blocks, dtype=np.int32)

    def update(self, changes: Iterable[tuple[int, int]]) -> None:
        """See `StepPlan.slot_changes`."""
        for block, slot in changes:
            self.slot_of[block] = slot

    def of(self, step: StepRows) -> StepRows:
        return replace(step, tables=self.slot_of[step.tables])


class DeviceSlots:
    """The block tables of layers with windows in GPU memory, at a fixed address.

    They are computed from the block tables, because a slot can be attached to a block of any row.
    """

    def __init__(self, num_blocks: int, tables: torch.Tensor) -> None:
        """`tables`: the block tables."""
        self._known = SlotTable(num_blocks)
        self._block_tables = tables
        self._slot_of = torch.zeros(num_blocks, dtype=torch.int32, device=tables.device)
        self._stage = Stage(2 * num_blocks + 64, tables.device)  # Any number of changes fits.
        self._is_stale = False
        self.tables = torch.zeros_like(tables)

    def forget(self) -> None:
        """Send all slots again, because a change may not have been sent after an error."""
        self._is_stale = True

    def update(self, changes: Sequence[tuple[int, int]], *, has_new_blocks: bool) -> None:
        """Apply `StepPlan.slot_changes`. `has_new_blocks`: the block tables have changed."""
        self._known.update(changes)
        if self._is_stale:
            [slots] = self._stage.send([self._known.slot_of])
            self._slot_of.copy_(slots)
        elif changes:
            pairs = np.array(changes, dtype=np.int32)
            places, slots = self._stage.send([pairs[:, 0], pairs[:, 1]])
            self._slot_of[places] = slots
        elif not has_new_blocks:
            return
        self._stage.sent()
        self._is_stale = False
        found = self.tables.view(-1)
        torch.index_select(self._slot_of, 0, self._block_tables.view(-1), out=found)
