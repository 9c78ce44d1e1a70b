"""Sessions as traces: each is one span, and its tasks that were wanted are the spans below it.

    invoke_workflow essay                       the session
        text_completion write                   a completion, linked to those whose output it takes
        execute_tool join                       a native function

Calls that came with a trace of their own, as those of vendors' clients do, are below their caller's
span instead.

What a span says is told as plain facts when the session has ended, and the process that sends the
spans makes them of these. Their ids follow from those of the trace and of the tasks, so engines can
be told of a completion's span before there is one."""

import time
from collections.abc import Iterator, Mapping

from parrot.observe.spans import CompletionFacts, SessionFacts, TaskFacts
from parrot.serve.events import SessionBegan, SessionEnded, Sink
from parrot.serve.graph.graph import Call
from parrot.serve.graph.nodes import Completion, CompletionState, Task
from parrot.serve.metrics import app_of
from parrot.serve.sessions import Session
from parrot.utils.clock import Clock
from parrot.utils.span_export import SpanExport
from parrot.utils.traceparent import TraceParent


class Tracer:
    """Exports the spans of sessions. Nothing of prompts and values is in them."""

    def __init__(self, export: SpanExport, clock: Clock) -> None:
        self._export = export
        self._clock = clock
        self._epoch = time.time() - clock.now()
        self._parents: dict[int, TraceParent] = {}  # the callers' spans, by session

    @property
    def sink(self) -> Sink:
        return {SessionBegan: self._session_began, SessionEnded: self._session_ended}

    def _session_began(self, event: SessionBegan) -> None:
        session = event.session
        spans, parent = session.graph.spans, TraceParent.parse(event.traceparent)
        if spans is not None and spans.trace_id and parent is not None:
            self._parents[session.id] = parent

    def _session_ended(self, event: SessionEnded) -> None:
        session = event.session
        parent = self._parents.pop(session.id, None)
        spans = session.graph.spans
        if spans is not None and (spans.trace_id or spans.is_joined):
            ended = self._clock.now()
            calls = list(session.graph.calls.values())  # which the graph has no longer
            self._export.send(
                lambda: list(self._facts(session, spans.trace_id, calls, parent, ended))
            )

    def _facts(
        self,
        session: Session,
        trace_id: str,
        calls: list[Call],
        parent: TraceParent | None,
        ended: float,
    ) -> Iterator[SessionFacts | TaskFacts]:
        """Takes the calls away one by one, as it frees what nobody else has any more."""
        yield SessionFacts(
            trace_id,
            session.id,
            app_of(session),
            session.tenant,
            parent,
            session.created_at,
            ended,
            self._epoch,
        )
        makers = {
            output.id: (task.id, task.options.traceparent)
            for call in calls
            for task in call.tasks
            for output in task.outputs
        }
        calls.reverse()
        while calls:
            for task in calls.pop().tasks:
                if task.times.activated is not None:
                    yield _task_facts(task, task.times.activated, makers)


def _task_facts(task: Task, activated: float, makers: Mapping[str, tuple[int, str]]) -> TaskFacts:
    """`makers`: of each variable that a call makes, by its id."""
    times = task.times
    error = task.outputs[0].error if task.state is CompletionState.FAILED else None
    return TaskFacts(
        task.id,
        task.request_id,
        task.func_name,
        task.options.traceparent,
        list(dict.fromkeys(makers[v.id] for v in task.inputs if v.id in makers)),
        task.state,
        None if error is None else error.type,
        activated,
        times.ready,
        times.started,
        times.finished,
        _completion_facts(task) if isinstance(task, Completion) else None,
    )


def _completion_facts(task: Completion) -> CompletionFacts:
    stats, options, objective = task.stats, task.options, task.objective
    return CompletionFacts(
        options.chat,
        options.models[0] if options.models else None,
        stats.model,
        stats.engine_name,
        stats.cached_tokens,
        stats.computed_tokens,
        stats.recomputed_tokens,
        stats.output_tokens,
        stats.finish_reason,
        stats.attempts,
        stats.is_reused,
        None if stats.is_reused else stats.decode_s,
        None if objective is None else objective.criteria,
    )
