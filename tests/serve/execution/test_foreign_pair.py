"""Programs on two foreign servers with small prefix caches."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from itertools import count

import pytest

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.service import OpenAIService
from parrot.protocol.engine_api import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    HeartbeatRequest,
    StepCosts,
    StreamChunk,
    Usage,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.fleet import Connect
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    Objective,
    SemanticVariable,
    TextPiece,
    VariablePiece,
)
from parrot.simulation.loop import LoopClock, run_virtual
from parrot.utils.clock import Clock, MonotonicClock
from tests.support.app_server import serve_app
from tests.support.fake_engine import FakeEngine, fake_engine
from tests.support.fake_openai import FakeOpenAI
from tests.support.prefix_cache import PrefixCache

STEP_S, PREFILL_S = 1e-2, 1e-3
OUTPUT = 20  # tokens
TURNS = 6


class CachingEngine(FakeEngine):
    """A fake engine that takes as long as a server with this `cache`."""

    def serve(self, cache: PrefixCache, slowness: float, num_slots: int) -> None:
        self.cache = cache
        self.slowness = slowness
        self.slots = asyncio.Semaphore(num_slots)

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        async with self.slots:
            self._fill(request.fills)
            contents = self.contexts[request.context_id]
            prompt, text = self._decode(contents), "y" * 4 * OUTPUT
            cached = self.cache.find(prompt)
            new_tokens = (len(prompt) - cached) / 4
            await asyncio.sleep(self.slowness * (new_tokens * PREFILL_S + OUTPUT * STEP_S))
            self.cache.keep(prompt + text)
            contents.extend(text)
            usage = Usage(
                cached_tokens=cached // 4, computed_tokens=int(new_tokens), output_tokens=OUTPUT
            )
            yield GenerateResponse(
                generated_text=text,
                generated_ids=[],
                finish_reason=FinishReason.LENGTH,
                usage=usage,
            )


def caching_engine(
    name: str, cache: PrefixCache, slowness: float, capabilities: Capabilities
) -> CachingEngine:
    plain = fake_engine(name, model="m", text=True, capabilities=capabilities)
    costs = StepCosts(
        step_s=slowness * STEP_S, prefill_s=slowness * PREFILL_S, sequence_s=0.0, token_s=0.0
    )
    engine = CachingEngine(plain.info.model_copy(update={"costs": costs}))
    engine.serve(cache, slowness, num_slots=1 if capabilities.kept_prompts == 1 else 8)
    return engine


class Programs:
    """Programs that submit calls in a loop, each with its own long prefix. `is_chat`: the prompts
    also contain the earlier turns of the program."""

    def __init__(self, clock: Clock, connect: Connect, *, is_chat: bool) -> None:
        config = CoreConfig(engine_heartbeat_timeout=1e6)
        self.dispatcher = Dispatcher(config, clock, connect)
        self._is_chat = is_chat
        self._last: dict[int, Completion] = {}
        self._num_calls = 0

    async def call(self, program: int) -> None:
        self._num_calls += 1
        number = self._num_calls
        question = SemanticVariable(f"q{number}", "q", program)
        question.set(f"Question {number} of program {program}? ")
        previous = self._last.get(program) if self._is_chat else None
        fill = (VariablePiece(question),)
        beginning = TextPiece(f"I am program {program}. " * 400)
        completion = Completion(
            id=number,
            request_id=number,
            session_id=program,
            options=CallOptions(func_name=f"f{program}", tenant="acme"),
            fill=fill if previous is not None else (beginning, *fill),
            output=SemanticVariable(f"v{number}", "answer", program),
            sampling=SamplingConfig(max_gen_length=OUTPUT, temperature=0.0),
            previous=previous,
            objective=Objective(PerformanceCriteria.LATENCY, 0, 1.0),
        )
        self._last[program] = completion
        self.dispatcher.submit(completion)
        await completion.output.wait()
        assert completion.output.error is None
        self.dispatcher.check_integrity()


def share_found(caches: Sequence[PrefixCache]) -> float:
    """The fraction of all prompt tokens that were cached."""
    return sum(cache.num_hit for cache in caches) / sum(cache.num_asked for cache in caches)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("slowness", [1.0, 1.3, 2.0])
@pytest.mark.parametrize(
    ("num_programs", "bound"),
    [
        (2, Capabilities(kept_prompts=1)),
        (2, Capabilities(kept_tokens=3500)),
        (6, Capabilities(kept_tokens=9000)),
        (6, Capabilities(kept_prompts=3)),
    ],
)
def test_each_program_stays_on_the_server_that_cached_its_prefix(
    num_programs: int, bound: Capabilities, slowness: float, is_chat: bool
) -> None:
    """The prefixes fit on both servers together, but not on one. The programs take turns, so no
    server is ever busy. One server is slower."""
    max_chars = None if bound.kept_tokens is None else 4 * bound.kept_tokens
    caches = [PrefixCache(max_chars, bound.kept_prompts) for _ in range(2)]

    async def ask_in_turn() -> None:
        slow = caching_engine("slow", caches[1], slowness, bound)
        engines = {"fast": caching_engine("fast", caches[0], 1.0, bound), "slow": slow}
        programs = Programs(LoopClock(), lambda i: engines[i.engine_name], is_chat=is_chat)
        for engine in engines.values():
            await programs.dispatcher.fleet.register(engine.info)
        for _ in range(TURNS):
            for program in range(num_programs):
                await programs.call(program)
                await asyncio.sleep(0.5)
        await programs.dispatcher.close()

    run_virtual(ask_in_turn())
    assert share_found(caches) > 0.95 * (TURNS - 1) / TURNS


class Pair:
    """Two servers of one model, each behind an openai engine, over HTTP."""

    def __init__(self, fakes: Sequence[FakeOpenAI]) -> None:
        self._fakes = fakes
        self._stack = AsyncExitStack()
        self.services: list[OpenAIService] = []

    async def __aenter__(self) -> Programs:
        urls: dict[str, str] = {}
        for number, fake in enumerate(self._fakes):
            server = await self._stack.enter_async_context(serve_app(fake.app()))
            config = OpenAIConfig.model_validate(
                {
                    "model": "gpt-fake",
                    "engine_name": f"e{number}",
                    "instance": {"base_url": f"{server}/v1"},
                }
            )
            service = OpenAIService(config, environ={})
            self._stack.push_async_callback(service.close)
            await service.start()
            app = create_app(service, ReorderBuffer(MonotonicClock()), config)
            urls[f"e{number}"] = await self._stack.enter_async_context(serve_app(app))
            self.services.append(service)
        programs = Programs(
            MonotonicClock(),
            lambda info: EngineClient(HttpClient(urls[info.engine_name])),
            is_chat=False,
        )
        self._stack.push_async_callback(programs.dispatcher.close)
        for service in self.services:
            await programs.dispatcher.fleet.register(service.engine_info())
        return programs

    async def __aexit__(self, *raised: object) -> None:
        await self._stack.aclose()


def vllm_metrics(num_running: int = 0, num_waiting: int = 0) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {num_running}.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {num_waiting}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {min(1.0, num_running / 20)}\n'
        'vllm:cache_config_info{kv_cache_size_tokens="9000"} 1.0\n'
    )


@pytest.mark.parametrize("owner", ["me", "vllm"])
async def test_programs_on_two_servers_of_one_model(owner: str) -> None:
    """The openai engines report the size of the servers' prefix caches."""
    max_prompts = 1 if owner == "me" else None
    caches = [PrefixCache(36_000, max_prompts) for _ in range(2)]
    responses = {"/metrics": vllm_metrics()}
    async with Pair(
        [FakeOpenAI(owned_by=owner, cache=c, responses=responses) for c in caches]
    ) as programs:
        assert [card.id for card in programs.dispatcher.fleet.models().data] == ["gpt-fake"]
        for _ in range(TURNS):
            for program in range(2 if owner == "me" else 6):
                await programs.call(program)
    assert [cache.num_asked > 0 for cache in caches] == [True, True]
    assert share_found(caches) > 0.95 * (TURNS - 1) / TURNS


async def test_a_server_that_is_busy_with_other_clients_gets_fewer_calls() -> None:
    fakes = [FakeOpenAI(owned_by="vllm") for _ in range(2)]
    pair = Pair(fakes)
    next_program = count()
    async with pair as programs:

        async def calls_of_each(busy: int) -> list[int]:
            """How many of eight new programs go to each server while one serves other clients."""
            for number, (fake, service) in enumerate(zip(fakes, pair.services, strict=True)):
                is_busy = number == busy
                fake.responses["/metrics"] = vllm_metrics(20 * is_busy, 20 * is_busy)
                load = service.runtime_info({}).server_load
                while load is None or (load.num_others > 0) != is_busy:
                    await asyncio.sleep(0.01)
                    load = service.runtime_info({}).server_load
                # Without measured costs: this fake server answers at once.
                runtime = service.runtime_info().model_copy(update={"costs": None})
                beat = HeartbeatRequest(
                    engine_id=number, engine_name=f"e{number}", runtime_info=runtime
                )
                assert programs.dispatcher.fleet.heartbeat(beat).state == "ok"
                fake.bodies.clear()
            await asyncio.gather(*(programs.call(next(next_program)) for _ in range(8)))
            return [len(fake.bodies) for fake in fakes]

        assert await calls_of_each(busy=0) == [0, 8]
        assert await calls_of_each(busy=1) == [8, 0]
        assert await calls_of_each(busy=2) == [4, 4]
