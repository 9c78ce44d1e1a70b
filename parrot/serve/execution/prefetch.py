"""Prefetch (eager fill): compute the ready prefix of a completion while it waits for inputs.

    prompt          |-- ready prefix -----------|  missing input  ...
    contexts        |-- tenant's --|-- fill 1 --|-- fill 2 --|       An input became ready: fill 2.
    completion                                               |-- rest of prompt --|-- output --|

The prefix is filled on the engine on which the scheduler would place the completion now. The fills
are ordinary contexts, which the completion finds and forks when it starts. Engines compute fills in
the background, and only with free steps and free KV blocks."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from parrot.protocol.engine_api import FillPiece, FillRequest
from parrot.protocol.errors import ParrotError
from parrot.serve.contexts.forecast import ReadyPrefix
from parrot.serve.contexts.index import LedgerContext
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.serve.execution.prompting import open_fill
from parrot.serve.execution.run import Attempt
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.prompts.encode import encode_prompt
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask, Estimates
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_MIN_FILL_BLOCKS = 4  # Shorter prefixes, in KV blocks, are not worth a request.
# Fraction of an engine's time that fills without use may take. Larger values slow down other calls.
_WASTED_TIME_SHARE = 0.02
_MAX_SHARE = 0.2  # Largest fraction of an engine's time for all fills.
# Weight of the assumed wasted fraction at the start, in tokens.
_PRIOR_TOKENS = 16384
# Factor for the weight of earlier fills when a completion's fills are counted. With a larger value,
# the share adapts more slowly.
_DECAY = 7 / 8


@dataclass(slots=True)
class PrefetchCounts:
    """Counts of prefetched tokens."""

    filled: int = 0
    used: int = 0  # Of these, the tokens whose completion then ran on this engine.
    wasted: int = 0  # Of these, the tokens whose completion ran elsewhere or not at all.

    def attribute(self, num_tokens: int, *, is_used: bool) -> None:
        if is_used:
            self.used += num_tokens
        else:
            self.wasted += num_tokens


@dataclass(slots=True)
class Budget:
    """The fraction of an engine's time that fills may use. It falls with the wasted fraction."""

    prior: float  # The wasted fraction of fills that is assumed at the start.
    requested: float = _PRIOR_TOKENS  # Decayed sum of requested tokens.
    wasted: float = field(init=False)  # Decayed sum of wasted tokens.

    def __post_init__(self) -> None:
        self.wasted = self.prior * self.requested

    def add(self, num_tokens: int, *, is_used: bool) -> None:
        self.requested = self.requested * _DECAY + num_tokens
        self.wasted = self.wasted * _DECAY + (0 if is_used else num_tokens)

    @property
    def share(self) -> float:
        """The fraction of an engine's time for the next fills.

        Used fills only move work to an earlier time, so only wasted fills cost anything. With this
        share, they are expected to take `_WASTED_TIME_SHARE`."""
        return min(_MAX_SHARE, _WASTED_TIME_SHARE * self.requested / max(self.wasted, 1.0))


@dataclass(slots=True, eq=False)
class _PrefetchJob:
    """The fills for one completion, all on one engine."""

    completion: Completion
    engine: Engine
    budget: Budget
    current: Attempt | None = None  # The fill in flight.
    filled: list[LedgerContext] = field(default_factory=list)  # Contexts of finished fills.
    num_requested: int = 0  # Tokens of finished fills and of the fill in flight.
    num_filled: int = 0  # Tokens that the engine has computed.
    is_used: bool | None = None  # None until the completion starts or the job is cancelled.


class Prefetcher:
    """Fills ready prefixes on the engines where the scheduler would place their completions now.

    `wake` schedules a call of `pump`, which runs after all ready calls are placed."""

    def __init__(
        self,
        clock: Clock,
        ledger: ContextLedger,
        scheduler: Scheduler,
        fleet: Fleet,
        estimates: Estimates,
        wake: Callable[[], None],
    ) -> None:
        self.counts = PrefetchCounts()
        self._budget = Budget(prior=1.0)
        # For completions whose missing inputs all come from other calls.
        self._budget_for_graph = Budget(prior=0.1)
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._fleet = fleet
        self._estimates = estimates
        self._wake = wake
        self._pending: dict[Completion, ReadyPrefix] = {}  # Prefixes that grew since `pump`.
        self._jobs: dict[Completion, _PrefetchJob] = {}
        # By the engine's id and the last prefix key of the fill.
        self._in_flight: dict[tuple[int, bytes], _PrefetchJob] = {}
        self._runners = TaskSet()

    # Changes of completions

    def prefix_grew(self, completion: Completion, prefix: ReadyPrefix) -> None:
        """The ready prefix of a waiting completion has grown."""
        self._pending[completion] = prefix
        self._wake()

    def started(self, completion: Completion, engine_id: int) -> None:
        """The completion runs on this engine now."""
        job = self._jobs.get(completion)
        if job is None:
            return
        if job.engine.id != engine_id:
            self.cancel(completion)
            return
        del self._jobs[completion]
        self._attribute(job, is_used=True)

    def cancel(self, completion: Completion) -> None:
        """Cancel the completion's job, and release the contexts that no other call uses."""
        self._pending.pop(completion, None)
        job = self._jobs.pop(completion, None)
        if job is not None:
            self._attribute(job, is_used=False)
            self._stop(job)
            self._release(job.filled)

    def remove_engine(self, engine_id: int) -> None:
        """Drop all jobs of a lost engine. Call it before the ledger removes the engine."""
        for job in [a for a in self._jobs.values() if a.engine.id == engine_id]:
            del self._jobs[job.completion]
            self._attribute(job, is_used=False)
        for job in [a for a in self._in_flight.values() if a.engine.id == engine_id]:
            self._stop(job)

    # Filling

    def pump(self) -> None:
        """Start the fills of prefixes that have grown."""
        due, self._pending = self._pending, {}
        for completion, prefix in due.items():
            job = self._jobs.get(completion)
            if completion.state is not CompletionState.WAITING:
                continue
            if job is not None and job.current is not None:
                self._pending[completion] = prefix  # Try again when the fill in flight is finished.
            else:
                self._start_if_useful(completion, prefix, job)

    def _start_if_useful(
        self, completion: Completion, prefix: ReadyPrefix, job: _PrefetchJob | None
    ) -> None:
        task = CompletionTask(
            completion,
            list(prefix.segments),
            tuple(prefix.keys),
            self._clock.now(),
            self._estimates.output_tokens(completion),
            self._estimates.tokens_per_char(completion.options.models),
        )
        engine = self._choose_engine(task) if job is None else job.engine
        if engine is None or not (num_missing := self._num_to_compute(task, engine)):
            return
        is_sure = prefix.forecast() < inf
        load = self._scheduler.engines.get(engine.id)
        if is_sure and load is not None and load.runs_session(completion.session_id):
            return  # The fill would delay the calls of this session that the completion waits for.
        if job is None:
            budget = self._budget_for_graph if is_sure else self._budget
            job = self._jobs[completion] = _PrefetchJob(completion, engine, budget)
        job.num_requested += num_missing
        attempt = job.current = Attempt(task, engine)
        self._in_flight[engine.id, task.keys[-1]] = job
        attempt.runner = self._runners.spawn(
            self._run(job, attempt), name=f"eager fill for {completion.id}"
        )

    def _choose_engine(self, task: CompletionTask) -> Engine | None:
        """The engine on which the scheduler would place the completion now.

        Before a reader asks for it, prefer the engine that holds most of its prompt in the
        session's contexts: the completion will be placed there later."""
        completion = task.completion
        preferred: Iterable[int] = ()
        if not completion.reader_demand:
            preferred = self._ledger.index.engines_of_owner(completion.session_id, task.keys)
        engine_id = self._scheduler.preview(task, preferred)
        return None if engine_id is None else self._fleet.engines.get(engine_id)

    def _num_to_compute(self, task: CompletionTask, engine: Engine) -> int:
        """The number of prompt tokens that are missing on the engine. 0 if a fill is not worth a
        request, is already in flight, or would evict contexts with an expected use."""
        if engine.tokenizer is None or (engine.id, task.keys[-1]) in self._in_flight:
            return 0
        match = self._ledger.index.match(engine.id, task.keys)
        num_missing = sum(task.lengths[0 if match is None else match.num_covered :])
        block_size = engine.info.block_size
        if num_missing < _MIN_FILL_BLOCKS * block_size:
            return 0
        wanted = num_missing + 2 * block_size
        has_room = self._ledger.evict_for_prefetch(engine.id, wanted, task.tenant)
        return num_missing if has_room else 0

    async def _run(self, job: _PrefetchJob, attempt: Attempt) -> None:
        try:
            await self._fill_all(job, attempt)
        except ParrotError as error:
            logger.debug("eager fill for %d: %s", job.completion.id, error.message)
            job.num_requested = job.num_filled
            self._stop(job)
        except Exception:
            logger.exception("eager fill for %d failed", job.completion.id)
            self._stop(job)
        else:
            self._clear_current(job)
            job.filled += attempt.opened
            if attempt.context is not None:
                attempt.context.mark_computed()
                self._ledger.unpin(attempt.context)
        self._wake()

    async def _fill_all(self, job: _PrefetchJob, attempt: Attempt) -> None:
        """Send all pieces at once. Calls find the pieces' contexts from now on. A call that forks
        a context unknown to the engine would wait for it."""
        chat = job.completion.options.chat
        segments = attempt.task.segments
        limit = attempt.engine.max_len
        parts = await encode_prompt(segments, chat, attempt.tokenizer, limit=limit, is_whole=False)
        pieces = open_fill(self._ledger, attempt, parts)
        fills = [asyncio.ensure_future(self._fill(job, piece)) for piece in pieces]
        try:
            await asyncio.gather(*fills)
        finally:
            for fill in fills:
                fill.cancel()

    async def _fill(self, job: _PrefetchJob, piece: FillPiece) -> None:
        completion = job.completion
        request = FillRequest.model_construct(
            **dict(piece),
            session_id=completion.session_id,
            task_id=completion.id,
            cache_salt=completion.options.cache_salt,
            tenant=completion.options.tenant,
            weight=self._scheduler.weight(completion.options.tenant),
            background=True,
            background_share=job.budget.share,
        )
        response = await job.engine.client.fill(request)
        self.counts.filled += response.computed_tokens
        job.num_filled += response.computed_tokens
        if job.is_used is not None:
            self.counts.attribute(response.computed_tokens, is_used=job.is_used)

    # End of a job

    def _stop(self, job: _PrefetchJob) -> None:
        """Cancel the fill in flight, and release its contexts."""
        attempt = job.current
        if attempt is None:
            return
        self._clear_current(job)
        if attempt.runner is not None and attempt.runner is not asyncio.current_task():
            attempt.runner.cancel()
        if attempt.context is not None:
            self._ledger.unpin(attempt.context)
        self._release(attempt.opened)

    def _release(self, contexts: list[LedgerContext]) -> None:
        for context in reversed(contexts):
            self._ledger.release(context)

    def _clear_current(self, job: _PrefetchJob) -> None:
        """Record that the job has no fill in flight."""
        assert job.current is not None
        del self._in_flight[job.engine.id, job.current.task.keys[-1]]
        job.current = None

    def _attribute(self, job: _PrefetchJob, *, is_used: bool) -> None:
        job.is_used = is_used
        job.budget.add(job.num_requested, is_used=is_used)
        self.counts.attribute(job.num_filled, is_used=is_used)

    def users(self) -> Counter[int]:
        """The number of fills that use each context, by the context's id."""
        attempts = [a.current for a in self._in_flight.values() if a.current is not None]
        return Counter(a.context.id for a in attempts if a.context is not None)

    def check_integrity(self) -> None:
        for job in self._jobs.values():
            assert job.is_used is None, job
            assert job.completion.state in (CompletionState.WAITING, CompletionState.QUEUED)
        for (engine_id, key), job in self._in_flight.items():
            assert job.current is not None, job
            assert (job.engine.id, job.current.task.keys[-1]) == (engine_id, key), job

    async def close(self) -> None:
        for completion in list(self._jobs):
            self.cancel(completion)
        await self._runners.close()
