"""All runs, each from its first waiter until it has settled the outputs of the last.

NEW --> QUEUED <--> PLACED --> ENDED        a run that loses its engine, a context or its memory
           |          |                     is queued again
           +----------+--> WITHDRAWN        when nobody waits for it any more; QUEUED again when
                                            its completion is wanted again"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from parrot.protocol.errors import InternalError, ParrotError
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.exchange import Exchange
from parrot.serve.execution.fleet import Engine
from parrot.serve.execution.prefetch import Prefetcher
from parrot.serve.execution.run import (
    Attempt,
    Outcome,
    Run,
    RunState,
    Verdict,
    final_error,
    is_broken,
    judge,
)
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.quotas import QueuedByTenant
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import Placement
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_LIVE = (RunState.QUEUED, RunState.PLACED)


@dataclass(frozen=True, slots=True)
class RunEvents:
    """Callbacks to the owner of the table: a run was `queued`, is `done` or has `failed` (both
    have ended by then, and still have their waiters). `answers` tells whether an engine is alive to
    which a connection broke; if it is not, `RunTable.lose` must have come for it."""

    queued: Callable[[Run], None]
    done: Callable[[Run, Attempt, Outcome], None]
    failed: Callable[[Run, ParrotError], None]
    answers: Callable[[Engine], Awaitable[bool]]


class RunTable:
    """Owns every run and its state, which changes in `_set_state` alone. A completion waits for one
    run at most. Nothing that an attempt brings counts when its run has another one, or none."""

    def __init__(
        self,
        clock: Clock,
        ledger: ContextLedger,
        scheduler: Scheduler,
        exchange: Exchange,
        prefetch: Prefetcher,
        events: RunEvents,
    ) -> None:
        self.queued_by_tenant = QueuedByTenant()
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._exchange = exchange
        self._prefetch = prefetch
        self._events = events
        self._tasks = TaskSet()
        self._live: dict[RunState, dict[Run, None]] = {state: {} for state in _LIVE}
        self._run_of: dict[int, Run] = {}  # by the waiter's id
        self._shared: dict[bytes, Run] = {}  # live ones by result key
        self._withdrawn: dict[int, dict[int, Run]] = {}  # by the ids of session and completion

    @property
    def num_queued(self) -> int:
        return len(self._live[RunState.QUEUED])

    def __iter__(self) -> Iterator[Run]:
        """Yield the runs that are queued or placed now."""
        return iter([run for runs in self._live.values() for run in runs])

    def queued(self) -> list[Run]:
        return list(self._live[RunState.QUEUED])

    # Waiters

    def add(self, run: Run) -> None:
        """A new run, with its first waiter."""
        (waiter,) = run.waiters
        self._run_of[waiter.id] = run
        self._set_state(run, RunState.QUEUED)

    def join(self, completion: Completion, result_key: bytes | None) -> bool:
        """Let it wait for a run that makes its result already, or go on with its own one that was
        withdrawn. False if there is neither."""
        run = None if result_key is None else self._shared.get(result_key)
        if run is not None:
            self.forget(completion)
        elif (run := self._take_withdrawn(completion)) is None:
            return False
        run.waiters.append(completion)
        self._run_of[completion.id] = run
        completion.output.append(run.text)
        if run.state is RunState.WITHDRAWN:
            run.completion = completion  # the first to ask for it may be gone
            run.refresh()
            self._set_state(run, RunState.QUEUED)
            return True
        self._tell(run, completion)
        self._update(run)
        context = None if run.attempt is None else run.attempt.context
        if context is not None and isinstance(run.owner, str):
            self._ledger.owners.share(context, run.owner)
        return True

    def reprioritise(self, completion: Completion) -> None:
        """Its objective has changed. No effect unless its run is queued."""
        if (run := self._run_of.get(completion.id)) is not None:
            self._update(run)

    def leave(self, completion: Completion, *, comes_back: bool = False) -> bool:
        """The completion waits no more; False if it did not. A run without waiters is stopped. If
        it may be wanted again, what it has generated is kept."""
        run = self._run_of.pop(completion.id, None)
        if run is None:
            return False
        run.waiters.remove(completion)
        completion.stats = replace(run.stats)
        if run.waiters:
            self._update(run)
        elif run.state in _LIVE:
            self._stop(run, is_kept=comes_back and run.can_continue)
            if run.state is RunState.WITHDRAWN:
                self._withdrawn.setdefault(completion.session_id, {})[completion.id] = run
        return True

    def forget(self, completion: Completion) -> None:
        """Give up the completion's run that was withdrawn, if there is one."""
        if (run := self._take_withdrawn(completion)) is not None:
            self._set_state(run, RunState.ENDED)

    def forget_session(self, session_id: int) -> None:
        """Nobody will want its withdrawn runs again."""
        for run in self._withdrawn.pop(session_id, {}).values():
            self._set_state(run, RunState.ENDED)

    def take_waiters(self, run: Run) -> Iterator[Completion]:
        """Take them one by one from a run that has ended: settling one may make others leave."""
        assert run.state is RunState.ENDED, run
        while run.waiters:
            waiter = run.waiters.pop(0)
            del self._run_of[waiter.id]
            yield waiter

    # Runs

    def place(self, placement: Placement, engine: Engine) -> None:
        """Start a queued run where the scheduler has placed it."""
        run = placement.task
        assert isinstance(run, Run), run
        attempt = Attempt(run, engine, placement.priority, placement.is_longest)
        run.attempt = attempt
        run.stats.attempts += 1
        run.stats.engine_name = engine.info.engine_name
        run.stats.model = engine.info.model
        self._set_state(run, RunState.PLACED)
        attempt.runner = self._tasks.spawn(
            self._run(run, attempt), name=f"run for completion {run.completion.id}"
        )

    def fail(self, run: Run, error: ParrotError, *, is_scheduled: bool = True) -> None:
        """Give a queued run up. Not `is_scheduled`: the scheduler has given it up already."""
        self._set_state(run, RunState.ENDED, is_scheduled=is_scheduled)
        self._events.failed(run, error)

    def lose(self, engine: Engine) -> list[Run]:
        """The engine is gone: its runs go on elsewhere, but not for ever, since one of them may be
        the cause. Returns those that do not. Before the ledger forgets the engine."""
        given_up: list[Run] = []
        for run in list(self._live[RunState.PLACED]):
            attempt = run.attempt
            assert attempt is not None, run
            if attempt.engine is not engine:
                continue
            _cancel(attempt)
            attempt.context = None
            run.num_lost += 1
            if run.may_run_again:
                self._set_state(run, RunState.QUEUED)
            else:
                self._set_state(run, RunState.ENDED)
                given_up.append(run)
        return given_up

    def users(self) -> Counter[int]:
        """How many runs use each context, by its id."""
        attempts = [run.attempt for run in self._live[RunState.PLACED]]
        return Counter(a.context.id for a in attempts if a is not None and a.context is not None)

    async def close(self) -> None:
        await self._tasks.close()

    def check_integrity(self) -> None:
        """Compare the indexes with the runs' states. Raises AssertionError with what differs."""
        runs = set(self)
        for state, members in self._live.items():
            assert all(run.state is state for run in members), members
        assert self.num_queued == self._scheduler.num_queued, self._live
        tenants = Counter(r.completion.options.tenant for r in self._live[RunState.QUEUED])
        assert tenants == self.queued_by_tenant, (tenants, self.queued_by_tenant)
        shared = {run.result_key: run for run in runs if run.result_key is not None}
        assert self._shared == shared, (self._shared, shared)
        for run in runs:
            assert run.waiters, run
            assert (run.attempt is not None) == (run.state is RunState.PLACED), run
            for waiter in run.waiters:
                assert self._run_of[waiter.id] is run, waiter
                assert waiter.state is _WAITER_STATES[run.state], waiter
                assert waiter.output.partial_text == run.text, waiter
        attempts = [run.attempt for run in self._live[RunState.PLACED] if run.attempt is not None]
        assert all(attempt.runner is not None for attempt in attempts), attempts
        for engine_id, num_placed in Counter(a.engine.id for a in attempts).items():
            assert self._scheduler.num_placed(engine_id) == num_placed, (engine_id, attempts)
        for run in self._run_of.values():
            assert run in runs or run.state is RunState.ENDED, run
        for withdrawn in self._withdrawn.values():
            assert all(r.state is RunState.WITHDRAWN and not r.waiters for r in withdrawn.values())

    # States

    def _set_state(self, run: Run, state: RunState, *, is_scheduled: bool = True) -> None:
        """The only place where a run's state changes. Tells, in this order, the scheduler, the
        ledger, those who compute ahead, and the waiters."""
        before, run.state = run.state, state
        attempt = run.attempt
        if state is not RunState.PLACED and is_scheduled:
            self._reschedule(run, before)
        if before is RunState.QUEUED:
            self._ledger.expectations.remove_queued(run.keys)
            self.queued_by_tenant.leave(run.completion.options.tenant)
        if state is RunState.QUEUED:
            self._ledger.expectations.add_queued(run.keys)
            self.queued_by_tenant.enter(run.completion.options.tenant)
        if state is RunState.PLACED and attempt is not None:
            for waiter in run.waiters:
                self._prefetch.started(waiter, attempt.engine.id)
        if before is RunState.PLACED:
            run.attempt = None
        self._index(run, before)
        if state in _LIVE:
            for waiter in run.waiters:
                self._tell(run, waiter)
        if state is RunState.QUEUED:
            self._events.queued(run)

    def _reschedule(self, run: Run, before: RunState) -> None:
        scheduler, attempt = self._scheduler, run.attempt
        if before is RunState.PLACED:
            assert attempt is not None, run
            if run.state is RunState.QUEUED:
                scheduler.requeue(run, attempt.engine.id)
            else:
                scheduler.ended(run, attempt.engine.id)
        elif run.state is RunState.QUEUED:
            scheduler.add(run)
        elif before is RunState.QUEUED:
            scheduler.remove(run)

    def _index(self, run: Run, before: RunState) -> None:
        if before in _LIVE:
            del self._live[before][run]
        if run.state in _LIVE:
            self._live[run.state][run] = None
        if run.result_key is None:
            return
        if run.state in _LIVE:
            self._shared[run.result_key] = run
        elif before in _LIVE:
            del self._shared[run.result_key]

    def _tell(self, run: Run, waiter: Completion) -> None:
        waiter.state = _WAITER_STATES[run.state]
        waiter.stats = run.stats
        if run.state is RunState.PLACED:
            waiter.times.started = self._clock.now()

    # Attempts

    async def _run(self, run: Run, attempt: Attempt) -> None:
        try:
            outcome = await self._exchange.run(run, attempt)
        except ParrotError as error:
            if not is_broken(error) or await self._events.answers(attempt.engine):
                self._attempt_failed(run, attempt, error)
        except Exception:
            logger.exception("completion %d failed", run.completion.id)
            self._attempt_failed(run, attempt, InternalError("internal error"))
        else:
            self._attempt_done(run, attempt, outcome)

    def _attempt_done(self, run: Run, attempt: Attempt, outcome: Outcome) -> None:
        if run.attempt is not attempt:
            return
        attempt.runner = None
        usage, stats = outcome.response.usage, run.stats
        stats.cached_tokens, stats.computed_tokens = usage.cached_tokens, usage.computed_tokens
        num_resumed = 0 if attempt.tokenizer is None else len(attempt.resumed)
        stats.prompt_tokens = usage.cached_tokens + usage.computed_tokens - num_resumed
        stats.output_tokens = (usage.output_tokens or outcome.num_units) + num_resumed
        stats.finish_reason = outcome.response.finish_reason
        self._exchange.keep(run, attempt, outcome)
        self._set_state(run, RunState.ENDED)
        self._events.done(run, attempt, outcome)

    def _attempt_failed(self, run: Run, attempt: Attempt, error: ParrotError) -> None:
        if run.attempt is not attempt:
            return
        verdict = judge(run, attempt, error)
        attempt.runner = None
        self._exchange.abandon(attempt, with_parents=verdict is Verdict.CONTEXT_IS_LOST)
        if verdict is Verdict.NEEDS_MEMORY:
            self._ledger.evict_idle(attempt.engine.id)
        if verdict is not Verdict.FAILS:
            self._set_state(run, RunState.QUEUED)
        else:
            self._set_state(run, RunState.ENDED)
            self._events.failed(run, final_error(attempt.engine, error))

    def _stop(self, run: Run, *, is_kept: bool) -> None:
        """Nobody waits for it any more."""
        if (attempt := run.attempt) is not None:
            _cancel(attempt)
            if is_kept:
                self._exchange.keep_partial(run, attempt)
            else:
                self._exchange.abandon(attempt)
        self._set_state(run, RunState.WITHDRAWN if is_kept else RunState.ENDED)

    def _update(self, run: Run) -> None:
        """Its waiters may want something else now."""
        if run.state is RunState.QUEUED:
            self._scheduler.update(run)

    def _take_withdrawn(self, completion: Completion) -> Run | None:
        runs = self._withdrawn.get(completion.session_id)
        run = None if runs is None else runs.pop(completion.id, None)
        if runs is not None and not runs:
            del self._withdrawn[completion.session_id]
        return run


_WAITER_STATES = {
    RunState.QUEUED: CompletionState.QUEUED,
    RunState.PLACED: CompletionState.RUNNING,
}


def _cancel(attempt: Attempt) -> None:
    """Its runner does nothing more."""
    assert attempt.runner is not None, attempt
    attempt.runner.cancel()
    attempt.runner = None
