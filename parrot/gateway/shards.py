"""Shards: chooses the shard on which an application's sessions begin, so that they share their
engines' KV, and forwards requests to the shard that owns their session."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from hashlib import sha256
from heapq import nlargest
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import aiohttp
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from parrot.protocol.bodies import BodyBudget, BodyLease
from parrot.protocol.endpoint import Endpoint
from parrot.protocol.errors import MisdirectedRequest, Unavailable
from parrot.protocol.failover_client import LivenessProbe
from parrot.protocol.public import GraphRequest, SessionCreateRequest
from parrot.serve.core import ServeCore
from parrot.utils.shard import ElsewhereError, Shard

FORWARDED = "x-parrot-forwarded"
"""The header of requests that another shard has forwarded."""
LOAD = "x-parrot-load"
"""The header with the load of the shard that received the request first."""
STAYS = "parrot_stays"
"""Set in a request's scope after all its home shards have declined it."""
# A home shard declines a session if it has more sessions or calls than 1.25 times those of the
# asking shard plus 16, or if more than 50% of its engines' KV is in use and more than the other's.
_MAX_LOAD_RATIO, _MAX_EXTRA_LOAD, _MAX_KV_PERCENT = 1.25, 16, 50
_NUM_HOMES = 3  # Shards of one application. More spread its load, but share less KV.
logger = logging.getLogger(__name__)
_CONNECT_S = 5.0  # Seconds to connect to another shard.
_PROBE_S = 10.0  # Seconds between health checks of a shard while requests wait for it.
_HOP_HEADERS = frozenset(
    {b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"te"}
)
"""Headers that belong to one connection, and are not forwarded."""
_ANSWER_HEADERS = _HOP_HEADERS | {b"date", b"server", b"x-request-id", b"request-id"}
"""Headers of an answer that are not forwarded, because each server adds its own."""
_DECLINED = (HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE)
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # aiohttp adds them.


def homes(tenant: str, app: str, cores: Sequence[str]) -> list[int]:
    """The home shards of a tenant's application, best first, by rendezvous hashing. When a shard is
    added or removed, only few applications move."""

    def weight(index: int) -> bytes:
        return sha256("\0".join((tenant, app, cores[index])).encode(errors="replace")).digest()

    return nlargest(_NUM_HOMES, range(len(cores)), key=weight)


class ShardLoad(NamedTuple):
    """The load of a shard. All three are needed: short sessions are few at a time, however many
    calls they make, and one agent may use more KV than many chats."""

    sessions: int  # live sessions
    calls: int  # running and queued calls
    kv: int  # percentage of the engines' KV that contexts of live sessions use

    @classmethod
    def parse(cls, header: str) -> Self | None:
        """The load in a header; None if the header is invalid."""
        numbers = header.split()
        if len(numbers) != len(cls._fields) or not all(map(str.isdecimal, numbers)):
            return None
        return cls(*(int(number[:9]) for number in numbers))

    @property
    def header(self) -> bytes:
        return b"%d %d %d" % self

    def declines_for(self, asked: "ShardLoad") -> bool:
        """Whether this shard declines new sessions in favor of `asked`: it has many more sessions
        or calls, or more than 50% of its KV in use and more than `asked`."""
        counts = ((self.sessions, asked.sessions), (self.calls, asked.calls))
        has_more = any(own > _MAX_LOAD_RATIO * its + _MAX_EXTRA_LOAD for own, its in counts)
        return has_more or self.kv > max(_MAX_KV_PERCENT, asked.kv)


class Affinity:
    """Sends new sessions to their application's first home shard that is not much more loaded than
    the shard that received the request."""

    def __init__(self, shard: Shard, cores: Sequence[str], load: Callable[[], ShardLoad]) -> None:
        self._shard = shard
        self._cores = cores
        self._load = load

    def check(self, request: Request, tenant: str, apps: Sequence[str]) -> None:
        """Return if the session may begin here. Raises `ElsewhereError` if other home shards come
        first, and `MisdirectedRequest` to decline a forwarded session."""
        if FORWARDED in request.headers:
            asked = ShardLoad.parse(request.headers.get(LOAD, ""))
            if asked is not None and self._load().declines_for(asked):
                raise MisdirectedRequest("this shard has a much higher load than the first choice")
        elif apps and STAYS not in request.scope:
            found, own = homes(tenant, apps[0], self._cores), self._shard.index
            if before := found[: found.index(own)] if own in found else found:
                raise ElsewhereError(*before, may_stay=True)


def load_of(core: ServeCore) -> ShardLoad:
    num_placed = sum(core.fleet.num_requests(engine) for engine in core.fleet)
    kv = round(100 * core.fleet.session_kv_fraction)
    return ShardLoad(len(core.sessions), core.num_queued + num_placed, kv)


def on_home_shard(core: ServeCore, cores: Sequence[str], endpoint: Endpoint) -> Endpoint:
    """The endpoint, with new sessions placed on the home shards of their application."""
    if endpoint.takes not in (SessionCreateRequest, GraphRequest):
        return endpoint
    affinity = Affinity(core.config.shard, cores, lambda: load_of(core))

    def check(request: Request, arguments: dict[str, Any]) -> None:
        asked = arguments["request"]
        session = asked.begins() if isinstance(asked, GraphRequest) else asked
        if session is not None:
            tenant = core.tenant(session.api_key)
            affinity.check(request, tenant, session.apps or ())

    return endpoint.stepping(check)


class Forwarding:
    """Passes requests to `app`, and forwards requests for other shards' objects, at most once. Both
    directions are streamed. A request fails with `Unavailable` if the shard does not answer, or if
    its body exceeds the rest of `max_body_memory`. A new session begins here if all its home shards
    decline or fail."""

    def __init__(
        self,
        app: ASGIApp,
        urls: Sequence[str],
        load: Callable[[], ShardLoad] = lambda: ShardLoad(0, 0, 0),
    ) -> None:
        """`urls`: the addresses of all shards, in order. `load`: this shard's load."""
        self._app = app
        self._load = load
        self._urls = urls
        self._probes = [LivenessProbe(partial(self._ask, url), _PROBE_S) for url in urls]
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive)
        try:
            await self._app(scope, body.receive, body.until_answered(send))
        except ElsewhereError as error:
            # Forwarding a request twice could loop: the shards' lists differ.
            if any(name == FORWARDED.encode() for name, _ in scope["headers"]):
                text = f"belongs to shard {error.shards[0]}: all shards need equal `shards.cores`"
                raise MisdirectedRequest(text) from None
            budget: BodyBudget = scope["app"].state.body_budget
            with budget.lease() as lease:
                lease.hold(body.num_kept)
                if error.may_stay:
                    await self._offer(error.shards, scope, body, send, lease)
                else:
                    await self._forward(error.shards[0], scope, body, send, lease)

    async def _offer(
        self, shards: Sequence[int], scope: Scope, body: "_Body", send: Send, lease: BodyLease
    ) -> None:
        """Offer a request that may stay here to the shards in order, until one accepts it."""
        whole, has_begun = body.whole(), False
        headers = [(name, value) for name, value in scope["headers"] if name != LOAD.encode()]
        offer = {**scope, "headers": [*headers, (LOAD.encode(), self._load().header)]}

        async def sending(message: Message) -> None:
            nonlocal has_begun
            if message.get("status") in _DECLINED:
                raise Unavailable("the shard declined the session")
            has_begun = True
            await send(message)

        for shard in shards:
            body.put_back(whole)
            try:
                await self._forward(shard, offer, body, sending, lease)
                return
            except Unavailable as error:
                if has_begun:
                    raise
                logger.info("shard %d did not accept a new session: %s", shard, error.message)
        body.put_back(whole)
        await self._app({**scope, STAYS: True}, body.replay(), send)

    async def _forward(
        self, shard: int, scope: Scope, body: "_Body", send: Send, lease: BodyLease
    ) -> None:
        exchange = self._probes[shard].guard(self._exchange(shard, scope, body, send, lease))
        working = asyncio.ensure_future(exchange)
        leaving = asyncio.ensure_future(body.disconnected())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _exchange(
        self, shard: int, scope: Scope, body: "_Body", send: Send, lease: BodyLease
    ) -> None:
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        url = URL(self._urls[shard] + target.decode("latin-1"), encoded=True)
        replaced = _HOP_HEADERS | {b"x-request-id"}
        headers = [(n.decode(), _text(v)) for n, v in scope["headers"] if n not in replaced]
        headers += [(FORWARDED, "1"), ("x-request-id", scope["request_id"])]
        has_begun = False
        try:
            async with self._session().request(
                scope["method"],
                url,
                headers=headers,
                data=body.whole() if body.is_whole else body.pieces(),
                skip_auto_headers=_AUTO_HEADERS,
                allow_redirects=False,
            ) as answer:
                lease.hold(0)  # The body was sent.
                kept = [(n, v) for n, v in answer.raw_headers if n.lower() not in _ANSWER_HEADERS]
                has_begun = True
                begin = {"type": "http.response.start", "status": answer.status, "headers": kept}
                await send(begin)
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if has_begun:
                raise
            raise Unavailable(f"shard {shard} does not answer: {error or type(error)}") from error

    async def _ask(self, url: str) -> None:
        """Raises `Unavailable` if the shard does not answer `/health`."""
        try:
            async with asyncio.timeout(_CONNECT_S), self._session().get(f"{url}/health"):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{url} does not answer: {error or type(error)}") from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # The server limits connections itself.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http


def _text(value: bytes) -> str:
    """The value of a header, as a string that aiohttp encodes as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class _Body:
    """A request's body. The bytes that `app` has read are kept until the answer begins, so that the
    request can still be forwarded."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[bytes] = []
        self.is_whole = False
        self._ended = asyncio.Event()

    @property
    def num_kept(self) -> int:
        """Bytes that are kept in memory."""
        return sum(map(len, self._read))

    async def receive(self) -> Message:
        if self.is_whole:  # The app now waits for a disconnect.
            self._read.clear()
        message = await self._receive()
        if message["type"] == "http.request":
            self._read.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_whole = True
                self._ended.set()
        return message

    def until_answered(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            self._read.clear()
            await send(message)

        return sending

    def whole(self) -> bytes | None:
        body = b"".join(self._read)
        self._read.clear()
        return body or None

    def put_back(self, whole: bytes | None) -> None:
        self._read = [whole or b""]

    def replay(self) -> Receive:
        """A `receive` with the kept body, for a second attempt; then it reports a disconnect."""
        messages = [{"type": "http.request", "body": self.whole() or b""}]

        async def receive() -> Message:
            return messages.pop() if messages else await self._receive()

        return receive

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the kept bytes, and then the rest as it arrives. Raises `ConnectionError` if the
        client disconnects."""
        for piece in self._read:
            yield piece
        while not self.is_whole:
            self._read.clear()
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client disconnected")
            yield self._read[-1]

    async def disconnected(self) -> None:
        """Wait until the client disconnects."""

        await self._ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
