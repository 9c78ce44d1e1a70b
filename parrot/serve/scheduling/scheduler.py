"""The global scheduler: queued tasks and engines in, placements out. It does nothing by itself and
knows no policy by name."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from parrot.protocol.engine_api import StepCosts
from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.scheduling.blocks import RunningPrefixes
from parrot.serve.scheduling.engine_load import EngineLoad
from parrot.serve.scheduling.hold_back import should_wait
from parrot.serve.scheduling.load_index import LoadIndex, Models
from parrot.serve.scheduling.placement import end_of_patience
from parrot.serve.scheduling.policy import MakeOrder, MakePlacer, order_maker, placer_maker
from parrot.serve.scheduling.predictor import Pace
from parrot.serve.scheduling.queue import SortKey, TaskQueue
from parrot.serve.scheduling.task import CompletionTask, Placement
from parrot.utils.clock import Clock

logger = logging.getLogger(__name__)

_LOOK_AHEAD = 4  # tasks that do not fit, or groups held, that are passed over in a round, per queue
_MAX_PASSED = 64  # times that a task may be passed over before its queue waits for it
_MAX_PRIORITY = 2**31 - 1
_PRIORITY_STEP_S = 2.0  # finer differences are not worth the smaller batches that they cause
_USUAL_COSTS = StepCosts()


@dataclass(slots=True)
class _Round:
    """One queue during one call of `schedule`."""

    queue: TaskQueue
    models: Models
    passed: list[CompletionTask]
    num_held: int = 0
    is_over: bool = False


class _Choice(NamedTuple):
    """An engine for a task, and the prompt tokens that it has to compute. `is_held`: the task had
    better wait all the same."""

    load: EngineLoad
    to_compute: int
    is_held: bool


class Scheduler:
    """Tasks are queued per set of models. The engines' loads are what was placed and has not
    ended, by estimates: exact sizes are known only when a prompt meets an engine's tokenizer."""

    def __init__(
        self,
        config: GlobalSchedulerConfig,
        clock: Clock,
        index: PrefixIndex,
        order: MakeOrder | None = None,
        placer: MakePlacer | None = None,
    ) -> None:
        """`order` and `placer` replace the configured ones."""
        self._clock = clock
        self._costs: dict[str, StepCosts] = {}  # by model, as an engine of it reported last
        self._running = RunningPrefixes()
        self._order = (order or order_maker(config))(clock)
        self._loads = LoadIndex()
        self._placer = (placer or placer_maker(config, index))(self._loads, self._running)
        self._queues: dict[Models, TaskQueue] = {}
        self._patience: float | None = None  # when that of a task passed over ends first
        self._failed: list[CompletionTask] = []
        self._epoch = clock.now()

    @property
    def num_queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    # Engines

    def add_engine(
        self,
        engine_id: int,
        model: str,
        max_tasks: int,
        max_tokens: int,
        max_len: int | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        """`max_len`: tokens of the longest sequence that it takes; None: as many as it holds. An
        engine that does not say what its steps cost is taken to be like others of its model."""
        longest = max_tokens if max_len is None else min(max_len, max_tokens)
        if costs is not None:
            self._costs[model] = costs
        costs = self._costs.get(model, _USUAL_COSTS)
        self._loads.add(EngineLoad(engine_id, model, max_tasks, max_tokens, longest, costs))

    def set_costs(self, engine_id: int, costs: StepCosts) -> None:
        """Take over what an engine says that its steps cost."""
        load = self._loads.get(engine_id)
        assert load is not None, engine_id
        if load.costs != costs:
            self._costs[load.model] = costs
            load.set_costs(costs)
            self._loads.changed(load)

    def remove_engine(self, engine_id: int) -> None:
        """Its tasks must have been ended or requeued."""
        load = self._loads.remove(engine_id)
        assert not load.tasks, load

    def num_placed(self, engine_id: int) -> int:
        load = self._loads.get(engine_id)
        return 0 if load is None else load.num_tasks

    def pace(self, models: Models) -> Pace:
        """Average speed of the engines with these models, as they are loaded now."""
        known = [self._costs[model] for model in models or self._costs if model in self._costs]
        costs = known[0] if known else _USUAL_COSTS
        alone_s = costs.decode_step_s(1, 0)
        return Pace(costs.prefill_s, self._loads.mean_step_s(models) or alone_s, alone_s)

    def is_served(self, models: Models) -> bool:
        return self._loads.is_served(models)

    def unserved(self) -> list[Models]:
        """The sets of models that queued tasks want and no engine has."""
        return [m for m, queue in self._queues.items() if queue and not self._loads.is_served(m)]

    # Tasks

    def add(self, task: CompletionTask) -> None:
        self._order.arrived(task)
        self._push(task)

    def remove(self, task: CompletionTask) -> None:
        """A queued task will not run."""
        self._pull(task)
        self._order.ended(task)

    def update(self, task: CompletionTask) -> None:
        """A queued task's objective has changed."""
        self._pull(task)
        task.refresh()
        self._order.updated(task)
        self._push(task)

    def ended(self, task: CompletionTask, engine_id: int) -> None:
        """A placed task has ended for good."""
        self._unload(task, engine_id)
        self._order.ended(task)

    def requeue(self, task: CompletionTask, engine_id: int) -> None:
        """A placed task must run again. It keeps its age."""
        self._unload(task, engine_id)
        task.refresh()
        self._order.updated(task)
        self._push(task)

    def queued(self, models: Models) -> list[CompletionTask]:
        queue = self._queues.get(models)
        return [] if queue is None else queue.tasks()

    def progressed(self, session_id: int, remaining_s: float) -> None:
        """See `OrderPolicy.progressed`."""
        for group in self._order.progressed(session_id, remaining_s):
            for queue in self._queues.values():
                queue.touch(group)

    def forget_session(self, session_id: int) -> None:
        self._order.forget(session_id)

    # The loop

    def schedule(self) -> list[Placement]:
        """Place as many tasks as fit, in order. The caller runs every one of them, and gives up
        those of `take_failed`."""
        for task in self._order.due():
            if task in self._queues.get(task.models, ()):
                self._pull(task)
                self._push(task)
        rounds = [
            _Round(queue, models, [])
            for models, queue in self._queues.items()
            if queue and self._loads.num_open(models)
        ]
        self._placer.new_round()
        now = self._clock.now()
        placements: list[Placement] = []
        while (head := self._first(rounds)) is not None:
            current, task = head
            try:
                choice = self._choose(task, now)
            except Exception:
                logger.exception("no engine could be chosen for call %d", task.completion.id)
                self._fail(current, task)
                continue
            if choice is None:
                self._pass_over(current, task)
            elif choice.is_held:
                self._hold(current, task)
            else:
                current.queue.remove(task)
                placements.append(self._place(task, choice.load, choice.to_compute, now))
                current.is_over = not self._loads.num_open(current.models)
        self._patience = _next_end([t for finished in rounds for t in finished.passed], now)
        for finished in rounds:
            self._restore(finished)
        return placements

    def take_failed(self) -> list[CompletionTask]:
        """Tasks that `schedule` could not weigh because of a defect. They are not queued any more,
        and the others were placed as if these had not been there."""
        failed, self._failed = self._failed, []
        return failed

    def next_change(self) -> float | None:
        """The time at which `schedule` may place or reorder what it left queued, though nothing has
        happened until then; None if no queued task waits for a time."""
        times = (self._patience, self._order.next_change())
        return min([when for when in times if when is not None], default=None)

    def _choose(self, task: CompletionTask, now: float) -> _Choice | None:
        """Choose an engine; None if there is no room for the task now."""
        load = self._placer.choose(task, now)
        if load is None:
            return None
        to_compute = task.prompt_len - self._placer.reused_len(task, load)
        return _Choice(load, to_compute, self._should_wait(task, load, to_compute))

    def _fail(self, current: _Round, task: CompletionTask) -> None:
        current.queue.remove(task)
        self._placer.unqueued(task)
        self._order.ended(task)
        self._failed.append(task)

    def _first(self, rounds: list[_Round]) -> tuple[_Round, CompletionTask] | None:
        best: tuple[SortKey, _Round, CompletionTask] | None = None
        for current in rounds:
            top = None if current.is_over else current.queue.top()
            if top is not None and (best is None or top[0] < best[0]):
                best = (top[0], current, top[1])
        return None if best is None else best[1:]

    def _pass_over(self, current: _Round, task: CompletionTask) -> None:
        current.queue.remove(task)
        current.passed.append(task)
        is_patient = task.num_passed < _MAX_PASSED
        current.is_over = not is_patient or len(current.passed) >= _LOOK_AHEAD

    def _should_wait(self, task: CompletionTask, load: EngineLoad, to_compute: int) -> bool:
        """For those who run there: see `admission`."""
        if not self._order.holds_back or not load.num_tasks:
            return False
        queue = self._queues.get(task.models)
        num_groups = 0 if queue is None else queue.num_groups
        num_waiting = max(1.0, num_groups / self._loads.num_members(task.models))
        step_s, most_s = load.costs.step_s, _added_s(task, load, task.prompt_len, task.prompt_len)
        if not should_wait(load.num_tasks, load.num_tasks + num_waiting, most_s, step_s):
            return False
        num_ahead, num_others = self._order.ahead(task, load.id)
        new_prompt = task.prompt_len - self._running.shared_len(task, load.id)
        added_s = _added_s(task, load, new_prompt, to_compute)
        return should_wait(num_ahead, num_others + num_waiting, added_s, step_s)

    def _hold(self, current: _Round, task: CompletionTask) -> None:
        current.queue.hold(task)
        current.num_held += 1
        current.is_over = current.num_held >= _LOOK_AHEAD

    def _restore(self, current: _Round) -> None:
        current.queue.release()
        for task in current.passed:
            task.num_passed += 1
            current.queue.push(task)
        if not current.queue:
            del self._queues[current.models]

    def preview(self, task: CompletionTask) -> int | None:
        """The engine on which a task would be placed once its prompt is computed there; None if it
        would have to wait even then. Changes nothing."""
        load = self._placer.preview(task, self._clock.now())
        return None if load is None or self._should_wait(task, load, 0) else load.id

    def runs_session(self, engine_id: int, session_id: int) -> bool:
        """Whether the engine has a call of this session now."""
        load = self._loads.get(engine_id)
        return load is not None and any(
            task.completion.session_id == session_id for task in load.tasks
        )

    # Loads

    def _place(
        self, task: CompletionTask, load: EngineLoad, to_compute: int, now: float
    ) -> Placement:
        new_prompt = self._running.add(task, load.id)
        work_s = load.admit(task, new_prompt, to_compute, now)
        self._loads.changed(load)
        self._placer.unqueued(task)
        self._placer.placed(task, load)
        self._order.placed(task, load.id, work_s)
        is_longest = load.max_len >= self._loads.max_len(task.models)
        return Placement(task, load.id, self._priority(task), is_longest)

    def _priority(self, task: CompletionTask) -> int:
        steps = (self._order.priority_s(task) - self._epoch) / _PRIORITY_STEP_S
        return int(max(-_MAX_PRIORITY, min(_MAX_PRIORITY, steps)))

    def _unload(self, task: CompletionTask, engine_id: int) -> None:
        load = self._loads.get(engine_id)
        assert load is not None, engine_id
        load.release(task, self._running.remove(task, engine_id), self._clock.now())
        self._loads.changed(load)
        self._placer.ended(task, load)

    def _push(self, task: CompletionTask) -> None:
        queue = self._queues.get(task.models)
        if queue is None:
            queue = self._queues[task.models] = TaskQueue(self._order)
        queue.push(task)
        self._placer.queued(task)

    def _pull(self, task: CompletionTask) -> None:
        queue = self._queues[task.models]
        queue.remove(task)
        self._placer.unqueued(task)
        if not queue:
            del self._queues[task.models]

    def check_integrity(self) -> None:
        """Recount the loads. Raises AssertionError with what differs."""
        self._placer.check_integrity(t for queue in self._queues.values() for t in queue.tasks())
        segments = self._running.check_integrity({load.id: load.tasks for load in self._loads})
        for load in self._loads:
            load.check_integrity(segments[load.id])


def _next_end(tasks: list[CompletionTask], now: float) -> float | None:
    """When the patience of one of the tasks ends next."""
    ends = [end_of_patience(task) for task in tasks if not task.is_latency]
    return min([end for end in ends if end > now], default=None)


def _added_s(task: CompletionTask, load: EngineLoad, num_read: int, to_compute: int) -> float:
    """To each step while the task runs: its part of the prompt, and its KV that is read."""
    cost = load.costs
    prefill_s = to_compute * cost.prefill_s / task.expected_output
    return cost.sequence_s + num_read * cost.token_s + prefill_s
