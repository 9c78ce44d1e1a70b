"""The way of requests to the shard that has what they ask for."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from http import HTTPStatus

import aiohttp
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from parrot.protocol.endpoint import BodyBudget, BodyLease
from parrot.protocol.errors import MisdirectedRequest, Unavailable
from parrot.protocol.failover_client import LivenessProbe
from parrot.serve.shards.affinity import FORWARDED, LOAD, STAYS, Load
from parrot.utils.shard import ElsewhereError

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_PROBE_S = 10.0
_OWN = frozenset({b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"te"})
"""Headers of a connection, not of what goes over it."""
_ANSWERS_OWN = _OWN | {b"date", b"server", b"x-request-id", b"request-id"}
"""The same, and those that each server adds to every answer."""
_NOT_TAKEN = (HTTPStatus.MISDIRECTED_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE)
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class Forwarding:
    """Answers what `app` has, and hands on to another shard what that has, unchanged in both
    directions, streams as they come.

    A request that was handed on once is not again: then the shards disagree, and it gets
    `MisdirectedRequest`. One to a shard that does not answer gets `Unavailable`, as does one whose
    body is too large for what is left of `max_body_memory`: it counts till the answer begins. What
    may stay here stays where each of the other shards gives no answer, or says that it cannot take
    it now."""

    def __init__(
        self, app: ASGIApp, urls: Sequence[str], load: Callable[[], Load] = lambda: Load(0, 0, 0)
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
