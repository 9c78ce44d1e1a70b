"""A long plain text is split at token boundaries, and at the same places if more text follows."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from parrot.gateway.transcript import transcript_of

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = st.text(alphabet="ab1\n \t.,_/é'", max_size=60)
CORPUS = ["ab\nab. ab\n\na1,\n a_b/a\n", "a\nb\n1\n.\n/a.\nb é\né 'a\n 1\n\n\na", "\n\nab ab\n"] * 4


def byte_level(*first: pre_tokenizers.PreTokenizer, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def like_llama_2() -> Tokenizer:
    """A tokenizer without words: it may merge any characters except a newline, which is a byte."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=bytes_, show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", "") for text in CORPUS], trainer)
    return tokenizer


TOKENIZERS = {
    "gpt-2": byte_level(use_regex=True),
    "gpt-4": byte_level(pre_tokenizers.Split(Regex(GPT_4), "isolated"), use_regex=False),
    "llama-2": like_llama_2(),
}


def parts(text: str) -> list[str]:
    with patch("parrot.gateway.transcript._PART", 4):
        return [piece.text for piece in transcript_of(text, {}, "m", None).pieces()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_the_parts_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    found = [id_ for part in parts(text) for id_ in tokenizer.encode(part).ids]
    assert found == tokenizer.encode(text).ids


@given(text=TEXTS, more=TEXTS)
def test_a_longer_text_has_the_same_parts(text: str, more: str) -> None:
    before, after = parts(text), parts(text + more)
    assert "".join(after) == text + more
    assert after[: len(before) - 1] == before[:-1]


def test_short_texts_and_long_lines_are_not_cut() -> None:
    assert parts("a\nb") == ["a\nb"]
    assert parts("a" * 100) == ["a" * 100]
    assert parts("aaaa\nb\ncccc\n\nd\ne") == ["aaaa\n", "b\ncccc\n\nd\n", "e"]
