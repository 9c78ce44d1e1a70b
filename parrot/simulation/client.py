"""A program's client of a ServeCore in the same process, at any distance."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    ModelsResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionCreateResponse,
    SessionInfo,
    StreamDone,
    VarGetRequest,
    VarGetResponse,
    VarInfo,
    VarValue,
)
from parrot.protocol.serve_client import ServeClient
from parrot.serve.core import ServeCore
from parrot.serve.views import value_view
from parrot.simulation.links import Latency
from parrot.utils.tasks import TaskSet


class SimClient(ServeClient):
    """The methods of `ServeClient`; each request draws a round trip from `latency`, and half of it
    passes on either way. Cancelling a read withdraws it at once."""

    def __init__(self, core: ServeCore, latency: Latency) -> None:
        self._core = core
        self._latency = latency
        self._tasks = TaskSet()

    async def close(self) -> None:
        await self._tasks.close()

    async def create_session(
        self,
        api_key: str | None = None,
        apps: list[str] | None = None,
        *,
        on_demand: bool = False,
    ) -> SessionCreateResponse:
        request = SessionCreateRequest(api_key=api_key, apps=apps, on_demand=on_demand)
        async with self._exchange():
            return self._core.create_session(request)

    async def session_info(self, session_id: int, session_auth: str) -> SessionInfo:
        async with self._exchange():
            return self._core.session_info(session_id, session_auth)

    async def delete_session(self, session_id: int, session_auth: str) -> None:
        async with self._exchange():
            self._core.delete_session(session_id, session_auth)

    async def semantic_call(self, request: SemanticCallRequest) -> CallResponse:
        async with self._exchange():
            return self._core.programs.submit_call(request)

    async def native_call(self, request: NativeCallRequest) -> CallResponse:
        async with self._exchange():
            return self._core.programs.submit_native(request)

    async def create_var(
        self, session_id: int, session_auth: str, var_name: str, content: str | None = None
    ) -> str:
        async with self._exchange():
            return self._core.programs.create_var(session_id, session_auth, var_name, content)

    async def list_vars(self, session_id: int, session_auth: str) -> list[VarInfo]:
        async with self._exchange():
            return self._core.programs.list_vars(session_id, session_auth).vars

    async def set_var(self, session_id: int, session_auth: str, var_id: str, content: str) -> None:
        async with self._exchange():
            self._core.programs.set_var(session_id, session_auth, var_id, content)

    async def read_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> VarGetResponse:
        request = _read_request(session_id, session_auth, criteria, timeout_s, deadline_s)
        async with self._exchange():
            node = self._core.programs.node(request, var_id)
            await self._core.programs.read(request, var_id)
            return value_view(node)

    async def first_vars(
        self,
        session_id: int,
        session_auth: str,
        var_ids: Sequence[str],
        k: int = 1,
        criteria: PerformanceCriteria = PerformanceCriteria.LATENCY,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> list[VarValue]:
        request = FirstVarsRequest(
            session_id=session_id,
            session_auth=session_auth,
            var_ids=list(var_ids),
            k=k,
            criteria=criteria,
            timeout=timeout_s,
            deadline=deadline_s,
        )
        async with self._exchange():
            return (await self._core.programs.first(request)).values

    async def stream_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.LATENCY,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        on_done: Callable[[StreamDone], None] | None = None,
    ) -> AsyncIterator[str]:
        way_s = self._latency() / 2
        await asyncio.sleep(way_s)
        request = _read_request(session_id, session_auth, criteria, timeout_s, deadline_s)
        node = self._core.programs.node(request, var_id)
        loop = asyncio.get_running_loop()
        arriving: asyncio.Queue[tuple[float, str | Exception | None]] = asyncio.Queue()

        async def send() -> None:
            """Deltas follow each other on their way, as fast as they are made."""
            end: Exception | None = None
            try:
                async with aclosing(self._core.programs.stream(request, var_id)) as deltas:
                    async for delta in deltas:
                        arriving.put_nowait((loop.time() + way_s, delta))
            except Exception as error:  # noqa: BLE001 - it is the reader's
                end = error
            arriving.put_nowait((loop.time() + way_s, end))

        sender = self._tasks.spawn(send(), name=f"stream of {var_id}")
        try:
            while True:
                when, event = await arriving.get()
                await asyncio.sleep(max(0.0, when - loop.time()))
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    if on_done is not None:
                        on_done(StreamDone(**dict(value_view(node))))
                    return
                yield event
        finally:
            sender.cancel()

    async def cancel_var(self, session_id: int, session_auth: str, var_id: str) -> None:
        async with self._exchange():
            self._core.programs.cancel_var(session_id, session_auth, var_id)

    async def cancel_request(self, session_id: int, session_auth: str, request_id: int) -> None:
        async with self._exchange():
            self._core.programs.cancel_call(session_id, session_auth, request_id)

    async def health(self) -> None:
        async with self._exchange():
            pass

    async def models(self) -> ModelsResponse:
        async with self._exchange():
            return self._core.models()

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[None]:
        """The way there before the block, the way back after it, also for an error."""
        way_s = self._latency() / 2
        await asyncio.sleep(way_s)
        try:
            yield
        except ParrotError:
            await asyncio.sleep(way_s)
            raise
        await asyncio.sleep(way_s)


def _read_request(
    session_id: int,
    session_auth: str,
    criteria: PerformanceCriteria,
    timeout_s: float | None,
    deadline_s: float | None,
) -> VarGetRequest:
    return VarGetRequest(
        session_id=session_id,
        session_auth=session_auth,
        criteria=criteria,
        timeout=timeout_s,
        deadline=deadline_s,
    )
