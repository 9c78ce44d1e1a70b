"""All runs and their states, from the first waiter to the settled output of the last.

A **run** computes the result of one prompt. Its **waiters** are the completions that receive the
result: identical completions share a run. An **attempt** is one request of the run to one engine.
The dispatcher adds runs, and calls `place` for each run that the scheduler has given an engine.

    from              to           when
    NEW               QUEUED       the run is added
    QUEUED            PLACED       the scheduler has chosen an engine, and an attempt starts
    PLACED            QUEUED       the attempt failed, or its engine was lost
    PLACED            DELAYED      the same, and only one attempt is left
    DELAYED           QUEUED       the delay has passed
    PLACED            ENDED        the engine has returned the result
    live              ENDED        the run failed, or its last waiter was cancelled
    live              WITHDRAWN    the last waiter was withdrawn, and the output can be continued
    WITHDRAWN         QUEUED       the completion was submitted again (or DELAYED)
    WITHDRAWN         ENDED        the session ended, or its completion joined an identical run

QUEUED, DELAYED and PLACED are live. Only a placed run uses a slot of an engine.

Example: completions A and B have the same greedy prompt.

    submit A               NEW -> QUEUED       waiters A
    submit B               QUEUED              waiters A, B: B has the same result key
    place on engine 0      QUEUED -> PLACED    attempt 1, "ab" is streamed to both
    engine 0 is lost       PLACED -> QUEUED    num_lost 1; `text` is still "ab"
    place on engine 1      QUEUED -> PLACED    attempt 2 continues after the prompt and "ab"
    A is cancelled         PLACED              waiters B
    engine 1 answers       PLACED -> ENDED     the output "abcdef" of B is set"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from parrot.protocol.errors import InternalError, NotFound, OutOfMemory, ParrotError
from parrot.serve.contexts.index import Source
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.exchange import Exchange
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.serve.execution.result_cache import Result, reused_stats
from parrot.serve.execution.resuming import partial_outcome
from parrot.serve.execution.run import (
    Attempt,
    Outcome,
    Run,
    RunState,
    final_error,
    needs_ping,
    should_retry,
)
from parrot.serve.graph.nodes import Completion, CompletionState, RunStats, TokenizedText
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import Placement
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

# Largest number of completions that share one run. All waiters are updated in one turn of the event
# loop, so a larger value makes the longest turn longer.
_MAX_WAITERS = 64
# The states of live runs, and the states of their waiters.
_LIVE_STATES = {
    RunState.QUEUED: CompletionState.QUEUED,
    RunState.DELAYED: CompletionState.QUEUED,
    RunState.PLACED: CompletionState.RUNNING,
}


class RunTable:
    """Owns all runs, and settles the outputs of the completions that wait for them.

    A completion waits for at most one run. Only `_set_state` changes the state of a run. The result
    of an attempt counts only while it is still the run's attempt."""

    def __init__(
        self,
        clock: Clock,
        ledger: ContextLedger,
        scheduler: Scheduler,
        fleet: Fleet,
        on_change: Callable[[Run], None],
        on_done: Callable[[Run, Attempt, Outcome], None],
        on_failed: Callable[[Engine, ParrotError], None],
    ) -> None:
        """`on_change` is called when a run's state or objective has changed. `on_done` is called
        with a result before the outputs are set. `on_failed` is called after an attempt has
        failed."""
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._fleet = fleet
        self._on_change = on_change
        self._on_done = on_done
        self._on_failed = on_failed
        self._exchange = Exchange(ledger, clock)
        self._tasks = TaskSet()
        self._live: dict[Run, None] = {}
        self._run_by_waiter: dict[int, Run] = {}  # By the id of the waiting completion.
        # The live run that identical completions join.
        self._by_result_key: dict[bytes, Run] = {}
        # Withdrawn runs by the ids of session and completion, until the session ends.
        self._withdrawn: defaultdict[int, dict[int, Run]] = defaultdict(dict)

    def __iter__(self) -> Iterator[Run]:
        """Iterate over a copy of the live runs."""
        return iter(list(self._live))

    # Completions

    def add(self, run: Run) -> None:
        """Queue a new run with its first waiter."""
        (waiter,) = run.waiters
        self._run_by_waiter[waiter.id] = run
        self._set_state(run, RunState.QUEUED)

    def join(self, completion: Completion, result_key: bytes | None) -> bool:
        """Add the completion to a live identical run, or queue its own withdrawn run again.
        False if there is no such run."""
        run = None if result_key is None else self._by_result_key.get(result_key)
        if run is not None and len(run.waiters) < _MAX_WAITERS:
            self._drop_withdrawn(completion)
        elif (run := self._take_withdrawn(completion)) is None:
            return False
        run.waiters.append(completion)
        self._run_by_waiter[completion.id] = run
        completion.output.append(run.text)
        if run.state is RunState.WITHDRAWN:
            run.completion = completion  # The run's first completion may be finished.
            run.refresh()
            self._queue_again(run)
            return True
        self._update_waiter(run, completion)
        self._update(run)
        context = None if run.attempt is None else run.attempt.context
        if context is not None and isinstance(run.owner, str):
            self._ledger.owners.give_to_tenant(context, run.owner)
        return True

    def answer(self, completion: Completion, result: Result) -> None:
        """Settle the completion with the cached result of an earlier run."""
        self._drop_withdrawn(completion)
        stats = reused_stats(result.stats, result.session_id)
        self._set_output(completion, result.text, result.tokenized, stats)

    def reprioritise(self, completion: Completion) -> None:
        """Update the completion's run after its objective or its readers have changed."""
        if run := self._run_by_waiter.get(completion.id):
            self._update(run)

    def follow(self, completion: Completion) -> None:
        """Stream the completion's output from now on, if its run is placed."""
        if (run := self._run_by_waiter.get(completion.id)) is not None:
            self._exchange.follow(run)

    def cancel(self, completion: Completion, error: ParrotError) -> None:
        """Stop the completion and fail its output with `error`, unless the output is settled.
        Safe in any state."""
        if self._detach(completion) or not completion.is_finished:
            self._settle_with_error(completion, CompletionState.CANCELLED, error)

    def withdraw(self, completion: Completion) -> None:
        """Stop the completion without settling its output. If it is submitted again, it continues
        after its partial output if possible, else from the start. Safe in any state."""
        if self._detach(completion, may_resume=True):
            completion.state = CompletionState.IDLE

    def forget_session(self, session_id: int) -> Iterator[int]:
        """End the session's withdrawn runs, one with each step of the iterator."""
        for run in self._withdrawn.pop(session_id, {}).values():
            self._set_state(run, RunState.ENDED)
            yield 1

    # Runs

    def place(self, placement: Placement, engine: Engine) -> None:
        """Start an attempt of a queued run on the engine that the scheduler has chosen."""
        run = placement.task
        assert isinstance(run, Run), run
        attempt = Attempt(run, engine, placement.priority, placement.is_longest, placement.share)
        run.attempt, attempt.started_at = attempt, self._clock.now()
        run.stats.attempts += 1
        run.stats.engine_name = engine.info.engine_name
        run.stats.model = engine.info.model
        self._set_state(run, RunState.PLACED)
        attempt.runner = self._tasks.spawn(
            self._run(run, attempt), name=f"run for completion {run.completion.id}"
        )

    def use_drafts(self) -> None:
        """Keep draft texts from now on, because an engine uses them."""
        self._exchange.use_drafts()

    def record_reported(self, engine: Engine) -> None:
        """Record the outputs in the engine's last heartbeat."""
        self._exchange.record_reported(engine)

    def lose_engine(self, engine: Engine) -> list[Run]:
        """Queue the runs of a lost engine again. Call it before the ledger removes the engine.

        Returns the runs that may have crashed too many engines, and the runs that no engine can
        continue. The caller must `fail` them."""
        given_up: list[Run] = []
        for attempt in self._attempts():
            run = attempt.task
            if attempt.engine is not engine or not isinstance(run, Run):
                continue
            attempt.stop()
            attempt.context = None
            run.save_reported_output(attempt)
            may_be_cause = attempt.may_have_crashed_engine(self._fleet.lease_s)
            was_stalled = self._fleet.was_stalled(attempt.started_at)
            is_suspect = may_be_cause and not was_stalled
            run.count_lost_engine(self._clock.now(), is_suspect=is_suspect)
            if run.has_retries_left and not run.is_cut_off(attempt):
                self._queue_again(run)
            else:
                self._set_state(run, RunState.ENDED)
                given_up.append(run)
        return given_up

    def fail(self, run: Run, error: ParrotError, *, is_scheduled: bool = True) -> None:
        """End a run and fail all of its waiters. `is_scheduled`: the scheduler still has the run
        and must be notified."""
        if run.state is not RunState.ENDED:
            self._set_state(run, RunState.ENDED, is_scheduled=is_scheduled)
        for waiter in self._take_waiters(run):
            self._settle_with_error(waiter, CompletionState.FAILED, error)

    def users(self) -> Counter[int]:
        """The number of runs that use each context, by the context's id."""
        return Counter(a.context.id for a in self._attempts() if a.context is not None)

    async def close(self) -> None:
        await self._tasks.close()
        await self._exchange.close()

    def check_integrity(self) -> None:
        """Compare the indexes with the states. Raises AssertionError with the difference."""
        queued = [run for run in self if run.state is RunState.QUEUED]
        assert len(queued) == self._scheduler.num_queued, queued
        tenants = Counter(run.completion.options.tenant for run in queued)
        known = self._scheduler.queued_by_tenant()
        assert tenants == known, (tenants, known)
        for key, run in self._by_result_key.items():
            assert run in self._live, run
            assert run.result_key == key, run
        for run in self:
            assert run.waiters, run
            assert run.state in _LIVE_STATES, run
            assert (run.attempt is not None) == (run.state is RunState.PLACED), run
            for waiter in run.waiters:
                assert self._run_by_waiter[waiter.id] is run, waiter
                assert waiter.state is _LIVE_STATES[run.state], waiter
                assert waiter.output.partial_text == run.text, waiter
        attempts = self._attempts()
        assert all(attempt.runner is not None for attempt in attempts), attempts
        num_placed = Counter(attempt.engine.id for attempt in attempts)
        for engine in self._fleet:
            assert self._scheduler.engines.num_placed(engine.id) == num_placed[engine.id], engine
        for run in self._run_by_waiter.values():
            assert run in self._live or run.state is RunState.ENDED, run
        for withdrawn in self._withdrawn.values():
            assert all(r.state is RunState.WITHDRAWN and not r.waiters for r in withdrawn.values())

    # States

    def _set_state(self, run: Run, state: RunState, *, is_scheduled: bool = True) -> None:
        """Change a run's state. Notifies the scheduler, the ledger, the waiters and `on_change`,
        in this order."""
        before, run.state = run.state, state
        if state is not RunState.PLACED and is_scheduled:
            self._notify_scheduler(run, before)
        if before is RunState.QUEUED:
            self._ledger.expectations.remove_queued(run.keys)
        if state is RunState.QUEUED:
            self._ledger.expectations.add_queued(run.keys)
        if before is RunState.PLACED:
            run.attempt = None
            run.stats.service_s = run.service_s
        self._update_indexes(run)
        if state in _LIVE_STATES:
            for waiter in run.waiters:
                self._update_waiter(run, waiter)
        self._on_change(run)

    def _queue_again(self, run: Run) -> None:
        """Queue the run for its next attempt, the last one after a delay."""
        if delay_s := run.delay_s(self._clock.now()):
            self._set_state(run, RunState.DELAYED)
            name = f"delay of completion {run.completion.id}"
            self._tasks.spawn(self._end_delay(run, delay_s), name=name)
        else:
            self._set_state(run, RunState.QUEUED)

    async def _end_delay(self, run: Run, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        if run.state is RunState.DELAYED:
            run.refresh()
            self._set_state(run, RunState.QUEUED)

    def _notify_scheduler(self, run: Run, before: RunState) -> None:
        scheduler, attempt = self._scheduler, run.attempt
        if before is RunState.PLACED:
            assert attempt is not None, run
            if run.state is RunState.QUEUED:
                scheduler.requeue(run, attempt.engine.id)
            else:
                scheduler.finished(run, attempt.engine.id)
        elif run.state is RunState.QUEUED:
            scheduler.add(run)
        elif before is RunState.QUEUED:
            scheduler.remove(run)

    def _update_indexes(self, run: Run) -> None:
        if run.state in _LIVE_STATES:
            self._live[run] = None
            if run.result_key is not None and len(run.waiters) < _MAX_WAITERS:
                self._by_result_key[run.result_key] = run
        elif run in self._live:
            del self._live[run]
            if run.result_key is not None and self._by_result_key.get(run.result_key) is run:
                del self._by_result_key[run.result_key]

    def _update_waiter(self, run: Run, waiter: Completion) -> None:
        waiter.state = _LIVE_STATES[run.state]
        waiter.stats = run.stats
        if run.state is RunState.PLACED:
            waiter.times.started = self._clock.now()
            waiter.times.first_token = None

    def _update(self, run: Run) -> None:
        """Apply a change of the waiters or of their objectives."""
        if run.state is RunState.QUEUED:
            self._scheduler.update(run)
            self._on_change(run)
        elif run.wants_stream:
            self._exchange.follow(run)

    # Waiters

    def _detach(self, completion: Completion, *, may_resume: bool = False) -> bool:
        """Remove the completion from its run; False if it had none. A run without waiters is
        stopped. `may_resume`: the completion may be submitted again, so keep the output."""
        run = self._run_by_waiter.pop(completion.id, None)
        if run is None:
            return False
        run.waiters.remove(completion)
        completion.stats = replace(run.stats)
        if run.waiters:
            self._update(run)
        elif run.state in _LIVE_STATES:
            completion.stats.used_tokens = run.count_delivered()
            self._stop(run, keep_output=may_resume and run.can_continue)
            completion.stats.service_s = run.service_s
            if run.state is RunState.WITHDRAWN:
                self._withdrawn[completion.session_id][completion.id] = run
        return True

    def _take_waiters(self, run: Run) -> Iterator[Completion]:
        """Remove and yield the waiters of an ended run one by one. Settling one may cancel others,
        so the list can shrink between two steps."""
        assert run.state is RunState.ENDED, run
        while run.waiters:
            waiter = run.waiters.pop(0)
            del self._run_by_waiter[waiter.id]
            yield waiter

    def _take_withdrawn(self, completion: Completion) -> Run | None:
        return self._withdrawn.get(completion.session_id, {}).pop(completion.id, None)

    def _drop_withdrawn(self, completion: Completion) -> None:
        """End the completion's withdrawn run, if it has one."""
        if (run := self._take_withdrawn(completion)) is not None:
            self._set_state(run, RunState.ENDED)

    def _set_output(
        self, completion: Completion, text: str, tokenized: TokenizedText | None, stats: RunStats
    ) -> None:
        self._ledger.think_times.ended(completion.session_id, Source.of(completion))
        completion.stats = stats
        completion.state, completion.conversation = CompletionState.DONE, None
        completion.times.finished = self._clock.now()
        completion.output.set(text, tokenized)

    def _settle_with_error(
        self, completion: Completion, state: CompletionState, error: ParrotError
    ) -> None:
        completion.state, completion.conversation = state, None
        completion.times.finished = self._clock.now()
        if not completion.output.is_settled:
            completion.output.fail(error)

    # Attempts

    def _attempts(self) -> list[Attempt]:
        return [run.attempt for run in self._live if run.attempt is not None]

    async def _run(self, run: Run, attempt: Attempt) -> None:
        try:
            # A ping, so that a run is not blamed for an engine that died before, or together with,
            # an earlier one. If it fails, the engine is lost and the run is queued again.
            if run.num_lost and not await self._fleet.check_reachable(attempt.engine):
                return
            outcome = await self._exchange.run(run, attempt)
        except ParrotError as error:
            attempt.record_failure(error)
            if not needs_ping(error) or await self._fleet.check_reachable(attempt.engine):
                self._attempt_failed(run, attempt, error)
        except Exception:
            logger.exception("completion %d failed", run.completion.id)
            self._attempt_failed(run, attempt, InternalError("internal error"))
        else:
            self._attempt_done(run, attempt, outcome)

    def _attempt_done(self, run: Run, attempt: Attempt, outcome: Outcome) -> None:
        """Settle all waiters with the result."""
        if run.attempt is not attempt:
            return  # The run was cancelled or lost its engine.
        attempt.runner = None
        run.count_response(attempt, outcome)
        most = None if attempt.tokenizer is None else run.stats.computed_tokens
        kv_stats, engine_id = self._ledger.kv_stats, attempt.engine.id
        run.stats.recomputed_tokens = kv_stats.record_recomputed(
            engine_id, attempt.cache_miss, most
        )
        self._exchange.keep(run, attempt, outcome, Source.of(run.completion))
        self._set_state(run, RunState.ENDED)
        self._on_done(run, attempt, outcome)
        for number, waiter in enumerate(self._take_waiters(run)):
            own = reused_stats(run.stats, run.completion.session_id) if number else run.stats
            self._set_output(waiter, outcome.text, outcome.tokenized, own)

    def _attempt_failed(self, run: Run, attempt: Attempt, error: ParrotError) -> None:
        if run.attempt is not attempt:
            return
        attempt.runner = None
        run.save_reported_output(attempt)
        self._exchange.abandon(attempt, with_parents=isinstance(error, NotFound))
        was_stalled = self._fleet.was_stalled(attempt.started_at)
        is_busy = self._scheduler.engines.num_placed(attempt.engine.id) > 1
        if should_retry(run, attempt, error, is_suspect=not was_stalled, is_busy=is_busy):
            if isinstance(error, OutOfMemory):
                self._ledger.evict_idle(attempt.engine.id)
            self._queue_again(run)
        else:
            self.fail(run, final_error(attempt.engine, error))
        self._on_failed(attempt.engine, error)

    def _stop(self, run: Run, *, keep_output: bool) -> None:
        """Stop a run without waiters."""
        if (attempt := run.attempt) is not None:
            attempt.stop()
            if keep_output:
                self._exchange.keep(run, attempt, partial_outcome(run, attempt), None)
            else:
                self._exchange.abandon(attempt)
        self._set_state(run, RunState.WITHDRAWN if keep_output else RunState.ENDED)
