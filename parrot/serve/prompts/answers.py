"""What an answer says: text, and calls of tools in the markup that its model was trained to write.

    "I will look.\\n<tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>"
     TextDelta                   ToolCall(name="look", arguments='{"at": "sky"}')

Answers are read as they come. No character is lost: what looks like a call and is none is text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from parrot.serve.prompts.call_grammars import CallMarkup
from parrot.utils.ids import new_token

_MAX_CALL = 2**20  # characters; a longer one is text


class TextDelta(NamedTuple):
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def message(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.name, "arguments": orjson.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


Event = TextDelta | ToolCall


@dataclass(slots=True)
class Answer:
    """All that an answer says."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, ToolCall):
            self.calls.append(event)
        else:
            self.text += event.text

    def message(self) -> dict[str, Any]:
        """The answer as chat templates take it."""
        fields: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            fields["tool_calls"] = [call.message() for call in self.calls]
        return fields


class AnswerParser(Protocol):
    def feed(self, text: str) -> Iterator[Event]:
        """Some more of the answer. Text is held back while it may become a call."""

    def finish(self) -> Iterator[Event]:
        """The answer has ended: whatever was held back."""


class PlainParser:
    """For answers that call no tools."""

    def feed(self, text: str) -> Iterator[Event]:
        yield TextDelta(text)

    def finish(self) -> Iterator[Event]:
        return iter(())


class FirstCallParser:
    """For answers that may call one tool only: further calls are dropped."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_called = False

    def feed(self, text: str) -> Iterator[Event]:
        return self._first(self._parser.feed(text))

    def finish(self) -> Iterator[Event]:
        return self._first(self._parser.finish())

    def _first(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, ToolCall):
                if self._has_called:
                    continue
                self._has_called = True
            yield event


class TaggedParser:
    """Calls between two tags. White space around them is markup."""

    def __init__(
        self, begin: str, end: str, read: Callable[[str], Sequence[ToolCall] | None]
    ) -> None:
        """`read` finds the calls in what stands between the tags; None if it is something else. An
        empty `end` stands for the answer's end."""
        self._begin = begin
        self._end = end
        self._read = read
        self._held = ""
        self._gap = ""  # white space before the tag that was found
        self._is_inside = False
        self._follows_call = False

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        while True:
            if not self._is_inside:
                if self._follows_call:
                    self._held = self._held.lstrip()
                    self._follows_call = not self._held
                before, found, after = self._held.partition(self._begin)
                if not found:
                    yield from self._release(self._num_safe())
                    return
                if shown := before.rstrip():
                    yield TextDelta(shown)
                self._gap, self._held, self._is_inside = before[len(shown) :], after, True
            inner, found, after = self._held.partition(self._end) if self._end else ("", "", "")
            if not found:
                if len(self._held) > _MAX_CALL:
                    yield from self.finish()
                return
            self._held, self._is_inside = after, False
            yield from self._call(inner, self._end)

    def finish(self) -> Iterator[Event]:
        held, is_inside = self._held, self._is_inside
        self._held, self._is_inside = "", False
        if is_inside:
            yield from self._call(held, "")
        elif held:
            yield TextDelta(held)

    def _call(self, inner: str, end: str) -> Iterator[Event]:
        calls = self._read(inner)
        if calls is None:
            yield TextDelta(f"{self._gap}{self._begin}{inner}{end}")
        else:
            self._follows_call = True
            yield from calls

    def _num_safe(self) -> int:
        """The characters that no tag can make part of a call: white space may stand before one."""
        held = self._held
        for size in range(min(len(held), len(self._begin) - 1), 0, -1):
            if held.endswith(self._begin[:size]):
                return len(held[:-size].rstrip())
        return len(held.rstrip())

    def _release(self, size: int) -> Iterator[Event]:
        if size:
            yield TextDelta(self._held[:size])
            self._held = self._held[size:]


class JsonParser:
    """For a call that is the whole answer: a JSON object from the first character on."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        begun = self._held.lstrip()
        if (begun and not begun.startswith("{")) or len(begun) > _MAX_CALL:
            self._is_text = True
        if self._is_text and self._held:
            yield TextDelta(self._held)
            self._held = ""

    def finish(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        if calls := read_calls(held):
            yield from calls
        elif held:
            yield TextDelta(held)


def read_answer(parser: AnswerParser, text: str) -> Answer:
    """An answer that is there as a whole."""
    answer = Answer()
    for event in (*parser.feed(text), *parser.finish()):
        answer.add(event)
    return answer


def read_calls(text: str) -> list[ToolCall] | None:
    """The calls in a JSON object, or in a list of them. Their arguments are called `arguments` or
    `parameters`. None if it is no such thing."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    calls: list[ToolCall] = []
    items = value if isinstance(value, list) else [value]
    for item in items:
        match item:
            case {"name": str(name), "arguments": arguments} | {
                "name": str(name),
                "parameters": arguments,
            }:
                if not isinstance(arguments, dict):
                    return None
                text = orjson.dumps(arguments).decode()
                calls.append(ToolCall(name, text, f"call_{new_token()}"))
            case _:
                return None
    return calls or None


class Family(NamedTuple):
    """How a family of models calls tools. `mark`: a text of their chat templates."""

    mark: str
    make_parser: Callable[[], AnswerParser]
    markup: CallMarkup


_FAMILIES = (
    Family(
        "<tool_call>",
        lambda: TaggedParser("<tool_call>", "</tool_call>", read_calls),
        CallMarkup("<tool_call>", "\n", "\n</tool_call>", repeats=True),
    ),
    Family(
        "[TOOL_CALLS]",
        lambda: TaggedParser("[TOOL_CALLS]", "", read_calls),
        CallMarkup("[TOOL_CALLS]", "[", "]", separator=", "),
    ),
    Family('"parameters": ', JsonParser, CallMarkup("", arguments="parameters")),
)


def tool_family(template: str) -> Family | None:
    """The family of models with this chat template; None if it shows no tools in a form that is
    known."""
    return next((family for family in _FAMILIES if family.mark in template), None)
