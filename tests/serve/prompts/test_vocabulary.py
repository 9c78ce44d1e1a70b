"""The concatenated bytes of tokens are the bytes of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from parrot.serve.prompts.encode import PieceEncoder, Style
from tests.support.byte_tokenizer import byte_tokenizer

BYTES = PieceEncoder(byte_tokenizer().tokenizer_json)


def sentencepiece() -> PieceEncoder:
    pieces = ["<unk>", "▁", "▁he", "llo", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>"])
    return PieceEncoder(tokenizer.to_str())


def wordpiece() -> PieceEncoder:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return PieceEncoder(tokenizer.to_str())


@given(st.text())
def test_byte_level_tokens(text: str) -> None:
    ids = BYTES.encode_now(text, Style(special=False, first=False))
    assert ids is not None
    assert b"".join([BYTES.vocabulary[i] for i in ids]) == text.encode()


@pytest.mark.parametrize("text", ["a a", "  aé€", "€"])
def test_sentencepiece_tokens(text: str) -> None:
    encoder = sentencepiece()
    ids = encoder.encode_now(text, Style(special=False, first=False))
    assert ids is not None
    assert b"".join([encoder.vocabulary[i] for i in ids]) == text.encode()


def test_other_tokenizers_use_their_decoder() -> None:
    assert wordpiece().vocabulary[1] == b"play"


def test_special_tokens_and_unused_ids() -> None:
    vocabulary = sentencepiece().vocabulary
    assert vocabulary[261] == b"<s>"
    assert [vocabulary[i] for i in (-1, 262, 2**30)] == [b""] * 3
