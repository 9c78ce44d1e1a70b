"""The engine core: requests in, steps, outcomes out.

    plan = scheduler.schedule();  result = runner.run(plan);  deliver(result)

While all jobs only generate, and the runner can, a step is launched before the tokens of the one
before it are known. A job that turns out to have ended leaves a row in that step which is ignored;
what it writes is written before any later step, so its blocks may be given away at once.

Not thread-safe: a driver (driver.py) calls everything here, and only between steps.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot.engine.admission import OrderLimits
from parrot.engine.block_keys import BlockHasher
from parrot.engine.block_pool import BlockPool
from parrot.engine.config import EngineConfig
from parrot.engine.context import ContextTree
from parrot.engine.jobs import Job, Order
from parrot.engine.output import Language
from parrot.engine.plan import (
    DeviceLost,
    LaunchedStep,
    OverlappingRunner,
    Runner,
    RunnerInfo,
    StepPlan,
    StepResult,
)
from parrot.engine.requests import Delivery, RequestDesk
from parrot.engine.scheduler.policy import POLICIES
from parrot.engine.scheduler.scheduler import LocalScheduler, Share
from parrot.protocol.errors import EngineFailed, OutOfMemory, ParrotError
from parrot.protocol.internal import RuntimeInfo
from parrot.utils.clock import Clock

logger = logging.getLogger(__name__)

_CANNOT_RUN = "the engine could not run this request"
_NO_BACKGROUND_ROOM = "there is no room for a background fill"
_LATENCY_SMOOTHING = 0.1
_REQUESTS_PER_TASK = 4  # a task may have fills, retries and aborted attempts in flight
_MIN_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A `StepResult`, and why sequences (by index) could not be run at all."""

    result: StepResult
    broken: Mapping[int, ParrotError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step whose tokens nobody has waited for."""

    step: LaunchedStep
    plan: StepPlan
    planned: list[tuple[Job, Share]]
    began: float


class EngineCore:
    """One model's requests, contexts and steps."""

    def __init__(
        self, config: EngineConfig, runner: Runner, language: Language, clock: Clock
    ) -> None:
        info = runner.info
        num_blocks = info.num_blocks
        if config.tokens_capacity is not None:
            num_blocks = min(num_blocks, -(-config.tokens_capacity // info.block_size))
        self.language = language
        self._runner = runner
        self._overlapping = runner if isinstance(runner, OverlappingRunner) else None
        self._flight: _Flight | None = None
        self._info = info
        self._clock = clock
        hasher = BlockHasher(info.block_size) if config.scheduler.prefix_caching else None
        self._tree = ContextTree(BlockPool(num_blocks, info.block_size), hasher)
        self._scheduler = LocalScheduler(
            config.scheduler,
            config.fill_chunk_size,
            self._tree,
            POLICIES[config.scheduler.policy](),
        )
        self.max_context_len = min(info.max_seq_len, num_blocks * info.block_size)
        self._desk = RequestDesk(
            self._tree,
            self._scheduler,
            language,
            OrderLimits(self.max_context_len, info.vocab_size),
            clock,
            max_requests=max(_MIN_REQUESTS, _REQUESTS_PER_TASK * config.tasks_capacity),
            random_seed=config.random_seed,
        )
        self._num_steps = 0
        self._latency_ns = 0.0
        self._step_began = 0.0
        self._landed = 0.0

    @property
    def runner_info(self) -> RunnerInfo:
        return self._info

    @property
    def tokens_capacity(self) -> int:
        return self._tree.num_blocks * self._tree.block_size

    @property
    def has_work(self) -> bool:
        return self._desk.num_requests > 0

    def submit(self, order: Order) -> None:
        """Never raises: a refusal goes to the order's sink."""
        self._desk.accept(order)

    def abort(self, request_id: int) -> None:
        self._desk.abort(request_id)

    def free(self, context_ids: Iterable[int]) -> int:
        return self._desk.free(context_ids)

    def reset(self) -> None:
        self._desk.reset()

    def fail_everything(self, error: ParrotError) -> None:
        self._flight = None
        self._desk.fail_everything(error)

    def deliver_later(self, call: Callable[[Any], None], argument: Any) -> None:
        """Add a call to the outcomes, to be made where they are delivered."""
        self._desk.deliver_later(call, argument)

    def take_outcomes(self) -> list[Delivery]:
        return self._desk.take_outcomes()

    def step(self) -> bool:
        """Run one step, or launch the next and finish the last; False when there was nothing to
        run. `finish_launched` must come before anything else is asked of the core."""
        flight, self._flight = self._flight, None
        if flight is not None:
            plan = self._plan_ahead(flight)
            ahead = None if plan is None else self._launch(plan, flight.step)
            planned = self._scheduler.planned()
            if not self._land(flight):
                ahead = None  # it took tokens that have never been
            if plan is not None and ahead is None:
                self.deliver(self.run(_with_known_tokens(plan, planned)), planned)
            self._flight = ahead
            return True
        plan = self.plan()
        if plan is None:
            return False
        if self._scheduler.only_decodes:
            self._flight = self._launch(plan, None)
        if self._flight is None:
            self.deliver(self.run(plan))
        return True

    def finish_launched(self) -> None:
        """Wait for the step that is on its way, if there is one, and deliver it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def _plan_ahead(self, flight: _Flight) -> StepPlan | None:
        if not self._scheduler.only_decodes:
            return None
        jobs = [job for job, _ in flight.planned if not job.has_ended]
        return self._scheduler.schedule_ahead(jobs)

    def _launch(self, plan: StepPlan, previous: LaunchedStep | None) -> _Flight | None:
        if self._overlapping is None:
            return None
        began = self._clock.now()
        try:
            step = self._overlapping.launch(plan, previous)
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences could not be launched", len(plan.sequences))
            return None
        return None if step is None else _Flight(step, plan, self._scheduler.planned(), began)

    def _land(self, flight: _Flight) -> bool:
        """Deliver a launched step. False: it failed, and was run again with tokens known now."""
        planned, has_landed = flight.planned, True
        try:
            outcome = StepOutcome(flight.step.wait())
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a launched step of %d sequences failed", len(planned))
            plan, planned = _unfinished(flight.plan, planned)
            outcome, has_landed = self.run(_with_known_tokens(plan, planned)), False
        self._step_began = max(flight.began, self._landed)
        self._landed = self._clock.now()
        self.deliver(outcome, planned)
        return has_landed

    def plan(self) -> StepPlan | None:
        """Decide on the next step. If not None, `run` and `deliver` must follow."""
        self._desk.open_forks()
        plan = self._scheduler.schedule()
        while turned_away := self._scheduler.take_turned_away():
            for job in turned_away:
                self._desk.fail_all([job.request], OutOfMemory(_NO_BACKGROUND_ROOM))
            if plan is None:  # something may have waited for them
                self._desk.open_forks()
                plan = self._scheduler.schedule()
        if plan is not None:
            self._step_began = self._clock.now()
            for job, _ in self._scheduler.planned():
                if job.request.started_at is None:
                    job.request.started_at = self._step_began
        return plan

    def run(self, plan: StepPlan) -> StepOutcome:
        """Raises `DeviceLost`, and nothing else."""
        try:
            return StepOutcome(self._runner.run(plan))
        except DeviceLost:
            raise
        except Exception:
            logger.exception("a step of %d sequences failed", len(plan.sequences))
            return self._run_one_by_one(plan)

    def _run_one_by_one(self, plan: StepPlan) -> StepOutcome:
        """One sequence may have broken the step for all: run each alone. The copies come first
        again, which does no harm: nobody has written over their sources yet."""
        tokens: dict[int, int] = {}
        errors: dict[int, ParrotError] = {}
        broken: dict[int, ParrotError] = {}
        copies = plan.copies
        for index, sequence in enumerate(plan.sequences):
            try:
                result = self._runner.run(StepPlan((sequence,), copies))
            except DeviceLost:
                raise
            except Exception as error:
                logger.exception("context %d cannot be run", sequence.context_id)
                broken[index] = (
                    error if isinstance(error, ParrotError) else EngineFailed(_CANNOT_RUN)
                )
                continue
            copies = ()
            tokens |= result.tokens
            errors |= result.errors
        return StepOutcome(StepResult(tokens, errors), broken)

    def deliver(
        self, outcome: StepOutcome, planned: Sequence[tuple[Job, Share]] | None = None
    ) -> None:
        """Enter what a step computed, and answer the requests that it completed. `planned`: what
        the step consists of, if it is not the last that was planned."""
        now = self._clock.now()
        self._count_step(now - self._step_began, was_ahead=planned is not None)
        tokens, errors = outcome.result.tokens, outcome.result.errors
        planned = self._scheduler.planned() if planned is None else planned
        for index, (job, share) in enumerate(planned):
            if job.has_ended:
                continue  # its request failed with another job of this step, or it ended before
            if index in outcome.broken:
                self._desk.fail_job(job, outcome.broken[index])
                continue
            job.context.num_computed += share.num_tokens
            if job.job_id in errors:
                self._desk.fail_job(job, errors[job.job_id])
                continue
            if share.num_tokens > 1:
                self._tree.publish(job.context)  # what is generated is published in the end
            if job.context.num_missing:
                continue
            if job.generation is None:
                self._desk.finish(job)
            elif job.job_id in tokens:
                self._take_token(job, tokens[job.job_id], now)
            else:
                self._desk.fail_job(job, EngineFailed("the engine gave no token"))

    def num_sure_steps(self, token_ids: Collection[int]) -> int:
        """See `LocalScheduler`. So many steps may be planned once and delivered together."""
        return 0 if self._desk.has_forks else self._scheduler.num_sure_steps(token_ids)

    def deliver_sure(
        self, tokens: Mapping[int, Sequence[int]], step_seconds: Sequence[float]
    ) -> None:
        """Enter several steps like the one that was planned last, no more than were sure. `tokens`:
        those of each job, by its id."""
        num_steps = len(step_seconds)
        for job, _ in self._scheduler.planned():
            context, generation = job.context, job.generation
            assert generation is not None, f"job {job.job_id} does not generate"
            copies = self._tree.reserve(context, len(context.token_ids) + num_steps - 1)
            assert copies == (), f"no room for {num_steps} more tokens of {context}"
            context.num_computed += num_steps
            context.token_ids.extend(tokens[job.job_id])
            generation.push_all(tokens[job.job_id])
        for elapsed_s in step_seconds:
            self._count_step(elapsed_s, was_ahead=False)

    def _count_step(self, elapsed_s: float, *, was_ahead: bool) -> None:
        self._num_steps += 1
        self._latency_ns += _LATENCY_SMOOTHING * (elapsed_s * 1e9 - self._latency_ns)
        self._scheduler.stepped(elapsed_s, was_ahead=was_ahead)

    def _take_token(self, job: Job, token_id: int, now: float) -> None:
        generation, request = job.generation, job.request
        assert generation is not None, f"job {job.job_id} does not generate"
        generation.push(token_id)
        job.context.token_ids.append(token_id)
        if request.prompt_done_at is None:
            request.prompt_done_at = now
        if request.stream and (chunk := generation.take_chunk()) is not None:
            self._desk.deliver_later(request.sink.chunk, chunk)
        if generation.finish_reason is not None:
            self._desk.finish(job)
        else:
            self._scheduler.keep_decoding(job)

    def runtime_info(self) -> RuntimeInfo:
        """Plain reads: may be called from any thread, also during a step."""
        tree = self._tree
        return RuntimeInfo(
            num_cached_tokens=tree.num_used_blocks * tree.block_size,
            num_max_blocks=tree.num_blocks,
            num_free_blocks=tree.num_free_blocks,
            block_size=tree.block_size,
            num_running_jobs=self._scheduler.num_admitted,
            num_total_jobs=self._desk.num_requests,
            cache_mem=self._info.cache_mem,
            model_mem=self._info.model_mem,
            recent_average_latency=self._latency_ns,
            num_steps=self._num_steps,
        )

    def check_integrity(self) -> None:
        self._tree.check_integrity()
        self._scheduler.check_integrity()
        self._desk.check_integrity()


def _unfinished(
    plan: StepPlan, planned: Sequence[tuple[Job, Share]]
) -> tuple[StepPlan, list[tuple[Job, Share]]]:
    """Without the jobs that have ended: their blocks may be others' by now."""
    kept = [i for i, (job, _) in enumerate(planned) if not job.has_ended]
    sequences = tuple(plan.sequences[i] for i in kept)
    return StepPlan(sequences, plan.copies), [planned[i] for i in kept]


def _with_known_tokens(plan: StepPlan, planned: Sequence[tuple[Job, Share]]) -> StepPlan:
    """A plan that was made ahead, with the tokens that are known by now; those of jobs that have
    failed meanwhile do not matter."""
    sequences = tuple(
        s._replace(token_ids=job.context.token_ids[s.start : s.end] or (0,))
        for s, (job, _) in zip(plan.sequences, planned, strict=True)
    )
    return StepPlan(sequences, plan.copies)
