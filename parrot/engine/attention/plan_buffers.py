"""Plans on the device, in buffers that graphs can be captured with."""

from dataclasses import dataclass

import numpy as np
import torch

from parrot.engine.attention.work_list import CONVERTED_FIRST, ITEM_FIELDS, TABLE_ROW, WorkList


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room for a plan in fixed buffers; a captured graph always launches all of it. It has tiles
    for narrow items that are even or not, and holds both."""

    num_tokens: int
    narrow: int
    shared: int
    fills: int
    slots: int
    is_even: bool = False
    converted_fills: int = 0
    converted_pages: int = 0

    @classmethod
    def of(cls, work: WorkList) -> "Capacity":
        return cls(
            len(work.token_order),
            len(work.narrow),
            len(work.shared),
            len(work.fills),
            work.num_slots,
            work.narrow_is_even,
            len(work.converted_fills),
            len(work.converted_pages),
        )

    def holds(self, work: WorkList) -> bool:
        need = Capacity.of(work)
        return (
            need.num_tokens <= self.num_tokens
            and need.narrow <= self.narrow
            and need.shared <= self.shared
            and need.fills <= self.fills
            and need.slots <= self.slots
            and need.converted_fills <= self.converted_fills
            and need.converted_pages <= self.converted_pages
        )


class PlanBuffers:
    """`work` on the device, at fixed addresses: one int32 buffer, one copy per plan.

        [ narrow | shared | fills | converted_fills | token_order | slot_indptr | slot_of |
          converted_pages ]

    A smaller plan leaves zeros behind: items without tokens, tokens without slots; and pages -1.
    TABLE_ROW of converted fills is CONVERTED_FIRST here: a row of a table of converted pages."""

    def __init__(
        self, work: WorkList, device: torch.device, capacity: Capacity | None = None
    ) -> None:
        """`capacity`: by default just enough for this plan."""
        capacity = capacity or Capacity.of(work)
        sizes = (
            capacity.narrow * ITEM_FIELDS,
            capacity.shared * ITEM_FIELDS,
            capacity.fills * ITEM_FIELDS,
            capacity.converted_fills * ITEM_FIELDS,
            capacity.num_tokens,
            capacity.num_tokens + 1,
            capacity.slots,
            capacity.converted_pages,
        )
        # Items are read as 32-byte rows: keep every part aligned.
        starts = np.cumsum([0, *(-(-size // 32) * 32 for size in sizes)]).tolist()
        self.capacity = capacity
        pinned = device.type == "cuda"
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=pinned)
        self._device = torch.empty(starts[-1], dtype=torch.int32, device=device)
        parts = list(zip(starts, sizes, strict=False))
        self._host_parts = [self._host[a : a + n].numpy() for a, n in parts]
        views = [self._device[a : a + n] for a, n in parts]
        self.narrow, self.shared, self.fills, self.converted_fills = views[:4]
        self.token_order, self.slot_indptr, self.slot_of, self.converted_pages = views[4:]
        self.upload(work)

    def upload(self, work: WorkList) -> None:
        """Replace the plan, on the current stream. The previous copy must have been done."""
        assert self.capacity.holds(work), (self.capacity, Capacity.of(work))
        converted_fills = work.converted_fills.copy()
        converted_fills[:, TABLE_ROW] = converted_fills[:, CONVERTED_FIRST]
        items = (work.narrow, work.shared, work.fills, converted_fills)
        sources = (*items, work.token_order, work.slot_indptr, work.slot_of, work.converted_pages)
        for target, source in zip(self._host_parts, sources, strict=True):
            flat = source.reshape(-1)
            target[: len(flat)] = flat
            target[len(flat) :] = 0
        self._host_parts[5][len(work.slot_indptr) :] = work.num_slots
        self._host_parts[7][len(work.converted_pages) :] = -1
        self._device.copy_(self._host, non_blocking=True)
        self.work = work
