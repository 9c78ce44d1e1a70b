"""Draft texts that are sent to engines: predictions, and earlier outputs of the function."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from parrot.protocol.engine_api import DraftSources, EngineType, GenerateRequest, GenerateResponse
from parrot.serve.execution.drafting import DraftTexts
from parrot.serve.execution.run import Attempt
from parrot.serve.graph.nodes import CallOptions
from tests.serve.execution.world import World, value
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.fake_engine import FakeEngine, Script, fake_engine

CODEC = Tokenizer.from_str(byte_tokenizer().tokenizer_json)


class DraftingEngine:
    """A fake builtin engine. `draft_counts`: drafted and accepted tokens of each call."""

    def __init__(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        engine.info = engine.info.model_copy(update={"engine_type": EngineType.BUILTIN})
        self.engine = engine
        self.draft_counts = (0, 0)
        generate = engine.generate

        async def drafting(request: GenerateRequest) -> GenerateResponse:
            response = await generate(request)
            drafted, accepted = self.draft_counts
            update = {"drafted_tokens": drafted, "accepted_tokens": accepted}
            return response.model_copy(update={"usage": response.usage.model_copy(update=update)})

        monkeypatch.setattr(engine, "generate", drafting)

    @property
    def sources(self) -> DraftSources | None:
        """The draft sources of the last request."""
        return self.engine.requests[-1].drafts

    @property
    def texts(self) -> list[str]:
        sources = self.sources
        return [] if sources is None else [CODEC.decode(ids) for ids in sources.texts]


@pytest.fixture
async def engine(world: World, monkeypatch: pytest.MonkeyPatch) -> DraftingEngine:
    texts = (f"text {number}" for number in range(10_000))
    fake = fake_engine(script=Script(text=lambda prompt: next(texts)))
    engine = DraftingEngine(fake, monkeypatch)
    await world.join(fake)
    return engine


async def call(world: World, text: str, **options: Any) -> Any:
    completion = world.submit("Fix this: ", value(text), " fixed: ", **options)
    await completion.output.wait()
    return completion


async def test_the_last_outputs_of_a_function_are_sent_those_of_the_session_first(
    world: World, engine: DraftingEngine
) -> None:
    await call(world, "a", session=1)
    assert engine.sources is None
    await call(world, "", session=2)
    assert engine.texts == ["text 0"]
    await call(world, "c", session=2)
    assert engine.texts == ["text 1", "text 0"]
    await call(world, "d", session=1)
    assert engine.texts == ["text 0", "text 2"]


async def test_outputs_are_not_sent_for_other_tenants_or_functions(
    world: World, engine: DraftingEngine
) -> None:
    await call(world, "a")
    await call(world, "", options=CallOptions(func_name="f", tenant="other", cache_salt="other"))
    assert engine.sources is None
    completion = world.submit("Say ", value("hi"))
    await completion.output.wait()
    assert engine.sources is None


async def test_a_prediction_is_sent_first(world: World, engine: DraftingEngine) -> None:
    await call(world, "a")
    options = CallOptions(func_name="f", tenant="acme", cache_salt="acme", prediction="as before")
    await call(world, "", options=options)
    assert engine.texts == ["as before", "text 0"]


async def test_drafted_and_accepted_tokens_are_counted(
    world: World, engine: DraftingEngine
) -> None:
    engine.draft_counts = (12, 7)
    completion = await call(world, "a")
    assert completion.stats.drafted_tokens == 12
    assert completion.stats.accepted_tokens == 7


async def test_a_function_whose_drafts_are_wrong_is_seldom_drafted(
    world: World, engine: DraftingEngine
) -> None:
    engine.draft_counts = (300, 3)
    await call(world, "a")
    engine.draft_counts = (0, 0)
    sources = []
    for number in range(32):
        await call(world, str(number))
        sources.append(engine.sources)
    off = DraftSources(in_context=False)
    assert sources.count(off) == 30
    assert [i for i, found in enumerate(sources) if found != off] == [15, 31]


async def test_engines_that_do_not_draft_get_no_texts(world: World) -> None:
    fake = fake_engine()
    await world.join(fake)
    await call(world, "a")
    await call(
        world,
        "",
        options=CallOptions(func_name="f", tenant="acme", cache_salt="acme", prediction="as it is"),
    )
    assert fake.requests[-1].drafts is None


async def test_a_prompt_is_complete_if_its_context_is_evicted_while_drafts_are_encoded(
    world: World, engine: DraftingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await call(world, "one")

    async def evicting(self: DraftTexts, attempt: Attempt) -> None:
        world.dispatcher._ledger.evict_idle(attempt.engine.id)

    monkeypatch.setattr(DraftTexts, "sources", evicting)
    await call(world, "two")
    assert engine.engine.prompts[-1] == "Fix this: two fixed: "
