"""Prompts as token ids, and token ids as text."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from parrot.gateway.transcript import Message, needs_thread, transcript_of
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.serve.graph.nodes import TextPiece, TokenizedText
from parrot.serve.prompts.encode import ModelTokenizer, Style, encode_prompt
from parrot.serve.prompts.segments import Segment

TokenPrompt = tuple[str, TokenizedText | None]
"""A prompt's text, and its tokens if the text does not encode to them."""


async def prompt_tokens(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> list[int]:
    """The token ids of the prompt. Raises as `transcript_of` does, and `UnsupportedField` if the
    model's engines take text."""
    if tokenizer is None:
        raise UnsupportedField(f"ServeCore has no tokenizer of `{model}`", param="model")

    def split() -> list[TextPiece]:
        return transcript_of(prompt, options, model, tokenizer).pieces()

    pieces = await asyncio.to_thread(split) if needs_thread(prompt, tokenizer) else split()
    segments = [Segment(piece.kind, piece.text) for piece in pieces]
    units = await encode_prompt(segments, False, tokenizer)
    parts = [ids for ids in units if not isinstance(ids, str)]
    return list(chain.from_iterable(parts))  # `chain` is fast for millions of ids


async def prompt_of_tokens(
    ids: Sequence[int], model: str, tokenizer: ModelTokenizer | None
) -> TokenPrompt:
    """A prompt of exactly these token ids. Its text includes special tokens, except a first BOS
    token. Raises `UnsupportedField` if the model's engines take text, and `InvalidRequest` for an
    id outside of the vocabulary."""
    if tokenizer is None:
        message = f"the engines of `{model}` take text: send the prompt as text"
        raise UnsupportedField(message, param="prompt")
    encoder = tokenizer.encoder
    if (largest := max(ids)) >= encoder.num_tokens:
        message = f"token id {largest} is outside of the vocabulary of {encoder.num_tokens}"
        raise InvalidRequest(message, param="prompt")
    given = tuple(ids)
    shown = given[1:] if given[0] == tokenizer.bos else given
    text = await asyncio.to_thread(encoder.decode, shown, special=True)
    usual = await encoder.encode(text, Style(special=True, first=True))
    is_usual = tokenizer.with_bos(usual) == given
    return text, None if is_usual else TokenizedText(tokenizer.tokenizer_id, given)


async def text_of_tokens(ids: Sequence[int], model: str, tokenizer: ModelTokenizer | None) -> str:
    """The text of the ids, without special tokens. Raises `UnsupportedField` if the model's engines
    take text."""
    if tokenizer is None:
        raise UnsupportedField(f"ServeCore has no tokenizer of `{model}`", param="model")
    return await asyncio.to_thread(tokenizer.encoder.decode, ids)
