"""`parrot trace`: exports a session as a picture of its graph, and as a trace for Perfetto."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from parrot.cli.calls import calls_table
from parrot.cli.console import OUT, fail
from parrot.cli.graph_picture import draw_session
from parrot.cli.page_feed import PageFeed, RequestFailed, Row, name_of, state_of
from parrot.gateway.page.chrome_trace import chrome_trace, session_info, session_of_rows
from parrot.protocol.public import CompletionInfo, GraphEdge, SessionInfo
from parrot.protocol.trace import CallLine, NativeLine
from parrot.simulation.trace import TracedSession, load_trace
from parrot.utils.config import ConfigError

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
    return session_of_rows(int(chosen), feed.now(f"sessions/{chosen}"))


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
    return session_info(int(chosen), one.calls, list(_edges(one)), max(times, default=0.0))


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
