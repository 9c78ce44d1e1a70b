"""The dispatcher: ready completions in, settled outputs out. It also handles absent engines: lost
models, engines that return, and engines that drain.

submit -> RunTable.add -> Scheduler ... pump: Scheduler.schedule -> RunTable.place ... done / failed
                              ^                                        |                   |
                              +------------------ retry ---------------+          output.set / fail
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from parrot.protocol.engine_api import LeaveRequest, LeaveResponse
from parrot.protocol.errors import (
    EngineFailed,
    InternalError,
    NotFound,
    ParrotError,
    QuotaExceeded,
    Unavailable,
)
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.events import (
    CompletionPlaced,
    CompletionRetried,
    CompletionUnserved,
    EngineDrained,
    Events,
)
from parrot.serve.execution.fleet import Connect, Engine, EngineChange, Fleet
from parrot.serve.execution.prefetch import PrefetchCounts, Prefetcher
from parrot.serve.execution.refusals import Refusals
from parrot.serve.execution.result_cache import ResultCache
from parrot.serve.execution.run import Attempt, Outcome, Run, RunState
from parrot.serve.execution.run_table import RunTable
from parrot.serve.graph.nodes import Completion
from parrot.serve.scheduling.load import Models, Weigh
from parrot.serve.scheduling.scheduler import MakeOrder, MakePlacer, Scheduler
from parrot.serve.scheduling.task import Estimates
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict, Timer, TimerQueue
from parrot.utils.tasks import Backlog

logger = logging.getLogger(__name__)

_SCHEDULER_ERROR = InternalError("internal error of the scheduler")
# After a restart and the first engine's return, queued calls wait this long, in seconds, for the
# other engines. It is the default interval between heartbeats, in which live engines register.
_REJOIN_WAIT_S = 3.0
# Number of prefix keys remembered per lost engine. Larger values make its return slower: a few
# milliseconds for this number.
_MAX_KEYS_PER_ENGINE = 8192
_MAX_KEYS_IN_ALL = 65_536  # Number of prefix keys remembered for all lost engines together.


class GracePeriods:
    """Refuses the readers of queued runs whose models no engine has served for `grace_s` seconds,
    again and again while such runs are queued. Runs of unknown models fail at once.

    The time counts from the loss of the last such engine, or from when the run was queued if that
    was later. The wait gives a lost engine time to return."""

    def __init__(
        self,
        timers: TimerQueue,
        grace_s: float,
        scheduler: Scheduler,
        fleet: Fleet,
        fail_run: Callable[[Run], None],
    ) -> None:
        self._timers = timers
        self._grace_s = grace_s
        self._scheduler = scheduler
        self._fleet = fleet
        self._fail_run = fail_run
        self._backlog = Backlog()
        self._pending: dict[Models, Timer] = {}

    def engine_joined(self) -> None:
        for models in [m for m in self._pending if self._scheduler.engines.num_members(m)]:
            self._pending.pop(models).cancel()

    def engine_lost(self, now: float) -> None:
        for models in self._scheduler.queues:
            if not self._scheduler.engines.num_members(models):
                self.start(models, now)

    def start(self, models: Models, since: float) -> None:
        """Start the grace period of these models. No effect if it is already running."""
        if models in self._pending:
            return
        grace_s = 0.0
        if not self._fleet.is_unknown(models):
            grace_s = self._grace_s
            self._fleet.expect(models)
        self._pending[models] = self._timers.call_at(
            since + grace_s, lambda: self._expire(models, since)
        )

    def _expire(self, models: Models, since: float) -> None:
        del self._pending[models]
        self._backlog.add(models, self._refuse(models, since))

    def _refuse(self, models: Models, since: float) -> Iterator[int]:
        later: list[float] = []
        for run in self._scheduler.queued(models):
            assert isinstance(run, Run), run
            if self._scheduler.engines.num_members(models):
                return  # An engine has joined.
            if run.state is not RunState.QUEUED:
                continue  # The end of an earlier run has stopped it.
            if run.arrived > since:
                later.append(run.arrived)
                continue
            size = len(run.waiters)
            if self._fleet.is_unknown(models):
                self._fail_run(run)
            else:
                error = self._fleet.unserved_error(models)
                for waiter in list(run.waiters):
                    self._fleet.events.emit(CompletionUnserved, waiter, error)
            yield size
        if self._scheduler.queued(models):
            self.start(models, min(later, default=self._timers.clock.now()))


class ReturningEngines:
    """Sends calls to returned engines that probably still cache their prefixes.

    A returned engine has no contexts, but its prefix cache may be warm. After a restart of
    ServeCore, queued calls wait up to 3 s for their engines: else the first one would get all."""

    def __init__(self, clock: Clock, index: PrefixIndex) -> None:
        self._clock = clock
        self._index = index
        self._engines: dict[str, Engine] = {}  # Live engines by name.
        self._live: set[int] = set()  # Ids of all live engines.
        # Prefixes that lost engines may still cache, by incarnation.
        self._prefix_keys: LruDict[str, list[bytes]] = LruDict(_MAX_KEYS_IN_ALL, weigh=len)
        # Prefixes of queued calls that ran on absent engines before the restart, by engine name.
        self.awaited: dict[str, list[bytes]] = {}
        # When queued calls stop waiting for absent engines; None before the first engine joins.
        self._wait_ends_at: float | None = None
        self._started_at = clock.now()

    def engine_lost(self, engine: Engine, keys: Sequence[bytes]) -> None:
        """Remember the prefix keys of a lost engine's contexts. The latest are the last."""
        self._live.discard(engine.id)
        name, incarnation = engine.info.engine_name, engine.info.incarnation
        before = self._prefix_keys.peek(incarnation) or []
        self._prefix_keys.put(
            incarnation, list(dict.fromkeys([*before, *keys]))[-_MAX_KEYS_PER_ENGINE:]
        )
        if self._engines.get(name) is engine:
            del self._engines[name]

    def engine_joined(self, engine: Engine) -> None:
        if self._wait_ends_at is None:
            self._wait_ends_at = self._clock.now() + _REJOIN_WAIT_S
        self._engines[engine.info.engine_name] = engine
        self._live.add(engine.id)
        keys = self._prefix_keys.get(engine.info.incarnation) or []
        keys = keys + self.awaited.pop(engine.info.engine_name, [])
        self._index.add_cached(engine.id, keys, self._live)

    def run_queued(self, run: Run) -> None:
        """Find the engine on which a queued call, or the call that it continues, ran before the
        restart. So an agent that was idle during the restart finds its KV."""
        name = run.stats.engine_name or self._engine_before_restart(run.completion)
        if name is None:
            return
        if (engine := self._engines.get(name)) is not None:
            self._index.add_cached(engine.id, run.keys, self._live)
        elif self._wait_ends_at is None or self._clock.now() < self._wait_ends_at:
            awaited = self.awaited.setdefault(name, [])
            awaited += run.keys[: _MAX_KEYS_PER_ENGINE - len(awaited)]

    def _engine_before_restart(self, completion: Completion) -> str | None:
        """The engine of the last call whose output is in the prompt, if that call ran before the
        restart. Later calls are in the ledger."""
        for variable in reversed(completion.inputs):
            if isinstance(made_by := variable.producer, Completion):
                started = made_by.times.started
                is_before = started is not None and started <= self._started_at
                return made_by.stats.engine_name if is_before else None
        return None

    def awaited_until(self) -> float | None:
        """Until when queued calls wait for absent engines; None: they do not wait."""
        if self._wait_ends_at is None or not self.awaited:
            return None
        if self._clock.now() < self._wait_ends_at:
            return self._wait_ends_at
        self.awaited.clear()
        return None


class EngineDrains:
    """Drains engines, and lets engines leave.

    A draining engine finishes its calls and gets no new ones. A leaving engine drains, and is
    removed when it has no calls. Call `finish_leaving` after each removal of a call."""

    def __init__(
        self,
        clock: Clock,
        timers: TimerQueue,
        fleet: Fleet,
        scheduler: Scheduler,
        grace: GracePeriods,
        wake: Callable[[], None],
        events: Events,
    ) -> None:
        self._clock = clock
        self._events = events
        self._timers = timers
        self.leaving: dict[int, asyncio.Future[None]] = {}  # Resolved when the engine has no calls.
        self._fleet = fleet
        self._scheduler = scheduler
        self._grace = grace
        self._wake = wake

    def drain(self, engine_id: int, *, is_draining: bool) -> None:
        """Drain an engine, or use it again. Raises `NotFound`."""
        engine = self._fleet.engines.get(engine_id)
        load = self._scheduler.engines.get(engine_id)
        if engine is None or load is None:
            raise NotFound(f"no live engine {engine_id}")
        if load.is_draining == is_draining:
            return
        self._scheduler.engines.set_draining(load, is_draining)
        if is_draining:
            self._grace.engine_lost(self._clock.now())
        else:
            self._grace.engine_joined()
        self._events.emit(EngineDrained, engine.info, is_draining, load.num_tasks)
        self._wake()

    async def leave(self, request: LeaveRequest) -> LeaveResponse:
        """Drain an engine that is about to exit. Remove it when it has no calls, or after the
        timeout; its remaining calls are then retried elsewhere. Raises `NotFound`."""
        engine_id = request.engine_id
        if request.core != self._fleet.identity.id:  # The id was given by another ServeCore.
            raise NotFound(f"no live engine {engine_id}")
        self.drain(engine_id, is_draining=True)
        engine = self._fleet.engines[engine_id]
        loop = asyncio.get_running_loop()
        timeout = loop.create_future()
        left = self.leaving.setdefault(engine_id, loop.create_future())
        when = self._clock.now() + request.timeout_s
        timer = self._timers.call_at(when, partial(_resolve, timeout))
        self.finish_leaving()
        try:
            await asyncio.wait((left, timeout), return_when=asyncio.FIRST_COMPLETED)
            while engine.direct_requests and not timeout.done():
                await asyncio.wait(
                    (*engine.direct_requests, timeout), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            timer.cancel()
        num_calls = self._fleet.num_requests(engine) if engine.is_alive else 0
        engine.lost_without_crash = True
        self._fleet.lose(engine, "it has left")
        return LeaveResponse(num_calls=num_calls)

    def finish_leaving(self) -> None:
        """Resolve the futures of leaving engines that have no calls left."""
        for engine_id in list(self.leaving):
            if not self._scheduler.engines.num_placed(engine_id):
                _resolve(self.leaving.pop(engine_id))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Dispatcher:
    """Owns each completion from `submit` until its output is settled.

    All methods must be called in the event loop's thread. An output's callbacks also run there,
    after the dispatcher has updated its own state."""

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
        self.fleet = Fleet(
            config,
            self._timers,
            connect,
            self._scheduler,
            self._ledger,
            self.events,
            self._on_engine_change,
        )
        self.update_remaining_work = self._scheduler.update_remaining_work
        self.estimates = Estimates(self._scheduler.engines.pace)
        self._fills_eagerly = settings.eager_fill
        self._prefetch: Prefetcher | None = None  # Created with the first ready prefix.
        self._runs = RunTable(
            clock,
            self._ledger,
            self._scheduler,
            self.fleet,
            self._on_change,
            self._on_done,
            self._on_failed,
        )
        self._refusals: Refusals | None = None  # Created with the first refusal.
        self.kv_stats = self._ledger.kv_stats
        self.decisions, self.contexts = self._scheduler.decisions, self._ledger.owners.contexts
        self._results = ResultCache(settings, clock) if settings.reuse_results else None
        self._grace = GracePeriods(
            self._timers,
            config.unserved_timeout_s,
            self._scheduler,
            self.fleet,
            lambda run: self._runs.fail(run, self.fleet.unserved_error(run.models)),
        )
        self._returning = ReturningEngines(clock, self._ledger.index)
        self._was_restored = False
        self.drains = EngineDrains(
            clock, self._timers, self.fleet, self._scheduler, self._grace, self._wake, self.events
        )
        self._alarm: Timer | None = None  # The next time at which the pump must run.
        self._is_pump_due = False

    def weigh_tenants(self, weigh: Weigh) -> None:
        """Set the tenants' weights. Call it before the first `submit`."""
        self._scheduler.weigh = self._ledger.weigh = weigh

    def restored(self) -> None:
        """Completions from before a restart were restored. From now on, queued calls prefer the
        engines on which their earlier calls ran."""
        self._was_restored = True

    # Completions

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_queued

    def queued_by_tenant(self) -> Counter[str]:
        """The number of queued runs of each tenant with queued runs."""
        return self._scheduler.queued_by_tenant()

    def submit(self, completion: Completion) -> None:
        """Queue a completion, unless an identical run is live or its result is cached.

        The completion's inputs must be ready and its objective set."""
        self._ledger.think_times.submitted(completion, self._clock.now())
        segments, keys = self._ledger.prefixes.prompt(completion)
        result_key = None
        if self._results is not None and keys and completion.is_repeatable:
            result_key = self._results.key(completion, keys)
            result = self._results.get(completion.options.cache_salt, result_key)
            if result is not None:
                self._cancel_prefetch(completion)
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
        if self._was_restored or run.stats.engine_name is not None:
            self._returning.run_queued(run)
        if lacking := self._scheduler.engines.missing_features(run):
            self._runs.fail(run, self.fleet.unsupported_error(run.models, min(lacking)))

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        """Announce a completion that waits for inputs. `submit` or `stop_expecting` follows."""
        prefix = self._ledger.prefixes.expect(completion, forecast)
        if prefix is None or not self._fills_eagerly:
            return
        if self._prefetch is None:
            self._prefetch = Prefetcher(
                self._clock,
                self._ledger,
                self._scheduler,
                self.fleet,
                self.estimates,
                self._wake,
            )
        self._prefetch.prefix_grew(completion, prefix)

    def stop_expecting(self, completion: Completion) -> None:
        self._ledger.prefixes.drop(completion)
        self._cancel_prefetch(completion)

    def reprioritise(self, completion: Completion) -> None:
        """Update the completion's run after its objective or its readers have changed."""
        self._runs.reprioritise(completion)

    def follow(self, completion: Completion) -> None:
        """Stream the completion's output from now on, if its run is placed."""
        self._runs.follow(completion)

    def cancel(self, completion: Completion, error: ParrotError) -> None:
        """Stop the completion and fail its output with `error`, unless the output is settled.
        Safe in any state."""
        self._cancel_prefetch(completion)
        self._runs.cancel(completion, error)

    def withdraw(self, completion: Completion) -> None:
        """Stop the completion without settling its output. If it is submitted again, it continues
        after its partial output if possible, else from the start. Safe in any state."""
        self._cancel_prefetch(completion)
        self._runs.withdraw(completion)

    def _cancel_prefetch(self, completion: Completion) -> None:
        """Cancel the completion's prefetch, if any."""
        if self._prefetch is not None:
            self._prefetch.cancel(completion)

    @property
    def prefetch_counts(self) -> PrefetchCounts:
        return PrefetchCounts() if self._prefetch is None else self._prefetch.counts

    def release_session(self, session_id: int) -> Iterator[int]:
        """Free the session's contexts, one with each step of the iterator. Contexts in use are
        freed when their runs end. Contexts of the session's tenant stay."""
        yield from self._runs.forget_session(session_id)
        yield from self._ledger.release_session(session_id)
        self._scheduler.forget_session(session_id)

    # Checks and shutdown

    def check_integrity(self) -> None:
        """Recount contexts, users and loads. Raises AssertionError with the difference."""
        self._runs.check_integrity()
        if self._results is not None:
            self._results.check_integrity()
        keys = [key for run in self._runs if run.state is RunState.QUEUED for key in run.keys]
        users = self._runs.users()
        if self._prefetch is not None:
            self._prefetch.check_integrity()
            users += self._prefetch.users()
        self._ledger.check_integrity(users, Counter(keys))
        self._scheduler.check_integrity()

    async def close(self) -> None:
        """Fail all unfinished completions with `Unavailable`, and stop."""
        error = Unavailable("ServeCore is shutting down")
        for run in self._runs:
            for completion in list(run.waiters):
                self.cancel(completion, error)
        if self._prefetch is not None:
            await self._prefetch.close()
        await self._runs.close()
        await self._timers.close()
        await self.fleet.close()

    # The pump: one scheduling round per turn of the event loop

    def _wake(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        try:
            self._run_round()
        except Exception:
            logger.exception("the scheduler failed; all queued runs fail")
            for run in [run for run in self._runs if run.state is RunState.QUEUED]:
                with suppress(Exception):  # The scheduler may have removed the run already.
                    self._scheduler.remove(run)
                self._runs.fail(run, _SCHEDULER_ERROR, is_scheduled=False)

    def _run_round(self) -> None:
        waits_until = self._returning.awaited_until() if self._returning.awaited else None
        for placement in self._scheduler.schedule() if waits_until is None else ():
            self._runs.place(placement, self.fleet.engines[placement.engine_id])
        for task in self._scheduler.take_failed():
            assert isinstance(task, Run), task
            self._runs.fail(task, _SCHEDULER_ERROR, is_scheduled=False)
        expiry = self._ledger.expire()
        if self._prefetch is not None:
            self._prefetch.pump()
        if self.drains.leaving:
            self.drains.finish_leaving()
        next_change = self._scheduler.next_change() if waits_until is None else waits_until
        for when in (expiry, next_change):
            self._wake_at(when)

    def _wake_at(self, when: float | None) -> None:
        """Wake the pump at this time or earlier."""
        if when is None:
            return
        if self._alarm is not None and self._alarm.when > self._clock.now():  # It has not fired.
            if self._alarm.when <= when:
                return
            self._alarm.cancel()
        self._alarm = self._timers.call_at(when, self._wake)

    # Changes of runs

    def _on_change(self, run: Run) -> None:
        is_queued = run.state is RunState.QUEUED
        if is_queued and not self._scheduler.engines.num_members(run.models):
            self._grace.start(run.models, self._clock.now())
        if run.last_failure and run.state in (RunState.QUEUED, RunState.DELAYED):
            self.events.emit(CompletionRetried, run.completion, run.last_failure)
            run.last_failure = ""
        if run.state is RunState.PLACED:  # The pump placed it, so the pump runs already.
            self._on_placed(run)
        else:
            self._wake()
        if run.state is RunState.ENDED and self._prefetch is not None:
            for waiter in run.waiters:
                self._prefetch.cancel(waiter)

    def _on_placed(self, run: Run) -> None:
        if self._prefetch is not None and run.attempt is not None:
            for waiter in run.waiters:
                self._prefetch.started(waiter, run.attempt.engine.id)
        if self.events.has_sink(CompletionPlaced):
            for waiter in run.waiters:
                self.events.emit(CompletionPlaced, waiter)

    def _on_done(self, run: Run, attempt: Attempt, outcome: Outcome) -> None:
        """Learn from a result, and cache it for later identical calls."""
        if not attempt.resumed:
            self.estimates.learn(run.completion, run.num_chars, outcome.response.usage)
        if self._results is not None and run.result_key is not None:
            self._results.put(
                run.completion.options.cache_salt,
                run.result_key,
                outcome.text,
                outcome.tokenized,
                run.stats,
                run.completion.session_id,
            )

    def _on_failed(self, engine: Engine, error: ParrotError) -> None:
        """Send fewer calls to a server that is full."""
        # An engine with a tokenizer has no server. It refuses a call for reasons of that call.
        if isinstance(error, QuotaExceeded) and engine.tokenizer is None and engine.is_alive:
            if self._refusals is None:
                self._refusals = Refusals(self._timers, self._scheduler.engines, self._wake)
            self._refusals.refused(engine.id, error.retry_after_s)

    # Changes of engines

    def _on_engine_change(self, engine: Engine, change: EngineChange) -> None:
        match change:
            case EngineChange.JOINED:
                self._engine_joined(engine)
            case EngineChange.REPORTED:
                self._engine_reported(engine)
            case EngineChange.LOST:
                self._engine_lost(engine)

    def _engine_joined(self, engine: Engine) -> None:
        info = engine.info
        is_text, units = engine.tokenizer is None, engine.units  # Engines of text have a server.
        capacity, on_host = info.tokens_capacity * units, info.host_tokens_capacity * units
        self._ledger.add_engine(engine.id, capacity, info.block_size, on_host, has_server=is_text)
        self._scheduler.engines.add(
            engine.id,
            info.model,
            info.tasks_capacity,
            info.tokens_capacity,
            info.max_seq_len,
            info.costs,
            is_foreign=is_text,
        )
        if engine.uses_drafts:
            self._runs.use_drafts()
        self._engine_reported(engine)
        self._returning.engine_joined(engine)
        self._grace.engine_joined()
        self._wake()

    def _engine_reported(self, engine: Engine) -> None:
        """Use a heartbeat: reported outputs, step costs, features, and the size of the cache."""
        self._runs.record_reported(engine)
        able = engine.info.capabilities
        costs = server = None
        if (runtime := engine.runtime) is not None:
            costs, server = runtime.costs, runtime.server_load
        device = engine.info.device or able.server
        self._scheduler.engines.reported(engine.id, costs, able.features, server, device)
        if (cache := self._ledger.index.server_caches.get(engine.id)) is not None:
            per_char = self.estimates.tokens_per_char((engine.info.model,))
            size = None if able.kept_tokens is None else int(able.kept_tokens / per_char)
            cache.set_limits(size, able.kept_prompts)

    def _engine_lost(self, engine: Engine) -> None:
        given_up = self._runs.lose_engine(engine)
        if self._prefetch is not None:
            self._prefetch.remove_engine(engine.id)
        self._returning.engine_lost(engine, self._ledger.remove_engine(engine.id))
        self._scheduler.engines.remove(engine.id)
        if self._refusals is not None:
            self._refusals.engine_lost(engine.id)
        self._grace.engine_lost(self._clock.now())
        self.drains.finish_leaving()
        error = EngineFailed(f"an output cannot be continued, its engine was lost: {engine.loss}")
        for run in given_up:
            self._runs.fail(run, error)

    def _on_freed(self, engine_id: int, context_id: int) -> None:
        self.fleet.free(engine_id, context_id)
        self._wake()
