"""The local scheduler: selects the tokens of the next step, and preempts jobs when KV runs out.

There are no prefill and decode phases. Every job has tokens whose KV is missing, and a step
computes such tokens for many jobs. Decoding jobs miss one token each and come first. Prompts follow
in the order of their keys, in chunks, up to the step's budget. Background jobs get the rest.

Short prompts may pass long ones of the same priority. The length of a prompt is the number of
tokens that the engine must compute. A prompt can be passed only until the engine has computed
`_MAX_PASSED_LENGTHS` times its length in other prompts, so its wait is bounded.

Example: `max_num_batched_tokens` is 100, and the engine has computed 16 prompt tokens so far. Jobs
A and B decode. Prompt C with 150 tokens arrives, then prompt D with 30. All have priority 0.

    queue position   C: 16 + 4 * 150 = 616     D: 16 + 4 * 30 = 136     D passes C
    step 1           A 1, B 1, D 30, C 68      100 tokens: the budget is used
    step 2           A 1, B 1, D 1, C 82       D decodes
    step 3           A 1, B 1, C 1, D 1        C decodes

A prompt E of 30 tokens that arrives when the engine has computed 500 prompt tokens gets position
500 + 4 * 30 = 620. That is after C, so E does not pass C.

A step may be planned while the previous step is in flight. A job that awaits a token from the
previous step is planned with the token `PENDING`, unless the awaited token is the job's last. Steps
run one after the other. So the new step may read KV that the previous step computes, and may reuse
blocks that the previous step reads.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from parrot.engine.config import EngineConfig
from parrot.engine.core.contexts import Context, ContextTree, IdleContexts, drop_kv
from parrot.engine.core.host.host_kv import HostKv
from parrot.engine.core.jobs import Job
from parrot.engine.core.shares import TenantShare
from parrot.engine.core.steps import PENDING, BlockCopy, SequenceStep, StepCostMeter, StepPlan
from parrot.engine.core.tenant_budgets import TenantBudgets

_MIN_BACKGROUND_CHUNK = 32  # Smallest chunk, in tokens, of a background fill in a decode step.
_SMOOTHING = 0.25  # Weight of the newest step in the average step time. Larger adapts faster.
_GROW_BELOW = 0.25  # A chunk that lengthens a step by less than this fraction is doubled.
_SHRINK_ABOVE = 0.75  # A chunk that lengthens a step by more than this fraction is halved.
# A prompt is passed until the engine has computed this many times its length in other prompts.
# A larger value favours short prompts more.
_MAX_PASSED_LENGTHS = 4

_KEY = attrgetter("key")


class BackgroundPace:
    """The number of background tokens in each step.

    Steps without other work compute `chunk_size` tokens. A decode step computes one smaller chunk,
    then chunks pause until their measured cost is at most a given share of all step time."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._mixed_chunk_size = min(_MIN_BACKGROUND_CHUNK, chunk_size)
        self._decode_s: float | None = None  # Average time of a decode step without background.
        self._credit_s = 0.0  # Seconds that background tokens may still add to decode steps.
        self._has_paused = True

    def num_tokens(self, num_decoding: int) -> int:
        """The most background tokens in the next step, in which `num_decoding` jobs generate."""
        if not num_decoding:
            return self._chunk_size
        return self._mixed_chunk_size if self._has_paused and self._credit_s > 0.0 else 0

    def record_plan(self, num_background: int) -> None:
        """Record a planned decode step with `num_background` background tokens."""
        # The cost of a step without background tokens is measured during a pause.
        self._has_paused = not num_background

    def record_steps(
        self, step_seconds: Sequence[float], num_background: int, share: float
    ) -> None:
        """Record finished decode steps, each with `num_background` background tokens.

        `share`: fraction by which background tokens may lengthen such steps on average."""
        for elapsed_s in step_seconds:
            if not num_background:
                before = elapsed_s if self._decode_s is None else self._decode_s
                self._decode_s = before + _SMOOTHING * (elapsed_s - before)
            if self._decode_s is None:
                continue
            earned_s = share * self._decode_s
            spent_s = max(0.0, elapsed_s - self._decode_s) if num_background else 0.0
            self._credit_s = min(earned_s, self._credit_s + earned_s - spent_s)
            if num_background:
                self._resize(num_background, spent_s / self._decode_s)

    def _resize(self, num_tokens: int, longer: float) -> None:
        if longer > _SHRINK_ABOVE:
            self._mixed_chunk_size = max(
                self._mixed_chunk_size // 2, min(_MIN_BACKGROUND_CHUNK, self._chunk_size)
            )
        elif longer < _GROW_BELOW and num_tokens >= self._mixed_chunk_size:
            self._mixed_chunk_size = min(self._mixed_chunk_size * 2, self._chunk_size)


@dataclass(frozen=True, slots=True)
class NoBudgets:
    """The budgets of an engine with one tenant: there is no limit."""

    are_limited = False

    def add(self, job: Job) -> None:
        pass

    def remove(self, job: Job) -> None:
        pass

    def begin_step(self, now: float, decoding: Iterable[Job]) -> TenantBudgets | None:
        return None

    def forgive_debts(self) -> bool:
        return False

    def check_integrity(self, jobs: Iterable[Job]) -> None:
        pass


NO_BUDGETS = NoBudgets()


class SoleTenant(NamedTuple):
    """The only tenant of an engine so far."""

    share: TenantShare
    most_jobs: int = 1  # The largest number of jobs that the tenant had at once.

    def after(self, share: TenantShare, num_jobs: int) -> "SoleTenant | None":
        """The sole tenant after a job was added to `num_jobs` others; None if there are now two.

        A tenant without jobs and without a limit on step growth is replaced by the new one."""
        if share.tenant == self.share.tenant:
            if share.step_growth is None:
                share = share._replace(step_growth=self.share.step_growth)
            return SoleTenant(share, max(self.most_jobs, num_jobs + 1))
        if num_jobs == 0 and self.share.step_growth is None:
            return SoleTenant(share)
        return None


class JobQueue(list[Job]):
    """Jobs sorted by their keys. A job's key must not change while the job is in a queue.

    A loop that adds or removes jobs must iterate over a copy."""

    def add(self, job: Job) -> None:
        insort(self, job, key=_KEY)

    def remove(self, job: Job) -> None:
        at = bisect_left(self, job.key, key=_KEY)
        assert self[at] is job, f"job {job.job_id} is not in the queue"
        del self[at]


POLICIES: dict[str, Callable[[Job], tuple[int, ...]]] = {
    "priority": lambda job: (job.priority, job.queue_position, job.job_id),
    "fcfs": lambda job: (int(job.is_background), job.job_id),
}
"""Functions that return a job's key. Jobs with smaller keys run first.

Keys are unique, so the order is total, the first job always runs, and no job starves. Background
jobs have the largest keys."""


class Scheduled(NamedTuple):
    """The tokens of one job in a step."""

    num_tokens: int  # Without drafts.
    copies: tuple[BlockCopy, ...]
    drafts: tuple[int, ...] = ()


Drafts = Mapping[Job, tuple[int, ...]]
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step."""

    plan: StepPlan
    jobs: tuple[Job, ...]  # The job of each sequence.
    num_decodes: int  # Decoding jobs, which have one token each.
    num_fill_tokens: int  # Prompt tokens, without background fills.
    num_background_tokens: int
    num_drafts: int
    planned_at: float

    @property
    def has_prompts(self) -> bool:
        return self.num_fill_tokens + self.num_background_tokens > 0


class LocalScheduler:
    """Keeps each open job in exactly one queue, and plans steps.

    A job is admitted while its context holds blocks for all its known tokens. Preempted jobs are no
    longer admitted, and compute the lost KV again."""

    def __init__(
        self,
        config: EngineConfig,
        tree: ContextTree,
        costs: StepCostMeter,
        host: HostKv | None = None,
        budgets: NoBudgets | TenantBudgets = NO_BUDGETS,
    ) -> None:
        self._limits = limits = config.scheduler
        chunk = config.fill_chunk_size or limits.max_num_batched_tokens
        self._max_chunk = min(chunk, tree.max_chunk)
        self._tree = tree
        self._policy = POLICIES[limits.policy]
        self.decoding, self._prefilling, self._background = JobQueue(), JobQueue(), JobQueue()
        self._queues = (self.decoding, self._prefilling, self._background)
        self._jobs_by_context: dict[Context, Job] = {}  # All jobs in the queues.
        self._pace = BackgroundPace(limits.background_chunk_size)
        self._rejected: list[Job] = []  # Background jobs that must be failed.
        self._num_decodes = 0
        self._num_background_tokens = 0
        self._num_filled = 0  # Prompt tokens of all steps so far, without background fills.
        self._scheduled: dict[Job, Scheduled] = {}  # The step that is being planned.
        self._keys_in_step: set[bytes] = set()  # Keys of the first block that each job computes.
        self._tokens_left = self._context_tokens = 0
        self._host = host
        self._costs = costs
        self._budgets = budgets  # `TenantBudgets` once there is a second tenant.
        self._limiting_budgets: TenantBudgets | None = None  # None: this step limits no tenant.
        self._sole_tenant: SoleTenant | None = None  # None: no tenant yet, or several.
        self._planned_at = -inf
        self.idle = IdleContexts(tree)
        self.num_jobs = 0  # In all queues.

    @property
    def num_admitted(self) -> int:
        queues = (self._prefilling, self._background)
        return len(self.decoding) + sum(job.is_admitted for queue in queues for job in queue[:])

    def max_multi_steps(self, token_ids: Collection[int]) -> int:
        """The number of next steps in which the same jobs get one token each and none finishes.

        The number holds if no request arrives and all sampled tokens are in `token_ids`."""
        is_limited = self._limits.max_total_tokens is not None
        if not self.decoding or self._prefilling or self._background or is_limited:
            return 0
        if self._budgets.are_limited:
            return 0
        # One block per job is reserved for a copy-on-write.
        blocks_per_job = self._tree.pool.num_free // len(self.decoding) - 1
        num_steps = blocks_per_job * self._tree.block_size
        for job in self.decoding:
            if job.generation is None or not job.generation.is_unaffected_by(token_ids):
                return 0
            num_steps = min(num_steps, job.generation.num_left - 1)
        return num_steps

    def add(self, job: Job) -> None:
        """Enqueue a job whose context misses the KV of at least one token."""
        assert job.context.num_missing > 0, f"job {job.job_id} has nothing to compute"
        self.idle.discard(job.context)
        on_host = () if self._host is None else self._host.tier.host
        length = self._tree.num_to_compute(job.context, on_host)
        job.queue_position = self._num_filled + _MAX_PASSED_LENGTHS * length
        job.key = self._policy(job)
        self._queue_of(job).add(job)
        self._jobs_by_context[job.context] = job
        if self._budgets is NO_BUDGETS:
            self._count_tenant(job.request.params.share)
        self.num_jobs += 1
        self._budgets.add(job)

    def _count_tenant(self, share: TenantShare) -> None:
        """Count a new job's tenant, and create the budgets for the second tenant."""
        sole = self._sole_tenant
        self._sole_tenant = SoleTenant(share) if sole is None else sole.after(share, self.num_jobs)
        if sole is not None and self._sole_tenant is None:
            self._budgets = budgets = TenantBudgets(self._costs, self._tree.block_size)
            budgets.enter(sole.share, self.num_jobs, sole.most_jobs, self._planned_at)

    def remove(self, job: Job) -> None:
        """Remove a finished, failed or cancelled job. The job's context keeps its KV."""
        self._queue_of(job).remove(job)
        del self._jobs_by_context[job.context]
        self.num_jobs -= 1
        self._budgets.remove(job)
        if job.context.window:
            self._tree.leave(job.context)
        job.is_admitted = job.is_decoding = False

    def mark_decoding(self, job: Job) -> None:
        """Move a job to the decoding queue once its prompt is computed.

        Prompts of the same priority no longer pass the job."""
        if not job.is_decoding:
            self._prefilling.remove(job)
            job.is_decoding = True
            job.queue_position = 0
            job.key = self._policy(job)
            self.decoding.add(job)

    def reprioritise(self, job: Job, priority: int) -> None:
        self._queue_of(job).remove(job)
        job.priority = priority
        job.key = self._policy(job)
        self._queue_of(job).add(job)

    def _queue_of(self, job: Job) -> JobQueue:
        if job.is_decoding:
            return self.decoding
        return self._background if job.is_background else self._prefilling

    def take_rejected(self) -> list[Job]:
        """Background jobs for which `schedule` found no free blocks. The engine core fails them."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def preempt(self, contexts: Collection[Context]) -> None:
        """Preempt the jobs of contexts that have lost KV. The jobs must be admitted again."""
        for context in contexts:
            if (job := self._jobs_by_context.get(context)) is not None:
                self._preempt_job(job)
            elif not context.block_ids:
                self.idle.discard(context)

    def _preempt_job(self, job: Job) -> None:
        if job.is_decoding:
            self.decoding.remove(job)
            job.is_decoding = False
            self._prefilling.add(job)
        if job.context.window:
            self._tree.leave(job.context)
        job.is_admitted = False

    def record_steps(self, step: Step, step_seconds: Sequence[float]) -> None:
        """Record finished steps that are equal to `step`."""
        if step.num_decodes and not step.num_fill_tokens:
            share = self._background_share()
            self._pace.record_steps(step_seconds, step.num_background_tokens, share)

    def _background_share(self) -> float:
        """The fraction by which the first background job may lengthen decode steps."""
        limit = self._limits.background_share
        first = next(iter(self._background), None)
        return limit if first is None else min(limit, first.request.params.background_share)

    def schedule(self, now: float, drafts: Drafts = NO_DRAFTS) -> Step | None:
        """Plan the next step for the engine core. None: no job can run.

        `drafts`: of decoding jobs that await no token. The step verifies the drafts that fit its
        limits and the free blocks after all other tokens."""
        continuing = [job for job in self.decoding if job.awaits_token and job.may_continue]
        for job in continuing:
            job.context.token_ids.append(PENDING)
        try:
            step = self._plan(now, drafts)
            if step is None and self._budgets.forgive_debts():
                return self._plan(now, drafts)
            return step
        finally:
            for job in continuing:
                job.context.token_ids.pop()

    def _plan(self, now: float, drafts: Drafts) -> Step | None:
        self._scheduled = {}
        self._keys_in_step.clear()
        self._tokens_left = self._limits.max_num_batched_tokens
        self._context_tokens = 0
        self._num_background_tokens = 0
        self._planned_at = now
        self._limiting_budgets = budgets = self._budgets.begin_step(now, self.decoding)
        for job in self.decoding[:]:
            missing = job.context.num_missing if budgets is None else budgets.num_tokens(job)
            if job.is_admitted and missing and self._fits_step(job):
                self._schedule_job(job, 1)
        self._num_decodes = len(self._scheduled)
        is_blocked = False  # True: later jobs must not take blocks that an earlier job waits for.
        for job in self._prefilling[:]:
            budget = self._fill_budget(job)
            if not budget:
                break
            if not job.is_admitted and (
                is_blocked or job.awaits_token or self._must_wait_for_kv(job)
            ):
                continue
            missing = job.context.num_missing if budgets is None else budgets.num_tokens(job)
            num_tokens = min(missing, budget, self._max_chunk)
            if num_tokens and not (self._fits_step(job) and self._schedule_job(job, num_tokens)):
                is_blocked = True
        num_fill_tokens = self._num_fill_tokens()
        self._num_filled += num_fill_tokens
        if self._background and not self._prefilling:
            self._plan_background()
        if self._num_decodes and not num_fill_tokens:
            self._pace.record_plan(self._num_background_tokens)
        num_samples = len(self._scheduled)
        for job, draft in drafts.items():
            num_samples += self._schedule_draft(job, draft, num_samples)
        return self._build(num_fill_tokens, now) if self._scheduled else None

    def _num_fill_tokens(self) -> int:
        return self._limits.max_num_batched_tokens - self._tokens_left - self._num_decodes

    def _fill_budget(self, job: Job) -> int:
        """The most tokens that the step may still compute for `job`.

        Decoding jobs of a higher priority limit it to `mixed_fill_tokens`, to keep steps short."""
        first = next(iter(self.decoding), None)
        if first is None or first.priority >= job.priority:
            return self._tokens_left
        left = self._limits.mixed_fill_tokens - self._num_fill_tokens()
        return max(0, min(self._tokens_left, left))

    def _plan_background(self) -> None:
        if self._rejected:
            return
        budget = min(self._pace.num_tokens(len(self.decoding)), self._tokens_left)
        for job in self._background[:]:
            if not budget or not self._fits_step(job):
                return
            if not job.is_admitted and self._must_wait_for_kv(job):
                continue
            num_tokens = min(job.context.num_missing, budget, self._max_chunk)
            if self._schedule_job(job, num_tokens):
                budget -= num_tokens
                self._num_background_tokens += num_tokens
            else:
                self._rejected.append(job)

    def _must_wait_for_kv(self, job: Job) -> bool:
        """Adopt published KV, and return whether the job must wait for the KV of its next block.

        The next block may be loading from CPU memory, or an earlier job of this step computes it.
        In the second case it is published after the step."""
        if self._tree.has_windows:
            self._tree.settle(job.context)
        job.adopt(self._tree)
        if self._tree.next_key(job.context) in self._keys_in_step:
            return True
        return self._host is not None and self._host.must_wait_for_load(job, self._free_blocks_for)

    def _fits_step(self, job: Job) -> bool:
        """Whether the step's limits on sequences and tokens allow `job`."""
        if len(self._scheduled) >= self._limits.max_batch_size or not self._tokens_left:
            return False
        limit = self._limits.max_total_tokens
        total = self._context_tokens + len(job.context.token_ids)
        return limit is None or total <= limit or not self._scheduled

    def _schedule_job(self, job: Job, num_tokens: int) -> bool:
        """Add the job to the step; return False if blocks for its KV cannot be freed.

        Blocks for all known tokens are reserved at once. Otherwise partly computed prompts could
        block each other."""
        context = job.context
        end = len(context.token_ids)
        step_end = context.num_computed + num_tokens
        while (copies := self._tree.reserve(context, end, step_end)) is None:
            num_blocks = self._tree.num_blocks_needed(context, end)
            if num_blocks <= self._tree.pool.num_free:
                if not self._preempt_last(job):
                    return False
            elif not self._free_blocks_for(job, num_blocks):
                return False
        # One missing token may be the last prompt token, which is computed again for its logits.
        if not job.has_begun and context.num_missing > max(1, job.num_counted):
            job.count_missing()
        job.is_admitted = job.has_begun = True
        if num_tokens > 1 and (key := self._tree.next_key(context)) is not None:
            self._keys_in_step.add(key)
        self._scheduled[job] = Scheduled(num_tokens, copies)
        if self._limiting_budgets is not None:
            self._limiting_budgets.charge(job, num_tokens)
        self._tokens_left -= num_tokens
        self._context_tokens += end
        return True

    def _schedule_draft(self, job: Job, draft: tuple[int, ...], num_samples: int) -> int:
        """Add the part of a draft that fits the free blocks and the step's limits.

        `num_samples`: tokens that the step samples so far. Returns the length of the part. Later
        steps overwrite the KV of rejected draft tokens."""
        scheduled, context = self._scheduled.get(job), job.context
        if scheduled is None or scheduled.num_tokens != context.num_missing:
            return 0
        known = len(context.token_ids)
        limits = [
            self._tokens_left,
            self._limits.max_batch_size - num_samples,
            self._tree.max_end(context) - known,
        ]
        if self._limits.max_total_tokens is not None:
            limits.append(self._limits.max_total_tokens - self._context_tokens)
        draft = draft[: max(0, min(limits))]
        if not draft:
            return 0
        copies = self._tree.reserve(context, known + len(draft))
        assert copies == (), f"no free blocks for a draft of {context}"
        self._scheduled[job] = scheduled._replace(drafts=draft)
        self._tokens_left -= len(draft)
        self._context_tokens += len(draft)
        return len(draft)

    def _free_blocks_for(self, job: Job, num_blocks: int) -> bool:
        """Evict KV until `num_blocks` blocks are free, or until `job` needs no copy-on-write.

        KV is evicted in this order: background jobs, idle contexts, jobs with larger keys (which
        are preempted), KV of protected groups (shares.py). Returns whether it was enough. The first
        job always gets its blocks. A background job evicts nothing."""
        if job.is_background:
            return False
        if self._background:
            self._evict_background(num_blocks)
        if self.idle.evict(num_blocks, job.context.group):
            return True
        later = [
            other
            for queue in self._queues
            for other in queue
            if other.key > job.key and other.context.block_ids
        ]
        later.sort(key=attrgetter("key"), reverse=True)
        is_first = all(next(iter(q), job).key >= job.key for q in (self.decoding, self._prefilling))
        changed, is_enough = self.idle.free_blocks_for(
            job.context, [other.context for other in later], num_blocks, is_first=is_first
        )
        self._drop_from_step(changed)
        return is_enough

    def _preempt_last(self, job: Job) -> bool:
        """Preempt the last job after `job` whose context holds window slots, which become free.

        Returns False if there is none, or if `job` is a background job."""
        later = [
            other
            for queue in self._queues
            for other in queue
            if other.key > job.key and other.context.window
        ]
        if not later or job.is_background:
            return False
        self._drop_from_step([max(later, key=_KEY).context])
        return True

    def _evict_background(self, num_blocks: int) -> None:
        """Evict KV of background jobs, latest first, until `num_blocks` blocks are free."""
        contexts = [job.context for job in self._background if job.context.block_ids]
        self._drop_from_step(drop_kv(self._tree, contexts[::-1], num_blocks))

    def _drop_from_step(self, contexts: Collection[Context]) -> None:
        """Preempt the jobs of contexts that lost KV, and remove the jobs from the step.

        Background jobs are rejected."""
        decoding = [job for job in self.decoding if job in self._scheduled]
        self.preempt(contexts)
        self._num_decodes -= sum(not job.is_decoding for job in decoding)
        for context in contexts:
            if (job := self._jobs_by_context.get(context)) is None:
                continue
            if job.is_background:
                self._rejected.append(job)
            if (scheduled := self._scheduled.pop(job, None)) is not None:
                self._tokens_left += scheduled.num_tokens
                self._context_tokens -= len(job.context.token_ids)
                if scheduled.copies:  # The copy does not happen, so the block holds no KV.
                    num_kept = job.context.num_computed // self._tree.block_size
                    self._tree.truncate(job.context, num_kept)

    def _build(self, num_fill_tokens: int, now: float) -> Step:
        size = self._tree.block_size
        sequences: list[SequenceStep] = []
        copies: list[BlockCopy] = []
        num_drafts = 0
        for job, scheduled in self._scheduled.items():
            sequences.append(job.sequence(scheduled.num_tokens, scheduled.drafts, size))
            copies += scheduled.copies
            num_drafts += len(scheduled.drafts)
        changes = self._tree.take_slot_changes() if self._tree.has_windows else ()
        return Step(
            StepPlan(tuple(sequences), tuple(copies), changes),
            tuple(self._scheduled),
            self._num_decodes,
            num_fill_tokens,
            self._num_background_tokens,
            num_drafts,
            now,
        )

    def check_integrity(self) -> None:
        for queue in self._queues:
            keys = [job.key for job in queue]
            assert keys == sorted(keys), f"queue out of order: {keys}"
            for job in queue:
                assert job.is_open, f"job {job.job_id} is queued before it is open"
                assert job.context not in self.idle, f"idle context with job {job.job_id}"
                has_work = job.context.num_missing > 0 or job.awaits_token
                assert has_work, f"job {job.job_id} has nothing to do"
                assert job.is_background is (queue is self._background), job
                assert job.is_decoding is (queue is self.decoding), job
        assert not self._rejected, self._rejected
        assert self.num_jobs == sum(len(queue) for queue in self._queues), self.num_jobs
        assert self._jobs_by_context == {
            job.context: job for queue in self._queues for job in queue
        }
        self._budgets.check_integrity(job for queue in self._queues for job in queue)
        for job in self.decoding:
            num_missing = job.context.num_missing
            goes_on = num_missing == (0 if job.awaits_token else 1)
            assert goes_on, f"job {job.job_id} misses {num_missing} tokens"
            assert job.is_admitted, f"job {job.job_id} generates without blocks"
