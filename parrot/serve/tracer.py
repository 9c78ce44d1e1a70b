"""Sessions as traces: each is one span, and its tasks that were wanted are the spans below it.

    invoke_workflow essay                       the session
        text_completion write                   a completion, linked to those whose output it takes
        execute_tool join                       a native function

Calls that came with a trace of their own, as those of vendors' clients do, are below their caller's
span instead.

Spans are made when a session has ended, from what its graph knows then. Their ids follow from those
of the trace and of the tasks, so engines can be told of a completion's span before there is one."""

import time
from collections.abc import Iterator

from parrot.protocol.public import SessionCreateRequest
from parrot.serve.graph.nodes import Completion, CompletionState, Task, task_span
from parrot.serve.observers import Observer
from parrot.serve.sessions import Session
from parrot.serve.telemetry.metrics import app_of
from parrot.utils.clock import Clock
from parrot.utils.traces.export import SpanExport
from parrot.utils.traces.record import SpanRecord, Value
from parrot.utils.traces.traceparent import TraceParent, span_id_of


class Tracer(Observer):
    """Exports the spans of sessions. Nothing of prompts and values is in them."""

    def __init__(self, export: SpanExport, clock: Clock) -> None:
        self._export = export
        self._clock = clock
        self._epoch = time.time() - clock.now()
        self._parents: dict[int, TraceParent] = {}  # the callers' spans, by session

    def session_created(self, session: Session, request: SessionCreateRequest) -> None:
        if session.graph.trace_id and (parent := TraceParent.parse(request.traceparent)):
            self._parents[session.id] = parent

    def session_ended(self, session: Session) -> None:
        parent = self._parents.pop(session.id, None)
        if session.graph.trace_id:
            ended = self._clock.now()
            self._export.send(lambda: self._records(session, parent, ended))

    def _records(
        self, session: Session, parent: TraceParent | None, ended: float
    ) -> Iterator[SpanRecord]:
        trace_id = session.graph.trace_id
        own = TraceParent(trace_id, span_id_of(trace_id, session.id))
        app = app_of(session)
        yield SpanRecord(
            f"invoke_workflow {app}",
            own,
            parent,
            self._epoch + session.created_at,
            self._epoch + ended,
            {
                "gen_ai.operation.name": "invoke_workflow",
                "gen_ai.workflow.name": app,
                "gen_ai.conversation.id": str(session.id),
                "gen_ai.provider.name": "parrot",
                "parrot.tenant": session.tenant,
            },
            is_server=True,
        )
        for call in session.graph.calls.values():
            for task in call.tasks:
                if task.times.activated is None:
                    continue
                span = task_span(trace_id, task)
                if span.is_sampled:
                    yield self._record(task, span, own, ended)

    def _record(
        self, task: Task, span: TraceParent, session: TraceParent, ended: float
    ) -> SpanRecord:
        times, caller = task.times, task.options.traceparent
        assert times.activated is not None
        finished = ended if times.finished is None else times.finished
        first = None
        if isinstance(task, Completion) and task.stats.decode_s is not None:
            first = finished - task.stats.decode_s if not task.stats.is_reused else None
        moments = (("ready", times.ready), ("started", times.started), ("first_token", first))
        waited = (
            ("dependency", times.activated, times.ready),
            ("queue", times.ready, times.started),
            ("prefill", times.started, first),
            ("decode", first, finished),
        )
        waits: dict[str, Value | None] = {
            f"parrot.{name}_s": end - begin
            for name, begin, end in waited
            if begin is not None and end is not None
        }
        is_bad = task.state is CompletionState.FAILED
        error = task.outputs[0].error
        makers = dict.fromkeys(v.producer for v in task.inputs if v.producer is not None)
        return SpanRecord(
            f"{_operation(task)} {task.func_name}",
            span,
            session if caller is None else TraceParent.parse(caller) or session,
            self._epoch + times.activated,
            self._epoch + max(finished, times.activated),
            _facts(task) | waits,
            events=[(name, None if at is None else self._epoch + at) for name, at in moments],
            links=[task_span(session.trace_id, maker) for maker in makers],
            error=error.type if is_bad and error is not None else None,
        )


def _operation(task: Task) -> str:
    if not isinstance(task, Completion):
        return "execute_tool"
    return "chat" if task.options.chat else "text_completion"


def _facts(task: Task) -> dict[str, Value | None]:
    common: dict[str, Value | None] = {
        "gen_ai.operation.name": _operation(task),
        "gen_ai.conversation.id": str(task.session_id),
        "gen_ai.provider.name": "parrot",
        "parrot.function": task.func_name,
        "parrot.request_id": task.request_id,
        "parrot.task_id": task.id,
        "parrot.state": task.state.value,
    }
    if not isinstance(task, Completion):
        return common | {"gen_ai.tool.name": task.func_name, "gen_ai.tool.type": "function"}
    stats, objective = task.stats, task.objective
    return common | {
        "gen_ai.request.model": task.options.models[0] if task.options.models else None,
        "gen_ai.response.model": stats.model,
        "gen_ai.usage.input_tokens": stats.cached_tokens + stats.computed_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
        "gen_ai.usage.output_tokens": stats.output_tokens,
        "gen_ai.response.finish_reasons": (
            None if stats.finish_reason is None else [stats.finish_reason.value]
        ),
        "parrot.engine": stats.engine_name,
        "parrot.attempts": stats.attempts,
        "parrot.reused": stats.is_reused,
        "parrot.recomputed_tokens": stats.recomputed_tokens,
        "parrot.criteria": None if objective is None else objective.criteria.value,
    }
