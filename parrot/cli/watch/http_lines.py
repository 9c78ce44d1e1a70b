"""Requests of a person at a terminal: one after the other, streams line by line."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any

from parrot.protocol.errors import InternalError
from parrot.protocol.transport import EventParser

_CONNECT_S, _ANSWER_S = 5.0, 600.0
_MAX_BODY = 2**26


class RequestFailed(Exception):
    """The server is not there, or refuses; the message says which. `status` is None or its."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """The server at an address. `headers` go with every request."""

    def __init__(self, host: str, port: int, headers: Mapping[str, str] | None = None) -> None:
        self._host, self._port = host, port
        self.headers = dict(headers or {})

    def ask(self, method: str, path: str, body: Any = None) -> tuple[Any, http.client.HTTPMessage]:
        """The JSON of an answer, and its headers. Raises `RequestFailed`."""
        with closing(self._connection()) as connection:
            try:
                answer = self._answer(connection, method, path, body)
                return json.loads(answer.read(_MAX_BODY)), answer.headers
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise RequestFailed(
                    f"{self._address} did not answer as expected: {error}"
                ) from None

    def events(self, method: str, path: str, body: Any = None) -> Iterator[str]:
        """The data of server-sent events as they come. Raises `RequestFailed`."""
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
        """Plain `http.client`: it ignores proxy settings, and needs no event loop."""
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = dict(self.headers)
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
                f"nobody answers at {self._address}: {error}. `parrot up MODEL` starts a server; "
                "--core names another address"
            ) from None
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise RequestFailed(_reason(answer.read(_MAX_BODY), answer.status), answer.status)
        return answer


def _reason(raw: bytes, status: int) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
