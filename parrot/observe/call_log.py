"""The log of calls: how each ended, without anything of what it said."""

from parrot.protocol.public import SessionCreateRequest
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.observers import Observer
from parrot.serve.sessions import Session
from parrot.utils.clock import Clock
from parrot.utils.logs import log_call


class CallLog(Observer):
    """Logs the begin and the end of sessions, and the end of their tasks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def session_created(self, session: Session, request: SessionCreateRequest) -> None:
        log_call("session began", **_scope(session), apps=list(session.apps))

    def session_ended(self, session: Session) -> None:
        seconds = self._clock.now() - session.created_at
        log_call(
            "session ended", **_scope(session), seconds=seconds, calls=len(session.graph.calls)
        )

    def task_finished(self, session: Session, task: Task) -> None:
        times, error = task.times, task.outputs[0].error
        seconds = None
        if times.activated is not None and times.finished is not None:
            seconds = times.finished - times.activated
        facts: dict[str, object] = {}
        if isinstance(task, Completion):
            stats = task.stats
            facts = {
                "engine": stats.engine_name,
                "attempts": stats.attempts,
                "cached_tokens": stats.cached_tokens,
                "computed_tokens": stats.computed_tokens,
                "output_tokens": stats.output_tokens,
            }
        log_call(
            f"call {task.state.value}",
            **_scope(session),
            request_id=task.request_id,
            call_id=task.id,
            function=task.func_name,
            seconds=seconds,
            **facts,
            error=None if error is None else error.type,
        )


def _scope(session: Session) -> dict[str, object]:
    return {
        "session_id": session.id,
        "tenant": session.tenant,
        "trace_id": session.graph.spans.trace_id or None,
    }
