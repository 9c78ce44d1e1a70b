"""`parrot trace`: exports a session as a picture of its graph, and as a trace for Perfetto
(ui.perfetto.dev) and Chrome (chrome://tracing).

In the trace, each engine is a process with one lane per concurrent call. A call consists of its
queue time and its run, which contains prefill and decode. Arrows lead from the end of a call to the
start of the calls that read its output."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from parrot.cli.calls import calls_table
from parrot.cli.console import OUT, fail
from parrot.cli.graph_picture import draw_session
from parrot.cli.page_feed import PageFeed, RequestFailed, Row, Rows, name_of, state_of
from parrot.protocol.public import CompletionInfo, GraphEdge, SessionInfo
from parrot.protocol.trace import CallLine, NativeLine
from parrot.simulation.trace import TracedSession, load_trace
from parrot.utils.config import ConfigError

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


_LISTED = 20
_MORE = (
    " (ServeCore keeps the last runs, see the config key `history`; its `trace_path` records all, "
    "for --file)"
)


def trace(
    session: str | None,
    core: str,
    config_path: Path | None,
    api_key: str | None,
    file: Path | None,
    output_dir: Path,
) -> None:
    """Write the files of a session, live or finished. Without a session, list all sessions. Raises
    `SystemExit` for an unknown session, or if ServeCore rejects the request."""
    try:
        found = (
            _live(session, PageFeed(core, config_path, api_key))
            if file is None
            else _recorded(session, file)
        )
        if found is not None:
            _write(found, output_dir)
    except (RequestFailed, ConfigError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{output_dir}: {error.strerror}; --output-dir names another folder")
    except KeyboardInterrupt:
        sys.exit(130)


def _live(session: str | None, feed: PageFeed) -> SessionInfo | None:
    overview = feed.now("overview")
    known = {str(row["id"]): row for key, row in overview.items() if key.startswith("session:")}
    newest = max(known, key=lambda name: float(known[name]["created_at"]), default=None)
    if session is None:
        _list([_Listed(name, row["created_at"], row["calls"], row) for name, row in known.items()])
        return None
    chosen = newest if session == "last" else session
    if chosen not in known:
        raise RequestFailed(
            f"there is no run {session}, or it was not kept; `parrot trace` lists the runs, and "
            "--file reads the file of `trace_path`"
        )
    return _session_info(int(chosen), feed.now(f"sessions/{chosen}"))


def _session_info(session_id: int, rows: Rows) -> SessionInfo:
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
    return _info(
        session_id,
        [CompletionInfo.model_validate(row) for row in calls.values()],
        edges,
        float(end) - float(head["created_at"]),
    )


def _recorded(session: str | None, file: Path) -> SessionInfo | None:
    """An ended session from a file that ServeCore wrote to its `trace_path`."""
    sessions = {str(one.began.session_id): one for one in load_trace(file).sessions}
    if session is None:
        _list([_Listed(name, one.began.at, len(one.calls)) for name, one in sessions.items()], file)
        return None
    chosen = next(reversed(sessions)) if session == "last" else session
    if chosen not in sessions:
        raise ConfigError(f"{file}: no session {session}; `parrot trace --file {file}` lists them")
    one = sessions[chosen]
    if not one.calls:
        raise ConfigError(f"{file}: session {chosen} has no calls, or had not ended")
    times = [call.finished_s for call in one.calls if call.finished_s is not None]
    return _info(int(chosen), one.calls, list(_edges(one)), max(times, default=0.0))


def _edges(session: TracedSession) -> Iterator[GraphEdge]:
    """The edges between variables. The outputs of one call are chained in order."""
    producers = {
        var_id: call.output_var_id
        for call in session.calls
        for var_id in (call.outputs or [call.output_var_id])
    }
    of_request: dict[int, list[CompletionInfo]] = {}
    for call in session.calls:
        of_request.setdefault(call.request_id, []).append(call)
    for event in session.events:
        if not isinstance(event, CallLine | NativeLine):
            continue
        calls = of_request.get(event.request_id, [])
        for before, after in pairwise(calls):
            yield GraphEdge(
                source=before.output_var_id, target=after.output_var_id, variable=before.output
            )
        for parameter in event.parameters:
            source = producers.get(parameter.var_id)
            if calls and source is not None and not parameter.is_output:
                target = calls[0].output_var_id
                yield GraphEdge(source=source, target=target, variable=parameter.name)


def _info(
    session_id: int, calls: list[CompletionInfo], edges: list[GraphEdge], age_s: float
) -> SessionInfo:
    return SessionInfo(
        session_id=session_id,
        state="active",
        age_s=age_s,
        expires_in_s=0.0,
        vars=[],
        calls=calls,
        edges=edges,
    )


def _write(info: SessionInfo, output_dir: Path) -> None:
    """Write a file. Raises `OSError`."""
    ends = [call.finished_s for call in info.calls if call.finished_s is not None]
    begins = [call.submitted_s for call in info.calls if call.submitted_s is not None]
    seconds = max(ends, default=0.0) - min(begins, default=0.0)
    OUT.print(calls_table(info, max(seconds, 0.0)))
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / f"session_{info.session_id}.trace.json"
    path.write_text(json.dumps(chrome_trace(info)))
    OUT.print(f"Open in https://ui.perfetto.dev: {escape(str(path))}", soft_wrap=True)
    picture = output_dir / f"session_{info.session_id}.svg"
    draw_session(info, f"Session {info.session_id}", picture)
    OUT.print(f"The graph: {escape(str(picture))}", soft_wrap=True)


class _Listed(NamedTuple):
    """One line of the list of runs."""

    name: str  # the session's id
    began: float  # Unix time, or the time in the recording
    calls: int
    row: Row | None = None  # of the page; None in a recording


def _list(sessions: Iterable[_Listed], file: Path | None = None) -> None:
    """Print the newest sessions, live or finished."""
    newest = sorted(sessions, key=lambda session: -session.began)
    table = Table("session", *(() if file else ("application", "state")), "began", "calls")
    for name, began, calls, row in newest[:_LISTED]:
        if row is None:
            table.add_row(name, f"{began:.1f} s", str(calls))
            continue
        when = time.strftime("%H:%M:%S", time.localtime(began))
        table.add_row(name, escape(name_of(row)), state_of(row), when, str(calls))
    if not newest:
        OUT.print(f"there is no session{'' if file else _MORE}")
        return
    OUT.print(table)
    more = len(newest) - _LISTED
    OUT.print(
        (f"and {more} older. " if more > 0 else "")
        + "`parrot trace SESSION` shows one"
        + ("" if file else _MORE)
    )
