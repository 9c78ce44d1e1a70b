"""A program's handle of a semantic variable: text that is there now or will be later."""

import queue
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from parrot.frontend.pfunc.metadata import parse_criteria
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import AlreadySet, Cancelled, InvalidRequest

if TYPE_CHECKING:
    from parrot.frontend.pfunc.session import Session

_THROUGHPUT = PerformanceCriteria.THROUGHPUT
_LATENCY = PerformanceCriteria.LATENCY


class CurrentSession:
    """The session that calls go to: that of the innermost scope of this context, else the one that
    was made the whole process's, for threads and notebook cells, which have contexts of their own.
    """

    def __init__(self) -> None:
        self._scoped: ContextVar[Session | None] = ContextVar("parrot_session", default=None)
        self._global: Session | None = None

    def get(self) -> "Session | None":
        return self._scoped.get() or self._global

    @contextmanager
    def scope(self, session: "Session") -> Iterator[None]:
        token = self._scoped.set(session)
        try:
            yield
        finally:
            self._scoped.reset(token)

    def set_global(self, session: "Session | None") -> None:
        self._global = session


current_session = CurrentSession()


class SemanticVariable:
    """Write-once text. A read makes ServeCore produce it, and everything it needs; a value that was
    read once is kept here. It may be used from any thread and any event loop.

    All reads raise the error with which its producer failed (parrot.protocol.errors), `TimedOut`
    after `timeout` seconds, `SessionGone` once its session has ended. `deadline`: in how many
    seconds the value is wanted, for the service to order its work by; the read goes on after it."""

    __slots__ = ("_content", "_id", "_is_cancelled", "_session", "name")

    def __init__(self, name: str | None = None, content: str | None = None) -> None:
        self.name = name if name is not None else f"var_{secrets.token_hex(4)}"
        self._content = content
        self._is_cancelled = False
        self._id: str | None = None
        self._session: Session | None = None

    def __repr__(self) -> str:
        content = "" if self._content is None else f", content={self._content!r}"
        return f"SemanticVariable(name={self.name!r}, id={self._id!r}{content})"

    @property
    def id(self) -> str | None:
        """Its id in ServeCore; None while it is not registered there."""
        return self._id

    @property
    def content(self) -> str | None:
        """The value as far as this program knows; None before the first read. Never waits."""
        return self._content

    @property
    def session(self) -> "Session | None":
        return self._session

    @property
    def is_registered(self) -> bool:
        """Whether a session of ServeCore knows it."""
        return self._id is not None

    @property
    def is_ready(self) -> bool:
        """Whether `content` is known here."""
        return self._content is not None

    def attach(self, session: "Session", var_id: str) -> None:
        """For the session that registered it."""
        self._session = session
        self._id = var_id

    def settle(self, content: str) -> None:
        """For the session that read it."""
        self._content = content

    def set(self, content: str) -> None:
        """Give it its value. Raises `AlreadySet` if it has one or a call produces it."""
        if not isinstance(content, str):
            raise TypeError(f"a variable takes a str, not {type(content).__name__}")
        if self._content is not None:
            raise AlreadySet(f"variable `{self.name}` is already set")
        if self._session is not None:
            self._session.run(self._session.set(self, content))
        self._content = content

    def get(
        self,
        criteria: PerformanceCriteria | str = _THROUGHPUT,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> str:
        """Wait for the value."""
        if self._content is not None:
            return self._content
        session = self.live_session()
        return session.run(session.read(self, parse_criteria(criteria), timeout, deadline))

    async def aget(
        self,
        criteria: PerformanceCriteria | str = _THROUGHPUT,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> str:
        """Wait for the value. Cancelling withdraws the read."""
        if self._content is not None:
            return self._content
        session = self.live_session()
        return await session.arun(session.read(self, parse_criteria(criteria), timeout, deadline))

    def stream(
        self,
        criteria: PerformanceCriteria | str = _LATENCY,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> Iterator[str]:
        """The value in pieces as it is generated, from its beginning. Leaving the loop early
        withdraws the read."""
        if self._content is not None:
            yield from (self._content,) if self._content else ()
            return
        session = self.live_session()
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        future = session.start(
            session.stream(self, parse_criteria(criteria), timeout, deadline, pieces.put)
        )
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            session.result(future)
        finally:
            future.cancel()

    async def astream(
        self,
        criteria: PerformanceCriteria | str = _LATENCY,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[str]:
        """As `stream`. To withdraw the read at a certain moment, close the iterator (`aclose`)."""
        if self._content is not None:
            if self._content:
                yield self._content
            return
        import asyncio

        session = self.live_session()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        put = _from_other_thread(pieces.put_nowait)
        future = session.start(
            session.stream(self, parse_criteria(criteria), timeout, deadline, put)
        )
        future.add_done_callback(lambda _: put(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            session.result(future)
        finally:
            future.cancel()

    def cancel(self) -> None:
        """Stop producing it; all its readers, here and elsewhere, get `Cancelled`. Does nothing to
        a value that is there."""
        if self._session is not None:
            self._session.run(self._session.cancel(self))
        else:
            self._is_cancelled = self._content is None

    def live_session(self) -> "Session":
        """Where to read it. Raises `InvalidRequest` if nobody will produce it."""
        if self._is_cancelled:
            raise Cancelled(f"variable `{self.name}` was cancelled")
        if self._session is None:
            raise InvalidRequest(
                f"variable `{self.name}` has no value and belongs to no session: "
                "make it inside vm.running_scope() or vm.run(), or set it"
            )
        return self._session


def _from_other_thread(
    put: Callable[[str | None], None],
) -> Callable[[str | None], None]:
    """`put`, to be called from outside the running event loop."""
    from asyncio import get_running_loop

    loop = get_running_loop()

    def put_threadsafe(piece: str | None) -> None:
        with suppress(RuntimeError):  # the reader's loop is closed: nobody listens any more
            loop.call_soon_threadsafe(put, piece)

    return put_threadsafe
