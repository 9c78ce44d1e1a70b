"""Under which names a server answers. A web page may give a name of its own any address, also this
machine's (DNS rebinding), and its browser then takes it for the same site; the request tells which
name it was made for."""

import socket
from collections.abc import Iterable
from functools import lru_cache

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.protocol.errors import MisdirectedRequest
from parrot.protocol.gate.answer import ErrorForm, error_response
from parrot.protocol.gate.names import MAX_HOST_NAME, is_address

ANY_HOST = "*"
_REMEMBERED = 256  # names, each with its port


class HostGuard:
    """Refuses requests for names that are not the server's. Its names are what it binds, the
    machine's, `localhost` and `others`; an address is no name, so nobody can have given it away.
    """

    def __init__(
        self, app: ASGIApp, bound: str, others: Iterable[str], error_form: ErrorForm
    ) -> None:
        self._app = app
        self._error_form = error_form
        own = (bound, socket.gethostname(), "localhost", *others)
        self._names = frozenset(name.lower() for name in own)
        self._is_own = lru_cache(_REMEMBERED)(self._names_us)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for key, value in scope["headers"]:
                if key == b"host" and not self._is_own(value):
                    response = error_response(Request(scope), _refusal(value), self._error_form)
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _names_us(self, header: bytes) -> bool:
        if ANY_HOST in self._names:
            return True
        name = _without_port(header.decode("latin-1")).lower().removesuffix(".")
        return name in self._names or is_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        address, end, port = host[1:].partition("]")
        is_whole = end and (not port or (port[0] == ":" and port[1:].isdigit()))
        return address if is_whole else host
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


def _refusal(header: bytes) -> MisdirectedRequest:
    name = _without_port(header.decode("latin-1"))[:MAX_HOST_NAME]
    return MisdirectedRequest(
        f"this server is not `{name}`: its `allowed_hosts` do not name it", param="host"
    )
