"""From ready completions to settled outputs.

submit -> RunTable.add -> Scheduler ... pump: Scheduler.schedule -> RunTable.place ... done / failed
                              ^                                        |                   |
                              +------------------ again ---------------+          output.set / fail
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from parrot.protocol.errors import (
    EngineFailed,
    InternalError,
    ParrotError,
    Unavailable,
    UnsupportedField,
)
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.events import CompletionPlaced, CompletionRetried, Events
from parrot.serve.execution.availability import Drains, Grace, Returns
from parrot.serve.execution.fleet import Connect, Engine, Fleet
from parrot.serve.execution.prefetch import Prefetcher
from parrot.serve.execution.result_cache import ResultCache
from parrot.serve.execution.run import Attempt, Outcome, Run, RunState
from parrot.serve.execution.run_table import RunTable
from parrot.serve.graph.nodes import Completion
from parrot.serve.scheduling.policy import MakeOrder, MakePlacer
from parrot.serve.scheduling.predictor import Estimates
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.utils.clock import Clock
from parrot.utils.timers import Timer, TimerQueue

logger = logging.getLogger(__name__)

_DEFECT = InternalError("internal error of the scheduler")


class Dispatcher:
    """Owns a completion from `submit` until it has settled its output. All methods are for the
    event loop's thread; an output's callbacks run in it too, when the books are done."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        connect: Connect | None = None,
        *,
        order: MakeOrder | None = None,
        placer: MakePlacer | None = None,
    ) -> None:
        """`order` and `placer` replace the scheduler's configured ones."""
        self._clock = clock
        self._timers = TimerQueue(clock)
        self.events = Events()
        self._ledger = ContextLedger(config, clock, self._on_freed, self.events)
        settings = config.global_scheduler
        self._scheduler = Scheduler(settings, clock, self._ledger.index, order, placer)
        self.shares = self._scheduler.counters
        self._ledger.weigh = self.shares.weight
        self.fleet = Fleet(
            config,
            clock,
            self._timers,
            connect,
            self._scheduler,
            self._ledger,
            self.events,
            self._on_joined,
            self._on_reported,
            self._on_lost,
        )
        self.estimates = Estimates(self._scheduler.engines.pace)
        self._prefetch = Prefetcher(
            clock, self._ledger, self._scheduler, self.fleet, self.estimates, self._wake
        )
        self._fills_eagerly = settings.eager_fill
        self._runs = RunTable(
            clock,
            self._ledger,
            self._scheduler,
            self.fleet,
            self._prefetch,
            self._on_change,
            self._on_done,
        )
        self.queued_by_tenant = self._runs.queued_by_tenant
        self.kv_log, self.prefetch_counts = self._ledger.log, self._prefetch.counts
        self.decisions, self.contexts = self._scheduler.decisions, self._ledger.owners.contexts
        self._results = ResultCache(settings, clock)
        self._grace = Grace(
            self._timers,
            config.unserved_timeout_s,
            self._scheduler,
            lambda run: self._runs.fail(run, self.fleet.unserved(run.models)),
        )
        self._returns = Returns(clock, self._ledger.index)
        self.drains = Drains(
            clock, self._timers, self.fleet, self._scheduler, self._grace, self._wake, self.events
        )
        self._alarm: Timer | None = None  # wakes the pump when time alone changes something
        self._is_pump_due = False

    # Completions

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_queued

    def submit(self, completion: Completion) -> None:
        """Run it when its turn comes, unless an identical one was or is run. Its inputs are ready
        and its objective is set."""
        self._ledger.think_times.submitted(completion, self._clock.now())
        segments, keys = self._ledger.prefixes.prompt(completion)
        result_key = self._results.key(completion, keys)
        if result_key is not None:
            result = self._results.get(completion.options.cache_salt, result_key)
            if result is not None:
                self._runs.answer(completion, result)
                return
        if self._runs.join(completion, result_key):
            return
        run = Run(
            completion,
            segments,
            keys,
            self._clock.now(),
            self.estimates.output_tokens(completion),
            self.estimates.tokens_per_char(completion.options.models),
            waiters=[completion],
            result_key=result_key,
            stats=completion.stats,
        )
        self._runs.add(run)
        self._returns.queued(run)
        if lacking := self._scheduler.engines.lacking(run):
            self._runs.fail(run, _unsupported(run.models, min(lacking)))

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        """It will be submitted when its inputs are there, unless `unexpect` comes first."""
        prefix = self._ledger.prefixes.expect(completion, forecast)
        if prefix is not None and self._fills_eagerly:
            self._prefetch.grew(completion, prefix)

    def unexpect(self, completion: Completion) -> None:
        self._ledger.prefixes.drop(completion)
        self._prefetch.give_up(completion)

    def reprioritise(self, completion: Completion) -> None:
        """Its objective was tightened, or its readers want something else."""
        self._runs.reprioritise(completion)

    def follow(self, completion: Completion) -> None:
        """Have its text as it comes until it ends, if it runs now, whoever waits for it."""
        self._runs.follow(completion)

    def cancel(self, completion: Completion, error: ParrotError) -> None:
        """Stop it and fail its output with `error`, if that is not settled. Safe in any state."""
        self._runs.cancel(completion, error)

    def withdraw(self, completion: Completion) -> None:
        """Stop it without settling its output: nobody reads that any more. If it is submitted
        again it goes on behind the text that it has, or begins anew. Safe in any state."""
        self._runs.withdraw(completion)

    def progressed(self, session_id: int, remaining_s: float) -> None:
        self._scheduler.progressed(session_id, remaining_s)

    def release_session(self, session_id: int) -> Iterator[int]:
        """Free every context of the session, one with each step, those in use when their run ends.
        Contexts of its tenant stay."""
        yield from self._runs.forget_session(session_id)
        yield from self._ledger.release_session(session_id)
        self._scheduler.forget_session(session_id)

    # Checks and the end

    def check_integrity(self) -> None:
        """Recount contexts, users and loads. Raises AssertionError with what differs."""
        self._runs.check_integrity()
        self._prefetch.check_integrity()
        self._results.check_integrity()
        keys = [key for run in self._runs if run.state is RunState.QUEUED for key in run.keys]
        self._ledger.check_integrity(self._runs.users() + self._prefetch.users(), Counter(keys))
        self._scheduler.check_integrity()

    async def close(self) -> None:
        """Fail what is unfinished with `Unavailable` and stop."""
        error = Unavailable("ServeCore is shutting down")
        for run in self._runs:
            for completion in list(run.waiters):
                self.cancel(completion, error)
        await self._prefetch.close()
        await self._runs.close()
        await self._timers.close()
        await self.fleet.close()

    # The pump: one for all that happened in a turn of the event loop

    def _wake(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        try:
            self._advance()
        except Exception:
            logger.exception("the scheduler failed; what is queued is given up")
            for run in [run for run in self._runs if run.state is RunState.QUEUED]:
                with suppress(Exception):  # it may have gone half the way to an engine
                    self._scheduler.remove(run)
                self._runs.fail(run, _DEFECT, is_scheduled=False)

    def _advance(self) -> None:
        waits_until = self._returns.awaited_until()
        for placement in self._scheduler.schedule() if waits_until is None else ():
            engine = self.fleet.get(placement.engine_id)
            assert engine is not None, placement
            self._runs.place(placement, engine)
        for task in self._scheduler.take_failed():
            assert isinstance(task, Run), task
            self._runs.fail(task, _DEFECT, is_scheduled=False)
        expiry = self._ledger.expire()
        self._prefetch.pump()
        self.drains.review()
        next_change = self._scheduler.next_change() if waits_until is None else waits_until
        for when in (expiry, next_change):
            self._wake_at(when)

    def _wake_at(self, when: float | None) -> None:
        """Wake the pump at this time at the latest."""
        if when is None:
            return
        if self._alarm is not None and self._alarm.when > self._clock.now():  # it has yet to ring
            if self._alarm.when <= when:
                return
            self._alarm.cancel()
        self._alarm = self._timers.call_at(when, self._wake)

    # What happens to runs

    def _on_change(self, run: Run) -> None:
        if run.state is RunState.QUEUED:
            self._grace.queued(run.models, self._clock.now())
            if run.trouble:
                self.events.emit(CompletionRetried, run.completion, run.trouble)
                run.trouble = ""
        if run.state is not RunState.PLACED:  # which is the pump's own doing
            self._wake()
        elif self.events.wants(CompletionPlaced):
            for waiter in run.waiters:
                self.events.emit(CompletionPlaced, waiter)

    def _on_done(self, run: Run, attempt: Attempt, outcome: Outcome) -> None:
        """Learn from its result, and keep it for those to come."""
        if not attempt.resumed:
            self.estimates.learn(run.completion, run.num_chars, outcome.response.usage)
        if run.result_key is not None:
            salt = run.completion.options.cache_salt
            self._results.put(salt, run.result_key, outcome.text, outcome.tokenized, run.stats)

    # Engines that come and go

    def _on_joined(self, engine: Engine) -> None:
        info = engine.info
        is_text, units = engine.tokenizer is None, engine.units  # then there is a server behind it
        capacity, on_host = info.tokens_capacity * units, info.host_tokens_capacity * units
        self._ledger.add_engine(engine.id, capacity, info.block_size, on_host, has_server=is_text)
        self._scheduler.engines.add(
            engine.id,
            info.model,
            info.tasks_capacity,
            info.tokens_capacity,
            info.max_seq_len,
            info.costs,
        )
        self._on_reported(engine)
        self._returns.joined(engine)
        self._grace.engine_joined()
        self._wake()

    def _on_reported(self, engine: Engine) -> None:
        """It says what its steps cost, what it can do, what it keeps, and what it generates."""
        self._runs.heard(engine)
        able = engine.info.capabilities
        costs = server = None
        if (runtime := engine.runtime) is not None:
            costs, server = runtime.costs, runtime.server_load
        device = engine.info.device or able.server
        self._scheduler.engines.reported(engine.id, costs, able.features, server, device)
        if (kept := self._ledger.index.kept.get(engine.id)) is not None:
            per_char = self.estimates.tokens_per_char((engine.info.model,))
            size = None if able.kept_tokens is None else int(able.kept_tokens / per_char)
            kept.bound(size, able.kept_prompts)

    def _on_lost(self, engine: Engine) -> None:
        given_up = self._runs.lose(engine)
        self._prefetch.forget_engine(engine.id)
        self._returns.lost(engine, self._ledger.forget_engine(engine.id))
        self._scheduler.engines.remove(engine.id)
        self._grace.engine_lost(self._clock.now())
        self.drains.review()
        for run in given_up:
            self._runs.fail(run, EngineFailed("every engine that ran the completion was lost"))

    def _on_freed(self, engine_id: int, context_id: int) -> None:
        self.fleet.free(engine_id, context_id)
        self._wake()


def _unsupported(models: Sequence[str], name: str) -> UnsupportedField:
    of_model = f" of {' or '.join(models)}" if models else ""
    return UnsupportedField(f"no engine{of_model} supports `{name}`", param=name)
