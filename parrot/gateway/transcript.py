"""Converts conversations to prompts: renders messages with the chat template, and splits the result
into pieces.

    "<|im_start|>user\n"   "Hello"   "<|im_end|>\n<|im_start|>assistant\n"   "Hi!"   "<|im_end|>\n"
     markup                 message   markup                                  answer  markup

The concatenated pieces are exactly the rendered prompt. To separate messages from markup, the
messages are rendered a second time as random marks. So no text of a message is parsed as markup.

Session variables: `{{name}}` in a message stands for a variable's value.

    message   "Join: {{a}}"              the template's output for the marked message
    marked    "Join: <mark of a>"        "<|im_start|>user\\nJoin: <mark of a><|im_end|>..."
    pieces                               "<|im_start|>user\\n" "Join: " variable a "<|im_end|>..."

The values need not exist yet, because the template never receives them. Values are plain text
between the pieces, so they are not parsed as markup either.

A server behind an engine may render conversations itself, with the model's own template. ServeCore
then uses a stand-in text for the prompt, which the model never receives. Stand-ins have equal
pieces exactly if the conversations are equal. So contexts, continued turns and results are found
as for other prompts.

    {"tools": [...]}                        the options for the server
    {"role": "user"}                        each message: its other fields, then its text
    Is it raining?
    {"type":"image_url","sha256":"..."}     each image, audio or file of a message
    {"role": "assistant"}
    <answer>

The answers of such servers have one form, independent of the model's markup: reasoning between
`<think>` and `</think>`, text, and each call as
`<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import orjson

from parrot.gateway.described_messages import describe
from parrot.gateway.tool_calls import are_described
from parrot.protocol.call_grammar import CallRules
from parrot.protocol.errors import InvalidRequest, PromptTooLong, UnsupportedField
from parrot.protocol.template import TemplateText, parse_template, placeholder
from parrot.serve.graph.nodes import (
    Piece,
    PieceKind,
    SemanticVariable,
    TextPiece,
    VariablePiece,
)
from parrot.serve.prompts.encode import ModelTokenizer, require_chars
from parrot.serve.prompts.templates import PLAIN_CHAT, ModelTemplate, sentinel

_PART = 2048  # Shortest part of a split text, in characters. Shorter parts share more prefixes.
_DIGEST_LEN = 64  # Characters of a SHA-256 in hexadecimal.
# Messages, and characters. A longer conversation is rendered in a thread.
_LONG, _LONG_CHARS = 100, 2**20
_MAX_CHARS = 2**23  # Characters of a prompt. No model accepts two million tokens.
Body = dict[str, Any]
"""The fields of a chat completion request that contain the conversation and the tools."""
_TEXT_FIELDS = frozenset({"content", "tool_calls", "reasoning_content"})  # Their texts are pieces.

Message = Mapping[str, Any]
"""A message in the form that chat templates expect: `role`, `content`, and perhaps `tool_calls`,
`name`, ..."""
Ends = list[tuple[int, PieceKind]]
"""The end of each piece, and its kind."""
FindEnds = Callable[[int, int], Ends]
MAX_PLACEHOLDERS = 256  # Placeholders of variables in a prompt.
_MAX_BRACES = 8192  # Occurrences of `{{` in a prompt that are parsed for placeholders.


class Transcript:
    """A rendered prompt. `find_ends` computes the ends of its pieces when `pieces` is called."""

    def __init__(self, text: str, find_ends: "FindEnds") -> None:
        self.text = text
        self._find_ends = find_ends
        self._last: tuple[tuple[int, int], list[TextPiece]] | None = None

    def pieces(self, start: int = 0, num_known: int = 0) -> list[TextPiece]:
        """The pieces after the first `start` characters. If `num_known`, these characters are the
        prompt of the first `num_known` messages except the last, and that answer as generated. The
        known part is not parsed again. The last result is kept."""
        known = (start, num_known)
        if self._last is not None and self._last[0] == known:
            return self._last[1]
        found: list[TextPiece] = []
        for end, kind in self._find_ends(start, num_known):
            if end > start or not end:
                found.append(TextPiece(self.text[start:end], kind))
                start = end
        self._last = known, found
        return found


def with_system_first(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that accepts one system message, at the start.

    The first system messages are merged. A later one is appended to the user message before it, or
    else to the user message after it. So the prompt of a growing conversation keeps its prefix.

    system A, system B, user C, system D, assistant E, system F, user G
    system A B,         user C D,         assistant E, user F G"""
    placed: list[Message] = []
    is_begun = is_open = (
        False  # begun: a non-system message came; open: the last message takes the next one
    )
    for message in messages:
        is_system = message.get("role") == "system"
        is_begun = is_begun or not is_system
        if not is_begun:
            _append(placed, message, is_joined=bool(placed))
            continue
        shown = {**message, "role": "user"} if is_system else message
        before = placed[-1].get("role") if placed else None
        is_joined = before == "user" == shown.get("role") and (is_system or is_open)
        _append(placed, shown, is_joined=is_joined)
        is_open = is_system and (is_open or not is_joined)
    return placed


def _append(placed: list[Message], message: Message, *, is_joined: bool) -> None:
    """Add the message, or append its text to the last message if `is_joined`."""
    if is_joined:
        text = f"{_text(placed[-1])}\n\n{_text(message)}"
        placed[-1] = {**placed[-1], "content": text}
    else:
        placed.append(message)


def render_transcript(
    template: ModelTemplate,
    messages: Sequence[Message],
    *,
    special_texts: frozenset[str] = frozenset(),
    are_as_sent: bool = True,
    **options: Any,
) -> Transcript:
    """The prompt for the next answer. `options` are the template's other variables, such as
    `tools`. `special_texts` are the texts of the model's special tokens. Unless the messages
    `are_as_sent` one for one, the number of known messages is ignored.

    A template may change messages: strip, quote or shorten them. After any other change, the rest
    of the prompt is one piece of markup, because its texts cannot be attributed to messages.

    Raises `InvalidRequest` if the template rejects the messages, or if text that cannot be
    separated from markup contains a special token's text."""
    whole = template.render(messages, **options)

    def find_ends(start: int, num_known: int) -> Ends:
        found, first = None, num_known - 1  # The last known message may differ from the answer.
        if num_known and are_as_sent:
            marked = _mark(template, messages, options, num_known)
            found = _split_end(whole, marked, messages, start)
        if found is None:
            found, first = _split(whole, _mark(template, messages, options), messages), 0
        ends, separated = found
        if not ends or ends[-1][0] < len(whole):
            ends.append((len(whole), PieceKind.CONSTANT))
        _require_plain(messages, first, separated, options, special_texts)
        return ends

    return Transcript(whole, find_ends)


class _Marked(NamedTuple):
    """The prompt with marks in place of texts, after the known messages. `gaps` is the markup
    around the marks, one more than marks. `shown` has the index of each mark's message."""

    gaps: Sequence[str]
    shown: Sequence[int]


def _mark(
    template: ModelTemplate,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    num_known: int = 0,
) -> _Marked:
    mark = sentinel()
    marked = template.render(
        [
            *_mark_known(mark, messages[:num_known]),
            *[
                {**m, "content": f"{mark}{i}m"} if _text(m) else m
                for i, m in enumerate(messages[num_known:], num_known)
            ],
        ],
        **options,
    )
    if num_known:
        marked = _after_known(mark, marked)
    first, *behind = marked.split(mark)
    parts = [part.partition("m") for part in behind]
    return _Marked([first, *[gap for _, _, gap in parts]], [int(index) for index, _, _ in parts])


def _after_known(mark: str, marked: str) -> str:
    """The marked prompt after the known messages; empty if a new message precedes a known one."""
    known = f"{mark}-1m"
    before, _, behind = marked.rpartition(known)
    return "" if before.count(mark) > before.count(known) else behind


def _mark_known(mark: str, messages: Sequence[Message]) -> Iterator[Message]:
    """Known messages with the same mark. Most are then equal and are created once per role."""
    plain: dict[Any, Message] = {}
    for message in messages:
        if len(message) > 2 or not _text(message):
            yield {**message, "content": f"{mark}-1m"} if _text(message) else message
            continue
        role = message.get("role")
        if role not in plain:
            plain[role] = {**message, "content": f"{mark}-1m"}
        yield plain[role]


def _split(whole: str, marked: _Marked, messages: Sequence[Message]) -> tuple[Ends, set[int]]:
    """The ends of the pieces up to the last message that can be separated from markup, and the
    indices of these messages."""
    gaps, shown = marked
    ends: Ends = []
    separated: set[int] = set()
    if len(set(shown)) < len(shown):
        return ends, separated  # The template shows a message twice.
    end = 0
    for i, before, after in zip(shown, gaps, gaps[1:], strict=False):
        start = end + len(before)
        text = _shown(whole, start, _text(messages[i]), after, is_last=i == shown[-1])
        if not whole.startswith(before, end) or text is None:
            break
        end = start + len(text)
        if before:
            ends.append((start, PieceKind.CONSTANT))
        if text:
            ends.append((end, _kind(messages[i])))
        separated.add(i)
    return ends, separated


def _split_end(
    whole: str, marked: _Marked, messages: Sequence[Message], begin: int
) -> tuple[Ends, set[int]] | None:
    """Like `_split`, for the prompt after `begin`, which contains all new messages, from its end
    backwards. None if one of them cannot be separated from markup."""
    gaps, shown = marked
    stop, new = len(whole) - len(gaps[-1]), set(shown)
    if not (new and shown == sorted(new) and gaps[-1] and whole.endswith(gaps[-1])):
        return None
    ends: Ends = [(len(whole), PieceKind.CONSTANT)]
    for at in range(len(shown) - 1, -1, -1):
        message, before = messages[shown[at]], gaps[at]
        for form in _forms(_text(message)):
            start, gap = stop - len(form), before
            if at == 0 and 0 <= start - begin <= len(gap):
                gap = gap[len(gap) - (start - begin) :]  # The gap may begin before `begin`.
            if start - len(gap) >= begin and whole.endswith(gap + form, begin, stop):
                break
        else:
            return None
        if form:
            ends.append((stop, _kind(message)))
        if gap:
            ends.append((start, PieceKind.CONSTANT))
        stop = start - len(gap)
    return (ends[::-1], new) if stop == begin else None


def _kind(message: Message) -> PieceKind:
    return PieceKind.OUTPUT if message.get("role") == "assistant" else PieceKind.VALUE


def _shown(whole: str, start: int, text: str, gap: str, *, is_last: bool) -> str | None:
    """The form in which a message's text stands at `start`, before the markup `gap`."""
    for form in _forms(text):
        stop = start + len(form)
        if whole.startswith(form, start) and (
            whole[stop:] == gap if is_last else whole.startswith(gap, stop)
        ):
            return form
    return None


def _forms(text: str) -> Iterator[str]:
    yield text
    yield text.strip()
    yield text.lstrip()
    yield text.rstrip()
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield text.rpartition("</think>")[2].lstrip("\n")


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _require_plain(
    messages: Sequence[Message],
    first: int,
    separated: set[int],
    options: Mapping[str, Any],
    special_texts: frozenset[str],
) -> None:
    """Check the texts that cannot be separated from markup, of messages from `first` on, for
    special tokens."""
    unseparated = [
        {k: v for k, v in message.items() if k != "content" or i not in separated}
        for i, message in enumerate(messages[first:], first)
    ]
    # JSON escapes each character separately, so a substring is also a substring in JSON.
    if special_texts and _special(special_texts).search(orjson.dumps([options, unseparated])):
        for text in (*_strings(options), *_strings(unseparated)):
            _require_no_special(text, special_texts)


@lru_cache(maxsize=64)
def _special(texts: frozenset[str]) -> re.Pattern[bytes]:
    """Finds any of the texts in JSON."""
    return re.compile(b"|".join(re.escape(orjson.dumps(text)[1:-1]) for text in sorted(texts)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _require_no_special(text: str, special_texts: frozenset[str]) -> None:
    for special in special_texts:
        if special in text:
            raise InvalidRequest(
                f"`{special}` is a special token of the model and is not allowed here, because the "
                "chat template's own could not be distinguished",
                param="messages",
            )


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A prompt with marks in place of placeholders."""

    prompt: Sequence[Message] | str
    places: Counter[str]  # number of placeholders by name
    names: Mapping[str, str]  # by mark


def mark_placeholders(prompt: Sequence[Message] | str, names: Sequence[str]) -> MarkedPrompt:
    """The prompt with a random mark for each placeholder with one of these names. Other text in
    braces stays. Raises `InvalidRequest` for a name without a placeholder, and for more than
    `MAX_PLACEHOLDERS`."""
    contents = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    if names and sum(c.count("{{") for c in contents if isinstance(c, str)) > _MAX_BRACES:
        raise InvalidRequest(
            f"the prompt has more than {_MAX_BRACES} `{{{{`", param="parrot.inputs"
        )
    # The mark contains a quote: a template that quotes or escapes messages changes the mark.
    marks = {name: f'{sentinel()}"m' for name in names}
    places: Counter[str] = Counter()

    def marked(text: str) -> str:
        if not marks:
            return text
        parts = []
        for piece in parse_template(text):
            if isinstance(piece, TemplateText):
                parts.append(piece.text)
            elif piece.name in marks:
                places[piece.name] += 1
                parts.append(marks[piece.name])
            else:
                parts.append(placeholder(piece.name))
        return "".join(parts)

    new_prompt: Sequence[Message] | str
    if isinstance(prompt, str):
        new_prompt = marked(prompt)
    else:
        new_prompt = [
            {**message, "content": marked(content)}
            if isinstance(content := message.get("content"), str)
            else message
            for message in prompt
        ]
    for name in names:
        if name not in places:
            param = f"parrot.inputs.{name}"
            raise InvalidRequest(f"no message has a placeholder `{name}`", param=param)
    if places.total() > MAX_PLACEHOLDERS:
        raise InvalidRequest(f"more than {MAX_PLACEHOLDERS} placeholders", param="parrot.inputs")
    return MarkedPrompt(new_prompt, places, {mark: name for name, mark in marks.items()})


def put_variables(
    pieces: Sequence[TextPiece], marked: MarkedPrompt, variables: Mapping[str, SemanticVariable]
) -> list[Piece]:
    """The pieces of the marked prompt, with variables in place of marks. Raises `InvalidRequest` if
    the chat template has changed or dropped a mark."""
    pattern = re.compile("|".join(map(re.escape, marked.names)) or r"(?!)")
    places: Counter[str] = Counter()
    placed: list[Piece] = []
    for piece in pieces:
        end = 0
        for match in pattern.finditer(piece.text):
            if match.start() > end:
                placed.append(TextPiece(piece.text[end : match.start()], piece.kind))
            name = marked.names[match[0]]
            places[name] += 1
            placed.append(VariablePiece(variables[name]))
            end = match.end()
        if end < len(piece.text):
            placed.append(TextPiece(piece.text[end:], piece.kind) if end else piece)
    for name, count in marked.places.items():
        if places[name] != count:
            raise InvalidRequest(
                f"the model's chat template changes or drops the message with `{name}`",
                param=f"parrot.inputs.{name}",
            )
    return placed


def transcript_of(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> Transcript:
    """The prompt of a plain text, or of messages that the chat template renders with `options`.
    Raises `UnsupportedField` if the model has no chat template, `PromptTooLong` for more than
    `_MAX_CHARS` characters, and `InvalidRequest`."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    num_chars = sum([len(text) for text in texts if isinstance(text, str)])
    if num_chars > _MAX_CHARS:
        raise PromptTooLong(f"the prompt has {num_chars} characters; the limit is {_MAX_CHARS}")
    if isinstance(prompt, str):
        ends = [(end, PieceKind.CONSTANT) for end in _part_ends(prompt)]
        return Transcript(prompt, lambda *_: ends)
    if tokenizer is None:
        return render_transcript(PLAIN_CHAT, prompt)
    if tokenizer.chat is None:
        raise UnsupportedField(f"model `{model}` has no chat template", param="model")
    chat, special = tokenizer.chat, tokenizer.encoder.special_texts
    given, are_as_sent = prompt, True
    if _has_tools(prompt, options) and are_described(tokenizer):
        tools = options.get("tools", ())
        given, are_as_sent = describe(prompt, tools, takes_system=chat.takes_system)
        options = {name: value for name, value in options.items() if name != "tools"}
    shown = given if chat.takes_system_anywhere else with_system_first(given)
    return render_transcript(
        chat,
        shown,
        special_texts=special,
        are_as_sent=are_as_sent and len(shown) == len(given),
        **options,
    )


def needs_thread(prompt: Sequence[Message] | str, tokenizer: ModelTokenizer | None) -> bool:
    """Whether the prompt must be rendered in a thread: it is long, or its chat template is slow.
    Images, audio and files are hashed, which takes 1 ms per MiB."""
    if isinstance(prompt, str):
        return False
    if tokenizer is not None and tokenizer.chat is not None and tokenizer.chat.is_slow:
        return True
    if len(prompt) > _LONG:
        return True
    texts = [message.get("content") for message in prompt]
    if any(isinstance(text, list) for text in texts):
        return True
    return sum([len(text) for text in texts if isinstance(text, str)]) > _LONG_CHARS


def _has_tools(messages: Sequence[Message], options: Mapping[str, Any]) -> bool:
    """Whether the conversation contains tools, calls or results."""
    return "tools" in options or any(
        m.get("tool_calls") or m.get("role") == "tool" for m in messages
    )


def require_fits(prompt: str, tokenizer: ModelTokenizer | None, limit: int | None) -> None:
    """Raise `PromptTooLong` if the prompt cannot fit into `limit` tokens (None: no limit)."""
    if limit is not None:
        require_chars(len(prompt), tokenizer, limit)


def _part_ends(text: str) -> Iterator[int]:
    """Where a long text is split at line ends, so that prompts with the same start share KV. The
    parts encode to the same tokens as the whole text."""
    at = text.find("\n", _PART)
    while 0 <= at < len(text) - 1:
        # All tokenizers end a token after such a newline.
        is_end = at > 0 and text[at + 1].isalnum() and not text[at - 1].isspace()
        if is_end:
            yield at + 1
        at = text.find("\n", at + 1 + is_end * _PART)
    yield len(text)


def served_body(
    messages: Sequence[Message], options: Mapping[str, Any], rules: CallRules | None
) -> Body:
    """The request body for a server that renders messages itself. `options`: as for templates."""
    others = {name: value for name, value in options.items() if name != "tools"}
    body: Body = {"messages": [_served(message) for message in messages]}
    if "reasoning_effort" in others:
        body["reasoning_effort"] = others["reasoning_effort"]
    if others:
        body["chat_template_kwargs"] = others
    functions = () if rules is None else rules.functions
    if tools := options.get("tools"):
        strict = {function["name"] for function in functions if function.get("strict")}
        body["tools"] = [_strict(tool, strict) for tool in tools]
    if rules is not None:
        body["tool_choice"] = _choice(rules)
        if not rules.may_call_many:
            body["parallel_tool_calls"] = False
    return body


def hashed_media(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with a hash in place of each part that is not text. Equal parts have equal
    hashes."""
    if all(isinstance(message.get("content"), str) for message in messages):
        return messages
    return [
        {**message, "content": list(map(_hashed, content))}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _hashed(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] == "text":
        return part
    written = orjson.dumps(_digested(part), option=orjson.OPT_SORT_KEYS)
    return {"type": part["type"], "sha256": sha256(written).hexdigest()}


def _digested(value: Any) -> Any:
    """The value with a digest in place of each string of at least 64 characters, which is the
    length of a digest. Digests release Python's lock, and writing JSON does not."""
    if isinstance(value, str):
        return value if len(value) < _DIGEST_LEN else sha256(_encoded(value)).hexdigest()
    if isinstance(value, Mapping):
        return {name: _digested(one) for name, one in value.items()}
    return list(map(_digested, value)) if isinstance(value, list) else value


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def served_transcript(messages: Sequence[Message], body: Body) -> Transcript:
    """The stand-in for the prompt of this body. `messages`: those of `hashed_media`."""
    begin = {name: value for name, value in body.items() if name != "messages"}
    markup, parts, ends = f"{_line(begin)}\n", list[str](), list[tuple[int, PieceKind]]()
    length = 0
    for message in (*messages, {"role": "assistant"}):
        markup += f"{_line({k: v for k, v in message.items() if k not in _TEXT_FIELDS})}\n"
        is_answer = message.get("role") == "assistant"
        kind = PieceKind.OUTPUT if is_answer else PieceKind.VALUE
        for part, of_kind in ((markup, PieceKind.CONSTANT), *_standin_pieces(message, kind)):
            if part:
                parts.append(part)
                length += len(part)
                ends.append((length, of_kind))
        markup = "\n"
    return Transcript("".join(parts), lambda start, num_known: ends)


def _standin_pieces(message: Message, kind: PieceKind) -> Iterator[tuple[str, PieceKind]]:
    """The texts of a message in the stand-in, with the hash of each other part."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if part["type"] == "text":
                yield part["text"], kind
            else:
                yield f"{_line(part)}\n", PieceKind.CONSTANT
        content = ""
    yield _standin_text(message, content or ""), kind


def _standin_text(message: Message, content: str) -> str:
    """The text of a message in the stand-in. An answer includes its reasoning and calls."""
    said = content
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = _line({"name": function["name"], "arguments": function["arguments"]})
        said += f"\n<tool_call>\n{shown}\n</tool_call>"
    if reasoning := message.get("reasoning_content"):
        said = f"<think>\n{reasoning}\n</think>\n\n{said}"
    return said


def _served(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_served_call(call) for call in calls]}


def _served_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _line(function["arguments"])}}


def _strict(tool: Mapping[str, Any], strict: set[str]) -> Mapping[str, Any]:
    function = tool.get("function", {})
    if function.get("name") not in strict:
        return tool
    return {**tool, "function": {**function, "strict": True}}


def _choice(rules: CallRules) -> str | Mapping[str, Any]:
    if not rules.must_call:
        return "auto"
    if len(rules.functions) > 1:
        return "required"
    return {"type": "function", "function": {"name": rules.functions[0]["name"]}}


def _line(value: Any) -> str:
    return orjson.dumps(value).decode()
