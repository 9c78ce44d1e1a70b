"""Who may use a route. Each has a rule: an app with a route that has none does not start."""

from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.protocol.errors import ParrotError
from parrot.protocol.gate.answer import error_response

Check = Callable[[Request], object]
"""Raises `AuthenticationFailed` or `PermissionDenied` for a request that may not be made."""


class Access(StrEnum):
    """The thing that a request must present, where the server has it: without API keys nobody is
    asked for one, without a cluster token nobody for that, and without both nobody for a cookie."""

    ANYBODY = "nothing"
    API_KEY = "an API key"
    SESSION = "the session's `session_auth`"
    SESSION_OR_KEY = "the session's `session_auth`, or an API key"
    CLUSTER = "the cluster token"
    METRICS = "the cluster token, or an API key with the scope `metrics`"
    ADMIN = "the cluster token, or an API key with the scope `admin`"
    VISITOR = "the page's cookie"


class Rule(NamedTuple):
    """`method`: "*" is every one."""

    method: str
    path: str
    access: Access


class RuledRoute(Route):
    def __init__(self, path: str, endpoint: Callable[..., Any], access: Access, **options: Any):
        super().__init__(path, endpoint, **options)
        self.access = access


class RuledMount(Mount):
    def __init__(self, path: str, app: Any, access: Access) -> None:
        super().__init__(path, app)
        self.access = access


def rules(routes: Iterable[BaseRoute]) -> Iterator[Rule]:
    """Yield the rules of all methods of all routes. Raises `TypeError` for a route without one."""
    for route in routes:
        if isinstance(route, RuledMount):
            yield Rule("*", f"{route.path}/", route.access)
        elif isinstance(route, RuledRoute):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield Rule(method, route.path, route.access)
        else:
            raise TypeError(f"nobody says who may use {route}")


class Guard:
    """Refuses, unless `check` lets it pass, every request that is not for an open path, also for
    paths that there are not."""

    def __init__(self, app: ASGIApp, check: Check, open_paths: Collection[str]) -> None:
        self._app = app
        self._check = check
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                self._check(request := Request(scope))
            except ParrotError as error:
                await error_response(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
