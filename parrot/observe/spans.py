"""The spans of a session, of the facts that ServeCore tells when it has ended. The process that
sends them makes them: `python -m parrot.observe.spans ENDPOINT SERVICE`."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from parrot.utils.span_export import SpanRecord, Value
from parrot.utils.traceparent import SessionSpans, TraceParent


class SessionFacts(NamedTuple):
    """`trace_id`: empty if only calls that have callers of their own are traced. `epoch`: the Unix
    time of the zero of all clocks here. `caller`: the span above it."""

    trace_id: str
    id: int
    app: str
    tenant: str
    caller: Sequence[Any] | None
    created: float
    ended: float
    epoch: float


class CompletionFacts(NamedTuple):
    """`decode_s`: None if it took the result of an identical one."""

    is_chat: bool
    asked_model: str | None
    model: str | None
    engine: str | None
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    finish_reason: str | None
    attempts: int
    is_reused: bool
    decode_s: float | None
    criteria: str | None

    @property
    def attributes(self) -> dict[str, Value | None]:
        return {
            "gen_ai.request.model": self.asked_model,
            "gen_ai.response.model": self.model,
            "gen_ai.usage.input_tokens": self.cached_tokens + self.computed_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.response.finish_reasons": self.finish_reason and [self.finish_reason],
            "parrot.engine": self.engine,
            "parrot.attempts": self.attempts,
            "parrot.reused": self.is_reused,
            "parrot.recomputed_tokens": self.recomputed_tokens,
            "parrot.criteria": self.criteria,
        }


class TaskFacts(NamedTuple):
    """A task that was wanted. `caller`: the span of who asked for it, else empty; `makers`: the ids
    and callers of the tasks whose outputs it takes; `completion`: None if it is a native call."""

    id: int
    request_id: int
    function: str
    caller: str
    makers: Sequence[tuple[int, str]]
    state: str
    error: str | None
    activated: float
    ready: float | None
    started: float | None
    finished: float | None
    completion: Sequence[Any] | None

    def record(self, session: SessionFacts, spans: SessionSpans) -> SpanRecord | None:
        """None if it is not sampled."""
        span = spans.task(self.caller, self.id)
        if span is None or not span.is_sampled:
            return None
        one = None if self.completion is None else CompletionFacts(*self.completion)
        operation = "execute_tool"
        if one is not None:
            operation = "chat" if one.is_chat else "text_completion"
        finished = session.ended if self.finished is None else self.finished
        first = None if one is None or one.decode_s is None else finished - one.decode_s
        moments = (("ready", self.ready), ("started", self.started), ("first_token", first))
        own: dict[str, Value | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.conversation.id": str(session.id),
            "gen_ai.provider.name": "parrot",
            "parrot.function": self.function,
            "parrot.request_id": self.request_id,
            "parrot.task_id": self.id,
            "parrot.state": self.state,
        }
        if one is None:
            own |= {"gen_ai.tool.name": self.function, "gen_ai.tool.type": "function"}
        else:
            own |= one.attributes
        return SpanRecord(
            f"{operation} {self.function}",
            span,
            TraceParent.parse(self.caller) or spans.session,
            session.epoch + self.activated,
            session.epoch + max(finished, self.activated),
            own | dict(self._waits(first, finished)),
            events=[(name, None if at is None else session.epoch + at) for name, at in moments],
            links=[
                maker
                for task_id, caller in self.makers
                if (maker := spans.task(caller, task_id)) is not None
            ],
            error=self.error,
        )

    def _waits(self, first: float | None, finished: float) -> Iterator[tuple[str, float]]:
        for name, begin, end in (
            ("dependency", self.activated, self.ready),
            ("queue", self.ready, self.started),
            ("prefill", self.started, first),
            ("decode", first, finished),
        ):
            if begin is not None and end is not None:
                yield f"parrot.{name}_s", end - begin


def session_spans(facts: Sequence[Sequence[Any]]) -> list[SpanRecord]:
    """The span of a session, if it is sampled, and those below it; `facts`: its own, and then those
    of its tasks."""
    session = SessionFacts(*facts[0])
    spans = SessionSpans(session.trace_id, session.id)
    below = (TaskFacts(*task).record(session, spans) for task in facts[1:])
    found = [] if not session.trace_id else [_root(session, spans)]
    return [*found, *(span for span in below if span is not None)]


def _root(session: SessionFacts, spans: SessionSpans) -> SpanRecord:
    return SpanRecord(
        f"invoke_workflow {session.app}",
        spans.session,
        None if session.caller is None else TraceParent(*session.caller),
        session.epoch + session.created,
        session.epoch + session.ended,
        {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": session.app,
            "gen_ai.conversation.id": str(session.id),
            "gen_ai.provider.name": "parrot",
            "parrot.tenant": session.tenant,
        },
        is_server=True,
    )


if __name__ == "__main__":
    from parrot.utils.otel import main

    main(session_spans)
