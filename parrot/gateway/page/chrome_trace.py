"""A session as a trace for Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing).

In the trace, each engine is a process with one lane per concurrent call. A call consists of its
queue time and its run, which contains prefill and decode. Arrows lead from the end of a call to the
start of the calls that read its output."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from parrot.protocol.public import CompletionInfo, GraphEdge, SessionInfo

Event = dict[str, Any]
_NATIVE, _NOWHERE = "native functions", "no engine"
_FACTS = (
    "request_id",
    "state",
    "model",
    "attempts",
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "finish_reason",
    "reused",
    "remark",
)


def chrome_trace(info: SessionInfo) -> dict[str, Any]:
    """An object in the trace event format. Times are in microseconds since the session began."""
    lanes: dict[str, list[float]] = {}  # The end of the last call in each lane of a process.
    places: dict[str, tuple[int, int]] = {}
    spans = {call.output_var_id: _span(call, info.age_s) for call in info.calls}
    events: list[Event] = []
    for call in sorted(info.calls, key=lambda call: spans[call.output_var_id] or (0.0, 0.0)):
        span = spans[call.output_var_id]
        if span is None:
            continue
        process = call.engine or (_NATIVE if call.kind == "native" else _NOWHERE)
        own = lanes.setdefault(process, [])
        lane = next((n for n, free in enumerate(own) if free <= span[0]), len(own))
        own[lane:] = [span[1], *own[lane + 1 :]]
        places[call.output_var_id] = place = (list(lanes).index(process), lane)
        events += _call_events(call, span, place)
    events += _names(lanes)
    events += _arrows(info, spans, places)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(call: CompletionInfo, now: float) -> tuple[float, float] | None:
    """The time from a call's last input to its end, or to now. None while it waits for inputs."""
    begin = call.started_s if call.ready_s is None else call.ready_s
    if begin is None:
        begin = call.finished_s
    if begin is None:
        return None
    end = now if call.finished_s is None else call.finished_s
    return begin, max(begin, end)


def _call_events(
    call: CompletionInfo, span: tuple[float, float], place: tuple[int, int]
) -> Iterator[Event]:
    facts = {key: value for key in _FACTS if (value := getattr(call, key)) is not None}
    begin, end = span
    started = end if call.started_s is None else min(max(call.started_s, begin), end)
    name = f"{call.func_name or 'call'} → {call.output}"
    yield _slice(name, span, place, facts)
    if started > begin:
        yield _slice("queue", (begin, started), place)
    if call.decode_s is not None and call.finished_s is not None:
        first = max(started, end - call.decode_s)
        yield _slice("prefill", (started, first), place)
        yield _slice("decode", (first, end), place)


def _slice(
    name: str,
    span: tuple[float, float],
    place: tuple[int, int],
    facts: dict[str, Any] | None = None,
) -> Event:
    times = {"ts": _microseconds(span[0]), "dur": _microseconds(span[1] - span[0])}
    pid, tid = place
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": facts or {}}


def _names(lanes: dict[str, list[float]]) -> Iterator[Event]:
    for pid, process in enumerate(lanes):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}


def _arrows(
    info: SessionInfo,
    spans: dict[str, tuple[float, float] | None],
    places: dict[str, tuple[int, int]],
) -> Iterator[Event]:
    for number, edge in enumerate(info.edges):
        source, target = spans.get(edge.source), spans.get(edge.target)
        if source is None or target is None:
            continue
        common = {"name": edge.variable or "value", "cat": "variable", "id": number}
        for phase, at, var in (("s", source[1], edge.source), ("f", target[0], edge.target)):
            pid, tid = places[var]
            yield {"ph": phase, **common, "ts": _microseconds(at), "pid": pid, "tid": tid}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def session_of_rows(session_id: int, rows: Mapping[str, Mapping[str, Any]]) -> SessionInfo:
    """The page's rows in the format of the REST API, without variables."""
    calls = {key.removeprefix("call:"): row for key, row in rows.items() if key.startswith("call:")}
    edges = []
    for target, row in calls.items():
        for var_id in row["inputs"]:
            variable = rows.get(f"var:{var_id}", {})
            if (source := variable.get("producer")) is not None:
                edges.append(
                    GraphEdge(source=source, target=target, variable=variable.get("name", ""))
                )
    head = rows["session"]
    end = head.get("ended_at", time.time())  # A live session has not ended.
    return session_info(
        session_id,
        [CompletionInfo.model_validate(row) for row in calls.values()],
        edges,
        float(end) - float(head["created_at"]),
    )


def session_info(
    session_id: int, calls: list[CompletionInfo], edges: list[GraphEdge], age_s: float
) -> SessionInfo:
    """A session without variables, `age_s` after its begin."""
    return SessionInfo(
        session_id=session_id,
        state="active",
        age_s=age_s,
        expires_in_s=0.0,
        vars=[],
        calls=calls,
        edges=edges,
    )
