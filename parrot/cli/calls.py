"""A table of the finished calls of a session."""

from collections import Counter

from rich.table import Column, Table

from parrot.protocol.public import CompletionInfo, SessionInfo


def run_seconds(call: CompletionInfo) -> float | None:
    """Seconds on the engine. None before the call has finished."""
    if call.started_s is None or call.finished_s is None:
        return None
    return call.finished_s - call.started_s


def queue_seconds(call: CompletionInfo) -> float | None:
    """Seconds from the moment when all inputs were ready until the call started on an engine."""
    if call.ready_s is None or call.started_s is None:
        return None
    return max(call.started_s - call.ready_s, 0.0)


def calls_table(info: SessionInfo, total_s: float) -> Table:
    """A table with one row per call, in order of finishing, and a row for the whole job."""
    calls = sorted(
        info.calls,
        key=lambda call: (call.finished_s is None, call.finished_s or 0.0, call.request_id),
    )
    num_done = sum(call.finished_s is not None for call in calls)
    sums = {
        "prefill\ncached": sum(call.cached_tokens for call in calls),
        "prefill\ncomputed": sum(call.computed_tokens for call in calls),
        "decode\ntokens": sum(call.output_tokens for call in calls),
    }
    table = Table(
        Column("call", footer=f"{num_done} calls, whole job", no_wrap=True),
        "engine",
        Column("queue\ns", justify="right"),
        *(Column(name, footer=str(total), justify="right") for name, total in sums.items()),
        Column("run\ns", footer=f"{total_s:.2f}", justify="right"),
        title="What was executed",
        title_justify="left",
        show_footer=True,
    )
    num_outputs = Counter(call.request_id for call in calls)
    for call in calls:
        name = f"{call.func_name or 'call'} {call.request_id}"
        table.add_row(
            f"{name} → {call.output}" if num_outputs[call.request_id] > 1 else name,
            call.engine or "",
            _rounded(queue_seconds(call), ""),
            str(call.cached_tokens),
            str(call.computed_tokens),
            str(call.output_tokens),
            _rounded(run_seconds(call), call.state),
        )
    return table


def _rounded(seconds: float | None, otherwise: str) -> str:
    return otherwise if seconds is None else f"{seconds:.2f}"
