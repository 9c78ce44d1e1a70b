"""The bytes that tokens stand for in a text."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from parrot.utils.byte_symbols import byte_symbols

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "▁"  # how sentencepiece writes it


class Vocabulary:
    """Looks up tokens by id; ids of no token stand for nothing. Special tokens stand for the text
    that they are written as."""

    def __init__(self, definition: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """`definition`: the tokenizer.json of `tokenizer`."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id_: str(token.content).encode() for id_, token in added.items()}
        kinds = set(_kinds(definition.get("decoder")))
        self._byte_of = None
        if "ByteLevel" in kinds:
            self._byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        self._is_sentencepiece = bool(kinds & {"ByteFallback", "Metaspace"})

    def __getitem__(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return content
        symbols = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if symbols is None:
            return b""
        if self._byte_of is not None:
            return b"".join([_as_byte(self._byte_of, symbol) for symbol in symbols])
        if (found := _BYTE_TOKEN.fullmatch(symbols)) is not None:
            return bytes.fromhex(found[1])
        if self._is_sentencepiece:
            return symbols.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _as_byte(byte_of: Mapping[str, int], symbol: str) -> bytes:
    byte = byte_of.get(symbol)
    return symbol.encode() if byte is None else bytes((byte,))


def _kinds(step: Any) -> Iterator[str]:
    """The types of a decoder's steps."""
    if isinstance(step, Mapping):
        yield str(step.get("type"))
        for inner in step.get("decoders") or ():
            yield from _kinds(inner)
