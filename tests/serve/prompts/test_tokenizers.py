"""Tokenization in ServeCore: pieces, special tokens, caching, threads."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from parrot.protocol.engine_api import SpecialIds, TokenizerResponse
from parrot.protocol.errors import InvalidRequest, PromptTooLong
from parrot.serve.graph.nodes import TokenizedText
from parrot.serve.prompts.encode import (
    LARGE_TEXT,
    ModelTokenizer,
    PieceEncoder,
    Style,
    TokenizerRegistry,
    encode_prompt,
)
from parrot.serve.prompts.segments import PieceKind, Segment
from tests.support.byte_tokenizer import byte_tokenizer, tokenizer_id_of

PLAIN, SPECIAL = Style(special=False, first=False), Style(special=True, first=False)
JSON = byte_tokenizer().tokenizer_json
ENCODER = PieceEncoder(JSON)


def now(encoder: PieceEncoder, text: str, style: Style) -> tuple[int, ...]:
    ids = encoder.encode_now(text, style)
    assert ids is not None
    return ids


@given(st.text(st.characters(codec="utf-8"), max_size=50))
def test_plain_text_is_its_bytes(text: str) -> None:
    """The tokenizer of the tests has one token per byte, so that all differences are visible."""
    ids = now(ENCODER, text, PLAIN)
    assert len(ids) == len(text.encode())
    assert ENCODER.decode(ids) == text


def test_special_tokens_only_where_allowed() -> None:
    text = "<|im_start|>user"
    assert len(now(ENCODER, text, SPECIAL)) == 1 + len("user")
    assert len(now(ENCODER, text, PLAIN)) == len(text)
    assert now(ENCODER, text, SPECIAL)[0] in ENCODER.special_ids
    assert ENCODER.special_ids.isdisjoint(now(ENCODER, text, PLAIN))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
        (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
        (
            normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            ),
            None,
        ),
        (normalizers.Prepend("\u2581"), pre_tokenizers.Metaspace(prepend_scheme="never")),
    ],
)
def test_a_leading_space_only_at_the_beginning(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None
) -> None:
    vocab = {c: i for i, c in enumerate("\u2581abc")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    encoder = PieceEncoder(tokenizer.to_str())
    assert now(encoder, "ab", Style(False, True)) == (0, 1, 2)
    assert now(encoder, "ab", Style(False, False)) == (1, 2)
    assert now(encoder, " ab", Style(True, False)) == (0, 1, 2)


def test_byte_level_prefix_space() -> None:
    definition = json.loads(JSON)
    definition["pre_tokenizer"]["add_prefix_space"] = True
    encoder = PieceEncoder(json.dumps(definition))
    assert len(now(encoder, "ab", Style(True, True))) == 3
    assert len(now(encoder, "ab", Style(True, False))) == 2


def test_truncation_and_padding_of_the_file_are_off() -> None:
    tokenizer = Tokenizer.from_str(JSON)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10)
    encoder = PieceEncoder(tokenizer.to_str())
    assert len(now(encoder, "abcdef", PLAIN)) == 6


def test_the_cache_is_bounded_and_drops_the_least_recently_used() -> None:
    encoder = PieceEncoder(JSON, cache_ids=10)
    first = now(encoder, "aaaa", PLAIN)
    now(encoder, "bbbb", PLAIN)
    assert now(encoder, "aaaa", PLAIN) is first
    now(encoder, "cccc", PLAIN)  # evicts b
    assert now(encoder, "aaaa", PLAIN) is first
    now(encoder, "x" * 11, PLAIN)  # too long for the cache
    assert now(encoder, "aaaa", PLAIN) is first
    now(encoder, "d" * 10, PLAIN)
    assert now(encoder, "aaaa", PLAIN) is not first


async def test_long_texts_are_encoded_once_in_a_thread() -> None:
    encoder = PieceEncoder(JSON)
    text = "x" * (LARGE_TEXT + 1)
    assert encoder.encode_now(text, PLAIN) is None
    one, two = await asyncio.gather(encoder.encode(text, PLAIN), encoder.encode(text, PLAIN))
    assert len(one) == LARGE_TEXT + 1
    assert one is two
    assert encoder.encode_now(text, PLAIN) is one


async def test_a_cancelled_waiter_does_not_affect_others() -> None:
    encoder = PieceEncoder(JSON)
    text = "x" * 100_000
    waiters = [asyncio.create_task(encoder.encode(text, PLAIN)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    done = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1] is done[2]


def model(add_bos: bool = False) -> ModelTokenizer:
    payload = byte_tokenizer(add_bos=add_bos)
    ids = payload.special_ids
    return ModelTokenizer("t", ENCODER, ids.bos if add_bos else None, frozenset(ids.eos), None)


async def test_ids_are_reused_only_with_the_same_tokenizer() -> None:
    """The value of a variable keeps the token ids of the engine that generated it."""
    for made_by, expected in (("t", (7, 8)), ("another", now(ENCODER, "ab", PLAIN))):
        value = Segment(PieceKind.VALUE, "ab", TokenizedText(made_by, (7, 8)))
        assert await encode_prompt([value], False, model()) == [expected]


async def test_only_constants_of_the_program_may_hold_special_tokens() -> None:
    for kind, is_special in (
        (PieceKind.CONSTANT, True),
        (PieceKind.SYSTEM, True),
        (PieceKind.VALUE, False),
        (PieceKind.OUTPUT, False),
    ):
        (ids,) = await encode_prompt([Segment(kind, "<|im_start|>")], False, model())
        assert (len(ids) == 1) is is_special, kind


async def test_a_segment_may_contain_several() -> None:
    parts = (
        Segment(PieceKind.CONSTANT, "<|im_start|>"),
        Segment(PieceKind.VALUE, "<|im_start|>"),
        Segment(PieceKind.OUTPUT, "ab", TokenizedText("t", (7, 8))),
    )
    first, many = Segment(PieceKind.VALUE, "x"), Segment(PieceKind.VALUE, "", parts=parts)
    each = await encode_prompt([first, *parts], False, model(add_bos=True))
    together = await encode_prompt([first, many], False, model(add_bos=True))
    assert together == [each[0], sum(each[1:], ())]
    behind = await encode_prompt([many], False, model(add_bos=True), num_before=len(each[0]))
    assert behind == together[1:]
    assert await encode_prompt([many], False, None) == ["<|im_start|><|im_start|>ab"]


async def test_earlier_tokens_count_towards_the_limit() -> None:
    segments = [Segment(PieceKind.VALUE, "abc")]
    assert await encode_prompt(segments, False, model(), num_before=4, limit=8)
    with pytest.raises(PromptTooLong):
        await encode_prompt(segments, False, model(), num_before=5, limit=8)


async def test_a_prompt_begins_with_bos_once() -> None:
    texts = [Segment(PieceKind.CONSTANT, "a"), Segment(PieceKind.VALUE, "b")]
    with_bos = sum(await encode_prompt(texts, False, model(add_bos=True)), ())
    without = sum(await encode_prompt(texts, False, model()), ())
    assert with_bos == (byte_tokenizer().special_ids.bos, *without)


def test_bos_once() -> None:
    tokenizer = model(add_bos=True)
    bos = now(ENCODER, "<s>", SPECIAL)
    assert tokenizer.with_bos((5, 6)) == (*bos, 5, 6)
    assert tokenizer.with_bos((*bos, 5)) == (*bos, 5)
    assert tokenizer.with_bos(()) == bos
    assert model().with_bos((5,)) == (5,)


def test_ids_of_an_output() -> None:
    tokenizer = model()
    (eos,) = tokenizer.eos
    (start,) = now(ENCODER, "<|im_start|>", SPECIAL)
    stops = {eos, 7}
    assert tokenizer.clean_output([1, 2, eos], stops, True) == (1, 2)
    assert tokenizer.clean_output([1, 2, 7], stops, True) == (1, 2)
    assert tokenizer.clean_output([1, 2, 3], stops, True) is None  # a stop string
    assert tokenizer.clean_output([1, 2, 7], stops, False) == (1, 2, 7)
    assert tokenizer.clean_output([1, start, 2], stops, False) is None  # generated markup
    assert tokenizer.clean_output([], stops, True) is None


async def test_models_share_an_encoder_but_not_their_rules() -> None:
    registry = TokenizerRegistry()
    payload = byte_tokenizer()
    id_ = tokenizer_id_of(payload)
    await registry.add("chat", id_, payload)
    await registry.add("base", id_, payload.model_copy(update={"chat_template": None}))
    await registry.add("odd", id_, payload.model_copy(update={"chat_template": "{% if"}))
    chat, base, odd = (registry.get(name, id_) for name in ("chat", "base", "odd"))
    assert chat is not None
    assert base is not None
    assert odd is not None
    assert chat.encoder is base.encoder
    assert chat.chat is not None
    assert base.chat is None
    assert odd.chat is None  # a broken template affects only chats
    assert registry.get("other", "t") is None


async def test_a_broken_tokenizer_is_rejected() -> None:
    for broken in ("{}", "not json"):
        payload = TokenizerResponse(tokenizer_json=broken, special_ids=SpecialIds(), vocab_size=1)
        with pytest.raises(InvalidRequest):
            await TokenizerRegistry().add("m", "t", payload)
