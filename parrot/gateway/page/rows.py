"""The page's rows: the service, one session, one variable, placement decisions and contexts, usage,
and the event log.

A row is small and contains no value that changes by itself, such as an age. So a row is sent again
only after an event."""

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict
from heapq import nlargest
from itertools import chain, islice
from typing import Any, NamedTuple

from parrot.gateway.page.feed import Rows
from parrot.gateway.page.visitors import Visitor
from parrot.protocol.engine_api import ServerLoad
from parrot.protocol.errors import Cancelled, ParrotError
from parrot.serve.contexts.index import LedgerContext
from parrot.serve.core import ServeCore
from parrot.serve.events import (
    CompletionRetried,
    EngineDrained,
    EngineJoined,
    EngineLost,
    SessionExpired,
    Sink,
)
from parrot.serve.execution.fleet import EngineView
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    Piece,
    SemanticVariable,
    Task,
    TextPiece,
    VariablePiece,
)
from parrot.serve.scheduling.task import Decision
from parrot.serve.sessions import Session
from parrot.serve.views import count_fields, engine_view, task_fields
from parrot.utils.clock import Clock

_MAX_CONTEXTS = 512  # The largest contexts are shown, with their ancestors.
_PIECE_CHARS = 4096  # Characters of a value in one row. Only changed rows are sent again.
MAX_CHARS = 2**20  # Characters of one value that are shown.
_MAX_CAUSES = 16  # Errors of one causal chain that are shown.
_MAX_EVENTS = 256  # Events that the log keeps.
_MAX_EVENT_CHARS = 400  # Characters of one event's text.
_MAX_CALLS, _MAX_VARIABLES = 1024, 4096  # The last ones of a session are shown.
_MAX_NAMED_CALLS, _MAX_NAMES = 64, 3  # A session without an application has these functions' names.
Row = dict[str, Any]
HasView = Callable[[int], bool]
"""Whether a session with this id is live or kept."""


def placement_rows(core: ServeCore, visitor: Visitor, epoch: float) -> Rows:
    """Decisions and contexts of the visitor's sessions. `epoch`: the clock's zero as Unix time."""
    rows: dict[str, Row] = {}
    names = {engine.id: engine.info.engine_name for engine in core.fleet}
    tenants = {session.id: session.tenant for session in core.sessions}
    for decision in core.dispatcher.decisions:
        if visitor.tenant in (None, tenants.get(decision.session_id)):
            key = f"decision:{decision.session_id}:{decision.request_id}:{decision.at}"
            rows[key] = _decision_row(decision, names, epoch)

    def tenant_of(context: LedgerContext) -> str | None:
        owner = context.owner
        return owner if isinstance(owner, str) else tenants.get(owner)

    seen = [c for c in core.dispatcher.contexts() if visitor.tenant in (None, tenant_of(c))]
    for context in nlargest(_MAX_CONTEXTS, seen, key=_own_tokens):
        for link in context.lineage():
            rows[f"context:{link.id}"] = _context_row(link, names)
    return rows


def _own_tokens(context: LedgerContext) -> int:
    return context.length - context.parent_len


def _decision_row(decision: Decision, names: Mapping[int, str], epoch: float) -> Row:
    costs = decision.costs or {}
    return {
        "at": round(epoch + decision.at, 3),
        "session": decision.session_id,
        "func": decision.func_name,
        "engine": _name(decision.engine_id, names),
        "prompt_tokens": decision.prompt_tokens,
        "to_compute": decision.to_compute,
        "waited_s": decision.waited_s,
        "compared": [
            {"engine": _name(engine_id, names), "seconds": seconds}
            for engine_id, seconds in costs.items()
        ],
    }


def _context_row(context: LedgerContext, names: Mapping[int, str]) -> Row:
    return {
        "engine": _name(context.engine_id, names),
        "parent": None if context.parent is None else context.parent.id,
        "own_tokens": _own_tokens(context),
        "tokens": context.length,
        "forks": context.num_forks,
        "in_use": context.pins > 0,
        "owner": str(context.owner),
        "is_shared": isinstance(context.owner, str),
    }


def _name(engine_id: int, names: Mapping[int, str]) -> str:
    return names.get(engine_id, f"lost engine {engine_id}")


class LoggedEvent(NamedTuple):
    """An event that may interest an operator."""

    number: int
    at: float  # on the clock's scale
    kind: str
    text: str
    engine_name: str = ""
    session_id: int | None = None
    var_id: str = ""  # the output of the call
    tenant: str | None = None  # None: visible to all tenants


class EventLog:
    """Keeps the last events of engines, calls and sessions, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[LoggedEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self._events)

    @property
    def sink(self) -> Sink:
        return {
            EngineJoined: self._engine_joined,
            EngineLost: self._engine_lost,
            EngineDrained: self._engine_drained,
            CompletionRetried: self._retried,
            SessionExpired: self._expired,
        }

    def _note(self, kind: str, text: str, engine_name: str = "", **about: Any) -> None:
        self._num_events += 1
        known = (self._num_events, self._clock.now(), kind, text[:_MAX_EVENT_CHARS], engine_name)
        self._events.append(LoggedEvent(*known, **about))

    def _engine_joined(self, event: EngineJoined) -> None:
        self._note("engine joined", event.info.model, event.info.engine_name)

    def _engine_lost(self, event: EngineLost) -> None:
        self._note("engine lost", event.why, event.info.engine_name)

    def _engine_drained(self, event: EngineDrained) -> None:
        kind = "engine drains" if event.is_draining else "engine resumed"
        text = f"{event.num_calls} {'call' if event.num_calls == 1 else 'calls'} there"
        self._note(kind, text, event.info.engine_name)

    def _retried(self, event: CompletionRetried) -> None:
        completion = event.completion
        self._note(
            "call retried",
            f"{completion.func_name}: {event.why}",
            completion.stats.engine_name or "",
            session_id=completion.session_id,
            var_id=completion.output.id,
            tenant=completion.options.tenant,
        )

    def _expired(self, event: SessionExpired) -> None:
        session = event.session
        self._note("session expired", event.why, session_id=session.id, tenant=session.tenant)


def usage_rows(core: ServeCore, visitor: Visitor) -> Rows:
    """Calls, tokens and costs by function: the visitor's own, or all tenants' for the operator."""
    rows: dict[str, Row] = {}
    for tenant, function, usage in core.accounts:
        if visitor.tenant in (None, tenant):
            row = {"tenant": tenant, "function": function, **asdict(usage)}
            rows[f"usage:{tenant}:{function}"] = row
    return rows


def event_rows(log: EventLog, visitor: Visitor, epoch: float, has_view: HasView) -> Rows:
    """Events of engines and of the visitor's sessions. `epoch`: the clock's zero as Unix time."""
    rows: dict[str, Row] = {}
    for event in log:
        if event.tenant is not None and visitor.tenant not in (None, event.tenant):
            continue
        rows[f"event:{event.number}"] = {
            "at": round(epoch + event.at, 3),
            "kind": event.kind,
            "text": event.text,
            "engine": event.engine_name,
            "session": event.session_id,
            "var": event.var_id,
            "has_view": event.session_id is not None and has_view(event.session_id),
        }
    return rows


class PageRows:
    """Reads the rows from a core. Times are Unix time."""

    def __init__(self, core: ServeCore, kept: Container[int] = ()) -> None:
        """`kept`: the ids of finished runs that have a view."""
        self._core = core
        self._kept = kept
        self._log = EventLog(core.clock)
        core.events.add(self._log.sink)
        self._epoch = time.time() - core.clock.now()
        self._sessions: dict[int, tuple[object, Row]] = {}  # inputs of the cached row, and the row

    def overview(self, visitor: Visitor) -> Rows:
        """The service, its engines, and the sessions that the visitor may see."""
        core = self._core
        rows: dict[str, Row] = {
            "service": {
                "queued": core.num_queued,
                "models": [card.id for card in core.models().data],
                "closing": core.is_closing,
            }
        }
        for engine in core.fleet.views():
            rows[f"engine:{engine.id}"] = _engine_row(engine)
        live = list(core.sessions)
        for session in live:
            if visitor.tenant in (None, session.tenant):
                rows[f"session:{session.id}"] = self._session_row(session)
        if len(self._sessions) > 2 * len(live):
            kept = {session.id for session in live}
            self._sessions = {key: row for key, row in self._sessions.items() if key in kept}
        return rows

    def placement(self, visitor: Visitor) -> Rows:
        """The scheduler's last decisions, and the contexts on the engines."""
        return placement_rows(self._core, visitor, self._epoch)

    def usage(self, visitor: Visitor) -> Rows:
        """The calls, tokens and costs of tenants, by function."""
        return usage_rows(self._core, visitor)

    def events(self, visitor: Visitor) -> Rows:
        """The events of engines, calls and sessions."""
        return event_rows(self._log, visitor, self._epoch, self._has_view)

    def _has_view(self, session_id: int) -> bool:
        return self._core.sessions.find(session_id) is not None or session_id in self._kept

    def session(self, session: Session) -> Rows:
        """A session's head, its last calls, and its last variables without values."""
        rows: dict[str, Row] = {"session": head_row(session, self._epoch) | {"state": "active"}}
        for task in last_tasks(session):
            rows[f"call:{task.outputs[0].id}"] = call_row(task, session.created_at)
        for variable in last_variables(session):
            rows[f"var:{variable.id}"] = variable_row(variable)
        return rows

    def variable(self, variable: SemanticVariable, visitor: Visitor) -> Rows:
        """A variable and its producer. Prompt and value are included only if the visitor may see
        them. The value is split into chunks, because it grows at its end."""
        rows: dict[str, Row] = {"var": variable_row(variable)}
        task = variable.producer
        if task is not None:
            rows["call"] = {"func": task.func_name, "request_id": task.request_id}
            if visitor.sees_values:
                rows["call"] |= _source(task)
                if isinstance(task, Completion):
                    self._core.dispatcher.follow(task)
                    rows["call"]["comes_whole"] = task.stats.comes_whole
        if visitor.sees_values:
            rows |= text_rows(variable.partial_text)
        return rows

    def _session_row(self, session: Session) -> Row:
        """The cached row, or a new one if the session has changed since."""
        graph = session.graph
        basis = (session.last_active, graph.activation.num_started, len(graph.calls))
        known = self._sessions.get(session.id)
        if known is not None and known[0] == basis:
            return known[1]
        row = head_row(session, self._epoch) | {"state": "active"} | count_row(session)
        self._sessions[session.id] = basis, row
        return row


def _engine_row(engine: EngineView) -> Row:
    row: Row = engine_view(engine).model_dump(mode="json") | {"is_draining": engine.is_draining}
    runtime = engine.runtime
    if runtime is not None:
        row |= {
            "blocks": runtime.num_max_blocks,
            "free_blocks": runtime.num_free_blocks,
            "running_jobs": runtime.num_running_jobs,
            "step_ms": round(runtime.recent_average_latency / 1e6, 3),
            "steps": runtime.num_steps,
        }
        if (host := runtime.host_tier) is not None:
            row |= {"host_blocks": host.num_max_blocks, "host_free_blocks": host.num_free_blocks}
        if runtime.server_load is not None:
            row["server"] = _server_row(runtime.server_load)
    return row


def _server_row(load: ServerLoad) -> Row:
    """The load of the server behind an engine. `others_kv` estimates the KV share of other clients
    from their share of the requests."""
    row: Row = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "others": load.num_others,
    }
    if load.kv_usage is not None:
        others = load.num_others / max(1, load.num_running + load.num_waiting)
        row |= {"kv": round(load.kv_usage, 2), "others_kv": round(others * load.kv_usage, 2)}
    return row


def head_row(session: Session, epoch: float) -> Row:
    """The facts of a session that do not change. `epoch`: the clock's zero as Unix time."""
    return {
        "id": session.id,
        "tenant": session.tenant,
        "apps": list(session.apps),
        "kind": "conversation" if session.is_program else "program",
        "created_at": round(epoch + session.created_at, 3),
    }


def count_row(session: Session) -> Row:
    """The session's sums, and the names of its first functions. A call that failed because another
    one was cancelled is cancelled."""
    counts = count_fields(session)
    first = chain.from_iterable(call.tasks for call in session.graph.calls.values())
    names = dict.fromkeys(task.func_name for task in islice(first, _MAX_NAMED_CALLS))
    counts["functions"] = list(islice(filter(None, names), _MAX_NAMES))
    if counts["failed"]:
        tasks = chain.from_iterable(call.tasks for call in session.graph.calls.values())
        stopped = sum(task.state is CompletionState.FAILED and was_stopped(task) for task in tasks)
        counts["failed"] -= stopped
        counts["cancelled"] += stopped
    return counts


def last_tasks(session: Session) -> list[Task]:
    """The tasks that are shown, in the order of their submission."""
    calls = reversed(session.graph.calls.values())
    tasks = chain.from_iterable(reversed(call.tasks) for call in calls)
    return list(islice(tasks, _MAX_CALLS))[::-1]


def last_variables(session: Session) -> list[SemanticVariable]:
    """The variables that are shown, in the order of their creation."""
    return list(islice(reversed(session.graph.variables.values()), _MAX_VARIABLES))[::-1]


def was_stopped(task: Task) -> bool:
    """Whether the task, or a task that it needs, was cancelled. This is no failure."""
    return isinstance(task.outputs[0].error, Cancelled)


def call_row(task: Task, began: float) -> Row:
    """The row of a call. Its times are seconds since `began`."""
    row = task_fields(task, began)
    if task.state is CompletionState.FAILED and was_stopped(task):
        row["state"] = CompletionState.CANCELLED.value
    row["inputs"] = [variable.id for variable in task.inputs]
    return row


def text_rows(text: str) -> dict[str, Row]:
    """A value in chunks. It grows at its end, so only the last chunk is sent again."""
    text = text[:MAX_CHARS]
    return {
        f"text:{number}": {"text": text[start : start + _PIECE_CHARS]}
        for number, start in enumerate(range(0, len(text), _PIECE_CHARS))
    }


def variable_row(variable: SemanticVariable) -> Row:
    producer = variable.producer
    row: Row = {
        "name": variable.name,
        "state": variable.state.value,
        "chars": len(variable.partial_text),
        "producer": None if producer is None else producer.outputs[0].id,
    }
    if variable.error is not None:
        row["errors"] = list(_causes(variable.error))
    return row


def _causes(error: BaseException) -> Iterator[Row]:
    """The error and its causes, the root cause last."""
    link: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if not isinstance(link, ParrotError):
            return
        yield {"type": link.type, "message": link.message}
        link = link.__cause__


def _source(task: Task) -> Row:
    """A call's prompt, or its program, and its inputs."""
    if isinstance(task, Completion):
        earlier = [] if task.previous is None else [{"var": task.previous.output.id}]
        return {"prompt": earlier + [_piece(piece) for piece in task.fill]}
    return {"source": task.source}


def _piece(piece: Piece) -> Row:
    if isinstance(piece, VariablePiece):
        return {"var": piece.variable.id, "name": piece.variable.name}
    assert isinstance(piece, TextPiece), piece
    return {"text": piece.text[:MAX_CHARS]}
