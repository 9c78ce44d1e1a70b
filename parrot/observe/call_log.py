"""The call log: how each call ended, without prompts and values."""

from parrot.serve.events import SessionBegan, SessionEnded, Sink, TaskEnded
from parrot.serve.graph.nodes import Completion
from parrot.serve.sessions import Session
from parrot.utils.logs import log_call


class CallLog:
    """Logs the start and end of sessions, and the end of their tasks."""

    @property
    def sink(self) -> Sink:
        return {
            SessionBegan: self._session_began,
            SessionEnded: self._session_ended,
            TaskEnded: self._task_ended,
        }

    def _session_began(self, event: SessionBegan) -> None:
        session = event.session
        log_call("session began", **_scope(session), apps=list(session.apps))

    def _session_ended(self, event: SessionEnded) -> None:
        session, seconds = event
        log_call(
            "session ended", **_scope(session), seconds=seconds, calls=len(session.graph.calls)
        )

    def _task_ended(self, event: TaskEnded) -> None:
        session, task = event
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
    spans = session.graph.spans
    return {
        "session_id": session.id,
        "tenant": session.tenant,
        "trace_id": None if spans is None else spans.trace_id or None,
    }
