"""Blocking requests of terminal commands, with streams line by line, and the views of the web page
for an operator or the owner of an API key."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

from parrot.cli.run import host_and_port, operator_token
from parrot.gateway.page.visitors import page_key
from parrot.protocol.errors import InternalError
from parrot.protocol.transport import EventParser
from parrot.utils.addresses import is_loopback

_CONNECT_S, _ANSWER_S = 5.0, 600.0
_MAX_BODY = 2**26


class RequestFailed(Exception):
    """The server does not answer, or rejects the request. `status`: the HTTP status, or None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RemoteServer:
    """A server. `headers` are sent with every request."""

    def __init__(self, host: str, port: int, headers: Mapping[str, str] | None = None) -> None:
        self._host, self._port = host, port
        self.headers = dict(headers or {})

    def ask(self, method: str, path: str, body: Any = None) -> tuple[Any, http.client.HTTPMessage]:
        """The JSON of an answer and its headers. Raises `RequestFailed`."""
        with closing(self._connection()) as connection:
            try:
                answer = self._answer(connection, method, path, body)
                return json.loads(answer.read(_MAX_BODY)), answer.headers
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise RequestFailed(
                    f"{self._address} did not answer as expected: {error}"
                ) from None

    def events(self, method: str, path: str, body: Any = None) -> Iterator[str]:
        """Yield the data of server-sent events. Raises `RequestFailed`."""
        parser = EventParser()
        with closing(self._connection()) as connection:
            try:
                for line in self._answer(connection, method, path, body):
                    for _, data in parser.feed(line):
                        yield data.decode().strip()
            except (OSError, http.client.HTTPException, ValueError, InternalError) as error:
                raise RequestFailed(f"the answer of {self._address} broke off: {error}") from None

    @property
    def _address(self) -> str:
        return f"http://{self._host}:{self._port}"

    def _connection(self) -> http.client.HTTPConnection:
        """Uses `http.client`, which ignores proxy settings and needs no event loop."""
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = {"User-Agent": "parrot", **self.headers}
        raw = None if body is None else json.dumps(body).encode()
        if raw is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_S)
            connection.request(method, path, raw, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(
                f"Cannot connect to {self._address}: {error}. Start a server with "
                "`parrot up MODEL`, or pass --core."
            ) from None
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise RequestFailed(_reason(answer.read(_MAX_BODY), answer.status), answer.status)
        return answer


def _reason(raw: bytes, status: int) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


Row = dict[str, Any]
Rows = dict[str, Row]


def state_of(run: Row) -> str:
    """The state of a session in one word, as on the web page. A live session without a running call
    waits for its program."""
    state = run.get("state", "active")
    return str(state) if state != "active" else "running" if run.get("running") else "waiting"


def name_of(run: Row) -> str:
    """The application of a run, its client, or its first functions."""
    client = [run["app"]] if run.get("app") else []
    return ", ".join(run.get("apps") or client or run.get("functions") or [])


class PageFeed:
    """The web page's views of one ServeCore for one visitor."""

    def __init__(self, core: str, config_path: Path | None, api_key: str | None) -> None:
        """Sign in. Raises `RequestFailed` with advice, and `ConfigError`."""
        self._core = core
        host, port = host_and_port(core)
        self._server = RemoteServer(host, port)
        if self._is_let_in():
            return
        if api_key is None and config_path is None and not is_loopback(host):
            # The token file of this user is only for servers on this machine.
            raise RequestFailed(
                f"{core} requires a key: give --api-key, or its config with --config-path"
            )
        self._enter(page_key(operator_token(config_path)) if api_key is None else api_key)

    def rows(self, view: str) -> Iterator[Rows]:
        """Yield all rows of a view now and after each change, without end. Raises
        `RequestFailed`."""
        rows: Rows = {}
        for data in self._server.events("GET", f"/ui/api/{view}"):
            try:
                changes = json.loads(data)
                rows = changes["rows"] if changes["whole"] else {**rows, **changes["rows"]}
                for key in changes["gone"]:
                    rows.pop(key, None)
            except (ValueError, KeyError, TypeError):
                raise RequestFailed(
                    f"{self._core} runs another version of Parrot: {data:.80}"
                ) from None
            yield rows
        raise RequestFailed(f"{self._core} closed the connection")

    def now(self, view: str) -> Rows:
        """The current rows of a view. Raises `RequestFailed`."""
        return next(self.rows(view))

    def _is_let_in(self) -> bool:
        try:
            self._server.ask("GET", "/ui/api/me")
        except RequestFailed as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                return False
            if error.status == HTTPStatus.NOT_FOUND:
                raise RequestFailed(
                    f"{self._core} is not a ServeCore, or runs without its page (`page`: false); "
                    "this command needs the page"
                ) from None
            raise
        return True

    def _enter(self, key: str) -> None:
        try:
            _, headers = self._server.ask("POST", "/ui/api/enter", {"key": key})
        except RequestFailed as error:
            raise RequestFailed(
                f"{error}. The key is derived from the cluster token: give ServeCore's config file "
                "(--config-path) or an API key (--api-key)",
                error.status,
            ) from None
        self._server.headers["Cookie"] = headers.get("Set-Cookie", "").partition(";")[0]
