"""Runs tasks of both kinds: completions, which run on engines, and native functions, whose source
text comes from programs and runs in a sandbox process."""

import asyncio
import keyword
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from textwrap import dedent
from typing import Protocol

from pydantic_monty import AsyncMonty, MontyError, MontyRuntimeError, MontySyntaxError

from parrot.protocol.errors import (
    InternalError,
    InvalidRequest,
    NativeFunctionFailed,
    ParrotError,
)
from parrot.protocol.fields import MAX_TEXT
from parrot.protocol.public import NativeCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig
from parrot.serve.events import TaskEnded
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import Completion, CompletionState, NativeCall, Task
from parrot.serve.sessions import SessionRegistry
from parrot.serve.tenants.limits import Meters, QueuedByTenant, require_share
from parrot.serve.tenants.table import TenantTable
from parrot.utils.clock import Clock
from parrot.utils.slots import FairSlots
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 30.0  # Longest `retry-after`, in seconds, of a request that a full queue rejects.
_NO_SAMPLING = SamplingConfig()
_MAX_MESSAGE = 1000  # Characters of a function's own error that are reported.

# Definitions that the function's source may use: its outputs, and stand-ins for the decorator and
# the annotations.
_PRELUDE = """
class _Output:
    def __init__(self, name):
        self._name = name
        self._text = None

    def set(self, text):
        if not isinstance(text, str):
            raise TypeError(f"output `{self._name}` takes str, not {type(text).__name__}")
        if self._text is not None:
            raise ValueError(f"output `{self._name}` is already set")
        self._text = text

    def get(self):
        return self._text

class _Namespace:
    Input = str
    Output = _Output

    def native_function(self, *args, **kwargs):
        return lambda function: function

P = _Namespace()
native_function = P.native_function

"""


class Sandbox(Protocol):
    """Runs native functions."""

    async def evaluate(self, call: NativeCall) -> Sequence[object]:
        """The output values in the order of `call.results`; None for an output that was not set.
        Raises `NativeFunctionFailed`."""
        ...

    async def close(self) -> None: ...


class TaskRunner:
    """Implements `graph.nodes.Executor` for all sessions, and limits the queue."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        dispatcher: Dispatcher,
        sandbox: Sandbox | None,
        tenants: TenantTable,
        sessions: SessionRegistry,
    ) -> None:
        self._max_queue_size = config.global_scheduler.max_queue_size
        self._clock = clock
        self._dispatcher = dispatcher
        self._make_native = partial(NativeRunner, config, clock, sandbox, sessions)
        self._native: NativeRunner | None = None  # created with the first native call
        self._max_native_timeout_s = config.native_timeout
        self._tenants = tenants
        # Only tenants with keys have limits.
        self.meters = Meters(tenants, clock) if tenants.is_closed else None
        self._sessions = sessions
        self.expect = dispatcher.expect
        self.stop_expecting = dispatcher.stop_expecting
        self.update_remaining_work = dispatcher.update_remaining_work
        self._held: dict[int, Task] | None = None

    def require_room(self, tenant: str) -> None:
        """Raise `ClusterFull` if the queue is full and the tenant has used its share of it, and the
        errors of its meters. Call it before each request that may start work. All calls that one
        read starts are queued together: they exist already, and rejecting some would fail the
        whole graph."""
        limit, native = self._max_queue_size, self._native
        if self._dispatcher.num_queued + (0 if native is None else native.num_waiting) >= limit:
            queues = [self._dispatcher.queued_by_tenant()]
            if native is not None:
                queues.append(native.waiting_by_tenant)
            require_share(tenant, limit, self._tenants.weigh, self._wait_s(), *queues)
        if self.meters is not None:
            self.meters.admit(tenant)

    def _wait_s(self) -> float:
        """Seconds until a tenth of the queue is placed, at the pace of the last placements."""
        placed, pace = self._dispatcher.decisions, 0.0
        if placed and (taken_s := self._clock.now() - placed[0].at) > 0:
            pace = len(placed) / taken_s
        tenth = self._max_queue_size / 10
        return min(_MAX_WAIT_S, tenth / pace) if pace else _MAX_WAIT_S

    def check_native(self, request: NativeCallRequest) -> None:
        """Raise `InvalidRequest` if the call can never run."""
        check_call(request, self._max_native_timeout_s)

    def hold(self) -> None:
        """Start no task until `resume`: the replayed tasks have run before."""
        self._held = {}

    def resume(self) -> None:
        """Start the unfinished tasks that were held, and all later ones."""
        self._dispatcher.restored()
        held, self._held = self._held or {}, None
        for task in held.values():
            if not task.is_finished:
                self.start(task)

    def start(self, task: Task) -> None:
        if self._held is not None:
            self._held[task.id] = task
            return
        tenant = task.options.tenant
        if self.meters is not None:
            tokens = 0
            if isinstance(task, Completion) and self.meters.counts_tokens(tenant):
                tokens = self._dispatcher.estimates.tokens(task)
            self.meters.began(task.id, tenant, tokens)
        if isinstance(task, Completion):
            self._dispatcher.submit(task)
        else:
            if self._native is None:
                self._native = self._make_native()
            self._native.start(task)

    def withdraw(self, task: Task) -> None:
        if self._held is not None:
            self._held.pop(task.id, None)
            return
        if isinstance(task, Completion):
            self._dispatcher.withdraw(task)
        elif self._native is not None:
            self._native.stop(task)
        self._ended(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        if self._held is not None:
            self._held.pop(task.id, None)
        elif isinstance(task, Completion):
            self._dispatcher.cancel(task, error)
        elif self._native is not None:
            self._native.cancel(task, error)

    def reprioritise(self, completion: Completion) -> None:
        if self._held is None:
            self._dispatcher.reprioritise(completion)

    def finished(self, task: Task) -> None:
        self._ended(task)
        session = self._sessions.find_owner(task.session_id)
        if session is not None:
            session.task_finished(task, self._clock.now())
            if self._held is not None:
                if self._held.pop(task.id, None) and isinstance(task, Completion):
                    self._dispatcher.stop_expecting(task)
                return
            self._dispatcher.events.emit(TaskEnded, session, task)

    def _ended(self, task: Task) -> None:
        if self.meters is not None:
            tokens = task.stats.used_tokens if isinstance(task, Completion) else 0
            self.meters.ended(task.id, tokens)

    async def close(self) -> None:
        if self._native is not None:
            await self._native.close()
        await self._dispatcher.close()


class NativeRunner:
    """Runs native calls in a sandbox, up to `native_workers` at a time. Sessions take turns. With
    two or more workers, one session never uses all of them."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        sandbox: Sandbox | None,
        sessions: SessionRegistry,
    ) -> None:
        self._clock = clock
        self._sessions = sessions
        self._slots = FairSlots(config.native_workers)
        self._sandbox = sandbox or MontySandbox(config)
        self._running: dict[int, asyncio.Task[None]] = {}  # by task id
        self._waiting: set[int] = set()  # task ids that wait for a worker
        self._tasks = TaskSet()
        self.waiting_by_tenant = QueuedByTenant()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self, call: NativeCall) -> None:
        """Run the call, and settle its outputs."""
        self._waiting.add(call.id)
        self.waiting_by_tenant.enter(call.options.tenant)
        running = self._tasks.spawn(self._run(call), name=f"native {call.func_name}")
        self._running[call.id] = running
        running.add_done_callback(lambda done: self._forget(call.id, done))

    def stop(self, call: NativeCall) -> None:
        """Stop the call; its outputs stay unsettled. Safe in any state."""
        self._end_wait(call)
        running = self._running.pop(call.id, None)
        if running is not None:
            running.cancel()

    def cancel(self, call: NativeCall, error: ParrotError) -> None:
        """Stop the call, and fail its unsettled outputs."""
        self.stop(call)
        _fail(call, error, CompletionState.CANCELLED)

    async def close(self) -> None:
        await self._tasks.close()
        await self._sandbox.close()

    def _end_wait(self, call: NativeCall) -> None:
        if call.id in self._waiting:
            self._waiting.remove(call.id)
            self.waiting_by_tenant.leave(call.options.tenant)

    def _forget(self, call_id: int, done: asyncio.Task[None]) -> None:
        if self._running.get(call_id) is done:
            del self._running[call_id]

    async def _run(self, call: NativeCall) -> None:
        try:
            async with self._slots.slot(call.session_id):
                self._end_wait(call)
                call.state = CompletionState.RUNNING
                call.times.started = self._clock.now()
                values = await self._evaluate(call)
            texts = [
                _checked(call, name, value)
                for (name, _), value in zip(call.results, values, strict=True)
            ]
        except ParrotError as error:
            _fail(call, error)
        except Exception:
            logger.exception("native function %s failed", call.func_name)
            _fail(call, InternalError("internal error"))
        else:
            call.state = CompletionState.DONE
            for (_, variable), text in zip(call.results, texts, strict=True):
                if not variable.is_settled:  # A run before a restart may have set it.
                    variable.set(text)

    async def _evaluate(self, call: NativeCall) -> Sequence[object]:
        """The sandbox's values. The run time counts for the session's quota. Raises
        `QuotaExceeded` if it is used up."""
        session = self._sessions.find_owner(call.session_id)
        if session is not None:
            session.account.require(native_ms=1)
        began = self._clock.now()
        try:
            return await self._sandbox.evaluate(call)
        finally:
            if session is not None:
                session.account.add(native_ms=int(1000 * (self._clock.now() - began)))


class MontySandbox:
    """A pool of sandbox processes, started with the first call. A crashed process is replaced."""

    def __init__(self, config: CoreConfig) -> None:
        self._num_workers = config.native_workers
        self._max_memory = config.native_memory_mb * 2**20
        self._opening = asyncio.Lock()
        self._pool: AsyncMonty | None = None
        self._exit = AsyncExitStack()

    async def evaluate(self, call: NativeCall) -> Sequence[object]:
        pool = await self._open_pool()
        checkout = pool.checkout(
            script_name=f"{call.func_name}.py",
            limits={
                "max_feed_duration_secs": call.timeout_s,
                "max_total_sleep_secs": call.timeout_s,
                "max_memory": self._max_memory,
            },
        )
        try:
            async with checkout as sandbox:
                values: list[object] = await sandbox.feed_run(
                    script_of(call), inputs=inputs_of(call), print_callback=drop_output
                )
        except MontyError as error:
            raise NativeFunctionFailed(explain(call, error)) from None
        return values

    async def close(self) -> None:
        await self._exit.aclose()

    async def _open_pool(self) -> AsyncMonty:
        async with self._opening:
            if self._pool is None:
                self._pool = await self._exit.enter_async_context(
                    AsyncMonty(max_processes=self._num_workers)
                )
            return self._pool


def check_call(request: NativeCallRequest, max_timeout_s: float) -> None:
    """Check that the names are Python names, that the timeout is allowed, and that no output has a
    sampling config. Raises `InvalidRequest`."""
    if request.timeout > max_timeout_s:
        raise InvalidRequest(
            f"the timeout of a native function is at most {max_timeout_s:g} s (`native_timeout`)",
            param="timeout",
        )
    for parameter in request.parameters:
        if parameter.sampling_config not in (None, _NO_SAMPLING):
            raise InvalidRequest(
                f"output `{parameter.name}` of a native function cannot have a sampling config",
                param="sampling_config",
            )
    for name in (request.func_name, *(parameter.name for parameter in request.parameters)):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidRequest(f"`{name}` is not a Python name", param=name)


def inputs_of(call: NativeCall) -> dict[str, str]:
    return {f"_in_{n}": variable.text for n, (_, variable) in enumerate(call.arguments)}


def script_of(call: NativeCall) -> str:
    """The script: prelude, function, one call of it. Its value is the list of outputs."""
    arguments = [f"{name}=_in_{n}" for n, (name, _) in enumerate(call.arguments)]
    arguments += [f"{name}=_out_{n}" for n, (name, _) in enumerate(call.results)]
    outputs = "".join(f"_out_{n} = _Output({name!r})\n" for n, (name, _) in enumerate(call.results))
    values = ", ".join(f"_out_{n}.get()" for n in range(len(call.results)))
    source = dedent(call.source)
    return f"{_PRELUDE}{source}\n{outputs}{call.func_name}({', '.join(arguments)})\n[{values}]\n"


def _checked(call: NativeCall, name: str, value: object) -> str:
    if not isinstance(value, str):
        text = f"`{call.func_name}` did not set its output `{name}`"
        raise NativeFunctionFailed(text, param=name)
    if len(value) > MAX_TEXT:
        text = (
            f"`{call.func_name}` set `{name}` to {len(value)} characters; the limit is {MAX_TEXT}"
        )
        raise NativeFunctionFailed(text, param=name)
    return value


def explain(call: NativeCall, error: MontyError) -> str:
    """The error as one line, for the program's author."""
    if isinstance(error, MontyRuntimeError | MontySyntaxError):
        reason = error.display(format="type-msg")
    else:
        reason = f"the sandbox ended, probably at its time or memory limit ({error})"
    return f"native function `{call.func_name}` failed: {reason[:_MAX_MESSAGE]}"


def _fail(
    call: NativeCall, error: ParrotError, state: CompletionState = CompletionState.FAILED
) -> None:
    call.state = state
    for _, variable in call.results:
        if not variable.is_settled:
            variable.fail(error)


def drop_output(stream: str, text: str) -> None:
    """Drop the output of `print`: it belongs to the program, not into the server's log."""
