"""The common parts of all server commands: options, log, and a uvicorn server with limits for each
connection. uvicorn itself does not limit the time to receive a request or the size of its head."""

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, cast

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from parrot.protocol.server_config import ConnectionLimits
from parrot.utils.logs import CALLS, JsonFormatter, LogFile, TextFormatter
from parrot.utils.server_socket import in_use, is_in_use

logger = logging.getLogger(__name__)

# Seconds after which the server closes an idle connection. Clients must close it first (aiohttp
# does after 15 s): a POST that is sent while the server closes the connection is lost.
KEEP_ALIVE_S = 75
_SHUTDOWN_GRACE_S = 5  # Seconds for open requests to finish during a shutdown.


_TOO_MANY = 503, "unavailable", "too many connections"
_TOO_SLOW = 408, "request_timeout", "the request did not arrive in time"
_HEAD_TOO_LONG = 431, "request_header_fields_too_large", "the request's header is too long"


class AppServer(uvicorn.Server):
    """Serves `app` until SIGTERM or SIGINT. Then it calls `end_requests`, which must finish all
    open requests, and shuts down. After SIGTERM it first waits for `drain`, or for another signal,
    and serves normally until then."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        end_requests: Callable[[], Awaitable[None]],
        limits: ConnectionLimits,
        drain: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=guarded_protocol(limits),
                ws="none",
                access_log=False,
                log_config=None,
                proxy_headers=False,  # The client's address is not used.
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            )
        )
        self._end_requests = end_requests
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._signals: list[int] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = self.config.host, self.config.port
        with suppress(OSError):  # Other errors are reported when the server binds.
            if is_in_use(host, port):
                logger.error(in_use(host, port))
                sys.exit(1)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As in uvicorn, but a clean shutdown exits with status 0, not by the signal."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._signals.append(sig)
        if self._draining is not None:
            self._draining.get_loop().call_soon_threadsafe(self._draining.cancel)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self._drain is not None and self._signals == [signal.SIGTERM]:
                self._draining = asyncio.create_task(self._drain())
                await asyncio.wait((self._draining,))
                if not self._draining.cancelled():
                    self._draining.result()
        finally:
            await self._end_requests()
            await super().shutdown(sockets)


class _Options(argparse.ArgumentParser):
    """A parser that also accepts underscores instead of hyphens in options, for older scripts."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_with_hyphens(arg) for arg in given], namespace)


def _with_hyphens(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def server_options(description: str, log_filename: str) -> argparse.ArgumentParser:
    parser = _Options(description=description)
    parser.add_argument("--config-path", help="JSON or YAML config file")
    parser.add_argument("--host", help="address to bind; overrides `host` in the config")
    parser.add_argument("--port", type=int, help="port to bind; overrides `port` in the config")
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="start without a cluster token: anyone who can connect has access",
    )
    parser.add_argument("--log-dir", help="also write the log to a file in this folder")
    parser.add_argument("--log-filename", default=log_filename, help="name of this file")
    parser.add_argument("--release-mode", action="store_true", help="log warnings and errors only")
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of a log line"
    )
    parser.add_argument(
        "--log-calls", action="store_true", help="log the end of each session and each call"
    )
    return parser


def given_options(args: argparse.Namespace, *keys: str) -> dict[str, Any]:
    """The given options that override the config keys of the same name."""
    return {key: getattr(args, key) for key in keys if getattr(args, key) is not None}


def run_server(args: argparse.Namespace, serve: Coroutine[Any, Any, None]) -> None:
    """Set up the log (stderr and an optional file) and run the server until it exits."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if args.log_dir is not None:
        Path(args.log_dir).mkdir(parents=True, exist_ok=True)
        handlers.append(LogFile(Path(args.log_dir) / args.log_filename))
    level = logging.WARNING if args.release_mode else logging.INFO
    formatter = JsonFormatter() if args.log_format == "json" else TextFormatter()
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    CALLS.setLevel(logging.INFO if args.log_calls else logging.WARNING)
    import uvloop

    uvloop.run(serve)


class _Awaited(Enum):
    """The part of a request that comes next. NOTHING: the client waits for a response, or the
    connection is idle."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class _ResponseTransport:
    """The transport of one response. The head is sent together with the first part of the body, so
    that the client does not wake up twice. A head without a body is sent in the next iteration of
    the loop."""

    __slots__ = ("_has_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._has_begun = False
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._has_begun:
            self._send(data)
            return
        self._has_begun = True
        self._head = data
        self._loop.call_soon(self._send)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self, data: bytes = b"") -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.writelines([head, data])
        elif data:
            self._transport.write(data)


class GuardedProtocol(HttpToolsProtocol):
    """One connection with limits. It is closed when a head or a body is late, when a head is too
    long, or when too many connections are open. It is aborted when the client does not read the
    response."""

    limits: ClassVar = ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unparsed = 0  # Bytes received since the last complete head or part of a body.
        self._alarm: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None  # Fires if the client stops reading.
        self._await(_Awaited.HEAD)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(*_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(_Awaited.NOTHING)
        if self._alarm is not None:
            self._alarm.cancel()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._awaited is _Awaited.NOTHING:
            self._await(_Awaited.HEAD)
        self._unparsed += len(data)
        self._received_at = self.loop.time()
        super().data_received(data)
        if self._unparsed > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(*_HEAD_TOO_LONG)

    def on_message_begin(self) -> None:
        self._await(_Awaited.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._await(_Awaited.BODY)
        super().on_headers_complete()
        response = _ResponseTransport(self.transport, self.loop)
        self.cycle.transport = cast("asyncio.Transport", response)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._await(_Awaited.NOTHING)
        super().on_message_complete()

    # Time

    def _await(self, awaited: _Awaited) -> None:
        """Note the next part of the request. Most requests arrive complete, so a pending alarm is
        not moved: when it fires, it checks the part that is awaited then."""
        self._awaited = awaited
        self._began_at = self._received_at = self.loop.time()
        if self._alarm is None and awaited is not _Awaited.NOTHING:
            self._set_alarm(self._began_at)

    def _set_alarm(self, now: float) -> None:
        pause_s = min(self.limits.head_timeout, self.limits.body_idle_timeout)
        self._alarm = self.loop.call_at(min(self._due(), now + pause_s), self._on_alarm)

    def _due(self) -> float:
        limits = self.limits
        if self._awaited is _Awaited.HEAD:
            return self._began_at + limits.head_timeout
        idle = self._received_at + limits.body_idle_timeout
        return min(idle, self._began_at + limits.body_timeout)

    def _on_alarm(self) -> None:
        self._alarm = None
        if self._awaited is _Awaited.NOTHING or self.transport.is_closing():
            return
        now = self.loop.time()
        if self._is_waited_for():
            self._began_at = self._received_at = now
        if self._due() <= now:
            self._refuse(*_TOO_SLOW)
        else:
            self._set_alarm(now)

    def _is_waited_for(self) -> bool:
        """Whether the client waits for the server: reading is paused, or an earlier request is not
        answered yet."""
        if self._awaited is _Awaited.BODY:
            return self.flow.read_paused
        return self.cycle is not None and not self.cycle.response_complete

    # Answers that the client does not take

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.limits.answer_idle_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait until the client reads the rest.
        super().timeout_keep_alive_handler()

    # Refusal

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Close the connection. An error response is written first, unless the client could take it
        for the response to another request."""
        is_silent = status == _TOO_SLOW[0] and self._awaited is _Awaited.HEAD and not self._unparsed
        if not is_silent and not self._is_answering():
            self.transport.write(_answer(status, kind, message))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._await(_Awaited.NOTHING)
        self.transport.close()

    def _is_answering(self) -> bool:
        """Whether another response is pending or has begun on this connection."""
        if self.cycle is None:
            return False
        if self._awaited is _Awaited.BODY:
            return self.cycle.response_started or bool(self.pipeline)
        return not self.cycle.response_complete


def _answer(status: int, kind: str, message: str) -> bytes:
    body = orjson.dumps({"error": {"type": kind, "message": message}})
    retry = b"retry-after: 1\r\n" if status == _TOO_MANY[0] else b""
    return (
        b"%scontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
        % (
            STATUS_LINE[status],
            len(body),
            retry,
            body,
        )
    )


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The protocol class of a server with these limits."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits})
