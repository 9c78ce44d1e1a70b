"""Synthetic text has exactly the tokens that it was asked for."""

import pytest
from tokenizers import Tokenizer

from benchmark.apps.text import one_token_words
from parrot.cli.bench.text import TextSource
from parrot.engine.models.tokenizers import word_tokenizer
from tests.support.byte_tokenizer import byte_tokenizer

DEFINITIONS = {
    "words": word_tokenizer(3000).tokenizer_json,
    "bytes": byte_tokenizer().tokenizer_json,
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_pieces_have_their_tokens_alone_and_joined(name):
    tokenizer = Tokenizer.from_str(DEFINITIONS[name])
    text = TextSource(one_token_words(DEFINITIONS[name]))
    pieces = [text.constant(7, "a"), text.data(500, "b"), *text.document(0, 100, 33)]
    assert [piece.tokens for piece in pieces] == [7, 500, 33, 33, 33, 1]
    assert [len(tokenizer.encode(p.content).ids) for p in pieces] == [p.tokens for p in pieces]
    assert len(tokenizer.encode("".join(p.content for p in pieces)).ids) == 607


def test_the_same_key_gives_the_same_text_and_another_salt_another():
    text = TextSource(one_token_words(DEFINITIONS["words"]))
    assert text.constant(20, "key", 1) == text.constant(20, "key", 1)
    assert text.constant(20, "key", 1) != text.constant(20, "key", 2)
    assert text.constant(20, "key", 1) != text.salted(1).constant(20, "key", 1)


def test_a_tokenizer_without_words_is_refused():
    with pytest.raises(ValueError, match="too few"):
        one_token_words(word_tokenizer(5).tokenizer_json)
