"""Run a trace through an engine's HTTP server. Its answers do not depend on the timing of requests
and steps."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.service import RunnerService, ThreadDriver
from parrot.protocol.engine_api import (
    EmbedRequest,
    FillRequest,
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import Cancelled, ParrotError
from parrot.protocol.http import HttpClient
from parrot.utils.clock import MonotonicClock
from tests.fuzz.alone import echo
from tests.fuzz.checking import Checker
from tests.fuzz.drawing import BACKGROUND
from tests.fuzz.engines import FuzzedRunner, grammars, language, make_config, make_core
from tests.fuzz.expectations import Expectations, SentRequest
from tests.fuzz.hunting import TraceResult
from tests.fuzz.play import Following
from tests.fuzz.traces import NO_PARENT, Act, Ask, Trace
from tests.support.app_server import serve_app

_PATIENCE_S = 60.0
_MAX_PINGS = 2000


async def try_over_http(trace: Trace) -> TraceResult:
    tried = TraceResult()
    try:
        async with _opened(trace) as session:
            async with asyncio.timeout(_PATIENCE_S):
                await session.run()
            session.excuse()
            checker = Checker(trace.setup, session.expected)
            checker.check()
            for following in session.followings:
                if following.asked.ask.number in session.expected.asked:
                    checker.check_following(following)
            tried.counts.requests = len(session.expected.asked)
            tried.num_compared, tried.num_rounded = checker.num_compared, checker.num_rounded
    except Exception:  # noqa: BLE001 - any exception is a finding
        tried.failure = traceback.format_exc()
    return tried


@asynccontextmanager
async def _opened(trace: Trace) -> "AsyncIterator[_Session]":
    core, runner = make_core(trace.setup, replace(language(), grammars=grammars()))
    config = make_config(trace.setup)
    driver = ThreadDriver(lambda: core)
    service = RunnerService(config, driver, warm_up=False, pooling="mean")
    await service.start()
    app = create_app(service, ReorderBuffer(MonotonicClock()), config)
    async with serve_app(app) as url, HttpClient(url) as http:
        yield _Session(trace, service, EngineClient(http), runner, driver)
        service.check_integrity()
    await service.close()


class _Session:
    """Sends the requests of a trace. A request waits for running requests that extend its contexts,
    so that the contents of its contexts are known."""

    def __init__(
        self,
        trace: Trace,
        service: RunnerService,
        client: EngineClient,
        runner: FuzzedRunner,
        driver: ThreadDriver,
    ) -> None:
        self.trace = trace
        self.expected = Expectations()
        self.followings: list[Following] = []
        self._service = service
        self._client = client
        self._runner = runner
        self._driver = driver
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._follow_tasks: list[tuple[int, asyncio.Task[None]]] = []
        self._dark: set[int] = set()

    def _break_next(self, core: EngineCore) -> None:
        self._runner.breaks_next = True

    async def run(self) -> None:
        for op in self.trace.ops:
            if isinstance(op, Ask):
                await self._ask(op)
            else:
                await self._act(op)
        await _all(self._tasks.values())
        for number, asked in self.expected.asked.items():
            if self._tasks[number].cancelled():  # cancelled before it started
                asked.end(Cancelled("by the trace"))
        for _, task in self._follow_tasks:
            task.cancel()
        await _all(task for _, task in self._follow_tasks)
        await self._leave_nothing()

    def excuse(self) -> None:
        """Excuse requests on contexts that were never created. Forget requests on contexts that
        were freed: they may have arrived after that and created a new context."""
        for number, asked in list(self.expected.asked.items()):
            if asked.excuse in ("freed", "reset"):
                del self.expected.asked[number]
        for asked in self.expected.asked.values():
            lineage = {other for line in asked.lines for other in line.lineage()}
            others = {other for line in lineage for other, _ in line.pieces} - {asked}
            if any(other.error is not None for other in others):
                asked.excuse = asked.excuse or "another failed"

    # -- requests ----------------------------------------------------------------------------

    async def _ask(self, ask: Ask) -> None:
        named = {c for piece in ask.pieces for c in (piece.context, piece.parent)} - {NO_PARENT}
        await _all(self._tasks[asked.ask.number] for asked in self._awaited(ask))
        failed = {
            line.context
            for asked in self.expected.asked.values()
            if asked.error is not None
            for line in asked.lines
        }
        self._dark |= failed
        if named & self._dark:
            return
        if (asked := self.expected.enter(ask)) is not None:
            self._tasks[ask.number] = asyncio.create_task(self._send(asked))

    def _awaited(self, ask: Ask) -> list[SentRequest]:
        """Return running requests that extend or fork the contexts of this request, and requests
        that extend a context that this request forks."""
        own = {piece.context for piece in ask.pieces}
        parents = {piece.parent for piece in ask.pieces}
        found = []
        for asked in self.expected.asked.values():
            if self._tasks[asked.ask.number].done():
                continue
            touched = {c for p in asked.ask.pieces for c in (p.context, p.parent)}
            firsts = {line.context for line in asked.lines if line.pieces[0][0] is asked}
            continued = {line.context for line in asked.lines} - firsts
            if own & touched or parents & continued:
                found.append(asked)
        return found

    async def _send(self, asked: SentRequest) -> None:
        try:
            asked.end(await self._answer(asked))
        except ParrotError as error:
            asked.end(error)
        except asyncio.CancelledError:
            asked.end(Cancelled("by the trace"))

    async def _answer(self, asked: SentRequest) -> Any:
        ask, client = asked.ask, self._client
        if ask.read is not None:
            inputs = [list(ask.pieces[0].tokens)]
            if ask.read == "mean":
                return await client.embed(EmbedRequest(inputs=inputs, cache_salt=ask.salt))
            wanted = ScoreRequest(inputs=inputs, num_top=2, cache_salt=ask.salt)
            return await client.score(wanted)
        is_background = ask.priority >= BACKGROUND
        fields: dict[str, Any] = {"cache_salt": ask.salt}
        fields["priority"] = 0 if is_background else ask.priority
        fills = [
            {
                "context_id": piece.context,
                "token_ids": list(piece.tokens),
                "parent_context_id": piece.parent,
                "parent_len": piece.length,
            }
            for piece in ask.pieces
        ]
        if ask.sampling is None:
            fields |= fills[0] | {"background": is_background}
            return await client.fill(FillRequest.model_validate(fields))
        texts = [*ask.drafts, *(echo(self.trace.setup, asked) if ask.echoes else ())]
        fields |= {"context_id": ask.pieces[-1].context, "fills": fills}
        fields |= {"sampling_config": ask.sampling, "drafts": {"texts": texts}}
        return await self._generated(asked, GenerateRequest.model_validate(fields))

    async def _generated(self, asked: SentRequest, request: GenerateRequest) -> GenerateResponse:
        if not asked.ask.stream:
            return await self._client.generate(request)
        if asked.ask.number % 2:
            return await self._client.generate(request, asked.chunks.append)
        async for event in self._client.generate_stream(request):
            if isinstance(event, GenerateResponse):
                return event
            asked.chunks.append(event)
        raise AssertionError("a stream ended without an answer")

    # -- other actions ----------------------------------------------------------------------------

    async def _act(self, act: Act) -> None:
        if act.kind == "steps":
            for _ in range(act.number):
                await self._client.ping()
        elif act.kind == "cancel" and act.number in self._tasks:
            self.expected.cancelled(act.number)
            self._tasks[act.number].cancel()
        elif act.kind == "free":
            self.expected.freed(act.contexts)
            self._dark |= set(act.contexts)
            await self._client.free_contexts(act.contexts)
        elif act.kind == "follow" and act.number in self._tasks:
            self._follow(self.expected.asked[act.number])
        elif act.kind == "leave":
            for number, task in self._follow_tasks:
                if number == act.number:
                    task.cancel()
        elif act.kind == "fault":
            self._driver.post(self._break_next)  # between steps, not while a failed step is retried
        elif act.kind == "reset":
            self._dark |= set(self.expected.lines)
            self.expected.gone()
            await self._service.reset()

    def _follow(self, asked: SentRequest) -> None:
        if asked.ask.sampling is None:
            return
        following = Following(asked, is_early=False)
        self.followings.append(following)

        async def follow() -> None:
            with suppress(asyncio.CancelledError):
                async for chunk in self._client.follow(asked.lines[-1].context):
                    following(chunk)
                following.is_early = True  # all chunks were received

        self._follow_tasks.append((asked.ask.number, asyncio.create_task(follow())))

    async def _leave_nothing(self) -> None:
        contexts = {p.context for asked in self.expected.asked.values() for p in asked.ask.pieces}
        for _ in range(_MAX_PINGS):
            await self._client.free_contexts([c for c in contexts if c >= 0])
            info = await self._client.ping()
            if info.num_total_jobs == 0 and info.num_free_blocks == info.num_max_blocks:
                return
        raise AssertionError(f"not everything was freed: {info}")


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        with suppress(asyncio.CancelledError):
            await task
