"""Outputs of real engines whose defaults fill in the sampling, continued on another engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from parrot.engine.config import BuiltinConfig
from parrot.engine.engine_types import create_service
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import GenerateRequest, GenerateResponse
from parrot.protocol.engine_client import OnChunk
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import Completion
from parrot.upstreams.hosted_engine import HostedEngine
from tests.serve.execution.world import World
from tests.support.tiny_model import make_tiny_model

NUM_TOKENS, NUM_BEFORE = 24, 8
Join = Callable[..., Coroutine[Any, Any, "HaltingEngine"]]


async def has_no_server() -> None:
    """Whether the engine computes by itself."""


class HaltingEngine(HostedEngine):
    """A service in this process. Each output halts after `num_chunks` chunks; None: never."""

    def __init__(self, service: EngineService, name: str, num_chunks: int | None) -> None:
        super().__init__(service, name, has_no_server, lambda: False)
        self.service, self.num_chunks = service, num_chunks
        self.info = service.engine_info().model_copy(
            update={"engine_name": name, "host": "127.0.0.1", "port": 9001}
        )
        self.requests: list[GenerateRequest] = []
        self.halted: asyncio.Queue[None] = asyncio.Queue()

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        self.requests.append(request)
        num_sent = 0
        async for event in self.service.generate_stream(request):
            if isinstance(event, GenerateResponse):
                return event
            if num_sent == self.num_chunks:
                self.halted.put_nowait(None)
                await asyncio.Event().wait()
            num_sent += 1
            assert on_chunk is not None
            on_chunk(event)
        raise AssertionError("no result")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A world without reuse of results, so that each output is computed."""
    world = World(reuse_results=False)
    yield world
    world.dispatcher.check_integrity()
    await world.dispatcher.close()


@pytest.fixture
def join(world: World, tmp_path: Path) -> Join:
    model = str(make_tiny_model(tmp_path / "model"))

    async def join(name: str, num_chunks: int | None = None, **defaults: float) -> HaltingEngine:
        config = {"model": model, "device": "cpu", "dtype": "float32", "default_sampling": defaults}
        service = create_service(BuiltinConfig.model_validate(config))
        await service.start()
        engine = HaltingEngine(service, name, num_chunks)
        await world.join(engine)  # type: ignore[arg-type]  # An engine client, as a fake engine is.
        return engine

    return join


def submit(world: World, seeds: Sequence[int | None]) -> list[Completion]:
    """Submit calls like a request with `n` choices. Only their seeds are set."""
    given: dict[str, Any] = {"max_gen_length": NUM_TOKENS, "ignore_tokenizer_eos": True}
    samplings = [SamplingConfig(**given, **({} if s is None else {"seed": s})) for s in seeds]
    return [world.submit("Once", stream=True, sampling=sampling) for sampling in samplings]


async def texts(completions: Sequence[Completion]) -> list[str]:
    async with asyncio.timeout(60):
        return [await completion.output.wait() for completion in completions]


@pytest.mark.parametrize(
    ("defaults", "seeds"),
    [
        ({"temperature": 0, "repetition_penalty": 1.8}, [None]),
        ({"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.8}, [5, 6, 7]),
    ],
    ids=["greedy", "three seeded choices"],
)
async def test_a_lost_engine_does_not_change_the_output_with_defaults(
    world: World, join: Join, defaults: dict[str, float], seeds: list[int | None]
) -> None:
    """The penalty counts the tokens of the lost engine, and the random numbers continue."""
    await join("undisturbed", **defaults)
    expected = await texts(submit(world, seeds))
    world.lose(0)
    lost = await join("lost", NUM_BEFORE, **defaults)
    completions = submit(world, seeds)
    async with asyncio.timeout(60):
        for _ in completions:
            await lost.halted.get()
    assert all(completion.output.partial_text for completion in completions)
    other = await join("other", **defaults)
    world.lose(1)
    assert await texts(completions) == expected
    assert [bool(request.resumed_ids) for request in other.requests] == [True] * len(seeds)


async def test_a_moved_output_uses_the_defaults_of_its_new_engine(world: World, join: Join) -> None:
    """A field that a request leaves unset stays unset, so that each engine fills in its own."""
    first = await join("first", NUM_BEFORE, temperature=0, repetition_penalty=1.8)
    (completion,) = submit(world, [None])
    async with asyncio.timeout(60):
        await first.halted.get()
    before = completion.output.partial_text
    second = await join("second", temperature=0, repetition_penalty=1)
    world.lose(0)
    (moved,) = await texts([completion])
    (request,) = second.requests
    assert moved.startswith(before)
    assert request.sampling_config.temperature is None
    assert request.sampling_config.repetition_penalty is None
