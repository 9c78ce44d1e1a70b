"""The attempts under way: each from its placement until its books are closed.

start -> Executor.run -+-> done     it has an output
                       +-> again    its task must be queued again: it lost its engine, or a
                       |            context, or found no memory
                       +-> failed   the task is given up
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from parrot.protocol.errors import InternalError, ParrotError
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.engines import Engine
from parrot.serve.execution.executor import Executor
from parrot.serve.execution.prefetch import EagerFiller
from parrot.serve.execution.retry import Verdict, final_error, is_broken, judge
from parrot.serve.execution.run import Attempt, Outcome
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask, Placement
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ends:
    """What may become of an attempt that nobody stopped. All books of it are closed by then.
    `answers` tells whether an engine is alive to which a connection broke; if it is not,
    `Attempts.leave` must have come for it."""

    done: Callable[[Attempt, Outcome], None]
    again: Callable[[CompletionTask], None]  # the scheduler has it in its queue already
    failed: Callable[[CompletionTask, ParrotError], None]
    answers: Callable[[Engine], Awaitable[bool]]


class Attempts:
    """Owns what the scheduler has placed: at most one attempt for each completion. Nothing that an
    attempt brings counts when it is not the current one any more."""

    def __init__(
        self,
        clock: Clock,
        ledger: ContextLedger,
        scheduler: Scheduler,
        executor: Executor,
        eager: EagerFiller,
        ends: Ends,
    ) -> None:
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._executor = executor
        self._eager = eager
        self._ends = ends
        self._runners = TaskSet()
        self._running: dict[int, tuple[Attempt, asyncio.Task[None]]] = {}  # by completion id

    def __len__(self) -> int:
        return len(self._running)

    def tasks(self) -> list[CompletionTask]:
        return [attempt.task for attempt, _ in self._running.values()]

    def find(self, completion: Completion) -> CompletionTask | None:
        """The completion's task, if it is running."""
        running = self._running.get(completion.id)
        return None if running is None else running[0].task

    def start(self, placement: Placement, engine: Engine) -> None:
        """The scheduler has placed a task there."""
        task = placement.task
        completion = task.completion
        completion.state = CompletionState.RUNNING
        completion.times.started = self._clock.now()
        completion.stats.attempts += 1
        completion.stats.engine_name = engine.info.engine_name
        completion.stats.model = engine.info.model
        self._eager.started(completion, engine.id)
        attempt = Attempt(task, engine, placement.priority, placement.is_longest)
        runner = self._runners.spawn(self._run(attempt), name=f"completion {completion.id}")
        self._running[completion.id] = (attempt, runner)

    def drop(self, task: CompletionTask) -> None:
        """Nobody wants it any more: stop it for good."""
        attempt = self._stop(task)
        self._scheduler.ended(task, attempt.engine.id)
        self._executor.abandon(attempt)

    def hand_over(self, task: CompletionTask, heir: Completion) -> None:
        """It goes on for another completion."""
        running = self._running[heir.id] = self._running.pop(task.completion.id)
        self._scheduler.hand_over(task, running[0].engine.id, heir)

    def leave(self, engine: Engine) -> list[CompletionTask]:
        """The engine is gone: its tasks run again elsewhere, but not for ever, since one of them
        may be the cause. Returns those that do not. Before the ledger forgets the engine."""
        given_up: list[CompletionTask] = []
        for attempt, _ in list(self._running.values()):
            if attempt.engine is not engine:
                continue
            task = self._stop(attempt.task).task
            self._executor.forget(attempt)
            task.num_lost += 1
            if task.may_run_again:
                self._run_again(attempt)
            else:
                self._scheduler.ended(task, engine.id)
                given_up.append(task)
        return given_up

    def users(self) -> Counter[int]:
        """How many attempts use each context, by its id."""
        contexts = [attempt.context for attempt, _ in self._running.values()]
        return Counter(context.id for context in contexts if context is not None)

    async def close(self) -> None:
        await self._runners.close()

    async def _run(self, attempt: Attempt) -> None:
        try:
            outcome = await self._executor.run(attempt)
        except ParrotError as error:
            if not is_broken(error) or await self._ends.answers(attempt.engine):
                self._fail(attempt, error)
        except Exception:
            logger.exception("completion %d failed", attempt.task.completion.id)
            self._fail(attempt, InternalError("internal error"))
        else:
            self._finish(attempt, outcome)

    def _is_current(self, attempt: Attempt) -> bool:
        running = self._running.get(attempt.task.completion.id)
        return running is not None and running[0] is attempt

    def _finish(self, attempt: Attempt, outcome: Outcome) -> None:
        if not self._is_current(attempt):
            return
        task, usage = attempt.task, outcome.response.usage
        del self._running[task.completion.id]
        self._executor.finish(attempt, outcome)
        self._scheduler.ended(task, attempt.engine.id, usage)
        stats = task.completion.stats
        stats.cached_tokens, stats.computed_tokens = usage.cached_tokens, usage.computed_tokens
        stats.output_tokens = usage.output_tokens or outcome.num_units
        self._ends.done(attempt, outcome)

    def _fail(self, attempt: Attempt, error: ParrotError) -> None:
        if not self._is_current(attempt):
            return
        task, engine = attempt.task, attempt.engine
        verdict = judge(attempt, error)
        del self._running[task.completion.id]
        self._executor.abandon(attempt, with_parents=verdict is Verdict.CONTEXT_IS_LOST)
        if verdict is Verdict.NEEDS_MEMORY:
            self._ledger.evict_idle(engine.id)
        if verdict is not Verdict.FAILS:
            self._run_again(attempt)
        else:
            self._scheduler.ended(task, engine.id)
            self._ends.failed(task, final_error(engine, error))

    def _stop(self, task: CompletionTask) -> Attempt:
        """The task's runner does nothing more; the attempt's books are the caller's."""
        attempt, runner = self._running.pop(task.completion.id)
        runner.cancel()
        return attempt

    def _run_again(self, attempt: Attempt) -> None:
        self._scheduler.requeue(attempt.task, attempt.engine.id)
        self._ends.again(attempt.task)
