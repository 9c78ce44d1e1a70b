"""Sessions as traces. A session is one span, and its activated tasks are the spans below it.

    invoke_workflow essay                       the session
        text_completion write                   a completion, linked to the producers of its inputs
        execute_tool join                       a native function

A call with a caller's span is below that span instead. Clients of OpenAI's and Anthropic's APIs can
send one.

Span ids are computed from the ids of the trace and the task (`SessionSpans`). So an engine receives
the id of a completion's span before the span is finished."""

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from parrot.serve.events import SessionBegan, SessionEnded, Sink
from parrot.serve.graph.graph import Call
from parrot.serve.graph.nodes import Completion, CompletionState, Task
from parrot.serve.metrics import app_of
from parrot.serve.sessions import Session
from parrot.utils.clock import Clock
from parrot.utils.spans import SpanExport, Value
from parrot.utils.traceparent import SessionSpans, TraceParent

logger = logging.getLogger(__name__)


class Tracer:
    """Exports the spans of each ended session. The spans contain no prompts and values."""

    def __init__(self, export: SpanExport, clock: Clock) -> None:
        self._export = export
        self._clock = clock
        self._epoch = time.time() - clock.now()
        self._parents: dict[int, TraceParent] = {}  # The spans of callers, by session.
        # Creating a span takes about 20 us. 10,000 spans would block the event loop for 200 ms.
        self._maker = ThreadPoolExecutor(1, "spans")

    @property
    def sink(self) -> Sink:
        return {SessionBegan: self._session_began, SessionEnded: self._session_ended}

    def close(self) -> None:
        """Export the last spans, for at most 5 s."""
        self._maker.shutdown()
        self._export.close()

    def _session_began(self, event: SessionBegan) -> None:
        session = event.session
        spans, parent = session.graph.spans, TraceParent.parse(event.traceparent)
        if spans is not None and spans.trace_id and parent is not None:
            self._parents[session.id] = parent

    def _session_ended(self, event: SessionEnded) -> None:
        session = event.session
        parent = self._parents.pop(session.id, None)
        spans = session.graph.spans
        if spans is None or not (spans.trace_id or spans.is_joined):
            return
        # The graph drops its calls after this event.
        calls = list(session.graph.calls.values())
        ended = _Ended(session, spans, parent, self._epoch, self._clock.now())
        self._maker.submit(self._send, ended, calls)

    def _send(self, ended: "_Ended", calls: list[Call]) -> None:
        try:
            if ended.spans.trace_id:
                ended.send(self._export)
            tasks = [task for call in calls for task in call.tasks]
            makers = {output.id: task for task in tasks for output in task.outputs}
            for task in tasks:
                if task.times.activated is not None:
                    ended.send_task(self._export, task, task.times.activated, makers)
        except Exception:  # The executor would store the error in a future that is never read.
            logger.exception("the spans of session %d could not be made", ended.session.id)


class _Ended(NamedTuple):
    """A session that has ended. `epoch`: the Unix time of the clock's zero, in seconds."""

    session: Session
    spans: SessionSpans
    parent: TraceParent | None
    epoch: float
    at: float

    def send(self, export: SpanExport) -> None:
        session, app = self.session, app_of(self.session)
        attributes = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": app,
            "gen_ai.conversation.id": str(session.id),
            "gen_ai.provider.name": "parrot",
            "parrot.tenant": session.tenant,
        }
        times = (self.epoch + session.created_at, self.epoch + self.at)
        name = f"invoke_workflow {app}"
        export.send(name, self.spans.session, self.parent, times, attributes, is_server=True)

    def send_task(
        self, export: SpanExport, task: Task, activated: float, makers: Mapping[str, Task]
    ) -> None:
        """`makers`: the producer of each variable, by the variable's id."""
        caller = task.options.traceparent
        span = self.spans.task(caller, task.id)
        if span is None or not span.is_sampled:
            return
        times, operation, first = task.times, "execute_tool", None
        finished = self.at if times.finished is None else times.finished
        if isinstance(task, Completion):
            operation = "chat" if task.options.chat else "text_completion"
            first = None if task.stats.is_reused else _before(finished, task.stats.decode_s)
        moments = (("ready", times.ready), ("started", times.started), ("first_token", first))
        sources = dict.fromkeys(makers[v.id] for v in task.inputs if v.id in makers)
        links = [self.spans.task(maker.options.traceparent, maker.id) for maker in sources]
        error = task.outputs[0].error if task.state is CompletionState.FAILED else None
        export.send(
            f"{operation} {task.func_name}",
            span,
            TraceParent.parse(caller) or self.spans.session,
            (self.epoch + activated, self.epoch + max(finished, activated)),
            {
                "gen_ai.operation.name": operation,
                "gen_ai.conversation.id": str(self.session.id),
                **_attributes(task),
                **dict(_waits(task, activated, first, finished)),
            },
            events=[(name, None if at is None else self.epoch + at) for name, at in moments],
            links=[link for link in links if link is not None],
            error=None if error is None else error.type,
        )


def _before(finished: float, decode_s: float | None) -> float | None:
    return None if decode_s is None else finished - decode_s


def _attributes(task: Task) -> dict[str, Value | None]:
    found: dict[str, Value | None] = {
        "gen_ai.provider.name": "parrot",
        "parrot.function": task.func_name,
        "parrot.request_id": task.request_id,
        "parrot.task_id": task.id,
        "parrot.state": task.state,
    }
    if not isinstance(task, Completion):
        return found | {"gen_ai.tool.name": task.func_name, "gen_ai.tool.type": "function"}
    stats, models = task.stats, task.options.models
    return found | {
        "gen_ai.request.model": models[0] if models else None,
        "gen_ai.response.model": stats.model,
        "gen_ai.usage.input_tokens": stats.cached_tokens + stats.computed_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
        "gen_ai.usage.output_tokens": stats.output_tokens,
        "gen_ai.response.finish_reasons": stats.finish_reason and [stats.finish_reason],
        "parrot.engine": stats.engine_name,
        "parrot.attempts": stats.attempts,
        "parrot.reused": stats.is_reused,
        "parrot.recomputed_tokens": stats.recomputed_tokens,
        "parrot.criteria": None if task.objective is None else task.objective.criteria,
    }


def _waits(
    task: Task, activated: float, first: float | None, finished: float
) -> Iterator[tuple[str, float]]:
    """The phases of the task in seconds, if both ends are known."""

    times = task.times
    for name, begin, end in (
        ("dependency", activated, times.ready),
        ("queue", times.ready, times.started),
        ("prefill", times.started, first),
        ("decode", first, finished),
    ):
        if begin is not None and end is not None:
            yield f"parrot.{name}_s", end - begin
