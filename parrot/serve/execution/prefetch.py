"""Eager fill: the ready prefix of a completion that waits for inputs is computed while it waits.

    prompt          |-- ready prefix -----------|  missing  ...
    contexts        |-- tenant's --|-- eager 1 --|-- eager 2 --|      a piece became ready: one more
    completion                                                 |-- late part --|-- output --|

The prefix goes to the engine where the completion would go now, as contexts like any others, so
that the completion finds it there and continues it. The engine computes it in the background: only
with steps and memory that nothing else needs."""

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

_MIN_FILL_BLOCKS = 4  # a shorter piece is not worth an exchange
_WASTED_TIME_SHARE = 0.02  # how much longer steps may become for what nobody will use
_MAX_SHARE = 0.2
_PRIOR_TOKENS = 16384
_DECAY = 7 / 8  # from one completion to the next


@dataclass(slots=True)
class PrefetchCounts:
    """Tokens computed ahead; of these, those whose completion then ran on that engine, and those
    whose completion ran elsewhere or not at all."""

    filled: int = 0
    used: int = 0
    wasted: int = 0

    def attribute(self, num_tokens: int, *, is_used: bool) -> None:
        if is_used:
            self.used += num_tokens
        else:
            self.wasted += num_tokens


@dataclass(slots=True)
class Budget:
    """How much of an engine's time may go into what is perhaps computed for nothing, by how many of
    the tokens that were asked for lately were wasted. Before anything is known, `prior` of them."""

    prior: float
    asked: float = _PRIOR_TOKENS
    wasted: float = field(init=False)

    def __post_init__(self) -> None:
        self.wasted = self.prior * self.asked

    def add(self, num_tokens: int, *, is_used: bool) -> None:
        self.asked = self.asked * _DECAY + num_tokens
        self.wasted = self.wasted * _DECAY + (0 if is_used else num_tokens)

    @property
    def share(self) -> float:
        """The share of an engine's time for more of the same. What will be used only comes earlier;
        what is wasted takes `_WASTED_TIME_SHARE`, as expected."""
        return min(_MAX_SHARE, _WASTED_TIME_SHARE * self.asked / max(self.wasted, 1.0))


@dataclass(slots=True, eq=False)
class _PrefetchJob:
    """The work ahead for one completion. `current`: the piece under way; `filled`: the contexts of
    those before. `is_used` is None until the completion starts or is given up. `num_requested`:
    tokens that were computed or are under way."""

    completion: Completion
    engine: Engine
    budget: Budget
    current: Attempt | None = None
    filled: list[LedgerContext] = field(default_factory=list)
    num_requested: int = 0
    num_filled: int = 0
    is_used: bool | None = None


class Prefetcher:
    """Fills what ready prefixes have, where the scheduler would place their completions now. `wake`
    has `pump` called soon, after ready work was placed."""

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
        self._budget_for_graph = Budget(prior=0.1)  # completions that wait for others only
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._fleet = fleet
        self._estimates = estimates
        self._wake = wake
        self._pending: dict[Completion, ReadyPrefix] = {}
        self._jobs: dict[Completion, _PrefetchJob] = {}
        self._in_flight: dict[tuple[int, bytes], _PrefetchJob] = {}  # by engine and last key
        self._runners = TaskSet()

    # What happens to completions

    def prefix_grew(self, completion: Completion, prefix: ReadyPrefix) -> None:
        """The completion waits, and more of its prompt is known than before."""
        self._pending[completion] = prefix
        self._wake()

    def started(self, completion: Completion, engine_id: int) -> None:
        """It runs on this engine now."""
        job = self._jobs.get(completion)
        if job is None:
            return
        if job.engine.id != engine_id:
            self.cancel(completion)
            return
        del self._jobs[completion]
        self._attribute(job, is_used=True)

    def cancel(self, completion: Completion) -> None:
        """It will not run where its prefix is: stop, and free what nobody else wants."""
        self._pending.pop(completion, None)
        job = self._jobs.pop(completion, None)
        if job is not None:
            self._attribute(job, is_used=False)
            self._stop(job)
            self._release(job.filled)

    def remove_engine(self, engine_id: int) -> None:
        """It is gone with all its contexts. Before the ledger forgets them."""
        for job in [a for a in self._jobs.values() if a.engine.id == engine_id]:
            del self._jobs[job.completion]
            self._attribute(job, is_used=False)
        for job in [a for a in self._in_flight.values() if a.engine.id == engine_id]:
            self._stop(job)

    # Filling

    def pump(self) -> None:
        """Begin what has become due."""
        due, self._pending = self._pending, {}
        for completion, prefix in due.items():
            job = self._jobs.get(completion)
            if completion.state is not CompletionState.WAITING:
                continue
            if job is not None and job.current is not None:
                self._pending[completion] = prefix  # when that piece is there
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
            return  # it would delay the very calls that this one waits for
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
        """Where it would go now. If nobody asks for it yet, rather where its session has most of
        the prompt, since there it goes once somebody does."""
        completion = task.completion
        preferred: Iterable[int] = ()
        if not completion.reader_demand:
            preferred = self._ledger.index.engines_of_owner(completion.session_id, task.keys)
        engine_id = self._scheduler.preview(task, preferred)
        return None if engine_id is None else self._fleet.engines.get(engine_id)

    def _num_to_compute(self, task: CompletionTask, engine: Engine) -> int:
        """How many tokens are missing there; 0 if they are few, somebody fills them already, or
        there is no room without harm."""
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
        """Post all pieces at once: their contexts can be found from now on, and a call that forks
        one which the engine has not heard of would wait for it."""
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

    # Ends

    def _stop(self, job: _PrefetchJob) -> None:
        """End the piece under way, and free its contexts unless somebody has forked them."""
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
        """Nothing is under way for it any more."""
        assert job.current is not None
        del self._in_flight[job.engine.id, job.current.task.keys[-1]]
        job.current = None

    def _attribute(self, job: _PrefetchJob, *, is_used: bool) -> None:
        job.is_used = is_used
        job.budget.add(job.num_requested, is_used=is_used)
        self.counts.attribute(job.num_filled, is_used=is_used)

    def users(self) -> Counter[int]:
        """The number of fills that use each context, by its id."""
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
