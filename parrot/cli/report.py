"""The table of a session's calls."""

from collections import Counter

from rich.table import Table

from parrot.cli.graph_picture import run_seconds
from parrot.protocol.public import CompletionInfo, SessionInfo


def calls_table(info: SessionInfo, total_s: float) -> Table:
    """A row per call, in order of finishing, and one for the whole job."""
    table = Table(title="What was executed", title_justify="left", show_footer=True)
    num_outputs = Counter(call.request_id for call in info.calls)
    done = [call for call in info.calls if call.finished_s is not None]
    sums = {
        "prefill\ncached": sum(call.cached_tokens for call in info.calls),
        "prefill\ncomputed": sum(call.computed_tokens for call in info.calls),
        "decode\ntokens": sum(call.output_tokens for call in info.calls),
    }
    table.add_column("call", footer=f"{len(done)} calls, whole job", no_wrap=True)
    table.add_column("engine")
    table.add_column("queue\ns", justify="right")
    for name, total in sums.items():
        table.add_column(name, justify="right", footer=str(total))
    table.add_column("run\ns", justify="right", footer=f"{total_s:.2f}")
    for call in sorted(info.calls, key=_finish_order):
        table.add_row(*_row(call, several_outputs=num_outputs[call.request_id] > 1))
    return table


def _row(call: CompletionInfo, *, several_outputs: bool) -> list[str]:
    seconds = run_seconds(call)
    name = f"{call.func_name or 'call'} {call.request_id}"
    return [
        f"{name} → {call.output}" if several_outputs else name,
        call.engine or "",
        _seconds(queue_seconds(call)),
        str(call.cached_tokens),
        str(call.computed_tokens),
        str(call.output_tokens),
        call.state if seconds is None else f"{seconds:.2f}",
    ]


def queue_seconds(call: CompletionInfo) -> float | None:
    """Seconds from the moment its inputs were there until an engine took it."""
    if call.ready_s is None or call.started_s is None:
        return None
    return max(call.started_s - call.ready_s, 0.0)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _finish_order(call: CompletionInfo) -> tuple[float, int]:
    return (float("inf") if call.finished_s is None else call.finished_s, call.request_id)
