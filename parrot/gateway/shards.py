"""Shards: on which of them the sessions of an application begin, so that they share what its
engines keep, and the way of requests to the shard that has what they ask for."""

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
"""The header of requests that were handed on."""
LOAD = "x-parrot-load"
"""The header that says how full the shard is that was asked."""
STAYS = "parrot_stays"
"""Set in the scope of a request that none of its homes has taken."""
_MOST_TIMES, _MOST_MORE, _MOST_KV = 1.25, 16, 50
_NUM_HOMES = 3
logger = logging.getLogger(__name__)
_CONNECT_S = 5.0
_PROBE_S = 10.0
_OWN = frozenset({b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"te"})
"""Headers of a connection, not of what goes over it."""
_ANSWERS_OWN = _OWN | {b"date", b"server", b"x-request-id", b"request-id"}
"""The same, and those that each server adds to every answer."""
_NOT_TAKEN = (HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE)
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def homes(tenant: str, app: str, cores: Sequence[str]) -> list[int]:
    """The shards of a tenant's application, by rendezvous hashing: those whose addresses have the
    greatest hashes together with both, the greatest first. With one shard more, or less, few
    applications move."""

    def weight(index: int) -> bytes:
        return sha256("\0".join((tenant, app, cores[index])).encode(errors="replace")).digest()

    return nlargest(_NUM_HOMES, range(len(cores)), key=weight)


class ShardLoad(NamedTuple):
    """How full a shard is: its sessions, its calls, which run or wait, and the percentage of its
    engines' KV that contexts of live sessions have. None says anything of the others: short
    sessions are few at a time, however many calls they make, and an agent has more KV than many
    chats."""

    sessions: int
    calls: int
    kv: int

    @classmethod
    def parse(cls, header: str) -> Self | None:
        """None if it is no load."""
        numbers = header.split()
        if len(numbers) != len(cls._fields) or not all(map(str.isdecimal, numbers)):
            return None
        return cls(*(int(number[:9]) for number in numbers))

    @property
    def header(self) -> bytes:
        return b"%d %d %d" % self

    def yields_to(self, asked: "ShardLoad") -> bool:
        """Whether a shard leaves new sessions of its applications to others, since it has much more
        sessions or calls than the one that was asked, or little KV left, and less."""
        counts = ((self.sessions, asked.sessions), (self.calls, asked.calls))
        has_more = any(own > _MOST_TIMES * its + _MOST_MORE for own, its in counts)
        return has_more or self.kv > max(_MOST_KV, asked.kv)


class Affinity:
    """Sends what begins a session to the first of its application's shards that is not much fuller
    than the shard that was asked. `load` says how full this one is."""

    def __init__(self, shard: Shard, cores: Sequence[str], load: Callable[[], ShardLoad]) -> None:
        self._shard = shard
        self._cores = cores
        self._load = load

    def check(self, request: Request, tenant: str, apps: Sequence[str]) -> None:
        """Whether the session may begin here: raises `ElsewhereError` if other shards come first,
        and `MisdirectedRequest` if it was sent on to this one, which is much fuller."""
        if FORWARDED in request.headers:
            asked = ShardLoad.parse(request.headers.get(LOAD, ""))
            if asked is not None and self._load().yields_to(asked):
                raise MisdirectedRequest("this shard is much fuller than the one asked first")
        elif apps and STAYS not in request.scope:
            found, own = homes(tenant, apps[0], self._cores), self._shard.index
            if before := found[: found.index(own)] if own in found else found:
                raise ElsewhereError(*before, may_stay=True)


def load_of(core: ServeCore) -> ShardLoad:
    num_placed = sum(core.fleet.load(engine) for engine in core.fleet)
    kv = round(100 * core.fleet.session_kv_fraction)
    return ShardLoad(len(core.sessions), core.num_queued + num_placed, kv)


def placed(core: ServeCore, cores: Sequence[str], endpoint: Endpoint) -> Endpoint:
    """The endpoint, of which each session that it begins, if it does, has its place on its
    application's shard."""
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
    """Answers what `app` has, and hands on to another shard what that has, unchanged in both
    directions, streams as they come.

    A request that was handed on once is not again: then the shards disagree, and it gets
    `MisdirectedRequest`. One to a shard that does not answer gets `Unavailable`, as does one whose
    body is too large for what is left of `max_body_memory`: it counts till the answer begins. What
    may stay here stays where each of the other shards gives no answer, or says that it cannot take
    it now."""

    def __init__(
        self,
        app: ASGIApp,
        urls: Sequence[str],
        load: Callable[[], ShardLoad] = lambda: ShardLoad(0, 0, 0),
    ) -> None:
        """`urls`: of all shards, in order. `load`: how full this one is."""
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
            if any(name == FORWARDED.encode() for name, _ in scope["headers"]):
                text = f"shard {error.shards[0]} should have it: this server's `shards` are not its"
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
        """Hand on what may stay here, and was read to its end, to the first that takes it."""
        whole, has_begun = body.whole(), False
        headers = [(name, value) for name, value in scope["headers"] if name != LOAD.encode()]
        offer = {**scope, "headers": [*headers, (LOAD.encode(), self._load().header)]}

        async def sending(message: Message) -> None:
            nonlocal has_begun
            if message.get("status") in _NOT_TAKEN:
                raise Unavailable("it does not take it")
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
                logger.info("shard %d should have what begins here: %s", shard, error.message)
        body.put_back(whole)
        await self._app({**scope, STAYS: True}, body.again(), send)

    async def _forward(
        self, shard: int, scope: Scope, body: "_Body", send: Send, lease: BodyLease
    ) -> None:
        exchange = self._probes[shard].guard(self._exchange(shard, scope, body, send, lease))
        working = asyncio.ensure_future(exchange)
        leaving = asyncio.ensure_future(body.left())
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
        replaced = _OWN | {b"x-request-id"}
        headers = [(n.decode(), _text(v)) for n, v in scope["headers"] if n not in replaced]
        headers += [(FORWARDED, "1"), ("x-request-id", scope["request_id"])]
        has_begun = False
        try:
            async with self._session().request(
                scope["method"],
                url,
                headers=headers,
                data=body.whole() if body.is_whole else body.pieces(),
                skip_auto_headers=_ADDED,
                allow_redirects=False,
            ) as answer:
                lease.hold(0)  # the body was sent
                kept = [(n, v) for n, v in answer.raw_headers if n.lower() not in _ANSWERS_OWN]
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
        """Raises `Unavailable` if the shard does not tell its health."""
        try:
            async with asyncio.timeout(_CONNECT_S), self._session().get(f"{url}/health"):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{url} does not answer: {error or type(error)}") from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the server's own limits hold
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http


def _text(value: bytes) -> str:
    """The value of a header; aiohttp writes it as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class _Body:
    """A request's body, of which what was read is kept until an answer begins, or is waited for:
    who has what is asked for is known before."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[bytes] = []
        self.is_whole = False
        self._ended = asyncio.Event()

    @property
    def num_kept(self) -> int:
        """Bytes that were read, and not yet handed on."""
        return sum(map(len, self._read))

    async def receive(self) -> Message:
        if self.is_whole:  # it is asked whether the client has left
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

    def again(self) -> Receive:
        """Give what was read to another reader, who then hears whether the client has left."""
        messages = [{"type": "http.request", "body": self.whole() or b""}]

        async def receive() -> Message:
            return messages.pop() if messages else await self._receive()

        return receive

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what was read, and the rest as it comes. Raises `ConnectionError` if the client
        leaves."""
        for piece in self._read:
            yield piece
        while not self.is_whole:
            self._read.clear()
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client left")
            yield self._read[-1]

    async def left(self) -> None:
        """Wait until the client has left."""
        await self._ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
