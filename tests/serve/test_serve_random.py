"""Random programs with the whole ServeCore on virtual time submit, read, cancel and abandon calls.
Every read ends, and all internal counts are correct."""

import asyncio
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    Conflict,
    CyclicGraph,
    EngineFailed,
    SessionGone,
    TimedOut,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest, SessionCreateRequest, VarGetRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.readers import WAKE_DELAY_S
from tests.support.held_world import BROKEN, Held, held_engine
from tests.support.manual_clock import ManualClock
from tests.support.requests import made, taken, var_ids

LIFE_SPAN_S = 60.0
EXPECTED = (EngineFailed, TimedOut, Cancelled, SessionGone)


class Program:
    """Takes random steps, like several programs in one session."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.clock = ManualClock()
        self.engine = held_engine()
        config = CoreConfig(session_life_span=LIFE_SPAN_S, engine_heartbeat_timeout=1e9)
        dispatcher = Dispatcher(config, self.clock, lambda info: self.engine)
        self.core = ServeCore(config, clock=self.clock, dispatcher=dispatcher)
        session = self.core.create_session(SessionCreateRequest())
        self.scope: dict[str, Any] = session.model_dump()
        self.var_ids: list[str] = []
        self.reads: list[asyncio.Task[str]] = []

    async def join(self) -> None:
        await self.core.register_engine(RegisterRequest(engine_config=self.engine.info))

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def some_var(self) -> str:
        return self.var_ids[self.draw(0, len(self.var_ids) - 1)]

    def some_call(self) -> Held:
        return self.engine.held[self.draw(0, len(self.engine.held) - 1)]

    async def step(self) -> None:
        steps = [self.create, self.call]
        if self.var_ids:
            steps += [self.call, self.read, self.read, self.stream, self.set, self.cancel]
        if self.engine.held:
            steps += [self.finish, self.finish, self.fail]
        if self.reads:
            steps += [self.abandon]
        steps += [self.wait]
        await steps[self.draw(0, len(steps) - 1)]()
        await self.clock.advance(0)
        self.core.check_integrity()

    async def create(self) -> None:
        self.var_ids.append(self.core.create_var(*self.scope.values(), "v", None))

    async def call(self) -> None:
        count = min(len(self.var_ids), self.draw(0, 3))
        parameters = [taken(f"i{n}", self.some_var()) for n in range(count)]
        template = "t" + "".join(f"{{{{{p['name']}}}}}" for p in parameters) + "{{o}}"
        premade = self.some_var() if self.var_ids and self.draw(0, 2) == 0 else None
        body = self.scope | {"template": template, "parameters": [*parameters, made("o", premade)]}
        if self.draw(0, 3) == 0:
            body["output_criteria"] = "latency"
        try:
            response = self.core.submit_call(SemanticCallRequest.model_validate(body))
        except (CyclicGraph, AlreadySet, Conflict):
            return
        self.var_ids.append(var_ids(response)["o"])

    def request(self) -> VarGetRequest:
        criteria = list(PerformanceCriteria)[self.draw(0, 3)]
        timeout = [None, 1.0, 20.0, 200.0][self.draw(0, 3)]
        return VarGetRequest(**self.scope, criteria=criteria, timeout=timeout)

    async def read(self) -> None:
        async def text(request: VarGetRequest, var_id: str) -> str:
            return (await self.core.read(request, var_id)).content

        self.reads.append(asyncio.ensure_future(text(self.request(), self.some_var())))

    async def stream(self) -> None:
        async def collect() -> str:
            return "".join([text async for text in deltas])

        deltas = self.core.stream(self.request(), self.some_var())
        self.reads.append(asyncio.ensure_future(collect()))

    async def set(self) -> None:
        with suppress(AlreadySet, Conflict):
            self.core.set_var(*self.scope.values(), self.some_var(), "text")

    async def cancel(self) -> None:
        self.core.cancel_var(*self.scope.values(), self.some_var())

    async def finish(self) -> None:
        call = self.some_call()
        if call.on_chunk is not None:
            self.engine.stream(call, "begin")
        self.engine.answer(call, "begin and end")

    async def fail(self) -> None:
        self.some_call().answer.set_exception(BROKEN)

    async def abandon(self) -> None:
        read = self.reads.pop(self.draw(0, len(self.reads) - 1))
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)

    async def wait(self) -> None:
        await self.clock.advance([0.1, 5.0, 30.0][self.draw(0, 2)])

    async def end(self) -> None:
        """Let every engine finish its work, including background work, and let time pass."""
        await self.clock.advance(2 * WAKE_DELAY_S)
        while self.engine.held:
            await self.finish()
            await self.clock.advance(2 * WAKE_DELAY_S)
        await self.clock.advance(200 + 2 * LIFE_SPAN_S)
        for read in self.reads:
            assert read.done()
            if (error := read.exception()) is not None:
                assert isinstance(error, EXPECTED), error
            else:
                assert read.result() in ("text", "begin and end")
        self.core.check_integrity()
        assert not self.engine.held
        assert len(self.core.sessions) == 0
        assert len(self.core._timers) == 0

    async def clean_up(self) -> None:
        """Cancel all tasks, because Hypothesis may end a program in the middle."""
        for read in self.reads:
            read.cancel()
        await asyncio.gather(*self.reads, return_exceptions=True)
        await self.core.close()


@settings(max_examples=100)
@given(st.data())
async def test_every_read_ends(data: st.DataObject) -> None:
    program = Program(data)
    await program.join()
    try:
        with suppress(SessionGone):  # the session may expire meanwhile
            for _ in range(data.draw(st.integers(1, 25))):
                await program.step()
        await program.end()
    finally:
        await program.clean_up()
