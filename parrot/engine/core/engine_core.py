"""The engine core: requests in, steps, outcomes out.

    plan = scheduler.schedule();  result = runner.run(plan);  deliver(result)

If the runner supports it, a step is launched while the previous step runs, so that the GPU never
waits for the CPU. The effects of a step are then recorded in two parts. Its KV is recorded at the
launch, because later steps run after it. Its tokens are recorded when the step has finished.

    GPU  | step 1                       | step 2                                 | step 3
    CPU    requests, plan and launch 2 .. tokens of 1, requests, plan and launch 3 .. tokens

Requests, aborts and frees change the next plan, never a step in flight. If a job of the step in
flight has ended, its sampled token is ignored. Its blocks can be reused at once, because all writes
of later steps happen after the step in flight.

Not thread-safe: a driver (engine/service.py) calls all methods, and only between steps.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from parrot.engine.config import EngineConfig
from parrot.engine.core.contexts import ContextTree, make_pool, make_tree
from parrot.engine.core.host.host_kv import HostKv
from parrot.engine.core.jobs import Job
from parrot.engine.core.output import Language
from parrot.engine.core.requests import RequestLimits, RequestTable
from parrot.engine.core.scheduler import NO_DRAFTS, Drafts, LocalScheduler, Step
from parrot.engine.core.steps import (
    DeviceLost,
    Landed,
    LaunchedStep,
    OverlappingRunner,
    RunnerInfo,
    StateRead,
    StepCostMeter,
    StepPlan,
    StepResult,
    StepRunner,
    StepTotals,
    TieredRunner,
    TokenScores,
    Transfer,
    without_drafts,
)
from parrot.engine.drafts.drafter import make_drafter
from parrot.protocol.engine_api import RuntimeInfo
from parrot.protocol.errors import (
    EngineFailed,
    InvalidRequest,
    ModelNumerics,
    OutOfMemory,
    ParrotError,
)
from parrot.utils.clock import Clock

logger = logging.getLogger(__name__)


_NO_BACKGROUND_MEMORY = "a background fill found no free KV blocks"
# Weight of the newest step in the reported average step time. A larger value adapts faster.
_LATENCY_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A launched step whose tokens are not known yet.

    A step with drafts also has an unknown number of tokens, so the next step is planned later."""

    launched: LaunchedStep
    step: Step
    launched_at: float


class EngineCore:
    """One model's requests, contexts and steps. `requests` accepts all requests."""

    def __init__(
        self, config: EngineConfig, runner: StepRunner, language: Language, clock: Clock
    ) -> None:
        self.info = info = runner.info
        self.language = language
        capacity = config.tokens_capacity or info.num_blocks * info.block_size
        num_blocks = min(info.num_blocks, -(-capacity // info.block_size))
        self.tokens_capacity = num_blocks * info.block_size
        self.max_context_len = min(info.max_seq_len, self.tokens_capacity)
        self._clock = clock
        self._runner = IsolatingRunner(runner)
        self._in_flight: _InFlightStep | None = None
        self._suspects: list[Job] = []  # Jobs of failed steps, one of which may be the cause.
        self._streaming_jobs: list[Job] = []  # Jobs whose newest tokens were not sent yet.
        is_published = config.scheduler.prefix_caching
        self._tree = _make_tree(info, num_blocks, clock, publishes=is_published)
        self._costs = StepCostMeter(info)
        self.host: HostKv | None = None
        if is_published and self._runner.has_host_tier:
            self.host = HostKv(self._tree, self._runner, self._costs.prefill_s)
        self.host_tokens_capacity = 0 if self.host is None else self.host.tokens_capacity
        self._scheduler = LocalScheduler(config, self._tree, self._costs, self.host)
        self._drafter = make_drafter(config.scheduler, info.draft_sizes, clock)
        self._totals = StepTotals()
        limits = RequestLimits(self.max_context_len, info.vocab_size)
        self.requests = RequestTable(
            config, self._tree, self._scheduler, language, limits, clock, self._totals
        )
        self._latency_ns = self._last_step_ended = 0.0

    @property
    def has_work(self) -> bool:
        if len(self.requests) > 0 or self._in_flight is not None:
            return True
        return self.host is not None and self.host.has_work

    def fail_everything(self, error: ParrotError) -> None:
        self._in_flight = None
        self.requests.fail_everything(error)

    def wait_until_due(self) -> None:
        """Return when the next step should be planned. Later requests miss that step."""
        if self._in_flight is not None:
            if self._drafter is not None and not self._in_flight.step.num_drafts:
                self._drafter.search_during_step(
                    [d for job in self._drafting() if (d := job.drafts)],
                    has_prompts=self._in_flight.step.has_prompts,
                )
            self._in_flight.launched.wait_until_due()

    def step(self) -> bool:
        """Plan a step and run it, or launch it and wait for the previous step.

        Without a step, wait for a transfer. Returns False if there was nothing to do."""
        running, self._in_flight = self._in_flight, None
        has_worked = True
        if running is None or not self._needs_tokens_first(running):
            has_worked = self._step_after(running)
        elif self._wait_for(running, None):
            self._step_after(None)
            self._record_turnaround(0.0, running.step.num_drafts)
        if self._streaming_jobs:
            self._send_chunks()
        return has_worked

    def _step_after(self, running: _InFlightStep | None) -> bool:
        """Plan and start a step after `running`, the step in flight, if there is one."""
        began = self._clock.now()
        planned = self.plan({} if running is not None else self._drafts())
        launched = None if planned is None else self._launch(planned, running)
        launched_at = self._clock.now()
        if running is not None:
            if not self._wait_for(running, planned):
                return True
            self._record_turnaround(launched_at - began)
        if planned is not None and launched is not None:
            self._record_kv(planned, {})
            self._in_flight = _InFlightStep(launched, planned, launched_at)
        elif planned is not None and running is not None:
            self._run_planned(planned)
        elif planned is not None:
            self.deliver(planned, self.run(planned))
        if planned is not None or running is not None:
            return True
        return self.host is not None and self.host.wait()

    def _wait_for(self, flight: _InFlightStep, planned: Step | None) -> bool:
        """Wait for a step and process its tokens.

        Returns False if the step has failed. Then the step `planned` after it is dropped too."""
        began = self._clock.now()
        result = self._runner.wait(flight.launched)
        if self._drafter is not None:
            seconds = self._clock.now() - began
            self._drafter.record_wait(seconds, has_prompts=flight.step.has_prompts)
        if result is None:
            self._recover_failed([flight.step] if planned is None else [flight.step, planned])
            return False
        self._process_tokens(flight.step, result, flight.launched_at)
        return True

    # -- drafts ------------------------------------------------------------------------------

    def _record_turnaround(self, seconds_before: float, num_drafts: int = 0) -> None:
        """Record the CPU time for a step: `seconds_before` the last step's end, and all since then.

        `num_drafts`: drafts of the last step."""
        if self._drafter is not None:
            seconds = seconds_before + self._clock.now() - self._last_step_ended
            if self._in_flight is not None:
                num_drafts += self._in_flight.step.num_drafts
            self._drafter.costs.record_turnaround(seconds, has_drafts=num_drafts > 0)

    def _needs_tokens_first(self, flight: _InFlightStep) -> bool:
        """Whether the next step must be planned, or is better planned, after this step's tokens."""
        if self._drafter is None or flight.step.num_drafts:
            return flight.step.num_drafts > 0
        return self._drafter.pays_to_wait(len(flight.step.jobs))

    def _drafting(self) -> list[Job]:
        return [job for job in self._scheduler.decoding if job.drafts is not None]

    def _drafts(self) -> dict[Job, tuple[int, ...]]:
        """The drafts of the next step. The tokens of all jobs must be known."""
        if self._drafter is None:
            return {}
        if (costs := self._costs.recent()) is not None:
            self._drafter.costs.token_s = costs.prefill_s
        jobs = self._drafting()
        outputs = [drafts for job in jobs if (drafts := job.drafts)]
        found = self._drafter.find(outputs, len(self._scheduler.decoding))
        return {job: draft for job, draft in zip(jobs, found, strict=True) if draft}

    # -- steps -------------------------------------------------------------------------------

    def _launch(self, step: Step, before: _InFlightStep | None) -> LaunchedStep | None:
        """Launch a step, or return None if it must run after the previous step has finished."""
        if self._suspects:
            self._suspects = [job for job in self._suspects if not job.has_ended]
            if self._suspects:
                return None
        return self._runner.launch(step.plan, None if before is None else before.launched)

    def _recover_failed(self, steps: Sequence[Step]) -> None:
        """Drop the KV of a failed step and of the step planned after it, and plan both again.

        One of the jobs may be the cause. Until these jobs have ended, steps are run and not
        launched, because `IsolatingRunner.run` finds the faulty job."""
        written: set[int] = set()
        keys: set[bytes] = set()
        size = self._tree.block_size
        self._tree.resend_slots()
        for step in steps:
            written |= step.plan.written_blocks(size)
            for job, sequence in zip(step.jobs, step.plan.sequences, strict=True):
                keys.update(job.context.keys[sequence.start // size :])
                job.awaits_token = False
                if job.reading is not None:
                    job.reading.reset_in_flight()
                self._suspects.append(job)
        self._scheduler.preempt(self._tree.drop_blocks(written, keys))

    def _run_planned(self, step: Step) -> None:
        """Run a step that could not be launched, without jobs that have ended since the plan."""
        kept = []
        for job, s in zip(step.jobs, step.plan.sequences, strict=True):
            if not job.has_ended:
                known = job.context.token_ids[s.start : s.end]
                kept.append((job, s if s.num_drafts else s._replace(token_ids=known)))
        plan = replace(step.plan, sequences=tuple(s for _, s in kept))
        step = replace(step, plan=plan, jobs=tuple(job for job, _ in kept))
        self.deliver(step, self.run(step))

    def plan(self, drafts: Drafts = NO_DRAFTS) -> Step | None:
        """Process finished transfers and plan the next step.

        If a step is returned, the caller must `run` and `deliver` it."""
        if self.host is not None:
            self.host.take_landed()
        step = self._schedule(drafts)
        while rejected := self._scheduler.take_rejected():
            for job in rejected:
                self.requests.fail_all([job.request], OutOfMemory(_NO_BACKGROUND_MEMORY))
            step = step or self._schedule(drafts)  # Another job may have waited for a failed one.
        if self.host is not None:
            self.host.begin_transfers(self._scheduler.idle, None if step is None else step.plan)
        return step

    def _schedule(self, drafts: Drafts) -> Step | None:
        self.requests.apply_ready_forks()
        return self._scheduler.schedule(self._clock.now(), drafts)

    def run(self, step: Step) -> StepResult:
        """Run a step. Raises only `DeviceLost`."""
        return self._runner.run(step.plan)

    def deliver(self, step: Step, result: StepResult) -> None:
        """Record the results of a step, and answer the requests that are complete."""
        self._record_kv(step, result.broken)
        self._process_tokens(step, result)
        if self._streaming_jobs:
            self._send_chunks()

    def _record_kv(self, step: Step, broken: Mapping[int, ParrotError]) -> None:
        """Record the KV that a step computes. All later steps may read it."""
        began = max(step.planned_at, self._last_step_ended)
        if broken:
            self._tree.resend_slots()
        for job, sequence in zip(step.jobs, step.plan.sequences, strict=True):
            if job.has_ended:
                continue  # The job ended before the step, or with another job of its request.
            if sequence.context_id in broken:
                self.requests.fail_job(job, broken[sequence.context_id])
                continue
            if job.request.started_at is None:
                job.request.start(began, self._totals)
            context = job.context
            num_known = len(sequence.token_ids)
            if step.num_drafts:
                num_known -= sequence.num_drafts
            context.num_computed = sequence.start + num_known
            if num_known > 1:
                self._tree.publish(context)  # Generated blocks are published by `finish`.
            if context.window:
                self._tree.advance(context)
            if (reading := job.reading) is not None:
                reading.num_scheduled = max(reading.num_scheduled, sequence.end)
            if sequence.sample is not None or (reading is not None and not context.num_missing):
                job.awaits_token = True
                self._scheduler.mark_decoding(job)
            elif not context.num_missing:
                self.requests.finish(job)

    def _process_tokens(self, step: Step, result: StepResult, launched_at: float = 0.0) -> None:
        now = self._clock.now()
        if self._drafter is not None:
            began = max(step.planned_at, launched_at, self._last_step_ended)
            num_others = step.num_fill_tokens + step.num_background_tokens
            self._drafter.costs.record_step(
                now - began, len(step.jobs), step.num_drafts, num_others
            )
        self._count_steps(step, (now - max(step.planned_at, self._last_step_ended),))
        self._last_step_ended = now
        for job, sequence in zip(step.jobs, step.plan.sequences, strict=True):
            if job.has_ended:
                continue
            if sequence.read is not None:
                self._process_states(job, sequence.end, result.read.get(job.job_id))
            if sequence.sample is None:
                continue
            job.awaits_token = False
            if job.job_id in result.errors:
                self.requests.fail_job(job, result.errors[job.job_id])
            elif job.job_id in result.tokens:
                tokens = (result.tokens[job.job_id], *result.further.get(job.job_id, ()))
                if step.num_drafts and job.drafts is not None and sequence.num_drafts:
                    job.drafts.count(sequence.num_drafts, len(tokens) - 1)
                self._append_tokens(job, tokens, result.scores.get(job.job_id), now)
            else:
                self.requests.fail_job(job, EngineFailed("the runner returned no token"))

    def _process_states(self, job: Job, stop: int, read: StateRead | None) -> None:
        reading, token_ids = job.reading, job.context.token_ids
        assert reading is not None, f"job {job.job_id} reads no states"
        if read is None:
            self.requests.fail_job(job, EngineFailed("the runner returned no hidden states"))
            return
        reading.add(read, stop)
        if stop < len(token_ids):
            return
        job.awaits_token = False
        job.reading_result = reading.result(token_ids)
        if job.reading_result is None:
            self.requests.fail_job(job, ModelNumerics("hidden states are not finite, or zero"))
        else:
            self.requests.finish(job)

    def max_multi_steps(self, token_ids: Collection[int]) -> int:
        """The number of steps that may be planned once and delivered together.

        See `LocalScheduler.max_multi_steps`."""
        return 0 if self._tree.pending_forks else self._scheduler.max_multi_steps(token_ids)

    def deliver_multi_step(
        self, step: Step, tokens: Mapping[int, Sequence[int]], step_seconds: Sequence[float]
    ) -> None:
        """Record several steps equal to `step`, at most `max_multi_steps`.

        `tokens`: the sampled tokens of each job, by job id."""
        num_steps = len(step_seconds)
        for job in step.jobs:
            context, generation = job.context, job.generation
            assert generation is not None, f"job {job.job_id} does not generate"
            copies = self._tree.reserve(context, len(context.token_ids) + num_steps - 1)
            assert copies == (), f"no free blocks for {num_steps} more tokens of {context}"
            context.num_computed += num_steps
            context.token_ids.extend(tokens[job.job_id])
            generation.push_all(tokens[job.job_id])
        self._count_steps(step, step_seconds)

    def _count_steps(self, step: Step, step_seconds: Sequence[float]) -> None:
        """Record finished steps that are equal to `step`."""
        num_prompt_tokens = step.num_fill_tokens + step.num_background_tokens
        self._totals.add(len(step_seconds), len(step.jobs), num_prompt_tokens)
        self._costs.count(step.plan.sequences, num_prompt_tokens + step.num_drafts, step_seconds)
        for elapsed_s in step_seconds:
            self._latency_ns += _LATENCY_SMOOTHING * (elapsed_s * 1e9 - self._latency_ns)
        self._scheduler.record_steps(step, step_seconds)

    def _append_tokens(
        self, job: Job, token_ids: Sequence[int], scores: TokenScores | None, now: float
    ) -> None:
        """Append a sampled token and the accepted draft tokens, up to the output's end.

        Outputs with `scores` have no drafts."""
        generation, request, context = job.generation, job.request, job.context
        assert generation is not None, f"job {job.job_id} does not generate"
        for number, token_id in enumerate(token_ids):
            try:
                generation.push(token_id, scores)
            except InvalidRequest as error:
                self.requests.fail_all([request], error)
                return
            context.token_ids.append(token_id)
            # An accepted draft token has KV, computed by the step that verified it.
            context.num_computed += number > 0
            if generation.finish_reason is not None:
                break
        if request.prompt_done_at is None:
            request.prompt_done_at = now
            if self._drafter is not None:
                job.begin_drafts(self._drafter.acceptance)
        if generation.is_streamed:
            self._streaming_jobs.append(job)
        if generation.finish_reason is not None:
            self.requests.send_chunk(request)
            self.requests.finish(job)

    def _send_chunks(self) -> None:
        """Send the text of the newest tokens, while the next step runs on the GPU."""
        jobs, self._streaming_jobs = self._streaming_jobs, []
        for job in jobs:
            if not job.has_ended:
                self.requests.send_chunk(job.request)

    def runtime_info(self) -> RuntimeInfo:
        """The engine's state and costs. May be called from any thread, also during a step."""
        pool, host, costs = self._tree.pool, self.host, self._costs.costs()
        return RuntimeInfo(
            num_cached_tokens=pool.num_used * pool.block_size,
            num_max_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            block_size=pool.block_size,
            num_running_jobs=self._scheduler.num_admitted,
            num_total_jobs=len(self.requests),
            cache_mem=self.info.cache_mem,
            kv_dtype=self.info.kv_dtype,
            model_mem=self.info.model_mem,
            recent_average_latency=self._latency_ns,
            num_steps=self._totals.num_steps,
            costs=costs if host is None else host.with_copies(costs),
            host_tier=None if host is None else host.tier.info(),
            window_slots=self._tree.slots_info() if self._tree.has_windows else None,
            num_ranks=self.info.num_ranks,
            prompt_tokens=self.requests.prompts.payload(),
        )

    def check_integrity(self) -> None:
        if self.host is not None:
            self.host.check_integrity()
        else:
            self._tree.check_integrity()
        self._scheduler.check_integrity()
        self.requests.check_integrity()


def _make_tree(info: RunnerInfo, num_blocks: int, clock: Clock, *, publishes: bool) -> ContextTree:
    size = info.block_size
    if info.window is None:
        return make_tree(num_blocks, size, clock, publishes=publishes)
    from parrot.engine.core.windows import WindowedTree  # Only models with windows need it.

    made = make_pool(num_blocks, size, clock, publishes=publishes)
    return WindowedTree(*made, info.window.num_slots, info.window.num_tokens)


class IsolatingRunner:
    """Runs steps, and isolates failures.

    If a step fails, each sequence is run alone, so that only the faulty one fails. All methods
    raise only `DeviceLost`."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._overlapping = runner if isinstance(runner, OverlappingRunner) else None
        self._tiered = runner if isinstance(runner, TieredRunner) else None
        self._failed_transfers: list[Landed] = []

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def has_host_tier(self) -> bool:
        return self._tiered is not None and self.info.num_host_blocks > 0

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """See `TieredRunner`. Transfers that cannot be started are reported as failed."""
        assert self._tiered is not None, "there is no host tier"
        try:
            self._tiered.transfer(transfers)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("%d transfers could not be started", len(transfers))
            self._failed_transfers += [Landed(t.transfer_id, False, 0.0) for t in transfers]

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        """See `TieredRunner`."""
        assert self._tiered is not None, "there is no host tier"
        failed, self._failed_transfers = self._failed_transfers, []
        return [*failed, *self._tiered.landed(wait=wait and not failed)]

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        """See `OverlappingRunner`. Returns None also if the launch fails or is not supported."""
        if self._overlapping is None:
            return None
        try:
            return self._overlapping.launch(plan, previous)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences could not be launched", len(plan.sequences))
            return None

    def wait(self, launched: LaunchedStep) -> StepResult | None:
        """Wait for a launched step. Returns None if the step has failed."""
        try:
            return launched.wait()
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a launched step failed")
            return None

    def run(self, plan: StepPlan) -> StepResult:
        try:
            return self._runner.run(plan)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences failed", len(plan.sequences))
            return self._run_one_by_one(plan)

    def _run_one_by_one(self, plan: StepPlan) -> StepResult:
        """Run each sequence as a step of its own, without drafts, which may be the cause."""
        outcome = StepResult({}, {}, {})
        block_size = self._runner.info.block_size
        # The failed step may have written to these blocks. A copy from one of them would now have
        # another content, and it is unknown whether the step has made it: its target is lost.
        written = plan.written_blocks(block_size)
        slots = {slot for block, slot in plan.slot_changes if block in written}
        is_lost = {c: c.source in written or c.source_slot in slots for c in plan.copies}
        copies = tuple(copy for copy in plan.copies if not is_lost[copy])
        lost = {copy.target for copy in plan.copies if is_lost[copy]}
        for sequence in plan.sequences:
            if not lost.isdisjoint(sequence.block_ids):
                failed = EngineFailed("the engine could not run a step with this request")
                outcome.broken[sequence.context_id] = failed
                continue
            sequence = without_drafts(sequence, block_size)
            try:
                result = self._runner.run(StepPlan((sequence,), copies, plan.slot_changes))
            except DeviceLost:
                raise
            except ParrotError as error:
                outcome.broken[sequence.context_id] = error
            except Exception:
                logger.exception("context %d cannot be run", sequence.context_id)
                failed = EngineFailed("the engine could not run this request")
                outcome.broken[sequence.context_id] = failed
            else:
                copies = ()
                outcome.tokens.update(result.tokens)
                outcome.errors.update(result.errors)
                outcome.scores.update(result.scores)
                outcome.read.update(result.read)
        return outcome
