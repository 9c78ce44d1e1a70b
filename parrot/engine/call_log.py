"""An engine's log of the requests that generate."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parrot.protocol.engine_api import GenerateRequest, GenerateResponse
from parrot.utils.logs import log_call
from parrot.utils.traces.traceparent import TraceParent


@contextmanager
def logged(request: GenerateRequest) -> Iterator[Callable[[GenerateResponse], None]]:
    """Log the request that is served in the block, which gives its response to the function that is
    yielded, or raises."""
    responses: list[GenerateResponse] = []
    began, error = time.monotonic(), None
    try:
        yield responses.append
    except BaseException as failure:
        error = getattr(failure, "type", type(failure).__name__)
        raise
    finally:
        parent = TraceParent.parse(request.traceparent)
        facts: dict[str, object] = {}
        for response in responses:
            usage = response.usage
            facts = {
                "finish_reason": response.finish_reason.value,
                "cached_tokens": usage.cached_tokens,
                "computed_tokens": usage.computed_tokens,
                "output_tokens": usage.output_tokens,
            }
        log_call(
            "request ended",
            session_id=request.session_id,
            call_id=request.task_id,
            trace_id=None if parent is None else parent.trace_id,
            seconds=time.monotonic() - began,
            **facts,
            error=error,
        )
