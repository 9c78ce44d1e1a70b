"""KV that a job need not compute, since others have published it, on the device or on the host."""

from collections.abc import Callable

from parrot.engine.core.contexts import Context, ContextTree, IdleContexts
from parrot.engine.core.host.tier import Arrival, HostTier
from parrot.engine.core.jobs import Job
from parrot.engine.core.plan import StepPlan, TieredRunner
from parrot.protocol.engine_api import HostTierInfo, StepCosts


class FoundKv:
    """Gives jobs the published KV of their contexts. What only the host has is brought back
    first, if that is quicker than to compute it; the job waits for it, and nobody else does.
    Without `use_host`, there is the device only."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._tier: HostTier[Job] | None = None
        self._runner: TieredRunner | None = None

    def use_host(self, runner: TieredRunner, prefill_s: Callable[[], float | None]) -> None:
        """Keep KV on the runner's host, too. `prefill_s`: see `HostTier`."""
        info = runner.info
        pool = self._tree.pool
        self._tier = HostTier(pool, info.num_host_blocks, info.block_bytes, prefill_s)
        self._runner = runner

    @property
    def has_work(self) -> bool:
        """Whether transfers are under way, or can be begun."""
        return self._tier is not None and self._tier.has_work

    def adopt(self, job: Job) -> int:
        """Let the job begin behind all of its tokens that are published on the device, unless it
        waits for others; returns how many that are."""
        context = job.context
        if job.arrival is not None or context.num_missing <= 1:
            return 0
        if not (num_found := self._tree.adopt(context)):
            return 0
        if not job.has_begun:
            job.count_missing()
        if not context.num_missing:
            self._tree.rewind_one(context)
        return num_found

    def num_to_compute(self, context: Context) -> int:
        """Tokens that the context misses, without those whose KV is published here or there."""
        size, num_found = self._tree.block_size, 0
        if self._tree.next_key(context) is not None:
            for key in context.keys[context.num_computed // size :]:
                if not self._is_published(key):
                    break
                num_found += size
        return max(1, context.num_missing - num_found)

    def _is_published(self, key: bytes) -> bool:
        if self._tree.pool.find(key) is not None:
            return True
        return self._tier is not None and self._tier.has_copy(key)

    def comes_back(self, job: Job, make_room: Callable[[Job, int], bool]) -> bool:
        """Whether the job has to wait for what comes next of its tokens, because it is on its way
        from the host: perhaps from now on."""
        tier, context = self._tier, job.context
        if tier is None or job.arrival is not None:
            return job.arrival is not None
        if context.num_missing <= 1 or (next_key := self._tree.next_key(context)) is None:
            return False
        if tier.is_arriving(next_key):
            return True
        first = context.num_computed // self._tree.block_size
        keys = context.keys[first : len(context.token_ids) // self._tree.block_size]
        if not tier.is_worth_bringing(keys):
            return False
        end = len(context.token_ids)
        while (num_blocks := self._tree.blocks_missing(context, end)) > self._tree.pool.num_free:
            if not make_room(job, num_blocks):
                return False
        job.arrival = tier.bring_back(keys, job, context.group)
        return job.arrival is not None

    def begin_transfers(self, idle: IdleContexts, plan: StepPlan | None) -> None:
        """Begin what can be copied beside the step planned last, and while there is none."""
        if self._tier is None or self._runner is None or not self._tier.has_work:
            return
        idle.evict(self._tier.margin)  # what is free is still found, and can be copied
        copied = [] if plan is None else [copy.source for copy in plan.copies]
        if transfers := self._tier.take_transfers(copied, is_idle=plan is None):
            self._runner.transfer(transfers)

    def take_landed(self, *, wait: bool = False) -> None:
        """Enter the transfers that are over. Who waited for them takes over what they brought."""
        tier, runner = self._tier, self._runner
        if tier is not None and runner is not None and tier.is_waiting:
            for arrival in tier.landed(runner.landed(wait=wait)):
                self._take_over(arrival)
                tier.close(arrival)

    def wait(self) -> bool:
        """Wait for a transfer, and return True, if any is under way."""
        is_waiting = self._tier is not None and self._tier.is_waiting
        self.take_landed(wait=True)
        return is_waiting

    def _take_over(self, arrival: Arrival[Job]) -> None:
        job = arrival.waiter
        if job is not None and not job.has_ended:
            job.arrival = None
            most = len(arrival.keys) * self._tree.block_size
            job.request.num_from_host += min(most, self.adopt(job))

    @property
    def host_tokens_capacity(self) -> int:
        """Tokens whose KV the host holds besides the device's; of a few, both have it."""
        if self._tier is None:
            return 0
        return max(0, self._tier.num_slots - self._tier.margin) * self._tree.block_size

    def with_copies(self, costs: StepCosts | None) -> StepCosts | None:
        """These costs, and those of bringing back KV. May be called from any thread."""
        if costs is None or self._tier is None:
            return costs
        return costs.model_copy(update={"host_token_s": self._tier.token_s})

    def host_info(self) -> HostTierInfo | None:
        """Plain reads: may be called from any thread."""
        return None if self._tier is None else self._tier.info()

    def check_integrity(self) -> None:
        """Recount the references to blocks, and check both tiers."""
        tier = self._tier
        if tier is None:
            self._tree.check_integrity()
        else:
            self._tree.check_integrity(tier.held_blocks(), tier.host.owners())
            tier.check_integrity()
