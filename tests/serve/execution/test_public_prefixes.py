"""ServeCore marks tokens as public: a whole public prefix, or no tokens."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from parrot.gateway.prompt_tokens import prompt_tokens
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.prompting import max_public_len, public_len
from parrot.serve.graph.nodes import PieceKind
from parrot.serve.prompts.encode import encode_prompt, join, read_texts
from parrot.serve.prompts.segments import Segment
from parrot.utils.config import ConfigError
from tests.serve.execution.world import World, value
from tests.serve.prompts.test_chat_prompts import TEMPLATES
from tests.support.fake_engine import FakeEngine, fake_engine

BLOCK = 4
POLICY = "Be kind, be brief."  # 18 byte tokens after a BOS token.


class PublicWorld(World):
    """A `World` with public `texts`."""

    def __init__(self, folder: Path, *texts: str) -> None:
        super().__init__()
        paths = [folder / f"{number}.txt" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        config = CoreConfig(public_prefixes=tuple(map(str, paths)))
        self.dispatcher = Dispatcher(config, self.clock, self.connect)

    async def join_with_blocks(self, engine: FakeEngine) -> None:
        engine.info = engine.info.model_copy(update={"block_size": BLOCK})
        await self.join(engine)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PublicWorld]:
    world = PublicWorld(tmp_path, POLICY + "\n", POLICY + " Always.")
    yield world
    world.dispatcher.check_integrity()
    await world.dispatcher.close()


def public_of(engine: FakeEngine) -> list[tuple[int, int]]:
    """The numbers of tokens and of public tokens of each piece without a parent."""
    fills = [fill for request in engine.requests for fill in request.fills]
    roots = [fill for fill in fills if fill.parent_context_id < 0]
    assert all(fill.public_len == 0 for fill in fills if fill.parent_context_id >= 0)
    return [(len(fill.token_ids or ()), fill.public_len) for fill in roots]


async def test_a_prompt_with_a_public_prefix_is_public_in_whole_blocks(
    world: PublicWorld,
) -> None:
    engine = fake_engine()
    await world.join_with_blocks(engine)
    world.submit(POLICY + " Now: ", value("what I sent"))
    await world.settle()
    world.submit(POLICY + " Always. ", value("something else"), session=2)
    await world.settle()
    world.submit(POLICY[:-3] + "wise.", value("and another"), session=3)
    world.submit("Why? " + POLICY, value("and another"), session=4)
    await world.settle()
    assert public_of(engine) == [(24, 16), (27, 24), (20, 0), (23, 0)]


async def test_a_continued_call_sends_no_public_prefix_again(
    world: PublicWorld,
) -> None:
    engine = fake_engine()
    await world.join_with_blocks(engine)
    for text in ("one", "two"):
        world.submit(POLICY + " Always. ", value(text))
        await world.settle()
    assert public_of(engine) == [(27, 24)]
    assert len(engine.requests) == 2


async def test_a_prompt_with_a_part_of_a_public_prefix_does_not_stop_its_sharing(
    world: PublicWorld,
) -> None:
    """The first call's context belongs to its tenant, so the second call must not fork it."""
    engine = fake_engine()
    await world.join_with_blocks(engine)
    world.submit("Be kind, ", value("be wise."))
    await world.settle()
    world.submit("Be kind, ", value("be brief. Now: what I sent"))
    await world.settle()
    world.submit("Be kind, ", value("be calm."))
    await world.settle()
    assert public_of(engine) == [(9, 0), (35, 16)]
    assert engine.prompts[1] == "Be kind, be brief. Now: what I sent"
    assert engine.prompts[2] == "Be kind, be calm."


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_system_message_is_public_with_the_markup_before_it(
    world: PublicWorld, name: str
) -> None:
    engine = fake_engine(add_bos=True, chat_template=TEMPLATES[name])
    await world.join_with_blocks(engine)
    (joined,) = world.dispatcher.fleet
    tokenizer = joined.tokenizer
    assert tokenizer is not None
    for system, is_public in ((POLICY, True), (POLICY + " And?", True), (POLICY[:-5], False)):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        of_vendors = await prompt_tokens(messages, {}, "m", tokenizer)
        segments = [
            Segment(PieceKind.SYSTEM, system),
            Segment(PieceKind.VALUE, "Hello", ends_turn=True),
        ]
        own = join(await encode_prompt(segments, True, tokenizer))
        for prompt in (tuple(of_vendors), own):
            text = tokenizer.encoder.decode(prompt[: public_len(joined, prompt)], special=True)
            assert (POLICY[:-BLOCK] in text) == is_public, (system, text)
            assert POLICY.startswith(text[text.find("Be kind") :])


async def test_engines_of_text_share_no_public_prefixes(world: PublicWorld) -> None:
    engine = fake_engine(text=True)
    await world.join(engine)
    world.submit(POLICY + " Now: ", value("what I sent"))
    await world.settle()
    assert [fill.public_len for fill in engine.requests[0].fills] == [0, 0]


@given(st.lists(st.lists(st.integers(0, 1), max_size=9).map(tuple), max_size=4), st.data())
def test_the_longest_prefix_counts_and_only_its_whole_blocks(
    tokens: list[tuple[int, ...]], data: st.DataObject
) -> None:
    engine = SimpleNamespace(
        tokenizer=SimpleNamespace(public=sorted(tokens, key=len, reverse=True)),
        info=SimpleNamespace(block_size=data.draw(st.integers(1, 4))),
    )
    prompt = tuple(data.draw(st.lists(st.integers(0, 1), max_size=12)))
    ends = [len(ids) // engine.info.block_size * engine.info.block_size for ids in tokens]
    whole = [end for ids, end in zip(tokens, ends, strict=True) if prompt[:end] == ids[:end]]
    assert public_len(engine, prompt) == max(whole, default=0)
    assert max_public_len(engine) == max(ends, default=0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not a regular file"),
        (b" \n", "is empty"),
        (b"\xff", "is not UTF-8"),
        (b"a" * (2**20 + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_file_without_valid_text_is_rejected(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "policy.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"public_prefixes: .*policy.txt: {problem}"):
        read_texts([str(path)])


def test_a_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_texts([str(tmp_path)])


def test_servecore_does_not_start_without_its_file_of_public_prefixes(tmp_path: Path) -> None:
    config = CoreConfig(public_prefixes=(str(tmp_path / "policy.txt"),))
    with pytest.raises(ConfigError, match=r"policy\.txt: is not a regular file"):
        ServeCore(config)


@pytest.mark.parametrize("paths", [["a.txt"] * 17, [""], "a.txt", [1]])
def test_invalid_paths_are_rejected(paths: object) -> None:
    with pytest.raises(ValidationError, match="public_prefixes"):
        CoreConfig.model_validate({"public_prefixes": paths})
