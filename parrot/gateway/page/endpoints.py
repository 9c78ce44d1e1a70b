"""The page's endpoints: its static files, sign-in, and the feeds that the page draws."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from fastapi import Request, Response
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.gateway.audit import AuditLog, audited
from parrot.gateway.page.download import live_run, run_json, run_trace
from parrot.gateway.page.feed import Feed, ReadRows, Rows
from parrot.gateway.page.finished import FinishedRun
from parrot.gateway.page.history import History
from parrot.gateway.page.prompt import live_prompt, prompt_answer
from parrot.gateway.page.rows import PageRows
from parrot.gateway.page.series import RecentSeries
from parrot.gateway.page.visitors import VISIT_S, Visitor, Visitors
from parrot.protocol.answers import json_response
from parrot.protocol.endpoint import (
    SMALL_BODY,
    Access,
    Endpoint,
    RuledMount,
    RuledRoute,
    Verb,
    parse_payload,
    read_json,
    taking,
)
from parrot.protocol.errors import InsufficientStorage, NotFound, PermissionDenied
from parrot.protocol.fields import Credential, Label
from parrot.protocol.public import (
    DrainRequest,
    EmptyResponse,
    SessionCreateRequest,
    SessionCreateResponse,
)
from parrot.serve.command_log import CommandLog
from parrot.serve.core import ServeCore
from parrot.serve.durability import Wait, durable_verb
from parrot.serve.graph.nodes import Completion
from parrot.serve.sessions import Session
from parrot.utils.tasks import TaskSet

_FILES = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class EnterRequest(BaseModel):
    key: Credential


class Since(BaseModel):
    """`since`: the version of the view that the page already has; null if it has none."""

    since: Label | None = None


class OfOutput(BaseModel):
    """`output`: an output of the call; null: its last one."""

    output: Label | None = None


class VisitorView(BaseModel):
    """`tenant`: the name of the tenant whose sessions are shown; null: those of all tenants."""

    tenant: str | None
    sees_values: bool


class Page:
    """All endpoints under `/ui/`."""

    def __init__(self, core: ServeCore, audit: AuditLog | None, history: History) -> None:
        self._core = core
        self._history = history
        self._rows = PageRows(core, history.context, history)
        self._series = RecentSeries(core, history.context.epoch)
        self._feed = Feed(core.clock)
        self._visitors = Visitors(core.config.cluster_token, core.tenants, core.clock)
        self._audit = audit

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record the series of the service during the block."""
        tasks = TaskSet()
        tasks.spawn(self._series.run(), name="series of the page")
        try:
            yield
        finally:
            await tasks.close()

    def routes(self) -> list[BaseRoute]:
        endpoints = [
            self._endpoint("GET", "me", self.me),
            self._endpoint("GET", "overview", taking(Since, self.overview)),
            self._endpoint("GET", "placement", taking(Since, self.placement)),
            self._endpoint("GET", "series", taking(Since, self.series)),
            self._endpoint("GET", "usage", taking(Since, self.usage)),
            self._endpoint("GET", "events", taking(Since, self.events)),
            self._endpoint("GET", "sessions/{session_id}", taking(Since, self.session)),
            self._endpoint(
                "GET", "sessions/{session_id}/vars/{var_id}", taking(Since, self.variable)
            ),
            self._endpoint(
                "GET",
                "sessions/{session_id}/calls/{request_id}/prompt",
                taking(OfOutput, self.prompt),
            ),
            self._endpoint("GET", "sessions/{session_id}/run.json", self.run_file),
            self._endpoint("GET", "sessions/{session_id}/trace.json", self.trace_file),
            self._endpoint(
                "POST",
                "engines/{engine_id}/drain",
                taking(DrainRequest, self.drain_engine),
                Wait.NOTHING,
            ),
            self._endpoint("POST", "sessions", self.begin_session, undo=self._end_new),
            self._endpoint("POST", "sessions/{session_id}/end", self.end_session, Wait.PUBLISHED),
            self._endpoint("POST", "runs/{session_id}/delete", self.delete_run, Wait.PUBLISHED),
            self._endpoint(
                "POST",
                "sessions/{session_id}/cancel/{request_id}",
                self.cancel_call,
                Wait.PUBLISHED,
            ),
        ]
        api = [
            RuledRoute("/ui/api/enter", self._enter, Access.ANYBODY, methods=["POST"]),
            RuledRoute("/ui/api/leave", self._leave, Access.ANYBODY, methods=["POST"]),
            *(one.route() for one in endpoints),
        ]
        for route in api:
            route.app = _NotStored(route.app)
        return [
            RuledRoute("/", _to_page, Access.ANYBODY),
            *api,
            RuledMount("/ui", _PageFiles(directory=_FILES, html=True), Access.ANYBODY),
        ]

    def _endpoint(
        self,
        method: str,
        path: str,
        verb: Verb,
        wait: Wait = Wait.DURABLE,
        undo: Callable[[Any], None] | None = None,
    ) -> Endpoint:
        """`verb` is also called with the `visitor` that the request's cookie identifies. A GET
        changes nothing, so its answer does not wait for the journal."""

        def visitor_of(request: Request) -> Visitor:
            return self._visitors.of(request.cookies.get(_cookie_name(request)))

        def name_visitor(request: Request, arguments: dict[str, Any]) -> None:
            arguments["visitor"] = visitor_of(request)

        if method != "GET":
            verb = durable_verb(verb, self._core.sessions.journal, wait, undo)
        endpoint = Endpoint(method, f"/ui/api/{path}", verb, access=Access.VISITOR, body=SMALL_BODY)
        endpoint.checked(lambda request: visitor_of(request).name).stepping(name_visitor)
        return endpoint if self._audit is None else audited(endpoint, self._audit)

    # Views

    def me(self, visitor: Visitor) -> VisitorView:
        return self._view_of(visitor)

    def overview(self, visitor: Visitor, since: str | None) -> AsyncGenerator[bytes]:
        """The service, its engines, live sessions and finished runs."""

        def read(visitor: Visitor) -> Rows:
            return {**self._history.overview(visitor), **self._rows.overview(visitor)}

        return self._view("overview", read, visitor, since)

    def placement(self, visitor: Visitor, since: str | None) -> AsyncGenerator[bytes]:
        return self._view("placement", self._rows.placement, visitor, since)

    def series(self, visitor: Visitor, since: str | None) -> AsyncGenerator[bytes]:
        return self._view("series", self._series.rows, visitor, since)

    def usage(self, visitor: Visitor, since: str | None) -> AsyncGenerator[bytes]:
        return self._view("usage", self._rows.usage, visitor, since)

    def events(self, visitor: Visitor, since: str | None) -> AsyncGenerator[bytes]:
        def read(visitor: Visitor) -> Rows:
            return {**self._rows.events(visitor), **self._history.failures(visitor)}

        return self._view("events", read, visitor, since)

    def _view(
        self, name: str, read: Callable[[Visitor], Rows], visitor: Visitor, since: str | None
    ) -> AsyncGenerator[bytes]:
        feed = self._feed.changes((name, visitor), lambda: read(visitor), since)
        return self._while_signed_in(visitor, feed)

    async def _while_signed_in(
        self, visitor: Visitor, feed: AsyncGenerator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Pass on the feed, but check the visitor's key before each update: a feed stays open for
        hours, and the key may be removed meanwhile."""
        async with aclosing(feed):
            async for changes in feed:
                self._visitors.require(visitor)
                yield changes

    def _stored(self, feed: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Delay each update of a run until the journal has stored its content."""
        log = self._core.sessions.journal
        return feed if log is None else _held(feed, log)

    def session(
        self, visitor: Visitor, session_id: int, since: str | None
    ) -> AsyncGenerator[bytes]:
        """Raises `NotFound`."""

        def view(found: Session | FinishedRun) -> Rows:
            rows = (
                found.view if isinstance(found, FinishedRun) else partial(self._rows.session, found)
            )
            return rows(sees_values=visitor.sees_values)

        self._visible_run(visitor, session_id)
        read = self._reader(visitor, session_id, view)
        feed = self._feed.changes(("session", session_id, visitor.sees_values), read, since)
        return self._while_signed_in(visitor, self._stored(feed))

    def variable(
        self, visitor: Visitor, session_id: int, var_id: str, since: str | None
    ) -> AsyncGenerator[bytes]:
        """Raises `NotFound`."""

        def view(found: Session | FinishedRun) -> Rows:
            if isinstance(found, FinishedRun):
                return found.variable(var_id, sees_values=visitor.sees_values)
            return self._rows.variable(found, var_id, sees_values=visitor.sees_values)

        read = self._reader(visitor, session_id, view)
        read()
        name = ("variable", session_id, var_id, visitor.sees_values)
        feed = self._feed.changes(name, read, since)
        return self._while_signed_in(visitor, self._stored(feed))

    async def prompt(
        self, visitor: Visitor, session_id: int, request_id: int, output: str | None
    ) -> bytes:
        """The prompt of a call as its model received it. Raises `NotFound`, and `PermissionDenied`
        for a visitor who sees no values."""
        found = self._visible_run(visitor, session_id)
        if not visitor.sees_values:
            raise PermissionDenied("the texts of this run are visible only to its tenant")
        if isinstance(found, FinishedRun):
            prompt = found.prompt(request_id, output)
        else:
            completion = _completion(found, request_id, output)
            prompt = live_prompt(completion, is_api=found.is_program)
        engines = (one for one in self._core.fleet if one.info.model == prompt.model)
        tokenizer = next((engine.tokenizer for engine in engines), None)
        return orjson.dumps(await prompt_answer(prompt, tokenizer))

    async def run_file(self, visitor: Visitor, session_id: int) -> bytes:
        """The run as JSON. Raises `NotFound`."""
        run = await self._whole_run(visitor, session_id)
        return run_json(run, sees_values=visitor.sees_values)

    async def trace_file(self, visitor: Visitor, session_id: int) -> bytes:
        """The run as a trace for Perfetto. Raises `NotFound`."""
        run = await self._whole_run(visitor, session_id)
        return run_trace(run, sees_values=visitor.sees_values)

    async def _whole_run(self, visitor: Visitor, session_id: int) -> FinishedRun:
        """A finished run, or a live one as it is now. Raises `NotFound`."""
        found = self._visible_run(visitor, session_id)
        if isinstance(found, FinishedRun):
            return found
        return await live_run(found, self._history.context)

    def _reader(
        self, visitor: Visitor, session_id: int, view: Callable[[Session | FinishedRun], Rows]
    ) -> ReadRows:
        """A function that returns the view of a session now. The view of a finished run is built
        once. It raises `NotFound`."""
        last: tuple[Session | FinishedRun, Rows] | None = None

        def read() -> Rows:
            nonlocal last
            found = self._visible_run(visitor, session_id)
            if last is None or last[0] is not found or isinstance(found, Session):
                last = found, view(found)
            return last[1]

        return read

    def _visible_run(self, visitor: Visitor, session_id: int) -> Session | FinishedRun:
        """The session, also while it is ending, or its kept run."""
        found = self._core.sessions.find_owner(session_id) or self._history.find(session_id)
        if found is None or visitor.tenant not in (None, found.tenant):
            raise NotFound(f"there is no run {session_id}, or it was not kept")
        return found

    def _visible_session(self, visitor: Visitor, session_id: int) -> Session:
        session = self._core.sessions.find(session_id)
        if session is None or visitor.tenant not in (None, session.tenant):
            raise NotFound(f"you have no live session {session_id}")
        return session

    # Actions

    def begin_session(self, visitor: Visitor) -> SessionCreateResponse:
        """Begin a session for the page's own calls. Raises `AuthenticationFailed` for an operator
        if sessions need an API key."""
        tenant = visitor.tenant or self._core.tenant(None)
        return self._core.begin_session(tenant, SessionCreateRequest(apps=["page"]))

    def _end_new(self, answer: SessionCreateResponse) -> None:
        """End a session whose id and auth did not reach the page."""
        self._core.delete_session(answer.session_id, answer.session_auth)

    def end_session(self, visitor: Visitor, session_id: int) -> None:
        session = self._visible_session(visitor, session_id)
        self._core.delete_session(session.id, session.auth)

    def delete_run(self, visitor: Visitor, session_id: int) -> None:
        """Delete a finished run, or the session of API requests that have all finished. Raises
        `NotFound`, also for any other live session."""
        run = self._visible_run(visitor, session_id)
        if isinstance(run, Session):
            calls = run.graph.calls.values()
            if not run.is_program or not all(t.is_finished for call in calls for t in call.tasks):
                raise NotFound(f"there is no finished run {session_id}")
            with self._history.without(session_id):
                self._core.delete_session(run.id, run.auth)
        self._history.delete(session_id)

    def cancel_call(self, visitor: Visitor, session_id: int, request_id: int) -> None:
        session = self._visible_session(visitor, session_id)
        self._core.cancel_call(session.id, session.auth, request_id)

    def drain_engine(self, visitor: Visitor, engine_id: int, is_wanted: bool) -> None:
        """Raises `PermissionDenied` for a tenant: only the operator may drain engines."""
        if visitor.tenant is not None:
            raise PermissionDenied("only operators can drain engines")
        self._core.dispatcher.drains.drain(engine_id, is_draining=is_wanted)

    # Sign-in

    def _view_of(self, visitor: Visitor) -> VisitorView:
        tenant = visitor.tenant
        name = None if tenant is None else self._core.tenants.name_of(tenant)
        return VisitorView(tenant=name, sees_values=visitor.sees_values)

    async def _enter(self, request: Request) -> Response:
        """Set the visitor's cookie. Only the page's paths receive it, and no script can read it."""
        wanted = parse_payload(EnterRequest, await read_json(request, SMALL_BODY))
        cookie = self._visitors.enter(wanted.key)
        if self._audit is not None:
            self._audit.note(request, self._visitors.of(cookie).name, "ok")
        response = json_response(self._view_of(self._visitors.of(cookie)))
        response.set_cookie(
            _cookie_name(request),
            cookie,
            max_age=int(VISIT_S),
            path="/ui",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def _leave(self, request: Request) -> Response:
        await read_json(request, SMALL_BODY)  # Pages of other sites cannot send a JSON body.
        name = _cookie_name(request)
        self._visitors.leave(request.cookies.get(name, ""))
        response = json_response(EmptyResponse())
        response.delete_cookie(name, path="/ui", httponly=True, samesite="strict")
        return response


async def _held(feed: AsyncGenerator[bytes], log: CommandLog) -> AsyncGenerator[bytes]:
    async with aclosing(feed):
        async for changes in feed:
            await _durable(log)
            yield changes


async def _durable(log: CommandLog) -> None:
    """Wait until all records so far are on disk, also while they cannot be written."""
    while True:
        try:
            return await log.durable()
        except InsufficientStorage:
            await log.writable()


def _completion(session: Session, request_id: int, var_id: str | None) -> Completion:
    """The completion of a call that makes `var_id`, or its last one. Raises `NotFound`."""
    call = session.graph.calls.get(request_id)
    tasks = () if call is None else reversed(call.tasks)
    for task in tasks:
        if isinstance(task, Completion) and var_id in (None, task.output.id):
            return task
    raise NotFound(f"run {session.id} has no call {request_id} with a prompt")


def _cookie_name(request: Request) -> str:
    """The name contains the port, because browsers send a cookie to all ports of a host."""
    return f"parrot_page_{request.url.port or 0}"


async def _to_page(request: Request) -> Response:
    return RedirectResponse("ui/")


class _NotStored:
    """Adds headers to answers of the page's API: no cache stores them, no browser guesses their
    type. Errors have the same headers everywhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Cache-Control"] = "no-store"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self._app(scope, receive, send_headers)


class _PageFiles(StaticFiles):
    """The page's static files. Their headers forbid other origins, inline scripts and framing."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response
