"""How requests that generate end: for those who count, trace and log them."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from parrot.protocol.engine_api import GenerateRequest, GenerateResponse
from parrot.utils.logs import CALLS, log_call
from parrot.utils.traceparent import TraceParent


@dataclass(slots=True)
class Ended:
    """A request that has its response, or has failed. `began`: in Unix time."""

    request: GenerateRequest
    began: float
    seconds: float = 0.0
    response: GenerateResponse | None = None
    error: BaseException | None = None

    @property
    def parent(self) -> TraceParent | None:
        """The span above it."""
        return TraceParent.parse(self.request.traceparent)

    @property
    def error_type(self) -> str | None:
        error = self.error
        return None if error is None else getattr(error, "type", type(error).__name__)

    @property
    def reason(self) -> str:
        """Why it ended, in vLLM's words. Leaving clients cancel it, which is no `Exception`."""
        if isinstance(self.error, Exception):
            return "error"
        return "abort" if self.response is None else self.response.finish_reason.value


@contextmanager
def told(
    request: GenerateRequest, listeners: Sequence[Callable[[Ended], None]]
) -> Iterator[Callable[[GenerateResponse], None]]:
    """Tell the listeners how the request ends that is served in the block, which gives its response
    to the function that is yielded, or raises."""
    ended, began = Ended(request, time.time()), time.perf_counter()

    def answered(response: GenerateResponse) -> None:
        ended.response, ended.seconds = response, time.perf_counter() - began

    try:
        yield answered
    except BaseException as error:
        ended.error = error
        raise
    finally:
        if ended.response is None:
            ended.seconds = time.perf_counter() - began
        for listener in listeners:
            listener(ended)


def log_ended(ended: Ended) -> None:
    """Log the request, if calls are logged."""
    if not CALLS.isEnabledFor(logging.INFO):
        return
    parent, facts = ended.parent, {}
    if ended.response is not None:
        usage = ended.response.usage
        facts = {
            "finish_reason": ended.response.finish_reason.value,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "output_tokens": usage.output_tokens,
        }
    log_call(
        "request ended",
        session_id=ended.request.session_id,
        call_id=ended.request.task_id,
        trace_id=None if parent is None else parent.trace_id,
        seconds=ended.seconds,
        **facts,
        error=ended.error_type,
    )
