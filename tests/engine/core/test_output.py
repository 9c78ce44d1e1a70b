import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from parrot.engine.core import output
from parrot.engine.core.output import (
    Detokenizer,
    Generation,
    Language,
    StopStrings,
    decode,
    unreported_outputs,
)
from parrot.engine.sim import BOS_ID, EOS_ID, byte_tokenizer_response
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.sampling import ResolvedSampling
from tests.support.byte_tokenizer import plain_byte_tokenizer

LANGUAGE = Language.of(byte_tokenizer_response())
TOKENIZER = LANGUAGE.tokenizer


def generation(stream=False, **sampling) -> Generation:
    return Generation(ResolvedSampling(**sampling), 0, LANGUAGE, stream)


def feed(out: Generation, data: bytes | list[int]):
    """Push tokens until the output ends. Returns the chunks of the stream."""
    chunks = []
    for token_id in data:
        out.push(token_id)
        if (chunk := out.take_chunk()) is not None:
            chunks.append(chunk)
        if out.finish_reason is not None:
            break
    return chunks


@given(st.text(max_size=60))
def test_any_text_is_streamed_without_loss(text):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces).rstrip("\ufffd") == text.rstrip("\ufffd")
    assert decode(TOKENIZER, list(text.encode())) == text.rstrip("\ufffd")


@given(st.lists(st.integers(0, 258), max_size=60))
@settings(max_examples=300)
def test_any_tokens_give_the_same_text_in_chunks_and_at_once(ids):
    detokenizer = Detokenizer(TOKENIZER)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text.rstrip("\ufffd") == decode(TOKENIZER, ids)
    text.encode()  # No chunk may end inside a character.


def language_with_a_token_that_ends_inside_a_character() -> tuple[Language, int]:
    """A token of byte-level vocabularies: a space and the first byte of a letter."""
    response = byte_tokenizer_response()
    model = orjson.loads(response.tokenizer_json)
    model["model"]["vocab"]["Ġà"] = 300
    return Language.of(
        response.model_copy(update={"tokenizer_json": orjson.dumps(model).decode()})
    ), 300


@pytest.mark.parametrize("stop", [None, "zz", "b "])
def test_whole_characters_before_a_broken_one_are_not_lost_at_the_end(stop):
    language, blank_and_byte = language_with_a_token_that_ends_inside_a_character()
    ids = [ord("a"), ord("b"), blank_and_byte]
    sampling = ResolvedSampling(max_gen_length=3, stop_str=stop)
    at_once, streamed = (Generation(sampling, 0, language, stream) for stream in (False, True))
    chunks = feed(streamed, ids)
    feed(at_once, ids)
    want = "a" if stop == "b " else "ab "
    assert "".join(chunk.text for chunk in chunks) == streamed.text() == at_once.text() == want
    assert [i for chunk in chunks for i in chunk.ids] == ids


def test_text_after_resumed_tokens_keeps_its_space() -> None:
    """SentencePiece decoders drop the space at the start of a text."""
    vocabulary = {"\u2581Hello": 0, "\u2581world": 1, "!": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.decoder = decoders.Metaspace()
    response = byte_tokenizer_response().model_copy(update={"tokenizer_json": tokenizer.to_str()})
    out = Generation(ResolvedSampling(max_gen_length=2), 0, Language.of(response), False, None, [0])
    feed(out, [1, 2])
    assert out.text() == " world!"


@given(st.text("aé😀", max_size=12), st.data())
def test_a_late_follower_gets_all_text_from_the_first_token(text, data):
    """The first follower starts the stream. The second joins later, often inside a character."""
    ids = [*text.encode(), 65]
    joins = [data.draw(st.integers(0, len(ids) - 1)) for _ in range(2)]
    out = generation(max_gen_length=len(ids), ignore_tokenizer_eos=True, logprobs=1)
    streams: list[list] = []
    for number, token_id in enumerate(ids):
        streams += [[out.start_streaming()] for _ in range(joins.count(number))]
        out.push(token_id, ([token_id, token_id], [-1.0, -1.0]))
        if out.is_streamed:
            chunk = out.take_chunk()
            for chunks in streams:
                chunks.append(chunk)
    for chunks in streams:
        there = [chunk for chunk in chunks if chunk is not None]
        assert "".join(chunk.text for chunk in there) == out.text() == text + "A"
        assert [i for chunk in there for i in chunk.ids] == ids
        assert [i for c in there for i in c.logprobs.ids] == list(out.logprobs.ids)


def test_outputs_without_a_stream_are_reported_up_to_the_newest_token(monkeypatch):
    whole, streamed, other = generation(), generation(stream=True), generation()
    for out in (whole, streamed, other):
        feed(out, b"abcdef")
    outputs = [(1, whole), (2, streamed), (3, other)]
    first = unreported_outputs(outputs, {})
    assert [(p.context_id, p.start, p.end) for p in first] == [(1, 0, 5), (3, 0, 5)]
    assert bytes(first[0].token_ids().tolist()) == b"abcde"
    feed(whole, b"g")
    reported = {part.context_id: part.end for part in first}
    assert [(p.start, p.end) for p in unreported_outputs(outputs, reported)] == [(5, 6), (5, 5)]
    monkeypatch.setattr(output, "_MAX_REPORTED_TOKENS", 24)
    assert [(p.start, p.end) for p in unreported_outputs(outputs, {})] == [(0, 6), (0, 2)]
    whole.start_streaming()
    assert [p.context_id for p in unreported_outputs(outputs, {})] == [3]


def test_the_rest_depends_on_the_text_before_it():
    """SentencePiece decoders drop the space of the first token only."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<0xE0>": 2}, "▁a"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Replace("▁", " "),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in (0, 1, 2)]
    assert "".join(pieces) + detokenizer.flush() == "a b" == decode(tokenizer, [0, 1, 2])


def test_no_piece_ends_inside_a_character():
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_special_tokens_are_not_text():
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(i) for i in [65, BOS_ID, 66]] == ["A", "", "B"]
    assert decode(TOKENIZER, [65, EOS_ID, 66]) == "AB"


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_stop_strings_cut_a_stream_like_a_search_of_the_whole_text(text, stops, data):
    finder = StopStrings(stops)
    out, rest = "", text
    while rest and not finder.found:
        size = data.draw(st.integers(1, len(rest)))
        out, rest = out + finder.push(rest[:size]), rest[size:]
    if not finder.found:
        assert not any(stop in text for stop in stops)
        assert out + finder.flush() == text
        return
    seen = text[: len(text) - len(rest)]
    assert out == seen[: min(at for stop in stops if (at := seen.find(stop)) >= 0)]
    assert finder.found in stops
    assert seen.startswith(finder.found, len(out))


def test_text_is_held_only_while_it_may_begin_a_stop_string():
    finder = StopStrings(["END"])
    assert finder.push("the E") == "the "
    assert finder.held == "E"
    assert finder.push("N") == ""
    assert finder.push("ergy") == "ENergy"
    assert finder.push(" END") == " "
    assert finder.found


def test_the_stop_string_that_ended_the_text_is_reported():
    out = generation(max_gen_length=9, stop_str=["x", "cd", "d"])
    feed(out, b"abcd")
    assert (out.text(), out.stop_string) == ("ab", "cd")
    assert out.finish_reason is FinishReason.STOP


def test_length_is_exact():
    out = generation(max_gen_length=3)
    feed(out, b"abcdef")
    assert out.finish_reason is FinishReason.LENGTH
    assert out.output_ids == list(b"abc")
    assert out.text() == "abc"


def test_a_limit_of_one_token_gives_one_token():
    out = generation(max_gen_length=1)
    feed(out, b"xyz")
    assert (out.text(), out.finish_reason) == ("x", FinishReason.LENGTH)


def test_eos_ends_the_output_and_is_not_text():
    out = generation()
    feed(out, [65, EOS_ID, 66])
    assert out.finish_reason is FinishReason.STOP
    assert out.output_ids == [65, EOS_ID]
    assert out.text() == "A"


def test_eos_may_be_ignored():
    out = generation(ignore_tokenizer_eos=True, max_gen_length=3)
    feed(out, [65, EOS_ID, 66])
    assert out.finish_reason is FinishReason.LENGTH
    assert out.text() == "AB"


def test_a_stop_id_with_text_of_its_own_ends_the_text_before_it():
    for stream in (False, True):
        out = generation(stream=stream, stop_token_ids=(ord("."),))
        feed(out, b"Hi. And")
        assert out.text() == "Hi"
        assert out.output_ids == list(b"Hi.")


def test_a_stop_string_across_tokens():
    out = generation(stop_str=("\n\n", "STOP"))
    feed(out, b"one\ntwo STOP three")
    assert out.finish_reason is FinishReason.STOP
    assert out.text() == "one\ntwo "
    assert out.output_ids == list(b"one\ntwo STOP")


def test_held_text_is_released_when_the_length_ends_the_output():
    out = generation(stop_str="STOP", max_gen_length=6)
    feed(out, b"abcSTOP")
    assert out.finish_reason is FinishReason.LENGTH
    assert out.text() == "abcSTO"


def test_a_text_cut_inside_a_character_has_no_broken_end():
    for stream in (False, True):
        out = generation(stream=stream, max_gen_length=3)
        feed(out, "a😀".encode())
        assert out.text() == "a"


@given(st.text("ab\né😀", max_size=20), st.sampled_from([None, "a", "ab", "\n\n", "é"]))
def test_chunks_add_up_and_each_is_the_text_of_its_ids(text, stop):
    data = [*text.encode(), EOS_ID]
    out = generation(stream=True, stop_str=stop)
    chunks = feed(out, data)
    assert out.finish_reason is not None
    assert "".join(chunk.text for chunk in chunks) == out.text()
    assert [i for chunk in chunks for i in chunk.ids] == out.output_ids
    for chunk in chunks[:-1]:
        assert bytes(chunk.ids).decode() == chunk.text
    plain = generation(stop_str=stop)
    feed(plain, data)
    assert plain.text() == out.text()


def test_a_stream_waits_while_its_text_is_uncertain():
    out = generation(stream=True, stop_str="END")
    out.push(ord("E"))
    assert out.take_chunk() is None
    out.push(ord("x"))
    chunk = out.take_chunk()
    assert (chunk.ids, chunk.text) == (list(b"Ex"), "Ex")
    assert out.take_chunk() is None


def test_the_tokenizer_id_depends_on_its_content():
    assert LANGUAGE.tokenizer_id == Language.of(byte_tokenizer_response()).tokenizer_id
    assert len(LANGUAGE.tokenizer_id) == 64


def test_tool_call_tokens_are_text() -> None:
    """Gemma's tool-call tokens. ServeCore receives the tokenizer unchanged."""
    special = {"<|tool_call>": 256, "<tool_call|>": 257, '<|"|>': 258, "<end>": 259}
    response = plain_byte_tokenizer(260, special)
    language = Language.of(response)
    assert language.response is response
    text = '<|tool_call>call:look{at:<|"|>sky<|"|>}<tool_call|>'
    ids = [*language.tokenizer.encode(text).ids, 259]
    assert set(special.values()) <= set(ids)
    assert decode(language.tokenizer, ids) == text
    detokenizer = Detokenizer(language.tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text
