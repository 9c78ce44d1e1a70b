"""Contexts of models with sliding windows, whose windowed layers keep KV only inside the window.

The block table of a context is as it is in other models. A context can continue after a token if
the blocks of its window have slots (`WindowPool`). A running context holds these slots, and the
slots of the blocks that its step writes:

    block table        [ 3 | 9 | 4 | 7 | 2 | 6 ]        window of 2 blocks, 16 tokens of KV
    window                         [ 7 | 2 | 6 ]        held; the next step writes to block 6

A prefix hit, a fork or a preempted job may find that blocks of its window have lost their slots.
Then it continues at an earlier point whose window is complete. At worst this is position 0. The KV
after that point is computed again in blocks of its own. `publish` replaces these by the blocks of
equal content, which get the slots.
"""

from collections.abc import Iterable, Sequence

from parrot.engine.core.block_pool import BlockHasher, BlockPool
from parrot.engine.core.contexts import Context, ContextTree
from parrot.engine.core.shares import ShareGroup
from parrot.engine.core.steps import BlockCopy
from parrot.engine.core.window_pool import WindowPool, last_complete
from parrot.protocol.engine_api import WindowSlots

_NOTHING = range(0)

# If contexts take turns and need more windows than there are slots, the least recently used window
# is always the one that is needed next. So the slots of recomputed windows are reused first, except
# for each fourth of these windows. A larger value adapts to other contexts more slowly.
_KEEP_EVERY = 4


class WindowedTree(ContextTree):
    """The contexts of a model with windows of `window` tokens, and the slots of their blocks."""

    has_windows = True

    def __init__(
        self, pool: BlockPool, hasher: BlockHasher | None, num_slots: int, window: int
    ) -> None:
        super().__init__(pool, hasher)
        self.slots = WindowPool(num_slots, pool.shares, pool.owner)
        pool.on_blank = self._on_blank
        self._window = window
        self._num_lost = 0  # Contexts whose window was lost before they could continue.
        # The last blocks of contexts that have ended, and whether another has continued there.
        self._ends: dict[int, bool] = {}
        self._span = pool.blocks_for(window)  # Blocks before a block that its tokens may read.
        # A step also needs slots for two partly read blocks, and for both blocks of a copy.
        self.max_chunk = max(1, (num_slots - self._span - 4) * pool.block_size)

    def _on_blank(self, block: int) -> None:
        self.slots.detach(block)
        self._ends.pop(block, None)

    def _first_read(self, context: Context) -> int:
        """The first block that the context's next token reads."""
        return max(0, context.num_computed + 1 - self._window) // self.block_size

    def _resumable(self, blocks: list[int]) -> int:
        """The largest number of first blocks after which a context can continue."""
        return last_complete(len(blocks), self._span, lambda i: self.slots.has(blocks[i]))

    def settle(self, context: Context) -> None:
        """Before a job is admitted, drop KV after which its context cannot continue."""
        end = self.pool.blocks_for(context.num_computed)
        if all(map(self.slots.has, context.block_ids[self._first_read(context) : end])):
            return
        blocks = context.block_ids[: context.num_computed // self.block_size]
        self._record_lost(context, blocks)
        self.truncate(context, self._resumable(blocks))

    def _record_lost(self, context: Context, blocks: list[int]) -> None:
        """Record that the window after `blocks` is lost.

        These are a common prefix if a context continued there, unless it was the first one after
        the end of another: this is what turns of a conversation do."""
        if len(blocks) <= context.num_lost:
            return
        context.num_lost, last = len(blocks), blocks[-1]
        context.has_common = self._ends.get(last, True)
        if last in self._ends:
            self._ends[last] = True

    def _adoptable(self, context: Context, found: list[int]) -> list[int]:
        first = context.num_computed // self.block_size
        blocks = context.block_ids[:first] + found
        num_blocks = self._resumable(blocks)
        if num_blocks < len(blocks):
            self._record_lost(context, blocks)
        return found[: max(0, num_blocks - first)]

    def _may_replace(self, context: Context, index: int, published: int) -> bool:
        own = context.block_ids[index]
        if not self.slots.has(own):
            return True
        if self.slots.has(published):
            if index in context.window:
                self.slots.hold((published,))
                self.slots.release((own,), keep=True)
            return True
        if self.pool.num_refs(own) > 1:
            return False  # Another context may need the slot of this block.
        self.slots.move(own, published)
        return True

    def max_end(self, context: Context) -> int:
        num_blocks = context.window.stop + self.slots.num_free
        return min(super().max_end(context), num_blocks * self.block_size)

    def reserve(
        self, context: Context, end: int, step_end: int | None = None
    ) -> tuple[BlockCopy, ...] | None:
        """Also attach and hold the slots of the blocks that the next step reads or writes."""
        size, before = self.block_size, context.window
        stop = -(-(end if step_end is None else step_end) // size)
        if stop <= before.stop and context.num_computed // size >= context.owned_from:
            if end <= len(context.block_ids) * size:
                return ()  # Most generated tokens take this path.
            return super().reserve(context, end)
        if before:
            self.advance(context)  # Accepted drafts have moved the window since the last step.
            before = context.window
        window = self._hold_written(context, stop)
        tail = context.num_computed // self.block_size
        is_replaced = tail in window and self.must_copy(context)
        shared = context.block_ids[tail] if is_replaced else -1
        num_new = max(0, stop - window.stop) + is_replaced
        copies = None
        if num_new <= self.slots.num_free:
            copies = super().reserve(context, end)
        if copies is None:
            if not before:
                self.slots.release(context.block_ids[window.start : window.stop], keep=True)
                window = before
            context.window = window
            return None
        if is_replaced:
            own = context.block_ids[tail]
            self.slots.attach((own,))
            slots = self.slots.slot_of(shared), self.slots.slot_of(own)
            copies = tuple(BlockCopy(c.source, c.target, c.num_tokens, *slots) for c in copies)
            self.slots.release((shared,), keep=True)
        self.slots.attach(context.block_ids[window.stop : stop])
        context.window = range(window.start, max(window.stop, stop))
        return copies

    def _hold_written(self, context: Context, stop: int) -> range:
        """Hold the slots that the context reads, and those that blocks up to `stop` already have.

        Returns the held range, which grows `context.window`."""
        window = context.window
        if not window:
            first = self._first_read(context)
            window = range(first, self.pool.blocks_for(context.num_computed))
            self.slots.hold(context.block_ids[window.start : window.stop])
        blocks = context.block_ids
        after = window.stop
        while after < min(stop, len(blocks)) and self.slots.has(blocks[after]):
            self.slots.hold((blocks[after],))
            after += 1
        return range(window.start, after)

    def advance(self, context: Context) -> None:
        """After a step, release the slots that no later token of the context reads."""
        window = context.window
        first = context.num_computed // self.block_size - self._span
        if first <= window.start:
            return
        first = min(first, window.stop)
        for index in range(window.start, first):
            block = context.block_ids[index]
            is_lost = context.num_lost - self._span <= index < context.num_lost
            if is_lost and context.has_common:
                self.slots.mark(block)
            # Another context that holds the block may continue here.
            is_shared = self.pool.num_refs(block) > 1
            self.slots.release(
                (block,), keep=is_shared or is_lost, goes_first=is_lost and not context.has_common
            )
        context.window = range(first, window.stop)

    def leave(self, context: Context) -> None:
        """Release all slots of a context whose job has ended or is preempted."""
        window, blocks = context.window, context.block_ids
        context.window = _NOTHING
        is_lost = context.num_lost > 0 and not context.has_common
        self._num_lost += is_lost
        goes_first = is_lost and self._num_lost % _KEEP_EVERY > 0
        if num_full := context.num_computed // self.block_size:
            self._ends.setdefault(blocks[num_full - 1], False)
        self.slots.release(blocks[window.start : window.stop], keep=True, goes_first=goes_first)
        not_computed = max(self.pool.blocks_for(context.num_computed), context.owned_from)
        for block in blocks[not_computed : window.stop]:
            self.slots.detach(block)

    def slots_info(self) -> WindowSlots:
        slots = self.slots
        return WindowSlots(
            num_slots=slots.num_slots,
            num_held=slots.num_held,
            num_kept=slots.num_kept,
            window=self._window,
        )

    def take_slot_changes(self) -> tuple[tuple[int, int], ...]:
        """See `StepPlan.slot_changes`."""
        return self.slots.take_changes()

    def resend_slots(self) -> None:
        """The runner may not have received the last changes."""
        self.slots.resend()

    def check_integrity(
        self,
        held_by_others: Iterable[Sequence[int]] = (),
        on_host: Iterable[ShareGroup] = (),
        slots_held_by_others: Iterable[Sequence[int]] = (),
    ) -> None:
        super().check_integrity(held_by_others, on_host)
        held = [*slots_held_by_others]
        for context in self:
            window, end = context.window, self.pool.blocks_for(context.num_computed)
            if window:
                reads = self._first_read(context)
                assert window.start <= reads <= end <= window.stop, (context, reads)
            held.append(context.block_ids[window.start : window.stop])
        self.slots.check_integrity(held)
        for block in self.slots.blocks():
            assert not self.pool.is_blank(block), f"block {block} has a slot and no KV"
