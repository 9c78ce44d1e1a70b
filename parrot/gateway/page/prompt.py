"""The prompt of a call as the model received it, cut where its cached part ended.

links      pieces of each call that the prompt continues, then of the call itself
parts      pieces with roles, as the segments that ServeCore sent
answer     parts with texts; the part in which the cached tokens end becomes two"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from parrot.protocol.errors import ParrotError
from parrot.serve.graph.nodes import (
    Completion,
    PieceKind,
    TextPiece,
    TokenizedText,
    VariableState,
)
from parrot.serve.prompts.encode import Ids, ModelTokenizer, Units, encode_prompt
from parrot.serve.prompts.segments import Segment, preceding

_MAX_CHARS = 2**20  # Characters of a prompt that are shown.
_ROLE = re.compile(r"system|developer|user|assistant|tool", re.IGNORECASE)
# The start of a message in the markup of a chat template.
_TURN = re.compile(r"<\|?(?:[^<>]*>)?(system|developer|user|assistant|tool)\b", re.IGNORECASE)
_PREFIX = "prefix: "  # The start of a call's remark about its prefix.
Row = dict[str, Any]


class PromptPiece(NamedTuple):
    """A piece of a prompt. `text` is None if it is a variable without a value."""

    kind: PieceKind
    text: str | None
    name: str | None = None  # of the variable
    tokenized: TokenizedText | None = None


class CallPrompt(NamedTuple):
    """The prompt of a call, and its cached part."""

    links: Sequence[Sequence[PromptPiece]]
    is_chat: bool  # ServeCore adds the markup of the model's chat template
    is_api: bool  # a client without a session sent it; its template's markup is in the pieces
    model: str | None
    cached_tokens: int | None  # None: not known
    prompt_tokens: int | None
    remark: str | None


def live_prompt(completion: Completion, *, is_api: bool) -> CallPrompt:
    """The prompt of a completion of a live session."""
    links = [[*_fill(one), _output(one)] for one in preceding(completion)]
    options, stats = completion.options, completion.stats
    is_known = completion.is_finished and not stats.is_reused and stats.prompt_tokens > 0
    return CallPrompt(
        [*links, list(_fill(completion))],
        options.chat,
        is_api,
        stats.model or next(iter(options.models), None),
        stats.cached_tokens if is_known else None,
        stats.cached_tokens + stats.computed_tokens if is_known else None,
        options.remark or None,
    )


def _fill(completion: Completion) -> Iterator[PromptPiece]:
    for piece in completion.fill:
        if isinstance(piece, TextPiece):
            yield PromptPiece(piece.kind, piece.text, None, piece.tokenized)
        else:
            value = piece.variable
            text = value.text if value.state is VariableState.READY else None
            yield PromptPiece(PieceKind.VALUE, text, value.name, value.tokenized)


def _output(completion: Completion) -> PromptPiece:
    output = completion.output
    text = output.text if output.state is VariableState.READY else None
    return PromptPiece(PieceKind.OUTPUT, text, output.name, output.tokenized)


async def prompt_answer(prompt: CallPrompt, tokenizer: ModelTokenizer | None) -> Row:
    """The prompt as the page shows it: `prompt` is a list of `{role, name?, text, cached}`. A
    `text` is null if the value did not exist. Unless the answer `is_exact`, the end of the cached
    part is estimated."""
    pieces = [piece for link in prompt.links for piece in link]
    known = [piece for link in prompt.links for piece in _segments(link, is_chat=prompt.is_chat)]
    num_known = next((i for i, one in enumerate(known) if one is None), len(known))
    segments = [segment for segment in known[:num_known] if segment is not None]
    try:
        units: Sequence[Units] = await encode_prompt(segments, prompt.is_chat, tokenizer)
    except ParrotError:
        units = [segment.text for segment in segments]
    roles = list(_roles(pieces, is_chat=prompt.is_chat, is_api=prompt.is_api))
    cached = _cached_units(prompt, units)
    rows = await asyncio.to_thread(_rows, prompt.is_chat, tokenizer, segments, units, cached)
    shown: list[Row] = []
    for role, piece, texts in zip(roles, pieces, rows, strict=False):
        shown += [_named({"role": role, "name": piece.name} | text) for text in texts]
    for role, piece in list(zip(roles, pieces, strict=True))[num_known:]:
        unknown = {"role": role, "name": piece.name, "text": piece.text, "cached": False}
        shown.append(_named(unknown))
    is_exact = all(isinstance(part, tuple) for part in units) and prompt.cached_tokens is not None
    return {
        "prompt": list(_cut(shown)),
        "left_by": None if prompt.remark is None else prompt.remark.removeprefix(_PREFIX),
        "prompt_tokens": prompt.prompt_tokens,
        "cached_tokens": prompt.cached_tokens,
        "is_exact": is_exact,
    }


def _named(row: Row) -> Row:
    """The row, without a name if it is no variable."""
    return {key: value for key, value in row.items() if key != "name" or value is not None}


def _segments(link: Sequence[PromptPiece], *, is_chat: bool) -> Iterator[Segment | None]:
    """The segments that ServeCore made of the pieces; None for a variable without a value."""
    for i, piece in enumerate(link):
        is_last = i + 1 == len(link) or link[i + 1].kind is PieceKind.OUTPUT
        ends_turn = is_chat and piece.kind is not PieceKind.OUTPUT and is_last
        if piece.text is None:
            yield None
        else:
            yield Segment(piece.kind, piece.text, piece.tokenized, ends_turn)


def _roles(pieces: Sequence[PromptPiece], *, is_chat: bool, is_api: bool) -> Iterator[str]:
    """`system`, `user`, `assistant` and `markup` for conversations; `template`, `input` and
    `output` for the prompts of programs. The markup before a client's message names its role."""
    has_messages = any(piece.kind is not PieceKind.CONSTANT for piece in pieces)
    markup = ""
    for piece in pieces:
        match piece.kind:
            case PieceKind.SYSTEM:
                yield "system"
            case PieceKind.OUTPUT if is_chat or is_api or piece.name is None:
                yield "assistant"
            case PieceKind.OUTPUT:
                yield "output"
            case _ if is_chat or (is_api and not has_messages):
                yield "user"
            case PieceKind.CONSTANT:
                yield "markup" if is_api else "template"
                markup = piece.text or ""
            case _ if is_api and piece.name is None:
                found = _ROLE.findall(markup)
                yield found[-1].lower() if found else "user"
            case _:
                yield "input"


def _cached_units(prompt: CallPrompt, units: Sequence[Units]) -> int:
    """The cached part of the prompt, in its units: tokens, or characters as an estimate."""
    cached, length = prompt.cached_tokens, sum(map(len, units))
    if not cached:
        return 0
    if all(isinstance(part, tuple) for part in units):
        return min(cached, length)
    return round(length * min(1.0, cached / max(1, prompt.prompt_tokens or 0)))


def _rows(
    is_chat: bool,
    tokenizer: ModelTokenizer | None,
    segments: Sequence[Segment],
    units: Sequence[Units],
    num_cached: int,
) -> list[list[Row]]:
    """For each segment, the parts of its text. Runs in a thread, because a long prompt has
    many tokens to decode."""
    rows = []
    left = num_cached
    added = _markup(segments, tokenizer) if is_chat else repeat(("", ""))
    for segment, part, (before, after) in zip(segments, units, added, strict=False):
        has_markup = isinstance(part, tuple) and is_chat
        text = _decoded(part, tokenizer) if has_markup else _bos(part, tokenizer) + segment.text
        num = min(left, len(part))
        left -= num
        if num in (0, len(part)):
            is_cached = num > 0 or (not part and left > 0)
            cut = len(text) if is_cached else 0
        else:
            head = _decoded(part[:num], tokenizer)
            cut = len(head) if text.startswith(head) else round(len(text) * num / len(part))
        rows.append(list(_cut_rows(text, _spans(text, before, after), cut)))
    return rows


def _markup(
    segments: Sequence[Segment], tokenizer: ModelTokenizer | None
) -> Iterator[tuple[str, str]]:
    """The chat template's markup before and after each segment."""
    if tokenizer is None or tokenizer.chat is None or not segments:
        yield from repeat(("", ""), len(segments))
        return
    num_turns = sum(segment.ends_turn for segment in segments)
    has_system = segments[0].kind is PieceKind.SYSTEM
    texts = iter(tokenizer.chat.markup(num_turns, has_system=has_system))
    at_start = True
    for segment in segments:
        before = next(texts, "") if at_start else ""
        yield before, next(texts, "") if segment.ends_turn else ""
        at_start = segment.kind in (PieceKind.OUTPUT, PieceKind.SYSTEM)


def _spans(text: str, before: str, after: str) -> Iterator[tuple[int, Row]]:
    """The end of each part of a segment, with the fields that this part changes. Only the segment's
    own text has the name of its variable. A system message in the markup is the template's."""
    start = text.find(before) + len(before) if before else 0
    turns = list(_TURN.finditer(before))
    if len(turns) > 1 and turns[0][1].lower() == "system":
        yield start - len(before) + turns[-1].start(), {"role": "system", "name": None}
    yield start, {"name": None}
    yield len(text) - (len(after) if text.endswith(after) else 0), {}
    yield len(text), {"name": None}


def _cut_rows(text: str, spans: Iterable[tuple[int, Row]], cut: int) -> Iterator[Row]:
    """The parts of a text, cut where its cached part ends."""
    start = 0
    for end, fields in spans:
        for stop, is_cached in ((min(end, cut), True), (end, False)):
            if stop > start:
                yield fields | {"text": text[start:stop], "cached": is_cached}
                start = stop


def _bos(part: Units, tokenizer: ModelTokenizer | None) -> str:
    """The text of the BOS token, if the part begins with it."""
    if tokenizer is None or tokenizer.bos is None or part[:1] != (tokenizer.bos,):
        return ""
    return _decoded((tokenizer.bos,), tokenizer)


def _decoded(part: Ids | str, tokenizer: ModelTokenizer | None) -> str:
    """The text of the tokens, without incomplete characters."""
    if isinstance(part, str) or tokenizer is None:
        return part if isinstance(part, str) else ""
    vocabulary = tokenizer.encoder.vocabulary
    return b"".join([vocabulary[token_id] for token_id in part]).decode("utf-8", "ignore")


def _cut(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows up to `_MAX_CHARS` characters."""
    left = _MAX_CHARS
    for row in rows:
        text = row["text"]
        if text is not None and len(text) > left:
            yield row | {"text": text[:left], "is_cut": True}
            return
        left -= len(text or "")
        yield row
