"""Connections with limits: uvicorn's protocol has none for how long a request may take to come, or
how long its head may be."""

import asyncio
from enum import Enum
from typing import ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from parrot.protocol.gate.config import ConnectionLimits

_TOO_MANY = 503, "unavailable", "too many connections"
_TOO_SLOW = 408, "request_timeout", "the request did not come in time"
_HEAD_TOO_LONG = 431, "request_header_fields_too_large", "the request's head is too long"


class _Awaited(Enum):
    """The part of a request that comes next; NOTHING also while the client waits for an answer."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class GuardedProtocol(HttpToolsProtocol):
    """One connection. It is closed when a head or a body is late, a head is too long, or too many
    others are open; then no byte of the request is kept. It is cut when the client does not take
    the answer."""

    limits: ClassVar = ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unused = 0  # bytes since the last that were a whole head, or a body's
        self._alarm: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None  # rings when the client takes too little
        self._await(_Awaited.HEAD)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(*_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(_Awaited.NOTHING)
        if self._alarm is not None:
            self._alarm.cancel()
        if self._untaken is not None:
            self._untaken.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._awaited is _Awaited.NOTHING:
            self._await(_Awaited.HEAD)
        self._unused += len(data)
        self._heard_at = self.loop.time()
        super().data_received(data)
        if self._unused > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(*_HEAD_TOO_LONG)

    def on_message_begin(self) -> None:
        self._await(_Awaited.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unused = 0
        self._await(_Awaited.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused = 0
        self._await(_Awaited.NOTHING)
        super().on_message_complete()

    # Time

    def _await(self, awaited: _Awaited) -> None:
        """Most requests come whole, so the alarm is only set if there is none: when it rings it
        looks at what is awaited then."""
        self._awaited = awaited
        self._began_at = self._heard_at = self.loop.time()
        if self._alarm is None and awaited is not _Awaited.NOTHING:
            self._set_alarm(self._began_at)

    def _set_alarm(self, now: float) -> None:
        pause_s = min(self.limits.head_timeout, self.limits.body_idle_timeout)
        self._alarm = self.loop.call_at(min(self._due(), now + pause_s), self._look)

    def _due(self) -> float:
        limits = self.limits
        if self._awaited is _Awaited.HEAD:
            return self._began_at + limits.head_timeout
        idle = self._heard_at + limits.body_idle_timeout
        return min(idle, self._began_at + limits.body_timeout)

    def _look(self) -> None:
        self._alarm = None
        if self._awaited is _Awaited.NOTHING or self.transport.is_closing():
            return
        now = self.loop.time()
        if self._is_waited_for():
            self._began_at = self._heard_at = now
        if self._due() <= now:
            self._refuse(*_TOO_SLOW)
        else:
            self._set_alarm(now)

    def _is_waited_for(self) -> bool:
        """Whether the client waits: we do not read, or have not answered what came before."""
        if self._awaited is _Awaited.BODY:
            return self.flow.read_paused
        return self.cycle is not None and not self.cycle.response_complete

    # Answers that the client does not take

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(self.limits.answer_idle_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for the client to take the rest
        super().timeout_keep_alive_handler()

    # Refusal

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Close the connection. The answer is written where the client can take it for nothing but
        the answer of the request that it sends."""
        is_silent = status == _TOO_SLOW[0] and self._awaited is _Awaited.HEAD and not self._unused
        if not is_silent and not self._is_answering():
            self.transport.write(_answer(status, kind, message))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._await(_Awaited.NOTHING)
        self.transport.close()

    def _is_answering(self) -> bool:
        """Whether an answer is due or under way that is not that of the request that comes now."""
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
