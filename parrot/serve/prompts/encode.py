"""Encodes prompts for one engine: to token ids by its tokenizer, or to text if its contexts are
text.

Pieces are encoded separately. So a prompt's tokens before a boundary do not depend on the text
after it."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer

from parrot.protocol.engine_api import TokenizerResponse
from parrot.protocol.errors import InvalidRequest, PromptTooLong, UnsupportedField
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import PieceKind
from parrot.serve.prompts.segments import Segment
from parrot.serve.prompts.templates import ModelTemplate
from parrot.utils.byte_symbols import byte_symbols
from parrot.utils.config import ConfigError
from parrot.utils.heaps import LruDict

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "▁"  # sentencepiece's form of a space.

Ids = tuple[int, ...]
LARGE_TEXT = 8192  # Characters. A longer text is encoded in a thread.
# Bytes of a text in UTF-8. A longer text is rejected: its ids would block the interpreter.
MAX_ENCODED = 2**22
CACHE_IDS = 4 * 2**20  # Token ids that an encoder caches. A larger cache encodes less text again.
_MAX_TEXT_BYTES = 2**20  # Bytes of a file in `public_prefixes`.
_UNLIMITED = 2**62
_LONGEST_UNKNOWN = 256  # Assumed longest token, in characters, if the tokenizer is unknown.
_MAX_COMPOSED = 4  # Characters that a tokenizer's normalizer combines into one.
Units = Ids | str
"""A part of a prompt: token ids, or text for engines whose contexts are text."""


class TokenBytes:
    """The bytes of tokens by id. An unknown id has no bytes. A special token has its text's."""

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


class Style(NamedTuple):
    """How a piece is encoded."""

    special: bool  # texts of special tokens become these tokens; otherwise they are plain text
    first: bool  # the piece starts the prompt, where some tokenizers add a space


class PieceEncoder:
    """The encoder of one tokenizer.json, with an LRU cache of results."""

    def __init__(self, tokenizer_json: str, cache_ids: int = CACHE_IDS) -> None:
        definition = orjson.loads(tokenizer_json)
        inner = _without_leading_space(definition)
        inner_json = tokenizer_json if inner == definition else orjson.dumps(inner).decode()
        load = cache(_load)  # Most tokenizers encode the first piece like all others.
        self._tokenizers = {
            style: load(tokenizer_json if style.first else inner_json, plain=not style.special)
            for style in starmap(Style, product((True, False), repeat=2))
        }
        self._decoder = self._tokenizers[Style(special=True, first=True)]
        added = self._decoder.get_added_tokens_decoder()
        self.vocabulary = TokenBytes(definition, self._decoder)
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.special_texts = frozenset(str(token.content) for token in added.values())
        self.longest_token = max(map(len, self._decoder.get_vocab()), default=1)
        """In characters. A token for a part of a character counts as one."""
        self._cache: LruDict[tuple[Style, str], Ids] = LruDict(cache_ids, weigh=len)
        self._in_threads: dict[tuple[Style, str], asyncio.Task[Ids]] = {}

    def encode_now(self, text: str, style: Style) -> Ids | None:
        """The ids; None if the text is so long that only `encode` may encode it."""
        found = self._cache.get((style, text))
        if found is not None or len(text) > LARGE_TEXT:
            return found
        ids = self._encode(text, style)
        self._cache.put((style, text), ids)
        return ids

    async def encode(self, text: str, style: Style) -> Ids:
        """The ids, without blocking the event loop: the tokenizer releases the GIL. Concurrent
        calls with equal texts encode them once. Raises `PromptTooLong` for a text that exceeds
        `MAX_ENCODED`."""
        known = self.encode_now(text, style)
        if known is not None:
            return known
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_ENCODED:
            message = f"a text has {num_bytes} bytes; the limit for one text is {MAX_ENCODED}"
            raise PromptTooLong(message)
        running = self._in_threads.get((style, text))
        if running is None:
            running = asyncio.create_task(self._encode_in_thread(text, style))
            self._in_threads[style, text] = running
        return await asyncio.shield(running)

    @property
    def num_tokens(self) -> int:
        return int(self._decoder.get_vocab_size(with_added_tokens=True))

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of the ids; that of special tokens only if `special`."""
        return str(self._decoder.decode(list(ids), skip_special_tokens=not special))

    def token_text(self, token_id: int | None) -> str:
        text = None if token_id is None else self._decoder.id_to_token(token_id)
        return text or ""

    async def _encode_in_thread(self, text: str, style: Style) -> Ids:
        try:
            ids = await asyncio.to_thread(self._encode, text, style)
        finally:
            del self._in_threads[style, text]
        self._cache.put((style, text), ids)
        return ids

    def _encode(self, text: str, style: Style) -> Ids:
        # The batch call of one text is twice as fast as `encode`, which computes offsets.
        (encoding,) = self._tokenizers[style].encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoding.ids)


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """An encoder with a model's own rules. Models with the same tokenizer.json may differ here, for
    example a base model and its chat version."""

    tokenizer_id: str
    encoder: PieceEncoder
    bos: int | None
    eos: frozenset[int]
    chat: ModelTemplate | None  # None: the model has no chat template
    public: tuple[Ids, ...] = ()  # token prefixes of prompts with a public text, longest first

    def with_bos(self, ids: Ids) -> Ids:
        """The first ids of a prompt, after the BOS token if the model has one."""
        if self.bos is None or ids[:1] == (self.bos,):
            return ids
        return (self.bos, *ids)

    def stop_ids(self, sampling: SamplingConfig) -> frozenset[int]:
        """The tokens that end an output."""
        eos: frozenset[int] = frozenset() if sampling.ignore_tokenizer_eos else self.eos
        return eos.union(sampling.stop_token_ids)

    def clean_output(
        self, ids: Sequence[int], stop_ids: Container[int], stopped: bool
    ) -> Ids | None:
        """The ids of an output's text, without the stop token that ended it. None if the ids may
        not match the text: then the text must be tokenized again."""
        if stopped:
            if not ids or ids[-1] not in stop_ids:
                return None  # A stop string ended the output, perhaps within a token.
            ids = ids[:-1]
        if not self.encoder.special_ids.isdisjoint(ids):
            return None  # The model generated a special token. The text form is harmless.
        return tuple(ids)


class TokenizerRegistry:
    """The tokenizers of all models. Engines with the same model share one."""

    def __init__(self, public_files: Sequence[str] = ()) -> None:
        """Raises `ConfigError` for an invalid file of a public text."""
        self._public_texts = read_texts(public_files)
        self._models: dict[tuple[str, str], ModelTokenizer] = {}
        self._encoders: dict[str, PieceEncoder] = {}

    def get(self, model: str, tokenizer_id: str) -> ModelTokenizer | None:
        return self._models.get((model, tokenizer_id))

    async def add(self, model: str, tokenizer_id: str, payload: TokenizerResponse) -> None:
        """Raises `InvalidRequest` if the payload is not a usable tokenizer, or has another id."""
        encoder = self._encoders.get(tokenizer_id)
        if encoder is None:
            encoder = await asyncio.to_thread(_build_encoder, tokenizer_id, payload.tokenizer_json)
            encoder = self._encoders.setdefault(tokenizer_id, encoder)
        ids = payload.special_ids
        chat = await asyncio.to_thread(_chat_template, payload, encoder)
        tokenizer = ModelTokenizer(
            tokenizer_id, encoder, ids.bos if ids.add_bos else None, frozenset(ids.eos), chat
        )
        found = [
            one for text in self._public_texts for one in await _public_prefixes(text, tokenizer)
        ]
        public = tuple(sorted(found, key=len, reverse=True))
        self._models[model, tokenizer_id] = replace(tokenizer, public=public)


def _build_encoder(tokenizer_id: str, tokenizer_json: str) -> PieceEncoder:
    """The encoder. All engines with this tokenizer id share it."""
    if hashlib.sha256(tokenizer_json.encode()).hexdigest() != tokenizer_id:
        raise InvalidRequest("the engine's `tokenizer_id` is not the SHA-256 of its tokenizer")
    try:
        return PieceEncoder(tokenizer_json)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise InvalidRequest(f"the engine's tokenizer is unusable: {error}") from None


def _chat_template(payload: TokenizerResponse, encoder: PieceEncoder) -> ModelTemplate | None:
    """The template, with all its markup rendered. None also for a broken template, because only
    chat calls need it. For a thread: a long template takes seconds."""
    if payload.chat_template is None:
        return None
    ids = payload.special_ids
    bos, eos = encoder.token_text(ids.bos), encoder.token_text(ids.eos[0] if ids.eos else None)
    try:
        chat = ModelTemplate(payload.chat_template, bos, eos)
    except InvalidRequest as error:
        logger.warning("%s; chat calls will be rejected", error)
        return None
    chat.learn()
    return chat


async def _public_prefixes(text: str, tokenizer: ModelTokenizer) -> list[Ids]:
    """The first tokens of prompts, and of chats' system messages, that start with the text."""
    encoder, chat = tokenizer.encoder, tokenizer.chat
    found = [await encoder.encode(text, Style(special=True, first=True))]
    if chat is not None:
        try:
            markup = chat.markup(1, has_system=True)[0]
        except InvalidRequest:
            pass  # The template has no system message.
        else:
            message = text.strip() if chat.strips else text
            ids = await encoder.encode(markup, Style(special=True, first=True))
            found.append(ids + await encoder.encode(message, Style(special=True, first=False)))
    return [tokenizer.with_bos(ids) for ids in found]


def _load(definition: str, *, plain: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = plain
    return tokenizer


def _without_leading_space(definition: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer for pieces inside a prompt. Tokenizers like sentencepiece add a space before
    each text, which is correct only at the start of a prompt."""
    return definition | {
        part: _strip_prefixing(definition.get(part)) for part in ("normalizer", "pre_tokenizer")
    }


def _strip_prefixing(step: Any) -> Any:
    if not isinstance(step, dict):
        return step
    match step.get("type"):
        case "Prepend":
            return None
        case "Metaspace":
            return {k: v for k, v in step.items() if k != "add_prefix_space"} | {
                "prepend_scheme": "never"
            }
        case "ByteLevel" if step.get("add_prefix_space"):
            return step | {"add_prefix_space": False}
        case "Sequence":
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            inner = [_strip_prefixing(s) for s in step[name]]
            return step | {name: [s for s in inner if s is not None]}
        case _:
            return step


def read_texts(paths: Sequence[str]) -> list[str]:
    """The texts of the files, without the line break at the end. Raises `ConfigError` for a file
    that is not a text of 1 to 1,048,576 bytes."""
    return [_read_text(path) for path in paths]


def _read_text(path: str) -> str:
    if not Path(path).is_file():  # Reading a pipe would block until it has a writer.
        raise ConfigError(f"public_prefixes: {path}: is not a regular file")
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"public_prefixes: {path}: cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_TEXT_BYTES:
        raise ConfigError(f"public_prefixes: {path}: has more than {_MAX_TEXT_BYTES} bytes")
    try:
        text = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError(f"public_prefixes: {path}: is not UTF-8: {error.reason}") from None
    if not text.strip():
        raise ConfigError(f"public_prefixes: {path}: is empty")
    return text


async def encode_prompt(
    segments: Sequence[Segment],
    chat: bool,
    tokenizer: ModelTokenizer | None,
    *,
    limit: int | None = None,
    is_whole: bool = True,
    num_before: int = 0,
) -> list[Units]:
    """One item per segment, chat markup included, of a prompt with less than `limit` tokens (None:
    no limit). Unless the prompt `is_whole`, more segments of the last question follow. The prompt
    has `num_before` tokens before these segments, which then are not a chat. Suspends only to
    tokenize a long text. Without a tokenizer, the turns of a chat are plain text without roles.

    Raises `UnsupportedField` if the model has no chat template, or if the prompt has tokens of
    another tokenizer. Raises `PromptTooLong` early, without encoding the whole prompt."""
    limit = _UNLIMITED if limit is None else limit
    require_chars(sum([segment.num_chars for segment in segments]), tokenizer, limit - num_before)
    begins_with_tokens = bool(segments) and segments[0].kind is PieceKind.TOKENS
    if begins_with_tokens:
        _require_tokens_of(tokenizer, segments[0])
    if tokenizer is None:
        return [_plain(segment) for segment in segments]
    if not chat:
        room = _TokenLimit(limit, num_before)
        encoded = [
            room.add(await _encode(segment, i == num_before == 0, tokenizer))
            for i, segment in enumerate(segments)
        ]
    elif tokenizer.chat is None:
        raise UnsupportedField("the model has no chat template", param="chat")
    else:
        encoded = await _encode_chat(segments, is_whole, tokenizer, _TokenLimit(limit))
    if not num_before and not begins_with_tokens:
        encoded[0] = tokenizer.with_bos(encoded[0])
    return list(encoded)


def require_chars(num_chars: int, tokenizer: ModelTokenizer | None, limit: int) -> None:
    """Raise `PromptTooLong` if `num_chars` characters cannot fit below `limit` tokens."""
    longest = _LONGEST_UNKNOWN if tokenizer is None else tokenizer.encoder.longest_token
    if num_chars >= limit * longest * _MAX_COMPOSED:
        message = f"the prompt has {num_chars} characters; the limit is {limit - 1} tokens"
        num_tokens = num_chars // (longest * _MAX_COMPOSED)
        raise CountedPromptTooLong(message, num_tokens, limit, are_all=False)


class CountedPromptTooLong(PromptTooLong):
    """The prompt has `num_tokens` tokens, or at least that number unless `are_all`. `limit` is the
    model's longest sequence, including one generated token."""

    def __init__(self, message: str, num_tokens: int, limit: int, *, are_all: bool = True) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.limit = limit
        self.are_all = are_all


def _require_tokens_of(tokenizer: ModelTokenizer | None, segment: Segment) -> None:
    tokens = segment.tokenized
    if tokenizer is None or tokens is None or tokens.tokenizer_id != tokenizer.tokenizer_id:
        raise UnsupportedField(
            "the engine's tokenizer is not the one of the prompt", param="prompt"
        )


class _TokenLimit:
    """Counts the tokens of a prompt up to the limit."""

    def __init__(self, limit: int, num_taken: int = 0) -> None:
        self._limit = limit
        self._num_taken = num_taken

    def add(self, ids: Ids) -> Ids:
        """Count the ids, and return them. Raises `PromptTooLong`."""
        self._num_taken += len(ids)
        if self._num_taken >= self._limit:
            message = f"the prompt has at least {self._num_taken} tokens"
            message += f"; the limit is {self._limit - 1}"
            raise CountedPromptTooLong(message, self._num_taken, self._limit, are_all=False)
        return ids


async def encode_text(text: str, tokenizer: ModelTokenizer | None) -> Units:
    """Encode plain text inside a prompt."""
    if tokenizer is None:
        return text
    return await _encode_text(text, Style(special=False, first=False), tokenizer)


def join(parts: Sequence[Units]) -> Units:
    """The concatenated parts, all ids or all text. Without parts: no ids."""
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
    segments: Sequence[Segment], is_whole: bool, tokenizer: ModelTokenizer, room: "_TokenLimit"
) -> list[Ids]:
    """Encode a chat. Markup before a message is added to its first segment. Markup before an answer
    is added to the last segment of its question:

        [m0 "Hello "] [name m1] [answer] [m2 "And?" m3]      with m = ModelTemplate.markup(2)"""
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
        encoded.append(room.add(ids))
    return encoded


def _stripped(segment: Segment, at_start: bool) -> Segment:
    """The segment without white space at its message's edges. A changed text has no known ids."""
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
