"""Who may use a route. Each has a rule: an app with a route that has none does not start."""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.routing import BaseRoute, Mount, Route

Check = Callable[[Request], None]
"""Raises `AuthenticationFailed` for a request that may not be made."""


class Access(StrEnum):
    """What a request must present, where the server has such a thing: without `api_keys`, or with
    `insecure`, nobody is asked for those."""

    ANYBODY = "nothing"
    API_KEY = "an API key"
    SESSION = "the session's `session_auth`"
    SESSION_OR_KEY = "the session's `session_auth`, or an API key"
    CLUSTER = "the cluster token"
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
