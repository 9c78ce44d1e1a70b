"""A task's prompt in the units of one engine: token ids, or characters where contexts are text."""

from collections.abc import Sequence
from itertools import chain

from parrot.protocol.errors import PromptTooLong, UnsupportedField
from parrot.serve.graph.nodes import PieceKind
from parrot.serve.prompts.segments import Segment
from parrot.serve.prompts.tokenizers import Ids, ModelTokenizer, Style

_UNLIMITED = 2**62
_LONGEST_UNKNOWN = 256  # characters of a token, where the engine's tokenizer is not known
_MAX_COMPOSED = 4  # characters that a tokenizer's normaliser makes one of

Units = Ids | str
"""A part of a prompt: ids for one engine, its text for another."""


async def encode_prompt(
    segments: Sequence[Segment],
    chat: bool,
    tokenizer: ModelTokenizer | None,
    *,
    limit: int | None = None,
    is_whole: bool = True,
    num_before: int = 0,
) -> list[Units]:
    """One item per segment, chat markup included, of a prompt of less than `limit` tokens (None:
    any); not `is_whole`: the last question goes on behind them. `num_before`: tokens of the prompt
    before these segments, which are no chat then. Does not suspend unless a long text has to be
    tokenised. Without a tokenizer a chat's turns are plain text: the engine knows no roles.

    Raises `UnsupportedField` if the model has no chat template, or if the prompt is of another
    tokenizer's tokens, and `PromptTooLong`, with little work however long it is."""
    limit = _UNLIMITED if limit is None else limit
    require_chars(sum([segment.num_chars for segment in segments]), tokenizer, limit - num_before)
    begins_with_tokens = bool(segments) and segments[0].kind is PieceKind.TOKENS
    if begins_with_tokens:
        _require_tokens_of(tokenizer, segments[0])
    if tokenizer is None:
        return [_plain(segment) for segment in segments]
    if not chat:
        room = _Room(limit, num_before)
        encoded = [
            room.take(await _encode(segment, i == num_before == 0, tokenizer))
            for i, segment in enumerate(segments)
        ]
    elif tokenizer.chat is None:
        raise UnsupportedField("the model has no chat template", param="chat")
    else:
        encoded = await _encode_chat(segments, is_whole, tokenizer, _Room(limit))
    if not num_before and not begins_with_tokens:
        encoded[0] = tokenizer.with_bos(encoded[0])
    return list(encoded)


def require_chars(num_chars: int, tokenizer: ModelTokenizer | None, limit: int) -> None:
    """Raise `PromptTooLong` if so many characters cannot be less than `limit` tokens."""
    longest = _LONGEST_UNKNOWN if tokenizer is None else tokenizer.encoder.longest_token
    if num_chars >= limit * longest * _MAX_COMPOSED:
        message = f"the prompt has {num_chars} characters; the limit is {limit - 1} tokens"
        raise PromptTooLong(message)


def _require_tokens_of(tokenizer: ModelTokenizer | None, segment: Segment) -> None:
    tokens = segment.tokenized
    if tokenizer is None or tokens is None or tokens.tokenizer_id != tokenizer.tokenizer_id:
        raise UnsupportedField("the engine has other tokens than the prompt", param="prompt")


class _Room:
    """The tokens that a prompt may still have."""

    def __init__(self, limit: int, num_taken: int = 0) -> None:
        self._limit = limit
        self._num_taken = num_taken

    def take(self, ids: Ids) -> Ids:
        """The same ids. Raises `PromptTooLong`."""
        self._num_taken += len(ids)
        if self._num_taken >= self._limit:
            message = f"the prompt has {self._num_taken} tokens or more"
            raise PromptTooLong(f"{message}; the limit is {self._limit - 1}")
        return ids


async def encode_text(text: str, tokenizer: ModelTokenizer | None) -> Units:
    """Plain text in the middle of a prompt."""
    if tokenizer is None:
        return text
    return await _encode_text(text, Style(special=False, first=False), tokenizer)


def join(parts: Sequence[Units]) -> Units:
    """One after the other. All are of one kind; of no parts: no ids."""
    if parts and isinstance(parts[0], str):
        return "".join([part for part in parts if isinstance(part, str)])
    if len(parts) == 1:
        return parts[0]
    return tuple(chain.from_iterable([part for part in parts if not isinstance(part, str)]))


def _plain(segment: Segment) -> str:
    if segment.parts:
        return "".join(map(_plain, segment.parts))
    return f"{segment.text}\n\n" if segment.kind is PieceKind.SYSTEM else segment.text


async def _encode_chat(
    segments: Sequence[Segment], is_whole: bool, tokenizer: ModelTokenizer, room: "_Room"
) -> list[Ids]:
    """The markup before a message goes with its first segment, the markup before an answer with the
    last segment of its question:

        [m0 "Hello "] [name m1] [answer] [m2 "And?" m3]      with m = ChatTemplate.markup(2)"""
    chat = tokenizer.chat
    assert chat is not None
    num_turns = sum(segment.ends_turn for segment in segments) + (not is_whole)
    has_system = segments[0].kind is PieceKind.SYSTEM
    markup = chat.markup(num_turns, has_system=has_system)
    style = Style(special=True, first=False)
    used, at_start = 0, True
    encoded: list[Ids] = []
    for segment in segments:
        if chat.strips and segment.kind is not PieceKind.OUTPUT:
            segment = _stripped(segment, at_start)
        ids = await _encode(segment, False, tokenizer)
        if at_start:
            opening = Style(special=True, first=used == 0)
            ids = await _encode_text(markup[used], opening, tokenizer) + ids
            used += 1
        at_start = segment.kind in (PieceKind.OUTPUT, PieceKind.SYSTEM)
        if segment.ends_turn:
            ids += await _encode_text(markup[used], style, tokenizer)
            used += 1
        encoded.append(room.take(ids))
    return encoded


def _stripped(segment: Segment, at_start: bool) -> Segment:
    """Without white space at the edges of its message. What has to be stripped has other ids."""
    text = segment.text.lstrip() if at_start else segment.text
    text = text.rstrip() if segment.ends_turn or segment.kind is PieceKind.SYSTEM else text
    return segment if text == segment.text else segment._replace(text=text, tokenized=None)


async def _encode(segment: Segment, first: bool, tokenizer: ModelTokenizer) -> Ids:
    if segment.parts:
        return tuple([i for part in segment.parts for i in await _encode(part, False, tokenizer)])
    tokenized = segment.tokenized
    if tokenized is not None and tokenized.tokenizer_id == tokenizer.tokenizer_id:
        return tokenized.ids
    is_constant = segment.kind in (PieceKind.CONSTANT, PieceKind.SYSTEM)
    style = Style(special=is_constant, first=first)
    return await _encode_text(segment.text, style, tokenizer)


async def _encode_text(text: str, style: Style, tokenizer: ModelTokenizer) -> Ids:
    ids = tokenizer.encoder.encode_now(text, style)
    return await tokenizer.encoder.encode(text, style) if ids is None else ids
