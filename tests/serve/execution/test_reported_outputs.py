"""Unstreamed outputs continue after the tokens that heartbeats have reported."""

from typing import Any

import pytest

from parrot.engine.core.output import Generation, Language, unreported_outputs
from parrot.engine.sim import byte_tokenizer_response
from parrot.protocol.engine_api import OutputPart, RuntimeInfo
from parrot.protocol.errors import Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.registration_client import RegistrationClient
from parrot.protocol.sampling import ResolvedSampling
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import Completion
from parrot.server.app import create_app
from tests.serve.execution.world import World
from tests.support.app_server import serve_app
from tests.support.fake_engine import FakeEngine, Script, fake_engine

STUCK = Script(text=lambda _: "abcdef", hang_after=0)


def report(world: World, engine: FakeEngine, text: str, start: int = 0, engine_id: int = 0) -> None:
    """Report output of the engine's last request, from token `start` on."""
    report_ids(world, engine, engine._encode(text), start, engine_id)


def report_ids(
    world: World, engine: FakeEngine, ids: list[int], start: int = 0, engine_id: int = 0
) -> None:
    part = OutputPart.of(engine.requests[-1].context_id, start, ids)
    assert world.heartbeat(engine_id, outputs=[part.model_dump(mode="json")]) == "ok"


async def stuck_call(world: World, **options: Any) -> tuple[Completion, FakeEngine]:
    """A call whose engine is stuck, and that engine."""
    engine = fake_engine("one", script=STUCK)
    await world.join(engine)
    completion = world.submit("Go", **options)
    await world.settle()
    return completion, engine


async def finish_elsewhere(
    world: World, completion: Completion, rest: str, **options: Any
) -> FakeEngine:
    """Lose the engine, and wait for the output that another engine finishes with `rest`."""
    second = fake_engine("two", script=Script(text=lambda _: rest), **options)
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcdef"
    return second


async def test_an_unstreamed_output_continues_on_another_engine(world: World) -> None:
    completion, first = await stuck_call(world)
    report(world, first, "ab")
    report(world, first, "bc", start=1)  # The answer to the first heartbeat was lost.
    report(world, first, "xy", start=7)  # A report is missing before this one.
    report(world, first, "x", start=1)  # An old report arrives late.
    assert completion.output.partial_text == ""
    second = await finish_elsewhere(world, completion, "def")
    assert second.prompts == ["Goabc"]
    assert second.requests[0].resumed_ids == first._encode("abc")
    assert second.requests[0].sampling_config.max_gen_length == 20 - 3
    assert completion.stats.output_tokens == 7  # Includes the stop token.
    assert completion.output.tokenized is not None
    assert list(completion.output.tokenized.ids) == first._encode("abcdef")


async def test_an_output_continues_twice_and_after_a_broken_connection(world: World) -> None:
    completion, first = await stuck_call(world)
    report(world, first, "ab")
    second = fake_engine("two", script=STUCK)
    await world.join(second)
    world.lose(0)
    await world.settle()
    report(world, second, "c", engine_id=1)
    second.script = Script(error=Unavailable("connection reset"))
    third = fake_engine("three", script=Script(text=lambda _: "def"))
    await world.join(third)
    world.lose(1)
    await world.clock.advance(1)
    assert await completion.output.wait() == "abcdef"
    assert third.prompts == ["Goabc"]


async def test_a_later_stream_contains_the_reported_tokens(world: World) -> None:
    completion, first = await stuck_call(world)
    report(world, first, "abc")
    second = fake_engine("two", script=STUCK)
    await world.join(second)
    world.lose(0)
    await world.settle()
    assert completion.output.partial_text == "abc"
    completion.wants_stream = True
    world.dispatcher.reprioritise(completion)
    third = fake_engine("three", script=Script(text=lambda _: "def"))
    await world.join(third)
    world.lose(1)
    await world.clock.advance(1)
    assert await completion.output.wait() == "abcdef"


@pytest.mark.parametrize(
    ("reported", "sampling", "prompt"),
    [
        ("ab<", {"stop_str": "<end>"}, "Goab"),
        ("abc", {"json_schema": {"type": "object"}}, "Goabc"),
        ("abc", {"logprobs": 1}, "Go"),
        ("abc", {"stop_token_ids": [66]}, "Go"),  # "c" is the stop token.
    ],
)
async def test_only_stable_text_is_kept(
    world: World, reported: str, sampling: dict[str, Any], prompt: str
) -> None:
    completion, first = await stuck_call(world, sampling=ResolvedSampling(**sampling))
    report(world, first, reported)
    second = await finish_elsewhere(world, completion, "abcdef"[len(prompt) - 2 :])
    assert second.prompts == [prompt]


async def test_text_is_kept_up_to_an_incomplete_character(world: World) -> None:
    completion, first = await stuck_call(world)
    report_ids(world, first, first._encode("abé")[:-1])
    second = await finish_elsewhere(world, completion, "cdef")
    assert second.prompts == ["Goab"]


async def test_an_output_with_special_tokens_starts_again(world: World) -> None:
    completion, first = await stuck_call(world)
    report(world, first, "ab<|im_start|>")
    second = await finish_elsewhere(world, completion, "abcdef")
    assert second.prompts == ["Go"]


async def test_an_engine_that_takes_text_continues_after_the_text(world: World) -> None:
    completion, first = await stuck_call(world)
    report(world, first, "abc")
    second = await finish_elsewhere(world, completion, "def", text=True)
    assert second.prompts == ["Goabc"]


async def test_reports_of_other_engines_are_ignored(world: World) -> None:
    completion, first = await stuck_call(world)
    liar = fake_engine("liar")
    await world.join(liar)
    liar.requests = first.requests
    report(world, liar, "xyz", engine_id=1)
    world.lose(1)
    second = fake_engine("two", script=Script(text=lambda _: "abcdef"))
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcdef"
    assert second.prompts == ["Go"]


@pytest.mark.parametrize(("num_outputs", "num_tokens"), [(12_000, 1), (300, 150), (20, 50_000)])
async def test_the_largest_heartbeats_are_accepted(num_outputs: int, num_tokens: int) -> None:
    """The engine would lose its lease if a heartbeat were rejected."""
    language = Language.of(byte_tokenizer_response())
    outputs = []
    for number in range(num_outputs):
        generation = Generation(ResolvedSampling(max_gen_length=10**6), 0, language, False)
        generation.push_all([65] * (num_tokens + 1))
        outputs.append((10**9 + number, generation))
    parts = unreported_outputs(outputs, {})
    assert len(parts) == num_outputs
    runtime = RuntimeInfo(outputs=[part for part in parts if part.ids])
    assert sum(part.end for part in runtime.outputs) > 5_000
    async with serve_app(create_app(ServeCore(CoreConfig()))) as url, HttpClient(url) as http:
        answer = await RegistrationClient(http).engine_heartbeat(1, "one", runtime)
    assert answer.state == "unknown"
