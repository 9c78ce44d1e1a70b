"""Parses answers into text, reasoning and tool calls, in the markup of each model family.

    "I will look.\\n<tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>"
     TextDelta                   ToolCall(name="look", arguments='{"at": "sky"}')

Answers are parsed while they are generated. No character is lost: text that looks like a call but
is not valid stays text.

Reasoning is the text between `<think>` and `</think>`, which some models write before an answer.

    "<think>\\nThe sky is up.\\n</think>\\n\\nLook up."
              ReasoningDelta           TextDelta

The chat template shows whether a model reasons. The template may also open the reasoning at the end
of the prompt, or close it there to turn it off."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from parrot.utils.ids import new_token

_MAX_CALL = 2**20  # Characters of a call. A longer one is text.
_BEGIN, _END = "<think>", "</think>"
_EFFORTS_OF_NONE = ("none", "disabled")


class TextDelta(NamedTuple):
    text: str


class ReasoningDelta(NamedTuple):
    """Text of the model's reasoning."""

    reasoning: str


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call. `arguments` is a JSON object, as text; if the call `is_cut`, only its start."""

    name: str
    arguments: str
    id: str
    is_cut: bool = False  # the answer ended inside the call

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "ParsedToolCall":
        """Raises `ValueError` for arguments that are nested too deeply for JSON."""
        try:
            text = orjson.dumps(arguments).decode()
        except TypeError as error:
            raise ValueError(str(error)) from None
        return cls(name, text, f"call_{new_token()}")

    @classmethod
    def cut(cls, name: str, arguments: str) -> "ParsedToolCall":
        return cls(name, arguments, f"call_{new_token()}", is_cut=True)

    def message(self) -> dict[str, Any]:
        """The call in the form that chat templates expect."""
        arguments = self.arguments if self.is_cut else orjson.loads(self.arguments)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


Event = TextDelta | ReasoningDelta | ParsedToolCall


@dataclass(slots=True)
class WholeAnswer:
    """The complete answer."""

    text: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    reasoning: str = ""

    def add(self, event: Event) -> None:
        if isinstance(event, ParsedToolCall):
            self.calls.append(event)
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.reasoning
        else:
            self.text += event.text

    def message(self) -> dict[str, Any]:
        """The answer in the form that chat templates expect."""
        fields: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            fields["tool_calls"] = [call.message() for call in self.calls]
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        return fields


class AnswerParser(Protocol):
    def feed(self, text: str) -> Iterator[Event]:
        """Parse the next text. Text that may become a call is held back."""

    def finish(self) -> Iterator[Event]:
        """The answer has ended: returns the parts of the held text."""


Read = Callable[[str], Sequence[ParsedToolCall] | None]
"""Returns the calls in a text. None or a `ValueError` means that the text is not a call."""


def _calls_in(text: str, read: Read) -> Sequence[ParsedToolCall] | None:
    try:
        return read(text)
    except ValueError:
        return None


class PlainParser:
    """For answers without tools."""

    def feed(self, text: str) -> Iterator[Event]:
        yield TextDelta(text)

    def finish(self) -> Iterator[Event]:
        return iter(())


class FirstCallParser:
    """For answers that may contain one call: later calls are dropped."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_called = False

    def feed(self, text: str) -> Iterator[Event]:
        return self._first(self._parser.feed(text))

    def finish(self) -> Iterator[Event]:
        return self._first(self._parser.finish())

    def _first(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, ParsedToolCall):
                if self._has_called:
                    continue
                self._has_called = True
            yield event


class TaggedParser:
    """Parses calls between two tags. White space around the tags belongs to the markup."""

    def __init__(self, begin: str, end: str, read: Read, read_cut: Read | None = None) -> None:
        """`end` is empty if the call extends to the answer's end. `read_cut` reads a call in which
        the answer ended; None: its start is text."""
        self._begin = begin
        self._end = end
        self._read = read
        self._read_cut = read if read_cut is None else read_cut
        self._held = ""
        self._gap = ""  # white space before the opening tag
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
                    inner, self._held, self._is_inside = self._held, "", False
                    yield from self._call(inner, "")
                return
            self._held, self._is_inside = after, False
            yield from self._call(inner, self._end)

    def finish(self) -> Iterator[Event]:
        held, is_inside = self._held, self._is_inside
        self._held, self._is_inside = "", False
        if is_inside:
            calls = _calls_in(held, self._read) or _calls_in(held, self._read_cut)
            yield from self._found(calls, held, "")
        elif held:
            yield TextDelta(held)

    def _call(self, inner: str, end: str) -> Iterator[Event]:
        return self._found(_calls_in(inner, self._read), inner, end)

    def _found(
        self, calls: Sequence[ParsedToolCall] | None, inner: str, end: str
    ) -> Iterator[Event]:
        if calls is None:
            yield TextDelta(f"{self._gap}{self._begin}{inner}{end}")
        else:
            self._follows_call = True
            yield from calls

    def _num_safe(self) -> int:
        """The number of held characters that are not a tag's start or white space before it."""
        held = self._held
        for size in range(min(len(held), len(self._begin) - 1), 0, -1):
            if held.endswith(self._begin[:size]):
                return len(held[:-size].rstrip())
        return len(held.rstrip())

    def _release(self, size: int) -> Iterator[Event]:
        if size:
            yield TextDelta(self._held[:size])
            self._held = self._held[size:]


class WholeParser:
    """For models whose call is the whole answer, and starts with one of the characters `begins`.
    Other answers go to `other`."""

    def __init__(self, begins: str, read: Read, other: AnswerParser) -> None:
        self._begins = begins
        self._read = read
        self._other = other
        self._held = ""
        self._is_other = False

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        begun = self._held.lstrip()
        if (begun and begun[0] not in self._begins) or len(begun) > _MAX_CALL:
            self._is_other = True
        if self._is_other:
            held, self._held = self._held, ""
            yield from self._other.feed(held)

    def finish(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        if calls := _calls_in(held, self._read):
            yield from calls
        else:
            if held:
                yield from self._other.feed(held)
            yield from self._other.finish()


def read_answer(parser: AnswerParser, text: str) -> WholeAnswer:
    """Parse a finished answer."""
    answer = WholeAnswer()
    for event in (*parser.feed(text), *parser.finish()):
        answer.add(event)
    return answer


class ReasoningParser:
    """Separates reasoning from the text after it, which goes to `answer`. Newlines around the tags
    belong to the markup. Without the opening tag there is no reasoning, unless the prompt has
    opened it (`begins_inside`). Without the closing tag, the whole answer is reasoning."""

    def __init__(self, answer: AnswerParser, *, begins_inside: bool = False) -> None:
        self._answer = answer
        self._begins_inside = begins_inside
        self._held = ""
        self._read: Callable[[], Iterator[Event]] = self._at_begin

    def feed(self, text: str) -> Iterator[Event]:
        self._held += text
        yield from self._read()

    def finish(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        if self._read == self._inside:
            yield from self._reasoned(held.rstrip("\n"))
        elif self._read == self._at_begin and self._begins_inside:
            yield from self._reasoned(held.strip("\n"))
        elif held:
            yield from self._answer.feed(held)
        yield from self._answer.finish()

    def _at_begin(self) -> Iterator[Event]:
        begun = self._held.lstrip()
        if len(begun) < len(_BEGIN) and _BEGIN.startswith(begun):
            return
        if begun.startswith(_BEGIN):
            self._held = begun.removeprefix(_BEGIN)
        elif not self._begins_inside:
            self._read = self._text
            yield from self._text()
            return
        self._read = self._opened
        yield from self._opened()

    def _opened(self) -> Iterator[Event]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._inside
            yield from self._inside()

    def _inside(self) -> Iterator[Event]:
        inner, found, behind = self._held.partition(_END)
        if found:
            self._held, self._read = behind, self._behind
            yield from self._reasoned(inner.rstrip("\n"))
            yield from self._behind()
            return
        sizes = range(min(len(inner), len(_END) - 1), 0, -1)
        size = next((size for size in sizes if inner.endswith(_END[:size])), 0)
        shown = inner[: len(inner) - size].rstrip("\n")
        self._held = inner[len(shown) :]
        yield from self._reasoned(shown)

    def _behind(self) -> Iterator[Event]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._text
            yield from self._text()

    def _text(self) -> Iterator[Event]:
        text, self._held = self._held, ""
        yield from self._answer.feed(text)

    def _reasoned(self, text: str) -> Iterator[Event]:
        if text:
            yield ReasoningDelta(text)


def with_reasoning(
    make_parser: Callable[[], AnswerParser], template: str, prompt: str
) -> Callable[[], AnswerParser]:
    """Add a `ReasoningParser` if the template has reasoning and `prompt` does not close it."""
    end = prompt.rstrip()
    if _END not in template or end.endswith(_END):
        return make_parser
    begins_inside = end.endswith(_BEGIN)
    return lambda: ReasoningParser(make_parser(), begins_inside=begins_inside)


def reasoning_options(effort: str | None) -> Mapping[str, Any]:
    """The template variables that turn reasoning on or off for the requested effort."""
    if effort is None:
        return {}
    thinks = effort not in _EFFORTS_OF_NONE
    return {"enable_thinking": thinks, "thinking": thinks}
