"""Loads KV from CPU memory for jobs that would otherwise compute it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from parrot.engine.core.contexts import ContextTree, IdleContexts
from parrot.engine.core.host.tier import HostTier, PendingLoad
from parrot.engine.core.jobs import Job
from parrot.engine.core.steps import RunnerInfo, StepPlan, TieredRunner
from parrot.protocol.engine_api import StepCosts

if TYPE_CHECKING:  # Only engines with windows import it.
    from parrot.engine.core.host.windows import WindowCopies


class HostKv:
    """Keeps copies of published KV in CPU memory, and loads them for jobs.

    KV that is only in CPU memory is loaded if that is faster than to compute it. Only the job that
    needs the KV waits for the load."""

    def __init__(
        self, tree: ContextTree, runner: TieredRunner, prefill_s: Callable[[], float | None]
    ) -> None:
        """`prefill_s`: see `HostTier`."""
        info = runner.info
        self._tree = tree
        self._runner = runner
        self._windows = _window_copies(tree, info)
        self.tier: HostTier[Job] = HostTier(
            tree.pool, info.num_host_blocks, info.block_bytes, prefill_s, self._windows
        )

    @property
    def has_work(self) -> bool:
        """Whether transfers are in flight, or can be started."""
        return self.tier.has_work

    def must_wait_for_load(self, job: Job, free_blocks_for: Callable[[Job, int], bool]) -> bool:
        """Whether the job must wait for the KV of its next block, which is loading.

        Starts the load if it is faster than to compute the KV."""
        tier, context = self.tier, job.context
        if job.pending_load is not None:
            return True
        if context.num_missing <= 1 or (next_key := self._tree.next_key(context)) is None:
            return False
        if tier.is_loading(next_key):
            return True
        if self._windows is not None:
            return self._must_wait_for_windows(job, self._windows, free_blocks_for)
        first = context.num_computed // self._tree.block_size
        keys = context.keys[first : len(context.token_ids) // self._tree.block_size]
        if not tier.is_worth_loading(keys):
            return False
        if not self._make_room(job, free_blocks_for):
            return False
        job.pending_load = tier.load(keys, job, context.group)
        return job.pending_load is not None

    def _make_room(self, job: Job, free_blocks_for: Callable[[Job, int], bool]) -> bool:
        context, end = job.context, len(job.context.token_ids)
        while (num_blocks := self._tree.num_blocks_needed(context, end)) > self._tree.pool.num_free:
            if not free_blocks_for(job, num_blocks):
                return False
        return True

    def _must_wait_for_windows(
        self, job: Job, windows: "WindowCopies", free_blocks_for: Callable[[Job, int], bool]
    ) -> bool:
        """`must_wait_for_load` for a model with windows."""
        tier, context = self.tier, job.context
        first, num_full = (
            count // self._tree.block_size
            for count in (context.num_computed, len(context.token_ids))
        )
        keys = context.keys[:num_full]
        missing = windows.missing(keys, first, tier.host)
        if missing is None:
            return False
        if any(map(tier.is_loading, missing.keys)) or windows.are_loading(missing.window_keys):
            return True
        if not (tier.is_worth_loading_windows(missing) and self._make_room(job, free_blocks_for)):
            return False
        missing = windows.missing(keys, first, tier.host)  # Room may have been made by evictions.
        if missing is not None:
            job.pending_load = tier.load_windows(missing, job, context.group)
        return job.pending_load is not None

    def begin_transfers(self, idle: IdleContexts, plan: StepPlan | None) -> None:
        """Start the transfers that can run in parallel with the planned step, or without a step."""
        if not self.tier.has_work:
            return
        idle.evict(self.tier.margin)  # Evicted blocks keep their keys and can be copied.
        copies = () if plan is None else plan.copies
        if transfers := self.tier.take_transfers(copies, is_idle=plan is None):
            self._runner.transfer(transfers)

    def take_landed(self, *, wait: bool = False) -> None:
        """Process finished transfers. Jobs adopt the KV that was loaded for them."""
        if self.tier.is_waiting:
            for load in self.tier.landed(self._runner.landed(wait=wait)):
                self._take_over(load)
                self.tier.close(load)

    def wait(self) -> bool:
        """Wait for a transfer; return False if none is in flight."""
        is_waiting = self.tier.is_waiting
        self.take_landed(wait=True)
        return is_waiting

    def _take_over(self, load: PendingLoad[Job]) -> None:
        job = load.waiter
        if job is not None and not job.has_ended:
            job.pending_load = None
            most = len(load.keys) * self._tree.block_size
            job.request.num_from_host += min(most, job.adopt(self._tree))

    @property
    def tokens_capacity(self) -> int:
        """Tokens whose KV fits CPU memory only. The copies of `margin` blocks are not counted."""
        return max(0, self.tier.num_slots - self.tier.margin) * self._tree.block_size

    def with_copies(self, costs: StepCosts | None) -> StepCosts | None:
        """`costs` with the cost of loading a token. May be called from any thread."""
        if costs is None:
            return None
        return costs.model_copy(update={"host_token_s": self.tier.token_s})

    def check_integrity(self) -> None:
        """Compare the counts of both tiers with their holders. Raises AssertionError."""
        tier = self.tier
        self._tree.check_integrity(tier.held_blocks(), tier.owners(), tier.held_slots())
        tier.check_integrity()


def _window_copies(tree: ContextTree, info: RunnerInfo) -> "WindowCopies | None":
    """None for models without windows."""
    if info.window is None:
        return None
    from parrot.engine.core.host.windows import WindowCopies
    from parrot.engine.core.windows import WindowedTree

    assert isinstance(tree, WindowedTree), tree
    return WindowCopies(tree.pool, tree.slots, info.window)
