"""A program's client of a ServeCore in the same process, at any distance."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    ModelsResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionCreateResponse,
    SessionInfo,
    VarGetRequest,
    VarInfo,
    VarValue,
)
from parrot.protocol.serve_client import ServeClient
from parrot.serve.core import ServeCore
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
        self, api_key: str | None = None, apps: list[str] | None = None
    ) -> SessionCreateResponse:
        way_s = await self._go()
        created = self._core.create_session(SessionCreateRequest(api_key=api_key, apps=apps))
        await asyncio.sleep(way_s)
        return created

    async def session_info(self, session_id: int, session_auth: str) -> SessionInfo:
        way_s = await self._go()
        info = self._core.session_info(session_id, session_auth)
        await asyncio.sleep(way_s)
        return info

    async def delete_session(self, session_id: int, session_auth: str) -> None:
        way_s = await self._go()
        self._core.delete_session(session_id, session_auth)
        await asyncio.sleep(way_s)

    async def semantic_call(self, request: SemanticCallRequest) -> CallResponse:
        way_s = await self._go()
        response = self._core.submit_call(request)
        await asyncio.sleep(way_s)
        return response

    async def native_call(self, request: NativeCallRequest) -> CallResponse:
        way_s = await self._go()
        response = self._core.submit_native(request)
        await asyncio.sleep(way_s)
        return response

    async def create_var(
        self, session_id: int, session_auth: str, var_name: str, content: str | None = None
    ) -> str:
        way_s = await self._go()
        var_id = self._core.create_var(session_id, session_auth, var_name, content)
        await asyncio.sleep(way_s)
        return var_id

    async def list_vars(self, session_id: int, session_auth: str) -> list[VarInfo]:
        way_s = await self._go()
        response = self._core.list_vars(session_id, session_auth)
        await asyncio.sleep(way_s)
        return response.vars

    async def set_var(self, session_id: int, session_auth: str, var_id: str, content: str) -> None:
        way_s = await self._go()
        self._core.set_var(session_id, session_auth, var_id, content)
        await asyncio.sleep(way_s)

    async def get_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> str:
        way_s = await self._go()
        content = await self._core.read(
            _read_request(session_id, session_auth, criteria, timeout_s, deadline_s), var_id
        )
        await asyncio.sleep(way_s)
        return content

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
        way_s = await self._go()
        response = await self._core.first(
            FirstVarsRequest(
                session_id=session_id,
                session_auth=session_auth,
                var_ids=list(var_ids),
                k=k,
                criteria=criteria,
                timeout=timeout_s,
                deadline=deadline_s,
            )
        )
        await asyncio.sleep(way_s)
        return response.values

    async def stream_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.LATENCY,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> AsyncIterator[str]:
        way_s = await self._go()
        request = _read_request(session_id, session_auth, criteria, timeout_s, deadline_s)
        loop = asyncio.get_running_loop()
        arriving: asyncio.Queue[tuple[float, str | Exception | None]] = asyncio.Queue()

        async def send() -> None:
            """Deltas follow each other on their way, as fast as they are made."""
            end: Exception | None = None
            try:
                async with aclosing(self._core.stream(request, var_id)) as deltas:
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
                    return
                yield event
        finally:
            sender.cancel()

    async def cancel_var(self, session_id: int, session_auth: str, var_id: str) -> None:
        way_s = await self._go()
        self._core.cancel_var(session_id, session_auth, var_id)
        await asyncio.sleep(way_s)

    async def cancel_request(self, session_id: int, session_auth: str, request_id: int) -> None:
        way_s = await self._go()
        self._core.cancel_call(session_id, session_auth, request_id)
        await asyncio.sleep(way_s)

    async def health(self) -> None:
        await asyncio.sleep(2 * await self._go())

    async def models(self) -> ModelsResponse:
        way_s = await self._go()
        response = self._core.models()
        await asyncio.sleep(way_s)
        return response

    async def _go(self) -> float:
        """Let the request travel; returns how long its answer will."""
        way_s = self._latency() / 2
        await asyncio.sleep(way_s)
        return way_s


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
