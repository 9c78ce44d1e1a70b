"""Running tasks of both kinds: completions on engines, native functions in the sandbox."""

from collections.abc import Callable

from parrot.protocol.errors import ParrotError
from parrot.protocol.public import NativeCallRequest
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.index import Context
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.native import NativeRunner, Sandbox, check_call
from parrot.serve.observers import Observers
from parrot.serve.sessions import Session
from parrot.serve.telemetry.metrics import CoreMetrics
from parrot.serve.tenants.quotas import Meters, require_share
from parrot.utils.clock import Clock

_MAX_WAIT_S = 30.0  # that who is refused is told to wait


class TaskRunner:
    """Implements `graph.runner.Runner` for all sessions, and says how much more may be queued. A
    task that ends is activity of its session."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        dispatcher: Dispatcher,
        sandbox: Sandbox | None,
        metrics: CoreMetrics,
        observers: Observers,
        find_session: Callable[[int], Session | None],
    ) -> None:
        self._max_queue_size = config.global_scheduler.max_queue_size
        self._clock = clock
        self._dispatcher = dispatcher
        self._native = NativeRunner(config, clock, sandbox, find_session)
        self._max_native_timeout_s = config.native_timeout
        self._metrics = metrics
        self._weigh = metrics.tenants.weigh
        self.meters = Meters(metrics.tenants, clock)
        self._observers = observers
        dispatcher.kv_log.on_evicted = self._on_evicted
        self._is_traced = config.otlp_endpoint is not None
        self._find_session = find_session
        self.expect = dispatcher.expect
        self.unexpect = dispatcher.unexpect
        self.progressed = dispatcher.progressed
        self._held: dict[int, Task] | None = None

    def require_room(self, tenant: str) -> None:
        """Raise `ClusterFull` if the queue is full and the tenant has its share of it, and what its
        meters raise. To be asked before anything that may set work going. What one read sets going
        is queued all at once, however much it is: it exists already, and refusing a part of it
        would fail the whole."""
        limit = self._max_queue_size
        if self._dispatcher.num_queued + self._native.num_waiting >= limit:
            queues = (self._dispatcher.queued_by_tenant, self._native.waiting_by_tenant)
            require_share(tenant, limit, self._weigh, self._wait_s(), *queues)
        self.meters.admit(tenant)

    def _wait_s(self) -> float:
        """Seconds in which a tenth of the queue is placed, at the pace of the last placements."""
        placed, pace = self._dispatcher.decisions, 0.0
        if placed and (taken_s := self._clock.now() - placed[0].at) > 0:
            pace = len(placed) / taken_s
        tenth = self._max_queue_size / 10
        return min(_MAX_WAIT_S, tenth / pace) if pace else _MAX_WAIT_S

    def check_native(self, request: NativeCallRequest) -> None:
        """Raise `InvalidRequest` if the call can never run."""
        check_call(request, self._max_native_timeout_s)

    def hold(self) -> None:
        """Start nothing until `go_on`: what is told of tasks has happened already."""
        self._held = {}

    def go_on(self) -> None:
        """Start what should be running, and what comes."""
        held, self._held = self._held or {}, None
        for task in held.values():
            if not task.is_finished:
                self.start(task)

    def start(self, task: Task) -> None:
        if self._held is not None:
            self._held[task.id] = task
            return
        tenant = task.options.tenant
        if isinstance(task, Completion):
            is_counted = self.meters.counts_tokens(tenant)
            tokens = self._dispatcher.estimates.tokens(task) if is_counted else 0
            self.meters.began(task.id, tenant, tokens)
            self._trace(task)
            self._dispatcher.submit(task)
        else:
            self.meters.began(task.id, tenant, 0)
            self._native.start(task)

    def _trace(self, task: Completion) -> None:
        """Say which span its engine's is below: its own if it will have one, or its caller's."""
        task.traceparent = task.options.traceparent
        session = self._find_session(task.session_id) if self._is_traced else None
        if session is not None:
            task.traceparent = session.graph.spans.told(task.traceparent, task.id)

    def _on_evicted(self, context: Context, num_tokens: int) -> None:
        owner = context.owner
        session = self._find_session(owner) if isinstance(owner, int) else None
        self._metrics.evicted(context, num_tokens, session)

    def withdraw(self, task: Task) -> None:
        if self._held is not None:
            self._held.pop(task.id, None)
            return
        if isinstance(task, Completion):
            self._dispatcher.withdraw(task)
        else:
            self._native.stop(task)
        self._ended(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        if self._held is not None:
            self._held.pop(task.id, None)
        elif isinstance(task, Completion):
            self._dispatcher.cancel(task, error)
        else:
            self._native.cancel(task, error)

    def reprioritise(self, completion: Completion) -> None:
        if self._held is None:
            self._dispatcher.reprioritise(completion)

    def finished(self, task: Task) -> None:
        self._ended(task)
        session = self._find_session(task.session_id)
        if session is not None:
            session.task_finished(task, self._clock.now())
            if self._held is not None:
                if self._held.pop(task.id, None) and isinstance(task, Completion):
                    self._dispatcher.unexpect(task)
                return
            self._metrics.task_finished(task, session)
            self._observers.tell(lambda one: one.task_finished(session, task))

    def _ended(self, task: Task) -> None:
        self.meters.ended(task.id, task.stats.used_tokens if isinstance(task, Completion) else 0)

    async def close(self) -> None:
        await self._native.close()
        await self._dispatcher.close()
