"""From ready completions to settled outputs: the queue, and what becomes of those that ran.

submit -> Scheduler.add ... pump: Scheduler.schedule -> Attempts.start ...... done / failed
                              ^                            |                       |
                              +---------- again -----------+            output.set / fail
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from parrot.protocol.engine_api import EngineInfo, HeartbeatRequest, HeartbeatResponse
from parrot.protocol.errors import EngineFailed, InternalError, ParrotError, Unavailable
from parrot.protocol.public import ModelsResponse
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.forecast import Anticipation
from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.contexts.think_time import Source
from parrot.serve.execution.attempts import Attempts, Ends
from parrot.serve.execution.engines import Engine, EngineView
from parrot.serve.execution.executor import Executor
from parrot.serve.execution.fleet import Connect, Fleet, http_connect
from parrot.serve.execution.frees import FreeSender
from parrot.serve.execution.prefetch import EagerCounts, EagerFiller
from parrot.serve.execution.queue import Queue
from parrot.serve.execution.result_cache import Reuse
from parrot.serve.execution.run import Attempt, Outcome
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.graph.variable import TokenizedText
from parrot.serve.prompts.segments import PrefixHasher, Segment
from parrot.serve.prompts.tokenizers import TokenizerRegistry
from parrot.serve.quotas import QueuedByTenant
from parrot.serve.scheduling.predictor import Estimates
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock
from parrot.utils.timers import Timer, TimerQueue

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 4  # what an engine with text contexts is taken to hold per token


class Dispatcher:
    """Owns a completion from `submit` until it has settled its output. All methods are for the
    event loop's thread; an output's callbacks run in it too, when the books are done."""

    def __init__(self, config: CoreConfig, clock: Clock, connect: Connect | None = None) -> None:
        self._clock = clock
        self._timers = TimerQueue(clock)
        self._ledger = ContextLedger(
            clock,
            config.constant_prefix_var_timeout,
            self._wake,
            config.global_scheduler.kv_eviction,
        )
        self._scheduler = Scheduler(config.global_scheduler, clock, self._ledger.index)
        tokenizers = TokenizerRegistry()
        self._fleet = Fleet(
            config,
            clock,
            self._timers,
            tokenizers,
            connect or http_connect(config.cluster_token),
            lambda engine: self._scheduler.num_placed(engine.id) > 0,
            self._on_joined,
            self._on_lost,
        )
        self.anticipation = Anticipation(PrefixHasher(), self._ledger)
        self.estimates = Estimates(self._scheduler.seconds_alone)
        self._eager = EagerFiller(
            self._ledger,
            tokenizers,
            self._preview,
            self._scheduler.runs_session,
            self._make_task,
            self._wake,
        )
        if config.global_scheduler.eager_fill:
            self.anticipation.listen(self._eager)
        self._queue = Queue(
            clock,
            self._ledger,
            self._scheduler,
            self._timers,
            config.engine_heartbeat_timeout,
            self._give_up_unserved,
            self._wake,
        )
        self._attempts = Attempts(
            clock,
            self._ledger,
            self._scheduler,
            Executor(self._ledger, tokenizers),
            self._eager,
            Ends(self._done, self._queue.enter, self._give_up, self._fleet.liveness.answers),
        )
        self._reuse = Reuse(config.global_scheduler, clock)
        self._frees = FreeSender(clock)
        self._expiry: Timer | None = None
        self._alarm: Timer | None = None  # for the scheduler's next change
        self._is_pump_due = False

    # Completions

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def queued_by_tenant(self) -> QueuedByTenant:
        return self._queue.by_tenant

    @property
    def num_running(self) -> int:
        return len(self._attempts)

    def submit(self, completion: Completion) -> None:
        """Run it when its turn comes, unless an identical one was or is run. Its inputs are ready
        and its objective is set."""
        self._learn_pause(completion)
        segments, keys = self.anticipation.prompt(completion)
        result_key = self._reuse.key(completion, keys)
        if result_key is not None and self._share(completion, result_key):
            self._eager.forgo(completion)
            return
        task = self._make_task(completion, segments, keys)
        task.result_key = result_key
        self._reuse.lead(task)
        self._scheduler.add(task)
        self._queue.enter(task)

    def _make_task(
        self, completion: Completion, segments: Sequence[Segment], keys: Sequence[bytes]
    ) -> CompletionTask:
        return CompletionTask(
            completion,
            list(segments),
            tuple(keys),
            self._clock.now(),
            self.estimates.output_tokens(completion),
            self.estimates.tokens_per_char(completion.options.models),
        )

    def _preview(self, task: CompletionTask) -> Engine | None:
        engine_id = self._scheduler.preview(task)
        return None if engine_id is None else self._fleet.registry.get(engine_id)

    def _learn_pause(self, completion: Completion) -> None:
        before = completion.previous
        if before is not None and before.times.finished is not None:
            pause_s = self._clock.now() - before.times.finished
            self._ledger.pauses.continued(completion.session_id, Source.of(before), pause_s)

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        """It will be submitted when its inputs are there, unless `unexpect` comes first: see
        `graph.links.Runner`."""
        self.anticipation.expect(completion, forecast)

    def unexpect(self, completion: Completion) -> None:
        self.anticipation.drop(completion)

    def reprioritise(self, completion: Completion) -> None:
        """Its objective was tightened. No effect unless it is queued."""
        task = self._queue.find(self._reuse.leader_of(completion))
        if task is not None:
            self._scheduler.update(task)
            self._wake()

    def cancel(self, completion: Completion, error: ParrotError) -> None:
        """Stop it and fail its output with `error`, if that is not settled. Safe in any state."""
        if self._drop(completion) or not completion.state.is_final:
            self._settle(completion, CompletionState.CANCELLED, error)

    def withdraw(self, completion: Completion) -> None:
        """Stop it without settling its output: nobody reads that any more. It may be submitted
        again, and then begins anew. Safe in any state."""
        if self._drop(completion):
            completion.state = CompletionState.IDLE
            self._wake()

    def _drop(self, completion: Completion) -> bool:
        """Nobody wants it any more: forget all work on it, unless that goes on for an identical
        one; False if there is none."""
        self._eager.forgo(completion)
        if self._reuse.leave(completion):
            return True
        if (task := self._queue.find(completion)) is not None:
            self._drop_queued(task)
        elif (task := self._attempts.find(completion)) is not None:
            self._drop_running(task)
        else:
            return False
        return True

    def _drop_queued(self, task: CompletionTask) -> None:
        if (heir := self._reuse.promote(task)) is None:
            self._queue.remove(task)
            self._reuse.ended(task)
        else:
            self._queue.hand_over(task, heir)

    def _drop_running(self, task: CompletionTask) -> None:
        if (heir := self._reuse.promote(task)) is None:
            self._reuse.ended(task)
            self._attempts.drop(task)
        else:
            self._attempts.hand_over(task, heir)

    def _share(self, completion: Completion, result_key: bytes) -> bool:
        """Let it have the result of an identical one; False if there is none."""
        if self._reuse.answer(completion, result_key):
            return True
        task = self._reuse.follow(completion, result_key)
        if task is not None:
            self.reprioritise(task.completion)
        return task is not None

    def progressed(self, session_id: int, remaining_s: float) -> None:
        """See `graph.links.Runner`."""
        self._scheduler.progressed(session_id, remaining_s)

    def release_session(self, session_id: int, heir: str | None = None) -> None:
        """Free every context of the session, those in use when their run ends. Contexts of its
        tenant stay. With an `heir`, a tenant, leave them to it instead, as cache."""
        self._ledger.release_session(session_id, heir)
        self._scheduler.forget_session(session_id)

    # Engines

    async def register_engine(self, info: EngineInfo) -> int:
        """See `Fleet.register`."""
        return await self._fleet.register(info)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        return self._fleet.heartbeat(request)

    def engines(self) -> list[EngineView]:
        now = self._clock.now()
        return [
            EngineView(
                engine.id,
                engine.info,
                engine.runtime,
                self._scheduler.num_placed(engine.id),
                self._ledger.num_contexts(engine.id),
                self._ledger.num_tokens(engine.id),
                now - engine.last_seen,
                self._ledger.log.engine(engine.id),
            )
            for engine in self._fleet.registry
        ]

    def kv_counts(self) -> KvCounts:
        """What became of the tokens of all engines, lost ones included."""
        return self._ledger.log.total

    def eager_counts(self) -> EagerCounts:
        return self._eager.counts

    def models(self) -> ModelsResponse:
        return self._fleet.registry.models()

    # Checks and the end

    def check_integrity(self) -> None:
        """Recount contexts, users and loads. Raises AssertionError with what differs."""
        users = self._attempts.users() + self._eager.users()
        self._eager.check_integrity()
        self._reuse.check_integrity(self._tasks())
        expected = self.anticipation.check_integrity()
        for task in self._queue.tasks():
            expected.update(task.keys)
        self._ledger.check_integrity(users, expected)
        self._scheduler.check_integrity()
        assert self._scheduler.num_queued == len(self._queue), self._queue.tasks()
        assert self._queue.by_tenant.total() == len(self._queue), self._queue.by_tenant
        placed = sum(self._scheduler.num_placed(engine.id) for engine in self._fleet.registry)
        assert placed == len(self._attempts), (placed, self._attempts.tasks())

    async def close(self) -> None:
        """Fail what is unfinished with `Unavailable` and stop."""
        error = Unavailable("ServeCore is shutting down")
        for task in self._tasks():
            for completion in (*task.followers, task.completion):
                self.cancel(completion, error)
        await self._eager.close()
        await self._attempts.close()
        await self._timers.close()
        await self._frees.close()
        await self._fleet.close()

    def _tasks(self) -> list[CompletionTask]:
        return [*self._queue.tasks(), *self._attempts.tasks()]

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
            for task in self._queue.tasks():
                with suppress(Exception):  # it may have gone half the way to an engine
                    self._scheduler.remove(task)
                self._queue.leave(task)
                self._give_up(task, InternalError("internal error of the scheduler"))

    def _advance(self) -> None:
        for placement in self._scheduler.schedule():
            engine = self._fleet.registry.get(placement.engine_id)
            assert engine is not None, placement
            self._queue.leave(placement.task)
            self._attempts.start(placement, engine)
        for task in self._scheduler.take_failed():
            self._queue.leave(task)
            self._give_up(task, InternalError("internal error of the scheduler"))
        for engine_id, context_ids in self._ledger.take_frees().items():
            engine = self._fleet.registry.get(engine_id)
            if engine is not None:
                self._frees.send(engine, context_ids)
        self._eager.pump()
        self._wake_at(self._scheduler.next_change())
        expiry = self._ledger.next_expiry()
        if self._expiry is None and expiry is not None:
            self._expiry = self._timers.call_at(expiry, self._expire_contexts)

    def _wake_at(self, when: float | None) -> None:
        """Call the scheduler again at this time, whatever happens until then."""
        if self._alarm is not None and self._alarm.when != when:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None and when is not None:
            self._alarm = self._timers.call_at(when, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _expire_contexts(self) -> None:
        self._expiry = None
        self._ledger.expire()
        self._wake()

    # What becomes of attempts

    def _done(self, attempt: Attempt, outcome: Outcome) -> None:
        task = attempt.task
        if not attempt.delivered:
            self.estimates.learn(task.completion, task.num_chars, outcome.response.usage)
        tokenized = None
        if outcome.ids is not None and attempt.tokenizer is not None:
            tokenized = TokenizedText(attempt.tokenizer.tokenizer_id, outcome.ids)
        self._wake()
        self._reuse.finish(task, outcome.text, tokenized)

    def _give_up(self, task: CompletionTask, error: ParrotError) -> None:
        """It failed for all who wait for it."""
        self._reuse.ended(task)
        self._settle(task.completion, CompletionState.FAILED, error)
        for follower in self._reuse.take_followers(task):
            self._settle(follower, CompletionState.FAILED, error)

    def _give_up_unserved(self, task: CompletionTask) -> None:
        self._give_up(task, self._fleet.registry.unserved(task.models))

    def _settle(self, completion: Completion, state: CompletionState, error: ParrotError) -> None:
        completion.state = state
        completion.times.finished = self._clock.now()
        self._eager.forgo(completion)
        self._wake()
        if not completion.output.is_settled:
            completion.output.fail(error)

    # Engines that come and go

    def _on_joined(self, engine: Engine) -> None:
        info = engine.info
        units = 1 if info.tokenizer_id is not None else _CHARS_PER_TOKEN
        self._ledger.add_engine(engine.id, info.tokens_capacity * units, info.block_size)
        self._scheduler.add_engine(
            engine.id, info.model, info.tasks_capacity, info.tokens_capacity, info.max_seq_len
        )
        self._queue.engine_joined()

    def _on_lost(self, engine: Engine) -> None:
        given_up = self._attempts.leave(engine)
        self._eager.forget_engine(engine.id)
        self._ledger.forget_engine(engine.id)
        self._scheduler.remove_engine(engine.id)
        self._queue.engine_lost(engine.last_seen)
        for task in given_up:
            self._give_up(task, EngineFailed("every engine that ran the completion was lost"))
