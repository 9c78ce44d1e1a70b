"""The page's rows: the service, one session, one variable, placement, usage,
and events.

A row is small and contains no value that changes by itself, such as an age. So a row is sent again
only after an event."""

from collections.abc import Container, Iterator
from dataclasses import asdict
from itertools import islice

from parrot.gateway.page.event_log import EventLog, event_rows
from parrot.gateway.page.feed import Rows
from parrot.gateway.page.placement import placement_rows
from parrot.gateway.page.privacy import hidden, without_texts
from parrot.gateway.page.runs import (
    Row,
    RowContext,
    first_words,
    head_row,
    last_tasks,
    sum_row,
    was_stopped,
    words_row,
)
from parrot.gateway.page.visitors import Visitor
from parrot.protocol.engine_api import ServerLoad
from parrot.protocol.errors import ParrotError
from parrot.serve.core import ServeCore
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
from parrot.serve.sessions import Session
from parrot.serve.views import engine_view, task_fields

_PIECE_CHARS = 4096  # Characters of a value in one row. Only changed rows are sent again.
MAX_CHARS = 2**20  # Characters of one value that are shown.
_MAX_HEAD = 60  # Characters of a value that are shown with its variable.
_MAX_CAUSES = 16  # Errors of one causal chain that are shown.
_SHARE_STEPS = 20  # A used share of a limit is rounded to 0.05.
_MAX_VARIABLES = 4096  # The last variables of a session are shown.
# The fields of an engine that tenants see. Its address and its load are the operator's.
_TENANTS_FIELDS = ("engine_id", "engine_name", "engine_type", "model", "default_sampling")


def usage_rows(core: ServeCore, visitor: Visitor) -> Rows:
    """Calls, tokens and costs by function: the visitor's own, or all tenants' for the operator. For
    each tenant with limits, the used share of its most used one."""
    rows: dict[str, Row] = {}
    meters = core.tasks.meters
    for owner in core.tenants:
        if owner.limits.has_any and visitor.tenant in (None, owner.id):
            shares = [core.sessions.used_share(owner.id)]
            shares += [] if meters is None else [meters.used_share(owner)]
            name = core.tenants.name_of(owner.id)
            rows[f"limit:{name}"] = {"tenant": name, "limit_share": _rounded_share(max(shares))}
    for tenant, function, usage in core.accounts:
        if visitor.tenant in (None, tenant):
            name = core.tenants.name_of(tenant)
            rows[f"usage:{name}:{function}"] = {
                "tenant": name,
                "function": function,
                **asdict(usage),
            }
    return rows


def _rounded_share(share: float) -> float:
    """Rounded, because budgets of tokens refill all the time, and each change is sent."""
    return round(_SHARE_STEPS * share) / _SHARE_STEPS


class PageRows:
    """Reads the rows from a core. Times are Unix time."""

    def __init__(
        self, core: ServeCore, context: RowContext | None = None, kept: Container[int] = ()
    ) -> None:
        """`context`: None for a new one. `kept`: the ids of finished runs that have a view."""
        self._core = core
        self._kept = kept
        self._log = EventLog(core.clock)
        core.events.add(self._log.sink)
        self._context = context or RowContext.of(core)
        self._sessions: dict[int, tuple[object, Row]] = {}  # inputs of the cached row, and the row

    def overview(self, visitor: Visitor) -> Rows:
        """The service, its engines, and the sessions that the visitor may see. A tenant sees its
        own queued calls, and neither addresses nor loads of engines."""
        core, tenant = self._core, visitor.tenant
        queued = core.num_queued
        if tenant is not None:
            queued = core.dispatcher.queued_by_tenant()[tenant]
        rows: dict[str, Row] = {
            "service": {
                "queued": queued,
                "models": [card.id for card in core.models().data],
                "closing": core.is_closing,
                "max_runs": core.config.history.max_runs,
                "max_age_s": core.config.history.max_age,
            }
        }
        for engine in core.fleet.views():
            row = _engine_row(engine) if tenant is None else _tenants_engine_row(engine)
            rows[f"engine:{engine.id}"] = row
        live = list(core.sessions)
        for session in live:
            if visitor.tenant in (None, session.tenant):
                row = self._session_row(session)
                rows[f"session:{session.id}"] = row if visitor.sees_values else dict(hidden(row))
        if len(self._sessions) > 2 * len(live):
            kept = {session.id for session in live}
            self._sessions = {key: row for key, row in self._sessions.items() if key in kept}
        return rows

    def placement(self, visitor: Visitor) -> Rows:
        """The scheduler's last decisions, and the contexts on the engines."""
        return placement_rows(self._core, visitor, self._context)

    def usage(self, visitor: Visitor) -> Rows:
        """The calls, tokens and costs of tenants, by function."""
        return usage_rows(self._core, visitor)

    def events(self, visitor: Visitor) -> Rows:
        """The events of engines, calls and sessions."""
        return event_rows(self._log, visitor, self._context.epoch, self._has_view)

    def _has_view(self, session_id: int) -> bool:
        return self._core.sessions.find(session_id) is not None or session_id in self._kept

    def session(self, session: Session, *, sees_values: bool) -> Rows:
        """A session's head, its last calls, and its last variables without values."""
        num_calls = sum(len(call.tasks) for call in session.graph.calls.values())
        live: Row = {"state": "active", "calls": num_calls}
        if session.is_program:
            live |= words_row(session, last_tasks(session))
        rows: dict[str, Row] = {"session": head_row(session, self._context) | live}
        for task in last_tasks(session):
            rows[f"call:{task.outputs[0].id}"] = call_row(task, session.created_at)
        for variable in last_variables(session):
            rows[f"var:{variable.id}"] = variable_row(variable, session.created_at)
        return rows if sees_values else without_texts(rows)

    def variable(self, session: Session, var_id: str, *, sees_values: bool) -> Rows:
        """A variable and its producer. Prompt, sampling, attempts and value are included only if
        the visitor may see values. The value is split into chunks, because it grows at its end.
        Raises `NotFound`."""
        variable = session.graph.variable(var_id)
        rows: dict[str, Row] = {"var": variable_row(variable, session.created_at)}
        task = variable.producer
        if task is not None:
            rows["call"] = {"func": task.func_name, "request_id": task.request_id}
            if sees_values:
                rows["call"] |= _source(task)
                if isinstance(task, Completion):
                    rows["call"] |= run_fields(task, session, self._context)
                    self._core.dispatcher.follow(task)
                    rows["call"]["comes_whole"] = task.stats.comes_whole
        if not sees_values:
            return without_texts(rows)
        return rows | text_rows(variable.partial_text)

    def _session_row(self, session: Session) -> Row:
        """The cached row, or a new one if the session has changed since."""
        graph = session.graph
        basis = (session.last_active, graph.activation.num_started, len(graph.calls))
        known = self._sessions.get(session.id)
        if known is not None and known[0] == basis:
            return known[1]
        row = (
            head_row(session, self._context) | {"state": "active"} | sum_row(session, self._context)
        )
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
        if runtime.last_warning:
            row |= {"warning": runtime.last_warning, "warned_at": runtime.warned_at}
        if (host := runtime.host_tier) is not None:
            row |= {"host_blocks": host.num_max_blocks, "host_free_blocks": host.num_free_blocks}
        if runtime.server_load is not None:
            row["server"] = _server_row(runtime.server_load)
    return row


def _tenants_engine_row(engine: EngineView) -> Row:
    row = engine_view(engine).model_dump(mode="json", include=set(_TENANTS_FIELDS))
    return row | {"is_draining": engine.is_draining}


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


def last_variables(session: Session) -> list[SemanticVariable]:
    """The variables that are shown, in the order of their creation."""
    return list(islice(reversed(session.graph.variables.values()), _MAX_VARIABLES))[::-1]


def call_row(task: Task, began: float) -> Row:
    """The row of a call. Its times are seconds since `began`. `first_token_s` is null until a
    streamed call has its first token, and missing if the time will not be known."""
    row = task_fields(task, began)
    if task.state is CompletionState.FAILED and was_stopped(task):
        row["state"] = CompletionState.CANCELLED.value
    row["inputs"] = [variable.id for variable in task.inputs]
    if isinstance(task, Completion) and task.stats.is_reused:
        return row | _reused_fields(task, began)
    if isinstance(task, Completion) and task.stats.is_streamed:
        row["first_token_s"] = None
    if (first := _first_token(task)) is not None:
        row["first_token_s"] = first - began
    return row


def _reused_fields(completion: Completion, began: float) -> Row:
    """The fields of a call that took the result of an identical call. No engine ran it, its whole
    prompt counts as cached, and it generated no token."""
    ready = completion.times.ready
    return {
        "reused_from": completion.stats.reused_from,
        "engine": None,
        "started_s": None if ready is None else ready - began,
        "decode_s": None,
        "cached_tokens": completion.stats.prompt_tokens,
        "output_tokens": 0,
    }


def _first_token(task: Task) -> float | None:
    """When the first token was generated, on the clock's scale. None: not yet, or not known."""
    if not isinstance(task, Completion):
        return None
    times, decode_s = task.times, task.stats.decode_s
    if times.finished is None or times.started is None or decode_s is None:
        return times.first_token
    return max(times.started, times.finished - decode_s)


def run_fields(completion: Completion, session: Session, context: RowContext) -> Row:
    """How the completion ran: its sampling fields that differ from the defaults, and its
    attempts."""
    return {
        "sampling": completion.sampling.model_dump(mode="json", exclude_defaults=True),
        "attempts": context.attempts.rows(completion, session.created_at),
    }


def text_rows(text: str) -> dict[str, Row]:
    """A value in chunks. It grows at its end, so only the last chunk is sent again."""
    text = text[:MAX_CHARS]
    return {
        f"text:{number}": {"text": text[start : start + _PIECE_CHARS]}
        for number, start in enumerate(range(0, len(text), _PIECE_CHARS))
    }


def variable_row(variable: SemanticVariable, began: float) -> Row:
    """The row of a variable. `set_s`: when the program set it, in seconds since `began`."""
    producer = variable.producer
    row: Row = {
        "name": variable.name,
        "state": variable.state.value,
        "chars": len(variable.partial_text),
        "producer": None if producer is None else producer.outputs[0].id,
        "set_s": None if variable.set_at is None else max(0.0, variable.set_at - began),
    }
    if head := first_words([variable.partial_text[: 2 * _MAX_HEAD]], _MAX_HEAD):
        row["head"] = head
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
